"""Define the checkpoint folder: which rank writes which slice, and how the folder is committed. Needs no torch.

    step-20.tmp/                  being written or deleted; the next save removes all folders that end in .tmp
    step-20/                      renamed from step-20.tmp/ once all its files are on disk; never modified again
        rank-00000.safetensors    the shards that rank 0 wrote, under the names of their tensors
        rank-00001.safetensors    ...
        manifest.json             step, fingerprint (must match on resume), run (config, layout), one line per tensor:
                                  dtype, shape and how it is split
        checksums                 SHA-256 of each file above; `sha256sum --check checksums` lists changed files
    step-10.damaged/              a damaged checkpoint, renamed so that step 10 can be saved again

A folder step-N is always a complete checkpoint. No file contains code, and pickles are never opened. The manifest is
trusted if its hash matches. Exports to Hugging Face folders are written and committed in the same way as checkpoints.

    layers.3.attention.wq.weight (256, 256)      stage 1   split dim 0 over tp, then over dp_shard x cp
    norm.weight (256,)                           stage 1   split dim 0 over dp_shard x cp; tp ranks have copies

    mesh pp2 x dp_shard2 x tp2      rank 4          rank 5          rank 6          rank 7
    wq.weight                       rows 0..63      rows 128..191   rows 64..127    rows 192..255
    norm.weight, copy 0             rows 0..127     (equal)         rows 128..255   (equal)

The mesh degrees and the manifest line of a tensor determine which rank writes which slice, so a save gathers no list of
slices. A reader computes which ranks wrote the slices that it needs (read.py). If several ranks have equal slices, only
the rank with index `copy` among these ranks writes. save.py varies `copy` from tensor to tensor, so the ranks take
turns.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torchtitan_lite import files
from torchtitan_lite.config.layout import EXPERT_DIMS, MESH_DIMS
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.config.schema import Checkpoint

MANIFEST = "manifest.json"
# key in `run` for the files that were published with the initial weights: file name -> content
IN_MANIFEST = "hugging_face"
CHECKSUMS = "checksums"
FORMAT = 4
UNFINISHED = ".tmp"  # suffix of a folder that is being written or deleted

Degrees = dict[str, int]  # Layout.all_degrees: mesh dim -> number of ranks


# ---------------------------------------------------------------- who writes which slice


class Split(NamedTuple):
    """How one dim of a tensor is split: one slice for each rank of these mesh dims, outermost first."""

    dim: int
    mesh_dims: tuple[str, ...]


class TensorRecord(NamedTuple):
    """A line of the manifest, which describes a tensor."""

    dtype: str  # as torch spells it, such as "float32"
    shape: Sequence[int]
    stage: int  # pp coordinate of the ranks that have this tensor
    splits: Sequence[Split]  # splits of dims, in the order in which they are applied
    copy: int  # index of the writing rank among the ranks with equal slices

    @property
    def mesh_dims(self) -> tuple[str, ...]:
        """All dims of the mesh that shards this tensor."""
        return EXPERT_DIMS if self.split_dims & {"efsdp", "ep"} else MESH_DIMS

    @property
    def split_dims(self) -> set[str]:
        return {mesh_dim for split in self.splits for mesh_dim in split.mesh_dims}

    @property
    def copy_dims(self) -> list[str]:
        """The mesh dims whose ranks have equal slices."""
        return [dim for dim in self.mesh_dims if dim not in {"pp", *self.split_dims}]


def name_file(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


def find_coordinates(rank: int, mesh_dims: Sequence[str], degrees: Degrees) -> dict[str, int]:
    """Return the index of a rank on each of `mesh_dims`, which are listed outermost first."""
    coordinates = {}
    for mesh_dim in reversed(mesh_dims):
        rank, coordinates[mesh_dim] = divmod(rank, degrees[mesh_dim])
    return coordinates


def find_writer(
    record: TensorRecord, degrees: Degrees, at: dict[str, int], among: Sequence[int] | None = None
) -> int | None:
    """Return the rank that writes the slice at these coordinates. `at` need not contain coordinates on copy_dims.

    For a snapshot, `among` lists the ranks of one host: the first listed rank that has the slice writes it. Returns
    None if no listed rank has the slice. If `among` is None, `record.copy` selects the writer among all ranks that have
    the slice.
    """
    if among is not None:
        for rank in among:
            other = find_coordinates(rank, record.mesh_dims, degrees)
            if all(other[mesh_dim] == at[mesh_dim] for mesh_dim in {"pp", *record.split_dims}):
                return rank
        return None
    writer = {**at, **find_coordinates(record.copy, record.copy_dims, degrees)}
    rank = 0
    for mesh_dim in record.mesh_dims:
        rank = rank * degrees[mesh_dim] + writer[mesh_dim]
    return rank


# ---------------------------------------------------------------- the folder


class CheckpointError(UserError):
    """Raised if a checkpoint cannot be used or written."""

    status = 1


class DamagedCheckpoint(CheckpointError):
    """Raised if a checkpoint has changed since it was saved. The message names the file."""


@dataclass(frozen=True)
class Manifest:
    step: int
    fingerprint: dict[str, object]  # must match on resume: documents, tokenizer, model_args
    # config, layout and launch of the run; for exports, also config.json of the initial weights
    run: dict[str, object]
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    mesh: Degrees = field(default_factory=dict)  # mesh degrees of the run that saved the checkpoint
    host: list[int] | None = None  # for a snapshot: the ranks of the host that wrote the snapshot
    format: int = FORMAT


def find_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in `folder`, ascending. Does not check them."""
    steps = []
    for path in folder.glob(f"step-*/{MANIFEST}"):
        number = path.parent.name.removeprefix("step-")
        if number.isdecimal():
            steps.append(int(number))
    return sorted(steps)


