"""Storage for torch.distributed.checkpoint (DCP): torch's safetensors shards, plus a manifest, hashes and a rename.

DCP plans which rank writes which chunk of a tensor (replicas once), and which chunks a rank of any other layout reads.
Files have the format of torch's HuggingFaceStorageWriter(save_distributed=True), so torch's HuggingFaceStorageReader
opens a checkpoint without this package. Additions:

    save   rank 0: create step-20.tmp/   every rank: write and hash its file   rank 0: manifest, rename to step-20/
    load   reads metadata from the manifest, because torch's reader opens every file on every rank to collect it

If one rank fails, every rank raises the same error. Otherwise the others would wait in their next collective, and
report a time-out minutes later. DCP does this for its own calls; `raise_on_all_ranks` does it for everything else.
"""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtitan_lite.checkpoint import folders
from torchtitan_lite.checkpoint.manifest import (
    CheckpointError,
    Chunk,
    DamagedCheckpoint,
    Manifest,
    TensorRecord,
    find_damage,
    read_checksums,
    read_manifest,
)
from torchtitan_lite.config.files import hash_file

# Keys of the file header that tell torch's reader the offsets of a shard in its tensor.
SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


# --- errors ---


def raise_on_all_ranks(group: dist.ProcessGroup, action: Callable[[], Any]) -> Any:
    """Call `action` on every rank. If it fails on any rank, all raise the error of the first such rank. Collective."""
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        failure = as_checkpoint_error(error)
    failures: list[CheckpointError | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, failure, group=group)  # a few hundred bytes per rank
    if first := next((failure for failure in failures if failure), None):
        raise first
    return result


def do_on_rank_0(group: dist.ProcessGroup, action: Callable[[], Any]) -> Any:
    """Call `action` on rank 0 only. Return its result, or raise its error, on every rank. Collective."""
    results = [raise_on_all_ranks(group, action if dist.get_rank(group) == 0 else lambda: None)]
    dist.broadcast_object_list(results, group=group, group_src=0)
    return results[0]


def explain_dcp_error(error: CheckpointException) -> CheckpointError:
    """Return the error of the lowest rank that failed. DCP raises the errors of all ranks on all ranks."""
    rank, (failure, _) = min(error.failures.items())
    return as_checkpoint_error(failure, f"rank {rank}: ")


def as_checkpoint_error(error: BaseException, prefix: str = "") -> CheckpointError:
    """Return a CheckpointError with the same message, which any process can unpickle."""
    if isinstance(error, CheckpointError):
        return error
    kind = DamagedCheckpoint if isinstance(error, SafetensorError) else CheckpointError
    return kind(f"{prefix}{type(error).__name__}: {error}")


# --- DCP's hooks ---


class StorageWriter(HuggingFaceStorageWriter):
    """Writes the shards that DCP planned for this rank. Rank 0 also creates the folder and commits it.

    `unsaved` is the manifest without tensors.
    """

    def __init__(self, final: Path, unsaved: Manifest, rank: int):
        super().__init__(str(folders.name_unfinished(final)), save_distributed=True)
        self.final, self.unsaved, self.file_name = final, unsaved, f"rank-{rank:05}.safetensors"

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the folder. DCP calls this on rank 0, before any rank writes."""
        folders.remove_partial(self.final.parent)
        folders.create_unfinished(self.final)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors = {item.index.fqn: planner.resolve_data(item) for item in plan.items}
        assert len(tensors) == len(plan.items), "a rank has more than one shard of a tensor"
        offsets = {
            item.index.fqn: {OFFSETS: list(item.tensor_data.chunk.offsets)} for item in plan.items
        }
        results: list[WriteResult] = []
        if tensors:
            path = folders.name_unfinished(self.final) / self.file_name
            folders.write_tensors(path, tensors, {SHARDING: json.dumps(offsets)})
            with (
                open(path, "rb") as file,
                ThreadPoolExecutor(1) as thread,
                folders.explain_write_error(path),
            ):
                hashing = thread.submit(
                    hash_file, path
                )  # reads from the page cache while the disk writes
                os.fsync(file.fileno())
            results = [
                WriteResult(item.index, 0, (self.file_name, hashing.result()))
                for item in plan.items
            ]
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint. DCP calls this on rank 0 when the data of every rank is on disk."""
        stored = {result.index: result.storage_data for of_rank in results for result in of_rank}
        tensors = {}
        for name, saved in metadata.state_dict_metadata.items():
            chunks = [
                Chunk(stored[MetadataIndex(name, c.offsets)][0], (*c.offsets,), (*c.sizes,))
                for c in saved.chunks
            ]
            dtype = str(saved.properties.dtype).removeprefix("torch.")
            tensors[name] = TensorRecord(dtype, tuple(saved.size), tuple(chunks))
        folders.commit(self.final, replace(self.unsaved, tensors=tensors), dict(stored.values()))


class StorageReader(HuggingFaceStorageReader):
    """Reads the chunks that DCP planned for this rank from the checkpoint `folder`."""

    def __init__(self, folder: Path, manifest: Manifest):
        super().__init__(str(folder))
        self.folder, self.manifest = folder, manifest

    def read_metadata(self) -> Metadata:
        described, places = {}, {}
        for name, (dtype, shape, chunks) in self.manifest.tensors.items():
            boxes = [
                ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                for chunk in chunks
            ]
            properties = TensorProperties(dtype=getattr(torch, dtype))
            described[name] = TensorStorageMetadata(properties, torch.Size(shape), boxes)
            for chunk, box in zip(chunks, boxes, strict=True):
                places[MetadataIndex(name, box.offsets)] = SimpleNamespace(
                    relative_path=str(self.folder / chunk.file)
                )
        return Metadata(described, storage_data=places)


# --- for tools: one process, one tensor at a time ---


class OpenCheckpoint:
    """A checkpoint with its manifest. Files are opened when their tensors are read."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = folder, manifest

    def read(self, name: str) -> Tensor:
        """Return a full tensor on the CPU. Raises KeyError if there is none, DamagedCheckpoint for a damaged file."""
        dtype, shape, chunks = self.manifest.tensors[name]
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        for file, offsets, sizes in chunks:
            box = tuple(
                slice(start, start + size) for start, size in zip(offsets, sizes, strict=True)
            )
            tensor[box] = open_tensors(self.folder / file).get_tensor(name)
        return tensor


def open_tensors(path: Path) -> safe_open:
    """Map a safetensors file. Raises DamagedCheckpoint."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read as safetensors: {error}") from None


def open_checkpoint(folder: Path, *, verify: bool = True) -> OpenCheckpoint:
    """Open the checkpoint `folder` (a step-N). With `verify`, check the hashes of all files first.

    Raises CheckpointError if there is no checkpoint, DamagedCheckpoint with the names of damaged files.
    """
    manifest = read_manifest(folder)
    if verify and (damage := find_damage(folder, list(read_checksums(folder)))):
        raise DamagedCheckpoint("; ".join(damage))
    return OpenCheckpoint(folder, manifest)
