"""Two models with the same weights, on the same tokens: logits, loss, the gradient of every parameter, and routes.

The reference itself shows how large an error of rounding is: it runs once more, with other kernels of attention and
with each rotary frequency raised to the next number that fp32 has. The bound is N_ROUNDINGS times what that changes,
and at least FLOOR. A fixed bound would not do. Gradient errors measured with right code, 4 and 16 layers:

    attention                 near     far, to position 8,191     to 131,071
    with initial weights     8e-07                      2e-05          3e-04
    wq and wk times 30       7e-05                      2e-03          3e-02

Those above FLOOR were at most 1.3 times what the other rounding changes. Those below it may be ten times that: a loss
in chunks, for instance, adds in an order that the reference never tries.

Far positions have a batch of their own because an angle is off by 6e-08 x distance x frequency: in one batch with near
ones they would widen the bound of all gradients.

Routers choose by comparing scores, so that rounding alone may send a token to another expert, and all that follows
differs. So both models compute with the routes that the reference chooses, and each says what it would have chosen.
A choice is as wrong as the score of its worst expert is below that of the reference's worst.

Legend: B rows, S tokens of a row, V vocabulary, K experts of a token.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchtitan_lite.checkpoint.hugging_face import IN_ROTARY_ORDER, to_their_order
from torchtitan_lite.checkpoint.hugging_face_folder import list_tensors, locate, their_module
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.model.head import IGNORE_INDEX
from torchtitan_lite.model.moe import list_mixtures
from torchtitan_lite.tools.verify.reference import find_visible, relative_error
from torchtitan_lite.tools.verify.trial import Measure

FLOOR = 1e-5
N_ROUNDINGS = 4
CEILING = 1.0  # however much rounding does: an error of 1 is as large as the number itself


@dataclass(frozen=True)
class Errors:
    """Relative errors of one run."""

    logits: list[float]  # by row
    loss: float
    gradients: dict[str, float]  # by FQN; infinite where there was none
    routes: dict[int, float]  # by layer: how far below the right scores those of the chosen experts are


@dataclass(frozen=True)
class Comparison:
    """Result on one batch."""

    name: str  # "near" or "far"
    measures: list[Measure]  # logits of each row, the loss, routes of each mixture layer
    gradients: dict[str, Measure]  # by FQN
    first: str  # what differs first; empty where nothing is beyond its bound

    @property
    def worst(self) -> tuple[str, Measure]:
        """Return the parameter whose gradient is the most times its bound, and its error."""
        return max(self.gradients.items(), key=lambda item: item[1].error / item[1].bound)


# ---------------------------------------------------------------- two models

Forward = Callable[[Batch], tuple[Tensor, Tensor]]  # -> logits (B, S, V), mean loss ()


def forward_theirs(theirs: nn.Module) -> Forward:
    """Return a call of transformers' model; its mask is made here, from the documents. Its routes may be given."""

    def forward(batch: Batch) -> tuple[Tensor, Tensor]:
        sees = find_visible(batch.doc_ids)
        mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
        with removed_afterwards([] if batch.routes is None else give_routes(theirs, batch.routes)):
            output = theirs(batch.tokens, position_ids=batch.positions, attention_mask=mask, use_cache=False)
        return output.logits.detach(), F.cross_entropy(output.logits.flatten(0, 1), batch.targets.flatten())

    return forward


def list_gates(theirs: nn.Module) -> dict[int, nn.Module]:
    """Return layer -> router of transformers' model. Its output is (logits, weights, routes), (T, ...) each."""
    return {n: block.mlp.gate for n, block in enumerate(theirs.model.layers) if hasattr(block.mlp, "gate")}


def give_routes(theirs: nn.Module, routes: Tensor) -> list[RemovableHandle]:
    """Make transformers' model compute with `routes` (B, S, layers, K)."""

    def replace_output(gate: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...], *, layer: int):
        given = routes[:, :, layer].flatten(0, 1)
        weights = output[0].float().softmax(-1).gather(-1, given)
        if getattr(theirs.config, "norm_topk_prob", True):  # Mixtral has no choice
            weights = weights / weights.sum(-1, keepdim=True)
        return output[0], weights, given

    gates = list_gates(theirs)
    return [gate.register_forward_hook(partial(replace_output, layer=layer)) for layer, gate in gates.items()]


def choose_routes(theirs: nn.Module, batch: Batch) -> tuple[Tensor, dict[int, Tensor]]:
    """Return the routes of the reference, (B, S, layers, K), and layer -> its scores, (B, S, experts)."""
    seen: dict[int, tuple[Tensor, ...]] = {}
    hooks = [
        gate.register_forward_hook(lambda gate, inputs, output, layer=layer: seen.update({layer: output}))
        for layer, gate in list_gates(theirs).items()
    ]
    with removed_afterwards(hooks), torch.no_grad():
        forward_theirs(theirs)(batch)
    shape = batch.tokens.shape
    top_k = next(iter(seen.values()))[2].shape[-1]
    routes = torch.zeros(*shape, len(theirs.model.layers), top_k, dtype=torch.int64)
    for layer, output in seen.items():
        routes[:, :, layer] = output[2].view(*shape, -1)
    return routes, {layer: output[0].float().softmax(-1).view(*shape, -1) for layer, output in seen.items()}


