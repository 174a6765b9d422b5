"""The head: hidden states to logits, or to the sum of token losses.

One module does both, so that a pipeline's last stage, vocabulary-parallel TP and the chunked loss need no second path:
hidden states and targets go in, the loss comes out.

Legend: B batch, S sequence, D model dim, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE_INDEX = -100  # a target that is not counted, neither in the loss nor in the number of tokens


class TokenLoss(nn.Module):
    """Sum of the cross entropy of all valid tokens, in fp32. A module, so that TP can prepare its logits.

    A sum and not a mean: the number of counted tokens differs from rank to rank and microbatch to microbatch, so a
    mean of means would weigh tokens unequally. `step.py` divides by the number of counted tokens of the global batch.
    """

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits (B, S, V), targets (B, S) int64 with IGNORE_INDEX -> () fp32."""
        return F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), reduction="sum", ignore_index=IGNORE_INDEX
        )


class Head(nn.Linear):
    """The last projection, `output.weight` (V, D)."""

    def __init__(self, dim: int, vocab_size: int):
        super().__init__(dim, vocab_size, bias=False)
        self.token_loss = TokenLoss()
        self.chunked_loss: nn.Module | None = None  # if set, it computes logits and loss chunk by chunk

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """hidden (B, S, D) -> logits (B, S, V); with targets (B, S) -> the sum of token losses, () fp32."""
        if targets is not None and self.chunked_loss is not None:
            return self.chunked_loss(hidden, self.weight, targets)
        logits = F.linear(hidden, self.weight)
        return logits if targets is None else self.token_loss(logits, targets)


def count_valid_tokens(targets: Tensor) -> Tensor:
    """Count the valid targets, () int64 on the device of `targets`."""
    return torch.count_nonzero(targets != IGNORE_INDEX)
