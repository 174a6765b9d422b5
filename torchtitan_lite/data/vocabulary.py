"""What decides the ids of a text, without tiktoken, so that `check` can read it.

    bytes               no file: id 0-255 is that byte, 256 is the first token of a document, 257 the last
    tokenizer.model     as published with Llama 3: a line per token, `<base64 of its bytes> <rank>`; the ids are the
                        ranks, and 256 special tokens follow them
    tokenizer.json      Hugging Face's file, which tokenizer_files.py reads. A byte-level BPE is taken apart here:

        model           vocab and merges, spelled with one printable character per byte ("Ġreturn" is " return")
        pre_tokenizer   how a text is cut into words: a row of PATTERNS
        normalizer      none, or NFC

A pattern is a program: it may run for hours, or mean something else in tiktoken's engine than in Hugging Face's. So
tiktoken runs only the patterns below, which tests compare in both engines; each takes every character.
"""

import hashlib
from base64 import b64decode
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from torchtitan_lite.config.files import read_regular_file

MAX_MODEL_BYTES = 2**24  # of a tokenizer.model; the published ones have a quarter
MAX_TOKEN_BYTES = 1024  # the longest token of a published one is 128 spaces


class VocabularyError(ValueError):
    """A tokenizer that cannot be used: what is wrong, without the file's name."""


@dataclass(frozen=True)
class AddedToken:
    """A token outside byte-pair encoding."""

    text: str
    id: int
    special: bool  # never found in a text; other added tokens are found anywhere
    normalized: bool = False  # searched after the text was normalized, not before


@dataclass(frozen=True)
class Vocabulary:
    path: Path  # of the file; for plain bytes, their name
    identity: str  # a hash that two vocabularies share only if they are equal
    pattern: str  # regular expression that cuts a text into words; text that it does not match is lost
    ranks: dict[bytes, int]  # tokens that tiktoken makes, with their ids: the lowest is joined first
    bos_id: int | None  # first token of every document, unless None
    eos_id: int  # last token of every document
    added: tuple[AddedToken, ...] = ()
    only_decoded: dict[int, bytes] = field(default_factory=dict)  # all tokens that are in neither of the two above
    nfc: bool = False  # a text is put in Unicode's composed form first
    for_package: bytes | None = None  # content of a tokenizer.json that the package `tokenizers` encodes with

    @property
    def vocab_size(self) -> int:
        """The largest id + 1. Some ids below it may have no token."""
        return max(*self.ranks.values(), *(token.id for token in self.added), *self.only_decoded) + 1


# ---------------------------------------------------------------- bytes

BYTES = "bytes"  # the word for model.hf_assets_path


def make_byte_vocabulary() -> Vocabulary:
    """Return the vocabulary of plain bytes."""
    return Vocabulary(
        path=Path(BYTES),
        identity=hashlib.sha256(BYTES.encode()).hexdigest(),
        pattern="(?s:.{1,64})",  # any length would do, since nothing is joined
        ranks={bytes([byte]): byte for byte in range(256)},
        bos_id=256,
        eos_id=257,
        added=(AddedToken("<|begin_of_text|>", 256, special=True), AddedToken("<|end_of_text|>", 257, special=True)),
    )


# ---------------------------------------------------------------- tokenizer.model

# As published with Llama 3: the first alternative that matches takes the next word.
SPLIT_PATTERN = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",  # the end of an English contraction
        r"[^\r\n\p{L}\p{N}]?\p{L}+",  # letters, and one other character before them: " return", "_name"
        r"\p{N}{1,3}",  # up to three digits
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # punctuation, with the line ends after it
        r"\s*[\r\n]+",  # empty lines
        r"\s+(?!\S)",  # spaces, except the last one before a word, which belongs to the word
        r"\s+",
    ]
)

N_SPECIAL_TOKENS = 256

# Llama 3.1's names; Llama 3 has the same ids for those that it uses, and calls numbers 4, 5, 8 and 10 reserved.
NAMED_SPECIAL_TOKENS = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
]
SPECIAL_TOKENS = NAMED_SPECIAL_TOKENS + [
    f"<|reserved_special_token_{n - len(NAMED_SPECIAL_TOKENS) + 2}|>"
    for n in range(len(NAMED_SPECIAL_TOKENS), N_SPECIAL_TOKENS)
]


