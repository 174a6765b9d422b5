"""One rank of a layout: it builds the run as train.py does, steps it, and compares its slices with the reference.

    the run         the same build_run and train_step, on small sizes and random tokens
    the reference   whole tensors in a file; each rank cuts its own slices out of it, so nothing is gathered
    the parent      adds up the squared errors of all slices (difference.py)

The routers are given the routes that the reference took, because a top-k turns the last bit of a score into another
expert; route_flips.py lets them choose. Each parameter is compared by itself, because loss and gradient norm hide
broken gradients; and its update by SGD, because AdamW hides gradients of the wrong scale.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.optimizer import Optimizer

from torchtitan_lite import step as stepping  # through the module: a test may break one of its functions
from torchtitan_lite.components.adamw_bfloat16 import local_tensor
from torchtitan_lite.config.layout import plan_layout, resolve_config, resolve_model
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.dataset import Batch, rows_of_rank
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.verify.degrees import OF_EXPERTS
from torchtitan_lite.verify.plain_mixture import set_biases
from torchtitan_lite.verify.reduction import override
from torchtitan_lite.verify.reference import (
    ReferenceRun,
    choose_max_norm,
    choose_model,
    largest_relative,
    load_reference,
    relative_error,
)
from torchtitan_lite.verify.small_runs import WIDE, Method
from torchtitan_lite.verify.step_formulas import compute_clip_scale

Coordinates = dict[str, int]  # mesh dim -> coordinate of a rank
Prepare = Callable[[stepping.Run, ReferenceRun], None]
PIECE = 2**20  # numbers that are widened to float64 at a time
SPLIT_ALONG = {"shard": ("dp_shard", "cp")}  # mesh dims that FSDP's dim stands for; any other stands for itself


@dataclass(frozen=True)
class Slice:
    """Difference between one rank's slice of a tensor and the reference's: sums over its numbers, in float64."""

    whole: tuple[tuple[str, int], ...]  # coordinates that ranks share whose slices make one whole
    wrong: float  # of squared differences
    squared: float  # of the reference's numbers, squared
    product: float  # of the reference's numbers times the rank's


@dataclass(frozen=True)
class RankResult:
    """Difference between one rank and the reference, in all that the rank can see."""

    coordinates: Coordinates
    initial_equal: dict[str, bool]  # by FQN
    placements: dict[str, str]  # FQN -> how it is placed on its mesh
    n_tokens: int  # of the first batch
    losses: list[float]  # by step
    grad_norms: list[float]
    errors: dict[str, float]  # n_tokens, loss, grad_norm, clipping, of experts -> relative error of the worst step
    gradients: dict[str, Slice]  # of the first step, before clipping
    # With updates only:
    weights: dict[str, Slice]  # after the last step
    squared_updates: dict[str, float]  # FQN -> squared norm of the reference's update of the whole parameter
    unequal_replicas: set[tuple[str, str]]  # FQN, mesh dim of copies that differ along it
    # With experts only:
    expert_loads: list[Tensor]  # by step: (layers, experts), whole numbers
    expert_biases: dict[str, Tensor]  # FQN -> (experts,) after the last step, of this rank's layers; with updates


# ---------------------------------------------------------------- the run


def build_small_run(config: Config, world_size: int, method: Method = WIDE) -> stepping.Run:
    """Build the run that train.py would build, on CPUs. Collective."""
    # DTensor warns that gathering over two dims takes two steps: it is right, and here it does not matter.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    args = resolve_model(config.model)
    layout = plan_layout(config, args, world_size)
    mesh = build_mesh(layout, "cpu")
    with patch.dict(stepping.MODELS, {config.model.name: choose_model(config, method)}):
        return stepping.build_run(resolve_config(config, layout, "cpu"), args, layout, mesh, torch.device("cpu"))


def own_rows(run: stepping.Run, batch: Batch) -> Batch:
    """Return this rank's rows of a global batch."""
    return batch.take_rows(rows_of_rank(run.mesh.data_rank, run.layout.dp, len(batch.tokens)))


def start_beside_reference(config: Config, world_size: int, path: str) -> tuple[stepping.Run, ReferenceRun]:
    """Build the run for the reference in a file; its routers start with the biases of the reference. Collective."""
    reference = load_reference(path)
    run = build_small_run(config, world_size, reference.method)
    if run.balance:
        set_biases(run.balance.biases, reference.experts.initial_biases)
    return run, reference


@torch.no_grad()
def start_from_reference(run: stepping.Run, reference: ReferenceRun) -> None:
    """Give the run the reference's initial weights: each rank its slices."""
    for fqn, parameter in run.parameters.items():
        own_slice(parameter).copy_(cut_slice(reference.initial[fqn], parameter))


# ---------------------------------------------------------------- its steps beside the reference's


