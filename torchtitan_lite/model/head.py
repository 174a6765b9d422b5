"""The head: hidden states to logits, or to the sum of token losses.

The projection and the loss are one module: hidden states and targets go in, the loss comes out. It never
stores all logits, but computes the projection and the loss for one chunk of tokens at a time:

    hidden (N, D)   forward, for each chunk                                       saved for backward
    [n tokens]      logits (n, V) -> losses, added to the sum ()
    [n tokens]                    -> gradient of logits (n, V)  -> x weight       rows of grad_hidden (N, D)
    [n tokens]                                                  -> x hidden       added to grad_weight (V, D)

Backward only scales the gradient of a sum of losses, so forward computes this gradient while it has the logits.
torch's cross entropy would store several tensors of N x V values, 4 GiB each in fp32 for 8,192 tokens of Llama 3. This
loss stores n x V values and grad_weight. With TP, parallel/tensor_parallel.py combines the shards of a vocabulary.

Legend: B batch, S sequence, N = B*S tokens, n tokens of a chunk, D model dim, V vocabulary.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100  # a target that counts neither in the loss nor in the number of tokens


def count_valid_tokens(targets: Tensor) -> Tensor:
    """Count the valid targets, () int64 on the device of `targets`."""
    return torch.count_nonzero(targets != IGNORE_INDEX)


class Head(nn.Linear):
    """The output projection, `output.weight` (V, D), and the loss: the summed cross entropy in fp32."""

    def __init__(self, dim: int, vocab_size: int):
        super().__init__(dim, vocab_size, bias=False)
        self.chunk_tokens = 0  # tokens of a chunk; 0: all tokens form one chunk
        self.shard = 0  # which of the equal shards of the vocabulary `weight` is; set by TP

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """hidden (B, S, D) -> logits (B, S, V); with targets (B, S) -> the sum of token losses, () fp32.

        The loss is a sum, because ranks and microbatches have different numbers of counted tokens: a mean of means
        would weigh tokens unequally. `step.py` divides by the counted tokens of the global batch.
        """
        weight = self.weight
        if targets is None:
            return F.linear(hidden, weight)
        hidden = hidden.flatten(0, 1)
        targets = targets.flatten()
        if torch.is_grad_enabled():
            return ChunkedCrossEntropy.apply(hidden, weight, targets, self)
        total = torch.zeros((), device=hidden.device)
        for some_hidden, some_targets in self.split(hidden, targets):
            loss, _ = self.differentiate(some_hidden @ weight.t(), some_targets)
            total += loss
        return total

    def weigh_total(self, log_total: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the part of a token's loss that depends on the log-sum-exp of its logits, and its derivative.

        The loss is this part minus the logit of the target: here the cross entropy. A model with another loss, such as
        the z-loss, has a subclass that overrides this method.
        """
        return log_total, 1.0

    def split(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the rows of each chunk."""
        chunk_tokens = self.chunk_tokens or len(tensors[0])
        return zip(*(tensor.split(chunk_tokens) for tensor in tensors), strict=True)

    def differentiate(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """logits (n, V), targets (n,) -> sum of losses, () fp32, and its gradient with respect to the logits, (n, V).

        Overwrites the logits. Compiled if compile.components has "loss".
        """
        vocab_size = logits.shape[1]
        column = (targets - self.shard * vocab_size)[:, None]
        # False for IGNORE_INDEX, which is negative
        is_here = (column >= 0) & (column < vocab_size)
        column = column.where(is_here, 0)
        counted = targets[:, None] != IGNORE_INDEX

        values = logits.float()
        of_target = values.gather(1, column)  # (n, 1), like those below
        of_target = of_target.where(is_here, 0)
        largest = values.amax(1, keepdim=True)
        values.sub_(largest)
        values.exp_()
        total = values.sum(1, keepdim=True)
        log_total = largest + total.log()
        log_total, of_target = self.combine(log_total, of_target)
        of_total, slope = self.weigh_total(log_total)
        token_losses = of_total - of_target
        loss = token_losses.where(counted, 0).sum()

        normalizer = (largest - log_total).exp()
        values.mul_(normalizer * counted * slope)  # probabilities
        at_target = values.gather(1, column) - is_here.float()
        gradient = values.to(logits.dtype)
        gradient.scatter_(1, column, at_target.to(gradient.dtype))
        return loss, gradient

    def combine(self, log_total: Tensor, of_target: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-sum-exp and target logit over the full vocabulary. TP reduces over vocabulary shards."""
        return log_total, of_target


class ChunkedCrossEntropy(torch.autograd.Function):
    """The loop over all chunks, as one autograd function."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, head: Head) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        # A sum over many chunks is too inexact in bf16.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        chunks = head.split(hidden, targets, grad_hidden)
        for some_hidden, some_targets, some_grad_hidden in chunks:
            logits = some_hidden @ weight.t()
            some_loss, grad_logits = head.differentiate(logits, some_targets)
            del logits
            total += some_loss
            torch.mm(grad_logits, weight, out=some_grad_hidden)
            add_product(grad_weight, grad_logits.t(), some_hidden)
            del grad_logits  # free it before allocating the next chunk's logits
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total: Tensor) -> tuple[Tensor, Tensor, None, None]:
        # Not in place: a pipeline schedule that splits backward calls this twice.
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_total, grad_weight * grad_total, None, None


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total` (fp32) in place."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:  # the matmul kernel accumulates into fp32; CPUs have no such kernel
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b
