"""The validation loss, every `validation.freq` steps: the same number on every layout.

All layouts read the same samples, in batches of the training shape; padding that does not count fills the last
batch. So every rank makes the same number of passes, and none waits for a rank that has run out of data. Sums of
losses, tokens and bytes stay on the device; the ranks all-reduce them once, at the end.
"""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lite.config.schema import Validation
from torchtitan_lite.data.dataset import Batch
from torchtitan_lite.model.head import IGNORE_INDEX
from torchtitan_lite.step import Run, forward_only, shard_for_cp


def is_validated(step: int, section: Validation, n_steps: int) -> bool:
    return section.enable and (step % section.freq == 0 or step in (1, n_steps))


def validate(run: Run, batches: Iterable[Batch], bytes_of_tokens: Tensor) -> dict[str, float]:
    """Return val_loss (nats per token), val_perplexity and val_bits_per_byte (of UTF-8 text, so tokenizers compare).

    Forward only, over this rank's rows of each batch; weights and gradients do not change. Collective.

    `bytes_of_tokens` (ids,) int64: bytes of text of each id. All-reduces 8 bytes over pp,
    dp_replicate, dp_shard and cp, and 16 bytes over the last three.
    """
    one = torch.ones((), dtype=torch.int64, device=run.device)
    loss = torch.zeros((), dtype=torch.float64, device=run.device)
    counts = torch.zeros(2, dtype=torch.int64, device=run.device)  # tokens, bytes
    for batch in batches:
        pieces = shard_for_cp(run, batch)
        loss += forward_only(run, pieces, one)  # divided by one: the sum of token losses
        counted = pieces.targets != IGNORE_INDEX
        counts += torch.stack([counted.sum(), (bytes_of_tokens[pieces.targets.clamp(min=0)] * counted).sum()])
    dist.all_reduce(loss, group=run.mesh.loss_mesh.get_group())
    dist.all_reduce(counts, group=run.mesh.dp_cp_mesh.get_group())
    n_tokens, n_bytes = counts
    mean = loss / n_tokens
    return {
        "val_loss": mean.item(),
        "val_perplexity": mean.exp().item(),
        "val_bits_per_byte": (loss / math.log(2) / n_bytes).item(),
    }
