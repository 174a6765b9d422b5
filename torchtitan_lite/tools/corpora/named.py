"""Prepare named corpora in training.cache_folder, once per host, before the ranks start.

Two runs may start at the same time. Each prepares the corpus, and the first one that is complete stays.
"""

import os
import sys
from pathlib import Path

from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.corpus_folder import (
    DATASETS,
    MANIFEST,
    VALIDATION_ONLY,
    find_corpus,
    list_named,
)
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.tools.corpora.prepare import PrepareSettings, prepare
from torchtitan_lite.tools.corpora.text_files import PreparationError

VALIDATION_SHARE = 0.02
MANY_BYTES = 2**26  # above this file size, starting more processes is worth it


def prepare_datasets(config: Config, tokenizer: Tokenizer) -> None:
    """Prepare the named corpora of a run, unless they exist. Raises CorpusError, PreparationError, OSError."""
    for name, dataset_path in sorted(list_named(config)):
        prepare_dataset(name, tokenizer, Path(config.training.cache_folder), dataset_path)


def prepare_dataset(
    name: str,
    tokenizer: Tokenizer,
    cache_folder: Path,
    dataset_path: str = "",
    *,
    skip_bad: bool = False,
) -> Path:
    """Return the folder of a named corpus, and prepare it if it does not exist. Raises like prepare_datasets."""
    folder = find_corpus(name, tokenizer, cache_folder, dataset_path)
    if (folder / MANIFEST).exists():
        return folder
    files = DATASETS[name](dataset_path)
    n_bytes = sum(path.stat().st_size for path in files)
    size = f"{n_bytes / 1e6:,.1f} MB"
    print(f"Encoding {name} ({size}) once, to {folder}", file=sys.stderr, flush=True)
    share = 0.0 if name in VALIDATION_ONLY else VALIDATION_SHARE
    settings = PrepareSettings(str(tokenizer.path), share, skip_bad=skip_bad)
    n_processes = os.cpu_count() if n_bytes > MANY_BYTES else 1
    try:
        prepare(files, folder, settings, n_processes=n_processes)
    except (OSError, PreparationError):
        if not (folder / MANIFEST).exists():  # another process was not first
            raise
    return folder
