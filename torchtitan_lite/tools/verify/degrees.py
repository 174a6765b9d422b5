"""Choose the degrees of the mesh: exactly the degrees of the config, or an error.

they fit the ranks     an automatic dp_shard gets all remaining ranks, at least two: with one, nothing would be
                       sharded, unlike in the real run
they need more ranks   refused, with the command for the largest smaller layout that verify can run. It keeps as
                       many dims above 1 as possible; among those layouts, it uses the most ranks
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
    "ep": "parallelism.expert_parallel_degree",  # not a mesh dim: uses the ranks of dp_shard x cp x tp
}
OF_EXPERTS = (
    "dp_shard",
    "cp",
    "tp",
)  # the experts of a layer are sharded over the ranks of these dims
AUTOMATIC = -1
GIVEN_UP_LAST = ("tp", "pp", "cp", "dp_shard", "ep", "dp_replicate")


def read_degrees(section: Parallelism) -> dict[str, int]:
    """Return the degree of each dim as written in the config; dp_shard may be AUTOMATIC."""
    return {dim: getattr(section, key.split(".")[1]) for dim, key in DEGREE_KEYS.items()}


def find_shard_unit(section: Parallelism) -> int:
    """Return the smallest dp_shard for this ep. An automatic dp_shard must be a multiple of it."""
    degrees, ep = plan_degrees(section, 1), section.expert_parallel_degree
    return ep // gcd(ep, prod(degrees[dim] for dim in OF_EXPERTS))


def count_ranks(section: Parallelism) -> int:
    """Return the minimum number of ranks for these degrees. An automatic dp_shard is at least 2."""
    n_ranks = prod(plan_degrees(section, 1).values())
    is_automatic = section.data_parallel_shard_degree == AUTOMATIC
    return n_ranks * max(2, find_shard_unit(section)) if is_automatic else n_ranks


def choose_degrees(section: Parallelism, max_ranks: int) -> dict[str, int]:
    """Return the degree of each mesh dim. An automatic dp_shard gets all remaining ranks."""
    degrees = plan_degrees(section, 1)
    if section.data_parallel_shard_degree == AUTOMATIC:
        n_left, unit = max_ranks // prod(degrees.values()), find_shard_unit(section)
        degrees["dp_shard"] = n_left // unit * unit
    return degrees


def list_smaller(config: Config, max_ranks: int) -> Iterator[Config]:
    """Yield the config with smaller degrees that fit, best first."""
    asked = read_degrees(config.parallelism)

    def list_divisors(dim: str) -> list[int]:
        degree = asked[dim]
        if degree <= 1:  # or automatic
            return [degree]
        return [n for n in range(1, degree + 1) if degree % n == 0]

    def rank(smaller: Config) -> tuple:
        degrees = read_degrees(smaller.parallelism)
        kept = [degrees[dim] != 1 for dim in GIVEN_UP_LAST]
        # In a ring or pipeline of two, all ranks are neighbors, which hides faults: prefer large cp and pp.
        return (
            sum(kept),
            kept,
            count_ranks(smaller.parallelism),
            degrees["cp"],
            degrees["pp"],
            degrees["ep"],
        )

    meshes = (
        dict(zip(asked, degrees, strict=True)) for degrees in product(*map(list_divisors, asked))
    )
    configs = (give_degrees(config, mesh) for mesh in meshes)
    yield from sorted(
        (c for c in configs if count_ranks(c.parallelism) <= max_ranks), key=rank, reverse=True
    )


def give_degrees(config: Config, degrees: dict[str, int]) -> Config:
    """Return the config with these degrees."""
    for dim, degree in degrees.items():
        config = with_value(config, DEGREE_KEYS[dim], degree)
    return config


def list_other_layouts(config: Config, degrees: dict[str, int], ep: int) -> Iterator[Config]:
    """Yield the config on other valid meshes of the same ranks. Meshes with another ep and another dp come first."""
    n_ranks, model_args = prod(degrees.values()), resolve_model(config.model)
    divisors = [n for n in range(1, n_ranks + 1) if n_ranks % n == 0]
    meshes = [
        dict(zip(degrees, mesh, strict=True))
        for mesh in product(divisors, repeat=5)
        if prod(mesh) == n_ranks
    ]
    meshes.remove(degrees)
    dp = degrees["dp_replicate"] * degrees["dp_shard"]
    meshes.sort(
        key=lambda mesh: (mesh["dp_replicate"] * mesh["dp_shard"] == dp, mesh["cp"], mesh["pp"])
    )
    eps = sorted(divisors, key=lambda n: (n == ep, n == 1, n)) if ep else [1]
    for other_ep, mesh in product(eps, meshes):
        other = give_degrees(config, {**mesh, "ep": other_ep})
        try:
            plan_layout(other, model_args, n_ranks)
        except ConfigError:
            continue
        yield other
