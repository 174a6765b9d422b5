"""Save checkpoints of a run on all ranks together, either between two steps or asynchronously.

    model.layers.3.attention.wq.weight            a weight, by its FQN in the full model; also expert biases
    optimizer.layers.3.attention.wq.weight.exp_avg

The learning rate, the position in the data and the initial weights are functions of step and seed, and a step draws no
random numbers. The step in the manifest is therefore enough to restore the learning rate, the data position and the
initial weights on any layout.

    after_step(20)   rank 0: create step-20.tmp/   every rank: write and hash its file   rank 0: manifest, rename, prune

format.py determines which rank writes which slice; a slice that several ranks have is written once. The ranks of a
pipeline stage divide the lines of the manifest among themselves. Rank 0 gathers the lines, and the hash of each file.
The gather pads every message to the length of the longest message, which is about 300 bytes if a pipeline stage has
more ranks than tensors.

If ranks fail, every rank raises the error of the lowest rank that failed. Files use the format of torch's
HuggingFaceStorageWriter(save_distributed=True), so torch's HuggingFaceStorageReader opens them without this package.

extensions/asynchronous_saves.py saves while the run trains.
"""

import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from torchtitan_lite.checkpoint.format import (
    IN_MANIFEST,
    CheckpointError,
    DamagedCheckpoint,
    Degrees,
    Manifest,
    Split,
    TensorRecord,
    commit,
    create_unfinished,
    discard,
    find_coordinates,
    find_steps,
    find_writer,
    flush_and_hash,
    name_file,
    name_unfinished,
    prune,
    remove_partial,
    write_manifest,
)
from torchtitan_lite.config.layout import MESH_DIMS
from torchtitan_lite.config.schema import Checkpoint, Config
from torchtitan_lite.dtensor import find_shard
from torchtitan_lite.files import describe_launch

logger = logging.getLogger(__name__)

SPIKES = "spike_filter."  # prefix of the tensors of extensions/spike_filter.py
# keys of the file header, where torch's reader finds the offsets of a shard within the full tensor
SHARDING = "DCP_SHARDING_INFO"
OFFSETS = "saved_offsets"
# for tensors of at least this number of elements, the ranks that have copies take turns as the writer
DEALT = 2**16
MOST_DAMAGED = 8  # maximum number of messages in one error
# torch joins the names of flattened dims with underscores; this pattern finds the name of each dim
DIM_NAME = re.compile("_?(dp_replicate|dp_shard|efsdp|ep|cp|tp|pp)")


@dataclass(frozen=True)
class SavePlan:
    """The slices that a rank writes to its file, and the manifest lines that it contributes."""

    file: str
    slices: dict[str, Tensor]
    sharding: dict[str, dict[str, list[int]]]  # name -> offsets of the slice, for torch's reader
    records: dict[str, TensorRecord]  # the manifest lines of this rank


def plan_save(
    tensors: dict[str, Tensor], mesh: Degrees, rank: int, host: list[int] | None = None
) -> SavePlan:
    """Plan which slices of `tensors` this rank writes. No communication.

    `host`: the ranks of this host for a snapshot, in which each host saves the shards of its own ranks; None for a
    checkpoint. In a snapshot, every rank contributes all lines of its pipeline stage.
    """
    n_ranks = prod(mesh[mesh_dim] for mesh_dim in MESH_DIMS[1:])
    stage, place = divmod(rank, n_ranks)
    n_lines = ceil(len(tensors) / n_ranks)  # number of manifest lines that each rank contributes
    plan = SavePlan(name_file(rank), {}, {}, {})
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        if name.startswith(SPIKES) and stage > 0 and host is None:
            continue  # this tensor is equal on all ranks, so only the first pipeline stage saves it
        dtype = str(tensor.dtype).removeprefix("torch.")
        record = TensorRecord(dtype, list(tensor.shape), stage, list_splits(tensor, mesh), 0)
        # The first of the ranks that have a small tensor always writes it, so few files contain small tensors. A rank
        # that resumes must open all of these files.
        if tensor.numel() >= DEALT:
            n_copies = prod(mesh[mesh_dim] for mesh_dim in record.copy_dims)
            record = record._replace(copy=number % n_copies)
        if host is not None or number // n_lines == place:
            plan.records[name] = record
        shard, begin = find_shard(tensor)
        at = find_coordinates(rank, record.mesh_dims, mesh)
        if shard.numel() and find_writer(record, mesh, at, host) == rank:
            plan.sharding[name] = {OFFSETS: list(begin)}
            plan.slices[name] = shard
    return plan