@contextmanager
def removed_afterwards(handles: list[RemovableHandle]) -> Iterator[None]:
    """Context manager: removes hooks at its end."""
    with ExitStack() as stack:
        for handle in handles:
            stack.enter_context(handle)
        yield


@contextmanager
def rounded_otherwise(theirs: nn.Module) -> Iterator[None]:
    """Context manager: other kernels of attention, and rotary frequencies one fp32 number larger."""
    frequencies = [buffer for name, buffer in theirs.named_buffers() if name.endswith("inv_freq")]
    assert frequencies, "transformers' model has no buffer inv_freq any more: how it rounds is not known"
    kept = [buffer.clone() for buffer in frequencies]
    usual = theirs.config._attn_implementation
    theirs.set_attn_implementation("sdpa")
    for buffer in frequencies:
        buffer.copy_(torch.nextafter(buffer, torch.full_like(buffer, inf)))
    try:
        yield
    finally:
        theirs.set_attn_implementation(usual)
        for buffer, original in zip(frequencies, kept, strict=True):
            buffer.copy_(original)


def forward_ours(ours: nn.Module) -> Forward:
    """Return a call of the model file, as a step makes it; logits by themselves: a loss in chunks has no whole."""

    def forward(batch: Batch) -> tuple[Tensor, Tensor]:
        inputs = {"positions": batch.positions, "doc_ids": batch.doc_ids}
        inputs |= {} if batch.routes is None else {"routes": batch.routes}
        with torch.no_grad():
            logits = ours(batch.tokens, **inputs)
        loss_sum = ours(batch.tokens, **inputs, targets=batch.targets)
        return logits, loss_sum / (batch.targets != IGNORE_INDEX).sum()

    return forward


def compare(name: str, ours: nn.Module, theirs: nn.Module, batch: Batch, rows: list[str]) -> Comparison:
    """Compare both models on one batch; `rows`: what each is. Both end as they started, without gradients."""
    scores = {}
    if ours.model_args.mixture:
        routes, scores = choose_routes(theirs, batch)
        batch = replace(batch, routes=routes)
    seen, rounding = measure_errors(ours, theirs, batch, scores)
    gradients = {fqn: judge(fqn, error, rounding.gradients[fqn], name) for fqn, error in seen.gradients.items()}
    routes = {
        layer: judge(f"routes, {name} layer {layer}", error, rounding.routes[layer], "scores of the chosen experts")
        for layer, error in seen.routes.items()
    }
    measures = [
        *(
            judge(f"logits, {name} row {number}", seen.logits[number], rounding.logits[number], what)
            for number, what in enumerate(rows)
        ),
        judge(f"loss, {name}", seen.loss, rounding.loss, "mean of all counted tokens"),
        *routes.values(),
    ]
    right = all(measure.is_right for measure in [*measures, *gradients.values()])
    otherwise = [f"the routes of layers.{layer}.feed_forward.router" for layer in routes if not routes[layer].is_right]
    otherwise.append("no module's output differs, only the loss or the backward")
    return Comparison(name, measures, gradients, "" if right else find_first(ours, theirs, batch) or otherwise[0])


def measure_errors(
    ours: nn.Module, theirs: nn.Module, batch: Batch, scores: dict[int, Tensor]
) -> tuple[Errors, Errors]:
    """Return errors of `ours`, and of `theirs` when it rounds otherwise. Only the reference's gradients are kept.

    `scores` (B, S, experts) of each mixture layer are the reference's.
    """
    args, sizes = ours.model_args, list_tensors(ours.model_args)
    places = {fqn: locate(fqn, size, args, stacked=True)[0] for fqn, size in sizes.items()}
    their_parameters = {fqn: theirs.get_parameter(place.name) for fqn, place in places.items()}

    def take_theirs(fqn: str, gradient: Tensor) -> Tensor:
        """Return the gradient of one parameter of ours: of experts, a part of theirs."""
        first = places[fqn].first_row
        return gradient if len(sizes[fqn]) < 3 else gradient[:, first : first + sizes[fqn][2]].transpose(1, 2)

    def take_ours(fqn: str, gradient: Tensor) -> Tensor:
        return to_their_order(gradient, args.head_dim) if fqn.endswith(IN_ROTARY_ORDER) else gradient

    logits, loss = forward_theirs(theirs)(batch)
    loss.backward()
    gradients = {fqn: take_theirs(fqn, parameter.grad) for fqn, parameter in their_parameters.items()}
    theirs.zero_grad()  # sets them to None: the only reference is here

    def measure(
        forward: Forward, parameters: dict[str, Tensor], take: Callable[[str, Tensor], Tensor], routers: dict
    ) -> Errors:
        errors, routes, fqns = dict.fromkeys(parameters, inf), dict.fromkeys(scores, inf), defaultdict(list)
        for fqn, parameter in parameters.items():
            fqns[parameter].append(fqn)

        def compare_and_free(parameter: Tensor) -> None:
            for fqn in fqns[parameter]:
                errors[fqn] = relative_error(take(fqn, parameter.grad), gradients[fqn])
            parameter.grad = None

        def compare_routes(router: nn.Module, inputs: tuple[Tensor, ...], _: object, *, layer: int) -> None:
            with torch.no_grad():
                chosen = router.forward(inputs[0])[-1].view(*batch.tokens.shape, -1)  # not those that are given
            right, own = (scores[layer].gather(-1, each).amin(-1) for each in (batch.routes[:, :, layer], chosen))
            routes[layer] = (1 - own / right).max().item()

        hooks = [parameter.register_post_accumulate_grad_hook(compare_and_free) for parameter in fqns]
        hooks += [r.register_forward_hook(partial(compare_routes, layer=layer)) for layer, r in routers.items()]
        with removed_afterwards(hooks):
            own_logits, own_loss = forward(batch)
            own_loss.backward()
        by_row = [relative_error(own, right) for own, right in zip(own_logits, logits, strict=True)]
        return Errors(by_row, relative_error(own_loss.detach(), loss.detach()), errors, routes)

    with rounded_otherwise(theirs):
        rounding = measure(forward_theirs(theirs), their_parameters, take_theirs, list_gates(theirs))
    routers = {layer: mixture.router for layer, mixture in list_mixtures(ours)}
    return measure(forward_ours(ours), dict(ours.named_parameters()), take_ours, routers), rounding


