"""Runs a layout beside one process and measures the difference, parameter by parameter.

The one process is plain torch: the single-device model, one backward over the whole batch, torch's own clipping and
SGD. It shares with the run under test the model file, the rule of the initial weights and the batch, nothing else.
"""

import math
import os
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from mutants import MUTANTS
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lite import step as stepping  # called through the module, so that a mutant's patch is seen
from torchtitan_lite.components.data import Batch
from torchtitan_lite.config import Config, LRScheduler, Model, Optimizer, Training
from torchtitan_lite.layout import plan_layout, resolve_config
from torchtitan_lite.model.head import IGNORE_INDEX
from torchtitan_lite.model.llama3 import Llama3, init_parameter
from torchtitan_lite.parallel.initial_weights import initialize_weights
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.sizes import resolve_shape

N_STEPS = 2
GLOBAL_BATCH_SIZE = 8
SEQ_LEN = 32

# 4 key/value heads, so that tp4 has something to hold; rows with many stages ask for 8 layers.
TABLE_CONFIG = Config(
    model=Model(flavor="debug", dim=64, n_layers=4, n_heads=8, n_kv_heads=4, head_dim=8, ffn_dim=96, vocab_size=256),
    optimizer=Optimizer(name="SGD", lr=0.5, weight_decay=0.1),
    lr_scheduler=LRScheduler(warmup_steps=0, decay_ratio=0.0),
    training=Training(local_batch_size=GLOBAL_BATCH_SIZE, seq_len=SEQ_LEN, max_norm=0.5),
)


