"""Define a batch: tokens, targets, positions, document ids, and extra fields that only some losses or models read.

The row of a loss in LOSSES (config/choices.py) and the ModelTable of a model list extra fields in `fields`: name ->
function of a Batch. The function computes the field from full rows, before cp splits the rows. All batches contain the
extra fields, in runs and in tools. Each call of a model part receives the extra fields of its microbatch as keyword
arguments.

Legend: B sequences, S tokens per sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from torchtitan_lite.config.choices import LOSSES
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.models.registry import MODELS


@dataclass(frozen=True)
class Batch:
    """Rows of a global batch. Fields are (B, S) int64; extra fields are (B, S, ...) of any dtype."""

    tokens: Tensor
    targets: Tensor  # the next token, or IGNORE_INDEX, which the loss ignores
    positions: Tensor  # position in the document with document attention, else in the row
    doc_ids: Tensor  # index, within a row, of the document that contains the token; 0 is the first document
    # extra fields, passed to the model and to the loss (loss.py) as keyword arguments
    extra: dict[str, Tensor] = field(default_factory=dict)

    def with_fields(self, fields: "Fields") -> "Batch":
        """Return a copy of this batch with extra fields, which the functions in `fields` compute from this batch.

        Raises UserError if a field is not (B, S, ...), or has the name of a standard field.
        """
        extra = {name: read(self) for name, read in fields.items()}
        for name, values in extra.items():
            if name in vars(self):
                raise UserError(
                    f"every batch has a field {name}. Give the extra field a different name"
                )
            if values.shape[:2] != self.tokens.shape:
                raise UserError(
                    f"the field {name} of a batch has the shape {tuple(values.shape)}. "
                    "Return (B, S, ...), for example by expand_as(batch.tokens)"
                )
        return replace(self, extra=extra)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Apply a function to each field."""
        return Batch(
            function(self.tokens),
            function(self.targets),
            function(self.positions),
            function(self.doc_ids),
            {name: function(values) for name, values in self.extra.items()},
        )

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


Fields = dict[str, Callable[[Batch], Tensor]]  # keyword -> function that computes it


def find_fields(loss: str, model: str) -> Fields:
    """Return the extra fields of a loss and a model, whose names differ (checked in config/settings.py)."""
    return {**MODELS[model].fields, **LOSSES[loss].fields}
