"""Raise one error on all ranks that save or load together. It names the damage that each rank has found."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_lite.checkpoint.format import CheckpointError, DamagedCheckpoint

MOST_DAMAGED = 8  # messages in one error


def raise_on_all_ranks(group: dist.ProcessGroup, action: Callable[[], Any]) -> Any:
    """Call `action` on every rank. If it fails on any rank, all raise one of the errors. Collective.

    Damage explains other errors. So if any rank has found damaged files, the error lists the damaged files of all
    ranks (the first MOST_DAMAGED messages). Otherwise it is the error of the lowest rank that failed.
    """
    result = None
    failure = None
    try:
        result = action()
    except CheckpointError as error:
        failure = error
    except Exception as error:  # a type that every process can unpickle
        failure = CheckpointError(f"{type(error).__name__}: {error}")
    n_failed = torch.tensor(int(failure is not None))
    dist.all_reduce(n_failed, group=group)  # 8 bytes
    if n_failed:
        told: list[Any] = [None] * group.size()
        dist.all_gather_object(told, failure, group=group)
        failures = [each for each in told if each is not None]
        damage = [str(each) for each in failures if isinstance(each, DamagedCheckpoint)]
        if damage:
            each_once = list(dict.fromkeys(damage))
            raise DamagedCheckpoint("; ".join(each_once[:MOST_DAMAGED]))
        raise failures[0]
    return result


def do_on_rank_0(group: dist.ProcessGroup, action: Callable[[], Any]) -> Any:
    """Call `action` on rank 0 only. Return its result, or raise its error, on every rank. Collective."""
    results = [raise_on_all_ranks(group, action if group.rank() == 0 else lambda: None)]
    dist.broadcast_object_list(results, group=group, group_src=0)
    return results[0]
