"""The files of a tokenizer: which one `model.hf_assets_path` means, and which ones an export needs.

    bytes                        the word: plain bytes, no file
    assets/tokenizer             a folder: its tokenizer.json, tokenizer.model or original/tokenizer.model
    some/where/tokenizer.json    either file itself; torchtitan v0.1 names its tokenizer.model so

Where a folder holds both, tokenizer.json is read, as torchtitan v0.2 does: it says itself which kind of encoding it
is, while a tokenizer.model beside it is often one for SentencePiece.
"""

import json
import os
from pathlib import Path

from torchtitan_lite.config.messages import ConfigError, Problem, show_text
from torchtitan_lite.config.reader import REPOSITORY
from torchtitan_lite.data.tokenizer_json import read_tokenizer_json
from torchtitan_lite.data.vocabulary import (
    BYTES,
    Vocabulary,
    VocabularyError,
    make_byte_vocabulary,
    read_tokenizer_model,
)

KEY = "model.hf_assets_path"
READERS = {"tokenizer.json": read_tokenizer_json, "tokenizer.model": read_tokenizer_model}
REMEDY = (
    "Name a folder with Hugging Face's tokenizer.json (byte-level BPE, as of Llama 3, Qwen or GPT-2) or Llama 3's "
    f"tokenizer.model, or the word {BYTES!r}; assets/tokenizer holds a small one"
)

TOKENIZER_CONFIG = "tokenizer_config.json"
WITH_TOKENIZER_JSON = (  # what transformers reads of a folder
    "tokenizer.json",
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def read_vocabulary(hf_assets_path: str) -> Vocabulary:
    """Read the vocabulary that is named. Raises ConfigError where none is found, or none that can be used."""
    if hf_assets_path == BYTES:
        return make_byte_vocabulary()
    path = find_tokenizer(hf_assets_path)
    if path is None:
        why = f"{Path(hf_assets_path).absolute()} holds no {' and no '.join(READERS)}"
        raise ConfigError([Problem(KEY, hf_assets_path, why, REMEDY)])
    try:
        return READERS[path.name](path)
    except VocabularyError as error:
        raise ConfigError([Problem(KEY, hf_assets_path, f"{path}: {show_text(str(error))}", REMEDY)]) from None


def find_tokenizer(hf_assets_path: str) -> Path | None:
    """Return the file that is meant: from the working directory, else from the repository."""
    for folder in (Path.cwd(), REPOSITORY):
        place = folder / hf_assets_path
        names = [*READERS, "original/tokenizer.model"]  # the last one is where Meta's folders of Llama 3 have it
        candidates = [place] if place.name in READERS else [place / name for name in names]
        for path in candidates:
            if os.path.exists(path):  # a pipe or a folder too: its reader says what is wrong with it
                return path
    return None


def describe_for_export(vocabulary: Vocabulary | None) -> dict[str, object]:
    """Return the arguments of checkpoint.hugging_face.Export that a tokenizer decides."""
    if vocabulary is None:
        return {}
    files = list_tokenizer_files(vocabulary)
    return {"bos_id": vocabulary.bos_id, "eos_id": vocabulary.eos_id, "tokenizer_files": files}


def list_tokenizer_files(vocabulary: Vocabulary) -> dict[str, bytes]:
    """Return name -> content of the files beside the weights, by which transformers gives the same ids.

    transformers has no tokenizer of plain bytes: they have no files. It reads tokenizer.model through tiktoken.
    """
    if not vocabulary.path.is_file():
        return {}
    if vocabulary.path.name == "tokenizer.json":
        beside = [vocabulary.path.with_name(name) for name in WITH_TOKENIZER_JSON]
        return {path.name: path.read_bytes() for path in beside if path.is_file()}
    text_of = {token.id: token.text for token in vocabulary.added}
    plain = dict.fromkeys(("normalized", "lstrip", "rstrip", "single_word"), False)
    config = {  # what transformers does not find in tokenizer.model itself
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": text_of[vocabulary.bos_id],
        "eos_token": text_of[vocabulary.eos_id],
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {str(id): {"content": text, "special": True, **plain} for id, text in text_of.items()},
    }
    content = (json.dumps(config, indent=2) + "\n").encode()
    return {"tokenizer.model": vocabulary.path.read_bytes(), TOKENIZER_CONFIG: content}
