"""Hugging Face's tokenizer.json as a vocabulary with the very same ids, or a refusal that says why.

    a byte-level BPE whose pattern is known      tiktoken encodes: byte_level_bpe.py says which
    any other file                               the package `tokenizers` encodes, where it is installed (extra `hf`)

Besides its model, a file says:

    added_tokens    found in a text before anything else; special ones are not, since a text cannot end itself
    post_processor  the token that it puts before a text is BOS
    beside it       tokenizer_config.json, special_tokens_map.json or config.json name EOS

Truncation and padding are not part of a vocabulary.
"""

import hashlib
import os
import unicodedata
from pathlib import Path
from typing import Any

from torchtitan_lite.config.files import parse_json_object, read_json_object
from torchtitan_lite.data.byte_level_bpe import (
    NotForTiktoken,
    list_stages,
    read_model,
    read_normalizer,
    read_pre_tokenizer,
    spell_bytes,
)
from torchtitan_lite.data.vocabulary import MAX_TOKEN_BYTES, AddedToken, Vocabulary, VocabularyError, read_content

try:
    from tokenizers import Tokenizer as PackageTokenizer
except ImportError:
    PackageTokenizer = None

EOS_FILES = ("tokenizer_config.json", "special_tokens_map.json", "config.json")  # the first that names EOS counts

# Each is a few times what the largest published files have. A file of this size is read in a few seconds.
MAX_BYTES = 2**26
MAX_BYTES_BESIDE = 2**24
MAX_ADDED_TOKENS = 2**17
MAX_ADDED_CHARACTERS = 256  # of one added token


def read_tokenizer_json(path: Path) -> Vocabulary:
    """Read a tokenizer.json. Raises VocabularyError that says what is wrong, or which package is missing."""
    content = read_content(path, MAX_BYTES)
    try:
        file = parse_json_object(content)
    except ValueError as error:
        raise VocabularyError(f"it {error}") from None
    try:
        if not isinstance(file.get("model"), dict):
            raise VocabularyError("it has no model")
        if dropout := file["model"].get("dropout"):
            raise VocabularyError(f"its model has dropout = {dropout!r:.80}: the ids of a text would be random")
        check_sizes(file)
        try:
            return read_for_tiktoken(path, content, file)
        except NotForTiktoken as reason:
            return read_for_package(path, content, file, reason)
    except (KeyError, TypeError, AttributeError) as error:
        raise VocabularyError(f"it is not laid out as Hugging Face does: {type(error).__name__} {error}") from None


def check_sizes(file: dict) -> None:
    """Raises VocabularyError for what would take long to read, or to search texts for."""
    added = file.get("added_tokens") or []
    if len(added) > MAX_ADDED_TOKENS:
        raise VocabularyError(f"it has {len(added):,} added tokens, and at most {MAX_ADDED_TOKENS:,} can be")
    longest = max((len(entry["content"]) for entry in added), default=0)
    if longest > MAX_ADDED_CHARACTERS:
        why = f"has {longest:,} characters, and at most {MAX_ADDED_CHARACTERS} can be"
        raise VocabularyError(f"an added token {why}")
    vocab = file["model"].get("vocab")
    if isinstance(vocab, dict) and (longest := max(map(len, vocab), default=0)) > MAX_TOKEN_BYTES:
        why = f"has {longest:,} characters, and at most {MAX_TOKEN_BYTES:,} can be"
        raise VocabularyError(f"a token of its vocab {why}")