def list_splits(tensor: Tensor, mesh: Degrees) -> list[Split]:
    """Return the splits of a tensor over mesh dims, in the order in which they are applied."""
    if not isinstance(tensor, DTensor):
        return []
    splits = []
    placed = zip(tensor.placements, tensor.device_mesh.mesh_dim_names or (), strict=True)
    # FSDP's mesh dim is listed before tp and ep, but FSDP splits last: it cuts each slice of tp or ep.
    for placement, name in sorted(placed, key=lambda pair: isinstance(pair[0], _StridedShard)):
        assert not DIM_NAME.sub("", name), f"a checkpoint cannot describe the mesh dim {name}"
        mesh_dims = tuple(dim for dim in DIM_NAME.findall(name) if mesh[dim] > 1)
        if mesh_dims and not placement.is_replicate():
            splits.append(Split(placement.dim, mesh_dims))
    return splits


@dataclass(eq=False)
class CheckpointSaver(AbstractContextManager):
    """Saves to `folder` according to [checkpoint].

    Every save is complete when `after_step` returns, so `wait` does nothing. extensions/asynchronous_saves.py overrides
    `wait`.
    """

    folder: Path
    section: Checkpoint
    list_tensors: Callable[[], dict[str, Tensor]]  # Run.name_tensors
    manifest: Manifest  # has the fingerprint and the description of the run
    # gloo group of all ranks. A saving thread needs a separate group, because two threads that share a group can
    # deadlock.
    group: dist.ProcessGroup
    device: torch.device

    def after_step(self, step: int, *, n_steps: int, is_stopped: bool) -> dict[str, Any]:
        """Save a checkpoint after this step, if a save is due. `is_stopped`: whether a signal asked the run to end.
        Collective.

        Returns a dict with the path of the checkpoint, and the time in seconds that the ranks waited. The dict is empty
        if nothing is saved.
        """
        is_first = step == 1 and self.section.enable_first_step_checkpoint
        is_due = is_stopped or is_first or step == n_steps or step % self.section.interval == 0
        if self.section.load_only or not (self.section.enable and is_due):
            return {}
        started_s = time.perf_counter()
        tensors = self.list_tensors()
        if step == n_steps and self.section.last_save_model_only:
            tensors = export_weights(tensors, self.section.export_dtype)
        self.save(step, tensors)
        waited_s = time.perf_counter() - started_s  # training now continues on all ranks
        return {"path": str(self.folder / f"step-{step}"), "waited_s": waited_s}

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint of this run; None before the first save."""
        steps = find_steps(self.folder)
        return self.folder / f"step-{steps[-1]}" if steps else None

    def save(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Save this rank's shards `tensors` as step-N. Collective.

        Raises CheckpointError if the save failed on any rank. A failed save leaves no files behind.
        """
        plan = plan_save(tensors, self.manifest.mesh, dist.get_rank(), self.manifest.host)
        self.write(step, plan)

    def write(self, step: int, plan: SavePlan) -> None:
        """Write and commit one checkpoint, then delete old ones."""
        final = self.folder / f"step-{step}"
        reports = [None] * self.group.size() if self.group.rank() == 0 else None
        try:
            do_on_rank_0(self.group, lambda: self.create(final))
            hashes = raise_on_all_ranks(self.group, lambda: write_slices(final, plan))
            dist.gather_object((hashes, plan.records), reports, group=self.group, group_dst=0)
            do_on_rank_0(self.group, lambda: self.finish(step, final, reports))
        except CheckpointError as error:
            # this error is raised on all ranks, so no rank is still writing
            if self.group.rank() == 0:
                discard(final)
            raise CheckpointError(
                f"{final} cannot be written: {error}. Check free space and permissions, then start the run again"
            ) from None

    def create(self, final: Path) -> None:
        remove_partial(final.parent)
        create_unfinished(final)

    def finish(
        self, step: int, final: Path, reports: list[tuple[dict[str, str], dict[str, TensorRecord]]]
    ) -> None:
        """Commit the checkpoint and delete old ones. All files of the checkpoint must be on disk.

        `reports`: for each rank, the result of `write_slices` and the manifest records of the rank's tensors.
        """
        hashes = {}
        tensors = {}
        for own_hashes, records in reports:
            hashes |= own_hashes
            tensors |= records
        manifest = replace(self.manifest, step=step, tensors=tensors)
        write_manifest(name_unfinished(final), manifest, hashes)
        commit(final)
        if manifest.host is None:  # snapshots are not logged, because they are too frequent
            logger.info(f"saved checkpoint {final}")
        try:
            prune(self.folder, self.section)
        except OSError as error:  # the new checkpoint is already complete
            logger.error(f"an old checkpoint cannot be deleted: {error}")

    def wait(self) -> None:
        """Wait for the save in flight, if any. Raises its error."""

    def __exit__(self, *why: object) -> None:
        """End the save in flight."""


