"""Open a corpus and read any stretch of it.

    corpus     one row of tokens, document after document: "a b c" "d e" "f g h i"
    read       any stretch [start, stop), with a mark on the first token of each document

The files are mapped: neither the start nor the memory of a process grows with the corpus, and all ranks of a host share
the pages that the system keeps.
"""

import mmap
import warnings
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_lite.data.corpus_folder import DATASETS, HELD_OUT, SPLITS, find_cached, read_split
from torchtitan_lite.data.tokenizer import Tokenizer


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

    `split` is "train" or "validation".
    """
    if name not in DATASETS:
        return Corpus(name, Path(name), split)
    folder = find_cached(name, tokenizer, cache_folder, dataset_path)
    return Corpus(name, folder, "train" if name in HELD_OUT else split)
