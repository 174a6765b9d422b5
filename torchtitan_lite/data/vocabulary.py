"""Parse vocabulary files for tiktoken: tokenizer.model, and any tokenizer.json that tiktoken can encode with.

    tokenizer.model    as published with Llama 3: one line per token, `<base64 of its bytes> <rank>`; ids are the ranks,
                       followed by 256 special tokens
    tokenizer.json     Hugging Face's file. A plain byte-level BPE (Llama 3, Qwen, GPT-2) is converted to ranks:

        model           tokens with one printable character per byte ("Ġreturn" is " return"), and merges
        pre_tokenizer   a pattern that cuts a text into words: one of PATTERNS
        normalizer      none, or NFC
        added_tokens    special tokens, and tokens such as "<think>" that are matched before the text is cut

tiktoken merges the two neighbors that form the token with the lowest id; Hugging Face's library applies the first merge
in its list. Both give the same ids if the merges are sorted by the ids that they produce, as in trained files.
"""

from base64 import b64decode
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.config.files import JsonObject, read_json

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_MAP = "special_tokens_map.json"  # older than tokenizer_config.json

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
QWEN_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PATTERNS = (LLAMA3_PATTERN, QWEN_PATTERN, GPT2_PATTERN)

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
    # added tokens that are not special, so they are matched in plain text
    found_in_text: frozenset[str] = frozenset()


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


def read_byte_level_bpe(file: dict) -> BytePairs | None:
    """Convert a plain byte-level BPE to ranks. Return None for any other tokenizer."""
    model = file["model"]
    vocab = model["vocab"]
    normalizer = file.get("normalizer")
    pattern = read_pattern(file.get("pre_tokenizer"))
    if "merges" not in model or pattern not in PATTERNS or not vocab.keys() >= BYTE_OF.keys():
        return None
    if normalizer not in (None, {"type": "NFC"}):
        return None
    added = file.get("added_tokens") or []
    in_text = [token for token in added if not token["special"]]
    for token in in_text:
        if any(map(token.get, ("lstrip", "rstrip", "single_word", "normalized"))):
            return None
    # A merge is "a b" or ["a", "b"]. No token has a space: it is spelled "Ġ".
    made = ["".join(merge).replace(" ", "") for merge in model["merges"]]
    ids = [vocab[token] for token in made]
    if ids != sorted(ids):
        return None
    ranks = {}
    # Without ignore_merges, a token that no merge produces is never used
    for token in vocab if model.get("ignore_merges") else {*BYTE_OF, *made}:
        if BYTE_OF.keys() >= set(token):
            ranks[spell_token(token, is_byte_level=True)] = vocab[token]
    found_in_text = frozenset(token["content"] for token in in_text)
    return BytePairs(ranks, pattern, normalizer is not None, found_in_text)


def read_pattern(pre_tokenizer: dict | None) -> str | None:
    """Return the regular expression that cuts a text into words; None if the pre-tokenizer does anything else."""
    if pre_tokenizer is None:
        return None
    stages = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [stage["type"] for stage in stages]
    if kinds[-1:] != ["ByteLevel"] or stages[-1].get("add_prefix_space", True):
        return None
    if stages[-1].get("use_regex", True):
        return GPT2_PATTERN if len(stages) == 1 else None
    if kinds != ["Split", "ByteLevel"] or stages[0]["behavior"] != "Isolated":
        return None
    regex = stages[0]["pattern"].get("Regex", "")
    # some files contain the unescaped characters
    return regex.replace("\r", r"\r").replace("\n", r"\n")


def find_bos(file: dict) -> str | None:
    """Return the token that the post-processor adds before a text, or None."""
    processor = file.get("post_processor") or {}
    for stage in processor.get("processors", [processor]):
        if stage.get("type") == "TemplateProcessing" and "SpecialToken" in stage["single"][0]:
            return stage["single"][0]["SpecialToken"]["id"]
    return None


def list_configured_tokens(config: JsonObject, known: set[str]) -> list[dict]:
    """Return the tokens of tokenizer_config.json that tokenizer.json does not know."""
    tokens = []
    decoder = config.take("added_tokens_decoder", dict, {})
    for token_id in decoder:
        token = decoder.take(token_id, dict)
        token.take("special", bool)
        if token.take("content", str) not in known:
            tokens.append({**token, "id": int(token_id)})
    return tokens


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


def spell_token(token: str, *, is_byte_level: bool) -> bytes:
    """Return the bytes of a token, which has one character per byte, or is text with SentencePiece's "▁" for spaces."""
    if is_byte_level:
        return bytes(BYTE_OF[character] for character in token if character in BYTE_OF)
    if len(token) == 6 and token.startswith("<0x"):
        return bytes.fromhex(token[3:5])
    return token.replace("▁", " ").encode()


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
