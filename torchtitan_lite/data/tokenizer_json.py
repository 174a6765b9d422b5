"""Hugging Face's tokenizer.json, where it holds a byte-level BPE, as a vocabulary for tiktoken with the very same ids.

    model           vocab and merges, spelled with one printable character per byte ("Ġreturn" is " return")
    pre_tokenizer   how a text is cut into words: split_pattern.py
    normalizer      none, or NFC
    added_tokens    found in a text before anything else; special ones are not, for a text cannot end itself
    post_processor  what it puts before a text is BOS
    beside it       tokenizer_config.json, special_tokens_map.json or config.json name EOS

Whatever tiktoken cannot do exactly is refused, by name: another kind of model, a switch that changes ids, merges that
ranks cannot stand for (merges.py). Truncation and padding are not looked at: they are no matter of the vocabulary.
"""

import hashlib
import os
import unicodedata
from itertools import chain
from pathlib import Path
from typing import Any

from torchtitan_lite.config.json_file import parse_json_object, read_json_object
from torchtitan_lite.data.merges import choose_mergeable
from torchtitan_lite.data.split_pattern import read_pre_tokenizer
from torchtitan_lite.data.vocabulary import (
    MOST_TOKEN_BYTES,
    AddedToken,
    Vocabulary,
    VocabularyError,
    check_bytes,
    read_content,
)

EOS_FILES = ("tokenizer_config.json", "special_tokens_map.json", "config.json")  # the first that names it counts

# Each is a few times what the largest published files have. Up to them, a file is read in a few seconds.
MOST_BYTES = 2**26
MOST_BYTES_BESIDE = 2**24
MOST_CHARACTERS = 2 * 10**7  # of all tokens and merges together
MOST_ADDED_TOKENS = 2**17
MOST_ADDED_CHARACTERS = 256  # of one added token
LARGEST_ID = 2**24


def read_tokenizer_json(path: Path) -> Vocabulary:
    """Raises VocabularyError that names what cannot be done exactly."""
    content = read_content(path, MOST_BYTES)
    try:
        return parse_vocabulary(path, content)
    except (KeyError, TypeError, AttributeError) as error:
        raise VocabularyError(f"it is not laid out as Hugging Face does: {type(error).__name__} {error}") from None


def parse_vocabulary(path: Path, content: bytes) -> Vocabulary:
    try:
        file = parse_json_object(content)
    except ValueError as error:
        raise VocabularyError(f"it {error}") from None
    vocab, pairs, whole = read_model(file.get("model"))
    nfc = read_normalizer(file.get("normalizer"))
    added = read_added_tokens(file.get("added_tokens") or [], vocab)
    for token in added:
        if nfc and token.normalized and not unicodedata.is_normalized("NFC", token.text):
            raise VocabularyError(f"the added token {token.text!r} is changed by the normalizer NFC, so no text has it")
    ids = vocab | {token.text: token.id for token in added}
    bos_id, eos_id = find_bos_and_eos(path.parent, file, ids)
    spellings = spell_bytes()
    mergeable = choose_mergeable(vocab, pairs, spellings, whole=whole)
    added_ids = {token.id for token in added}
    return Vocabulary(
        path=path,
        identity=hashlib.sha256(content + f"\0{bos_id} {eos_id}".encode()).hexdigest(),
        pattern=read_pre_tokenizer(file.get("pre_tokenizer")),
        ranks={spell_token(token, spellings): vocab[token] for token in mergeable},
        bos_id=bos_id,
        eos_id=eos_id,
        added=tuple(added),
        unmade=tuple(
            (id, spell_token(token, spellings))
            for token, id in vocab.items()
            if token not in mergeable and id not in added_ids
        ),
        nfc=nfc,
    )


# ---------------------------------------------------------------- model


def read_model(model: Any) -> tuple[dict[str, int], list[tuple[str, str]], bool]:
    """Vocabulary, merges, and whether a word that is a token stays whole."""
    if not isinstance(model, dict):
        raise VocabularyError("it has no model")
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind != "BPE":
        raise VocabularyError(f"its model is of type {kind!r}, and only 'BPE' can be done")
    # unk_token and fuse_unk change nothing: with all 256 bytes in the vocabulary, nothing is unknown
    for switch in ("dropout", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(switch):
            raise VocabularyError(f"its model has {switch} = {model[switch]!r}, which tiktoken cannot do")
    vocab, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocab, dict) or not all(type(id) is int and 0 <= id < LARGEST_ID for id in vocab.values()):
        raise VocabularyError(f"the vocab of its model does not give each token an id from 0 to {LARGEST_ID - 1:,}")
    if len(set(vocab.values())) < len(vocab):
        raise VocabularyError("two tokens in the vocab of its model have one id")
    check_bytes({bytes([byte]): vocab[character] for character, byte in spell_bytes().items() if character in vocab})
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges or []]
    for pair in pairs:
        if len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise VocabularyError(f"a merge is not two tokens: {pair!r:.80}")
    check_lengths(vocab, pairs)
    return vocab, pairs, bool(model.get("ignore_merges"))


