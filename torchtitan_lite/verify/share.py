"""One rank of a layout: it builds the run as train.py does, steps it, and compares what it holds with the reference.

    measure_layout    whole tensors, gathered as a checkpoint holds them: initial weights, gradients, weights after two
                      steps, copies. The wide trial
    measure_slices    only this rank's slices of the gradients of one step: large tensors are never gathered. The
                      parent adds the squared errors of all slices (difference.py). The other trials of gradients

Each parameter is compared by itself, because loss and gradient norm hide broken gradients; and its update by SGD,
because AdamW hides gradients of the wrong scale.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan_lite import step as stepping  # through the module: a test may break one of its functions
from torchtitan_lite.components.adamw_bfloat16 import local_tensor
from torchtitan_lite.config.layout import plan_layout, resolve_config, resolve_model
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.dataset import Batch, rows_of_rank
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.verify.reduction import override
from torchtitan_lite.verify.reference import (
    WIDE,
    Method,
    ReferenceRun,
    choose_init,
    choose_max_norm,
    largest_relative,
    make_batch_of,
    measure_scale,
    relative_error,
)
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


@dataclass
class Share:
    """Difference between one rank and the reference, in all that the rank can see."""

    coordinates: Coordinates
    initial_equal: dict[str, bool]
    placements: dict[str, str]  # FQN -> how it is placed on its mesh
    n_tokens: int  # of the first batch
    losses: list[float]
    grad_norms: list[float]
    errors: dict[str, float]  # n_tokens, loss, grad_norm, clipping -> relative error of the worst step
    gradient: dict[str, float] = field(default_factory=dict)  # FQN -> ||g - ref|| / ||ref||
    # FQN -> <g, ref> / <ref, ref>: 1, or the factor by which all of it is too large
    gradient_scale: dict[str, float] = field(default_factory=dict)
    # With updates only:
    weight: dict[str, float] = field(default_factory=dict)  # FQN -> ||w - ref|| / ||ref||
    # FQN -> squared norms of the difference and of the reference's update
    update: dict[str, tuple[float, float]] = field(default_factory=dict)
    unequal_replicas: set[tuple[str, str]] = field(default_factory=set)  # FQN, mesh dim of copies that differ along it
    # Without: FQN -> slice of the gradient, from which the parent fills `gradient` and `gradient_scale`
    slices: dict[str, Slice] = field(default_factory=dict)


# ---------------------------------------------------------------- the run


def build_small_run(config: Config, world_size: int, method: Method = WIDE) -> stepping.Run:
    """Build the run that train.py would build, on CPUs. Collective."""
    # DTensor warns that gathering over two dims takes two steps: it is right, and here it does not matter.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    shape = resolve_model(config.model)
    layout = plan_layout(config, shape, world_size)
    mesh = build_mesh(layout, "cpu")
    model_class, init_parameter = stepping.MODELS[config.model.name]
    with patch.dict(stepping.MODELS, {config.model.name: (model_class, choose_init(init_parameter, method))}):
        return stepping.build_run(resolve_config(config, layout, "cpu"), shape, layout, mesh, torch.device("cpu"))


def own_rows(run: stepping.Run, batch: Batch) -> Batch:
    """Return this rank's rows of a global batch."""
    rows = rows_of_rank(run.mesh.data_rank, run.layout.dp, len(batch.tokens))
    return Batch(*(field[rows.start : rows.stop] for field in vars(batch).values()))


@torch.no_grad()
def start_from_reference(run: stepping.Run, reference: ReferenceRun) -> None:
    """Give the run the reference's initial weights: each rank its slices."""
    for fqn, parameter in run.parameters.items():
        own_slice(parameter).copy_(cut_slice(reference.initial[fqn], parameter))


# ---------------------------------------------------------------- whole tensors, two steps


def measure_layout(
    rank: int, world_size: int, config: Config, reference_path: str, prepare: Prepare | None = None
) -> Share:
    """Worker: make the reference's steps on this layout, and compare whole tensors. Collective.

    `prepare(run, reference)` may change the run before its first step: a probe.
    """
    reference: ReferenceRun = torch.load(reference_path, weights_only=False, mmap=True)
    method = reference.method
    run = build_small_run(config, world_size, method)
    initial = gather(run, lambda parameter: parameter)
    if prepare is not None:
        prepare(run, reference)
    batches = [own_rows(run, make_batch_of(run.config, step, method)) for step in range(method.n_steps)]
    n_tokens = int(stepping.count_global_tokens(run, stepping.shard_for_cp(run, batches[0])))
    results = []
    with gradients_noted(run) as gradients:
        for step, batch in enumerate(batches):
            config = override(run.config, {"training.max_norm": choose_max_norm(run.config, step)})
            results.append(stepping.train_step(replace(run, config=config), batch))
    losses = [result.loss.item() for result in results]
    grad_norms = [result.grad_norm.item() for result in results]
    weights = gather(run, lambda parameter: parameter)
    return Share(
        coordinates=run.mesh.coordinates(),
        initial_equal={fqn: torch.equal(full, reference.initial[fqn]) for fqn, full in initial.items()},
        placements={fqn: describe_placement(parameter) for fqn, parameter in run.parameters.items()},
        n_tokens=n_tokens,
        losses=losses,
        grad_norms=grad_norms,
        errors=measure_scalars(reference, n_tokens, losses, grad_norms),
        gradient={fqn: relative_error(full, reference.gradients[fqn]) for fqn, full in gradients.items()},
        gradient_scale={fqn: measure_scale(full, reference.gradients[fqn]) for fqn, full in gradients.items()},
        weight={fqn: relative_error(full, reference.weights[fqn]) for fqn, full in weights.items()},
        update={
            fqn: (
                (full - reference.weights[fqn]).square().sum().item(),
                (reference.weights[fqn] - reference.initial[fqn]).square().sum().item(),
            )
            for fqn, full in weights.items()
        },
        unequal_replicas=find_unequal_replicas(run.parameters),
    )


