"""Names what is wrong with a layout: the first thing, in the order of a step, that differs from one process.

    1. initial weights                  6. the loss: all outputs are right, so their sum over the ranks is not
    2. pieces, positions, documents     7. gradients, in backward order: all outputs are right, so a backward or a
    3. counted tokens                      reduction is not
    4. microbatches                     8. loads of experts
    5. rotary angles, documents and     9. gradient norm, copies that are to be equal, biases of experts
       modules, in forward order       10. updated weights

Routes that a layout chooses by itself are compared if all of this is right (module_outputs.py).

What comes later is a consequence of it, most likely. A module is blamed only if what it is given is right, on every
rank: its output is then wrong by much more than its inputs, and by more than rounding.
"""

import math
from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass

import torch

from torchtitan_lite.tools.verify.module_outputs import ModuleErrors
from torchtitan_lite.tools.verify.reference import ReferenceRun, largest_relative, relative_error
from torchtitan_lite.tools.verify.slices import Coordinates
from torchtitan_lite.tools.verify.trial import Culprit, Difference, describe_ranks, find_disagreement

# Measured on healthy layouts: from exact inputs outputs are off by up to 3e-7; errors of inputs grow threefold at most.
LEAST_ROUNDING = 2**-24  # half of the distance of two neighboring fp32 numbers near 1
JUMP = 10  # times the error of its inputs: that of a wrong module's output is larger
SIDE_INPUTS = {"positions": "positions", "rotation": "rotary angles", "doc_ids": "documents"}  # argument -> kind


def name_culprit(
    difference: Difference,
    faults: dict[str, str],
    outputs: list[ModuleErrors],
    reference: ReferenceRun,
    tolerance: float,
) -> Culprit:
    """Return the first difference in the order of a step; `faults` is not empty."""
    ranks = difference.ranks

    def find_dims(values: list[float]) -> list[str]:
        return find_disagreement(list(zip([rank.coordinates for rank in ranks], values, strict=True)), tolerance)

    if "initial" in faults:
        name = next(fqn for fqn, equal in difference.initial_equal.items() if not equal)
        return Culprit("initial weights", name, faults["initial"])
    if wrong := find_wrong_input(outputs, ["shard_for_cp"], "pieces", 0):
        detail = f"shard_for_cp leaves other {wrong.argument} than the head and tail of a zig-zag{wrong.where}"
        return accuse_field(wrong.argument, wrong.name, detail)
    if "n_tokens" in faults:
        counts = [rank.n_tokens for rank in ranks]
        seen = ", ".join(map(str, sorted(set(counts))))
        detail = f"{reference.n_tokens} targets of the global batch count, and ranks count {seen}"
        return Culprit("counted tokens", "count_global_tokens", detail, find_dims(counts))
    if culprit := name_first_output(outputs, reference, tolerance):
        return culprit
    # Later losses and norms are consequences of the first update.
    losses, norms = [rank.losses[0] for rank in ranks], [rank.grad_norms[0] for rank in ranks]
    loss_error = max(largest_relative([loss], reference.losses[:1]) for loss in losses)
    if loss_error > tolerance:
        detail = f"every module's output is right, and the loss is off by {loss_error:.1e}: it is not added up rightly"
        return Culprit("loss", "sum_losses", detail, find_dims(losses))
    if "gradient" in faults:
        return name_first_gradient(difference, reference, tolerance)
    if culprit := name_first_load(difference, faults, reference):
        return culprit
    norm_error = max(largest_relative([norm], reference.grad_norms[:1]) for norm in norms)
    if norm_error > tolerance:
        detail = f"every gradient is right, and their norm is off by {norm_error:.1e}"
        return Culprit("gradient norm", "measure_grad_norm", detail, find_dims(norms))
    if "replicas" in faults:
        order = list(reference.initial)
        name, dim = min(difference.unequal_replicas, key=lambda pair: order.index(pair[0]))
        return Culprit("replicas", name, "every gradient is right, and its copies are not bit-equal", [dim])
    if "expert_biases" in faults:
        return name_first_bias(difference, reference)
    if "clipping" in faults or not difference.weight:
        return Culprit("clipping", "update_weights", f"the gradient norm is right, and {'; '.join(faults.values())}")
    name = max(difference.weight, key=difference.weight.get)
    return Culprit("updated weights", name, f"every gradient is right, and {'; '.join(faults.values())}")


# ---------------------------------------------------------------- inputs and outputs of modules