def read_tokenizer_model(path: Path) -> Vocabulary:
    """Read a tokenizer.model. Raises VocabularyError."""
    content = read_content(path, MAX_MODEL_BYTES)
    ranks = parse_ranks(content)
    return Vocabulary(
        path=path,
        identity=hashlib.sha256(content).hexdigest(),
        pattern=SPLIT_PATTERN,
        ranks=ranks,
        bos_id=len(ranks) + SPECIAL_TOKENS.index("<|begin_of_text|>"),
        eos_id=len(ranks) + SPECIAL_TOKENS.index("<|end_of_text|>"),
        added=tuple(AddedToken(name, len(ranks) + n, special=True) for n, name in enumerate(SPECIAL_TOKENS)),
    )


def parse_ranks(content: bytes) -> dict[bytes, int]:
    """Return the rank of each token of a tokenizer.model. Raises VocabularyError that names the first wrong line."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            spelled, rank = line.split()
            token = b64decode(spelled, validate=True)
            ranks[token] = int(rank)
        except ValueError:
            raise VocabularyError(f"line {number} is not a token in base64 and its rank: {line[:40]!r}") from None
        if len(ranks) != number or int(rank) != number - 1:
            raise VocabularyError(f"line {number} should be a new token of rank {number - 1}: {line[:40]!r}")
        if len(token) > MAX_TOKEN_BYTES:
            raise VocabularyError(
                f"line {number} is a token of {len(token):,} bytes, and at most {MAX_TOKEN_BYTES:,} can be"
            )
    check_bytes(ranks)
    return ranks


def read_content(path: Path, max_bytes: int) -> bytes:
    """Return the bytes of a file. Raises VocabularyError for what is no regular file of at most `max_bytes`."""
    try:
        return read_regular_file(path, max_bytes)
    except ValueError as error:
        raise VocabularyError(f"it {error}") from None


def check_bytes(ranks: dict[bytes, int]) -> None:
    """Raise VocabularyError if not every text could be encoded."""
    if n_missing := sum(bytes([byte]) not in ranks for byte in range(256)):
        raise VocabularyError(f"{n_missing} of the 256 single bytes are no tokens, so not every text could be encoded")


# ---------------------------------------------------------------- the part of a tokenizer.json that tiktoken can do

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PATTERNS = {  # a model that has it -> its pattern
    "GPT-2": GPT2_PATTERN,  # also what ByteLevel cuts by, where it has use_regex
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
}

MAX_ID = 2**24 - 1  # a few times what the largest published vocabularies have
MAX_SQUARES = 4 * 10**7  # of the lengths of all tokens: the time to compare merges with ranks grows with it


class NotForTiktoken(VocabularyError):
    """What tiktoken cannot do exactly, though the file may be sound."""


def read_model(model: dict) -> tuple[dict[str, int], dict[str, int]]:
    """Return the ids of all tokens, and those of the tokens that tiktoken may make: their ranks.

    Raises NotForTiktoken, and VocabularyError where the file is damaged.
    """
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind != "BPE":
        raise NotForTiktoken(f"its model is of type {kind!r}, and tiktoken does only 'BPE'")
    # unk_token and fuse_unk change nothing: with all 256 bytes in the vocabulary, nothing is unknown
    for switch in ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(switch):
            raise NotForTiktoken(f"its model has {switch} = {model[switch]!r:.80}, which tiktoken cannot do")
    vocab, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocab, dict) or not all(type(id) is int and 0 <= id <= MAX_ID for id in vocab.values()):
        raise VocabularyError(f"the vocab of its model does not give each token an id from 0 to {MAX_ID:,}")
    if len(set(vocab.values())) < len(vocab):
        raise VocabularyError("two tokens in the vocab of its model have one id")
    check_bytes({bytes([byte]): vocab[character] for character, byte in spell_bytes().items() if character in vocab})
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges or []]
    for pair in pairs:
        if len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise VocabularyError(f"a merge is not two tokens: {pair!r:.80}")
        if absent := [part for part in (*pair, "".join(pair)) if part not in vocab]:
            raise VocabularyError(f"the merge {' '.join(pair)!r:.80} needs {absent[0]!r:.80}, which its vocab lacks")
    return vocab, choose_ranks(vocab, pairs, whole=bool(model.get("ignore_merges")))


def choose_ranks(vocab: dict[str, int], pairs: list[tuple[str, str]], *, whole: bool) -> dict[str, int]:
    """Return the tokens that tiktoken may make; by their ids it then joins exactly what the merges `pairs` join.

    tiktoken joins any two neighbours that form a token, lowest id first. Hugging Face's library joins listed pairs
    only, first in the list first. They agree where the list is in the order of the ids that it makes, and where
    tiktoken, given the characters of a token alone, joins the last two pieces by a listed pair. (Neighbours x and y in
    a word were joined as if xy stood alone; so if xy is a token, its characters alone come to x y too.) Tokens that
    tiktoken never joins into one piece are left out, unless `whole`: then a word that is a token is never cut
    (`ignore_merges`). Raises NotForTiktoken where the two may differ.
    """
    for earlier, later in pairwise(pairs):
        if vocab["".join(earlier)] > vocab["".join(later)]:
            why = f"{' '.join(later)!r:.80} comes after {' '.join(earlier)!r:.80}"
            raise NotForTiktoken(f"its merges are not in the order of the ids that they make: {why}")
    letters = spell_bytes()
    candidates = vocab if whole else dict.fromkeys(chain(letters, map("".join, pairs)))
    spelled = {token: vocab[token] for token in candidates if token and letters.keys() >= set(token)}
    if sum(len(token) ** 2 for token in spelled) > MAX_SQUARES:
        raise NotForTiktoken("its tokens are so long that comparing merges with ranks would take too long")
    listed, ranks = set(pairs), {}
    for token, id in spelled.items():
        pieces = list(token)
        while len(pieces) > 2:  # join as tiktoken does, except for the last time
            joined = [spelled.get(left + right, MAX_ID + 1) for left, right in pairwise(pieces)]
            lowest = min(joined)
            if lowest > MAX_ID:
                break
            at = joined.index(lowest)
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        if len(pieces) == 2 and tuple(pieces) not in listed:
            raise NotForTiktoken(f"no merge joins {pieces[0]!r:.80} and {pieces[1]!r:.80}, though they form a token")
        if whole or len(pieces) <= 2:
            ranks[token] = id
    return ranks


def spell_bytes() -> dict[str, int]:
    """Return the character of each byte: itself where it can be printed, else the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in sorted(printable)} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def read_normalizer(entry: Any) -> bool:
    """Return whether texts are put in composed form (NFC). Raises NotForTiktoken for any other change."""
    if entry is None:
        return False
    kind = entry.get("type") if isinstance(entry, dict) else None
    if kind == "Sequence":
        return any([read_normalizer(part) for part in entry.get("normalizers", [])])
    if kind != "NFC":
        raise NotForTiktoken(f"its normalizer {kind or entry!r:.80} changes the text, and only 'NFC' is done here")
    return True