def read_for_tiktoken(path: Path, content: bytes, file: dict) -> Vocabulary:
    """Raises NotForTiktoken, VocabularyError."""
    vocab, ranks = read_model(file["model"])
    nfc, pattern = read_normalizer(file.get("normalizer")), read_pre_tokenizer(file.get("pre_tokenizer"))
    added = read_added_tokens(file.get("added_tokens") or [], vocab)
    for token in added:
        if nfc and token.normalized and not unicodedata.is_normalized("NFC", token.text):
            raise NotForTiktoken(f"the added token {token.text!r} is changed by the normalizer NFC")
    before, after = read_post_processor(file.get("post_processor"))
    bos_id, eos_id = find_bos_and_eos(path.parent, before, after, vocab | {token.text: token.id for token in added})
    spellings, added_ids = spell_bytes(), {token.id for token in added}
    others = {token: id for token, id in vocab.items() if token not in ranks and id not in added_ids}
    return Vocabulary(
        path=path,
        identity=identify(content, bos_id, eos_id),
        pattern=pattern,
        ranks={spell_token(token, spellings): id for token, id in ranks.items()},
        bos_id=bos_id,
        eos_id=eos_id,
        added=tuple(added),
        only_decoded=tuple((id, spell_token(token, spellings)) for token, id in others.items()),
        nfc=nfc,
    )


def read_for_package(path: Path, content: bytes, file: dict, reason: NotForTiktoken) -> Vocabulary:
    """Raises VocabularyError where the package is missing, cannot read the file, or gives other ids than it says."""
    if PackageTokenizer is None:
        remedy = "The package `tokenizers` may: it is the extra `hf` (pip install tokenizers)"
        raise VocabularyError(f"{reason}. {remedy}")
    try:
        package = open_package(content)
    except Exception as error:  # the package raises nothing more special
        raise VocabularyError(f"{reason}. The package `tokenizers` cannot read it either: {error}") from None
    added = [AddedToken(raw["content"], raw["id"], bool(raw["special"])) for raw in file.get("added_tokens") or []]
    for token in added:
        if (given := package.token_to_id(token.text)) != token.id:
            why = f"has id {token.id}, and the package `tokenizers` would give it {given}"
            raise VocabularyError(f"the added token {token.text!r} {why}")
    ids = package.get_vocab(with_added_tokens=True)
    around = package.encode("a")
    inside = [place for place, sequence in enumerate(around.sequence_ids) if sequence is not None]
    start, stop = (inside[0], inside[-1] + 1) if inside else (len(around.tokens), len(around.tokens))
    before, after = require_one_each(around.tokens[:start], around.tokens[stop:])
    bos_id, eos_id = find_bos_and_eos(path.parent, before, after, ids)
    is_byte_level = "ByteLevel" in [stage["type"] for stage in list_stages(file.get("pre_tokenizer"))]
    spellings, added_ids = spell_bytes() if is_byte_level else {}, {token.id for token in added}
    return Vocabulary(
        path=path,
        identity=identify(content, bos_id, eos_id),
        pattern="",
        ranks={},
        bos_id=bos_id,
        eos_id=eos_id,
        added=tuple(added),
        only_decoded=tuple((id, spell_token(token, spellings)) for token, id in ids.items() if id not in added_ids),
        for_package=content,
    )


def open_package(content: bytes) -> Any:
    """Return a `tokenizers.Tokenizer` for which special tokens spelled out in a text are plain text."""
    package = PackageTokenizer.from_buffer(content)
    package.no_truncation()
    package.no_padding()
    package.encode_special_tokens = True
    return package


def identify(content: bytes, bos_id: int | None, eos_id: int) -> str:
    return hashlib.sha256(content + f"\0{bos_id} {eos_id}".encode()).hexdigest()


def spell_token(token: str, spellings: dict[str, int]) -> bytes:
    """Return the bytes of text that a token stands for.

    `spellings`: character -> byte. Without it, tokens are spelled as by SentencePiece: "▁" is a space, "<0x0A>" a byte.
    A token with other characters than those of `spellings`, as special ones have, is its own text.
    """
    if spellings and spellings.keys() >= set(token):
        return bytes([spellings[character] for character in token])
    if not spellings and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return (token if spellings else token.replace("▁", " ")).encode("utf-8", "surrogatepass")


# ---------------------------------------------------------------- added tokens


