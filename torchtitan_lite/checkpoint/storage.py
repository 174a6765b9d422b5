"""The storage of torch.distributed.checkpoint (DCP): our files in the place of its own.

DCP plans which rank writes which chunk of which tensor, each copy once, and which chunks a rank of any other layout
must read. Its storage is an extension point. DCP's own files have metadata in a pickle, so that a crafted checkpoint
runs code, and no hashes, so that a flipped bit is loaded silently. The classes here write and read safetensors files
and one JSON manifest.

    save   rank 0: create step-20.tmp/   every rank: write and hash its file   rank 0: manifest, rename to step-20/
    load   every rank reads the manifest, and then only the boxes that it needs
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint import StorageReader as Reader
from torch.distributed.checkpoint import StorageWriter as Writer
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
from torchtitan_lite.checkpoint.manifest import Chunk, FileRecord, Manifest, TensorRecord, name_entry
from torchtitan_lite.checkpoint.tensor_files import DTYPE_NAMES, DTYPES, TensorFileReader, TensorFileWriter


class StagedPlanner(DefaultSavePlanner):
    """Plan with the tensors of the run; write this rank's copies of them, if there are any.

    DCP shares an error of `finish_copies` with all ranks, so that none waits for a rank without memory for the copies.
    """

    def __init__(self, finish_copies: Callable[[], dict[str, Tensor]] | None):
        super().__init__(flatten_state_dict=False)
        self.finish_copies = finish_copies
        self.staged: dict[str, Tensor] | None = None

    def create_local_plan(self) -> SavePlan:
        if self.finish_copies is not None:
            self.staged = self.finish_copies()
        return super().create_local_plan()

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return super().lookup_object(index) if self.staged is None else self.staged[index.fqn]


def name_file(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


class StorageWriter(Writer):
    """Write what DCP has planned for this rank. Rank 0 also creates the folder and commits it.

    `unsaved` is the manifest without files and tensors.
    """

    def __init__(self, final: Path, unsaved: Manifest, rank: int):
        self.final, self.unsaved = final, unsaved
        self.file_name = name_file(rank)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the folder. DCP calls this on rank 0, before any rank writes."""
        folders.remove_partial(self.final.parent)
        folders.create_unfinished(self.final, replace=True)
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
        unsaved = self.unsaved
        folders.commit(self.final, Manifest(unsaved.step, unsaved.fingerprint, unsaved.run, files, tensors))

    # DCP's interface asks for these; our storage does not need them.

    def reset(self, checkpoint_id: object = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True


class StorageReader(Reader):
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
                entry, target = name_entry(item.storage_index.fqn, record, chunk), planner.resolve_tensor(item)
                box = file.read(entry, record.dtype, chunk.sizes, tuple(item.storage_offsets), target.shape)
                target.detach().copy_(box)
                planner.commit_tensor(item, target)
        return completed(None)

    def reset(self, checkpoint_id: object = None) -> None:
        pass

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True


def completed(result: object) -> Future:
    future: Future = Future()
    future.set_result(result)
    return future
