"""Read vocabulary files: tokenizer.model, and the files of a Hugging Face folder beside tokenizer.json.

tokenizer.model    as published with Llama 3: one line per token, `<base64 of its bytes> <rank>`; ids are the ranks,
                   followed by 256 special tokens
tokenizer.json     Hugging Face's file: a model, and added tokens, which are matched before the text is cut.
                   tokenizer_config.json and special_tokens_map.json beside it add more of them
"""

import json
from base64 import b64decode
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from torchtitan_lite.config.files import JsonObject, read_json

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_MAP = "special_tokens_map.json"  # older than tokenizer_config.json
AFFIXES = (
    "continuing_subword_prefix",
    "end_of_word_suffix",
)  # of a token inside or at the end of a word

# The first alternative that matches is the next word.
LLAMA3_PATTERN = "|".join(
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
# Special tokens of Llama 3.1, whose ids follow all other tokens
SPECIAL = ["begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1"]
SPECIAL += [
    "finetune_right_pad_id",
    "step_id",
    "start_header_id",
    "end_header_id",
    "eom_id",
    "eot_id",
    "python_tag",
]
SPECIAL += [f"reserved_special_token_{number}" for number in range(2, 247)]
SPECIAL_TOKENS = [f"<|{name}|>" for name in SPECIAL]


@dataclass(frozen=True)
class BytePairs:
    """A vocabulary in the form that tiktoken needs."""

    ranks: dict[bytes, int]
    pattern: str  # cuts a text into words
    nfc: bool = False  # normalize texts to NFC first


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
        raise ValueError("its ranks are not 0, 1, 2, ..., or one of the 256 bytes is missing")
    return BytePairs(ranks, LLAMA3_PATTERN)


# ---------------------------------------------------------------- tokenizer.json


def find_bos(file: dict) -> str | None:
    """Return the token that the post-processor adds before a text, or None."""
    processor = file.get("post_processor") or {}
    for stage in processor.get("processors", [processor]):
        if stage.get("type") == "TemplateProcessing" and "SpecialToken" in stage["single"][0]:
            return stage["single"][0]["SpecialToken"]["id"]
    return None


def list_added_tokens(file: dict, configs: list[JsonObject], vocab: dict[str, int]) -> list[dict]:
    """Return the added tokens of tokenizer.json and of the configs beside it, as transformers has them.

    As in the package `tokenizers`, an id in the file has no effect: an entry of the vocabulary keeps its id there, and
    others follow the vocabulary. Raises UserError.
    """
    tokens = list(file.get("added_tokens") or [])
    for config in configs:
        decoder = config.take("added_tokens_decoder", dict, {})
        for token_id in sorted(decoder, key=int):
            token = decoder.take(token_id, dict)
            token.take("content", str)
            token.take("special", bool)
            tokens.append(token)
        known = vocab.keys() | {token["content"] for token in tokens}
        named = [name for name in list_special_names(config) if name in known]
        tokens += [{"content": name, "special": True} for name in named]
    added = {}
    free_id = len(vocab)
    for token in filter(itemgetter("content"), tokens):
        name = token["content"]
        earlier = added.get(name)
        if earlier is None:
            earlier = dict.fromkeys(("special", "lstrip", "rstrip", "single_word"), False)
            earlier |= {"normalized": not token["special"], "id": vocab.get(name, free_id)}
            free_id += name not in vocab
        is_special = earlier["special"] or token["special"]
        added[name] = {**earlier, **token, "id": earlier["id"], "special": is_special}
    return list(added.values())


def list_special_names(config: dict) -> list[str]:
    """Return the values of keys such as "pad_token", and of the lists of more special tokens."""
    values = []
    for key, value in config.items():
        if key in ("additional_special_tokens", "extra_special_tokens"):
            values += value.values() if isinstance(value, dict) else value or []
        elif key.endswith("_token"):
            values.append(value)
    names = [value.get("content") if isinstance(value, dict) else value for value in values]
    return [name for name in names if isinstance(name, str)]  # "add_bos_token" is true or false


def find_eos(folder: Path, config: JsonObject, ids: dict[str, int]) -> int:
    """Return the id of eos_token. As in transformers, special_tokens_map.json comes first, unless tokenizer_config.json
    has added_tokens_decoder. Without a name, it is the id that ends a text in transformers' `generate`.

    Raises ValueError.
    """
    files = [read_json(folder / SPECIAL_MAP, may_be_missing=True), config]
    if "added_tokens_decoder" in config:
        files.reverse()
    for file in files:
        eos = file.take("eos_token", str | dict, None)
        if isinstance(eos, dict):
            eos = eos.take("content", str)
        if eos in ids:
            return ids[eos]
        if eos:
            raise ValueError(f"it has no entry {eos!r}, which is the eos_token in the same folder")
    for name in ("generation_config.json", "config.json"):
        file = read_json(folder / name, may_be_missing=True)
        eos_ids = file.take("eos_token_id", int | list, [])
        if eos_ids != []:
            return eos_ids[0] if isinstance(eos_ids, list) else eos_ids
    files = f"{TOKENIZER_CONFIG} and {SPECIAL_MAP}"
    raise ValueError(f"{files} in the same folder have no eos_token, which ends a document")


def spell_vocabulary(file: dict, vocab: dict[str, int]) -> dict[int, bytes] | None:
    """Return id -> bytes of the text. None if the tokens in a row are not the text, as with the "##" of WordPiece."""
    decoder = json.dumps(file.get("decoder"))
    is_byte_level = '"ByteLevel"' in json.dumps(file.get("pre_tokenizer")) + decoder
    is_sentencepiece = r'"\u2581"' in decoder
    if any(map(file["model"].get, AFFIXES)) or not (is_byte_level or is_sentencepiece):
        return None
    spelled = {}
    for token, id in vocab.items():
        if is_byte_level:
            spelled[id] = spell_token(token)
        elif token[:3] == "<0x" and len(token) == 6 and '"ByteFallback"' in decoder:
            spelled[id] = bytes.fromhex(token[3:5])
        else:
            spelled[id] = token.replace("▁", " ").encode()
    return spelled


def spell_token(token: str) -> bytes:
    """Return the bytes of a byte-level token, which has one character per byte."""
    return token.translate(BYTES).encode("latin-1", "ignore")


def spell_bytes() -> dict[str, int]:
    """Return GPT-2's character for each byte: printable bytes map to themselves, others to U+0100, U+0101, ..."""
    byte_of = {}
    n_others = 0
    for byte in range(256):
        character = chr(byte)
        if byte == 0x20 or not character.isprintable():
            character = chr(0x100 + n_others)
            n_others += 1
        byte_of[character] = byte
    return byte_of


BYTE_OF = spell_bytes()
# for str.translate, which removes characters that stand for no byte
BYTES = dict.fromkeys(range(256)) | {ord(character): byte for character, byte in BYTE_OF.items()}