def read_added_tokens(entries: Any, vocab: dict[str, int]) -> list[AddedToken]:
    """Return the added tokens. Hugging Face's library numbers them itself, so the ids of the file must agree.

    Raises NotForTiktoken, VocabularyError.
    """
    added: dict[str, AddedToken] = {}
    next_id = len(vocab)
    for entry in entries:
        text, id, special = entry["content"], entry["id"], entry["special"]
        if not isinstance(text, str) or not text or text in added:
            raise VocabularyError(f"the added token {text!r:.80} is empty, or there twice")
        expected = vocab.get(text, next_id)
        if id != expected:
            why = f"Hugging Face's library would give it {expected}"
            raise VocabularyError(f"the added token {text!r} has id {id!r:.40}, and {why}")
        added[text] = AddedToken(text, expected, special=bool(special), normalized=bool(entry["normalized"]))
        next_id = max(next_id, expected + 1)
    if len({token.id for token in added.values()} | set(vocab.values())) < len(vocab.keys() | added.keys()):
        raise VocabularyError("an added token has the id of another token")
    for entry in entries:
        for flag in ("single_word", "lstrip", "rstrip"):
            if entry.get(flag) and not entry["special"]:
                raise NotForTiktoken(f"the added token {entry['content']!r} has {flag} = true, which is not done here")
    return list(added.values())


# ---------------------------------------------------------------- BOS and EOS


def read_post_processor(entry: Any) -> tuple[list[str], list[str]]:
    """Return the tokens put before a text and after it, at most one each. Raises NotForTiktoken, VocabularyError."""
    kind = entry.get("type") if isinstance(entry, dict) else None
    before: list[str] = []
    after: list[str] = []
    if kind == "Sequence":
        for part in entry.get("processors", []):
            outer = read_post_processor(part)
            before, after = outer[0] + before, after + outer[1]
    elif kind == "TemplateProcessing":
        pieces = entry.get("single", [])
        place = next((n for n, piece in enumerate(pieces) if "Sequence" in piece), len(pieces))
        before = [piece["SpecialToken"]["id"] for piece in pieces[:place]]
        after = [piece["SpecialToken"]["id"] for piece in pieces[place + 1 :]]
    elif entry is not None and kind != "ByteLevel":
        raise NotForTiktoken(f"its post-processor {kind or entry!r:.80} is not known here")
    return require_one_each(before, after)


def require_one_each(before: list[str], after: list[str]) -> tuple[list[str], list[str]]:
    if len(before) > 1 or len(after) > 1:
        raise VocabularyError(f"it puts {before} before a text and {after} after it: at most one each can be")
    return before, after


def find_bos_and_eos(folder: Path, before: list[str], after: list[str], ids: dict[str, int]) -> tuple[int | None, int]:
    """Return the ids of BOS, which is put before a text, if any, and of EOS, which a file in `folder` names.

    Raises VocabularyError.
    """
    files = {name: read_neighbour(folder / name) for name in EOS_FILES}
    config = files["tokenizer_config.json"]
    if not before and config.get("add_bos_token") and config.get("bos_token"):
        before = [config["bos_token"]]
    named = [neighbour.get("eos_token", neighbour.get("eos_token_id")) for neighbour in files.values()]
    named = [entry for entry in named if entry is not None] + after
    if not named:
        why = f"no {', '.join(EOS_FILES)} beside it has eos_token or eos_token_id"
        raise VocabularyError(f"nothing says which token ends a document: {why}")
    return (find_token("BOS", before[0], ids) if before else None), find_token("EOS", named[0], ids)


def find_token(role: str, entry: Any, ids: dict[str, int]) -> int:
    """Return the id of a token that is named by its text, an object with it, its id, or a list that starts so."""
    entry = entry[0] if isinstance(entry, list) and entry else entry
    entry = entry.get("content") if isinstance(entry, dict) else entry
    found = ids.get(entry) if isinstance(entry, str) else entry
    if type(found) is not int or found not in ids.values():
        raise VocabularyError(f"its {role} token {entry!r:.80} is not in its vocabulary")
    return found


def read_neighbour(path: Path) -> dict:
    """Read a file beside tokenizer.json; most folders lack one or another. Raises VocabularyError."""
    if not os.path.exists(path):
        return {}
    try:
        return read_json_object(path, MAX_BYTES_BESIDE)
    except ValueError as error:
        raise VocabularyError(f"{path.name} beside it {error}") from None
