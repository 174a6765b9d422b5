"""Encode text to token ids and decode ids to text, with the vocabulary at `model.hf_assets_path`.

    tokenizer.model    as published with Llama 3: one line per token, `<base64 of its bytes> <rank>`; ids are the ranks,
                       followed by 256 special tokens. Encoded by tiktoken
    tokenizer.json     Hugging Face's file: extensions/tokenizer_json.py
    bytes              no file: ids 0-255 are bytes, 256 starts a document, 257 ends it

Llama, Qwen and GPT use byte-pair encoding. A pattern cuts a text into words. Each word is first split into its UTF-8
bytes. Then the two neighbors that form the token of lowest rank are merged. Merging repeats until no two neighbors form
a token:

    word        ranks: 256 "re", 257 "tu", 258 "retu", 259 "rn"
    r e t u r n  ->  re t u r n  ->  re tu r n  ->  retu r n  ->  retu rn  =  [258, 259]

If a text contains the name of a special token, the name is encoded as plain text, so a document cannot end itself. Only
`encode_special`, for conversations, recognizes special tokens.
"""

import hashlib
import unicodedata
from base64 import b64decode
from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from torchtitan_lite import REPOSITORY
from torchtitan_lite.config.extensions import load_extension, load_module
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.files import refuse_pointer

KEY = "model.hf_assets_path"
TOKENIZER_CONFIG = "tokenizer_config.json"
BYTES = "bytes"  # value of model.hf_assets_path that selects a tokenizer whose tokens are bytes
# the first existing file is used
IN_FOLDER = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")
REMEDY = "Name a folder with tokenizer.json or Llama 3's tokenizer.model; assets/tokenizer contains a small tokenizer"

compose = partial(unicodedata.normalize, "NFC")

# The first alternative that matches is the next word.
LLAMA3_PATTERN = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",  # the end of an English contraction
        # letters, with at most one other character in front: " return", "_name"
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",  # up to three digits
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # punctuation, with the line ends that follow
        r"\s*[\r\n]+",  # empty lines
        r"\s+(?!\S)",  # spaces, except the space just before a word, which belongs to the word
        r"\s+",
    ]
)
# Special tokens of Llama 3.1. The ids of special tokens follow the ids of all other tokens
SPECIAL = ["begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1"]
SPECIAL += (
    "finetune_right_pad_id step_id start_header_id end_header_id eom_id eot_id python_tag".split()
)
SPECIAL += [f"reserved_special_token_{number}" for number in range(2, 247)]
SPECIAL_TOKENS = [f"<|{name}|>" for name in SPECIAL]


