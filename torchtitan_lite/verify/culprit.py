"""Names what is wrong with a layout: the first thing, in the order of a step, that differs from one process.

    1. initial weights                  6. the loss: all outputs are right, so their sum over the ranks is not
    2. pieces, positions, documents     7. gradients, in backward order: all outputs are right, so a backward or a
    3. counted tokens                      reduction is not
    4. microbatches                     8. gradient norm
    5. rotary angles, documents and     9. copies that are to be equal
       modules, in forward order       10. updated weights

What comes later is a consequence of it, most likely. A module is blamed only if what it is given is right, on every
rank: its output is then wrong by much more than its inputs, and by more than rounding.
"""

import math
import re
from dataclasses import dataclass, field

from torchtitan_lite.config.messages import show_text
from torchtitan_lite.parallel.tensor_parallel import MissingFromPlan
from torchtitan_lite.verify.difference import Difference, find_disagreement
from torchtitan_lite.verify.module_outputs import OutputShare
from torchtitan_lite.verify.reference import ReferenceRun, largest_relative, relative_error
from torchtitan_lite.verify.share import Coordinates

# Measured on healthy layouts: from exact inputs outputs are off by up to 3e-7; errors of inputs grow threefold at most.
LEAST_ROUNDING = 2**-24  # half of the distance of two neighbouring fp32 numbers near 1
JUMP = 10  # times the error of its inputs: that of a wrong module's output is larger
SIDE_INPUTS = {"positions": "positions", "rotation": "rotary angles", "doc_ids": "documents"}  # argument -> kind
MOST_OF_CRASH = 300  # characters that are shown of a crash


@dataclass(frozen=True)
class Culprit:
    """The first difference. `name` is a module, a parameter, or what is exchanged."""

    kind: str  # initial weights, pieces, positions, documents, counted tokens, microbatches, module output, ...
    name: str
    detail: str
    mesh_dims: list[str] = field(default_factory=list)  # along which ranks disagree: where the exchange is at fault
    cause: str = "unknown"  # or the trap whose removal repairs it

    def __str__(self) -> str:
        along = f"; ranks along {', '.join(self.mesh_dims)} disagree" if self.mesh_dims else ""
        return f"{self.kind}: {self.name}, {self.detail}{along}"


def name_culprit(
    difference: Difference,
    faults: dict[str, str],
    outputs: list[OutputShare],
    reference: ReferenceRun,
    tolerance: float,
) -> Culprit:
    """Return the first difference in the order of a step; `faults` is not empty."""
    shares = difference.shares
    if "initial" in faults:
        name = next(fqn for fqn, equal in difference.initial_equal.items() if not equal)
        return Culprit("initial weights", name, faults["initial"])
    if culprit := name_wrong_piece(outputs):
        return culprit
    if "n_tokens" in faults:
        values = [(share.coordinates, float(share.n_tokens)) for share in shares]
        seen = ", ".join(str(n) for n in sorted({share.n_tokens for share in shares}))
        detail = f"{reference.n_tokens} targets of the global batch count, and ranks say {seen}"
        return Culprit("counted tokens", "count_global_tokens", detail, find_disagreement(values, 0))
    if culprit := name_first_output(outputs, reference, tolerance):
        return culprit
    # Later losses and norms are consequences of the first update.
    loss_error = max(largest_relative(share.losses[:1], reference.losses[:1]) for share in shares)
    if loss_error > tolerance:
        values = [(share.coordinates, share.losses[0]) for share in shares]
        dims = find_disagreement(values, tolerance)
        detail = f"every module's output is right, and the loss is off by {loss_error:.1e}: it is not added up rightly"
        return Culprit("loss", "sum_losses", detail, dims)
    if "gradient" in faults:
        return name_first_gradient(difference, reference, tolerance)
    norm_error = max(largest_relative(share.grad_norms[:1], reference.grad_norms[:1]) for share in shares)
    if norm_error > tolerance:
        values = [(share.coordinates, share.grad_norms[0]) for share in shares]
        detail = f"every gradient is right, and their norm is off by {norm_error:.1e}"
        return Culprit("gradient norm", "clip_grad_norm", detail, find_disagreement(values, tolerance))
    if "replicas" in faults:
        order = {fqn: index for index, fqn in enumerate(reference.initial)}
        name, dim = min(difference.unequal_replicas, key=lambda pair: order[pair[0]])
        return Culprit("replicas", name, "every gradient is right, and its copies are not bit-equal", [dim])
    if not difference.weight:
        return Culprit("clipping", "clip_grad_norm", f"the gradient norm is right, and {'; '.join(faults.values())}")
    name = max(difference.weight, key=difference.weight.get)
    return Culprit("updated weights", name, f"every gradient is right, and {'; '.join(faults.values())}")


