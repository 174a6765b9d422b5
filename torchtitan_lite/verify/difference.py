"""All ranks together: joins what every rank found to one difference between the layout and the reference.

slices of a tensor    the sum of their squared errors, as if some rank had gathered the tensor. A tensor that is
                      copied along some mesh dims is held as several wholes; the error of a rank is that of the whole
                      that its slice belongs to, so ranks of different wholes can be seen to disagree
every measure         the worst of all ranks; every parameter of the model must have been seen by some rank
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import combinations

from torchtitan_lite.verify.one_rank import Coordinates, RankResult, Slice

EXACT = ("expert_loads", "expert_biases")  # whole numbers, and sums of a few equal amounts


@dataclass(frozen=True)
class TensorError:
    """Difference between a whole tensor and the reference's."""

    error: float  # ||g - ref|| / ||ref||; a zero reference demands zero; what is not finite is infinitely wrong
    scale: float  # <g, ref> / <ref, ref>: 1, or the factor by which all of it is too large
    wrong: float  # ||g - ref|| squared


@dataclass(frozen=True)
class Difference:
    """Difference between a layout and the reference: for each measure the worst of all ranks."""

    initial_equal: dict[str, bool]  # by FQN, as in RankResult
    placements: dict[str, str]
    unequal_replicas: set[tuple[str, str]]
    gradient: dict[str, float]  # FQN -> relative error
    weight: dict[str, float]  # the same after the last step; empty without updates
    update: float  # of the updates of all weights together; 0 without updates
    n_tokens: float  # relative errors
    loss: float  # of the worst step
    grad_norm: float
    clipping: float  # of the first step
    ranks: list[RankResult]  # what it was merged from
    gradients_of_ranks: list[dict[str, TensorError]]  # by rank and FQN: of the whole that the rank's slice belongs to
    expert_loads: float = 0.0  # of the worst step; these are zero without experts
    router_entropy: float = 0.0
    expert_biases: float = 0.0  # after the last step

    @property
    def has_experts(self) -> bool:
        return bool(self.ranks[0].expert_loads)


def merge(ranks: list[RankResult], fqns: Collection[str]) -> Difference:
    """Return the worst of all ranks. Every parameter of the model, `fqns`, must have been seen by some rank."""

    def worst(of_ranks: list[dict], choose: Callable = max) -> dict:
        values = defaultdict(list)
        for of_rank in of_ranks:
            for fqn, value in of_rank.items():
                values[fqn].append(value)
        missing = sorted(values.keys() ^ set(fqns))
        assert not missing, f"parameters not compared: {missing}"
        return {fqn: choose(values[fqn]) for fqn in fqns}

    def worst_tensors(joined: list[dict[str, TensorError]]) -> dict[str, TensorError]:
        return worst(joined, lambda tensors: max(tensors, key=lambda tensor: tensor.error))

    gradients = join_slices([rank.gradients for rank in ranks])
    weights, update = {}, 0.0
    if ranks[0].weights:
        weights = worst_tensors(join_slices([rank.weights for rank in ranks]))
        # Of all together: per parameter, a norm weight near 1 would only show its rounding.
        whole = sum(worst([rank.squared_updates for rank in ranks]).values())
        update = math.sqrt(sum(weight.wrong for weight in weights.values()) / whole)
    return Difference(
        initial_equal=worst([rank.initial_equal for rank in ranks], all),
        placements=worst([rank.placements for rank in ranks]),
        unequal_replicas=set().union(*(rank.unequal_replicas for rank in ranks)),
        gradient={fqn: tensor.error for fqn, tensor in worst_tensors(gradients).items()},
        weight={fqn: tensor.error for fqn, tensor in weights.items()},
        update=update,
        **{name: max(rank.errors[name] for rank in ranks) for name in ranks[0].errors},
        ranks=ranks,
        gradients_of_ranks=gradients,
    )


def join_slices(of_ranks: list[dict[str, Slice]]) -> list[dict[str, TensorError]]:
    """Return by rank and FQN the error of the whole tensor that the rank's slice belongs to."""
    wholes: dict[tuple, list[Slice]] = defaultdict(list)
    for slices in of_ranks:
        for fqn, piece in slices.items():
            wholes[fqn, piece.whole].append(piece)
    joined = {}
    for whole, pieces in wholes.items():
        wrong, squared, product = (sum(getattr(p, name) for p in pieces) for name in ("wrong", "squared", "product"))
        wrong = wrong if math.isfinite(wrong) else math.inf
        error = math.sqrt(wrong / squared) if squared else math.inf if wrong else 0.0
        joined[whole] = TensorError(error, product / squared if squared else 1.0, wrong)
    return [{fqn: joined[fqn, piece.whole] for fqn, piece in slices.items()} for slices in of_ranks]


def find_faults(difference: Difference, tolerance: float) -> dict[str, str]:
    """Return the measures that exceed `tolerance` (relative), with the worst. Empty: the layout is right."""
    faults = {}
    if unequal := [fqn for fqn, equal in difference.initial_equal.items() if not equal]:
        n = len(difference.initial_equal)
        faults["initial"] = f"{len(unequal)} of {n} initial weights differ, {unequal[0]} first"
    of_experts = ("router_entropy", "expert_loads", "expert_biases")
    for name in ("n_tokens", "loss", "gradient", "weight", "grad_norm", "clipping", "update", *of_experts):
        what, error = name, getattr(difference, name)
        if isinstance(error, dict):  # by FQN
            worst = max(error, key=error.get, default=None)
            what, error = f"{name} of {worst}", error.get(worst, 0.0)
        if error > (0 if name in EXACT else tolerance):
            faults[name] = f"{what} is off by {error:.1e}"
    if difference.unequal_replicas:
        fqn, dim = min(difference.unequal_replicas)
        faults["replicas"] = f"{len(difference.unequal_replicas)} replicas differ, {fqn} over {dim} for one"
    return faults


def find_disagreement(values: list[tuple[Coordinates, float]], tolerance: float) -> list[str]:
    """Return the mesh dims along which ranks disagree: neighbours on that dim alone hold different values."""
    dims = set()
    for (here, one), (there, other) in combinations(values, 2):
        apart = [dim for dim in here if here[dim] != there[dim]]
        close = math.isclose(one, other, rel_tol=tolerance)
        if len(apart) == 1 and not close:
            dims.add(apart[0])
    return [dim for dim in (values[0][0] if values else ()) if dim in dims]
