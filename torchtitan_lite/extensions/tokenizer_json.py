"""Read a Hugging Face tokenizer.json. The ids are the same as in the package `tokenizers` (extra `hf`).

If the file describes a byte-level BPE for which tiktoken and the package give the same ids (byte_level_bpe.py),
tiktoken encodes the text, because tiktoken is three times as fast as the package. Otherwise the package encodes the
text. A tokenizer.json has a model, and added tokens, which are matched before the text is cut into words.
tokenizer_config.json and special_tokens_map.json in the same folder add more tokens.
"""

import hashlib
import json
from collections.abc import Callable, Container
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from torchtitan_lite.config.messages import UserError
from torchtitan_lite.data.tokenizer import TOKENIZER_CONFIG, Tokenizer, compose
from torchtitan_lite.extensions.byte_level_bpe import AFFIXES, read_byte_level_bpe, spell_token
from torchtitan_lite.extensions.foreign_json import JsonObject, read_json
from torchtitan_lite.files import import_extra

NO_UNKNOWN = "for text outside the vocabulary"
SPECIAL_MAP = "special_tokens_map.json"  # this format is older than tokenizer_config.json
ADDED_TOKENS = "added_tokens.json"  # as old as SPECIAL_MAP


def read_tokenizer_json(path: Path, content: bytes) -> Tokenizer:
    """Read tokenizer.json.

    The post-processor defines BOS. EOS and additional tokens come from the other files in the same folder.
    """
    file = read_json(path)
    model = file.take("model", dict)
    vocab = model.take("vocab", dict | list)
    if isinstance(vocab, list):  # Unigram: tokens and scores, in the order of the ids
        vocab = {token: id for id, (token, _) in enumerate(vocab)}
    if model.get("dropout"):
        raise ValueError(f"model.dropout = {model['dropout']} makes the ids random. Set it to null")
    config = read_json(path.with_name(TOKENIZER_CONFIG), may_be_missing=True)
    special_map = read_json(path.with_name(SPECIAL_MAP), may_be_missing=True)
    added = list_added_tokens(file, [config, special_map], vocab)
    if added != (file.get("added_tokens") or []):
        file["added_tokens"] = added
        content = json.dumps(file).encode()
    added_ids = {token["content"]: token["id"] for token in added}
    special = {token["content"]: token["id"] for token in added if token["special"]}
    ids = vocab | added_ids
    bos_id = ids.get(find_bos(file.get("post_processor") or {}))
    eos_id = find_eos(config, special_map, ids)
    if lost := read_json(path.with_name(ADDED_TOKENS), may_be_missing=True).keys() - ids:
        raise ValueError(
            f"it has no token {min(lost)!r}, which {ADDED_TOKENS} adds. "
            "Load the folder with AutoTokenizer of transformers, and save it again with save_pretrained"
        )
    spelled = spell_vocabulary(file, ids, added_ids)
    bytes_of_id = spelled or {id: token.encode() for token, id in ids.items()}
    decode_text = None
    pairs = read_byte_level_bpe(file, added)
    if pairs:
        make_encoders = partial(pairs.make_encoders, added_ids, added_ids.keys() - special.keys())
    else:
        package = import_extra("tokenizers", "hf").Tokenizer.from_buffer(content)
        make_encoders = partial(encode_by_package, package)
        decode_text = partial(package.decode, skip_special_tokens=False)
    return Tokenizer(
        path=path,
        fingerprint=hashlib.sha256(content + f"\0{bos_id} {eos_id}".encode()).hexdigest(),
        bos_id=bos_id,
        eos_id=eos_id,
        special=special,
        bytes_of_id=bytes_of_id,
        make_encoders=make_encoders,
        normalize=compose if pairs and pairs.nfc else str,
        unknown_id=model.get("unk_id", ids.get(model.get("unk_token"))),
        decode_text=decode_text,
        is_spelled=spelled is not None,
    )


def encode_by_package(package: Any) -> tuple[Callable, Callable]:
    """Return Tokenizer.encoders, implemented with the package `tokenizers`."""
    package.no_truncation()
    package.no_padding()
    # a post-processor may exclude white space from the offsets of a token
    package.post_processor = None
    strips = {id for id, token in package.get_added_tokens_decoder().items() if token.rstrip}
    if getattr(package.model, "unk_token", "") is None:
        # If unk_token is None, the package drops text outside the vocabulary. If unk_token names a token without an id,
        # the package raises an error.
        package.model.unk_token = NO_UNKNOWN

    def encode(text: str, is_special: bool = False) -> Any:
        # if True, names of special tokens are encoded as plain text
        package.encode_special_tokens = not is_special
        try:
            return package.encode(text, add_special_tokens=False)
        except Exception as error:  # the package raises only plain Exception
            raise UserError(f"the text cannot be encoded: {error}") from None

    def encode_special(text: str) -> tuple[list[int], list[int]]:
        found = encode(text, is_special=True)
        ends = [
            # a special token may include white space after it, but this white space may be the start of an answer
            start + len(text[start:end].rstrip()) if id in strips else end
            for id, (start, end) in zip(found.ids, found.offsets, strict=True)
        ]
        return found.ids, ends

    return lambda text: encode(text).ids, encode_special