def check_lengths(vocab: dict[str, int], pairs: list[tuple[str, str]]) -> None:
    """Raises VocabularyError where it would take minutes to compare merges with ranks."""
    longest = max(vocab, key=len)
    if len(longest) > MOST_TOKEN_BYTES:
        why = f"it has {len(longest):,} characters, and {MOST_TOKEN_BYTES:,} can be done"
        raise VocabularyError(f"the token {longest!r:.40}... of its vocab is too long: {why}")
    n_characters = sum(map(len, chain(vocab, chain.from_iterable(pairs))))
    if n_characters > MOST_CHARACTERS:
        why = f"have {n_characters:,} characters together, and {MOST_CHARACTERS:,} can be done"
        raise VocabularyError(f"its {len(vocab):,} tokens and {len(pairs):,} merges {why}")


def spell_bytes() -> dict[str, int]:
    """The character that stands for each byte: itself where it can be printed, else the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in sorted(printable)} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def spell_token(token: str, spellings: dict[str, int]) -> bytes:
    """Bytes that a token of the vocab stands for. One with other characters, as special ones have, is its own text."""
    try:
        return bytes([spellings[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "surrogatepass")


def read_normalizer(entry: Any) -> bool:
    """Whether texts are put in Unicode's composed form; it is the only change that can be made here too."""
    if entry is None:
        return False
    kind = entry.get("type") if isinstance(entry, dict) else None
    if kind == "Sequence":
        return any([read_normalizer(part) for part in entry.get("normalizers", [])])
    if kind != "NFC":
        raise VocabularyError(f"its normalizer {kind or entry!r} changes the text, and only 'NFC' can be done")
    return True


# ---------------------------------------------------------------- added tokens


def read_added_tokens(entries: Any, vocab: dict[str, int]) -> list[AddedToken]:
    """Added tokens with Hugging Face's ids. Those are counted up, whatever the file says, so the file must agree."""
    if len(entries) > MOST_ADDED_TOKENS:
        raise VocabularyError(f"it has {len(entries):,} added tokens, and {MOST_ADDED_TOKENS:,} can be done")
    added: dict[str, AddedToken] = {}
    next_id = len(vocab)
    for entry in entries:
        text, id, special = entry["content"], entry["id"], entry["special"]
        if not isinstance(text, str) or not text or text in added:
            raise VocabularyError(f"the added token {text!r} is empty, or there twice")
        if len(text) > MOST_ADDED_CHARACTERS:
            why = f"has {len(text):,} characters, and {MOST_ADDED_CHARACTERS} can be done"
            raise VocabularyError(f"the added token {text!r:.40}... {why}")
        for flag in ("single_word", "lstrip", "rstrip"):
            if entry.get(flag) and not special:
                raise VocabularyError(f"the added token {text!r} has {flag} = true, which tiktoken cannot do")
        expected = vocab.get(text, next_id)
        if id != expected:
            why = f"Hugging Face's library would give it {expected}"
            raise VocabularyError(f"the added token {text!r} has id {id}, and {why}")
        added[text] = AddedToken(text, expected, special=bool(special), normalized=bool(entry["normalized"]))
        next_id = max(next_id, expected + 1)
    if len({token.id for token in added.values()} | set(vocab.values())) < len(vocab.keys() | added.keys()):
        raise VocabularyError("an added token has the id of another token")
    return list(added.values())


# ---------------------------------------------------------------- BOS and EOS


def find_bos_and_eos(folder: Path, file: dict, ids: dict[str, int]) -> tuple[int | None, int]:
    """BOS is what the tokenizer itself puts before a text, if it does; EOS is what its folder calls so."""
    before, after = read_post_processor(file.get("post_processor"))
    files = {name: parse_neighbour(folder / name) for name in EOS_FILES}
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
    """Id of a token that is named by its text, an object with it, its id, or a list that begins with one of these."""
    entry = entry[0] if isinstance(entry, list) and entry else entry
    entry = entry.get("content") if isinstance(entry, dict) else entry
    found = ids.get(entry) if isinstance(entry, str) else entry
    if type(found) is not int or found not in ids.values():
        raise VocabularyError(f"its {role} token {entry!r} is not in its vocabulary")
    return found


def read_post_processor(entry: Any) -> tuple[list[str], list[str]]:
    """Texts of the tokens put before a text and after it: none, or one."""
    if entry is None or (isinstance(entry, dict) and entry.get("type") == "ByteLevel"):
        return [], []
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
        before, after = (
            [piece["SpecialToken"]["id"] for piece in side] for side in (pieces[:place], pieces[place + 1 :])
        )
    else:
        raise VocabularyError(f"its post-processor {kind or entry!r} is not known here")
    if len(before) > 1 or len(after) > 1:
        raise VocabularyError(
            f"its post-processor puts {before} before a text and {after} after it: one each can be done"
        )
    return before, after


def parse_neighbour(path: Path) -> dict:
    """A file beside tokenizer.json; most folders lack one or another."""
    if not os.path.exists(path):
        return {}
    try:
        return read_json_object(path, MOST_BYTES_BESIDE)
    except ValueError as error:
        raise VocabularyError(f"{path.name} beside it {error}") from None
