"""Save while the run trains: copy the tensors to host memory, and write the copies in a thread.

    after_step(20) ------------------------ after_step(40)
      |  waits for the previous save          |
      |  copies to the host, on CUDA during   |        an error in the thread is raised by the next after_step;
      v  the next forward and backward        v        leaving the saver waits for the last save
      thread: CheckpointSaver.write

On CUDA, DCP's stager copies on a separate stream and in a separate thread. After backward, a step calls `wait_for_copy`
before it changes saved tensors in-place. Pinned memory is allocated once, exactly one buffer per tensor. Without pinned
memory, each copy holds the GIL, so the training loop waits for all copies (torch 2.13).
"""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from torchtitan_lite.checkpoint.format import CheckpointError
from torchtitan_lite.checkpoint.save import CheckpointSaver, SavePlan, raise_on_all_ranks

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class AsynchronousSaver(CheckpointSaver):
    """Copies tensors, and writes the copies in a thread. One save is in flight."""

    def __post_init__(self) -> None:
        self.on_cuda = self.device.type == "cuda"
        self.in_flight: Future | None = None
        is_pinned = self.section.async_mode == "async_with_pinned_mem"
        # The stager reuses its buffers, so memory does not grow. On a CPU, the stager copies synchronously.
        options = StagingOptions(
            use_pinned_memory=self.on_cuda and is_pinned,
            use_shared_memory=False,
            use_async_staging=self.on_cuda,
            use_non_blocking_copy=self.on_cuda,
        )
        self.stager = DefaultStager(options)
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        if self.on_cuda:
            # The current device of a new thread is GPU 0. Without this call, torch would switch back to GPU 0 after
            # each copy, and allocate a context there.
            for thread in (self.thread, self.stager._staging_executor):
                thread.submit(torch.cuda.set_device, self.device)
        # torch 2.11 and 2.12 close the inner stager after each copy, so the second save would fail.
        self.stager._state_dict_stager.close = lambda: None

    def after_step(self, step: int, *, n_steps: int, is_stopped: bool) -> dict[str, Any]:
        """Start a save if one is due. At the end of the run, also wait until the save is complete. Raises errors of
        earlier saves."""
        if self.in_flight is not None and self.in_flight.done():
            self.wait()
        saved = super().after_step(step, n_steps=n_steps, is_stopped=is_stopped)
        if step == n_steps or is_stopped:
            self.wait()
        return saved

    def write(self, step: int, plan: SavePlan) -> None:
        """Copy the slices of `plan`, and write the copies in the thread. Raises the error of the previous save.

        Call `wait_for_copy` before the tensors change.
        """
        self.wait()
        if self.on_cuda:
            # Otherwise the stager's stream would not wait for kernels that still write the tensors.
            torch.cuda.current_stream().synchronize()
        copies = self.stager.stage(plan.slices)
        self.in_flight = self.thread.submit(self.write_copies, step, plan, copies)

    def write_copies(self, step: int, plan: SavePlan, copies: dict[str, Tensor] | Future) -> None:
        """Write one checkpoint. Runs in the thread. `copies` may be a Future."""
        if isinstance(copies, Future):
            copies = raise_on_all_ranks(self.group, copies.result)
        super().write(step, replace(plan, slices=copies))

    def wait_for_copy(self) -> None:
        """Wait until the save in flight has copied its tensors. Each step calls this method before it changes the
        tensors in-place."""
        self.stager.synchronize_staging()

    def wait(self) -> None:
        if self.in_flight is not None:
            in_flight = self.in_flight
            self.in_flight = None
            in_flight.result()

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            self.wait()
        except CheckpointError as error:
            if kind is None:
                raise
            # the run is already ending because of an error: keep that error
            logger.error(f"the last save failed: {error}")
        finally:
            self.thread.shutdown()
            self.stager.close()
