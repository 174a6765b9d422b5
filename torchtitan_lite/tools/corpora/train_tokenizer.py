"""Train a tokenizer on the texts of a corpus: a byte-level BPE with the pattern of Llama 3, as tokenizer.json.

    ids 0 ...          tokens of one byte, then tokens that merge two others, the most frequent pairs first
    the last two ids   <|begin_of_text|> and <|end_of_text|>

Needs the package `tokenizers`, the extra `hf`. The tokenizer also loads in transformers, and without that package here.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from torchtitan_lite.config.files import import_extra
from torchtitan_lite.data.vocabulary import CONFIG, LLAMA3_PATTERN
from torchtitan_lite.tools.corpora.text_files import PreparationError

BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"
FEWEST = 256 + len((BOS, EOS))


def train_tokenizer(texts: Iterator[str], n_entries: int, folder: Path) -> Path:
    """Write a tokenizer of `n_entries` to the new folder, and return the folder. Raises PreparationError."""
    library = import_extra("tokenizers", "hf")
    if n_entries < FEWEST:
        raise PreparationError(f"--train-tokenizer {n_entries}: use {FEWEST} or more, for 256 bytes, BOS and EOS")
    tokenizer = library.Tokenizer(library.models.BPE())
    cut = library.pre_tokenizers.Split(library.Regex(LLAMA3_PATTERN), "isolated")
    spell = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence([cut, spell])
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=n_entries - 2,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([BOS, EOS])
    n_found = tokenizer.get_vocab_size()
    if n_found < n_entries:
        why = f"the texts have pairs for {n_found} entries only"
        raise PreparationError(f"--train-tokenizer {n_entries}: {why}. Use {n_found} or less")
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = library.processors.TemplateProcessing(f"{BOS} $A", special_tokens=[(BOS, bos_id)])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
    return folder
