"""Build a run and make a step: the code that train, verify, plan, explain and bench share.

    build_parts   meta model -> the parts of this rank's pipeline stages, parallelized, without storage
    materialize   storage and initial weights, which depend on (seed, FQN) only
    start_run     optimizer, learning-rate schedule, pipeline schedule, for parts that it materializes
    build_run     all of these
    train_step    one optimizer step over the global batch

Loss everywhere is (sum of token losses) / (counted tokens of the *global* batch), whatever the accumulation,
microbatches and data-parallel degree; so gradients are sums over microbatches and ranks, never means of means.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from torchtitan_lite.components.expert_balance import ExpertBalance, build_balance
from torchtitan_lite.components.optim import (
    build_lr_scheduler,
    build_optimizer,
    clip_grad_norm,
    compile_optimizer,
    step_if_finite,
)
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.schema import Config
from torchtitan_lite.model import llama3
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.model.head import count_valid_tokens
from torchtitan_lite.model.moe import list_mixtures
from torchtitan_lite.parallel.context_parallel import shard_sequence
from torchtitan_lite.parallel.float8 import Float8AllGatherHook, gather_in_float8, precompute_scales
from torchtitan_lite.parallel.fsdp import free_gathered, prepare_microbatch
from torchtitan_lite.parallel.initial_weights import initialize_weights
from torchtitan_lite.parallel.mesh import Mesh
from torchtitan_lite.parallel.parallelize import parallelize
from torchtitan_lite.parallel.pipeline import apply_stage, build_schedule

# model.name, a row of BLOCKS in config/block.py -> (class, rule for the initial weights of one parameter)
MODELS = {
    "llama3": (llama3.Llama3, llama3.init_parameter),
}


@dataclass(frozen=True)
class Run:
    """Everything that a step needs. Frozen: only the tensors inside change."""

    config: Config
    layout: Layout
    mesh: Mesh
    device: torch.device
    parts: list[nn.Module]  # this rank's pipeline stages, first to last; one without PP
    parameters: dict[str, Tensor]  # FQN -> parameter, of all parts
    optimizer: Optimizer
    lr_scheduler: LRScheduler
    schedule: object | None  # of torch.distributed.pipelining; None without PP
    float8_weights: list[Float8AllGatherHook]  # those whose scales are precomputed
    balance: ExpertBalance | None = None  # None: the model has no experts

    @property
    def saved(self) -> dict[str, Tensor]:
        """What a checkpoint holds besides the optimizer state: FQN -> parameter, or bias of a layer's experts."""
        return self.parameters | (self.balance.biases if self.balance else {})


@dataclass(frozen=True)
class StepResult:
    """Scalars on the device: reading one makes the host wait for the step."""

    loss: Tensor  # of the global batch, the same on every rank
    local_loss: Tensor  # what this rank's tokens and stages contribute to it
    grad_norm: Tensor  # of all parameters, before clipping, the same on every rank
    finite: Tensor  # False: the gradient norm was not finite and no weight was changed
    expert_loads: Tensor | None = None  # as ExpertBalance.update returns them


def build_on_meta(config: Config, model_args: ModelArgs) -> nn.Module:
    """Build the whole model on meta, without storage."""
    model_class, _ = MODELS[config.model.name]
    with torch.device("meta"):
        return model_class(model_args, attention=config.model.attention)


def build_parts(config: Config, model_args: ModelArgs, layout: Layout, mesh: Mesh) -> list[nn.Module]:
    """Build the model parts of this rank, parallelized and still on meta: no memory, no communication."""
    model = build_on_meta(config, model_args)
    stages = [layout.stages[index] for index in layout.stages_of(mesh.pp.get_local_rank())]
    parts = [apply_stage(model, fqns) for fqns in stages]
    for part in parts:
        parallelize(part, config, layout, mesh)
    return parts


def materialize(
    parts: list[nn.Module], config: Config, device: torch.device, init_parameter: Callable | None = None
) -> None:
    """Allocate the parts on `device`, or on the host under offload (own slices only), and initialize their weights.

    `init_parameter`: what fills a whole tensor, of which the rank keeps its slice; by default the model's own rule.
    """
    init_parameter = init_parameter or MODELS[config.model.name][1]
    for part in parts:
        part.to_empty(device="cpu" if config.training.enable_cpu_offload else device)
        if part.model_args.tie_embeddings:  # to_empty made two tensors of the one
            part.output.weight = part.tok_embeddings.weight
        for _, mixture in list_mixtures(part):
            mixture.router.reset(device)
        initialize_weights(part, init_parameter, config.debug.seed, device)
        part.train()


def build_run(
    config: Config,
    model_args: ModelArgs,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    init_parameter: Callable | None = None,
) -> Run:
    """Build a run at step 0. `config` is resolved; `init_parameter` as `materialize` takes it. Collective."""
    return start_run(build_parts(config, model_args, layout, mesh), config, layout, mesh, device, init_parameter)


def start_run(
    parts: list[nn.Module],
    config: Config,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    init_parameter: Callable | None = None,
) -> Run:
    """Build a run at step 0 from parts on meta: allocate them, then make optimizer and schedules."""
    materialize(parts, config, device, init_parameter)
    float8_weights = gather_in_float8(parts, config.quantize.linear.float8)
    parameters = {fqn: parameter for part in parts for fqn, parameter in part.named_parameters()}
    optimizer = build_optimizer(config.optimizer, parameters.values())
    if config.compile.enable:
        compile_optimizer(optimizer, config.compile)
    schedule = None
    if layout.pp > 1:
        schedule = build_schedule(
            parts,
            layout,
            mesh.pp,
            section=config.parallelism,
            device=device,
            loss_fn=lambda loss_sum, n_tokens: loss_sum / n_tokens[0],
        )
    lr_scheduler = build_lr_scheduler(config.lr_scheduler, optimizer)
    balance = build_balance(parts, config.training, layout.global_batch_size, device) if layout.ep else None
    return Run(
        config, layout, mesh, device, parts, parameters, optimizer, lr_scheduler, schedule, float8_weights, balance
    )