@dataclass(frozen=True)
class WrongInput:
    """An argument that some ranks have wrong."""

    name: str  # of the module or function that gets it
    argument: str
    error: float  # the largest
    where: str


def find_wrong_input(
    outputs: list[ModuleErrors], names: Iterable[str], given: str, tolerance: float, *, arguments: Container[str] = ()
) -> WrongInput | None:
    """Return the first argument with an error above `tolerance`. `given`: the field of ModuleErrors that is read.

    `arguments`: those that are looked at; by default all of them.
    """
    for name in names:
        errors: dict[str, list[tuple[float, Coordinates]]] = defaultdict(list)
        for rank in outputs:
            for argument, error in getattr(rank, given).get(name, {}).items():
                if not arguments or argument in arguments:
                    errors[argument].append((error, rank.coordinates))
        for argument, of_ranks in errors.items():
            if wrong := [coordinates for error, coordinates in of_ranks if error > tolerance]:
                worst = max(error for error, _ in of_ranks)
                return WrongInput(name, argument, worst, describe_ranks(wrong, len(of_ranks)))
    return None


def accuse_field(field_name: str, name: str, detail: str) -> Culprit:
    """Return the culprit for a field of Batch that `name` leaves or is given."""
    if field_name in SIDE_INPUTS:
        return Culprit(SIDE_INPUTS[field_name], name, detail)
    return Culprit("pieces", field_name, detail)


def name_first_output(outputs: list[ModuleErrors], reference: ReferenceRun, tolerance: float) -> Culprit | None:
    """Return the first module in forward order with a missing microbatch, or a wrong output from right inputs.

    Before it comes what modules are given beside hidden states. `tolerance`: no error above it is rounding.
    """
    for name in reference.outputs:
        for rank in outputs:
            if rank.n_calls.get(name, rank.n_microbatches) != rank.n_microbatches:
                detail = f"it has seen {rank.n_calls[name]} microbatches of {rank.n_microbatches}"
                return Culprit("microbatches", name, detail)
    if wrong := find_wrong_input(outputs, reference.inputs, "pieces", 0):
        detail = f"the stage of {wrong.name} is given others than shard_for_cp leaves{wrong.where}"
        return accuse_field("tokens" if wrong.argument == "x" else wrong.argument, wrong.name, detail)
    if wrong := find_wrong_input(outputs, reference.inputs, "inputs", tolerance, arguments=SIDE_INPUTS):
        how = "have another shape or are not finite" if math.isinf(wrong.error) else f"are off by {wrong.error:.1e}"
        kind = SIDE_INPUTS[wrong.argument]
        detail = f"its positions are right, and the {kind} that it is given {how}{wrong.where}"
        return Culprit(kind, wrong.name, detail)
    for name in reference.outputs:
        holders = [rank for rank in outputs if name in rank.error]
        if not holders:
            continue
        wrong_input = max(max(rank.inputs[name].values(), default=0.0) for rank in holders)
        worst = max(rank.error[name] for rank in holders)
        right = max(tolerance * measure_added(reference, name), LEAST_ROUNDING, JUMP * wrong_input)
        if worst > right:
            at = [rank.coordinates for rank in holders if rank.error[name] > right]
            how = "has another shape or is not finite" if math.isinf(worst) else f"is off by {worst:.1e}"
            given = "exact" if wrong_input == 0 else f"off by {wrong_input:.1e}"
            detail = f"its inputs are {given}, and its output {how}{describe_ranks(at, len(holders))}"
            return Culprit("module output", name, detail)
    return name_first_input(outputs, reference, tolerance)


def measure_added(reference: ReferenceRun, name: str) -> float:
    """Return how much of its output a block computes: ||y - x|| / ||y||. Other modules compute all of it.

    A block adds little to a large x, so that what is wrong in it is small beside its output, and so is its rounding.
    """
    x = reference.inputs[name].get("x") if name.startswith("layers.") and name.count(".") == 1 else None
    return 1.0 if x is None else min(1.0, relative_error(x, reference.outputs[name]))


