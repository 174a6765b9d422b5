"""Clear torch's caches between jobs that run one after another in one process."""

import torch
from torch.distributed.tensor import _redistribute, debug


def forget_groups() -> None:
    """Clear torch's per-mesh caches. Otherwise a job would reuse the process groups of an earlier job with an equal
    mesh."""
    torch._dynamo.reset()
    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    # some versions of torch do not have this cache
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):
        _redistribute.clear_redistribute_planner_cache()
