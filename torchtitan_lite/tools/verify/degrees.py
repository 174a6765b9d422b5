"""The mesh on which `verify` tries a layout: the one that was asked for, or a smaller one by a stated rule.

it fits the ranks          the degrees that the config gives stay as they are; an automatic dp_shard gets what they
                           leave, which may be 1
it does not fit            each degree above 1 becomes 2, and so does an automatic dp_shard. Then, as long as ranks
                           are left, cp and pp grow to 4 or 3, for a ring or a pipeline of two has neighbors only;
                           then all grow through the divisors of the real degree, outermost first
not even 2 of each fit     dims are given up: dp_shard where it is automatic, then dp_replicate, dp_shard, cp, tp,
                           pp. What is given up has not been looked at, so there is no certificate
ep                         the largest divisor of the ranks that dp_shard, cp and tp then have, up to the one that was
                           asked for; a smaller one if that leaves FSDP experts to share, as the real one does
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import gcd, prod

from torchtitan_lite.config.layout import MESH_DIMS
from torchtitan_lite.config.schema import Config, Parallelism

DEGREE_KEYS = {  # mesh dim -> key
    "pp": "parallelism.pipeline_parallel_degree",
    "dp_replicate": "parallelism.data_parallel_replicate_degree",
    "dp_shard": "parallelism.data_parallel_shard_degree",
    "cp": "parallelism.context_parallel_degree",
    "tp": "parallelism.tensor_parallel_degree",
}
EP_KEY = "parallelism.expert_parallel_degree"
OF_EXPERTS = ("dp_shard", "cp", "tp")  # whose ranks share the experts of a layer
AUTOMATIC = -1
GIVEN_UP_FIRST = ("dp_replicate", "dp_shard", "cp", "tp", "pp")


@dataclass(frozen=True)
class Degrees:
    """The degrees that were asked for, and those that are tried."""

    asked: dict[str, int]  # mesh dim -> degree; AUTOMATIC where the config leaves it open
    tried: dict[str, int]
    asked_ep: int = 1  # ranks that share the experts of a layer: no dim of the mesh, but of a second one
    ep: int = 1  # tried

    @property
    def reduced(self) -> dict[str, int]:
        """Return the dims that are tried with fewer ranks than were asked for, with the degree asked for."""
        smaller = {dim: asked for dim, asked in self.asked.items() if self.tried[dim] < asked}
        return smaller | ({"ep": self.asked_ep} if self.ep < self.asked_ep else {})

    @property
    def given_up(self) -> list[str]:
        """Return the dims that were asked for and are not tried at all."""
        return [dim for dim in self.reduced if {**self.tried, "ep": self.ep}[dim] == 1]

    @property
    def least_ranks(self) -> int:
        """Return the ranks with which every dim that was asked for could be tried."""
        n_ranks = prod(2 if degree > 1 else 1 for degree in self.asked.values())
        return n_ranks * (2 if self.asked_ep > 1 and all(self.asked[dim] <= 1 for dim in OF_EXPERTS) else 1)

    @property
    def mesh(self) -> str:
        """Return the mesh that is tried: `pp2 x tp2`, or `dp_shard2 x tp2, ep4`."""
        dims = " x ".join(f"{dim}{degree}" for dim, degree in self.tried.items() if degree > 1) or "one rank"
        return f"{dims}, ep{self.ep}" if self.ep > 1 else dims

    def __str__(self) -> str:
        """Return `pp2 x tp2; pp 16 was reduced`."""
        if not self.reduced:
            return self.mesh
        asked = " and ".join(f"{dim} {degree}" for dim, degree in self.reduced.items())
        return f"{self.mesh}; {asked} {'were' if len(self.reduced) > 1 else 'was'} reduced"


def choose_degrees(section: Parallelism, max_ranks: int) -> Degrees:
    """Return the degrees to try on at most `max_ranks`. The pp of a schedule file stays."""
    asked = {dim: getattr(section, key.split(".")[1]) for dim, key in DEGREE_KEYS.items()}
    pinned = ("pp",) if asked["pp"] > 1 and section.pipeline_parallel_schedule_csv else ()
    is_automatic = asked["dp_shard"] == AUTOMATIC
    given = {**asked, "dp_shard": 1} if is_automatic else asked
    n_given = prod(given.values())
    if n_given <= max_ranks:
        tried = {**given, "dp_shard": max_ranks // n_given} if is_automatic else given
    else:
        tried = shrink(given, max_ranks, pinned, wants_shards=is_automatic)
    asked_ep = section.expert_parallel_degree
    n_real = 0 if is_automatic else prod(asked[dim] for dim in OF_EXPERTS)
    return Degrees(asked, tried, asked_ep, choose_ep(asked_ep, prod(tried[dim] for dim in OF_EXPERTS), n_real))


def choose_ep(asked: int, n_ranks: int, n_real: int) -> int:
    """Return the ep for `n_ranks` that share the experts of a layer, where `asked` is that for `n_real`; 0: unknown."""
    fitting = [degree for degree in range(1, min(asked, n_ranks) + 1) if n_ranks % degree == 0]
    if fitting[-1] == n_ranks and asked < n_real and n_ranks > 2:  # else FSDP would have nothing to share
        return fitting[-2] if fitting[-2] > 1 else n_ranks
    return fitting[-1]


def give_degrees(config: Config, degrees: dict[str, int]) -> dict[str, object]:
    """Return the keys of a mesh; ep becomes what it has room for."""
    return {**{DEGREE_KEYS[dim]: n for dim, n in degrees.items()}, EP_KEY: limit_ep(config.parallelism, degrees)}


def limit_ep(section: Parallelism, degrees: dict[str, int]) -> int:
    """Return the largest divisor of ep that other degrees have room for."""
    return gcd(section.expert_parallel_degree, prod(degrees[dim] for dim in OF_EXPERTS))


def shrink(given: dict[str, int], max_ranks: int, pinned: Collection[str], *, wants_shards: bool) -> dict[str, int]:
    """Return smaller degrees, by the rule above. `wants_shards`: dp_shard is automatic, and may become 2."""
    degrees = {dim: degree if dim in pinned else min(degree, 2) for dim, degree in given.items()}
    if wants_shards and 2 * prod(degrees.values()) <= max_ranks:
        degrees["dp_shard"] = 2
    for dim in GIVEN_UP_FIRST:
        if prod(degrees.values()) > max_ranks and dim not in pinned:
            degrees[dim] = 1

    def grow(dim: str, sizes: list[int]) -> None:
        room = max_ranks // (prod(degrees.values()) // degrees[dim])
        fitting = [size for size in sizes if degrees[dim] < size <= room]
        if degrees[dim] > 1 and fitting and dim not in pinned:
            degrees[dim] = fitting[0]

    for dim in ("cp", "pp"):
        grow(dim, sorted((size for size in (4, 3) if size <= given[dim]), key=lambda size: given[dim] % size != 0))
    for dim in MESH_DIMS:
        grow(dim, [size for size in range(min(given[dim], max_ranks), 1, -1) if given[dim] % size == 0])
    return degrees
