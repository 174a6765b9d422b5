"""The loss on held-out text: of the validation steps of a run, and of `eval`. The same number on every layout.

All layouts read the same samples, in batches of the training shape; padding that does not count fills the last
batch. So every rank makes the same number of passes, and none waits for a rank that has run out of data. Sums of
losses, tokens and bytes stay on the device; the ranks all-reduce them once, at the end.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lite.config.schema import Validation
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.model.head import IGNORE_INDEX
from torchtitan_lite.step import Run, forward_only, shard_for_cp


def is_validated(step: int, section: Validation, n_steps: int) -> bool:
    return section.enable and (step % section.freq == 0 or step in (1, n_steps))


@dataclass(frozen=True)
class TextLoss:
    """What a text costs a model. A sum of nothing gives NaN or infinity, and no error."""

    nats: Tensor  # () float64, sum over all tokens that are counted
    n_tokens: Tensor  # () int64; a document's first token is not counted
    n_bytes: Tensor  # () int64, of UTF-8 text in these tokens, so that tokenizers compare

    @property
    def nats_per_token(self) -> Tensor:
        return self.nats / self.n_tokens

    @property
    def bits_per_byte(self) -> Tensor:
        return self.nats / math.log(2) / self.n_bytes


def validate(run: Run, batches: Iterable[Batch], bytes_of_tokens: Tensor) -> dict[str, float]:
    """Return val_loss (nats per token), val_perplexity and val_bits_per_byte. Collective: see `measure_text`."""
    loss = measure_text(run, batches, bytes_of_tokens)
    return {
        "val_loss": loss.nats_per_token.item(),
        "val_perplexity": loss.nats_per_token.exp().item(),
        "val_bits_per_byte": loss.bits_per_byte.item(),
    }


def measure_text(run: Run, batches: Iterable[Batch], bytes_of_tokens: Tensor) -> TextLoss:
    """Measure all batches by forward passes over this rank's rows. Weights and gradients do not change. Collective.

    `bytes_of_tokens` (ids,) int64: bytes of text of each id. All-reduces 8 bytes over pp,
    dp_replicate, dp_shard and cp, and 16 bytes over the last three.
    """
    one = torch.ones((), dtype=torch.int64, device=run.device)
    nats = torch.zeros((), dtype=torch.float64, device=run.device)
    counts = torch.zeros(2, dtype=torch.int64, device=run.device)  # tokens, bytes
    for batch in batches:
        pieces = shard_for_cp(run, batch)
        nats += forward_only(run, pieces, one).sum()  # divided by one: the sum of token losses
        counted = pieces.targets != IGNORE_INDEX
        counts += torch.stack([counted.sum(), (bytes_of_tokens[pieces.targets.clamp(min=0)] * counted).sum()])
    dist.all_reduce(nats, group=run.mesh.loss_mesh.get_group())
    dist.all_reduce(counts, group=run.mesh.dp_cp_mesh.get_group())
    return TextLoss(nats, *counts)


def measure_rows(run: Run, batches: Iterable[Batch]) -> Tensor:
    """Return the nats of each row of the global batches, (rows,) float64, on every rank. Collective.

    Microbatches of `run` have one row. All-reduces 8 bytes a row over pp, dp_replicate, dp_shard and cp.
    """
    assert run.layout.microbatch_size == 1, "the loss of a microbatch is that of a row"
    one = torch.ones((), dtype=torch.int64, device=run.device)
    own = [forward_only(run, shard_for_cp(run, batch), one).double() for batch in batches]
    nats = torch.zeros(len(own), run.layout.dp, run.layout.n_microbatches, dtype=torch.float64, device=run.device)
    nats[:, run.mesh.data_rank] = torch.stack(own)
    dist.all_reduce(nats, group=run.mesh.loss_mesh.get_group())
    return nats.flatten()
