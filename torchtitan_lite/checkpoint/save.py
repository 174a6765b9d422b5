"""Saves checkpoints of a run: by all ranks together, in front of the next step or beside it.

    save(20) ------------------------------ save(40)
      |  waits for the one before             |
      |  begins to copy                       |        async: errors are told by `check`, after the step in which the
      v                                       v        thread met them; `close` waits for the last one
      thread: copy, plan, write, hash, commit, prune

Ranks save over a group that no other code uses: calls of two threads over one group have no order, and may deadlock.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim.optimizer import Optimizer

from torchtitan_lite.checkpoint import folders
from torchtitan_lite.checkpoint.agreement import explain
from torchtitan_lite.checkpoint.manifest import CheckpointError, Manifest, find_steps
from torchtitan_lite.checkpoint.staging import Staging
from torchtitan_lite.checkpoint.storage import StagedPlanner, StorageWriter, name_file
from torchtitan_lite.config.schema import Checkpoint, Config

logger = logging.getLogger(__name__)


class CheckpointSaver:
    """Saves into `folder`, as [checkpoint] says. A context manager: leaving it waits for what is being written.

    `facts` must hold again when a run goes on; `run` is for the reader. `group`: all ranks, with gloo, for
    this saver alone.
    """

    def __init__(
        self,
        folder: Path,
        section: Checkpoint,
        optimizer: Optimizer,
        *,
        facts: dict[str, object],
        run: dict[str, object],
        group: dist.ProcessGroup,
        device: torch.device,
    ):
        self.folder, self.section, self.group = folder, section, group
        self.facts, self.run = facts, run
        self.in_flight: Future | None = None
        self.failure: CheckpointError | None = None  # of the last save, after which the run went on
        self.newest_step: int | None = None  # of what is saved; rank 0 alone keeps it
        if section.enable and dist.get_rank(group) == 0:
            self.newest_step = max(find_steps(folder), default=None)
        self.staging = self.thread = None
        if section.async_mode != "disabled":
            self.staging = Staging(pinned=section.async_mode == "async_with_pinned_mem")
            optimizer.register_step_pre_hook(lambda *_: self.staging.wait())
            set_device = {"initializer": torch.cuda.set_device, "initargs": (device,)} if device.type == "cuda" else {}
            self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", **set_device)

    def save(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Saves this rank's shares of `tensors` as step-N, or begins to. Collective.

        They may change in `optimizer.step` and nowhere else. Raises CheckpointError where this save, or the one that
        was in flight, failed on any rank and `on_save_error` is "stop"; what failed leaves nothing behind.
        """
        self.wait()
        if self.staging is None:
            self.tell(lambda: self.write(step, tensors))
        else:
            self.staging.begin(tensors)
            self.in_flight = self.thread.submit(self.write, step, tensors)

    def check(self) -> None:
        """Raises what went wrong beside the last steps, as `save` does."""
        if self.in_flight is not None and self.in_flight.done():
            self.wait()

    def wait(self) -> None:
        """For the save that is in flight, if there is one."""
        if self.in_flight is not None:
            in_flight, self.in_flight = self.in_flight, None
            self.tell(in_flight.result)

    def tell(self, result: Callable[[], None]) -> None:
        """Calls `result`; an error stops the run, or is logged and kept."""
        try:
            result()
            self.failure = None
        except CheckpointError as error:
            if self.section.on_save_error == "stop":
                raise
            self.failure = error
            if dist.get_rank(self.group) == 0:
                logger.error(f"NOT SAVED, and the run goes on (checkpoint.on_save_error): {error}")

    def write(self, step: int, tensors: dict[str, Tensor]) -> None:
        final = self.folder / f"step-{step}"
        rank = dist.get_rank(self.group)
        writer = StorageWriter(final, Manifest(step, self.facts, self.run, {}, {}), rank)
        planner = StagedPlanner(self.staging.finish if self.staging else None)
        try:
            dcp.save(tensors, storage_writer=writer, planner=planner, process_group=self.group)
        except CheckpointException as error:  # the same on every rank, and none of them is writing any more
            if rank == 0:
                folders.discard(final, [name_file(n) for n in range(dist.get_world_size(self.group))])
            raise explain(error) from error
        except RuntimeError as error:  # of a collective: this group is of no use any more, so the run cannot go on
            raise RuntimeError(
                f"{final} was not saved: a rank died, or its disk is slower than that of another one by more than "
                f"comm.init_timeout_seconds ({error})"
            ) from error
        if rank == 0:
            logger.info(f"saved checkpoint {final}")
            self.newest_step = step
            self.prune()

    def notice_loss(self) -> None:
        """Log an error, once, if the newest checkpoint was deleted. Only rank 0 knows which one that is."""
        step = self.newest_step
        # Compared again: beside this, the thread may have saved a newer one, and then deleted this one as it should.
        if step is not None and not (self.folder / f"step-{step}").exists() and step == self.newest_step:
            self.newest_step = None
            lost = self.folder / f"step-{step}"
            logger.error(f"{lost} was deleted or moved: until the next save, {self.describe_saved()}")

    def describe_saved(self) -> str:
        """Say how much of the run a resumed one would have lost."""
        steps = find_steps(self.folder)
        return f"nothing since step {steps[-1]} is saved" if steps else "nothing is saved"

    def prune(self) -> None:
        try:
            section = self.section
            folders.prune(self.folder, keep_latest_k=section.keep_latest_k, keep_every_m=section.keep_every_m)
        except OSError as error:  # the checkpoint is saved all the same
            logger.error(f"an old checkpoint cannot be deleted: {error}")

    def __enter__(self) -> "CheckpointSaver":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            self.wait()
        except CheckpointError as error:
            if kind is None:
                raise
            logger.error(f"NOT SAVED: {error}")  # beside the error that ends the run
        finally:
            if self.thread is not None:
                self.thread.shutdown()


def describe_run(config: Config, degrees: dict[str, int], certificate: dict[str, object] | None) -> dict[str, object]:
    """What a checkpoint tells its reader about the run."""
    return {
        "config": asdict(config),
        "layout": degrees,
        "certificate": certificate,
        "torch": torch.__version__,
        "begun": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def is_saved(step: int, section: Checkpoint, n_steps: int) -> bool:
    """Whether a run of `n_steps` saves after this one."""
    if not section.enable or section.load_only:
        return False
    return step % section.interval == 0 or step == n_steps or (step == 1 and section.enable_first_step_checkpoint)