def name_unfinished(final: Path) -> Path:
    return final.with_name(final.name + UNFINISHED)


def create_unfinished(final: Path) -> Path:
    """Create the temporary folder for `final`. Raises OSError, or CheckpointError if either folder exists."""
    unfinished = name_unfinished(final)
    for path in (final, unfinished):
        if path.exists():
            raise CheckpointError(
                f"{path} already exists, and is never overwritten: delete or move it, or name a different folder"
            )
    unfinished.mkdir(parents=True)
    return unfinished


def write_file(path: Path, content: bytes) -> str:
    """Write a file, flush it to disk, and return its hash. Raises OSError."""
    path.write_bytes(content)
    return flush_and_hash(path)


def flush_and_hash(path: Path) -> str:
    """Flush a file to disk, and compute its hash from the page cache at the same time. Return the hash. Raises
    OSError."""
    with open(path, "rb") as file, ThreadPoolExecutor(1) as thread:
        hashing = thread.submit(files.hash_file, path)
        os.fsync(file.fileno())
    return hashing.result()


def write_manifest(folder: Path, manifest: Manifest, hashes: Mapping[str, str]) -> None:
    """Write the manifest and the file of checksums. `hashes` maps every other file to its hash."""
    content = json.dumps(vars(manifest)).encode()
    hashes = {**hashes, MANIFEST: write_file(folder / MANIFEST, content)}
    lines = [f"{digest}  {name}\n" for name, digest in sorted(hashes.items())]
    write_file(folder / CHECKSUMS, "".join(lines).encode())


def commit(final: Path) -> None:
    """Rename the unfinished folder to `final`. The files in the folder must already be on disk. Raises OSError."""
    unfinished = name_unfinished(final)
    files.sync_folder(unfinished)
    unfinished.rename(final)
    files.sync_folder(final.parent)


def discard(final: Path) -> None:
    """Delete the failed save of `final`. If the deletion fails, the next save deletes the folder."""
    shutil.rmtree(name_unfinished(final), ignore_errors=True)


def remove_partial(folder: Path) -> None:
    """Delete folders of unfinished saves and deletions. The run must have locked the dump folder."""
    for partial in folder.glob(f"step-*{UNFINISHED}"):
        shutil.rmtree(partial)


def prune(folder: Path, section: Checkpoint) -> None:
    """Delete all checkpoints except the newest keep_latest_k. 0 keeps all."""
    for step in find_steps(folder)[: -section.keep_latest_k]:  # [:-0] is empty
        path = folder / f"step-{step}"
        shutil.rmtree(path.rename(name_unfinished(path)))
