"""A batch: tokens, targets, positions. Legend: B sequences, S tokens per sequence."""

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

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "Batch":
        return Batch(*(field.to(device, non_blocking=non_blocking) for field in self._fields()))

    def take_rows(self, rows: range) -> "Batch":
        return Batch(*(field[rows.start : rows.stop] for field in self._fields()))

    def pin_memory(self) -> "Batch":
        return Batch(*(field.pin_memory() for field in self._fields()))

    def split(self, n: int) -> "list[Batch]":
        """Split into n microbatches of equal size, in order."""
        assert self.tokens.shape[0] % n == 0, (
            f"{self.tokens.shape[0]} rows do not split into {n} equal parts"
        )
        return [
            Batch(*fields)
            for fields in zip(*(field.chunk(n) for field in self._fields()), strict=True)
        ]

    def _fields(self) -> tuple[Tensor, ...]:
        return tuple(vars(self).values())
