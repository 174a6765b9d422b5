"""A batch: tokens, targets, positions. Legend: B sequences, S tokens per sequence."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Rows of a global batch. Each field is (B, S) int64, but the extra ones are (B, S, ...) of any dtype."""

    tokens: Tensor
    targets: Tensor  # the next token; IGNORE_INDEX if it does not count
    positions: Tensor  # position of each token in its row, or in its document
    doc_ids: Tensor  # index of each token's document in its row, from 0
    extra: dict[str, Tensor] = field(default_factory=dict)  # keywords of a fork's loss (loss.py)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Apply a function to each field."""
        extra = {name: function(values) for name, values in self.extra.items()}
        tokens, targets, positions, doc_ids, _ = vars(self).values()
        return Batch(*map(function, (tokens, targets, positions, doc_ids)), extra)

    def to(self, device: torch.device) -> "Batch":
        """Copy to the device. The host does not wait if the memory is pinned."""
        return self.map(lambda values: values.to(device, non_blocking=True))

    def take_rows(self, rows: range) -> "Batch":
        return self.map(lambda values: values[rows.start : rows.stop])

    def pin_memory(self) -> "Batch":
        return self.map(Tensor.pin_memory)

    def split(self, n: int) -> "list[Batch]":
        """Split into n microbatches of equal size, in order."""
        size = len(self.tokens) // n
        return [self.take_rows(range(at * size, (at + 1) * size)) for at in range(n)]
