"""The pre-tokenizer of a tokenizer.json as one regular expression for tiktoken, or the reason why there is none.

A pre-tokenizer cuts a text into words; none of the later joins crosses a cut. The kinds that one pattern can do:

    ByteLevel with use_regex              GPT-2's pattern
    Digits, then that                     the same, with digits by themselves
    Split by a Regex, then ByteLevel      that pattern: Llama 3, Qwen, GPT-4o and most others
    ByteLevel without use_regex           the whole text is one word

tiktoken and Hugging Face run two different engines (fancy-regex and Oniguruma). What both read in the same way is the
list SAME below; a pattern with anything else is refused. Both have the same Unicode tables: tests compare all
characters.
"""

import re
from typing import Any

from torchtitan_lite.vocabulary.vocabulary import VocabularyError

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Digits cuts first, so that GPT-2's pattern then sees the end of the text before every digit.
DIGITS_PATTERN = r"\p{N}%s|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
WHOLE_TEXT = "(?s:.+)"

PROPERTY = r"\\[pP]\{(?:L[ultmo]?|M[nce]?|N[dlo]?|P[cdseifo]?|S[mcko]?|Z[slp]?|Han)\}"
ESCAPE = r"\\[sSdDrnt]|\\[]\[\\.+*?()|{}^$/\"#&~!%,:;=@_-]"
RANGE = r"[^]\[\\^&~-]-[^]\[\\^&~-]"
CLASS = rf"\[(?:\^|(?!\^))(?:{PROPERTY}|{ESCAPE}|{RANGE}|[^]\[\\&~-]|&(?!&)|~(?!~))+-?\]"
SAME = re.compile(
    "|".join(
        [
            r"\(\?i:'s\|'t\|'re\|'ve\|'m\|'ll\|'d\)|\(\?i:\[sdmt\]\|ll\|ve\|re\)",  # other letters fold differently
            rf"\(\?!(?:{PROPERTY}|{ESCAPE}|{CLASS})\)(?![?*+{{])",
            r"\(\?:|\((?!\?)|\)|\|",
            PROPERTY,
            ESCAPE,
            CLASS,
            r"[?*+][?+]?(?![?*+{])|\{\d+(?:,\d*)?\}(?![?*+{])",
            r"[^]\[\\^$|?*+(){}]",  # a character, or the dot: any but a line end
        ]
    )
)


def read_pre_tokenizer(entry: Any) -> str:
    """Raises VocabularyError where no pattern cuts as this pre-tokenizer does."""
    stages = list_stages(entry)
    if not stages or stages[-1]["type"] != "ByteLevel":
        names = ", ".join(stage["type"] for stage in stages)
        raise VocabularyError(
            f"its pre-tokenizer ({names or 'none'}) does not end with ByteLevel: it is of another kind"
        )
    *cuts, byte_level = stages
    if byte_level.get("add_prefix_space", True):
        raise VocabularyError("its pre-tokenizer ByteLevel puts a space before every text (add_prefix_space)")
    by_gpt2 = byte_level.get("use_regex", True)
    match [stage["type"] for stage in cuts], by_gpt2:
        case [], True:
            return GPT2_PATTERN
        case [], False:
            return WHOLE_TEXT
        case ["Digits"], True:
            return DIGITS_PATTERN % ("" if cuts[0].get("individual_digits") else "+")
        case ["Split"], False:
            return read_split(cuts[0])
    names = ", ".join([stage["type"] for stage in cuts] + ["ByteLevel with use_regex" if by_gpt2 else "ByteLevel"])
    raise VocabularyError(f"its pre-tokenizer cuts one after another ({names}), which a single pattern cannot do")


def list_stages(entry: Any) -> list[dict]:
    """The pre-tokenizers in their order, Sequences taken apart."""
    if entry is None:
        return []
    if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
        raise VocabularyError(f"its pre-tokenizer is not an object with a type: {entry!r:.80}")
    if entry["type"] == "Sequence":
        return [stage for part in entry.get("pretokenizers", []) for stage in list_stages(part)]
    return [entry]


def read_split(entry: dict) -> str:
    """Pattern of a Split, whose matches are words, and so is or is not what lies between two of them."""
    pattern, behavior = entry.get("pattern"), entry.get("behavior")
    if not isinstance(pattern, dict) or not isinstance(pattern.get("Regex"), str):
        raise VocabularyError(f"its pre-tokenizer Split is not by a Regex: {pattern!r:.80}")
    regex = pattern["Regex"]
    check_pattern(regex)
    if behavior == "Isolated":
        return rf"{regex}|(?:(?!{regex})(?s:.))+"  # tiktoken alone would lose what lies between
    if behavior == "Removed" and entry.get("invert"):
        return regex
    inverted = ", inverted" if entry.get("invert") else ""
    raise VocabularyError(f"its pre-tokenizer Split has the behavior {behavior!r}{inverted}; 'Isolated' can be done")


def check_pattern(pattern: str) -> None:
    """Raises VocabularyError where two engines may read `pattern` differently, or it matches what is no word."""
    at = 0
    while at < len(pattern):
        part = SAME.match(pattern, at)
        if not part:
            why = f"from {pattern[at : at + 20]!r} on, tiktoken may read it differently"
            raise VocabularyError(f"the pattern of its pre-tokenizer, {pattern!r}: {why}")
        at = part.end()
    # Python's re knows no \p, and before 3.11 no possessive `++`; neither matters to whether nothing can match.
    plain = re.sub(r"([?*+])\+", r"\1", re.sub(PROPERTY, r"\\w", pattern))
    try:
        matches_nothing = re.compile(plain).fullmatch("") is not None
    except re.error as error:
        why = f"the pattern of its pre-tokenizer, {pattern!r}, is no regular expression: {error}"
        raise VocabularyError(why) from None
    if matches_nothing:
        raise VocabularyError(f"the pattern of its pre-tokenizer, {pattern!r}, also matches where nothing is")
