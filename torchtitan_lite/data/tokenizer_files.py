"""The files of a tokenizer: find the one that a run names, read it as a vocabulary, list those that an export needs.

    bytes                        the word: plain bytes, no file
    assets/tokenizer             a folder: its tokenizer.json, tokenizer.model or original/tokenizer.model
    some/where/tokenizer.json    either file itself, under any name; torchtitan v0.1 names its tokenizer.model so

Where a folder holds both, tokenizer.json is read, as torchtitan v0.2 does: it says itself which kind of encoding it
is, while a tokenizer.model beside it is often one for SentencePiece.

Hugging Face's tokenizer.json becomes a vocabulary with the very same ids, or is refused with a reason:

    a byte-level BPE whose pattern is known      tiktoken encodes: vocabulary.py says which
    any other file                               the package `tokenizers` encodes, where it is installed (extra `hf`)

Besides its model, such a file has

    added_tokens    found in a text before anything else; special ones are not, since a text cannot end itself
    post_processor  the token that it puts before a text is BOS
    neighbours      tokenizer_config.json, special_tokens_map.json or config.json name EOS
"""

import hashlib
import json
import os
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lite import REPOSITORY
from torchtitan_lite.config.files import parse_json_object, read_json_object
from torchtitan_lite.config.messages import ConfigError, Problem, show_text
from torchtitan_lite.data.vocabulary import (
    BYTES,
    MAX_TOKEN_BYTES,
    AddedToken,
    NotForTiktoken,
    Vocabulary,
    VocabularyError,
    list_stages,
    make_byte_vocabulary,
    read_content,
    read_model,
    read_normalizer,
    read_pre_tokenizer,
    read_tokenizer_model,
    spell_bytes,
)

try:
    from tokenizers import Tokenizer as PackageTokenizer
except ImportError:
    PackageTokenizer = None

KEY = "model.hf_assets_path"
NAMES = ("tokenizer.json", "tokenizer.model")
REMEDY = (
    "Name a folder with Hugging Face's tokenizer.json (byte-level BPE, as of Llama 3, Qwen or GPT-2) or Llama 3's "
    f"tokenizer.model, or the word {BYTES!r}; assets/tokenizer holds a small one"
)

TOKENIZER_CONFIG = "tokenizer_config.json"
EOS_FILES = (TOKENIZER_CONFIG, "special_tokens_map.json", "config.json")  # the first that names EOS counts
# What transformers reads of a folder.
EXPORTED = (*NAMES[:1], *EOS_FILES[:2], "chat_template.jinja", "generation_config.json")

# Each is a few times what the largest published files have. A file of this size is read in a few seconds.
MAX_BYTES = 2**26
MAX_BYTES_BESIDE = 2**24
MAX_ADDED_TOKENS = 2**17
MAX_ADDED_CHARACTERS = 256  # of one added token


def read_vocabulary(hf_assets_path: str) -> Vocabulary:
    """Read the vocabulary that is named. Raises ConfigError where none is found, or none that can be used."""
    if hf_assets_path == BYTES:
        return make_byte_vocabulary()
    path = find_tokenizer(hf_assets_path)
    if path is None:
        named = Path(hf_assets_path).absolute()
        why = f"{named} holds no {' and no '.join(NAMES)}" if named.is_dir() else f"there is no {named}"
        raise ConfigError([Problem(KEY, hf_assets_path, why, REMEDY)])
    try:
        return read_tokenizer_json(path) if path.suffix == ".json" else read_tokenizer_model(path)
    except VocabularyError as error:
        raise ConfigError([Problem(KEY, hf_assets_path, f"{path}: {show_text(str(error))}", REMEDY)]) from None


def find_tokenizer(hf_assets_path: str) -> Path | None:
    """Return the file that is meant: from the working directory, else from the repository."""
    for folder in (Path.cwd(), REPOSITORY):
        named = folder / hf_assets_path
        in_folder = [*NAMES, "original/tokenizer.model"]  # the last one is where Meta's folders of Llama 3 have it
        is_file = named.name in NAMES or named.is_file()
        for path in [named] if is_file else [named / name for name in in_folder]:
            if os.path.exists(path):  # a pipe or a folder too: its reader says what is wrong with it
                return path
    return None