@contextmanager
def gradients_noted(run: stepping.Run) -> Iterator[dict[str, Tensor]]:
    """Context manager: yields full copies of the gradients of the first step inside, unclipped. Collective."""
    gradients: dict[str, Tensor] = {}
    clip = stepping.clip_grad_norm

    def note_and_clip(*args) -> Tensor:
        if not gradients:
            gradients.update(gather(run, lambda parameter: parameter.grad))
        return clip(*args)

    with patch.object(stepping, "clip_grad_norm", note_and_clip):
        yield gradients


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
        pairs = zip(replicated, own, pieces, strict=True)
        unequal |= {(fqn, name) for fqn, tensor, piece in pairs if not torch.equal(tensor.flatten(), piece)}
    return unequal


# ---------------------------------------------------------------- slices, one step


def measure_slices(
    rank: int, world_size: int, config: Config, reference_path: str, prepare: Prepare | None = None
) -> Share:
    """Worker: make the reference's step on this layout, and compare this rank's slices. Collective.

    No weight is updated, which would take DTensor a second to plan. `prepare` as in measure_layout.
    """
    reference: ReferenceRun = torch.load(reference_path, weights_only=False, mmap=True)
    run = build_small_run(config, world_size, reference.method)
    initial_equal = {
        fqn: torch.equal(own_slice(parameter), cut_slice(reference.initial[fqn], parameter))
        for fqn, parameter in run.parameters.items()
    }
    if prepare is not None:
        prepare(run, reference)
    batch = own_rows(run, make_batch_of(run.config, 0, reference.method))
    n_tokens = int(stepping.count_global_tokens(run, stepping.shard_for_cp(run, batch)))
    loss = stepping.sum_losses(run, stepping.compute_gradients(run, batch)).item()
    coordinates = run.mesh.coordinates()
    gradients = list_tensors(run, lambda parameter: parameter.grad)
    slices = {fqn: measure_slice(tensor, reference.gradients[fqn], coordinates) for fqn, tensor in gradients.items()}
    before = [sum_squares(tensor) for tensor in gradients.values()]
    grad_norm = stepping.clip_grad_norm(run.parameters.values(), run.config.training.max_norm).item()
    after = [sum_squares(tensor) for tensor in gradients.values()]
    factor = compute_clip_scale(reference.grad_norms[0], choose_max_norm(run.config, 0))
    clipping = [math.sqrt(now / then) / factor - 1 for now, then in zip(after, before, strict=True) if then]
    return Share(
        coordinates=coordinates,
        initial_equal=initial_equal,
        placements={fqn: describe_placement(parameter) for fqn, parameter in run.parameters.items()},
        n_tokens=n_tokens,
        losses=[loss],
        grad_norms=[grad_norm],
        errors={
            **measure_scalars(reference, n_tokens, [loss], [grad_norm]),
            "clipping": max(map(abs, clipping), default=0.0),
        },
        slices=slices,
    )


def own_slice(tensor: Tensor) -> Tensor:
    return local_tensor(tensor).detach()


def cut_slice(full: Tensor, like: Tensor) -> Tensor:
    """Return the part of `full` that this rank holds if it holds `like`. No communication."""
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).to_local()


@torch.no_grad()
def measure_slice(tensor: Tensor, full: Tensor, coordinates: Coordinates) -> Slice:
    """Compare `tensor`, this rank's, with its part of `full`, the reference's."""
    split = set()
    if isinstance(tensor, DTensor):
        for name, placement in zip(tensor.device_mesh.mesh_dim_names, tensor.placements, strict=True):
            split |= set() if placement.is_replicate() else set(SPLIT_ALONG.get(name, (name,)))
    wrong = squared = product = 0.0
    own, expected = own_slice(tensor), cut_slice(full, tensor)
    for numbers, right in zip(own.flatten().split(PIECE), expected.flatten().split(PIECE), strict=True):
        numbers, right = numbers.double(), right.double()
        wrong += (numbers - right).square().sum().item()
        squared += right.square().sum().item()
        product += torch.dot(numbers, right).item()
    return Slice(tuple((dim, at) for dim, at in coordinates.items() if dim not in split), wrong, squared, product)


def sum_squares(tensor: Tensor) -> float:
    """Return the sum of the squares of this rank's slice, in float64."""
    return sum(piece.double().square().sum().item() for piece in own_slice(tensor).flatten().split(PIECE))


# ---------------------------------------------------------------- numbers


def measure_scalars(
    reference: ReferenceRun, n_tokens: int, losses: list[float], grad_norms: list[float]
) -> dict[str, float]:
    """Return relative errors, each of the worst step."""
    return {
        "n_tokens": largest_relative([n_tokens], [reference.n_tokens]),
        "loss": largest_relative(losses, reference.losses),
        "grad_norm": largest_relative(grad_norms, reference.grad_norms),
    }


def describe_placement(parameter: Tensor) -> str:
    """`Shard(0) over shard, Replicate() over tp`."""
    if not isinstance(parameter, DTensor):
        return "whole on every rank"
    names = parameter.device_mesh.mesh_dim_names
    return ", ".join(f"{placement} over {name}" for name, placement in zip(names, parameter.placements, strict=True))
