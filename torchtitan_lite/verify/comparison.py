"""Measures how far a layout is from one process, parameter by parameter. `verify` and the tests use it.

    reference.py       one process, plain torch                                                       -> ReferenceRun
    each rank       builds the run as train.py does, steps it, gathers what it holds, compares     -> Share
    all together    the worst of all ranks; every parameter must have been seen                    -> Difference

Loss and gradient norm hide broken gradients, so each parameter is compared by itself; and its update with SGD, for
AdamW hides gradients of the wrong scale. slices.py compares the gradients of one step, without gathering them.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lite import step as stepping  # through the module: a test may break one of its functions
from torchtitan_lite.config.layout import plan_layout, resolve_config, resolve_model
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.dataset import Batch, rows_of_rank
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.verify.reduction import override
from torchtitan_lite.verify.reference import WIDE, Method, ReferenceRun, choose_init, choose_max_norm, make_batch_of

Coordinates = dict[str, int]  # mesh dim -> where a rank stands on it
Prepare = Callable[[stepping.Run, ReferenceRun], None]


# ---------------------------------------------------------------- one rank of many


@dataclass
class Share:
    """How far from the oracle one rank is, with all that it can see."""

    coordinates: Coordinates
    initial_equal: dict[str, bool]
    gradient: dict[str, float]  # FQN -> ||g - ref|| / ||ref||
    gradient_scale: dict[str, float]  # FQN -> <g, ref> / <ref, ref>: 1, or by how much all of it is too large
    weight: dict[str, float]  # FQN -> ||w - ref|| / ||ref||
    update: dict[str, tuple[float, float]]  # FQN -> squared norms of the difference and of the oracle's update
    placements: dict[str, str]  # FQN -> how it lies on its mesh
    unequal_replicas: set[tuple[str, str]]  # FQN and mesh dim of weights that are to be equal along it, and are not
    n_tokens: int  # of the first batch
    losses: list[float]
    grad_norms: list[float]
    errors: dict[str, float]  # n_tokens, loss, grad_norm -> relative error, of the worst step


def build_small_run(config: Config, world_size: int, method: Method = WIDE) -> stepping.Run:
    """The run that train.py would build, on CPUs. Collective."""
    # DTensor warns that gathering over two dims takes two steps: it is right, and here it does not matter.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    shape = resolve_model(config.model)
    layout = plan_layout(config, shape, world_size)
    mesh = build_mesh(layout, "cpu")
    model_class, init_parameter = stepping.MODELS[config.model.name]
    with patch.dict(stepping.MODELS, {config.model.name: (model_class, choose_init(init_parameter, method))}):
        return stepping.build_run(resolve_config(config, layout, "cpu"), shape, layout, mesh, torch.device("cpu"))


def own_rows(run: stepping.Run, batch: Batch) -> Batch:
    """This rank's share of a global batch."""
    rows = rows_of_rank(run.mesh.data_rank, run.layout.dp, len(batch.tokens))
    return Batch(*(field[rows.start : rows.stop] for field in vars(batch).values()))


def measure_layout(
    rank: int, world_size: int, config: Config, oracle_path: str, prepare: Prepare | None = None
) -> Share:
    """Worker: builds the layout, makes the oracle's steps, and compares all that this rank can see. Collective.

    `prepare(run, oracle)` may change the run before its first step: a probe.
    """
    oracle: ReferenceRun = torch.load(oracle_path, weights_only=False, mmap=True)
    run = build_small_run(config, world_size, oracle.method)
    initial = gather(run, lambda parameter: parameter)
    if prepare is not None:
        prepare(run, oracle)
    batches = [own_rows(run, make_batch_of(run.config, step, oracle.method)) for step in range(oracle.method.n_steps)]
    n_tokens = stepping.count_global_tokens(run, stepping.shard_for_cp(run, batches[0]))
    with gradients_noted(run) as gradients:
        results = [stepping.train_step(limit_norm(run, step), batch) for step, batch in enumerate(batches)]
    losses = [result.loss.item() for result in results]
    grad_norms = [result.grad_norm.item() for result in results]
    weights = gather(run, lambda parameter: parameter)
    return Share(
        coordinates=run.mesh.coordinates(),
        initial_equal={fqn: torch.equal(full, oracle.initial[fqn]) for fqn, full in initial.items()},
        gradient={fqn: relative_error(full, oracle.gradients[fqn]) for fqn, full in gradients.items()},
        gradient_scale={fqn: measure_scale(full, oracle.gradients[fqn]) for fqn, full in gradients.items()},
        weight={fqn: relative_error(full, oracle.weights[fqn]) for fqn, full in weights.items()},
        update={
            fqn: (
                (full - oracle.weights[fqn]).square().sum().item(),
                (oracle.weights[fqn] - oracle.initial[fqn]).square().sum().item(),
            )
            for fqn, full in weights.items()
        },
        placements={fqn: describe_placement(parameter) for fqn, parameter in run.parameters.items()},
        unequal_replicas=find_unequal_replicas(run.parameters),
        n_tokens=int(n_tokens),
        losses=losses,
        grad_norms=grad_norms,
        errors=measure_scalars(oracle, int(n_tokens), losses, grad_norms),
    )


