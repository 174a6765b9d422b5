"""Copies of a rank's tensors in host memory, made while the next step runs, for the thread that writes them.

    step n   save        forward   backward   optimizer.step      only optimizer.step changes the weights,
             copying ----------------->|      waits for the copy  so the copy has a whole forward and backward
             writing                   |--------------------------------------------->  until the next save

The buffers are allocated once and reused, so memory does not grow. On CUDA they may be pinned; a separate stream fills
them, and only the device waits for it. On a CPU the thread that writes makes the copies first.
"""

import threading

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Staging:
    """Buffers for one set of tensors at a time."""

    def __init__(self, *, pinned: bool):
        self.pinned = pinned and torch.cuda.is_available()
        self.buffers: dict[str, Tensor] = {}
        self.copied = threading.Event()
        self.copied.set()
        self.stream: torch.cuda.Stream | None = None

    def begin(self, tensors: dict[str, Tensor]) -> None:
        """Allocate buffers for this rank's shards of `tensors`. On CUDA, also enqueue the copies."""
        self.shards = {
            name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()
        }
        for name, shard in self.shards.items():
            buffer = self.buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (shard.shape, shard.dtype):
                self.buffers[name] = torch.empty(shard.shape, dtype=shard.dtype, pin_memory=self.pinned)
        self.copied.clear()
        if any(shard.is_cuda for shard in self.shards.values()):
            if self.stream is None:
                self.stream = torch.cuda.Stream()
            self.stream.wait_stream(torch.cuda.current_stream())  # the step that is to be saved
            with torch.cuda.stream(self.stream):
                self.copy()
            self.copied.set()  # on the host; `wait` makes the device wait too

    def finish(self) -> dict[str, Tensor]:
        """Return the finished copies. The thread that writes calls this."""
        try:
            if not self.copied.is_set():
                self.copy()
        finally:
            self.copied.set()
        if self.stream is not None:
            self.stream.synchronize()
        return {name: self.buffers[name] for name in self.shards}

    def copy(self) -> None:
        for name, shard in self.shards.items():
            self.buffers[name].copy_(shard, non_blocking=self.pinned)

    def wait(self) -> None:
        """Wait until the tensors may change. On CUDA only the device waits."""
        self.copied.wait()
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