def read_pre_tokenizer(entry: Any) -> str:
    """Return the pattern that cuts as a pre-tokenizer does. Raises NotForTiktoken where it is not in the table."""
    stages = list_stages(entry)
    kinds = [stage["type"] for stage in stages]
    byte_level = stages[-1] if stages else {}
    by_gpt2, regex = byte_level.get("use_regex", True), None
    if kinds == ["ByteLevel"] and by_gpt2:
        regex = GPT2_PATTERN
    elif kinds == ["Split", "ByteLevel"] and not by_gpt2:
        # The pattern takes every character, so it does not matter what would become of the rest.
        is_isolated = stages[0].get("behavior") == "Isolated"
        if is_isolated or (stages[0].get("behavior") == "Removed" and stages[0].get("invert")):
            regex = stages[0]["pattern"].get("Regex")
            # Some files have the characters themselves.
            regex = regex.replace("\r", r"\r").replace("\n", r"\n") if isinstance(regex, str) else None
    if regex not in PATTERNS.values() or byte_level.get("add_prefix_space", True):
        cuts = f"({', '.join(kinds) or 'none'}{f', by {regex!r:.200}' if regex else ''})"
        raise NotForTiktoken(f"its pre-tokenizer {cuts} is not one that is known here: {', '.join(PATTERNS)}")
    return regex


def list_stages(entry: Any) -> list[dict]:
    """Return the pre-tokenizers in their order, Sequences taken apart."""
    if entry is None:
        return []
    if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
        raise VocabularyError(f"its pre-tokenizer is not an object with a type: {entry!r:.80}")
    if entry["type"] == "Sequence":
        return [stage for part in entry.get("pretokenizers", []) for stage in list_stages(part)]
    return [entry]
