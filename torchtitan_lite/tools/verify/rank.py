"""Run one rank of a layout with the build_run and train_step of train.py, and compare each step with the plain loop.

    before a step     the rank receives its slices of the plain loop's weights
    before clipping   its gradients are compared, then replaced by the gradients of the plain loop
    after a step      weights, optimizer state, expert loads, expert biases and replicas are compared

Errors do not carry over into the next step, and AdamW does not amplify rounding, so the run keeps its optimizer and
schedule. Each rank slices the tensors of the plain loop; nothing is gathered.

Experts: rounding a score can change the top-k choice. A token with tied scores takes the experts that it has in the
plain loop. It is recognized by its scores, so it can be on any rank and in any microbatch.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan_lite import build
from torchtitan_lite import step as stepping  # a module, because tests patch its functions
from torchtitan_lite.checkpoint.load import set_step
from torchtitan_lite.components.adamw_bfloat16 import local_tensor
from torchtitan_lite.config.block import INT8_BLOCK, list_parameters
from torchtitan_lite.config.layout import plan_layout, resolve_config, resolve_model
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.dataset import rows_of_rank
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.parallel.zero_plus_plus import Packing
from torchtitan_lite.tools.verify.plain import PlainStep, init_leveled

ROUNDING = 2.0**-24  # largest relative error of one fp32 operation
SAME_TOKEN = 1e-6  # score distance within one token; if another token is that close, it makes the same choice (see TIE)
Coordinates = dict[str, int]  # mesh dim -> coordinate of a rank


@dataclass
class Seen:
    """The errors that one rank found: (step, measure, name) -> error."""

    coordinates: Coordinates
    errors: dict[tuple[int, str, str], float] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)  # FQNs of the rank's parameters

    def note(self, step: int, measure: str, name: str, error: float) -> None:
        """Record an error. Of several errors with the same key, keep the largest. NaN counts as infinite."""
        error = error if error < math.inf else math.inf
        self.errors[step, measure, name] = max(error, self.errors.get((step, measure, name), 0.0))


def build_small_run(config: Config, world_size: int) -> build.Run:
    """Build the run that train.py would build, on CPUs. Collective."""
    model_args = resolve_model(config.model)
    layout = plan_layout(config, model_args, world_size)
    resolved, mesh, device = (
        resolve_config(config, layout, "cpu"),
        build_mesh(layout, "cpu"),
        torch.device("cpu"),
    )
    return build.build_run(resolved, model_args, layout, mesh, device, init_leveled)


def own_rows(run: build.Run, batch: Batch) -> Batch:
    """Return this rank's rows of a global batch."""
    return batch.take_rows(rows_of_rank(run.mesh.data_rank, run.layout.dp, len(batch.tokens)))


def local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor).detach()


