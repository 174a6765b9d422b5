"""One rank of a layout: it builds the run as train.py does, steps it, and compares its slices with the reference.

    the run         the same build_run and train_step, on small sizes and random tokens
    the reference   whole tensors in a file; each rank cuts its own slices out of it, so nothing is gathered
    the parent      adds up the squared errors of all slices (trial.py)

The routers are given the routes that the reference took, because a top-k turns the last bit of a score into another
expert; module_outputs.py lets them choose. Each parameter is compared by itself, because loss and gradient norm hide
broken gradients; and its update by SGD, because AdamW hides gradients of the wrong scale.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from torchtitan_lite import build
from torchtitan_lite import step as stepping  # through the module: a test may break one of its functions
from torchtitan_lite.config.layout import plan_layout, resolve_config, resolve_model
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.dataset import rows_of_rank
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.tools.verify.reduction import override
from torchtitan_lite.tools.verify.reference import (
    ReferenceRun,
    choose_max_norm,
    choose_model,
    largest_relative,
    load_reference,
    relative_error,
)
from torchtitan_lite.tools.verify.slices import (
    PIECE,
    Coordinates,
    Gap,
    Whole,
    cut_slice,
    describe_placement,
    find_unequal_replicas,
    find_whole,
    measure_slice,
    own_slice,
)
from torchtitan_lite.tools.verify.small_runs import WIDE, Method
from torchtitan_lite.tools.verify.step_formulas import compute_clip_scale, set_biases

Prepare = Callable[[build.Run, ReferenceRun], None]


@dataclass(frozen=True)
class RankResult:
    """Difference between one rank and the reference, in all that the rank can see."""

    coordinates: Coordinates
    initial_equal: dict[str, bool]  # by FQN
    placements: dict[str, str]  # FQN -> how it is placed on its mesh
    not_updated: list[str]  # FQNs of parameters that the optimizer does not hold
    n_tokens: int  # of the first batch
    losses: list[float]  # by step
    grad_norms: list[float]
    errors: dict[str, float]  # n_tokens, loss, grad_norm, clipping, of experts -> relative error of the worst step
    gradients: dict[str, tuple[Whole, Gap]]  # of the first step, before clipping
    # With updates only:
    weights: dict[str, tuple[Whole, Gap]]  # after the last step
    squared_updates: dict[str, float]  # FQN -> squared norm of the reference's update of the whole parameter
    unequal_replicas: set[tuple[str, str]]  # FQN, mesh dim of copies that differ along it
    # With experts only:
    expert_loads: list[Tensor]  # by step: (layers, experts), whole numbers
    expert_biases: dict[str, Tensor]  # FQN -> (experts,) after the last step, of this rank's layers; with updates


# ---------------------------------------------------------------- the run


def build_small_run(config: Config, world_size: int, method: Method = WIDE) -> build.Run:
    """Build the run that train.py would build, on CPUs. Collective."""
    args = resolve_model(config.model)
    layout = plan_layout(config, args, world_size)
    mesh = build_mesh(layout, "cpu")
    with patch.dict(build.MODELS, {config.model.name: choose_model(config, method)}):
        return build.build_run(resolve_config(config, layout, "cpu"), args, layout, mesh, torch.device("cpu"))


def own_rows(run: build.Run, batch: Batch) -> Batch:
    """Return this rank's rows of a global batch."""
    return batch.take_rows(rows_of_rank(run.mesh.data_rank, run.layout.dp, len(batch.tokens)))


def start_beside_reference(config: Config, world_size: int, path: str) -> tuple[build.Run, ReferenceRun]:
    """Build the run for the reference in a file; its routers start with the biases of the reference. Collective."""
    reference = load_reference(path)
    run = build_small_run(config, world_size, reference.method)
    if run.balance:
        set_biases(run.balance.biases, reference.experts.initial_biases)
    return run, reference


