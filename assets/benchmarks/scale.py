"""Save and load a checkpoint as one of many thousands of ranks, and measure the costs that grow with their number.

    python3 -m assets.benchmarks.scale --ranks 256 4096 16384      one line per model, world size and layout

This runs the code of the trainer: plan_save, CheckpointSaver, load_newest. The other ranks are a fake process group.
Tensors have only shapes, and files have only headers. When a rank's file is opened for the first time, the script
creates the file with the slices that format.py assigns to the rank. So the script measures the size of the metadata,
the number of files, the messages, and the CPU time. The script does not read, hash or send the data of tensors.
"""

import argparse
import hashlib
import json
import struct
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from pickle import dumps
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from torchtitan_lite import build, files
from torchtitan_lite.checkpoint import load, save
from torchtitan_lite.checkpoint.format import (
    Degrees,
    Manifest,
    TensorRecord,
    find_coordinates,
    find_writer,
    name_file,
)
from torchtitan_lite.checkpoint.read import read_manifest
from torchtitan_lite.config.schema import Checkpoint, with_value
from torchtitan_lite.dtensor import find_shard
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.tools.plan import fake_world
from torchtitan_lite.tools.plan.planned_run import PlannedRun, plan_run
from torchtitan_lite.tools.tables import format_bytes, format_table

CPU = torch.device("cpu")
LAYOUT = "parallelism."
MODELS = {  # config -> layout keys that the saving run changes, layout keys that the resuming run changes
    "llama3_8b": ({}, {"tensor_parallel_degree": 8}),
    "llama3_70b": ({}, {"tensor_parallel_degree": 8, "pipeline_parallel_degree": 4}),
    "llama3_405b": ({}, {"pipeline_parallel_degree": 1}),
    "qwen3_30b_a3b": ({}, {"expert_parallel_degree": 16}),
}
STEP = 1000
# FSDP cannot shard the experts over more ranks. Larger jobs replicate the model over dp_replicate
MOST_EXPERT_RANKS = 256
DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "int64": ("I64", 8)}


class Cost(NamedTuple):
    """The costs of one rank in a save or a load."""

    metadata_bytes: int  # bytes of metadata that are read or written
    files: int  # number of files that are opened
    messages: int
    message_bytes: int  # sent and received by this rank
    seconds: float  # CPU time of one core
    peak_bytes: int  # peak of Python's memory, without the shards
    n_sources: int = 0  # files with slices that overlap the shards of this rank


def plan(name: str, n_ranks: int, changes: dict[str, int]) -> PlannedRun:
    """Plan a shipped config on this number of ranks, with some keys of the layout changed."""
    args = [f"--config={name}", f"--training.global_batch_size={4 * n_ranks}"]
    if name.startswith("qwen3") and n_ranks > MOST_EXPERT_RANKS:
        n_copies = n_ranks // MOST_EXPERT_RANKS
        args.append(f"--{LAYOUT}data_parallel_replicate_degree={n_copies}")
    for key, value in changes.items():
        args.append(f"--{LAYOUT}{key}={value}")
    return plan_run(args, n_ranks, "h100")


@contextmanager
def as_rank(planned: PlannedRun, rank: int) -> Iterator[dict[str, Tensor]]:
    """Context manager: act as one rank of a run. Yields the tensors to save, as fake tensors."""
    config = with_value(planned.resolved, "compile.enable", False)
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(fake_world.fake_group(planned.layout.world_size, rank=rank))
        mesh = build_mesh(planned.layout, CPU.type)
        parts = build.build_parts(config, planned.model_args, planned.layout, mesh)
        enter(fake_world.static_stages(config, planned.model_args, planned.layout))
        enter(patch.object(build, "initialize_weights", lambda *args: None))
        enter(fake_world.fake_tensors())
        run = build.build_run(config, planned.model_args, planned.layout, mesh, CPU, parts=parts)
        for parameter in run.parameters.values():  # a step of AdamW on fake tensors takes minutes
            moment = parameter.detach()
            state = {"step": torch.zeros(()), "exp_avg": moment, "exp_avg_sq": moment}
            run.optimizer.state[parameter] = state
        named = run.name_tensors()
        enter(_disable_current_modes())  # in fake mode, every coordinate would be read as 1
        yield named


