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
    severity = 0
    try:
        result = action()
    except CheckpointError as error:
        failure = error
        severity = 2 if isinstance(error, DamagedCheckpoint) else 1
    except Exception as error:  # a type that every process can unpickle
        failure = CheckpointError(f"{type(error).__name__}: {error}")
        severity = 1
    damage: list[str] = []
    while (first := find_most_severe(group, severity)) is not None:
        told: list[Any] = [failure]
        dist.broadcast_object_list(told, group=group, group_src=first)
        if not isinstance(told[0], DamagedCheckpoint):
            if damage:
                break
            raise told[0]
        damage.append(str(told[0]))
        if len(damage) == MOST_DAMAGED:
            break
        if str(failure) == damage[-1]:
            severity = 0
    if damage:
        raise DamagedCheckpoint("; ".join(damage))
    return result


def find_most_severe(group: dist.ProcessGroup, severity: int) -> int | None:
    """Return the lowest rank with the largest severity; None if all are 0. Collective."""
    n_ranks = group.size()
    # Larger for a more severe failure, then for a lower rank.
    verdict = torch.tensor(severity * (n_ranks + 1) + (n_ranks - group.rank()) * (severity > 0))
    dist.all_reduce(verdict, dist.ReduceOp.MAX, group=group)  # 8 bytes
    return n_ranks - verdict.item() % (n_ranks + 1) if verdict else None


def do_on_rank_0(group: dist.ProcessGroup, action: Callable[[], Any]) -> Any:
    """Call `action` on rank 0 only. Return its result, or raise its error, on every rank. Collective."""
    results = [raise_on_all_ranks(group, action if group.rank() == 0 else lambda: None)]
    dist.broadcast_object_list(results, group=group, group_src=0)
    return results[0]