def measure_layout(
    rank: int, world_size: int, config: Config, reference_path: str, prepare: Prepare | None = None
) -> RankResult:
    """Worker: make the reference's steps on this layout, and compare this rank's slices. Collective.

    `prepare(run, reference)` may change the run before its first step: a probe.
    """
    run, reference = start_beside_reference(config, world_size, reference_path)
    method, coordinates = reference.method, run.mesh.coordinates()
    initial_equal = {
        fqn: torch.equal(own_slice(parameter), cut_slice(reference.initial[fqn], parameter))
        for fqn, parameter in run.parameters.items()
    }
    if prepare is not None:
        prepare(run, reference)
    batches = [own_rows(run, reference.make_batch(run.config, step)) for step in range(method.n_steps)]
    n_tokens = int(stepping.count_global_tokens(run, stepping.shard_for_cp(run, batches[0])))
    gradients: dict[str, Slice] = {}

    def measure_first_gradients() -> None:
        if not gradients:
            own = list_tensors(run, lambda parameter: parameter.grad)
            gradients.update(measure_slices(own, reference.gradients, coordinates))

    losses, grad_norms, clipping, loads = [], [], 0.0, []
    with called_before_clipping(measure_first_gradients):
        for step, batch in enumerate(batches):
            step_config = override(run.config, {"training.max_norm": choose_max_norm(run.config, step)})
            result = make_step(replace(run, config=step_config), batch, updates=method.updates)
            losses.append(result.loss.item())
            grad_norms.append(result.grad_norm.item())
            loads += [result.expert_loads] if run.balance else []
            if step == 0:
                scale = compute_clip_scale(reference.grad_norms[0], step_config.training.max_norm)
                clipping = measure_clipping(run, gradients, scale)
    weights = measure_slices(run.parameters, reference.weights, coordinates) if method.updates else {}
    return RankResult(
        coordinates=coordinates,
        initial_equal=initial_equal,
        placements={fqn: describe_placement(parameter) for fqn, parameter in run.parameters.items()},
        n_tokens=n_tokens,
        losses=losses,
        grad_norms=grad_norms,
        errors={
            "n_tokens": largest_relative([n_tokens], [reference.n_tokens]),
            "loss": largest_relative(losses, reference.losses),
            "grad_norm": largest_relative(grad_norms, reference.grad_norms),
            "clipping": clipping,
            **(measure_experts(run, reference, loads) if run.balance else {}),
        },
        gradients=gradients,
        weights=weights,
        squared_updates={
            fqn: (reference.weights[fqn] - reference.initial[fqn]).square().sum().item() for fqn in weights
        },
        unequal_replicas=find_unequal_replicas(run.parameters) if method.updates else set(),
        expert_loads=[of_step[:, :-1].clone() for of_step in loads],
        expert_biases=run.balance.biases if run.balance and method.updates else {},
    )


def make_step(run: stepping.Run, batch: Batch, *, updates: bool) -> stepping.StepResult:
    """Make a step of the run. Collective."""
    if updates:
        return stepping.train_step(run, batch)
    # DTensor would take a second to plan updates of each new size.
    local_loss = stepping.compute_gradients(run, batch)
    loss = stepping.sum_losses(run, local_loss)
    grad_norm = stepping.clip_grad_norm(run.parameters.values(), run.config.training.max_norm)
    loads = run.balance.sum_loads() if run.balance else None
    return stepping.StepResult(loss, local_loss, grad_norm, grad_norm.isfinite(), loads)


def measure_experts(run: stepping.Run, reference: ReferenceRun, loads: list[Tensor]) -> dict[str, float]:
    """Return the relative errors of loads, of the scores' entropies, and of this rank's biases after the last step."""
    experts = reference.experts
    pairs = [(of_step[:, :-1], right) for of_step, right in zip(loads, experts.loads, strict=True)]
    entropies = [(of_step[:, -1], right) for of_step, right in zip(loads, experts.entropies, strict=True)]
    biases = [(bias, experts.biases[fqn]) for fqn, bias in run.balance.biases.items() if experts.biases]
    of_measures = {"expert_loads": pairs, "router_entropy": entropies, "expert_biases": biases}
    return {
        measure: max((relative_error(*pair) for pair in of_measure), default=0.0)
        for measure, of_measure in of_measures.items()
    }


@contextmanager
def called_before_clipping(call: Callable[[], None]) -> Iterator[None]:
    """Context manager: steps inside call this function once their gradients are complete, before they are clipped."""
    clip = stepping.clip_grad_norm

    def call_and_clip(*args) -> Tensor:
        call()
        return clip(*args)

    with patch.object(stepping, "clip_grad_norm", call_and_clip):
        yield


@torch.no_grad()
def gather(run: stepping.Run, choose: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor]:
    """Return full copies of one tensor per parameter. Collective over the ranks that share them."""
    chosen = list_tensors(run, choose)
    return {fqn: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for fqn, t in chosen.items()}