def measure_scalars(
    oracle: ReferenceRun, n_tokens: int, losses: list[float], grad_norms: list[float]
) -> dict[str, float]:
    """Relative errors, each that of the worst step."""
    return {
        "n_tokens": largest_relative([n_tokens], [oracle.n_tokens]),
        "loss": largest_relative(losses, oracle.losses),
        "grad_norm": largest_relative(grad_norms, oracle.grad_norms),
    }


def limit_norm(run: stepping.Run, step: int) -> stepping.Run:
    """The same run, with the max_norm of that step of the oracle."""
    max_norm = choose_max_norm(run.config, step)
    return replace(run, config=override(run.config, {"training.max_norm": max_norm}))


@contextmanager
def gradients_noted(run: stepping.Run) -> Iterator[dict[str, Tensor]]:
    """Full copies of the gradients of the first step inside, as they are before they are clipped. Collective."""
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
    """Full copies of one tensor per parameter. Collective over the ranks that share them."""
    chosen = list_tensors(run, choose)
    return {fqn: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for fqn, t in chosen.items()}


def list_tensors(run: stepping.Run, choose: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor]:
    """One tensor per parameter, as this rank holds it."""
    chosen = {fqn: choose(parameter) for fqn, parameter in run.parameters.items()}
    missing = [fqn for fqn, tensor in chosen.items() if tensor is None]
    assert not missing, f"no gradient for {missing}"
    return chosen


def describe_placement(parameter: Tensor) -> str:
    """`Shard(0) over shard, Replicate() over tp`."""
    if not isinstance(parameter, DTensor):
        return "whole on every rank"
    names = parameter.device_mesh.mesh_dim_names
    return ", ".join(f"{placement} over {name}" for name, placement in zip(names, parameter.placements, strict=True))


@torch.no_grad()
def find_unequal_replicas(tensors: dict[str, Tensor]) -> set[tuple[str, str]]:
    """Names of tensors whose copies are not bit-equal, with the mesh dim. One broadcast per dim that replicates any.

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


def relative_error(value: Tensor, reference: Tensor) -> float:
    """||value - reference|| / ||reference||; a zero reference demands zero. What is not finite is infinitely wrong."""
    difference, scale = (value.double() - reference.double()).norm().item(), reference.double().norm().item()
    if difference == 0:
        return 0.0
    return difference / scale if scale and math.isfinite(difference) else math.inf


def measure_scale(value: Tensor, reference: Tensor) -> float:
    """The factor of `reference` that is nearest to `value`."""
    squared = reference.double().square().sum().item()
    return (value.double() * reference.double()).sum().item() / squared if squared else 1.0


# ---------------------------------------------------------------- all ranks together


@dataclass
class Difference:
    """How far from the oracle a layout is: for each measure the worst of all ranks."""

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
    """The worst of all ranks. Every parameter of the model, `fqns`, must have been seen by some rank."""

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


def largest_relative(values: list[float], references: list[float]) -> float:
    pairs = zip(values, references, strict=True)
    return max(relative_error(torch.tensor(value), torch.tensor(reference)) for value, reference in pairs)


def find_faults(difference: Difference, tolerance: float) -> dict[str, str]:
    """Which measures exceed `tolerance` (relative), each with what is worst. Empty: the layout computes the model."""
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
    """Mesh dims along which ranks hold different values: neighbours on that dim alone already disagree."""
    dims = set()
    for (here, one), (there, other) in combinations(values, 2):
        apart = [dim for dim in here if here[dim] != there[dim]]
        close = math.isclose(one, other, rel_tol=tolerance)
        if len(apart) == 1 and not close:
            dims.add(apart[0])
    return [dim for dim in (values[0][0] if values else ()) if dim in dims]
