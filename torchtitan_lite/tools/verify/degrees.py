"""Choose the degrees of a mesh for `verify`: to fit the ranks, to be smaller, or to differ on the same ranks.

An automatic dp_shard gets the ranks that the other degrees leave, and at least two, so that something is sharded.
"""

from collections.abc import Iterator
from math import gcd, prod

from torchtitan_lite.config.checks import plan_layout
from torchtitan_lite.config.layout import plan_degrees
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.model import resolve_model
from torchtitan_lite.config.schema import Config, Parallelism, get_value, with_value

SHARD = "parallelism.data_parallel_shard_degree"
CP = "parallelism.context_parallel_degree"
TP = "parallelism.tensor_parallel_degree"
EP = "parallelism.expert_parallel_degree"  # not a mesh dim: uses the ranks of dp_shard x cp x tp
DEGREES = (  # if several degrees are the largest, list_smaller divides the first of them
    "parallelism.data_parallel_replicate_degree",
    SHARD,
    "parallelism.pipeline_parallel_degree",
    CP,
    TP,
    EP,
)
AUTOMATIC = -1


def find_shard_unit(section: Parallelism) -> int:
    """Return the smallest dp_shard that ep allows. An automatic dp_shard must be a multiple of it."""
    ep = section.expert_parallel_degree
    return ep // gcd(ep, section.context_parallel_degree * section.tensor_parallel_degree)


def count_ranks(section: Parallelism) -> int:
    """Return the minimum number of ranks for these degrees. An automatic dp_shard is at least 2."""
    n_ranks = prod(plan_degrees(section, 1).values())
    if section.data_parallel_shard_degree == AUTOMATIC:
        n_ranks *= max(2, find_shard_unit(section))
    return n_ranks


def choose_dp_shard(section: Parallelism, max_ranks: int) -> int:
    """Return dp_shard. An automatic value becomes as many of the remaining ranks as find_shard_unit allows."""
    unit = find_shard_unit(section)
    return plan_degrees(section, max_ranks)["dp_shard"] // unit * unit


def list_smaller(config: Config) -> Iterator[Config]:
    """Yield the config for fewer and fewer ranks. Each step divides the largest degree by its smallest factor."""
    while True:
        degrees = {key: get_value(config, key) for key in DEGREES}
        key = max(DEGREES, key=degrees.get)
        degree = degrees[key]
        if degree == 1:
            return
        factor = next(n for n in range(2, degree + 1) if degree % n == 0)
        config = with_value(config, key, degree // factor)
        degrees[key] = degree // factor
        if degrees[SHARD] != AUTOMATIC:
            n_ranks = degrees[SHARD] * degrees[CP] * degrees[TP]
            config = with_value(config, EP, gcd(degrees[EP], n_ranks))
        yield config


def choose_other_layout(config: Config, n_ranks: int) -> Config:
    """Return the config on a different mesh of the same ranks, with the same global batch.

    The mesh has tp = 2, and dp_shard for the rest. If that is not possible, dp_shard has all ranks. ep differs too if
    possible.
    """
    args = resolve_model(config.model)
    asked = {key: get_value(config, key) for key in DEGREES}
    eps = [1]
    if args.moe:
        eps = sorted((2, n_ranks, 1), key=lambda ep: ep == asked[EP])
    for ep in eps:
        for tp in (gcd(2, n_ranks), 1):
            degrees = dict.fromkeys(DEGREES, 1) | {TP: tp, SHARD: n_ranks // tp, EP: ep}
            other = config
            for key, degree in degrees.items():
                other = with_value(other, key, degree)
            try:
                plan_layout(other, args, n_ranks)
            except ConfigError:
                continue
            if degrees != asked:
                return other
    return config