def find_bos(processor: dict) -> str | None:
    """Return the token that the post-processor adds before a text, or None. Raises ValueError for several tokens."""
    leading = list_leading(processor)
    if len(leading) > 1:
        raise ValueError(
            f"its post_processor begins a text with {len(leading)} tokens, {', '.join(leading)}, "
            "but a document has one BOS. Keep only one of them in the file"
        )
    return leading[0] if leading else None


def list_leading(processor: dict) -> list[str]:
    """Return the tokens that a post-processor adds before a text.

    If there are several post-processors, each one puts its tokens in front of the tokens that earlier post-processors
    added.
    """
    leading = []
    for stage in processor.get("processors", ()):
        leading = list_leading(stage) + leading
    if "cls" in processor:  # BertProcessing and RobertaProcessing: a name and its id
        return processor["cls"][:1]
    for piece in processor.get("single", ()):
        if "SpecialToken" not in piece:
            break
        leading += processor["special_tokens"][piece["SpecialToken"]["id"]]["tokens"]
    return leading


def list_added_tokens(
    file: JsonObject, configs: list[JsonObject], vocab: dict[str, int]
) -> list[dict]:
    """Return the added tokens of tokenizer.json and of the configs in its folder, as transformers does.

    As in the package `tokenizers`, the ids that the file gives to added tokens have no effect. A token of the
    vocabulary keeps its id, and new tokens get the next free ids. Raises UserError.
    """
    tokens = [JsonObject(file.path, token) for token in file.take("added_tokens", list, [])]
    for config in configs:
        decoder = config.take("added_tokens_decoder", dict, {})
        tokens += [decoder.take(token_id, dict) for token_id in sorted(decoder, key=int)]
        known = vocab.keys() | {token.take("content", str) for token in tokens}
        tokens += [
            JsonObject(config.path, {"content": name, "special": True})
            for name in list_special_names(config)
            if name in known
        ]
    added = {}
    free_id = len(vocab)
    for token in filter(itemgetter("content"), tokens):
        name = token["content"]
        is_special = token.take("special", bool)
        earlier = added.get(name)
        if earlier is None:
            earlier = dict.fromkeys(("special", "lstrip", "rstrip", "single_word"), False)
            earlier |= {"normalized": not is_special, "id": vocab.get(name, free_id)}
            free_id += name not in vocab
        is_special |= earlier["special"]
        added[name] = {**earlier, **token, "id": earlier["id"], "special": is_special}
    return list(added.values())


def list_special_names(config: JsonObject) -> list[str]:
    """Return the special tokens that a config names.

    The result contains the values of keys such as "pad_token", and the tokens in `additional_special_tokens` and
    `extra_special_tokens`.
    """
    values = []
    for key, value in config.items():
        if key in ("additional_special_tokens", "extra_special_tokens"):
            value = config.take(key, dict | list, [])
            values += value.values() if isinstance(value, dict) else value
        elif key.endswith("_token"):
            values.append(value)
    names = [value.get("content") if isinstance(value, dict) else value for value in values]
    return [name for name in names if isinstance(name, str)]  # "add_bos_token" is true or false


def find_eos(config: JsonObject, special_map: JsonObject, ids: dict[str, int]) -> int:
    """Return the id of eos_token. Raises ValueError.

    As in transformers, special_tokens_map.json is read first, unless tokenizer_config.json has added_tokens_decoder. If
    eos_token is in none of the files, use the id that ends a text in transformers' `generate`.
    """
    files = [special_map, config]
    if "added_tokens_decoder" in config:
        files.reverse()
    for file in files:
        eos = file.take("eos_token", str | dict, None)
        if isinstance(eos, dict):
            eos = eos.take("content", str)
        if eos in ids:
            return ids[eos]
        if eos:
            raise ValueError(
                f"it has no token {eos!r}, the eos_token of another file in the folder"
            )
    for name in ("generation_config.json", "config.json"):
        file = read_json(config.path.with_name(name), may_be_missing=True)
        eos_ids = file.take("eos_token_id", int | list, [])
        if eos_ids != []:
            eos_id = eos_ids[0] if isinstance(eos_ids, list) else eos_ids
            if eos_id not in ids.values():
                raise ValueError(f"it has no token {eos_id}, which is the eos_token_id in {name}")
            return eos_id
    files = f"{TOKENIZER_CONFIG} and {SPECIAL_MAP}"
    raise ValueError(f"{files} in the same folder have no eos_token to end a document")


def spell_vocabulary(
    file: dict, ids: dict[str, int], added: Container[str]
) -> dict[int, bytes] | None:
    """Return a dict mapping ids to the bytes of the tokens' texts. `added`: tokens that are spelled as plain text, not
    as byte-level tokens.

    Returns None if a text is not the concatenation of the texts of its tokens, as with the "##" of WordPiece.
    """
    decoder = json.dumps(file.get("decoder"))
    is_byte_level = '"ByteLevel"' in json.dumps(file.get("pre_tokenizer")) + decoder
    is_sentencepiece = r'"\u2581"' in decoder
    if any(map(file["model"].get, AFFIXES)) or not (is_byte_level or is_sentencepiece):
        return None
    spelled = {}
    for token, id in ids.items():
        if is_byte_level:
            spelled[id] = token.encode() if token in added else spell_token(token)
        elif token[:3] == "<0x" and len(token) == 6 and '"ByteFallback"' in decoder:
            spelled[id] = bytes.fromhex(token[3:5])
        else:
            spelled[id] = token.replace("▁", " ").encode()
    return spelled
