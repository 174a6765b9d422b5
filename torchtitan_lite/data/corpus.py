"""Open a corpus and read rows of it.

    corpus     one row of tokens, document after document: "a b c" "d e" "f g h i"
    read       a stretch for each row of a batch, with a mark on the first token of each document

The files are mapped. Neither start-up time nor the memory of a process grows with the corpus, and the ranks of a host
share the pages that the system keeps.
"""

import mmap
import warnings
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_lite.data.corpus_folder import VALIDATION_ONLY, find_corpus, read_split
from torchtitan_lite.data.tokenizer import Tokenizer


class Corpus:
    """One split of a prepared corpus. Safe to read from any thread."""

    def __init__(self, name: str, folder: Path, split: str):
        """`name` is what the config calls it. Raises CorpusError."""
        self.name = name
        manifest = read_split(folder, split, tokenizer=None)
        self.fingerprint = manifest.hash_split(split)  # two corpora share it only if they are equal
        self.tokens = map_file(folder / f"{split}.tokens", getattr(torch, manifest.dtype))
        self.documents = map_file(folder / f"{split}.documents", torch.int64)
        self.targets = (
            map_file(folder / f"{split}.targets", torch.bool) if "targets" in manifest.splits[split].sha256 else None
        )
        self.n_tokens = len(self.tokens)

    def read(self, starts: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens of the stretches at `starts`, and whether each begins a document, and may be a target.

        Three tensors (len(starts), length): int64, bool, bool. Past the end, a document of zeros begins.
        """
        index = starts[:, None] + torch.arange(length)
        inside, begins = index < self.n_tokens, index == self.n_tokens
        index.clamp_(max=self.n_tokens - 1)
        tokens = self.tokens[index].long().masked_fill_(~inside, 0)
        # Documents first .. last-1 begin in a row. Mark them in all rows at once.
        first, last = torch.searchsorted(self.documents, torch.stack([starts, starts + length]))
        rows = torch.repeat_interleave(last - first)
        ends = (last - first).cumsum(0)  # of the rows, in the list of all these documents
        documents = torch.arange(len(rows)) + (last - ends)[rows]
        begins[rows, self.documents[documents] - starts[rows]] = True
        is_target = inside & ~begins
        if self.targets is not None:  # a conversation
            is_target &= self.targets[index]
        return tokens, begins, is_target


def map_file(path: Path, dtype: torch.dtype) -> Tensor:
    """Return the numbers in a file, which are read from the disk when they are used."""
    with open(path, "rb") as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # and nobody writes to it
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=dtype)


def open_corpus(
    name: str, tokenizer: Tokenizer, cache_folder: Path, *, split: str = "train", dataset_path: str = ""
) -> Corpus:
    """Open split "train" or "validation" of a corpus that training.dataset can name. Raises CorpusError."""
    folder = find_corpus(name, tokenizer, cache_folder, dataset_path)
    return Corpus(name, folder, "train" if name in VALIDATION_ONLY else split)