def write_slices(final: Path, plan: SavePlan) -> dict[str, str]:
    """Write this rank's file. Return file name -> hash, or {} if the rank has nothing to write."""
    if not plan.slices:
        return {}
    path = name_unfinished(final) / plan.file
    write_tensors(path, plan.slices, {SHARDING: json.dumps(plan.sharding)})
    return {plan.file: flush_and_hash(path)}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file. The caller must flush the file to disk. Raises OSError or SafetensorError."""
    on_host = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    path.touch(exist_ok=False)
    # apply the umask, because safetensors makes the file readable only by its owner
    mode = path.stat().st_mode
    # transformers cannot load files whose metadata lacks "format"
    save_file(on_host, path, {"format": "pt", **metadata})
    path.chmod(mode)


def name_weights(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters, keyed by their names in a checkpoint."""
    return {f"model.{fqn}": parameter.detach() for fqn, parameter in parameters.items()}


def export_weights(tensors: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Return the weights among `tensors`, the tensors of a checkpoint, cast to `dtype`. Expert biases keep their
    dtype."""
    weights = {}
    for name, tensor in tensors.items():
        if name.startswith("model."):
            is_bias = name.endswith("expert_bias")
            weights[name] = tensor if is_bias else tensor.to(getattr(torch, dtype))
    return weights


def describe_run(
    config: Config, degrees: dict[str, int], published: dict[str, dict]
) -> dict[str, object]:
    """Return the field `run` of a manifest.

    `published`: file name -> content, for config.json and generation_config.json of the initial weights.
    """
    return {
        "config": asdict(config),
        "layout": degrees,
        "launch": describe_launch(),
        IN_MANIFEST: published,
    }


# ---------------------------------------------------------------- all ranks together


def raise_on_all_ranks(group: dist.ProcessGroup, action: Callable[[], Any]) -> Any:
    """Call `action` on every rank. If the call fails on any rank, all ranks raise the same error. Collective.

    If any rank has found damaged files, the error lists the damaged files of all ranks (the first MOST_DAMAGED
    messages), because damage causes other errors. Otherwise all ranks raise the error of the lowest rank that failed.
    """
    result = None
    failure = None
    try:
        result = action()
    except CheckpointError as error:
        failure = error
    except Exception as error:  # convert the exception to a type that every process can unpickle
        failure = CheckpointError(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
    n_failed = torch.tensor(int(failure is not None))
    dist.all_reduce(n_failed, group=group)  # 8 bytes
    if n_failed:
        answers: list[Any] = [None] * group.size()
        dist.all_gather_object(answers, failure, group=group)
        failures = [each for each in answers if each is not None]
        damage = [str(each) for each in failures if isinstance(each, DamagedCheckpoint)]
        if damage:
            each_once = list(dict.fromkeys(damage))
            raise DamagedCheckpoint("; ".join(each_once[:MOST_DAMAGED]))
        raise failures[0]
    return result


def do_on_rank_0(group: dist.ProcessGroup, action: Callable[[], Any]) -> Any:
    """Call `action` on rank 0 only. Every rank returns the result of this call, or raises the same error.
    Collective."""
    results = [raise_on_all_ranks(group, action if group.rank() == 0 else lambda: None)]
    dist.broadcast_object_list(results, group=group, group_src=0)
    return results[0]
