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
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.corpus import Corpus
from torchtitan_lite.data.dataset import (
    SampleReader,
    locate_in_parts,
    open_reader,
    prefetch,
    rows_of_rank,
)
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.model.loss import IGNORE_INDEX
from torchtitan_lite.step import forward_only, shard_for_cp

logger = logging.getLogger(__name__)


class ValidationBatches:
    """Reads all samples of the validation corpora once, in order. Padding rows complete the last batch.

    With `most_batches`, samples are taken at equal distances, because the first ones could be a single odd document.
    Batches have the shape of training batches, so they use the same schedule and compiled graphs.
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

    def batch(self, step: int, rows: range) -> Batch:
        """Return rows `rows` of batch number `step`, counted from 0. Raises CorpusError."""
        numbers = step * self.global_batch_size + torch.tensor(rows)
        n_read = self.n_batches * self.global_batch_size
        if n_read < self.n_samples:
            numbers = numbers * self.n_samples // n_read
        sources, samples = locate_in_parts(numbers, self.reader.n_samples)
        return self.reader.read(sources, samples)


def count_bytes(tokenizer: Tokenizer, corpora: list[Corpus]) -> Tensor:
    """Return the number of text bytes of each id, (V,) float64.

    If the tokens in a row do not spell the text, every id gets the mean number of bytes per token in the corpora. Their
    total number of bytes is then right.
    """
    if not tokenizer.decode_text:
        return torch.tensor(tokenizer.bytes_of_tokens(), dtype=torch.float64)
    n_bytes = sum(corpus.n_text_bytes for corpus in corpora)
    n_tokens = sum(corpus.n_predicted for corpus in corpora)
    return torch.full((tokenizer.vocab_size,), n_bytes / max(1, n_tokens), dtype=torch.float64)


def open_validation(
    config: Config, model_args: ModelArgs, layout: Layout, tokenizer: Tokenizer
) -> ValidationBatches:
    """Open the prepared corpora of a run for validation. `config` is resolved. No communication. Raises CorpusError."""
    reader = open_reader(config, model_args, tokenizer, "validation")
    return ValidationBatches(reader, tokenizer, layout.global_batch_size, config.validation.steps)


# ---------------------------------------------------------------- a run


def validate(
    run: Run,
    batches: ValidationBatches,
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
    section = run.config.validation
    is_end = step in (1, run.config.training.steps)
    if not is_end and step % section.freq:
        return None
    started_s = time.perf_counter()
    one = torch.ones((), dtype=torch.int64, device=run.device)  # divisor of sums of token losses

    bytes_of_tokens = batches.bytes_of_tokens.to(run.device)
    layout = run.layout
    rows = rows_of_rank(run.mesh.data_rank, layout.dp, layout.global_batch_size)
    is_stopped = False

    def find_batches() -> Iterator[Batch]:
        nonlocal is_stopped
        steps = range(batches.n_batches)
        for batch in follow(prefetch(batches.batch, rows, steps=steps, device=run.device)):
            is_stopped = has_signal(run, stop)
            if is_stopped:
                return
            yield shard_for_cp(run, batch)

    def compute_loss(batch: Batch) -> Tensor:
        return forward_only(run, batch, one)

    with evaluating(run):
        nats, counts = sum_nats(find_batches(), compute_loss, bytes_of_tokens)
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
