"""Save checkpoints of a run on all ranks together, either between two steps or asynchronously.

    model.layers.3.attention.wq.weight            a weight, by its FQN in the full model; also expert biases
    optimizer.layers.3.attention.wq.weight.exp_avg

Learning rate, position in the data and initial weights are functions of step and seed, and a step draws no random
numbers. So the step in the manifest restores all of them on any layout.

    after_step(20) ------------------------ after_step(40)
      |  waits for the previous save          |
      |  copies to the host, on CUDA during   |        async: an error in the thread is raised by the next after_step;
      v  the next forward and backward        v        leaving the saver waits for the last save
      thread: torch.distributed.checkpoint (DCP) plans which rank writes which shard, copies once
              rank 0: create step-20.tmp/   every rank: write and hash its file   rank 0: manifest, rename, prune

If one rank fails, every rank raises the error of the lowest such rank. Files have the format of torch's
HuggingFaceStorageWriter(save_distributed=True), so torch's HuggingFaceStorageReader opens them without this package.

On CUDA, DCP's stager copies on a separate stream and in a separate thread. After backward, before the first change of a
saved tensor, step.py calls `wait_for_copy`. Each tensor gets pinned memory of exactly its size, once. Without pinned
memory, each copy holds the GIL, so the training loop waits for all copies (torch 2.13).
"""

import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.optim.optimizer import Optimizer

from torchtitan_lite.checkpoint.format import (
    CheckpointError,
    Chunk,
    Manifest,
    TensorRecord,
    commit,
    create_unfinished,
    discard,
    find_steps,
    flush_and_hash,
    name_unfinished,
    prune,
    remove_partial,
    write_manifest,
)
from torchtitan_lite.checkpoint.hugging_face_config import IN_MANIFEST
from torchtitan_lite.config.machine import describe_launch
from torchtitan_lite.config.schema import Checkpoint, Config

logger = logging.getLogger(__name__)

GRADIENT_NORMS = (
    "gradient_norms"  # key of the optimizer's state; in a checkpoint only with training.skip_spikes
)
# Keys of the file header that tell torch's reader the offsets of a shard in its tensor.
SHARDING = "DCP_SHARDING_INFO"
OFFSETS = "saved_offsets"


