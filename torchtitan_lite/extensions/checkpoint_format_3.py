"""Read checkpoints of format 3, whose manifest lists every stored slice of every tensor.

    "layers.0.attention.wq.weight": ["float32", [256, 256], [["rank-00000.safetensors", [0, 0], [128, 256]], ...]]

The tensor files are the same as in format 4. Saves always write format 4. Needs no torch.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torchtitan_lite.checkpoint.read import Slice


class OldRecord(NamedTuple):
    """A tensor in a manifest of format 3. The first two fields have the same meaning as in TensorRecord."""

    dtype: str
    shape: Sequence[int]
    slices: list[Slice]


def parse_records(raw: dict[str, list]) -> dict[str, OldRecord]:
    records = {}
    for name, (dtype, shape, stored) in raw.items():
        records[name] = OldRecord(dtype, shape, [Slice(*each) for each in stored])
    return records