def name_first_input(outputs: list[ModuleErrors], reference: ReferenceRun, tolerance: float) -> Culprit | None:
    """Return the first value that is right as an output and wrong as an input.

    Else errors grow from module to module: the first module whose output is wrong is named, and that it is not alone.
    """
    output_error = {
        name: max((rank.error.get(name, 0.0) for rank in outputs), default=0.0) for name in reference.outputs
    }
    makers = {output.data_ptr(): name for name, output in reference.outputs.items()}  # a value is stored once
    for name, arguments in reference.inputs.items():
        for argument, value in arguments.items():
            maker = makers.get(value.data_ptr())
            error = max((rank.inputs.get(name, {}).get(argument, 0.0) for rank in outputs), default=0.0)
            if maker is not None and error > max(tolerance, JUMP * output_error[maker]):
                detail = f"the output of {maker} is right, and what this module is given of it is off by {error:.1e}"
                return Culprit("module input", name, detail)
    for name, error in output_error.items():
        if error > tolerance:
            detail = (
                f"its output is off by {error:.1e}, its inputs nearly as much: the error grows from module to module"
            )
            return Culprit("growing error", name, detail)
    return None


# ---------------------------------------------------------------- gradients


def name_first_gradient(difference: Difference, reference: ReferenceRun, tolerance: float) -> Culprit:
    """Return the first wrong gradient in backward order, its scale, and the dims along which ranks disagree."""
    wrong = [fqn for fqn in reference.gradients if difference.gradient[fqn] > tolerance]
    name = wrong[0]
    of_ranks = list(zip(difference.ranks, difference.gradients_of_ranks, strict=True))
    scales_of_first = [(rank.coordinates, tensors[name].scale) for rank, tensors in of_ranks if name in tensors]
    detail = f"every module's output is right, and this gradient is off by {difference.gradient[name]:.1e}"
    detail += f", {len(wrong)} of {len(reference.gradients)} gradients are wrong"
    gaps = [tensors[fqn] for _, tensors in of_ranks for fqn in wrong if fqn in tensors]
    scales = [gap.scale for gap in gaps]
    only_scaled = all(math.isclose(abs(g.scale - 1), g.relative_error, rel_tol=1e-2, abs_tol=tolerance) for g in gaps)
    if only_scaled and max(scales) - min(scales) <= 1e-3 * abs(scales[0]):
        detail += f", all of it {scales[0]:.4g} times what it should be"
    return Culprit("gradient", name, detail, find_disagreement(scales_of_first, tolerance))


# ---------------------------------------------------------------- experts


def name_first_load(difference: Difference, faults: dict[str, str], reference: ReferenceRun) -> Culprit | None:
    """Return the first layer, in the first step, whose experts were counted other tokens than were sent to them."""
    for step, right in enumerate(reference.experts.loads if "expert_loads" in faults else []):
        for rank in difference.ranks:
            loads = rank.expert_loads[step]
            wrong = (loads != right).nonzero().tolist()
            if not wrong:
                continue
            layer, expert = wrong[0]
            detail = f"every gradient is right, and in step {step + 1} {loads[layer, expert]:.0f} tokens are counted "
            detail += f"for expert {expert} instead of {right[layer, expert]}"
            factor = (loads.sum() / right.sum()).item()
            if torch.equal(loads, factor * right):
                detail += f"; all loads are {factor:.4g} times what they should be"
            # Of an expert that gets every token, ranks may agree on a wrong load.
            of_experts = (
                [(each.coordinates, each.expert_loads[step][at].item()) for each in difference.ranks]
                for at in map(tuple, wrong)
            )
            dims = max((find_disagreement(of_ranks, 0) for of_ranks in of_experts), key=len)
            return Culprit("expert loads", f"layers.{layer}.feed_forward.router", detail, dims)
    if "router_entropy" in faults:
        return Culprit("router entropy", "ExpertBalance.update", f"every load is right, and {faults['router_entropy']}")
    return None


def name_first_bias(difference: Difference, reference: ReferenceRun) -> Culprit:
    """Return the first bias that is not the reference's after the last step."""
    for fqn, right in reference.experts.biases.items():
        held = [(rank.coordinates, rank.expert_biases[fqn]) for rank in difference.ranks if fqn in rank.expert_biases]
        is_right = [(coordinates, float(torch.equal(bias, right))) for coordinates, bias in held]
        wrong = [(at, bias) for (at, bias), (_, ok) in zip(held, is_right, strict=True) if not ok]
        if wrong:
            moved, wanted = (x - reference.experts.initial_biases[fqn] for x in (wrong[0][1], right))
            expert = (moved - wanted).abs().argmax()
            detail = f"every load is right, and the steps move the bias of expert {expert} by {moved[expert]:.3g} "
            detail += f"instead of {wanted[expert]:.3g}{describe_ranks([at for at, _ in wrong], len(held))}"
            return Culprit("expert biases", fqn, detail, find_disagreement(is_right, 0))
    raise AssertionError("a bias is wrong")
