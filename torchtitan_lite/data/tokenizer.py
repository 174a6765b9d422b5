"""Text to token ids and back, by the vocabulary that `model.hf_assets_path` names.

    tokenizer.model    as published with Llama 3, a token a line: tiktoken encodes
    tokenizer.json     Hugging Face's file, of any model: its package `tokenizers` encodes (the extra `hf`)
    bytes              no file: id 0-255 is that byte, 256 begins a document, 257 ends it

Llama, Qwen and GPT encode byte pairs. A pattern cuts a text into words; each word starts as its UTF-8 bytes, and the
neighbours that form the token of lowest rank are joined until no two neighbours form a token:

    word        ranks: 256 "re", 257 "tu", 258 "retu", 259 "rn"
    r e t u r n  ->  re t u r n  ->  re tu r n  ->  retu r n  ->  retu rn  =  [258, 259]

A special token that is spelled out in a text is plain text: a document cannot end itself. Only `encode_special`, for
conversations, finds it.
"""

import hashlib
import importlib
import json
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import tiktoken

from torchtitan_lite import REPOSITORY
from torchtitan_lite.config.messages import ConfigError, Problem, shorten

KEY = "model.hf_assets_path"
BYTES = "bytes"  # the word for plain bytes
IN_FOLDER = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")  # the first that is there counts
CONFIG = "tokenizer_config.json"
BESIDE = (CONFIG, "special_tokens_map.json", "chat_template.jinja", "generation_config.json")  # exported too
REMEDY = "Name a folder with tokenizer.json or Llama 3's tokenizer.model; assets/tokenizer holds a small one"

