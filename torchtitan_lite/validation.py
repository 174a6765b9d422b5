"""Compute the loss on validation text, for a training run and for `eval`. The result is equal on every layout.

All layouts read the same samples, in batches of the training shape. Padding completes the last batch and is not
counted, so every rank runs the same number of forward passes. A signal ends the validation of a run on all ranks.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lite.build import Run
from torchtitan_lite.components.signals import StopFlag
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.dataset import RunData
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.model.loss import IGNORE_INDEX
from torchtitan_lite.step import forward_only, shard_for_cp

logger = logging.getLogger(__name__)


def validate(
    run: Run,
    data: RunData,
    step: int,
    stop: StopFlag,
    follow: Callable[[Iterator], Iterator] = iter,
) -> dict[str, float] | None:
    """Return val_loss (nats per token), val_perplexity, val_bits_per_byte and val_time_s; None if not due at this step.

    Also returns None if a rank has received a signal: the run then stops after the next step. Weights and gradients do
    not change. `follow` yields the batches and watches how long each one takes.

    Collective: all-reduces 8 bytes over all ranks before each batch; at the end, 8 bytes over pp, dp_replicate,
    dp_shard and cp, and 16 bytes over the last three.
    """
    if not is_validated(run.config, step):
        return None
    started_s = time.perf_counter()
    one = torch.ones((), dtype=torch.int64, device=run.device)  # divisor of sums of token losses

    is_stopped = False

    def find_batches() -> Iterator[Batch]:
        nonlocal is_stopped
        for batch in follow(data.validation_batches()):
            is_stopped = has_signal(run, stop)
            if is_stopped:
                return
            yield shard_for_cp(run, batch)

    def compute_loss(batch: Batch) -> Tensor:
        return forward_only(run, batch, one)

    with evaluating(run):
        nats, counts = sum_nats(find_batches(), compute_loss, data.bytes_of_tokens)
    if is_stopped:
        logger.info(f"step {step}: the validation is left out, because a signal stops the run")
        return None
    dist.all_reduce(nats, group=run.mesh.loss_mesh.get_group())
    dist.all_reduce(counts, group=run.mesh.dp_cp_mesh.get_group())
    figures = {}
    for name, value in describe_loss(nats, counts).items():
        figures[f"val_{name}"] = value
    figures["val_time_s"] = time.perf_counter() - started_s
    return figures


def has_signal(run: Run, stop: StopFlag) -> bool:
    """Return whether any rank has received a signal. The host waits for the device."""
    received = torch.tensor(stop.received, device=run.device)
    dist.all_reduce(received, op=dist.ReduceOp.MAX)
    return bool(received)


@contextmanager
def evaluating(run: Run) -> Iterator[None]:
    """Context manager: put all model parts in evaluation mode. A model may add to its loss in training mode."""
    for part in run.parts:
        part.eval()
    yield
    for part in run.parts:
        part.train()


def is_validated(config: Config, step: int) -> bool:
    section = config.validation
    is_end = step in (1, config.training.steps)
    return section.enable and (is_end or step % section.freq == 0)


def find_warm_step(config: Config, resumed_step: int) -> int:
    """Return the step after which every rank has compiled all its code and connected to its peers."""
    steps = range(resumed_step + 1, config.training.steps + 1)
    if not config.validation.enable:
        return steps[0]
    return next(step for step in steps if is_validated(config, step))


def sum_nats(
    batches: Iterable[Batch], compute_loss: Callable[[Batch], Tensor], bytes_of_tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss summed over all batches in nats, () float64, and the number of tokens and bytes, (2,) float64.

    `compute_loss` returns the sum of token losses of a batch, (). `bytes_of_tokens` (V,) float64: bytes of each id.
    """
    nats = torch.zeros((), dtype=torch.float64, device=bytes_of_tokens.device)
    counts = torch.zeros(2, dtype=torch.float64, device=bytes_of_tokens.device)
    for batch in batches:
        nats += compute_loss(batch)
        counted = batch.targets != IGNORE_INDEX
        n_bytes = bytes_of_tokens[batch.targets.clamp(min=0)] * counted
        counts += torch.stack([counted.sum(), n_bytes.sum()])
    return nats, counts


def describe_loss(nats: Tensor, counts: Tensor) -> dict[str, float]:
    """Return loss (nats per token), perplexity, and bits_per_byte for comparing tokenizers. NaN without tokens."""
    n_tokens, n_bytes = counts
    loss = nats / n_tokens
    bits = nats / math.log(2)
    return {
        "loss": loss.item(),
        "perplexity": loss.exp().item(),
        "bits_per_byte": (bits / n_bytes).item(),
    }