def train_step(run: Run, batch: Batch) -> StepResult:
    """Make one optimizer step. `batch` is this rank's rows of the global batch. No result is read back."""
    local_loss = compute_gradients(run, batch)
    loss = sum_losses(run, local_loss)  # all-reduces one float over pp, dp and cp
    grad_norm = clip_grad_norm(run.parameters.values(), run.config.training.max_norm)  # one float over all ranks
    finite = step_if_finite(run.optimizer, grad_norm)
    expert_loads = run.balance.update(finite) if run.balance else None  # all-reduces layers x (experts + 1) x 8 bytes
    precompute_scales(run.float8_weights, run.mesh.fsdp_mesh)  # if asked for: all-reduces one float per weight
    run.lr_scheduler.step()
    return StepResult(loss, local_loss, grad_norm, finite, expert_loads)


def compute_gradients(run: Run, batch: Batch) -> Tensor:
    """Compute the gradients of `batch`; they replace earlier ones. Returns the local loss of `forward_backward`."""
    run.optimizer.zero_grad()
    if run.balance:
        run.balance.reset_loads()
    batch = shard_for_cp(run, batch)
    n_tokens = count_global_tokens(run, batch)  # all-reduces one integer over dp and cp
    return forward_backward(run, batch, n_tokens)  # FSDP reduce-scatters gradients as they come


def shard_for_cp(run: Run, batch: Batch) -> Batch:
    """Keep this cp rank's pieces of each row: (B, S) -> (B, S/cp); doc_ids stay whole. No communication."""
    if run.layout.cp == 1:
        return batch
    names = ["tokens", "targets", "positions"] + ["routes"] * (batch.routes is not None)
    return replace(batch, **{name: shard_sequence(getattr(batch, name), run.mesh.cp) for name in names})


def forward_backward(run: Run, batch: Batch, n_tokens: Tensor) -> Tensor:
    """Run forward and backward of all microbatches. Adds to the gradients, which are complete on return.

    `batch` comes from `shard_for_cp`, here and in the functions below.
    Returns this rank's part of the loss, () fp32: zero if no stage of this rank holds the head.
    """
    loss = torch.zeros((), device=run.device)
    if run.schedule is not None:
        return loss + sum(run_schedule(run, run.schedule.step, batch, n_tokens))
    (part,) = run.parts
    for index, micro in enumerate(batch.split(run.layout.n_microbatches), 1):
        is_last = index == run.layout.n_microbatches
        prepare_microbatch(part, zero_stage=run.layout.zero_stage, is_last=is_last)
        micro_loss = part(micro.tokens, **stage_kwargs(micro)) / n_tokens
        micro_loss.backward()
        loss += micro_loss.detach()
    return loss


@torch.no_grad()
def forward_only(run: Run, batch: Batch, n_tokens: Tensor) -> Tensor:
    """Compute the same loss without gradients, microbatch by microbatch: (n_microbatches,) fp32, which add up to it.

    Weights and gradients do not change.
    """
    if run.schedule is not None:
        losses = run_schedule(run, run.schedule.eval, batch, n_tokens)
    else:
        (part,) = run.parts
        micros = batch.split(run.layout.n_microbatches)
        losses = [part(micro.tokens, **stage_kwargs(micro)) / n_tokens for micro in micros]
    for part in run.parts:
        free_gathered(part)
    return torch.stack(losses) if losses else torch.zeros(run.layout.n_microbatches, device=run.device)


def run_schedule(run: Run, schedule_fn: Callable, batch: Batch, n_tokens: Tensor) -> list[Tensor]:
    """Run the pipeline schedule. Return the loss of each microbatch on the rank that has the head, elsewhere nothing.

    `schedule_fn` is its method `step` or `eval`. Stages send hidden states and their gradients. Every rank passes the
    other inputs itself, and torch cuts them into microbatches along the rows. The token count is passed as the target,
    because torch hands that to the loss function.
    """
    tokens = [batch.tokens] if run.parts[0].tok_embeddings is not None else []
    losses: list[Tensor] = []  # of the microbatches, on the rank that has the head
    target = n_tokens.expand(len(batch.tokens))
    schedule_fn(*tokens, target=target, losses=losses, return_outputs=False, **stage_kwargs(batch))
    return [loss.detach() for loss in losses]


def stage_kwargs(batch: Batch) -> dict[str, Tensor]:
    """Return the keyword arguments of every model part, (rows, S) each, or with routes (rows, S, layers, top_k)."""
    kwargs = {"positions": batch.positions, "doc_ids": batch.doc_ids, "targets": batch.targets}
    return kwargs if batch.routes is None else kwargs | {"routes": batch.routes}


def count_global_tokens(run: Run, batch: Batch) -> Tensor:
    """Count the valid targets of the global batch, () int64. All-reduces 8 bytes over dp_replicate, dp_shard and cp."""
    n_tokens = count_valid_tokens(batch.targets)
    dist.all_reduce(n_tokens, group=run.mesh.dp_cp_mesh.get_group())
    return n_tokens.clamp(min=1)  # a batch of conversations may have no target: then the loss is 0, not 0/0


def sum_losses(run: Run, local_loss: Tensor) -> Tensor:
    """Sum the loss of the global batch, () fp32. All-reduces 4 bytes over pp, dp_replicate, dp_shard and cp."""
    loss = local_loss.clone()
    dist.all_reduce(loss, group=run.mesh.loss_mesh.get_group())
    return loss