class CheckpointSaver:
    """Saves to `folder` according to [checkpoint]. A context manager: leaving it waits for the save in flight.

    `manifest` gives the fingerprint and the description of the run. `group` has all ranks, uses gloo, and is only for
    this saver, because two threads that share a group can deadlock. faults/snapshots.py has a subclass.
    """

    planner: type[dcp.DefaultSavePlanner] = dcp.DefaultSavePlanner
    log_level = logging.INFO

    def __init__(
        self,
        folder: Path,
        section: Checkpoint,
        optimizer: Optimizer,
        *,
        manifest: Manifest,
        group: dist.ProcessGroup,
        device: torch.device,
    ):
        self.folder = folder
        self.section = section
        self.optimizer = optimizer
        self.manifest = manifest
        self.group = group
        self.in_flight: Future | None = None
        self.stager = None
        self.thread = None
        self.on_cuda = device.type == "cuda"
        if section.async_mode != "disabled":
            # The stager reuses its buffers, so memory does not grow. On a CPU it copies synchronously.
            options = StagingOptions(
                use_pinned_memory=self.on_cuda and section.async_mode == "async_with_pinned_mem",
                use_shared_memory=False,
                use_async_staging=self.on_cuda,
                use_non_blocking_copy=self.on_cuda,
            )
            self.stager = DefaultStager(options)
            initializer = partial(torch.cuda.set_device, device) if self.on_cuda else None
            self.thread = ThreadPoolExecutor(1, "checkpoint", initializer)
            # torch 2.11 and 2.12 close the inner stager after each copy, so the second save would fail.
            self.stager._state_dict_stager.close = lambda: None

    def after_step(
        self,
        step: int,
        parameters: dict[str, Tensor],
        *,
        n_steps: int,
        is_stopped: bool,
        record: Callable[..., None],
    ) -> None:
        """Save if `is_saved` says so. At the end of the run, wait for the save. Raises errors of earlier saves.

        After a step that saves, `record` is called with "save", the step, the path and the seconds.
        """
        started_s = time.perf_counter()
        self.check()
        is_last = step == n_steps
        if is_saved(step, self.section, n_steps, is_stopped=is_stopped):
            tensors = choose_tensors(
                parameters, self.optimizer, section=self.section, is_last=is_last
            )
            self.save(step, tensors)
            waited_s = time.perf_counter() - started_s  # then all ranks continue training
            record("save", step, path=str(self.folder / f"step-{step}"), waited_s=waited_s)
        if is_last or is_stopped:
            self.wait()

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint of this run; None if there is none."""
        steps = find_steps(self.folder)
        return self.folder / f"step-{steps[-1]}" if steps else None

    def save(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Save this rank's shards `tensors` as step-N; if saves are asynchronous, only start to. Collective.

        Call `wait_for_copy` before `tensors` change. Raises CheckpointError if this save or the
        previous one failed on any rank. A failed save leaves no files behind.
        """
        self.wait()
        if self.stager is None:
            self.write(step, tensors)
            return
        if self.on_cuda:
            # the stager's stream does not wait for kernels that still write the tensors
            torch.cuda.current_stream().synchronize()
        self.in_flight = self.thread.submit(self.write, step, self.stager.stage(tensors))

    def wait_for_copy(self) -> None:
        """Wait until the save in flight has copied its tensors to the host."""
        if self.stager is not None:
            self.stager.synchronize_staging()

    def check(self) -> None:
        """If the save in flight has ended with an error, raise it. Does not wait."""
        if self.in_flight is not None and self.in_flight.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the save in flight, if any. Raises its error."""
        if self.in_flight is not None:
            in_flight = self.in_flight
            self.in_flight = None
            in_flight.result()

    def write(self, step: int, tensors: dict[str, Tensor] | Future) -> None:
        """Write and commit one checkpoint, then delete old ones. Runs in the thread if saves are asynchronous."""
        if isinstance(tensors, Future):
            tensors = tensors.result()
        final = self.folder / f"step-{step}"
        rank = self.group.rank()
        writer = StorageWriter(final, replace(self.manifest, step=step), rank)
        planner = self.planner(flatten_state_dict=False)
        try:
            dcp.save(tensors, storage_writer=writer, planner=planner, process_group=self.group)
        except dcp.CheckpointException as error:
            # raised on every rank, when no rank writes any more
            if rank == 0:
                discard(final)
            first, (failure, _) = min(error.failures.items())
            why = f"rank {first} cannot write {final}: {failure}"
            raise CheckpointError(why) from error
        if rank == 0:
            logger.log(self.log_level, f"saved checkpoint {final}")
            try:
                prune(self.folder, self.section)
            except OSError as error:  # the new checkpoint is saved anyway
                logger.error(f"an old checkpoint cannot be deleted: {error}")
        # Wait here while rank 0 deletes, not in the next step with its shorter time-out.
        dist.barrier(self.group)

    def __enter__(self) -> "CheckpointSaver":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            self.wait()
        except CheckpointError as error:
            if kind is None:
                raise
            logger.error(f"the last save failed: {error}")  # the run ends with another error
        finally:
            if self.thread is not None:
                self.thread.shutdown()
                self.stager.close()


class StorageWriter(dcp.HuggingFaceStorageWriter):
    """Writes the shards that DCP planned for this rank. Rank 0 also creates the folder and commits it."""

    def __init__(self, final: Path, manifest: Manifest, rank: int):
        super().__init__(str(name_unfinished(final)), save_distributed=True)
        self.final = final
        self.manifest = manifest
        self.file_name = f"rank-{rank:05}.safetensors"

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """Create the folder. DCP calls this on rank 0, before any rank writes."""
        remove_partial(self.final.parent)
        create_unfinished(self.final)
        return plans

    def write_data(
        self, plan: dcp.SavePlan, planner: dcp.SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        tensors = {}
        offsets = {}
        for item in plan.items:
            name = item.index.fqn
            assert name not in tensors, "a rank has more than one shard of a tensor"
            tensors[name] = planner.resolve_data(item)
            offsets[name] = {OFFSETS: list(item.tensor_data.chunk.offsets)}
        results = []
        if tensors:
            path = name_unfinished(self.final) / self.file_name
            write_tensors(path, tensors, {SHARDING: json.dumps(offsets)})
            digest = flush_and_hash(path)
            for item in plan.items:
                box = item.tensor_data.chunk
                chunk = Chunk(self.file_name, box.offsets, box.sizes)
                results.append(WriteResult(item.index, 0, (chunk, digest)))
        written: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        written.set_result(results)
        return written

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint. DCP calls this on rank 0 when the data of every rank is on disk."""
        hashes = {}
        chunks = defaultdict(list)  # FQN -> chunks
        for result in chain(*results):
            chunk, digest = result.storage_data
            hashes[chunk.file] = digest
            chunks[result.index.fqn].append(chunk)
        tensors = {}
        for name, saved in metadata.state_dict_metadata.items():
            dtype = str(saved.properties.dtype).removeprefix("torch.")
            tensors[name] = TensorRecord(dtype, saved.size, chunks[name])
        unfinished = name_unfinished(self.final)
        write_manifest(unfinished, replace(self.manifest, tensors=tensors), hashes)
        commit(self.final)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file. The caller must flush it to disk. Raises OSError or SafetensorError."""
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    path.touch(exist_ok=False)
    mode = path.stat().st_mode  # from the umask; safetensors creates files only for the owner
    # transformers refuses files without "format"
    save_file(on_host, path, {"format": "pt", **metadata})
    path.chmod(mode)


def name_weights(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return name in a checkpoint -> parameter."""
    return {f"model.{fqn}": parameter.detach() for fqn, parameter in parameters.items()}