def name_wrong_piece(outputs: list[OutputShare]) -> Culprit | None:
    """Return the field of the batch of which `shard_for_cp` leaves a rank other rows or tokens than its own."""
    errors = {name: [(share.coordinates, share.pieces[name]) for share in outputs] for name in list_fields(outputs)}
    wrong = {name: [at for at, error in pairs if error > 0] for name, pairs in errors.items()}
    wrong = {name: places for name, places in wrong.items() if places}
    if not wrong:
        return None
    name = next(iter(wrong))
    where = describe_place(wrong[name], len(outputs))
    if name in SIDE_INPUTS:
        return Culprit(SIDE_INPUTS[name], "shard_for_cp", f"they are not those of the tokens of a rank{where}")
    detail = f"shard_for_cp leaves other {', '.join(wrong)} than the head and tail of a zig-zag{where}"
    return Culprit("pieces", name, detail)


def list_fields(outputs: list[OutputShare]) -> list[str]:
    return list(outputs[0].pieces) if outputs else []


def name_first_output(outputs: list[OutputShare], reference: ReferenceRun, tolerance: float) -> Culprit | None:
    """Return the first module in forward order with a missing microbatch, or a wrong output from right inputs.

    Before it comes what modules are given beside hidden states. `tolerance`: no error above it is rounding.
    """
    for name in reference.outputs:
        for share in outputs:
            if share.n_calls.get(name, share.n_microbatches) != share.n_microbatches:
                detail = f"it has seen {share.n_calls[name]} microbatches of {share.n_microbatches}"
                return Culprit("microbatches", name, detail)
    if culprit := name_wrong_stage_piece(outputs) or name_wrong_side_input(outputs, reference, tolerance):
        return culprit
    for name in reference.outputs:
        holders = [share for share in outputs if name in share.error]
        if not holders:
            continue
        wrong_input = max(max(share.inputs[name].values(), default=0.0) for share in holders)
        worst = max(share.error[name] for share in holders)
        right = max(tolerance * measure_added(reference, name), LEAST_ROUNDING, JUMP * wrong_input)
        if worst > right:
            wrong = [share.coordinates for share in holders if share.error[name] > right]
            how = "has another shape or is not finite" if math.isinf(worst) else f"is off by {worst:.1e}"
            given = "exact" if wrong_input == 0 else f"off by {wrong_input:.1e}"
            detail = f"its inputs are {given}, and its output {how}{describe_place(wrong, len(holders))}"
            return Culprit("module output", name, detail)
    return name_first_input(outputs, reference, tolerance)


def measure_added(reference: ReferenceRun, name: str) -> float:
    """Return the share of its output that a block computes: ||y - x|| / ||y||. Other modules compute all.

    A block adds little to a large x, so that what is wrong in it is small beside its output, and so is its rounding.
    """
    x = reference.inputs[name].get("x") if name.startswith("layers.") and name.count(".") == 1 else None
    return 1.0 if x is None else min(1.0, relative_error(x, reference.outputs[name]))


def name_wrong_stage_piece(outputs: list[OutputShare]) -> Culprit | None:
    """Return the stage that is given other pieces of the batch than the reference's, in some microbatch."""
    for share in outputs:
        for first, errors in share.stage_pieces.items():
            for name in (name for name, error in errors.items() if error > 0):
                wrong = [other.coordinates for other in outputs if other.stage_pieces.get(first, {}).get(name, 0) > 0]
                n_holders = sum(first in other.stage_pieces for other in outputs)
                detail = (
                    f"the stage of {first} is given others than shard_for_cp leaves{describe_place(wrong, n_holders)}"
                )
                if name in SIDE_INPUTS:
                    return Culprit(SIDE_INPUTS[name], first, detail)
                return Culprit("pieces", "tokens" if name == "x" else name, detail)
    return None