def describe_for_export(vocabulary: Vocabulary) -> dict[str, object]:
    """Return the arguments of checkpoint.hugging_face.Export that a tokenizer decides.

    `tokenizer_files` is name -> content of the files beside the weights, by which transformers gives the same ids. It
    has no tokenizer of plain bytes: they have no files. It reads tokenizer.model through tiktoken.
    """
    path, files = vocabulary.path, {}
    if path.suffix == ".json":
        beside = [path.with_name(name) for name in EXPORTED[1:]]
        files = {NAMES[0]: path.read_bytes(), **{path.name: path.read_bytes() for path in beside if path.is_file()}}
    elif path != Path(BYTES):
        text_of = {token.id: token.text for token in vocabulary.added}
        plain = dict.fromkeys(("normalized", "lstrip", "rstrip", "single_word"), False)
        config = {  # what transformers does not find in tokenizer.model itself
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": text_of[vocabulary.bos_id],
            "eos_token": text_of[vocabulary.eos_id],
            "add_bos_token": True,
            "clean_up_tokenization_spaces": False,
            "added_tokens_decoder": {
                str(id): {"content": text, "special": True, **plain} for id, text in text_of.items()
            },
        }
        files = {NAMES[1]: path.read_bytes(), TOKENIZER_CONFIG: (json.dumps(config, indent=2) + "\n").encode()}
    return {"bos_id": vocabulary.bos_id, "eos_id": vocabulary.eos_id, "tokenizer_files": files}


# ---------------------------------------------------------------- tokenizer.json


@dataclass(frozen=True)
class Contents:
    """What a tokenizer.json holds."""

    ids: dict[str, int]  # of all tokens, as Hugging Face's library numbers them
    added: list[AddedToken]
    before: list[str]  # tokens that it puts before a text
    after: list[str]
    spellings: dict[str, int]  # character -> byte; none where tokens are spelled as by SentencePiece
    encoding: dict[str, Any]  # fields of Vocabulary: how a text is encoded


def read_tokenizer_json(path: Path) -> Vocabulary:
    """Read a tokenizer.json. Raises VocabularyError that says what is wrong, or which package is missing."""
    content = read_content(path, MAX_BYTES)
    try:
        file = parse_json_object(content)
    except ValueError as error:
        raise VocabularyError(f"it {error}") from None
    try:
        check_limits(file)
        try:
            found = read_for_tiktoken(file)
        except NotForTiktoken as reason:
            found = read_for_package(file, content, reason)
    except (KeyError, TypeError, AttributeError) as error:
        raise VocabularyError(f"it is not laid out as Hugging Face does: {type(error).__name__} {error}") from None
    for token in found.added:
        if token.id != found.ids.get(token.text):
            why = f"Hugging Face's library would give it {found.ids.get(token.text)}"
            raise VocabularyError(f"the added token {token.text!r} has id {token.id!r:.40}, and {why}")
    if len(found.before) > 1 or len(found.after) > 1:
        around = f"{found.before} before a text and {found.after} after it"
        raise VocabularyError(f"it puts {around}: at most one each can be")
    bos_id, eos_id = find_bos_and_eos(path.parent, found.before, found.after, found.ids)
    encoded = {*found.encoding["ranks"].values(), *(token.id for token in found.added)}
    others = {id: token for token, id in found.ids.items() if id not in encoded}
    return Vocabulary(
        path=path,
        identity=hashlib.sha256(content + f"\0{bos_id} {eos_id}".encode()).hexdigest(),
        bos_id=bos_id,
        eos_id=eos_id,
        added=tuple(found.added),
        only_decoded={id: spell_token(token, found.spellings) for id, token in others.items()},
        **found.encoding,
    )


def check_limits(file: dict) -> None:
    """Raises VocabularyError for what cannot be used, or would take long to read, or to search texts for."""
    model, added = file.get("model"), file.get("added_tokens") or []
    if not isinstance(model, dict):
        raise VocabularyError("it has no model")
    if dropout := model.get("dropout"):
        raise VocabularyError(f"its model has dropout = {dropout!r:.80}: the ids of a text would be random")
    if len(added) > MAX_ADDED_TOKENS:
        raise VocabularyError(f"it has {len(added):,} added tokens, and at most {MAX_ADDED_TOKENS:,} can be")
    vocab = model.get("vocab")
    for what, tokens, limit in (
        ("an added token", [entry["content"] for entry in added], MAX_ADDED_CHARACTERS),
        ("a token of its vocab", vocab if isinstance(vocab, dict) else (), MAX_TOKEN_BYTES),
    ):
        if (longest := max(map(len, tokens), default=0)) > limit:
            raise VocabularyError(f"{what} has {longest:,} characters, and at most {limit:,} can be")


def read_for_tiktoken(file: dict) -> Contents:
    """Raises NotForTiktoken, VocabularyError."""
    vocab, ranks = read_model(file["model"])
    nfc, pattern = read_normalizer(file.get("normalizer")), read_pre_tokenizer(file.get("pre_tokenizer"))
    added, ids = read_added_tokens(file.get("added_tokens") or [], vocab)
    for token in added:
        if nfc and token.normalized and not unicodedata.is_normalized("NFC", token.text):
            raise NotForTiktoken(f"the added token {token.text!r} is changed by the normalizer NFC")
    spellings = spell_bytes()
    encoding = {"pattern": pattern, "ranks": {spell_token(token, spellings): id for token, id in ranks.items()}}
    return Contents(ids, added, *read_post_processor(file.get("post_processor")), spellings, {**encoding, "nfc": nfc})


