"""What decides the ids of a text, without tiktoken, so that `check` can read it; and its two plain kinds.

    bytes               no file: id 0-255 is that byte, 256 is the first token of a document, 257 the last
    tokenizer.model     as published with Llama 3: a line per token, `<base64 of its bytes> <rank>`; the ids are the
                        ranks, and 256 special tokens follow them
    tokenizer.json      Hugging Face's file: tokenizer_files.py reads it

tokenizer_files.py also finds the file that a run names; tokenizer.py encodes with it.
"""

import hashlib
from base64 import b64decode
from dataclasses import dataclass, field
from pathlib import Path

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
