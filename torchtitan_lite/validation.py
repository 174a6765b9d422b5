"""Compute the loss on validation text, for training and for the tool `eval`. The result is equal on every layout.

All layouts read the same samples, in batches of the training shape. The last batch is padded, so every rank runs the
same number of forward passes; padding does not change the result. A signal ends the validation on all ranks.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lite.build import Run
from torchtitan_lite.components.signals import StopFlag
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.dataset import (
    Corpus,
    SampleReader,
    prefetch,
    rows_of_rank,
)
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.model.loss import IGNORE_INDEX
from torchtitan_lite.parallel.fsdp import free_gathered
from torchtitan_lite.step import run_schedule, shard_for_cp, stage_kwargs

logger = logging.getLogger(__name__)


class ValidationBatches:
    """Reads all samples of the validation corpora once, in order. The last batch is padded with extra rows.

    If `most_batches` limits the samples, they are spread evenly over the split, because the first samples could be a
    single unusual document. Batches have the shape of training batches, so they use the same schedule and compiled
    graphs.
    """

    def __init__(
        self,
        reader: SampleReader,
        tokenizer: Tokenizer,
        global_batch_size: int,
        most_batches: int = -1,
    ):
        self.reader = reader
        self.global_batch_size = global_batch_size
        self.bytes_of_tokens = count_bytes(tokenizer, reader.corpora)
        self.n_samples = sum(reader.n_samples)
        n_batches = -(-self.n_samples // global_batch_size)
        self.n_batches = n_batches if most_batches == -1 else min(n_batches, most_batches)
        if most_batches > n_batches:
            logger.info(f"validation.steps = {most_batches}, but the split has {n_batches} batches")

    def batch(self, step: int, rows: range) -> Batch:
        """Return the rows `rows` of batch number `step` (the first batch is 0). Raises CorpusError."""
        numbers = step * self.global_batch_size + torch.tensor(rows)
        n_read = self.n_batches * self.global_batch_size
        if n_read < self.n_samples:
            numbers = numbers * self.n_samples // n_read
        return self.reader.read(numbers)


def count_bytes(tokenizer: Tokenizer, corpora: list[Corpus]) -> Tensor:
    """Return the number of text bytes per token id, (V,) float64.

    With some tokenizers, decoded text is not the concatenation of the bytes of its tokens. In that case, every id gets
    the mean number of bytes per token. The total number of bytes over the corpora is therefore exact.
    """
    n_bytes = torch.zeros(tokenizer.vocab_size, dtype=torch.float64)
    if not tokenizer.is_spelled:
        n_text_bytes = sum(corpus.sizes.n_text_bytes for corpus in corpora)
        # the first token of a document is not a target
        n_tokens = sum(corpus.n_tokens - corpus.sizes.n_documents for corpus in corpora)
        return n_bytes + n_text_bytes / max(1, n_tokens)
    for token_id in tokenizer.bytes_of_id.keys() - tokenizer.special.values():
        n_bytes[token_id] = len(tokenizer.bytes_of_id[token_id])
    return n_bytes


# ---------------------------------------------------------------- a run


def is_due(config: Config, step: int) -> bool:
    """Return whether a run validates after this step."""
    return step in (1, config.training.steps) or step % config.validation.freq == 0


@torch.no_grad()
def forward_only(run: Run, batch: Batch, n_tokens: Tensor) -> Tensor:
    """Compute this rank's share of the loss without gradients, () fp32. Weights and gradients do not change.

    The parts are in evaluation mode, because a model in training mode may add other terms to its loss.
    """
    for part in run.parts:
        part.eval()
    if run.schedule is not None:
        loss = run_schedule(run, run.schedule.eval, batch, n_tokens)
    else:
        loss = torch.zeros((), device=run.device)
        for micro in batch.split(run.layout.n_microbatches):
            loss += run.parts[0](micro.tokens, **stage_kwargs(micro)) / n_tokens
    for part in run.parts:
        free_gathered(part)
        part.train()
    return loss


def validate(
    run: Run,
    batches: ValidationBatches,
    step: int,
    stop: StopFlag,
    follow: Callable[[Iterator], Iterator] = iter,
) -> dict[str, float] | None:
    """Return val_loss (nats per token), val_perplexity, val_bits_per_byte and val_time_s.

    Returns None if a rank has received a signal, because the run then stops after the next step. Weights and
    gradients do not change. `follow` yields the batches and times each one.

    Collective: all-reduces 8 bytes over all ranks before each batch, and 24 bytes at the end.
    """
    started_s = time.perf_counter()
    # divide by 1, so the result is a sum of token losses
    one = torch.ones((), dtype=torch.int64, device=run.device)
    bytes_of_tokens = batches.bytes_of_tokens.to(run.device)
    sums = torch.zeros(3, dtype=torch.float64, device=run.device)
    rows = rows_of_rank(run.mesh.data_rank, run.layout.dp, run.layout.global_batch_size)
    steps = range(batches.n_batches)
    for batch in follow(prefetch(batches.batch, rows, steps=steps, device=run.device)):
        received = torch.tensor(stop.received, device=run.device)
        dist.all_reduce(received, op=dist.ReduceOp.MAX)
        # true if any rank has received a signal; reading the value makes the host wait
        if received:
            logger.info(f"step {step}: the validation is skipped, because a signal stops the run")
            return None
        batch = shard_for_cp(run, batch)
        sums += measure_loss(forward_only(run, batch, one), batch, bytes_of_tokens)
    dist.all_reduce(sums)
    # every tp rank has the same loss and targets; every pp rank has the same targets
    sums /= run.layout.tp
    sums[1:] /= run.layout.pp
    figures = {f"val_{name}": value for name, value in describe_loss(sums).items()}
    figures["val_time_s"] = time.perf_counter() - started_s
    return figures


# ---------------------------------------------------------------- figures


def measure_loss(loss: Tensor, batch: Batch, bytes_of_tokens: Tensor) -> Tensor:
    """Return sums over the targets of a batch, (3,) float64: loss in nats, number of targets, number of bytes.

    `loss`: the sum of the token losses, (). `bytes_of_tokens` (V,) float64: bytes of each id.
    """
    counted = batch.targets != IGNORE_INDEX
    n_bytes = bytes_of_tokens[batch.targets.clamp(min=0)] * counted
    return torch.stack([loss.double(), counted.sum(), n_bytes.sum()])


def describe_loss(sums: Tensor) -> dict[str, float]:
    """Return loss (nats per token), perplexity and bits_per_byte. Without valid tokens, all three are NaN.

    Only bits_per_byte is comparable between models with different tokenizers. `sums`: the results of `measure_loss`,
    summed over all batches and ranks.
    """
    nats, n_tokens, n_bytes = sums
    loss = nats / n_tokens
    bits = nats / math.log(2)
    return {
        "loss": loss.item(),
        "perplexity": loss.exp().item(),
        "bits_per_byte": (bits / n_bytes).item(),
    }
