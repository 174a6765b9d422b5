"""Train a tokenizer on the texts of a corpus: a byte-level BPE with the pattern of GPT-2, as tokenizer.json.

    ids 0, 1     <|begin_of_text|> and <|end_of_text|>
    ids 2 ...    tokens of one byte, then tokens that merge two others, the most frequent pairs first

Needs the package `tokenizers`, the extra `hf`. The tokenizer also loads in transformers, and without that package here.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from torchtitan_lite.config.files import import_extra
from torchtitan_lite.data.vocabulary import TOKENIZER_CONFIG
from torchtitan_lite.tools.corpora.text_files import PreparationError

BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"


def train_tokenizer(texts: Iterator[str], n_entries: int, folder: Path) -> str:
    """Write a tokenizer of `n_entries` to the new folder, and return the folder. Raises PreparationError."""
    library = import_extra("tokenizers", "hf")
    tokenizer = library.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts, vocab_size=n_entries, special_tokens=[BOS, EOS], show_progress=False
    )
    n_found = tokenizer.get_vocab_size()
    if n_found != n_entries:
        why = f"with 256 bytes, BOS, EOS and their pairs, a tokenizer of these texts has {n_found} entries"
        raise PreparationError(f"--train-tokenizer {n_entries}: {why}. Use {n_found}")
    tokenizer.post_processor = library.processors.TemplateProcessing(
        f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(config))
    return str(folder)
