"""Prepare named corpora in training.cache_folder, once per host, before the ranks start.

Two runs may start at the same time. Each prepares a temporary folder and renames it. The first rename wins, and the
other folder is deleted.
"""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.corpus_folder import DATASETS, MANIFEST, VALIDATION_ONLY, find_corpus, list_named
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.tools.corpora.prepare import PrepareSettings, prepare

VALIDATION_SHARE = 0.02
MANY_BYTES = 2**26  # above this file size, starting more processes is worth it


def prepare_datasets(config: Config, tokenizer: Tokenizer) -> None:
    """Prepare the named corpora of a run, unless they exist. Raises CorpusError, PreparationError, OSError."""
    for name, dataset_path in sorted(list_named(config)):
        prepare_dataset(name, tokenizer, Path(config.training.cache_folder), dataset_path)


def prepare_dataset(name: str, tokenizer: Tokenizer, cache_folder: Path, dataset_path: str = "") -> Path:
    """Return the folder of a named corpus, and prepare it if it does not exist. Raises like prepare_datasets."""
    folder = find_corpus(name, tokenizer, cache_folder, dataset_path)
    if (folder / MANIFEST).exists():
        return folder
    files = DATASETS[name](dataset_path)
    n_bytes = sum(path.stat().st_size for path in files)
    about = f"{name}: {n_bytes / 1e6:,.1f} MB in {len(files)} files"
    print(f"Encoding {about} once, to {folder}", file=sys.stderr, flush=True)
    share = 0.0 if name in VALIDATION_ONLY else VALIDATION_SHARE
    settings = PrepareSettings(str(tokenizer.path), share, folder=os.path.commonpath(map(os.path.abspath, files)))
    cache_folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=cache_folder, prefix=f"{name}-") as work:
        made = Path(work) / "corpus"
        prepare(files, made, settings, n_processes=(os.cpu_count() or 1) if n_bytes > MANY_BYTES else 1)
        try:
            made.rename(folder)
        except OSError:
            if not (folder / MANIFEST).exists():  # the rename did not fail because another process was first
                raise
    return folder
