"""Errors that all ranks share: if one rank fails, every rank raises the same error.

Otherwise the others would wait for it in their next collective, and report a timeout minutes later.
"""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan_lite.checkpoint.manifest import CheckpointError

Result = TypeVar("Result")


def raise_on_all_ranks(group: dist.ProcessGroup, action: Callable[[], Result]) -> Result:
    """Call `action` on this rank. If it fails on any rank, raise the error of the first such rank. Collective."""
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        failure = as_checkpoint_error(error)
    failures: list[CheckpointError | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, failure, group=group)  # a few hundred bytes per rank
    if first := next((failure for failure in failures if failure), None):
        raise first
    return result


def do_on_rank_0(group: dist.ProcessGroup, action: Callable[[], Result]) -> Result:
    """Call `action` on rank 0 only. Return its result, or raise its error, on every rank. Collective."""
    results = [raise_on_all_ranks(group, action if dist.get_rank(group) == 0 else lambda: None)]
    dist.broadcast_object_list(results, group=group, group_src=0)
    return results[0]


def explain_dcp_error(error: CheckpointException) -> CheckpointError:
    """Return the error of the first rank that failed, out of what DCP raises on all ranks."""
    rank, (failure, _) = min(error.failures.items())
    return as_checkpoint_error(failure, f"rank {rank}: ")


def as_checkpoint_error(error: BaseException, prefix: str = "") -> CheckpointError:
    """Return the error itself, or one with its message that any process can unpickle."""
    return error if isinstance(error, CheckpointError) else CheckpointError(f"{prefix}{type(error).__name__}: {error}")
