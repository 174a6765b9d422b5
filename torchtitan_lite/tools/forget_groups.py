"""Clear torch's caches between jobs that run one after another in one process."""

import torch
from torch.distributed.tensor import _redistribute, debug


def forget_groups() -> None:
    """Clear torch's per-mesh caches. Otherwise a job with an equal mesh would get process groups of an earlier job."""
    torch._dynamo.reset()
    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):  # not in every version of torch
        _redistribute.clear_redistribute_planner_cache()
