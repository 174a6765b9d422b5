"""Copies of a rank's tensors in the memory of its host, made while the next step runs, for a thread that writes them.

    step n   save        forward   backward   optimizer.step      weights change here and nowhere else,
             copying ----------------->|      waits for the copy  so there is a whole forward and backward for it
             writing                   |--------------------------------------------->  until the next save

The buffers are made once and used again: memory does not grow. On CUDA they may be pinned; a stream of its own fills
them, and only the device waits. On a CPU the thread that writes copies first.
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
        """Makes room for this rank's shares of `tensors`; on CUDA, queues the copies."""
        self.shares = {
            name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()
        }
        for name, share in self.shares.items():
            buffer = self.buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (share.shape, share.dtype):
                self.buffers[name] = torch.empty(share.shape, dtype=share.dtype, pin_memory=self.pinned)
        self.copied.clear()
        if any(share.is_cuda for share in self.shares.values()):
            if self.stream is None:
                self.stream = torch.cuda.Stream()
            self.stream.wait_stream(torch.cuda.current_stream())  # the step that is to be saved
            with torch.cuda.stream(self.stream):
                self.copy()
            self.copied.set()  # as far as the host goes

    def finish(self) -> dict[str, Tensor]:
        """For the thread that writes: the copies, all of them there."""
        try:
            if not self.copied.is_set():
                self.copy()
        finally:
            self.copied.set()
        if self.stream is not None:
            self.stream.synchronize()
        return {name: self.buffers[name] for name in self.shares}

    def copy(self) -> None:
        for name, share in self.shares.items():
            self.buffers[name].copy_(share, non_blocking=self.pinned)

    def wait(self) -> None:
        """For whoever is about to change the tensors. On CUDA the host goes on, and the device waits."""
        self.copied.wait()
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