def name_tensors(parameters: dict[str, Tensor], optimizer: Optimizer) -> dict[str, Tensor]:
    """Return name in a checkpoint -> tensor, for all parameters and the optimizer state."""
    named = name_weights(parameters)
    owners = {**parameters, GRADIENT_NORMS: GRADIENT_NORMS}
    for fqn, owner in owners.items():
        for name, value in optimizer.state.get(owner, {}).items():
            if isinstance(value, Tensor):
                named[f"optimizer.{fqn}.{name}"] = value
    return named


def choose_tensors(
    parameters: dict[str, Tensor], optimizer: Optimizer, *, section: Checkpoint, is_last: bool
) -> dict[str, Tensor]:
    """Return the tensors to save after this step: all, or with last_save_model_only the weights in export_dtype."""
    if not (is_last and section.last_save_model_only):
        return name_tensors(parameters, optimizer)
    weights = name_weights(parameters)
    for name, tensor in weights.items():
        if not name.endswith("expert_bias"):
            weights[name] = tensor.to(getattr(torch, section.export_dtype))
    return weights


def describe_run(
    config: Config, degrees: dict[str, int], published: dict[str, dict]
) -> dict[str, object]:
    """Return `run` of a manifest. `published`: config.json and generation_config.json of the initial weights."""
    return {
        "config": asdict(config),
        "layout": degrees,
        "launch": describe_launch(),
        IN_MANIFEST: published,
    }


def is_saved(step: int, section: Checkpoint, n_steps: int, *, is_stopped: bool = False) -> bool:
    """Return whether a run of `n_steps` saves after this step. `is_stopped`: a signal ends the run here."""
    is_first = step == 1 and section.enable_first_step_checkpoint
    is_due = is_stopped or is_first or step == n_steps or step % section.interval == 0
    return section.enable and not section.load_only and is_due