@dataclass
class Stored:
    """A checkpoint whose files have only headers. Each file is created when it is first opened."""

    folder: Path
    manifest: Manifest
    opened: Counter  # file -> number of times
    sources: set[str]

    def create_file(self, name: str) -> Path:
        path = self.folder / name
        if path.exists():
            return path
        rank = int(name.removeprefix("rank-").removesuffix(".safetensors"))
        mesh = self.manifest.mesh
        header: dict[str, Any] = {}
        sharding = {}
        at = 0
        for tensor, record in self.manifest.tensors.items():
            at_rank = find_coordinates(rank, record.mesh_dims, mesh)
            if record.stage != at_rank["pp"] or find_writer(record, mesh, at_rank) != rank:
                continue
            offsets, sizes = find_slice(record, mesh, at_rank)
            if prod(sizes):
                dtype, n_bytes = DTYPES[record.dtype]
                stop = at + prod(sizes) * n_bytes
                header[tensor] = {"dtype": dtype, "shape": sizes, "data_offsets": [at, stop]}
                sharding[tensor] = {save.OFFSETS: offsets}
                at = stop
        header["__metadata__"] = {"format": "pt", save.SHARDING: json.dumps(sharding)}
        content = json.dumps(header).encode()
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(content)) + content)
            file.truncate(8 + len(content) + at)
        return path

    def open_tensors(self, path: Path) -> SimpleNamespace:
        """Replace safe_open: read the header, and return slices that have a shape but no data."""
        self.create_file(path.name)
        self.opened[path.name] += 1
        with open(path, "rb", buffering=0) as file:
            (n_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(n_bytes))
        self.sources.add(path.name)
        return SimpleNamespace(get_slice=lambda name: EmptySlice(*header[name]["shape"]))

    def hash_file(self, path: Path) -> str:
        """Return a placeholder hash, because the file has no data."""
        self.opened[path.name] += 1
        return digest_name(path.name)


