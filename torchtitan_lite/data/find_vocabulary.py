"""From `model.hf_assets_path` to a vocabulary: which file is meant, and what of it is wrong.

    bytes                        the word: plain bytes, no file
    assets/tokenizer             a folder: its tokenizer.json, tokenizer.model or original/tokenizer.model
    some/where/tokenizer.json    either file itself; torchtitan v0.1 names its tokenizer.model so

Where a folder holds both, tokenizer.json is read, as torchtitan v0.2 does: it says itself which kind of encoding it
is, while a tokenizer.model beside it is often one for SentencePiece.
"""

import os
from pathlib import Path

from torchtitan_lite.config.json_file import in_one_line
from torchtitan_lite.config.reader import REPOSITORY
from torchtitan_lite.config.schema import ConfigError, Problem
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


def read_vocabulary(hf_assets_path: str) -> Vocabulary:
    """Raises ConfigError where there is no tokenizer, or one that tiktoken cannot do exactly."""
    if hf_assets_path == BYTES:
        return make_byte_vocabulary()
    path = find_tokenizer(hf_assets_path)
    if path is None:
        why = f"{Path(hf_assets_path).absolute()} holds no {' and no '.join(READERS)}"
        raise ConfigError([Problem(KEY, hf_assets_path, why, REMEDY)])
    try:
        return READERS[path.name](path)
    except VocabularyError as error:
        raise ConfigError([Problem(KEY, hf_assets_path, f"{path}: {in_one_line(str(error))}", REMEDY)]) from None


def find_tokenizer(hf_assets_path: str) -> Path | None:
    """The file that is meant: from the working directory, else from the repository."""
    for folder in (Path.cwd(), REPOSITORY):
        place = folder / hf_assets_path
        names = [*READERS, "original/tokenizer.model"]  # the last one is where Meta's folders of Llama 3 have it
        candidates = [place] if place.name in READERS else [place / name for name in names]
        for path in candidates:
            if os.path.exists(path):  # a pipe or a folder too: its reader says what is wrong with it
                return path
    return None