# tiktoken's regular expression overflows its stack on a longer run of spaces. Llama 3's own code cuts at this length.
MAX_CHARACTERS = 400_000

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
NAMED_SPECIAL_TOKENS = {  # of Llama 3.1: number -> name; all others are reserved
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    4: "<|finetune_right_pad_id|>",
    5: "<|step_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary with the library that encodes by it."""

    path: Path  # of the file; for plain bytes, their name
    identity: str  # a hash that two tokenizers share only if they give equal ids
    bos_id: int | None  # first token of every document, unless None
    eos_id: int  # last token of every document
    special: dict[str, int]  # tokens that no text has, by their names
    bytes_of_id: dict[int, bytes]  # the text that each token stands for, special ones by their names
    encode_text: Callable[[str], list[int]]
    # The same, and finds special tokens. Also returns the character of the text at which each token starts.
    encode_special: Callable[[str], tuple[list[int], list[int]]]

    @cached_property
    def vocab_size(self) -> int:
        """The largest id + 1: the embedding needs at least as many rows."""
        return max(self.bytes_of_id) + 1

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Return the ids of `text`, in which special tokens are plain text."""
        before = [self.bos_id] if bos and self.bos_id is not None else []
        return before + self.encode_text(text) + [self.eos_id] * eos

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`. Bytes that are not UTF-8 become U+FFFD. Raises KeyError for an unused id."""
        return b"".join(self.bytes_of_id[token_id] for token_id in ids).decode("utf-8", errors="replace")

    def bytes_of_tokens(self) -> list[int]:
        """Return for each id how many bytes of a text it stands for: 0 for special tokens and unused ids."""
        names = set(self.special.values())
        return [0 if id in names else len(self.bytes_of_id.get(id, b"")) for id in range(self.vocab_size)]

    def describe_for_export(self) -> dict[str, object]:
        """Return the arguments of checkpoint.hugging_face.Export that a tokenizer decides.

        `tokenizer_files` is name -> content of the files beside the weights. Plain bytes have none.
        """
        beside = [self.path.with_name(name) for name in BESIDE if self.path.suffix == ".json"]
        files = {path.name: path.read_bytes() for path in (self.path, *beside) if path.is_file()}
        if self.path.suffix == ".model":
            files[CONFIG] = describe_tokenizer_model(self)
        return {"bos_id": self.bos_id, "eos_id": self.eos_id, "tokenizer_files": files}


def load_tokenizer(hf_assets_path: str | Path) -> Tokenizer:
    """Return the tokenizer that is named. Raises ConfigError where there is none, or none that can be used."""
    if str(hf_assets_path) == BYTES:
        return make_byte_tokenizer()
    path, named = find_tokenizer(hf_assets_path), Path(hf_assets_path).absolute()
    if path is None:
        why = f"{named} holds no {' and no '.join(IN_FOLDER[:2])}" if named.is_dir() else f"there is no {named}"
        raise ConfigError([Problem(KEY, str(hf_assets_path), why, REMEDY)])
    if path.suffix == ".json" and find_spec("tokenizers") is None:
        why, remedy = f"{path} needs the package tokenizers", "Install the extra `hf`: pip install tokenizers"
        raise ConfigError([Problem(KEY, str(hf_assets_path), why, remedy)])
    try:
        return read_tokenizer_json(path) if path.suffix == ".json" else read_tokenizer_model(path)
    except Exception as error:  # the package raises nothing more special
        why = shorten(f"{path} is no tokenizer: {type(error).__name__} {error}")
        raise ConfigError([Problem(KEY, str(hf_assets_path), why, REMEDY)]) from None


def find_tokenizer(hf_assets_path: str | Path) -> Path | None:
    """Return the file that is meant: from the working directory, else from the repository."""
    for folder in (Path.cwd(), REPOSITORY):
        named = folder / hf_assets_path
        for path in [named, *(named / name for name in IN_FOLDER)]:
            if path.is_file():
                return path
    return None


# ---------------------------------------------------------------- by tiktoken


def make_byte_tokenizer() -> Tokenizer:
    """Return the tokenizer of plain bytes."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    special = {"<|begin_of_text|>": 256, "<|end_of_text|>": 257}
    pattern = "(?s:.{1,64})"  # any length would do, since nothing is joined
    return make_tokenizer(Path(BYTES), BYTES.encode(), ranks, special, pattern)


def read_tokenizer_model(path: Path) -> Tokenizer:
    """Read Llama 3's file: a line per token, `<base64 of its bytes> <rank>`. The special tokens follow them."""
    content = path.read_bytes()
    lines = [line.split() for line in content.splitlines()]
    ranks = {b64decode(token, validate=True): int(rank) for token, rank in lines}
    if sorted(ranks.values()) != list(range(len(lines))) or not all(bytes([n]) in ranks for n in range(256)):
        raise ValueError("its ranks do not count its tokens, or one of the 256 bytes is missing")
    special = {name: len(ranks) + number for number, name in enumerate(name_special_tokens())}
    return make_tokenizer(path, content, ranks, special, SPLIT_PATTERN)


def name_special_tokens() -> list[str]:
    """Return the names of Llama 3's special tokens. Reserved ones are counted, from number 2 on."""
    names = [NAMED_SPECIAL_TOKENS.get(number) for number in range(N_SPECIAL_TOKENS)]
    numbers = iter(range(N_SPECIAL_TOKENS))
    return [name or f"<|reserved_special_token_{next(numbers)}|>" for name in names]


def make_tokenizer(
    path: Path, content: bytes, ranks: dict[bytes, int], special: dict[str, int], pattern: str
) -> Tokenizer:
    encoding = tiktoken.Encoding(path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)

    def encode_text(text: str) -> list[int]:
        pieces = range(0, len(text), MAX_CHARACTERS)
        return [id for start in pieces for id in encoding.encode_ordinary(text[start : start + MAX_CHARACTERS])]

    def encode_special(text: str) -> tuple[list[int], list[int]]:
        ids = encoding.encode(text, allowed_special="all")
        return ids, encoding.decode_with_offsets(ids)[1]

    return Tokenizer(
        path=path,
        identity=hashlib.sha256(content).hexdigest(),
        bos_id=special["<|begin_of_text|>"],
        eos_id=special["<|end_of_text|>"],
        special=special,
        bytes_of_id={id: token for token, id in ranks.items()} | {id: name.encode() for name, id in special.items()},
        encode_text=encode_text,
        encode_special=encode_special,
    )


def describe_tokenizer_model(tokenizer: Tokenizer) -> bytes:
    """Return the tokenizer_config.json by which transformers reads tokenizer.model."""
    flags = dict.fromkeys(("normalized", "lstrip", "rstrip", "single_word"), False)
    added = {str(id): {"content": name, "special": True, **flags} for name, id in tokenizer.special.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|end_of_text|>",
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": added,
    }
    return (json.dumps(config, indent=2) + "\n").encode()


# ---------------------------------------------------------------- by the package `tokenizers`


def read_tokenizer_json(path: Path) -> Tokenizer:
    """Read Hugging Face's file. BOS is the token that it puts before a text; the files beside it name EOS."""
    content = path.read_bytes()
    package = importlib.import_module("tokenizers").Tokenizer.from_buffer(content)  # training may do without it
    package.no_truncation()
    package.no_padding()
    package.encode_special_tokens = True  # their names are plain text
    ids, added = package.get_vocab(with_added_tokens=True), package.get_added_tokens_decoder()
    sample = package.encode("a")
    bos_id = sample.ids[0] if sample.special_tokens_mask[0] else None
    eos_id = find_eos(path, ids)
    is_byte_level = "ByteLevel" in repr(package.decoder)
    bytes_of_id = {id: spell(token, is_byte_level) for token, id in ids.items()}

    def encode_special(text: str) -> tuple[list[int], list[int]]:
        package.encode_special_tokens = False
        found = package.encode(text, add_special_tokens=False)
        package.encode_special_tokens = True
        return found.ids, [start for start, _ in found.offsets]

    return Tokenizer(
        path=path,
        identity=hashlib.sha256(content + f"\0{bos_id} {eos_id}".encode()).hexdigest(),
        bos_id=bos_id,
        eos_id=eos_id,
        special={token.content: id for id, token in added.items() if token.special},
        bytes_of_id=bytes_of_id | {id: token.content.encode() for id, token in added.items()},
        encode_text=lambda text: package.encode(text, add_special_tokens=False).ids,
        encode_special=encode_special,
    )


def find_eos(path: Path, ids: dict[str, int]) -> int:
    """Return the token that ends a document: eos_token of tokenizer_config.json, else eos_token_id of config.json."""
    for name, key in ((CONFIG, "eos_token"), ("config.json", "eos_token_id")):
        found = read_json(path.with_name(name)).get(key)
        found = found[0] if isinstance(found, list) else found
        found = found["content"] if isinstance(found, dict) else found
        if found is not None:
            return ids[found] if isinstance(found, str) else found
    raise ValueError(f"neither {CONFIG} nor config.json beside it says which token ends a document")


def read_json(path: Path) -> dict:
    return json.loads(path.read_bytes()) if path.is_file() else {}


def spell(token: str, is_byte_level: bool) -> bytes:
    """Return the bytes that a token stands for: spelled as in GPT-2, a character each, or as in SentencePiece."""
    if is_byte_level:
        return bytes(BYTE_OF[character] for character in token if character in BYTE_OF)
    if len(token) == 6 and token.startswith("<0x"):
        return bytes.fromhex(token[3:5])
    return token.replace("▁", " ").encode()


def spell_bytes() -> dict[str, int]:
    """Return GPT-2's character for each byte: itself where it can be printed, else the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_OF = spell_bytes()
