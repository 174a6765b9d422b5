"""Make one optimizer step over the global batch. train.py, verify, plan and bench call the same functions.

The loss is always (sum of token losses) / (valid tokens in the *global* batch), for any accumulation, number of
microbatches and data-parallel degree. Gradients are therefore sums over microbatches and ranks, never means of means.
"""

from collections.abc import Callable
from ctypes import string_at
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lite.build import Run
from torchtitan_lite.components.optim import (
    require_gradients,
    sum_gradient_squares,
    update_weights,
)
from torchtitan_lite.components.signals import SIGNALS
from torchtitan_lite.config.extensions import load_module
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.model.loss import count_valid_tokens
from torchtitan_lite.parallel.fsdp import prepare_microbatch

RANDOM = (
    "a step draws random numbers, as in dropout. Recompute, resumed runs and other layouts would not repeat them: "
    "derive random numbers from tokens and positions"
)


@dataclass(frozen=True)
class StepResult:
    """Scalars on the device. Reading a value makes the host wait for the step."""

    loss: Tensor  # loss of the global batch, the same on every rank
    grad_norm: Tensor  # 2-norm of all gradients before clipping, the same on every rank
    applied: Tensor  # False if the gradient norm was a spike or not finite (no weight was changed)
    stops: Tensor  # for each of SIGNALS, the number of ranks that received it
    expert_loads: Tensor | None  # the result of ExpertBalance.update

    def read(self) -> tuple[bool, float, int]:
        """Return `applied`, `grad_norm`, and the signal that stops all ranks after this step, or 0.

        If ranks received different signals, the signal that is last in SIGNALS is returned. The host waits for one copy
        from the device.
        """
        scalars = [self.applied, self.grad_norm, *self.stops]
        applied, grad_norm, *stops = torch.stack([each.double() for each in scalars]).tolist()
        stop_signal = 0
        for number, n_ranks in zip(SIGNALS, stops, strict=True):
            if n_ranks:
                stop_signal = int(number)
        return bool(applied), grad_norm, stop_signal


def train_step(run: Run, batch: Batch, stop_signal: int = 0) -> StepResult:
    """Run one optimizer step, without copying anything to the host.

    `batch` contains this rank's rows of the global batch. `stop_signal` is the signal that this rank received, or 0.
    Raises UserError if the model, the optimizer or an extension draws random numbers.
    """
    random_state = copy_random_state()
    local_loss = compute_gradients(run, batch)
    trained = {fqn: own.grad for fqn, own in run.parameters.items() if own.requires_grad}
    require_gradients(trained)
    squares = sum_gradient_squares(run.parameters.values())
    # all-reduces 56 bytes over all ranks
    grad_norm, loss, stops = reduce_scalars(squares, local_loss / run.layout.tp, stop_signal)
    for wait in run.before_update:
        wait()  # asynchronous saves may still be copying the tensors that change below
    is_spike = run.spikes.judge(grad_norm) if run.spikes else None
    max_norm = run.config.training.max_norm
    # clips and updates; only Muon communicates, because each rank orthogonalizes some of the matrices
    applied = update_weights(run.optimizer, grad_norm, max_norm, is_spike)
    expert_loads = None
    if run.balance:
        expert_loads = run.balance.update(applied)  # all-reduces layers x (experts + 1) x 8 bytes
    for follow_up in run.after_update:
        follow_up()  # if float8 scales are precomputed, all-reduces one float per float8 weight
    run.lr_scheduler.step()
    if copy_random_state() != random_state:
        raise UserError(RANDOM)
    return StepResult(loss, grad_norm, applied, stops, expert_loads)


def compute_gradients(run: Run, batch: Batch) -> Tensor:
    """Compute the gradients of `batch`, replacing earlier gradients. Returns the local loss of `forward_backward`."""
    run.optimizer.zero_grad()
    if run.balance:
        run.balance.loads.zero_()
    batch = shard_for_cp(run, batch)
    n_tokens = count_global_tokens(run, batch)  # all-reduces one integer over all ranks
    return forward_backward(run, batch, n_tokens)  # FSDP reduces gradients during backward


