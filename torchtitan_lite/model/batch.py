"""A batch: tokens, targets, positions. Legend: B sequences, S tokens per sequence."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Rows of a global batch. Each field is (B, S) int64."""

    tokens: Tensor
    targets: Tensor  # the next token; IGNORE_INDEX if it does not count
    positions: Tensor  # position of each token in its row, or in its document
    doc_ids: Tensor  # index of each token's document in its row, from 0

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Apply a function to each field."""
        return Batch(*map(function, vars(self).values()))

    def to(self, device: torch.device) -> "Batch":
        """Copy to the device. The host does not wait if the memory is pinned."""
        return self.map(lambda field: field.to(device, non_blocking=True))

    def take_rows(self, rows: range) -> "Batch":
        return self.map(lambda field: field[rows.start : rows.stop])

    def pin_memory(self) -> "Batch":
        return self.map(Tensor.pin_memory)

    def split(self, n: int) -> "list[Batch]":
        """Split into n microbatches of equal size, in order."""
        size = len(self.tokens) // n
        return [self.take_rows(range(at * size, (at + 1) * size)) for at in range(n)]