def override(config: Config, overrides: dict[str, object]) -> Config:
    """The config with some keys ("section.key") set."""
    for key, value in overrides.items():
        section, name = key.split(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


def make_batch(step: int, vocab_size: int, n_rows: int = GLOBAL_BATCH_SIZE) -> Batch:
    """Random tokens. From row to row 0 to 90 % of the targets are not counted, in one row none is."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(vocab_size, (n_rows, SEQ_LEN + 1), generator=generator)
    masked_share = torch.linspace(0, 0.9, n_rows)[:, None]
    masked = torch.rand(n_rows, SEQ_LEN, generator=generator) < masked_share
    masked[1] = True
    targets = tokens[:, 1:].masked_fill(masked, IGNORE_INDEX)
    positions = torch.arange(SEQ_LEN).expand(n_rows, -1)
    return Batch(tokens[:, :-1].contiguous(), targets, positions.contiguous(), torch.zeros_like(targets))


@dataclass
class Outcome:
    """What one process, or all ranks together, computed."""

    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]  # of the first batch, before clipping
    weights: dict[str, Tensor]  # after N_STEPS
    losses: list[float]
    grad_norms: list[float]


def run_one_process(config: Config) -> Outcome:
    """The oracle."""
    shape = resolve_shape(config.model)
    model = Llama3(shape)
    initialize_weights(model, init_parameter, config.debug.seed)
    parameters = dict(model.named_parameters())
    initial = {fqn: parameter.detach().clone() for fqn, parameter in parameters.items()}
    section = config.optimizer
    optimizer = torch.optim.SGD(model.parameters(), lr=section.lr, weight_decay=section.weight_decay)
    outcome = Outcome(initial, {}, {}, [], [])
    for step in range(N_STEPS):
        batch = make_batch(step, shape.vocab_size)
        optimizer.zero_grad()
        logits = model(batch.tokens, positions=batch.positions)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())  # mean of the counted
        loss.backward()
        if step == 0:
            outcome.gradients = {fqn: parameter.grad.clone() for fqn, parameter in parameters.items()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
        optimizer.step()
        outcome.losses.append(loss.item())
        outcome.grad_norms.append(norm.item())
    outcome.weights = {fqn: parameter.detach() for fqn, parameter in parameters.items()}
    return outcome


@dataclass
class Difference:
    """How far one rank's share of a run is from the oracle."""

    initial_equal: dict[str, bool]
    gradient: dict[str, float]  # FQN -> ||g - ref|| / ||ref||
    weight: dict[str, float]  # FQN -> ||w - ref|| / ||ref||
    update: dict[str, tuple[float, float]]  # FQN -> squared norms of the difference and of the oracle's update
    loss: float  # largest relative difference of N_STEPS
    grad_norm: float


def measure_layout(
    rank: int, world_size: int, overrides: dict[str, object], oracle_path: str, mutant: str | None = None
) -> Difference:
    """Worker: builds the layout, makes N_STEPS, and compares all that this rank can see. Collective.

    With `mutant`, that patch of mutants.py is in force meanwhile, in this process only.
    """
    with MUTANTS[mutant].patch() if mutant else nullcontext():
        return measure(world_size, overrides, oracle_path)


def measure(world_size: int, overrides: dict[str, object], oracle_path: str) -> Difference:
    oracle: Outcome = torch.load(oracle_path, weights_only=False, mmap=True)
    run = build_table_run(world_size, overrides)
    initial = gather(run, lambda parameter: parameter)
    batch = own_rows(run, make_batch(0, oracle.initial["tok_embeddings.weight"].shape[0]))
    stepping.forward_backward(run, batch, stepping.count_global_tokens(run, batch))
    gradients = gather(run, lambda parameter: parameter.grad)
    losses, grad_norms = [], []
    for step in range(N_STEPS):
        batch = own_rows(run, make_batch(step, oracle.initial["tok_embeddings.weight"].shape[0]))
        result = stepping.train_step(run, batch)
        losses.append(result.loss.item())
        grad_norms.append(result.grad_norm.item())
    weights = gather(run, lambda parameter: parameter)
    return Difference(
        initial_equal={fqn: torch.equal(full, oracle.initial[fqn]) for fqn, full in initial.items()},
        gradient={fqn: relative_error(full, oracle.gradients[fqn]) for fqn, full in gradients.items()},
        weight={fqn: relative_error(full, oracle.weights[fqn]) for fqn, full in weights.items()},
        update={
            fqn: (
                (full - oracle.weights[fqn]).square().sum().item(),
                (oracle.weights[fqn] - oracle.initial[fqn]).square().sum().item(),
            )
            for fqn, full in weights.items()
        },
        loss=largest_relative(losses, oracle.losses),
        grad_norm=largest_relative(grad_norms, oracle.grad_norms),
    )


def build_table_run(world_size: int, overrides: dict[str, object], base: Config = TABLE_CONFIG) -> stepping.Run:
    """A run of the table model. Without another wish, local_batch_size makes the global batch the oracle's."""
    torch._dynamo.reset()
    config = override(base, overrides)
    if "training.local_batch_size" not in overrides:
        parallelism = config.parallelism
        others = parallelism.pipeline_parallel_degree * parallelism.tensor_parallel_degree
        local_batch_size = GLOBAL_BATCH_SIZE * others // world_size
        config = override(config, {"training.local_batch_size": local_batch_size})
    shape = resolve_shape(config.model)
    layout = plan_layout(config, shape, world_size)
    mesh = build_mesh(layout, "cpu")
    return stepping.build_run(resolve_config(config, layout, "cpu"), shape, layout, mesh, torch.device("cpu"))


def own_rows(run: stepping.Run, batch: Batch) -> Batch:
    """This rank's share of a global batch."""
    return batch.split(run.layout.dp)[run.mesh.data_rank]


@torch.no_grad()
def gather(run: stepping.Run, choose) -> dict[str, Tensor]:
    """Full copies of one tensor per parameter. Collective over the ranks that share them."""
    chosen = {fqn: choose(parameter) for fqn, parameter in run.parameters.items()}
    missing = [fqn for fqn, tensor in chosen.items() if tensor is None]
    assert not missing, f"no gradient for {missing}"
    return {fqn: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for fqn, t in chosen.items()}


def relative_error(value: Tensor, reference: Tensor) -> float:
    """||value - reference|| / ||reference||; a zero reference demands zero. What is not finite is infinitely wrong."""
    difference, scale = (value.double() - reference.double()).norm().item(), reference.double().norm().item()
    if difference == 0:
        return 0.0
    return difference / scale if scale and math.isfinite(difference) else math.inf


def largest_relative(values: list[float], references: list[float]) -> float:
    pairs = zip(values, references, strict=True)
    return max(relative_error(torch.tensor(value), torch.tensor(reference)) for value, reference in pairs)


def merge(differences: list[Difference], fqns: set[str]) -> Difference:
    """The worst of all ranks. Every parameter of the model must have been seen by some rank."""

    def worst(name: str, choose) -> dict:
        merged: dict = {}
        for difference in differences:
            for fqn, value in getattr(difference, name).items():
                merged[fqn] = choose(merged[fqn], value) if fqn in merged else value
        assert set(merged) == fqns, f"parameters not compared: {sorted(fqns ^ set(merged))}"
        return merged

    return Difference(
        initial_equal=worst("initial_equal", lambda one, other: one and other),
        gradient=worst("gradient", max),
        weight=worst("weight", max),
        update=worst("update", max),
        loss=max(difference.loss for difference in differences),
        grad_norm=max(difference.grad_norm for difference in differences),
    )


def find_faults(difference: Difference, tolerance: float) -> dict[str, str]:
    """Which measures exceed `tolerance` (relative), each with what is worst. Empty: the layout computes the model."""
    faults = {}
    unequal = [fqn for fqn, equal in difference.initial_equal.items() if not equal]
    if unequal:
        faults["initial"] = (
            f"{len(unequal)} of {len(difference.initial_equal)} initial weights differ, {unequal[0]} first"
        )
    for measure_name in ("gradient", "weight"):
        errors = getattr(difference, measure_name)
        worst = max(errors, key=errors.get)
        if errors[worst] > tolerance:
            faults[measure_name] = f"{measure_name} of {worst} is off by {errors[worst]:.1e}"
    update = total_update_error(difference)
    if update > tolerance:
        faults["update"] = f"the update of all weights together is off by {update:.1e}"
    for measure_name in ("loss", "grad_norm"):
        if getattr(difference, measure_name) > tolerance:
            faults[measure_name] = f"{measure_name} is off by {getattr(difference, measure_name):.1e}"
    return faults


def total_update_error(difference: Difference) -> float:
    """||all (w - ref)|| / ||all (ref - initial)||: per parameter, a norm weight near 1 would only show its rounding."""
    wrong, whole = (sum(pair[i] for pair in difference.update.values()) for i in (0, 1))
    return math.sqrt(wrong / whole) if math.isfinite(wrong) else math.inf


def all_ranks_agree(rank: int, world_size: int, value: object) -> bool:
    """Worker: whether every rank was given the same value. Used to test the pool itself."""
    values: list = [None] * world_size
    dist.all_gather_object(values, value)
    return all(one == values[0] for one in values)


def fail_on(rank: int, world_size: int, failing_rank: int) -> None:
    """Worker: dies without a word on one rank."""
    if rank == failing_rank:
        os._exit(3)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