@dataclass(frozen=True)
class BytePairs:
    """A vocabulary in the form that tiktoken needs."""

    ranks: dict[bytes, int]
    pattern: str  # cuts a text into words
    nfc: bool = False  # normalize texts to NFC first

    def make_encoders(
        self, added: dict[str, int], in_text: Set[str] = frozenset()
    ) -> tuple[Callable, Callable]:
        """Return Tokenizer.encoders, implemented with tiktoken. See encode_by_tiktoken in encoding.py."""
        return load_module("data.encoding").encode_by_tiktoken(self, added, in_text)


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary, with functions that encode and decode."""

    path: Path  # path of the file, or "bytes"
    fingerprint: str  # hash of the tokenizer: equal hashes give equal ids
    # id of the first token of every document; None if documents have no such token
    bos_id: int | None
    eos_id: int  # last token of every document
    special: dict[str, int]  # name -> id of special tokens, which never come from plain text
    bytes_of_id: dict[int, bytes]  # id -> text of the token; for a special token, its name
    # returns the functions that `encode` and `encode_special` call. Called when the first text is encoded; a run
    # encodes no text
    make_encoders: Callable[[], tuple[Callable, Callable]]
    normalize: Callable[[str], str] = str  # normalization that encode_special applies first
    unknown_id: int | None = None  # id for text that the vocabulary cannot encode
    # decodes ids to text; None if concatenating the bytes of the tokens gives the text
    decode_text: Callable[[list[int]], str] | None = None
    # whether concatenating the bytes of the tokens of a text gives the text
    is_spelled: bool = True

    @cached_property
    def vocab_size(self) -> int:
        """Largest id + 1, which is the minimum number of embedding rows."""
        return max(self.bytes_of_id) + 1

    @cached_property
    def encoders(self) -> tuple[Callable, Callable]:
        return self.make_encoders()

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Return the ids of `text`. Special tokens in the text are encoded as plain text."""
        encode_text, _ = self.encoders
        ids = encode_text(text)
        if bos and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        return [*ids, self.eos_id] if eos else ids

    def encode_special(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids of a normalized text, with special tokens recognized, and where each token ends.

        The end of a token is the index after its last character in the text.
        """
        _, encode_special = self.encoders
        return encode_special(text)

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`. Bytes that are not UTF-8 become U+FFFD. Raises KeyError if an id has no token."""
        if self.decode_text:
            return self.decode_text(ids)
        tokens = [self.bytes_of_id[token_id] for token_id in ids]
        return b"".join(tokens).decode(errors="replace")

    def __reduce__(self) -> tuple:
        """Pickle only the path, because functions cannot be pickled. Unpickling loads the file again."""
        return load_tokenizer, (self.path,)


def load_tokenizer(hf_assets_path: str | Path) -> Tokenizer:
    """Load the tokenizer at a path. Raises ConfigError if the tokenizer is missing or unusable."""
    if str(hf_assets_path) == BYTES:
        return make_byte_tokenizer()
    path = find_tokenizer(hf_assets_path)
    if path is None:
        why = f"there is no {' or '.join(IN_FOLDER[:2])} in {Path(hf_assets_path).absolute()}"
        why = load_extension("hub_names").explain_hub_name(hf_assets_path) or why
        raise ConfigError(Problem(KEY, str(hf_assets_path), why, REMEDY))
    try:
        refuse_pointer(path)
        content = path.read_bytes()
        if path.suffix == ".json":
            return load_extension("tokenizer_json").read_tokenizer_json(path, content)
        return make_llama3_tokenizer(path, content, parse_tokenizer_model(content), SPECIAL_TOKENS)
    except Exception as error:  # the package `tokenizers` raises plain Exception
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        why = f"{path} cannot be used: {kind}{error}"
        raise ConfigError(Problem(KEY, str(hf_assets_path), why, REMEDY)) from None


def find_tokenizer(hf_assets_path: str | Path) -> Path | None:
    """Find the file of a tokenizer, in the working directory first, then in the repository."""
    for folder in (Path.cwd(), REPOSITORY):
        for name in ("", *IN_FOLDER):
            path = folder / hf_assets_path / name
            if path.is_file():
                return path
    return None


# ---------------------------------------------------------------- bytes, and tokenizer.model


def make_byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose tokens are bytes."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    pairs = BytePairs(ranks, pattern="(?s:.{1,64})")  # no two bytes are merged
    return make_llama3_tokenizer(Path(BYTES), BYTES.encode(), pairs, SPECIAL_TOKENS[:2])


def make_llama3_tokenizer(
    path: Path, content: bytes, pairs: BytePairs, names: list[str]
) -> Tokenizer:
    """Return a tokenizer whose special tokens have the ids after all other tokens."""
    special = {name: len(pairs.ranks) + number for number, name in enumerate(names)}
    bytes_of_id = {id: token for token, id in pairs.ranks.items()}
    bytes_of_id |= {id: name.encode() for name, id in special.items()}
    return Tokenizer(
        path=path,
        fingerprint=hashlib.sha256(content).hexdigest(),
        bos_id=special["<|begin_of_text|>"],
        eos_id=special["<|end_of_text|>"],
        special=special,
        bytes_of_id=bytes_of_id,
        make_encoders=partial(pairs.make_encoders, special),
    )


def parse_tokenizer_model(content: bytes) -> BytePairs:
    """Parse Llama 3's tokenizer.model. Raises ValueError."""
    if b"\0" in content:
        why = "it is a SentencePiece model, not Llama 3's list of base64 tokens"
        command = "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        remedy = "Use the tokenizer.json of the same model (extra `hf`); transformers writes it"
        raise ValueError(f"{why}. {remedy}: {command}")
    lines = [line.split() for line in content.splitlines()]
    ranks = {b64decode(token, validate=True): int(rank) for token, rank in lines}
    single_bytes = {bytes([n]) for n in range(256)}
    if sorted(ranks.values()) != list(range(len(lines))) or not ranks.keys() >= single_bytes:
        raise ValueError(
            "the ranks of its tokens are not 0, 1, 2, ..., or one of the 256 bytes is missing"
        )
    return BytePairs(ranks, LLAMA3_PATTERN)