def cut(whole: Tensor, like: Tensor) -> Tensor:
    """Return the slice of `whole` with the placement of `like` on this rank. No communication."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(
        whole, like.device_mesh, like.placements, src_data_rank=None
    ).to_local()


@torch.no_grad()
def relative_error(
    tensor: Tensor,
    whole: Tensor,
    unit: Tensor | None = None,
    *,
    roundings: int = 0,
    forgives: bool = False,
) -> float:
    """Return ||own - right|| relative to this slice's share of ||unit|| (default: `whole`). If it is 0, own must be 0.

    `roundings`: number of fp32 roundings per element to ignore.
    `forgives`: ignore the worst two elements plus 0.1 %. In bfloat16, one in ten thousand rounds differently.
    """
    own, right = local(tensor).double(), cut(whole, tensor).double()
    errors = ((own - right).abs() - roundings * ROUNDING * right.abs()).clamp(min=0)
    if forgives and own.isfinite().all():
        errors = errors.flatten().sort().values[: -2 - errors.numel() // 1000]
    wrong = errors.norm().item()
    if wrong == 0:
        return 0.0
    unit = whole if unit is None else unit
    fraction = unit.double().norm().item() * math.sqrt(own.numel() / unit.numel())
    scale = max(fraction, cut(unit, tensor).double().norm().item())
    return wrong / scale if scale else math.inf


# ---------------------------------------------------------------- the steps


def compare_steps(rank: int, world_size: int, config: Config, path: str) -> Seen:
    """Worker: repeat the steps of the plain loop, stored in the file `path`, on this layout. Collective."""
    steps: list[PlainStep] = torch.load(path, weights_only=False, mmap=True)
    run = build_small_run(config, world_size)
    seen = Seen(run.mesh.coordinates(), held=set(run.parameters))
    for fqn, parameter in run.parameters.items():
        unequal = not torch.equal(local(parameter), cut(steps[0].weights[fqn], parameter))
        seen.note(
            0, "initial weights", fqn, float(unequal or not starts_as_listed(fqn, steps[0], run))
        )
    for number, plain in enumerate(steps):
        compare_step(run, plain, number, seen)
    return seen


def starts_as_listed(fqn: str, plain: PlainStep, run: build.Run) -> bool:
    """Whether a bias starts at 0, and a norm at the constant in the table of the model."""
    entry, weight = list_parameters(run.parts[0].model_args)[fqn], plain.weights[fqn]
    if entry.is_bias:
        return not weight.any()
    return entry.row.kind != "norm" or bool((weight == entry.row.start).all())


def compare_step(run: build.Run, plain: PlainStep, number: int, seen: Seen) -> None:
    """Run one step and compare everything. Collective."""
    config = replace(run.config, training=replace(run.config.training, max_norm=plain.max_norm))
    if number:  # as on resume
        set_step(run.lr_scheduler, plain.position)
    give_weights(run, plain.weights)
    settle_ties(run, plain)
    batch = own_rows(run, plain.batch)
    n_tokens = stepping.count_global_tokens(run, stepping.shard_for_cp(run, batch)).item()
    seen.note(number, "counted tokens", "count_global_tokens", abs(n_tokens - plain.n_tokens))
    rates = [float(group["lr"]) for group in run.optimizer.param_groups]
    peak = run.config.optimizer.lr or 1.0
    seen.note(
        number,
        "learning rate",
        "lr_scheduler",
        max(abs(rate - plain.rate) for rate in rates) / peak,
    )

    @torch.no_grad()
    def compare_gradients() -> None:
        for fqn, parameter in run.parameters.items():
            if parameter.grad is None:
                seen.note(number, "gradients", fqn, math.inf)
                parameter.grad = torch.zeros_like(parameter)
            if not plain.spoiled_by:
                seen.note(
                    number, "gradients", fqn, relative_error(parameter.grad, plain.gradients[fqn])
                )
            local(parameter.grad).copy_(cut(plain.gradients[fqn], parameter))
        if plain.spoiled_by and dist.get_rank() == dist.get_world_size() - 1:
            slices = (local(parameter.grad) for parameter in run.parameters.values())
            next(own for own in slices if own.numel()).view(-1)[0] = plain.spoiled_by

    # A spoiled step tests the code after the gradients. Skip its forward and backward, which would show nothing new.
    compute = (lambda *_: torch.zeros(())) if plain.spoiled_by else stepping.compute_gradients
    exact = packing_checked(seen, number)
    with (
        called_before_clipping(compare_gradients),
        patch.object(stepping, "compute_gradients", compute),
        exact,
    ):
        result = stepping.train_step(replace(run, config=config), batch)
    if not plain.spoiled_by:
        seen.note(
            number, "loss", "sum_losses", abs(result.loss.item() - plain.loss) / abs(plain.loss)
        )
        seen.note(
            number,
            "gradient norm",
            "all gradients",
            abs(result.grad_norm.item() - plain.norm) / plain.norm,
        )
    seen.note(
        number, "finite flag", "train_step", float(bool(result.finite) == bool(plain.spoiled_by))
    )
    copied, forgives = {"weights": run.parameters}, config.optimizer.moments_dtype == "bfloat16"
    for name, of_state in plain.state.items():
        held = {
            fqn: run.optimizer.state.get(p, {}).get(name)
            for fqn, p in run.parameters.items()
            if fqn in of_state
        }
        for fqn, tensor in held.items():
            error = (
                math.inf
                if tensor is None
                else relative_error(tensor, of_state[fqn], forgives=forgives)
            )
            seen.note(number, "state", f"{fqn} ({name})", error)
        copied[name] = {fqn: tensor for fqn, tensor in held.items() if tensor is not None}
    for fqn, parameter in run.parameters.items():
        update = plain.updated[fqn].double() - plain.weights[fqn].double()
        error = relative_error(
            parameter, plain.updated[fqn], update, roundings=4, forgives=forgives
        )
        seen.note(number, "updates", fqn, error)
    if run.balance:
        for layer in () if plain.spoiled_by else run.balance.routers:
            wrong = (result.expert_loads[layer, :-1] - plain.loads[layer]).abs().max().item()
            seen.note(number, "expert loads", f"layers.{layer}.feed_forward.router", wrong)
        for fqn, bias in run.balance.biases.items():
            seen.note(number, "expert biases", fqn, (bias - plain.updated[fqn]).abs().max().item())
    seen.note(number, "copies", "weights", 0.0)
    for what, tensors in copied.items():
        for fqn, dim in find_unequal_copies(tensors):
            seen.note(number, "copies", f"{what} of {fqn} over {dim}", 1.0)
    seen.note(
        number, "schedule", "lr_scheduler", abs(run.lr_scheduler.last_epoch - plain.position - 1)
    )


@torch.no_grad()
def give_weights(run: build.Run, weights: dict[str, Tensor]) -> None:
    """Load this rank's slices of the weights, and the expert biases of its layers."""
    for fqn, tensor in run.saved.items():
        local(tensor).copy_(cut(weights[fqn], tensor))


