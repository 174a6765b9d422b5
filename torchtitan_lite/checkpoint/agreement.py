"""Ranks that fail together: what one rank cannot do, all of them know of, and raise alike.

Otherwise the others would wait for it in their next collective, and say after minutes that something timed out.
"""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan_lite.checkpoint.manifest import CheckpointError

Result = TypeVar("Result")


def raise_on_all_ranks(group: dist.ProcessGroup, action: Callable[[], Result]) -> Result:
    """Calls `action` on this rank; where it failed on any, all raise the failure of the first. Collective."""
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        failure = as_checkpoint_error(error)
    failures: list[CheckpointError | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, failure, group=group)  # some hundred bytes per rank
    if first := next((failure for failure in failures if failure), None):
        raise first
    return result


def do_on_rank_0(group: dist.ProcessGroup, action: Callable[[], Result]) -> Result:
    """What `action` returns on rank 0, which alone calls it; where it failed there, all raise that. Collective."""
    result = raise_on_all_ranks(group, action if dist.get_rank(group) == 0 else lambda: None)
    results = [result]
    dist.broadcast_object_list(results, group=group, group_src=0)
    return results[0]


def explain(error: CheckpointException) -> CheckpointError:
    """The failure of the first rank that has one, out of what DCP raises on all ranks."""
    rank, (failure, _) = min(error.failures.items())
    return as_checkpoint_error(failure, f"rank {rank}: ")


def as_checkpoint_error(error: BaseException, prefix: str = "") -> CheckpointError:
    """Itself, or one that any process can unpickle."""
    return error if isinstance(error, CheckpointError) else CheckpointError(f"{prefix}{type(error).__name__}: {error}")
