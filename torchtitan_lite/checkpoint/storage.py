"""The storage of torch.distributed.checkpoint (DCP): our files in the place of its own.

DCP plans which rank writes which chunk of which tensor, each copy once, and which chunks a rank of any other layout
must read. Its storage is an extension point. DCP's own files have metadata in a pickle, so that a crafted checkpoint
runs code, and no hashes, so that a flipped bit is loaded silently. The classes here write and read safetensors files
and one JSON manifest.

    save   rank 0: create step-20.tmp/   every rank: write and hash its file   rank 0: manifest, rename to step-20/
    load   every rank reads the manifest, and then only the boxes that it needs

If one rank fails, every rank raises the same error; otherwise the others would wait for it in their next collective,
and report a timeout minutes later. DCP does so for what it calls; `raise_on_all_ranks` does for everything else.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint import StorageReader as Reader
from torch.distributed.checkpoint import StorageWriter as Writer
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtitan_lite.checkpoint import folders
from torchtitan_lite.checkpoint.manifest import (
    CheckpointError,
    Chunk,
    FileRecord,
    Manifest,
    TensorRecord,
    name_entry,
    name_file,
)
from torchtitan_lite.checkpoint.tensor_files import DTYPE_NAMES, DTYPES, TensorFileReader, TensorFileWriter

Result = TypeVar("Result")


# --- errors ---


def raise_on_all_ranks(group: dist.ProcessGroup, action: Callable[[], Result]) -> Result:
    """Call `action` on this rank. If it fails on any rank, raise the error of the first such rank. Collective."""
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


def do_on_rank_0(group: dist.ProcessGroup, action: Callable[[], Result]) -> Result:
    """Call `action` on rank 0 only. Return its result, or raise its error, on every rank. Collective."""
    results = [raise_on_all_ranks(group, action if dist.get_rank(group) == 0 else lambda: None)]
    dist.broadcast_object_list(results, group=group, group_src=0)
    return results[0]


def explain_dcp_error(error: CheckpointException) -> CheckpointError:
    """Return the error of the first rank that failed, out of what DCP raises on all ranks."""
    rank, (failure, _) = min(error.failures.items())
    return as_checkpoint_error(failure, f"rank {rank}: ")


def as_checkpoint_error(error: BaseException, prefix: str = "") -> CheckpointError:
    """Return the error itself, or one with its message that any process can unpickle."""
    return error if isinstance(error, CheckpointError) else CheckpointError(f"{prefix}{type(error).__name__}: {error}")


# --- DCP's hooks ---


class NoSetUp:
    """Methods that DCP's interfaces ask for, and that our storage does not need."""

    def reset(self, checkpoint_id: object = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        pass

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan | LoadPlan) -> SavePlan | LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list) -> list:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True


class StorageWriter(NoSetUp, Writer):
    """Write what DCP has planned for this rank. Rank 0 also creates the folder and commits it.

    `unsaved` is the manifest without files and tensors.
    """

    def __init__(self, final: Path, unsaved: Manifest, rank: int):
        self.final, self.unsaved = final, unsaved
        self.file_name = name_file(rank)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the folder. DCP calls this on rank 0, before any rank writes."""
        folders.remove_partial(self.final.parent)
        folders.create_unfinished(self.final)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        chunks = {}  # name of the entry -> DCP's item, and the chunk
        for item in plan.items:
            data = item.tensor_data
            chunk = Chunk(self.file_name, tuple(data.chunk.offsets), tuple(data.chunk.sizes))
            if 0 not in chunk.sizes:  # a rank beyond the last row has an empty shard
                record = TensorRecord(DTYPE_NAMES[data.properties.dtype], tuple(data.size), ())
                chunks[name_entry(item.index.fqn, record, chunk)] = (item, chunk)
        if not chunks:
            return completed([])
        entries = {name: (item.tensor_data.properties.dtype, chunk.sizes) for name, (item, chunk) in chunks.items()}
        with TensorFileWriter(folders.name_unfinished(self.final) / self.file_name, entries) as file:
            for name, (item, _) in chunks.items():
                file.write(name, planner.resolve_data(item))
            record = file.finish()
        return completed([WriteResult(item.index, record.size, (chunk, record)) for item, chunk in chunks.values()])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit. DCP calls this on rank 0, when every rank has all its data on the disk."""
        chunks: dict[str, list[Chunk]] = {name: [] for name in metadata.state_dict_metadata}
        files: dict[str, FileRecord] = {}
        for result in (result for of_rank in results for result in of_rank):
            chunk, files[chunk.file] = result.storage_data
            chunks[result.index.fqn].append(chunk)
        tensors = {
            name: TensorRecord(DTYPE_NAMES[described.properties.dtype], tuple(described.size), tuple(chunks[name]))
            for name, described in metadata.state_dict_metadata.items()
        }
        folders.commit(self.final, replace(self.unsaved, files=files, tensors=tensors))


class StorageReader(NoSetUp, Reader):
    """Read the boxes that DCP has planned for this rank from the checkpoint `folder`."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = folder, manifest

    def read_metadata(self) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=DTYPES[record.dtype]),
                    torch.Size(record.shape),
                    [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in record.chunks],
                )
                for name, record in self.manifest.tensors.items()
            }
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        planned: dict[str, list] = {}  # by file
        for item in plan.items:
            record = self.manifest.tensors[item.storage_index.fqn]
            (chunk,) = [chunk for chunk in record.chunks if chunk.offsets == tuple(item.storage_index.offset)]
            planned.setdefault(chunk.file, []).append((item, record, chunk))
        for name, items in planned.items():
            file = TensorFileReader(self.folder / name, self.manifest.files[name])
            for item, record, chunk in items:
                target = planner.resolve_tensor(item)
                box = file.read(item.storage_index.fqn, record, chunk, item.storage_offsets, target.shape)
                target.detach().copy_(box)
                planner.commit_tensor(item, target)
        return completed(None)


def completed(result: object) -> Future:
    future: Future = Future()
    future.set_result(result)
    return future