def read_for_package(file: dict, content: bytes, reason: NotForTiktoken) -> Contents:
    """Raises VocabularyError where the package is missing, or cannot read the file."""
    if PackageTokenizer is None:
        raise VocabularyError(f"{reason}. The package `tokenizers` may: it is the extra `hf` (pip install tokenizers)")
    try:
        package = open_package(content)
    except Exception as error:  # the package raises nothing more special
        raise VocabularyError(f"{reason}. The package `tokenizers` cannot read it either: {error}") from None
    added = [AddedToken(raw["content"], raw["id"], bool(raw["special"])) for raw in file.get("added_tokens") or []]
    around = package.encode("a")
    inside = [n for n, sequence in enumerate(around.sequence_ids) if sequence is not None] or [len(around.tokens)]
    before, after = around.tokens[: inside[0]], around.tokens[inside[-1] + 1 :]
    is_byte_level = "ByteLevel" in [stage["type"] for stage in list_stages(file.get("pre_tokenizer"))]
    spellings = spell_bytes() if is_byte_level else {}
    encoding = {"pattern": "", "ranks": {}, "for_package": content}
    return Contents(package.get_vocab(with_added_tokens=True), added, before, after, spellings, encoding)


def open_package(content: bytes) -> Any:
    """Return a `tokenizers.Tokenizer` for which special tokens spelled out in a text are plain text."""
    package = PackageTokenizer.from_buffer(content)
    package.no_truncation()
    package.no_padding()
    package.encode_special_tokens = True
    return package


def spell_token(token: str, spellings: dict[str, int]) -> bytes:
    """Return the bytes of text that a token stands for.

    Without `spellings`, "▁" is a space, and "<0x0A>" a byte, as in SentencePiece. A token with other characters than
    those of `spellings`, as special ones have, is its own text.
    """
    if spellings and spellings.keys() >= set(token):
        return bytes([spellings[character] for character in token])
    if not spellings and re.fullmatch("<0x[0-9a-fA-F]{2}>", token):
        return bytes.fromhex(token[3:5])
    return (token if spellings else token.replace("▁", " ")).encode("utf-8", "surrogatepass")


def read_added_tokens(entries: list[dict], vocab: dict[str, int]) -> tuple[list[AddedToken], dict[str, int]]:
    """Return the added tokens, and the ids of all tokens: Hugging Face's library numbers added ones itself.

    Raises NotForTiktoken, VocabularyError.
    """
    added, ids, seen = [], dict(vocab), set()
    next_id = len(vocab)
    for entry in entries:
        text = entry["content"]
        if not isinstance(text, str) or not text or text in seen:
            raise VocabularyError(f"the added token {text!r:.80} is empty, or there twice")
        seen.add(text)
        ids.setdefault(text, next_id)
        next_id = max(next_id, ids[text] + 1)
        added.append(
            AddedToken(text, entry["id"], special=bool(entry["special"]), normalized=bool(entry["normalized"]))
        )
        for flag in ("single_word", "lstrip", "rstrip"):
            if entry.get(flag) and not entry["special"]:
                raise NotForTiktoken(f"the added token {text!r} has {flag} = true, which is not done here")
    if len(set(ids.values())) < len(ids):
        raise VocabularyError("an added token has the id of another token")
    return added, ids


# ---------------------------------------------------------------- BOS and EOS


def read_post_processor(entry: Any) -> tuple[list[str], list[str]]:
    """Return the tokens put before a text and after it. Raises NotForTiktoken."""
    kind = entry.get("type") if isinstance(entry, dict) else None
    before: list[str] = []
    after: list[str] = []
    if kind == "Sequence":
        for part in entry.get("processors", []):
            outer = read_post_processor(part)
            before, after = outer[0] + before, after + outer[1]
    elif kind == "TemplateProcessing":
        pieces = entry.get("single", [])
        middle = next((n for n, piece in enumerate(pieces) if "Sequence" in piece), len(pieces))
        before = [piece["SpecialToken"]["id"] for piece in pieces[:middle]]
        after = [piece["SpecialToken"]["id"] for piece in pieces[middle + 1 :]]
    elif entry is not None and kind != "ByteLevel":
        raise NotForTiktoken(f"its post-processor {kind or entry!r:.80} is not known here")
    return before, after


def find_bos_and_eos(folder: Path, before: list[str], after: list[str], ids: dict[str, int]) -> tuple[int | None, int]:
    """Return the ids of BOS, which is put before a text, if any, and of EOS, which a file in `folder` names.

    Raises VocabularyError.
    """
    files = {name: read_neighbour(folder / name) for name in EOS_FILES}
    config = files[TOKENIZER_CONFIG]
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
    try:
        return read_json_object(path, MAX_BYTES_BESIDE) if os.path.exists(path) else {}
    except ValueError as error:
        raise VocabularyError(f"{path.name} beside it {error}") from None