def find_slice(
    record: TensorRecord, degrees: Degrees, coordinates: dict[str, int]
) -> tuple[list[int], list[int]]:
    """Return the offsets and sizes of the slice of a rank."""
    offsets = [0] * len(record.shape)
    sizes = list(record.shape)
    for dim, mesh_dims in record.splits:
        n = 1
        index = 0
        for mesh_dim in mesh_dims:
            n *= degrees[mesh_dim]
            index = index * degrees[mesh_dim] + coordinates[mesh_dim]
        size = ceil(sizes[dim] / n)
        start = min(index * size, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(size, sizes[dim] - start)
    return offsets, sizes


class EmptySlice:
    """Stands for a shard or a stored slice. It has a shape, but no data."""

    def __init__(self, *shape: int):
        self.shape = torch.Size(shape)

    def __getitem__(self, box: tuple[slice, ...]) -> "EmptySlice":
        sizes = []
        for part, length in zip(box, self.shape, strict=True):
            assert 0 <= part.start < part.stop <= length
            sizes.append(part.stop - part.start)
        return EmptySlice(*sizes)

    def copy_(self, values: "EmptySlice") -> None:
        assert self.shape == values.shape


def find_empty_shard(tensor: Tensor) -> tuple[EmptySlice, Sequence[int]]:
    """Replace find_shard: return a shard without data."""
    shard, begin = find_shard(tensor)
    return EmptySlice(*shard.shape), begin


def digest_name(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def list_records(planned: PlannedRun) -> dict[str, TensorRecord]:
    """Return the lines of the manifest that rank 0 receives from all ranks."""
    layout = planned.layout
    tensors = {}
    for stage in range(layout.pp):
        rank = stage * (layout.world_size // layout.pp)
        # with the argument `[rank]`, the plan of this rank contains all manifest lines of its pipeline stage
        with as_rank(planned, rank) as named:
            tensors |= save.plan_save(named, layout.all_degrees, rank, [rank]).records
    return tensors


class Messages:
    """Replaces the collectives of a save or a load, so that one process can act as one rank of many. Counts the bytes
    that this rank sends and receives."""

    def __init__(self, records: dict[str, TensorRecord]):
        self.records = records
        self.n = 0
        self.n_bytes = 0

    def count(self, n_bytes: int) -> None:
        self.n += 1
        self.n_bytes += n_bytes

    def all_reduce(self, tensor: Tensor, *args: object, **options: object) -> None:
        self.count(tensor.nbytes)

    def broadcast_object_list(self, told: list, **options: object) -> None:
        self.count(len(dumps(told[0])))

    def gather_object(self, own: tuple, told: list[tuple] | None, **options: object) -> None:
        """Every rank receives the lengths of all messages; rank 0 receives each message, padded to the longest."""
        n_ranks = dist.get_world_size()
        self.count(8 * n_ranks)
        n_bytes = len(dumps(own))
        if told is None:
            self.count(n_bytes)
            return
        self.n += n_ranks
        self.n_bytes += n_ranks * n_bytes
        for rank in range(n_ranks):
            file = name_file(rank)
            told[rank] = {file: digest_name(file)}, {} if rank else self.records

    def patched(self) -> Any:
        names = ("all_reduce", "broadcast_object_list", "gather_object")
        return patch.multiple(dist, **{name: getattr(self, name) for name in names})


def write_header(path: Path, slices: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write only the header of a safetensors file, without data. Replaces save_file."""
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, tensor in slices.items():
        dtype, n_bytes = DTYPES[str(tensor.dtype).removeprefix("torch.")]
        stop = at + tensor.numel() * n_bytes
        header[name] = {"dtype": dtype, "shape": [*tensor.shape], "data_offsets": [at, stop]}
        at = stop
    path.write_text(json.dumps(header))


def measure_save(
    planned: PlannedRun,
    rank: int,
    named: dict[str, Tensor],
    folder: Path,
    records: dict[str, TensorRecord],
) -> Cost:
    """Save as one rank, and measure the costs. Rank 0 writes a manifest and checksums to `folder`."""
    layout = planned.layout
    mesh = layout.all_degrees
    about = save.describe_run(planned.resolved, layout.degrees, {})
    manifest = Manifest(STEP, {}, about, mesh=mesh)
    section = Checkpoint(enable=True, async_mode="disabled", keep_latest_k=0)
    messages = Messages(records)
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(messages.patched())
        enter(patch.object(save, "write_tensors", write_header))
        enter(patch.object(save, "flush_and_hash", lambda path: digest_name(path.name)))
        started_s = time.process_time()
        saving = save.plan_save(named, mesh, rank)
        saver = save.CheckpointSaver(
            folder, section, lambda: named, manifest, dist.group.WORLD, CPU
        )
        if rank:
            (folder / f"step-{STEP}.tmp").mkdir(parents=True, exist_ok=True)
        saver.write(STEP, saving)
        seconds = time.process_time() - started_s
    written = list(folder.rglob("*/*"))
    n_bytes = sum(path.stat().st_size for path in written)
    for path in folder.rglob(saving.file):
        path.unlink()
    return Cost(n_bytes, len(written), messages.n, messages.n_bytes, seconds, 0)


def measure_load(planned: PlannedRun, rank: int, named: dict[str, Tensor], path: Path) -> Cost:
    """Load as one rank, and measure the costs.

    The checkpoint is loaded three times: the first load creates the files, the second measures the seconds, and the
    third measures the peak memory.
    """
    manifest = read_manifest(path)
    world = dist.group.WORLD
    for is_traced in (None, False, True):
        stored = Stored(path, manifest, Counter(), set())
        messages = Messages({})
        if is_traced:
            tracemalloc.start()
        with (
            patch.object(load, "find_shard", find_empty_shard),
            patch.object(load, "open_tensors", stored.open_tensors),
            patch.object(files, "hash_file", stored.hash_file),
            messages.patched(),
        ):
            read_before = count_read()
            started_s = time.process_time()
            load.load_newest([load.Saved(STEP, path, world)], lambda _: named, world)
            if is_traced is False:
                seconds = time.process_time() - started_s
                n_read = count_read() - read_before
        if is_traced:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    n_files = len(stored.opened) + 2  # manifest and checksums
    n_sources = len(stored.sources)
    return Cost(n_read, n_files, messages.n, messages.n_bytes, seconds, peak, n_sources)


def count_read() -> int:
    """Return the number of bytes that this process has read from files. Linux only."""
    return int(Path("/proc/self/io").read_text().split()[1])


def measure(name: str, n_ranks: int) -> dict[str, Cost]:
    """Measure a save on the shipped layout, and the time to resume on this layout and on a different layout."""
    shipped, other = MODELS[name]
    planned = plan(name, n_ranks, shipped)
    rank = n_ranks * 5 // 8 + 1
    records = list_records(planned)
    costs = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with as_rank(planned, 0) as named:
            costs["save, rank 0"] = measure_save(planned, 0, named, folder / "0", records)
        path = folder / "0" / f"step-{STEP}"
        with as_rank(planned, rank) as named:
            costs["save"] = measure_save(planned, rank, named, folder / "other", {})
            costs["resume"] = measure_load(planned, rank, named, path)
        moved = plan(name, n_ranks, other)
        with as_rank(moved, rank) as named:
            costs[f"resume on {moved.layout}"] = measure_load(moved, rank, named, path)
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[256])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    options = parser.parse_args()
    titles = ("model, ranks, layout", "", "metadata", "files", "messages", "bytes", "CPU s", "peak")
    for name in options.models:
        for n_ranks in options.ranks:
            rows = [titles]
            title = f"{name}, {n_ranks}, {plan(name, n_ranks, MODELS[name][0]).layout}"
            for what, cost in measure(name, n_ranks).items():
                metadata, n_files, n_messages, n_bytes, seconds, peak, _ = cost
                sizes = format_bytes(metadata), f"{n_files:,}", f"{n_messages:,}"
                moved = format_bytes(n_bytes)
                used = format_bytes(peak) if peak else "-"
                rows.append((title, what, *sizes, moved, f"{seconds:.2f}", used))
                title = ""
            print(format_table(rows, "<<>>>>>>"), flush=True)


if __name__ == "__main__":
    main()
