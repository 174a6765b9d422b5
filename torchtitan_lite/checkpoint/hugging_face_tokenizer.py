"""What lies beside the weights in a Hugging Face folder: the tokenizer, and after which tokens a text ends.

    the run's tokenizer        the folder
    tokenizer.json             that file, and those of its neighbours that transformers reads with it
    tokenizer.model            that file, and a tokenizer_config.json with the special tokens that follow its ranks
    bytes                      nothing: transformers has no such tokenizer

transformers reads tokenizer.model through tiktoken, which it must have for that.
"""

import json
import os
from pathlib import Path

from torchtitan_lite.checkpoint.hugging_face_config import CONFIG, HuggingFaceError, read_beside
from torchtitan_lite.data.vocabulary import Vocabulary

TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
OF_TOKENIZER_JSON = (
    "tokenizer.json",
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "chat_template.jinja",
    GENERATION_CONFIG,
)


def list_tokenizer_files(vocabulary: Vocabulary | None) -> dict[str, bytes]:
    """Name -> content of what transformers reads of this tokenizer."""
    if vocabulary is None or not vocabulary.path.is_file():
        return {}
    if vocabulary.path.name == "tokenizer.model":
        config = json.dumps(describe_tokenizer(vocabulary), indent=2) + "\n"
        return {"tokenizer.model": vocabulary.path.read_bytes(), TOKENIZER_CONFIG: config.encode()}
    beside = [vocabulary.path.with_name(name) for name in OF_TOKENIZER_JSON]
    return {path.name: path.read_bytes() for path in beside if path.is_file()}


def describe_tokenizer(vocabulary: Vocabulary) -> dict[str, object]:
    """tokenizer_config.json of a tokenizer.model: all that transformers does not find in the file itself."""
    text_of = {token.id: token.text for token in vocabulary.added}
    plain = dict.fromkeys(("normalized", "lstrip", "rstrip", "single_word"), False)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": text_of[vocabulary.bos_id],
        "eos_token": text_of[vocabulary.eos_id],
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {str(id): {"content": text, "special": True, **plain} for id, text in text_of.items()},
    }


def read_end_ids(folder: Path) -> frozenset[int]:
    """Tokens after which a text ends, as the folder's generation_config.json has them, else its config.json.

    None where neither says so. Raises HuggingFaceError where one says what is no id.
    """
    for name in (GENERATION_CONFIG, CONFIG):
        if not os.path.exists(folder / name):
            continue
        named = read_beside(folder, name).get("eos_token_id")
        ids = named if isinstance(named, list) else [] if named is None else [named]
        if not all(type(id) is int and id >= 0 for id in ids):
            raise HuggingFaceError(folder, [f"{name}: eos_token_id = {named!r}; the id of a token, or a list of ids"])
        if ids:
            return frozenset(ids)
    return frozenset()
