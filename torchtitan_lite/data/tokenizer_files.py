"""The files of a tokenizer that lie beside the weights in a Hugging Face folder.

    the run's tokenizer        the folder
    tokenizer.json             that file, and those of its neighbours that transformers reads with it
    tokenizer.model            that file, and a tokenizer_config.json with the special tokens that follow its ranks
    bytes                      nothing: transformers has no such tokenizer

transformers reads tokenizer.model through tiktoken, which it must have for that.
"""

import json

from torchtitan_lite.data.vocabulary import Vocabulary

TOKENIZER_CONFIG = "tokenizer_config.json"
OF_TOKENIZER_JSON = (
    "tokenizer.json",
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def describe_for_export(vocabulary: Vocabulary | None) -> dict[str, object]:
    """What checkpoint.hugging_face.Export has to know of a tokenizer: two special ids, and files."""
    if vocabulary is None:
        return {}
    files = list_tokenizer_files(vocabulary)
    return {"bos_id": vocabulary.bos_id, "eos_id": vocabulary.eos_id, "tokenizer_files": files}


def list_tokenizer_files(vocabulary: Vocabulary) -> dict[str, bytes]:
    """Name -> content of what transformers reads of this tokenizer."""
    if not vocabulary.path.is_file():
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
