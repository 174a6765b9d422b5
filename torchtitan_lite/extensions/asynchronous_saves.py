"""Save while the run trains: copy the tensors to the host, and write the copies in a thread.

On CUDA, DCP's stager copies on a separate stream and in a separate thread. After backward, before the first change of a
saved tensor, step.py calls `wait_for_copy`. Pinned memory is allocated once, exactly one buffer per tensor. Without
pinned memory, each copy holds the GIL, so the training loop waits for all copies (torch 2.13).
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions


class Background:
    """Copies tensors, and writes the copies in a thread. `mode` is checkpoint.async_mode. Allows one save at a time."""

    def __init__(self, mode: str, device: torch.device):
        self.on_cuda = device.type == "cuda"
        self.in_flight: Future | None = None
        # The stager reuses its buffers, so memory does not grow. On a CPU it copies synchronously.
        options = StagingOptions(
            use_pinned_memory=self.on_cuda and mode == "async_with_pinned_mem",
            use_shared_memory=False,
            use_async_staging=self.on_cuda,
            use_non_blocking_copy=self.on_cuda,
        )
        self.stager = DefaultStager(options)
        initializer = partial(torch.cuda.set_device, device) if self.on_cuda else None
        self.thread = ThreadPoolExecutor(1, "checkpoint", initializer)
        # torch 2.11 and 2.12 close the inner stager after each copy, so the second save would fail.
        self.stager._state_dict_stager.close = lambda: None

    def start(
        self, write: Callable[[dict[str, Tensor] | Future], None], slices: dict[str, Tensor]
    ) -> None:
        """Copy `slices`, and call `write` with the copies in the thread. The copies may be a Future."""
        if self.on_cuda:
            # The stager's stream would not wait for kernels that still write the tensors.
            torch.cuda.current_stream().synchronize()
        self.in_flight = self.thread.submit(write, self.stager.stage(slices))

    def wait_for_copy(self) -> None:
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

    def close(self) -> None:
        self.thread.shutdown()
        self.stager.close()
