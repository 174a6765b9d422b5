"""Open a corpus and read rows of it.

    corpus     one sequence of tokens, document after document: "a b c" "d e" "f g h i"
    read       a slice of it for each row of a batch, and a mark on the first token of each document

The files are memory-mapped. Start-up time and memory of a process do not grow with the corpus, and the ranks of a host
share the page cache.
"""

import mmap
import warnings
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_lite.data.corpus_folder import VALIDATION_ONLY, find_prepared, open_split
from torchtitan_lite.data.tokenizer import Tokenizer


def map_file(path: str, n_elements: int, dtype: torch.dtype) -> Tensor:
    """Map a file read-only. Nothing may write to the tensor.

    torch.from_file maps a file private and writable; Linux refuses that if the file is larger than memory and swap.
    """
    if n_elements == 0:  # an empty file cannot be mapped
        return torch.empty(0, dtype=dtype)
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the tensor is not writable
        return torch.frombuffer(mapped, dtype=dtype, count=n_elements)


class Corpus:
    """One split of a prepared corpus. Safe to read from any thread."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        cache_folder: Path,
        *,
        split: str = "train",
        dataset_path: str = "",
    ):
        """Open the split "train" or "validation" of a corpus named as in training.dataset. Raises CorpusError."""
        self.name = name
        folder = find_prepared(name, tokenizer, cache_folder, dataset_path)
        if name in VALIDATION_ONLY:
            split = "train"
        manifest = open_split(folder, split, tokenizer)
        self.fingerprint = manifest.hash_split(split)  # of tokens, documents and targets
        sizes = manifest.splits[split]
        self.sizes = sizes
        n_tokens = sizes.n_tokens
        self.n_tokens = n_tokens
        path = folder / split
        dtype = getattr(torch, manifest.dtype)
        self.tokens = map_file(f"{path}.tokens", n_tokens, dtype)
        self.documents = map_file(f"{path}.documents", sizes.n_documents, torch.int64)
        self.targets = None
        if "targets" in sizes.sha256:
            self.targets = map_file(f"{path}.targets", n_tokens, torch.bool)

    def read(self, starts: Tensor, length: int) -> Tensor:
        """Read the slices at `starts`. Returns (3, len(starts), length) int64.

        These are the tokens; whether each token starts a document, 0 or 1; and whether it may be a target. After the
        end of the corpus, a document of zeros starts.
        """
        index = starts[:, None] + torch.arange(length)
        n_earlier = torch.searchsorted(self.documents, index)
        begins = torch.searchsorted(self.documents, index, right=True) > n_earlier
        begins |= index == self.n_tokens
        inside = index < self.n_tokens
        index.clamp_(max=self.n_tokens - 1)
        tokens = self.tokens[index].long().masked_fill_(~inside, 0)
        is_target = inside & ~begins
        if self.targets is not None:  # a conversation
            is_target &= self.targets[index]
        return torch.stack([tokens, begins, is_target])