def shard_for_cp(run: Run, batch: Batch) -> Batch:
    """Keep this cp rank's pieces of each row: (B, S) -> (B, S/cp), except doc_ids (B, S). No communication."""
    if run.layout.cp == 1:
        # shard_sequence cuts a row into two equal pieces per rank, which would drop the last token of a row of odd
        # length
        return batch
    shard_sequence = load_module("parallel.context_parallel").shard_sequence
    pieces = batch.map(lambda field: shard_sequence(field, run.mesh.cp))
    return replace(pieces, doc_ids=batch.doc_ids)


def forward_backward(run: Run, batch: Batch, n_tokens: Tensor) -> Tensor:
    """Run forward and backward for all microbatches. On return, gradients are summed over all microbatches.

    Here and in the functions below, `batch` is the result of `shard_for_cp`. Returns the loss of this rank's tokens, ()
    fp32, which is zero if no pipeline stage of this rank has the head. The loss is equal on all tp ranks.
    """
    if run.schedule is not None:
        return run_schedule(run, run.schedule.step, batch, n_tokens)
    total_loss = torch.zeros((), device=run.device)
    (part,) = run.parts
    for index, micro in enumerate(batch.split(run.layout.n_microbatches), 1):
        is_last = index == run.layout.n_microbatches
        prepare_microbatch(part, zero_stage=run.layout.zero_stage, is_last=is_last)
        loss = part(micro.tokens, **stage_kwargs(micro)) / n_tokens
        loss.backward()
        total_loss += loss.detach()
    return total_loss


def run_schedule(run: Run, schedule_fn: Callable, batch: Batch, n_tokens: Tensor) -> Tensor:
    """Run the pipeline schedule. Return the loss of this rank's tokens, () fp32; zero on ranks without the head.

    `schedule_fn` is the schedule's `step` or `eval`. Stages send hidden states, and the gradients of hidden states.
    They do not send other inputs, such as positions and targets: every rank passes these inputs to its own stages.
    torch splits all inputs into microbatches along dim 0.
    """
    tokens = [batch.tokens] if run.parts[0].tok_embeddings is not None else []
    losses: list[Tensor] = []  # one loss per microbatch, on the rank that has the head
    run.n_tokens.copy_(n_tokens)
    schedule_fn(
        *tokens,
        target=batch.targets,
        losses=losses,
        return_outputs=False,
        **stage_kwargs(batch),
    )
    return sum((loss.detach() for loss in losses), torch.zeros((), device=run.device))


def stage_kwargs(batch: Batch) -> dict[str, Tensor]:
    """Return the keyword arguments for every model part, (rows, S) each, with the extra fields of the batch."""
    return {
        "positions": batch.positions,
        "doc_ids": batch.doc_ids,
        "targets": batch.targets,
        **batch.extra,
    }


def copy_random_state() -> list[bytes]:
    """Return the state of torch's CPU generator, and of its GPU generator if this process uses a GPU.

    Uses no torch operator, because a dry run replaces operators. Python's own generator is left out, because other
    threads draw from it.
    """
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return [string_at(state.data_ptr(), state.numel()) for state in states]


def count_global_tokens(run: Run, batch: Batch) -> Tensor:
    """Count the valid targets of the global batch, () int64. All-reduces 8 bytes over all ranks."""
    n_tokens = count_valid_tokens(batch.targets)
    dist.all_reduce(n_tokens)
    n_tokens //= run.layout.pp * run.layout.tp  # pp and tp ranks count the same targets
    return n_tokens.clamp(min=1)  # the loss of a batch without targets is 0, not 0/0


@torch.no_grad()
def reduce_scalars(
    squares: Tensor, loss: Tensor, stop_signal: int
) -> tuple[Tensor, Tensor, Tensor]:
    """All-reduce gradient norm, loss, and the signals that ranks received: one call of 56 bytes over all ranks.

    `squares`: the result of `sum_gradient_squares`. `loss`: this rank's share of the loss, (). `stop_signal`: the
    signal that this rank received, one of SIGNALS, or 0. Returns norm and loss, () fp32, and the number of ranks that
    received each of SIGNALS.
    """
    numbers = squares.new_zeros(2 + len(SIGNALS))
    numbers[0] = squares
    numbers[1] = loss
    if stop_signal:
        # filled on the device, because a copy from the host would make the host wait
        numbers[2 + SIGNALS.index(stop_signal)] = 1
    dist.all_reduce(numbers)
    return numbers[0].sqrt().float(), numbers[1].float(), numbers[2:]
