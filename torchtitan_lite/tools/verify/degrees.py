"""Choose mesh degrees for `verify`: degrees that fit the number of ranks, and smaller layouts.

An automatic dp_shard gets the ranks that the other degrees leave, but at least two, because otherwise nothing would be
sharded.
"""

from collections.abc import Iterator
from math import gcd, prod

from torchtitan_lite.config.layout import plan_degrees
from torchtitan_lite.config.schema import Config, Parallelism, get_value

SHARD = "parallelism.data_parallel_shard_degree"
CP = "parallelism.context_parallel_degree"
TP = "parallelism.tensor_parallel_degree"
# ep is not a dim of the first mesh; ep groups consist of ranks of dp_shard x cp x tp
EP = "parallelism.expert_parallel_degree"
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
    """Return the smallest dp_shard that ep allows. An automatic dp_shard must be a multiple of the result."""
    ep = section.expert_parallel_degree
    return ep // gcd(ep, section.context_parallel_degree * section.tensor_parallel_degree)


def count_ranks(section: Parallelism) -> int:
    """Return the minimum number of ranks for these degrees. An automatic dp_shard is at least 2."""
    n_ranks = prod(plan_degrees(section, 1).values())
    if section.data_parallel_shard_degree == AUTOMATIC:
        n_ranks *= max(2, find_shard_unit(section))
    return n_ranks


def choose_dp_shard(section: Parallelism, max_ranks: int) -> int:
    """Return dp_shard. If dp_shard is automatic, it uses as many of the remaining ranks as find_shard_unit allows."""
    unit = find_shard_unit(section)
    return plan_degrees(section, max_ranks)["dp_shard"] // unit * unit


def list_smaller(config: Config) -> Iterator[dict[str, int]]:
    """Yield the degrees of smaller and smaller layouts. Each time, the largest degree is divided by its smallest
    factor."""
    degrees = {key: get_value(config, key) for key in DEGREES}
    while max(degrees.values()) > 1:
        key = max(DEGREES, key=degrees.get)
        factor = next(n for n in range(2, degrees[key] + 1) if degrees[key] % n == 0)
        degrees[key] //= factor
        if degrees[SHARD] != AUTOMATIC:
            degrees[EP] = gcd(degrees[EP], degrees[SHARD] * degrees[CP] * degrees[TP])
        yield dict(degrees)
