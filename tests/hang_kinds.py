"""Kinds of hangs for the drill, besides `stop` and `loop`: --faults hang_kinds:sleep,... with PYTHONPATH=tests."""

import ctypes
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules


def sleep(fault, run) -> None:
    time.sleep(10**6)


def loop_with_lock(fault, run) -> None:
    """Loop in C code that never releases the GIL."""
    ctypes.PyDLL(None).PyRun_SimpleString(b"sum(range(10**18))")


def skip(fault, run) -> None:
    """Leave out the next all-reduce."""
    change_next_all_reduce(lambda original, tensor, group: None)


def shape(fault, run) -> None:
    """Call the next all-reduce with a tensor of another size."""
    change_next_all_reduce(
        lambda original, tensor, group: original(tensor.view(-1)[:1].repeat(2), group=group)
    )


def change_next_all_reduce(change: Callable) -> None:
    original = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args, group: dist.ProcessGroup | None = None, **kwargs):
        if dist.get_world_size(group) > 1:
            dist.all_reduce = original
            return change(original, tensor, group)
        return original(tensor, *args, group=group, **kwargs)

    dist.all_reduce = all_reduce


def send(fault, run) -> None:
    """Leave out the next send of the pipeline."""
    original, skipped = schedules._batch_p2p, []

    def batch_p2p(ops: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
        kept = [op for op in ops if op.op != dist.isend or skipped]
        skipped.extend(op for op in ops if op not in kept)
        return original(kept, desc)

    schedules._batch_p2p = batch_p2p
