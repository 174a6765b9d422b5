r"""The pre-tokenizer of a tokenizer.json as one regular expression for tiktoken, or the reason why there is none.

A pre-tokenizer cuts a text into words; none of the later joins crosses a cut. The kinds that one pattern can do:

    ByteLevel with use_regex              GPT-2's pattern
    Digits, then that                     the same, with digits by themselves
    Split by a Regex, then ByteLevel      that pattern, if it is one of PUBLISHED
    ByteLevel without use_regex           the whole text is one word

A pattern is a program. A short one can run for hours, overflow the stack of tiktoken's engine (fancy-regex), or mean
something else there than in Hugging Face's (Oniguruma). So none of a file is ever run: it must be one that is written
here, each of which takes every character, and tests compare how the two engines cut by each of them.
"""

from typing import Any

from torchtitan_lite.data.vocabulary import SPLIT_PATTERN, VocabularyError

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Digits cuts first, so that GPT-2's pattern then sees the end of the text before every digit.
DIGITS_PATTERN = r"\p{N}%s|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
WHOLE_TEXT = "(?s:.+)"
FIRST_GPT4 = (  # `?+` and `++` give back nothing of what they took
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
PUBLISHED = {  # the model that has it, for messages -> pattern
    "Llama 3": SPLIT_PATTERN,  # and GPT-4, GLM-4, OLMo 2, SmolLM3
    "Qwen": (  # 1.5 to 3, and StableLM 2, Grok 2
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "Qwen 3.5": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "GPT-4o": (  # and gpt-oss, Llama 4, Phi-4-mini
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "Mistral Nemo": (  # and Mistral's later models
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "Seed-Coder": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}"
        r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "GPT-4 at first": FIRST_GPT4 % "{1,3}",
    "nanochat": FIRST_GPT4 % "{1,2}",
    "Ling": FIRST_GPT4 % "",
}


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
    """Pattern of a Split. As it takes every character, it does not matter whether what it leaves is kept."""
    pattern, behavior = entry.get("pattern"), entry.get("behavior")
    if not isinstance(pattern, dict) or not isinstance(pattern.get("Regex"), str):
        raise VocabularyError(f"its pre-tokenizer Split is not by a Regex: {pattern!r:.80}")
    if behavior != "Isolated" and not (behavior == "Removed" and entry.get("invert")):
        inverted = ", inverted" if entry.get("invert") else ""
        raise VocabularyError(
            f"its pre-tokenizer Split has the behavior {behavior!r}{inverted}; 'Isolated' can be done"
        )
    regex = pattern["Regex"].replace("\r", r"\r").replace("\n", r"\n")  # some files have the characters themselves
    if regex not in PUBLISHED.values():
        why = f"is not one of the known ones, which are those of {', '.join(PUBLISHED)}"
        raise VocabularyError(f"the pattern of its pre-tokenizer, {regex!r:.200}, {why}")
    return regex