@torch.no_grad()
def start_from_reference(run: build.Run, reference: ReferenceRun) -> None:
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
    gradients: dict[str, tuple[Whole, Gap]] = {}

    def compare(own: dict[str, Tensor], full: dict[str, Tensor]) -> dict[str, tuple[Whole, Gap]]:
        return {fqn: (find_whole(x, coordinates), measure_slice(x, full[fqn])) for fqn, x in own.items()}

    def measure_first_gradients() -> None:
        if not gradients:
            own = list_tensors(run, lambda parameter: parameter.grad)
            gradients.update(compare(own, reference.gradients))

    losses, grad_norms, clipping, loads = [], [], 0.0, []
    with called_before_clipping(measure_first_gradients):
        for step, batch in enumerate(batches):
            step_config = override(run.config, {"training.max_norm": choose_max_norm(run.config, step)})
            result = make_step(replace(run, config=step_config), batch, updates=method.updates)
            losses.append(result.loss.item())
            grad_norms.append(result.grad_norm.item())
            loads += [result.expert_loads] if run.balance else []
            if step == 0 and method.updates:  # the update clips
                scale = compute_clip_scale(reference.grad_norms[0], step_config.training.max_norm)
                clipping = measure_clipping(run, gradients, scale)
    weights = compare(run.parameters, reference.weights) if method.updates else {}
    updated = {id(parameter) for group in run.optimizer.param_groups for parameter in group["params"]}
    return RankResult(
        coordinates=coordinates,
        initial_equal=initial_equal,
        placements={fqn: describe_placement(parameter) for fqn, parameter in run.parameters.items()},
        not_updated=[fqn for fqn, parameter in run.parameters.items() if id(parameter) not in updated],
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


def make_step(run: build.Run, batch: Batch, *, updates: bool) -> stepping.StepResult:
    """Make a step of the run. Collective."""
    if updates:
        return stepping.train_step(run, batch)
    # DTensor would take a second to plan updates of each new size.
    local_loss = stepping.compute_gradients(run, batch)
    loss = stepping.sum_losses(run, local_loss)
    grad_norm, stop = stepping.measure_grad_norm(run.parameters.values(), 0)
    loads = run.balance.sum_loads() if run.balance else None
    return stepping.StepResult(loss, local_loss, grad_norm, grad_norm.isfinite(), stop, 0.0, loads)


def measure_experts(run: build.Run, reference: ReferenceRun, loads: list[Tensor]) -> dict[str, float]:
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
    measure = stepping.measure_grad_norm

    def call_and_measure(*args) -> tuple[Tensor, Tensor]:
        call()
        return measure(*args)

    with patch.object(stepping, "measure_grad_norm", call_and_measure):
        yield


@torch.no_grad()
def gather(run: build.Run, choose: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor]:
    """Return full copies of one tensor per parameter. Collective over the ranks that share them."""
    chosen = list_tensors(run, choose)
    return {fqn: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for fqn, t in chosen.items()}


def list_tensors(run: build.Run, choose: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor]:
    """Return one tensor per parameter, as this rank holds it."""
    chosen = {fqn: choose(parameter) for fqn, parameter in run.parameters.items()}
    missing = [fqn for fqn, tensor in chosen.items() if tensor is None]
    assert not missing, f"no gradient for {missing}"
    return chosen


def list_rates(optimizer: Optimizer) -> list[float]:
    """Return the learning rate of each group."""
    return [float(group["lr"]) for group in optimizer.param_groups]


# ---------------------------------------------------------------- slices and copies


def measure_clipping(run: build.Run, before: dict[str, tuple[Whole, Gap]], scale: float) -> float:
    """Return by how much the clipping of the worst slice is off. `before`: gradients as they were."""
    errors = [0.0]
    for fqn, (_, gap) in before.items():
        squared_before = gap.error - gap.reference + 2 * gap.product  # |a|^2 = |a - b|^2 - |b|^2 + 2 ab
        clipped = own_slice(run.parameters[fqn].grad).flatten()
        squared = sum(numbers.double().square().sum().item() for numbers in clipped.split(PIECE))
        if squared_before > 0:
            error = abs(math.sqrt(squared / squared_before) / scale - 1)
            errors.append(error if math.isfinite(error) else math.inf)
    return max(errors)
