"""The storage of torch.distributed.checkpoint (DCP): safetensors and JSON in the place of its own files.

DCP plans which rank writes which box of which tensor, each copy once, and which boxes a rank of any other layout must
read. Its storage is an extension point. DCP's own files have metadata in a pickle, so that a crafted checkpoint runs
code, and no hashes, so that a flipped bit is loaded silently.

    save   rank 0: create step-20.tmp/   every rank: write and hash its file   rank 0: manifest, rename to step-20/
    load   every rank reads the manifest, and then only the boxes that it needs

If one rank fails, every rank raises the same error; otherwise the others would wait for it in their next collective,
and report a timeout minutes later. DCP does so for what it calls; `raise_on_all_ranks` does for everything else.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf, prod
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
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
    DamagedCheckpoint,
    Manifest,
    TensorRecord,
    find_damage,
    name_entry,
    name_file,
    read_checksums,
    read_manifest,
)
from torchtitan_lite.config.files import hash_file

Result = TypeVar("Result")
Entries = Mapping[str, tuple[torch.dtype, Sequence[int]]]  # name -> dtype and shape, in the order of the files


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


# --- one file ---


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file, and wait until it is on the disk. Raises CheckpointError."""
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with folders.explain_full_disk(path):
        save_file(on_host, path, {"format": "pt"})  # transformers refuses files without it
        path.chmod(0o644)  # the library lets nobody else read it
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def open_tensors(path: Path) -> safe_open:
    """Open a file with the safetensors library, which maps it and checks its header. Raises DamagedCheckpoint."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read as safetensors: {error}") from None


def cut_into_files(n_bytes: Mapping[str, int], most_file_bytes: float) -> list[list[str]]:
    """Cut a list of tensors, name -> bytes, into files of at most that size. A larger tensor gets its own file."""
    files: list[list[str]] = []
    filled = 0  # bytes of the last file
    for name, size in n_bytes.items():
        if not files or filled + size > most_file_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files


def convert_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor. Raises CheckpointError where a finite number becomes an infinity in float16."""
    converted = tensor.to(dtype)
    if dtype == torch.float16 and not torch.equal(converted.isfinite(), tensor.isfinite()):
        raise CheckpointError(f"{name} has numbers beyond 65,504, the largest of float16: choose bfloat16 or float32")
    return converted


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

    `unsaved` is the manifest without tensors.
    """

    def __init__(self, final: Path, unsaved: Manifest, rank: int):
        self.final, self.unsaved, self.file_name = final, unsaved, name_file(rank)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the folder. DCP calls this on rank 0, before any rank writes."""
        folders.remove_partial(self.final.parent)
        folders.create_unfinished(self.final)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        chunks, tensors = [], {}
        for item in plan.items:
            data = item.tensor_data
            chunk = Chunk(self.file_name, tuple(data.chunk.offsets), tuple(data.chunk.sizes))
            if 0 not in chunk.sizes:  # a rank beyond the last row has an empty shard
                chunks.append((item.index, chunk))
                tensors[name_entry(item.index.fqn, data.size, chunk)] = planner.resolve_data(item)
        if not chunks:
            return completed([])
        path = folders.name_unfinished(self.final) / self.file_name
        write_tensors(path, tensors)
        digest, size = hash_file(path, hashlib.blake2b()), path.stat().st_size
        return completed([WriteResult(index, size, (chunk, digest)) for index, chunk in chunks])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit. DCP calls this on rank 0, when every rank has all its data on the disk."""
        chunks: dict[str, list[Chunk]] = {name: [] for name in metadata.state_dict_metadata}
        hashes: dict[str, str] = {}
        for result in (result for of_rank in results for result in of_rank):
            chunk, hashes[chunk.file] = result.storage_data
            chunks[result.index.fqn].append(chunk)
        tensors = {
            name: TensorRecord(name_dtype(described.properties.dtype), tuple(described.size), tuple(chunks[name]))
            for name, described in metadata.state_dict_metadata.items()
        }
        folders.commit(self.final, replace(self.unsaved, tensors=tensors), hashes)


class StorageReader(NoSetUp, Reader):
    """Read the boxes that DCP has planned for this rank from the checkpoint `folder`."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = folder, manifest

    def read_metadata(self) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=getattr(torch, record.dtype)),
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
            planned.setdefault(chunk.file, []).append((item, name_entry(item.storage_index.fqn, record.shape, chunk)))
        for name, items in planned.items():
            file = open_tensors(self.folder / name)
            for item, entry in items:
                target = planner.resolve_tensor(item)
                box = zip(item.storage_offsets, target.shape, strict=True)
                # A view of the mapped file: it allocates nothing
                target.detach().copy_(read_box(file, entry, [slice(start, start + size) for start, size in box]))
                planner.commit_tensor(item, target)
        return completed(None)


def read_box(file: safe_open, entry: str, box: Iterable[slice]) -> Tensor:
    return file.get_slice(entry)[tuple(box) or ...]


def name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def completed(result: object) -> Future:
    future: Future = Future()
    future.set_result(result)
    return future


# --- in one process, for tools: one tensor at a time is read, however large the model is ---


class OpenCheckpoint:
    """A checkpoint whose manifest is read. Files are opened when their tensors are read."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        # Name -> dtype and shape of the whole tensor.
        self.tensors = {name: (getattr(torch, r.dtype), r.shape) for name, r in manifest.tensors.items()}

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, on the CPU. Raises KeyError if there is none, DamagedCheckpoint for a damaged file."""
        dtype, shape = self.tensors[name]
        tensor = torch.empty(shape, dtype=dtype)
        for chunk in self.manifest.tensors[name].chunks:
            box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            tensor[box] = open_tensors(self.folder / chunk.file).get_tensor(name_entry(name, shape, chunk))
        return tensor


def open_checkpoint(folder: Path, *, verify: bool = True) -> OpenCheckpoint:
    """Open the checkpoint `folder` (a step-N). With `verify`, read and hash all its files first.

    Raises CheckpointError where there is none, DamagedCheckpoint naming the damaged files.
    """
    manifest = read_manifest(folder)
    if verify and (damage := find_damage(folder, list(read_checksums(folder)))):
        raise DamagedCheckpoint("; ".join(damage))
    return OpenCheckpoint(folder, manifest)


def write_checkpoint(
    folder: Path,
    step: int,
    tensors: Entries,
    read: Callable[[str], Tensor],
    *,
    fingerprint: Mapping[str, object] | None = None,
    run: Mapping[str, object] | None = None,
    most_file_bytes: float = inf,
) -> None:
    """Write `tensors` as a new checkpoint. `read(name)` returns each of them when it is needed; a file is in memory.

    Raises CheckpointError if `folder` or an unfinished one exists, or cannot be written; then nothing is left.
    """
    unfinished = folders.create_unfinished(folder)
    n_bytes = {name: prod(shape) * dtype.itemsize for name, (dtype, shape) in tensors.items()}
    records, hashes = {}, {}
    try:
        for number, names in enumerate(cut_into_files(n_bytes, most_file_bytes)):
            file = name_file(number)
            write_tensors(unfinished / file, {name: read(name) for name in names})
            hashes[file] = hash_file(unfinished / file, hashlib.blake2b())
            for name in names:
                dtype, shape = tensors[name]
                chunk = Chunk(file, (0,) * len(shape), tuple(shape))
                records[name] = TensorRecord(name_dtype(dtype), tuple(shape), (chunk,))
        folders.commit(folder, Manifest(step, dict(fingerprint or {}), dict(run or {}), records), hashes)
    except BaseException:
        folders.discard(folder)
        raise