def name_wrong_side_input(outputs: list[OutputShare], reference: ReferenceRun, tolerance: float) -> Culprit | None:
    """Return the first module that is given other rotary angles, positions or documents."""
    for name, arguments in reference.inputs.items():
        for argument in (argument for argument in arguments if argument in SIDE_INPUTS):
            holders = [share for share in outputs if argument in share.inputs.get(name, {})]
            wrong = [share for share in holders if share.inputs[name][argument] > tolerance]
            if wrong:
                worst = max(share.inputs[name][argument] for share in wrong)
                how = "have another shape or are not finite" if math.isinf(worst) else f"are off by {worst:.1e}"
                where = describe_place([share.coordinates for share in wrong], len(holders))
                detail = f"its positions are right, and the {SIDE_INPUTS[argument]} that it is given {how}{where}"
                return Culprit(SIDE_INPUTS[argument], name, detail)
    return None


def name_first_input(outputs: list[OutputShare], reference: ReferenceRun, tolerance: float) -> Culprit | None:
    """Return the first value that is right as an output and wrong as an input.

    Else errors grow from module to module: the first module whose output is wrong is named, and that it is not alone.
    """
    makers = {output.data_ptr(): name for name, output in reference.outputs.items()}  # a value is stored once
    for name, arguments in reference.inputs.items():
        for argument, value in arguments.items():
            maker = makers.get(value.data_ptr())
            error = max((share.inputs.get(name, {}).get(argument, 0.0) for share in outputs), default=0.0)
            put_out = max((share.error.get(maker, 0.0) for share in outputs), default=0.0)
            if maker is not None and error > max(tolerance, JUMP * put_out):
                detail = f"what {maker} puts out is right, and what it is given of that is off by {error:.1e}"
                return Culprit("module input", name, detail)
    for name in reference.outputs:
        worst = max((share.error.get(name, 0.0) for share in outputs), default=0.0)
        if worst > tolerance:
            detail = (
                f"its output is off by {worst:.1e}, its inputs nearly as much: the error grows from module to module"
            )
            return Culprit("growing error", name, detail)
    return None


def describe_place(wrong: list[Coordinates], n_holders: int) -> str:
    """Return the coordinates that all wrong ranks share; or that all ranks are wrong."""
    if len(wrong) == n_holders:
        return " on every rank that holds it"
    common = [f"{dim} {at}" for dim, at in wrong[0].items() if all(other[dim] == at for other in wrong)]
    return f" on {len(wrong)} of {n_holders} ranks that hold it, all at {', '.join(common) or 'no common place'}"


def name_first_gradient(difference: Difference, reference: ReferenceRun, tolerance: float) -> Culprit:
    """Return the first wrong gradient in backward order, its scale, and the dims along which ranks disagree."""
    wrong = [fqn for fqn in reference.gradients if difference.gradient[fqn] > tolerance]
    name = wrong[0]
    values = [(s.coordinates, s.gradient_scale[name]) for s in difference.shares if name in s.gradient_scale]
    dims = find_disagreement(values, tolerance)
    detail = f"every module's output is right, and this gradient is off by {difference.gradient[name]:.1e}"
    detail += f", {len(wrong)} of {len(reference.gradients)} gradients are wrong"
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
    """Return the culprit of a rank that raised or died: the last line of its traceback."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    last = show_text(lines[-1].strip(), MOST_OF_CRASH)
    if match := re.match(rf"(\S+\.)?{MissingFromPlan.__name__}: (?P<fqn>\S+) (?P<why>.*)", last):
        return Culprit("placement", match["fqn"], match["why"])
    return Culprit("crash", show_text(lines[0].split(":")[0], MOST_OF_CRASH), last)