def list_tensors(run: stepping.Run, choose: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor]:
    """Return one tensor per parameter, as this rank holds it."""
    chosen = {fqn: choose(parameter) for fqn, parameter in run.parameters.items()}
    missing = [fqn for fqn, tensor in chosen.items() if tensor is None]
    assert not missing, f"no gradient for {missing}"
    return chosen


def list_rates(optimizer: Optimizer) -> list[float]:
    """Return the learning rate of each group."""
    return [float(group["lr"]) for group in optimizer.param_groups]


# ---------------------------------------------------------------- slices and copies


def own_slice(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    return local_tensor(tensor).detach()


def cut_slice(full: Tensor, like: Tensor) -> Tensor:
    """Return the part of `full` that this rank holds if it holds `like`. No communication."""
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).to_local()


@torch.no_grad()
def measure_slices(tensors: dict[str, Tensor], full: dict[str, Tensor], at: Coordinates) -> dict[str, Slice]:
    """Compare this rank's slices with those of the reference's `full` tensors."""
    slices = {}
    for fqn, tensor in tensors.items():
        wrong = squared = product = 0.0
        own, expected = own_slice(tensor), cut_slice(full[fqn], tensor)
        for numbers, right in zip(own.flatten().split(PIECE), expected.flatten().split(PIECE), strict=True):
            numbers, right = numbers.double(), right.double()
            wrong += (numbers - right).square().sum().item()
            squared += right.square().sum().item()
            product += torch.dot(numbers, right).item()
        slices[fqn] = Slice(find_whole(tensor, at), wrong, squared, product)
    return slices


def find_whole(tensor: Tensor, at: Coordinates) -> tuple[tuple[str, int], ...]:
    """Return the coordinates that ranks share whose slices of a tensor make one whole."""
    split: set[str] = set()
    copies = dict(at)  # coordinates on the dims along which there may be copies
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for name, placement, own in zip(mesh.mesh_dim_names, tensor.placements, mesh.get_coordinate(), strict=True):
            if name in ("efsdp", "ep"):  # these two stand for three dims of the world's mesh
                copies = {dim: place for dim, place in copies.items() if dim not in OF_EXPERTS} | {name: own}
            split |= set() if placement.is_replicate() else set(SPLIT_ALONG.get(name, (name,)))
    return tuple((dim, coordinate) for dim, coordinate in copies.items() if dim not in split)


def measure_clipping(run: stepping.Run, before: dict[str, Slice], scale: float) -> float:
    """Return by how much the clipping of the worst slice is off. `before`: gradients as they were."""
    errors = [0.0]
    for fqn, piece in before.items():
        squared_before = piece.wrong - piece.squared + 2 * piece.product  # |a|^2 = |a - b|^2 - |b|^2 + 2 ab
        clipped = own_slice(run.parameters[fqn].grad).flatten()
        squared = sum(numbers.double().square().sum().item() for numbers in clipped.split(PIECE))
        if squared_before > 0:
            error = abs(math.sqrt(squared / squared_before) / scale - 1)
            errors.append(error if math.isfinite(error) else math.inf)
    return max(errors)


@torch.no_grad()
def find_unequal_replicas(tensors: dict[str, Tensor]) -> set[tuple[str, str]]:
    """Return names of tensors whose copies are not bit-equal, with the mesh dim. One broadcast per dim with copies.

    All tensors have one dtype. Collective over the ranks that hold the same names.
    """
    copies: dict[str, dict[str, DTensor]] = {}
    sharded = {fqn: tensor for fqn, tensor in tensors.items() if isinstance(tensor, DTensor)}
    for fqn, tensor in sharded.items():
        for name, placement in zip(tensor.device_mesh.mesh_dim_names, tensor.placements, strict=True):
            if placement.is_replicate() and tensor.device_mesh[name].size() > 1:
                copies.setdefault(name, {})[fqn] = tensor
    unequal = set()
    for name, replicated in copies.items():
        own = [tensor.to_local() for tensor in replicated.values()]
        of_first = torch.cat([tensor.flatten() for tensor in own])
        dist.broadcast(of_first, group=next(iter(replicated.values())).device_mesh[name].get_group(), group_src=0)
        pieces = of_first.split([tensor.numel() for tensor in own])
        of_tensors = zip(replicated, own, pieces, strict=True)
        unequal |= {(fqn, name) for fqn, tensor, piece in of_tensors if not torch.equal(tensor.flatten(), piece)}
    return unequal


def describe_placement(parameter: Tensor) -> str:
    """Return `Shard(0) over shard, Replicate() over tp`."""
    if not isinstance(parameter, DTensor):
        return "whole on every rank"
    names = parameter.device_mesh.mesh_dim_names
    return ", ".join(f"{placement} over {name}" for name, placement in zip(names, parameter.placements, strict=True))
