"""All ranks together: what every rank found is joined to one difference between the layout and the reference.

slices of a tensor    the sum of their squared errors, as if some rank had gathered the tensor. A tensor that is
                      copied along some mesh dims is held as several wholes; the error of a rank is that of the whole
                      that its slice belongs to, so ranks of different wholes can be seen to disagree
every measure         the worst of all ranks; every parameter of the model must have been seen by some rank
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import combinations

from torchtitan_lite.verify.share import Coordinates, Share, Slice


@dataclass
class Difference:
    """Difference between a layout and the reference: for each measure the worst of all ranks."""

    initial_equal: dict[str, bool]  # by FQN, as in Share
    gradient: dict[str, float]
    weight: dict[str, float]
    update: dict[str, tuple[float, float]]
    placements: dict[str, str]
    unequal_replicas: set[tuple[str, str]]
    n_tokens: float  # relative errors
    loss: float  # of the worst step
    grad_norm: float
    shares: list[Share]  # what it was merged from
    clipping: float = 0.0  # of gradients, where there is no update to see it by


def merge(shares: list[Share], fqns: Collection[str]) -> Difference:
    """Return the worst of all ranks. Every parameter of the model, `fqns`, must have been seen by some rank."""

    def worst(name: str, choose: Callable) -> dict:
        merged: dict = {}
        for share in shares:
            for fqn, value in getattr(share, name).items():
                merged[fqn] = choose(merged[fqn], value) if fqn in merged else value
        missing = sorted(merged.keys() ^ set(fqns))
        assert not missing, f"parameters not compared: {missing}"
        return {fqn: merged[fqn] for fqn in fqns}

    return Difference(
        initial_equal=worst("initial_equal", lambda one, other: one and other),
        gradient=worst("gradient", max),
        weight=worst("weight", max) if shares[0].weight else {},
        update=worst("update", max) if shares[0].update else {},
        placements=worst("placements", max),
        unequal_replicas=set().union(*(share.unequal_replicas for share in shares)),
        **{name: max(share.errors[name] for share in shares) for name in shares[0].errors},
        shares=shares,
    )


def find_faults(difference: Difference, tolerance: float) -> dict[str, str]:
    """Return the measures that exceed `tolerance` (relative), with the worst. Empty: the layout is right."""
    faults = {}
    unequal = [fqn for fqn, equal in difference.initial_equal.items() if not equal]
    if unequal:
        faults["initial"] = (
            f"{len(unequal)} of {len(difference.initial_equal)} initial weights differ, {unequal[0]} first"
        )
    for measure_name in ("n_tokens", "loss"):
        if getattr(difference, measure_name) > tolerance:
            faults[measure_name] = f"{measure_name} is off by {getattr(difference, measure_name):.1e}"
    for measure_name in ("gradient", "weight"):
        errors = getattr(difference, measure_name)
        worst = max(errors, key=errors.get, default=None)
        if worst is not None and errors[worst] > tolerance:
            faults[measure_name] = f"{measure_name} of {worst} is off by {errors[worst]:.1e}"
    for measure_name in ("grad_norm", "clipping"):
        if getattr(difference, measure_name) > tolerance:
            faults[measure_name] = f"{measure_name} is off by {getattr(difference, measure_name):.1e}"
    update = total_update_error(difference)
    if update > tolerance:
        faults["update"] = f"the update of all weights together is off by {update:.1e}"
    if difference.unequal_replicas:
        fqn, dim = min(difference.unequal_replicas)
        faults["replicas"] = f"{len(difference.unequal_replicas)} replicas differ, {fqn} over {dim} for one"
    return faults


def total_update_error(difference: Difference) -> float:
    """||all (w - ref)|| / ||all (ref - initial)||: per parameter, a norm weight near 1 would only show its rounding.

    0 where there was no update.
    """
    if not difference.update:
        return 0.0
    wrong, whole = (sum(pair[i] for pair in difference.update.values()) for i in (0, 1))
    return math.sqrt(wrong / whole) if math.isfinite(wrong) else math.inf


def find_disagreement(values: list[tuple[Coordinates, float]], tolerance: float) -> list[str]:
    """Return the mesh dims along which ranks disagree: neighbours on that dim alone hold different values."""
    dims = set()
    for (here, one), (there, other) in combinations(values, 2):
        apart = [dim for dim in here if here[dim] != there[dim]]
        close = math.isclose(one, other, rel_tol=tolerance)
        if len(apart) == 1 and not close:
            dims.add(apart[0])
    return [dim for dim in (values[0][0] if values else ()) if dim in dims]


# ---------------------------------------------------------------- slices


def join_shares(shares: list[Share]) -> list[Share]:
    """Return the shares with the errors of whole gradients, as if each rank had gathered them."""
    pairs = zip(shares, join_slices([share.slices for share in shares]), strict=True)
    return [
        replace(
            share,
            gradient={fqn: error for fqn, (error, _) in joined.items()},
            gradient_scale={fqn: scale for fqn, (_, scale) in joined.items()},
        )
        for share, joined in pairs
    ]


def join_slices(of_ranks: list[dict[str, Slice]]) -> list[dict[str, tuple[float, float]]]:
    """Return by rank and FQN the relative error of the whole, and its scale beside the reference's tensor."""
    wholes: dict[tuple, list[Slice]] = defaultdict(list)
    for slices in of_ranks:
        for fqn, piece in slices.items():
            wholes[fqn, piece.whole].append(piece)
    joined = {whole: join_whole(pieces) for whole, pieces in wholes.items()}
    return [{fqn: joined[fqn, piece.whole] for fqn, piece in slices.items()} for slices in of_ranks]


def join_whole(pieces: list[Slice]) -> tuple[float, float]:
    """Return relative error and scale; a zero reference demands zero; what is not finite is infinitely wrong."""
    wrong, squared, product = (
        sum(getattr(piece, name) for piece in pieces) for name in ("wrong", "squared", "product")
    )
    if not squared:
        return (0.0 if wrong == 0 else math.inf), 1.0
    return math.sqrt(wrong / squared) if math.isfinite(wrong) else math.inf, product / squared
