"""Names what is wrong with a layout: the first thing, in the order of a step, that differs from one process.

    1. initial weights      5. the loss: all outputs were right, so their sum over the ranks is not
    2. counted tokens       6. gradients, in backward order: all outputs were right, so a backward or a reduction is not
    3. microbatches         7. gradient norm
    4. module outputs,      8. copies that are to be equal
       in forward order     9. updated weights

What comes later is a consequence of it, most likely.
"""

import math
from dataclasses import dataclass, field

from torchtitan_lite.tools.comparison import Coordinates, Difference, find_disagreement, largest_relative
from torchtitan_lite.tools.module_outputs import OutputShare
from torchtitan_lite.tools.oracle import Outcome


@dataclass(frozen=True)
class Culprit:
    """What differs first. `name` is a module, a parameter, or what is exchanged."""

    kind: str  # initial weights, counted tokens, microbatches, module output, loss, gradient, ...
    name: str
    detail: str
    mesh_dims: list[str] = field(default_factory=list)  # along which ranks disagree: where the exchange is at fault
    cause: str = "unknown"  # or the trap whose removal repairs it

    def __str__(self) -> str:
        along = f"; ranks along {', '.join(self.mesh_dims)} disagree" if self.mesh_dims else ""
        return f"{self.kind}: {self.name}, {self.detail}{along}"


def name_culprit(
    difference: Difference, faults: dict[str, str], outputs: list[OutputShare], oracle: Outcome, tolerance: float
) -> Culprit:
    """The first thing that differs; `faults` is not empty."""
    shares = difference.shares
    if "initial" in faults:
        name = next(fqn for fqn, equal in difference.initial_equal.items() if not equal)
        return Culprit("initial weights", name, faults["initial"])
    if "n_tokens" in faults:
        values = [(share.coordinates, float(share.n_tokens)) for share in shares]
        seen = ", ".join(str(n) for n in sorted({share.n_tokens for share in shares}))
        detail = f"{oracle.n_tokens} targets of the global batch count, and ranks say {seen}"
        return Culprit("counted tokens", "count_global_tokens", detail, find_disagreement(values, 0))
    if culprit := name_first_output(outputs, oracle, tolerance):
        return culprit
    # Later losses and norms are consequences of the first update.
    loss_error = max(largest_relative(share.losses[:1], oracle.losses[:1]) for share in shares)
    if loss_error > tolerance:
        values = [(share.coordinates, share.losses[0]) for share in shares]
        dims = find_disagreement(values, tolerance)
        detail = f"every module's output is right, and the loss is off by {loss_error:.1e}: it is not added up rightly"
        return Culprit("loss", "sum_losses", detail, dims)
    if "gradient" in faults:
        return name_first_gradient(difference, oracle, tolerance)
    norm_error = max(largest_relative(share.grad_norms[:1], oracle.grad_norms[:1]) for share in shares)
    if norm_error > tolerance:
        values = [(share.coordinates, share.grad_norms[0]) for share in shares]
        detail = f"every gradient is right, and their norm is off by {norm_error:.1e}"
        return Culprit("gradient norm", "clip_grad_norm", detail, find_disagreement(values, tolerance))
    if "replicas" in faults:
        order = {fqn: index for index, fqn in enumerate(oracle.initial)}
        name, dim = min(difference.unequal_replicas, key=lambda pair: order[pair[0]])
        return Culprit("replicas", name, "every gradient is right, and its copies are not bit-equal", [dim])
    if not difference.weight:
        return Culprit("clipping", "clip_grad_norm", f"the gradient norm is right, and {'; '.join(faults.values())}")
    name = max(difference.weight, key=difference.weight.get)
    return Culprit("updated weights", name, f"every gradient is right, and {'; '.join(faults.values())}")


def name_first_output(outputs: list[OutputShare], oracle: Outcome, tolerance: float) -> Culprit | None:
    """The first module in forward order with a microbatch too few, or with another output."""
    for name in oracle.outputs:
        holders = [share for share in outputs if name in share.error]
        for share in holders:
            if share.n_calls[name] != share.n_microbatches:
                detail = f"it has seen {share.n_calls[name]} microbatches of {share.n_microbatches}"
                return Culprit("microbatches", name, detail)
        worst = max((share.error[name] for share in holders), default=0.0)
        if worst > tolerance:
            wrong = [share.coordinates for share in holders if share.error[name] > tolerance]
            how = "has another shape or is not finite" if math.isinf(worst) else f"is off by {worst:.1e}"
            return Culprit("module output", name, f"its output {how}{describe_place(wrong, len(holders))}")
    return None


def describe_place(wrong: list[Coordinates], n_holders: int) -> str:
    """Where, if not everywhere: the coordinates that all wrong ranks have in common."""
    if len(wrong) == n_holders:
        return " on every rank that holds it"
    common = [f"{dim} {at}" for dim, at in wrong[0].items() if all(other[dim] == at for other in wrong)]
    return f" on {len(wrong)} of {n_holders} ranks that hold it, all at {', '.join(common) or 'no common place'}"


def name_first_gradient(difference: Difference, oracle: Outcome, tolerance: float) -> Culprit:
    """The first one in backward order, whether it is only too large, and which ranks disagree about it."""
    wrong = [fqn for fqn in oracle.gradients if difference.gradient[fqn] > tolerance]
    name = wrong[0]
    values = [(s.coordinates, s.gradient_scale[name]) for s in difference.shares if name in s.gradient_scale]
    dims = find_disagreement(values, tolerance)
    detail = f"every module's output is right, and this gradient is off by {difference.gradient[name]:.1e}"
    detail += f", {len(wrong)} of {len(oracle.gradients)} gradients are wrong"
    scales = [s.gradient_scale[fqn] for s in difference.shares for fqn in wrong if fqn in s.gradient_scale]
    only_scaled = all(
        math.isclose(abs(scale - 1), s.gradient[fqn], rel_tol=1e-2, abs_tol=tolerance)
        for s in difference.shares
        for fqn in wrong
        if (scale := s.gradient_scale.get(fqn)) is not None
    )
    if only_scaled and max(scales) - min(scales) <= 1e-3 * abs(scales[0]):
        detail += f", all of it {scales[0]:.4g} times what it should be"
    return Culprit("gradient", name, detail, dims)


def name_crash(text: str) -> Culprit:
    """A rank that raised or hung. The last line of its traceback says what."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return Culprit("crash", lines[0].split(":")[0], lines[-1].strip())
