"""The degrees of the mesh: exactly those that the config asks for, or none.

they fit the ranks     an automatic dp_shard gets the ranks that the other dims leave, two or more: with one,
                       nothing would be sharded, and the real run shards
they need more ranks   refused, with the command for the largest smaller layout that fits and that verify can run.
                       It keeps as many dims above 1 as possible; then it uses as many ranks as possible
"""

from collections.abc import Iterator
from itertools import product
from math import gcd, prod

from torchtitan_lite.config.layout import plan_degrees, plan_layout, resolve_model
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.schema import Config, Parallelism, with_value

DEGREE_KEYS = {  # mesh dim -> key
    "pp": "parallelism.pipeline_parallel_degree",
    "dp_replicate": "parallelism.data_parallel_replicate_degree",
    "dp_shard": "parallelism.data_parallel_shard_degree",
    "cp": "parallelism.context_parallel_degree",
    "tp": "parallelism.tensor_parallel_degree",
    "ep": "parallelism.expert_parallel_degree",  # not a dim of the mesh: ranks of dp_shard x cp x tp
}
OF_EXPERTS = ("dp_shard", "cp", "tp")  # whose ranks share the experts of a layer
AUTOMATIC = -1
GIVEN_UP_LAST = ("tp", "pp", "cp", "dp_shard", "ep", "dp_replicate")


def read_degrees(section: Parallelism) -> dict[str, int]:
    """Return the degree of each dim that the config gives; AUTOMATIC for an open dp_shard."""
    return {dim: getattr(section, key.split(".")[1]) for dim, key in DEGREE_KEYS.items()}


def find_shard_unit(section: Parallelism) -> int:
    """Return the number of which an automatic dp_shard is a multiple, so that ep ranks can share experts."""
    degrees, ep = plan_degrees(section, 1), section.expert_parallel_degree
    return ep // gcd(ep, prod(degrees[dim] for dim in OF_EXPERTS))


def count_ranks(section: Parallelism) -> int:
    """Return the fewest ranks for these degrees. An automatic dp_shard is 2 or more."""
    n_ranks = prod(plan_degrees(section, 1).values())
    is_automatic = section.data_parallel_shard_degree == AUTOMATIC
    return n_ranks * max(2, find_shard_unit(section)) if is_automatic else n_ranks


def choose_degrees(section: Parallelism, max_ranks: int) -> dict[str, int]:
    """Return the degree of each mesh dim, as asked for. An automatic dp_shard takes what is left."""
    degrees = plan_degrees(section, 1)
    if section.data_parallel_shard_degree == AUTOMATIC:
        n_left, unit = max_ranks // prod(degrees.values()), find_shard_unit(section)
        degrees["dp_shard"] = n_left // unit * unit
    return degrees


def list_smaller(config: Config, max_ranks: int) -> Iterator[Config]:
    """Yield the config with smaller degrees that fit, best first. The pp of a schedule file stays."""
    asked = read_degrees(config.parallelism)
    pinned = ("pp",) if config.parallelism.pipeline_parallel_schedule_csv else ()

    def list_divisors(dim: str) -> list[int]:
        degree = asked[dim]
        return [n for n in range(1, degree + 1) if degree % n == 0] if degree > 1 and dim not in pinned else [degree]

    def rank(smaller: Config) -> tuple:
        degrees = read_degrees(smaller.parallelism)
        kept = [degrees[dim] != 1 for dim in GIVEN_UP_LAST]
        # A ring or a pipeline of two has neighbors only: cp and pp grow first.
        return sum(kept), kept, count_ranks(smaller.parallelism), degrees["cp"], degrees["pp"], degrees["ep"]

    meshes = (dict(zip(asked, degrees, strict=True)) for degrees in product(*map(list_divisors, asked)))
    configs = (give_degrees(config, mesh) for mesh in meshes)
    yield from sorted((c for c in configs if count_ranks(c.parallelism) <= max_ranks), key=rank, reverse=True)


def give_degrees(config: Config, degrees: dict[str, int]) -> Config:
    """Return the config with these degrees."""
    for dim, degree in degrees.items():
        config = with_value(config, DEGREE_KEYS[dim], degree)
    return config


def list_other_layouts(config: Config, degrees: dict[str, int], ep: int) -> Iterator[Config]:
    """Yield the config on other meshes of the same ranks that can run. First another ep, and ranks with other rows."""
    n_ranks, model_args = prod(degrees.values()), resolve_model(config.model)
    divisors = [n for n in range(1, n_ranks + 1) if n_ranks % n == 0]
    meshes = [dict(zip(degrees, mesh, strict=True)) for mesh in product(divisors, repeat=5) if prod(mesh) == n_ranks]
    meshes.remove(degrees)
    dp = degrees["dp_replicate"] * degrees["dp_shard"]
    meshes.sort(key=lambda mesh: (mesh["dp_replicate"] * mesh["dp_shard"] == dp, mesh["cp"], mesh["pp"]))
    eps = sorted(divisors, key=lambda n: (n == ep, n == 1, n)) if ep else [1]
    for other_ep, mesh in product(eps, meshes):
        other = give_degrees(config, {**mesh, "ep": other_ep})
        try:
            plan_layout(other, model_args, n_ranks)
        except ConfigError:
            continue
        yield other