def settle_ties(run: build.Run, plain: PlainStep) -> None:
    """Make the routers choose the experts of the plain loop for tokens with tied scores, and as usual otherwise."""
    for layer, router in (run.balance.routers if run.balance else {}).items():
        vars(router).pop("choose", None)  # remove the previous step's
        scores, routes = plain.ties[layer]
        if len(scores):
            router.choose = partial(choose_with_ties, router.choose, scores, routes)


def choose_with_ties(
    choose: Callable[[Tensor], Tensor], of_ties: Tensor, routes: Tensor, scores: Tensor
) -> Tensor:
    """Replace Router.choose: scores (B, S, E) -> routes (B, S, K). `of_ties` (N, E), `routes` (N, K)."""
    distance = (scores[..., None, :] - of_ties).abs().amax(-1)  # (B, S, N)
    nearest = distance.min(-1)
    return torch.where(
        (nearest.values < SAME_TOKEN)[..., None], routes[nearest.indices], choose(scores)
    )


def called_before_clipping(call: Callable[[], None]) -> AbstractContextManager:
    """Context manager: steps inside call `call` when their gradients are complete."""
    measure = stepping.measure_grad_norm

    def call_and_measure(*args) -> tuple[Tensor, Tensor]:
        call()
        return measure(*args)

    return patch.object(stepping, "measure_grad_norm", call_and_measure)


def packing_checked(seen: Seen, number: int) -> AbstractContextManager:
    """Context manager: compare what ZeRO++ packs with its bound, then send exact numbers, which hide no other error."""
    pack, unpack = Packing.pack, Packing.unpack

    def check_and_send(self, rows: Tensor) -> Tensor:
        unpack(self, pack(self, rows), rounded := torch.empty(rows.shape))
        blocks = [
            block
            for own in rows.float().split(self.sizes, -1)
            for block in own.split(INT8_BLOCK, -1)
        ]
        half_scale = (
            torch.cat([block.abs().amax(-1, keepdim=True).expand_as(block) for block in blocks], -1)
            / 254
        )
        errors = (rounded - rows).abs() / (half_scale + 4 * ROUNDING * rows.abs() + 1e-30)
        seen.note(number, "packing", "zero_plus_plus", errors.max().item())
        sent = rows.clone(memory_format=torch.contiguous_format).view(torch.int8)
        rows.fill_(
            math.nan
        )  # a rank must not use its own numbers as they were: others see them rounded
        return sent

    return patch.multiple(
        Packing, pack=check_and_send, unpack=lambda _, sent, rows: rows.copy_(sent.view(rows.dtype))
    )


@torch.no_grad()
def find_unequal_copies(tensors: dict[str, Tensor]) -> set[tuple[str, str]]:
    """Return (name, mesh dim) of all tensors whose replicas are not bit-equal. Collective: a broadcast of each."""
    unequal = set()
    for fqn, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            for dim, placement in zip(
                tensor.device_mesh.mesh_dim_names, tensor.placements, strict=True
            ):
                if placement.is_replicate():
                    first = tensor.to_local().clone(memory_format=torch.contiguous_format)
                    dist.broadcast(first, group=tensor.device_mesh.get_group(dim), group_src=0)
                    unequal |= {(fqn, dim)} if not torch.equal(first, tensor.to_local()) else set()
    return unequal
