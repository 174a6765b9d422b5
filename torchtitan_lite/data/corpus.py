"""Open a corpus and read any stretch of it.

    corpus     one row of tokens, document after document: "a b c" "d e" "f g h i"
    read       any stretch [start, stop), with a mark on the first token of each document

The files are mapped: neither the start nor the memory of a process grows with the corpus, and all ranks of a host share
the pages that the system keeps.
"""

import fcntl
import hashlib
import logging
import mmap
import os
import shutil
import warnings
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_lite.data.corpus_folder import DATASETS, HELD_OUT, MANIFEST, SPLITS, CorpusError, read_split
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.tools.corpora.prepare import Recipe, prepare
from torchtitan_lite.tools.corpora.text_files import PreparationError

logger = logging.getLogger(__name__)

VALIDATION_SHARE_OF_DATASETS = 0.02
MANY_BYTES = 2**26  # of files: from here on it pays to start more processes that tokenise


class Corpus:
    """One split of a prepared corpus. Any thread may read it."""

    def __init__(self, name: str, folder: Path, split: str):
        """Raises CorpusError. `name` is what the config calls it."""
        self.name = name
        manifest = read_split(folder, split, tokenizer=None)
        split, files = SPLITS[split], manifest.splits[SPLITS[split]].sha256
        self.identity = manifest.identify(split)  # two corpora share it only if they are equal
        self.tokens = map_file(folder / f"{split}.tokens", getattr(torch, manifest.dtype))
        self.documents = map_file(folder / f"{split}.documents", torch.int64)
        self.targets = map_file(folder / f"{split}.targets", torch.bool) if "targets" in files else None
        self.n_tokens = len(self.tokens)

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return tokens start .. stop-1, int64, and whether each is its document's first, bool, (stop - start,)."""
        first, last = torch.searchsorted(self.documents, torch.tensor([start, stop])).tolist()
        begins = torch.zeros(stop - start, dtype=torch.bool)
        begins[self.documents[first:last] - start] = True
        return self.tokens[start:stop].long(), begins

    def read_targets(self, start: int, stop: int) -> Tensor:
        """Return whether each token may be a target: all but those of a conversation's other turns; bool."""
        return torch.ones(stop - start, dtype=torch.bool) if self.targets is None else self.targets[start:stop]


def map_file(path: Path, dtype: torch.dtype) -> Tensor:
    """Return the numbers in a file, which are read when they are used."""
    with open(path, "rb") as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # and nobody writes to it
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=dtype)


def open_corpus(
    name: str, tokenizer: Tokenizer, cache_folder: Path, *, split: str = "train", dataset_path: str = ""
) -> Corpus:
    """Open the corpus that training.dataset or validation.dataset calls `name`. Raises CorpusError.

    `split` is "train" or "validation". One of DATASETS is prepared first, if no process has done so yet.
    """
    if name not in DATASETS:
        return Corpus(name, Path(name), split)
    files = DATASETS[name](dataset_path)
    folder = prepare_dataset(name, files, tokenizer, cache_folder)
    return Corpus(name, folder, "train" if name in HELD_OUT else split)


def prepare_dataset(name: str, files: list[Path], tokenizer: Tokenizer, cache_folder: Path) -> Path:
    """Return the folder of a named corpus inside the cache; the first process prepares it. Raises CorpusError."""
    stats = [f"{path}:{path.stat().st_size}:{path.stat().st_mtime_ns}" for path in files]
    folder = cache_folder / f"{name}-{hashlib.sha256(repr([tokenizer.identity, *stats]).encode()).hexdigest()[:16]}"
    if (folder / MANIFEST).exists():
        return folder
    cache_folder.mkdir(parents=True, exist_ok=True)
    # Ranks of a host arrive together: one takes the lock and prepares, the others wait and then find the folder.
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            n_bytes = sum(path.stat().st_size for path in files)
            logger.info(f"Tokenising {name} once: {n_bytes / 1e6:,.1f} MB in {len(files)} files into {folder}")
            shutil.rmtree(folder.with_name(folder.name + ".tmp"), ignore_errors=True)  # of a process that was killed
            share = 0.0 if name in HELD_OUT else VALIDATION_SHARE_OF_DATASETS
            recipe = Recipe(str(tokenizer.path), share, folder=os.path.commonpath(map(os.path.abspath, files)))
            try:
                prepare(files, folder, recipe, n_processes=(os.cpu_count() or 1) if n_bytes > MANY_BYTES else 1)
            except (PreparationError, OSError) as error:
                raise CorpusError(f"{name} cannot be prepared: {error}", "") from None
    return folder
