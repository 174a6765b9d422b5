"""Read the manifest and the hashes of a checkpoint, and find the stored slices that overlap a region of a tensor. No
torch.

A dim of n elements over k ranks is split into slices of ceil(n/k) elements; as in torch.chunk, the last slices may be
smaller or empty. If a dim is split twice, the second split cuts each slice of the first split.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from itertools import product
from math import ceil, prod
from pathlib import Path
from typing import NamedTuple

from torchtitan_lite import files
from torchtitan_lite.checkpoint.format import (
    CHECKSUMS,
    FORMAT,
    MANIFEST,
    CheckpointError,
    DamagedCheckpoint,
    Degrees,
    Manifest,
    Split,
    TensorRecord,
    find_coordinates,
    find_writer,
    name_file,
)
from torchtitan_lite.config.extensions import load_extension

OLD_FORMAT = 3  # format whose manifest lists all slices of each tensor
OLD_READER = "checkpoint_format_3"  # the extension that reads this format


class Slice(NamedTuple):
    """One stored slice of a tensor."""

    file: str
    offsets: Sequence[int]  # index of the slice's first element in the full tensor
    sizes: Sequence[int]


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the checkpoint `folder`. Opens only the manifest and the file of checksums.

    Raises DamagedCheckpoint if one of these files is missing or has changed, and CheckpointError if this process cannot
    read it.
    """
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
        # stop reading at the manifest: it is among the first of possibly thousands of lines
        named = (digest for name, digest in read_checksums(folder) if name == MANIFEST)
        expected = next(named, None)
    except FileNotFoundError as error:
        if path.exists():
            raise DamagedCheckpoint(
                f"{error.filename} is missing, or {folder} is not a checkpoint"
            ) from None
        raise CheckpointError(f"{folder} is not a checkpoint: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from None
    if hashlib.sha256(content).hexdigest() != expected:
        raise DamagedCheckpoint(f"{path} has changed since it was written: see {CHECKSUMS}")
    raw = json.loads(content)
    if raw["format"] == FORMAT:
        for name, (*fields, splits, copy) in raw["tensors"].items():
            raw["tensors"][name] = TensorRecord(*fields, [Split(*split) for split in splits], copy)
    elif raw["format"] == OLD_FORMAT:
        raw["tensors"] = load_extension(OLD_READER).parse_records(raw["tensors"])
    else:
        raise CheckpointError(
            f"{folder} has format {raw['format']}, but this version reads formats {OLD_FORMAT} and {FORMAT}: "
            "use the version that saved it"
        )
    return Manifest(**raw)


def list_slices(
    record: TensorRecord,
    degrees: Degrees,
    offsets: Sequence[int],
    sizes: Sequence[int],
    among: Sequence[int] | None = None,
) -> Iterator[Slice]:
    """Yield the stored slices that overlap a box of the tensor. In the old format, yields all slices.

    If `among` is given (see find_writer), yields only slices that a rank in `among` has.
    """
    if not isinstance(record, TensorRecord):
        yield from record.slices
        return
    by_dim = []
    for dim, length in enumerate(record.shape):
        splits = [split for split in record.splits if split.dim == dim]
        stop = offsets[dim] + sizes[dim]
        by_dim.append(list_cuts(0, length, splits, degrees, offsets[dim], stop))
    for chosen in product(*by_dim):
        at = {"pp": record.stage}
        for coordinates, _, _ in chosen:
            at |= coordinates
        writer = find_writer(record, degrees, at, among)
        if writer is not None:
            begin = [first for _, first, _ in chosen]
            yield Slice(name_file(writer), begin, [length for _, _, length in chosen])


def list_cuts(
    begin: int, length: int, splits: Sequence[Split], degrees: Degrees, first: int, stop: int
) -> Iterator[tuple[dict[str, int], int, int]]:
    """Yield the slices of one dim that overlap first .. stop - 1, as (coordinates of a rank, first element, length).

    The first split cuts the `length` elements that start at `begin`. The second split cuts each slice of the first
    split, and so on.
    """
    if not splits:
        if max(begin, first) < min(begin + length, stop):
            yield {}, begin, length
        return
    split, *rest = splits
    n = prod(degrees[mesh_dim] for mesh_dim in split.mesh_dims)
    size = max(1, ceil(length / n))
    least = max(0, (first - begin) // size)
    most = min(n, ceil((stop - begin) / size))
    for index in range(least, most):
        start = index * size
        own_length = min(size, length - start)
        at = find_coordinates(index, split.mesh_dims, degrees)
        inner = list_cuts(begin + start, own_length, rest, degrees, first, stop)
        for inner_at, inner_begin, inner_length in inner:
            yield at | inner_at, inner_begin, inner_length


def require_files(folder: Path) -> None:
    """Compare the names in the folder with the checksums. Opens no file. Raises DamagedCheckpoint."""
    missing = sorted(dict(read_checksums(folder)).keys() - set(os.listdir(folder)))
    if missing:
        others = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DamagedCheckpoint(f"{folder / missing[0]} is missing{others}")


def read_checksums(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the hash of each file. Raises OSError."""
    with open(folder / CHECKSUMS, errors="replace") as lines:
        for line in lines:
            digest, _, name = line.rstrip("\n").partition("  ")
            yield name, digest


def require_undamaged(folder: Path, part: int, n_parts: int) -> None:
    """Hash part number `part` of `n_parts` of the files. Raises DamagedCheckpoint, which names the changed files."""
    checksums = dict(read_checksums(folder))
    names = sorted(checksums)[part::n_parts]
    if damage := files.find_damage({folder / name: checksums[name] for name in names}):
        raise DamagedCheckpoint("; ".join(damage))