def judge(what: str, error: float, rounding: float, of: str, *, floor: float = FLOOR) -> Measure:
    """Return a line of the table; `rounding` is the error of the reference when it rounds otherwise."""
    return Measure(what, error, min(CEILING, max(floor, N_ROUNDINGS * rounding)), of)


# ---------------------------------------------------------------- what differs first


Seen = dict[str, tuple[Tensor, Tensor]]  # module by our name, in the order of the forward -> its input and its output


def find_first(ours: nn.Module, theirs: nn.Module, batch: Batch) -> str | None:
    """Return the first module with weights whose input or output is beyond its bound."""
    args = ours.model_args
    # Experts get other rows in each of the models: the whole feed-forward is compared instead.
    names = [re.sub(r"\.experts\..*", "", fqn.removesuffix(".weight")) for fqn in list_tensors(args)]
    names += ["output"] * args.tie_embeddings
    their_modules = {name: theirs.get_submodule(their_module(name, args, stacked=True)) for name in names}
    reference = watch(their_modules, forward_theirs(theirs), batch)
    with rounded_otherwise(theirs):
        rounded = watch(their_modules, forward_theirs(theirs), batch)
    seen = watch({name: ours.get_submodule(name) for name in names}, forward_ours(ours), batch)
    for name, tensors in seen.items():
        for side, own, right, otherwise in zip(
            ("input", "output"), tensors, reference[name], rounded[name], strict=True
        ):
            if is_head_norm := name.endswith(("q_norm", "k_norm")):
                own = own.transpose(1, 2)  # (B, heads, S, E) -> (B, S, heads, E)
            own, right, otherwise = (each.reshape(*batch.tokens.shape, -1) for each in (own, right, otherwise))
            if (side == "output" or is_head_norm) and f"{name}.weight".endswith(IN_ROTARY_ORDER):
                own = to_their_order(own.flatten(0, 1).t(), args.head_dim).t().unflatten(0, own.shape[:2])
            # The first difference may still be small: it is looked for below the bound, but above all rounding.
            rounding = relative_error(otherwise, right)
            measure = judge(name, relative_error(own, right), rounding, side, floor=FLOOR / 5)
            if not measure.is_right:
                place = describe_first_token(own, right, measure.bound, batch)
                return f"the {side} of {name}, off by {measure.error:.1e} {place}"
    return None


def watch(modules: dict[str, nn.Module], forward: Forward, batch: Batch) -> Seen:
    """Run a forward and return the input and output of each module, of its first call."""
    seen: Seen = {}

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, *, name: str) -> None:
        if name not in seen:
            seen[name] = inputs[0], output[-2] if isinstance(output, tuple) else output  # weights of a router

    handles = [module.register_forward_hook(partial(note, name=name)) for name, module in modules.items()]
    with removed_afterwards(handles), torch.no_grad():
        forward(batch)
    return seen


def describe_first_token(own: Tensor, reference: Tensor, bound: float, batch: Batch) -> str:
    """Return the first token of a row whose numbers, (B, S, ...), are beyond the bound."""
    own, reference = (tensor.flatten(2) if tensor.dim() > 2 else tensor[..., None] for tensor in (own, reference))
    errors = (own.double() - reference.double()).norm(dim=-1) / reference.double().norm(dim=-1)
    row, place = min((~(errors <= bound)).nonzero().tolist(), key=lambda where: where[1], default=(0, 0))
    return f"from token {place} of row {row} on (position {int(batch.positions[row, place])})"
