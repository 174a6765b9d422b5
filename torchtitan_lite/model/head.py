"""The head: hidden states to logits, or to the sum of token losses.

One module does both: hidden states and targets go in, the loss comes out. So a pipeline's last stage, tensor parallel
and the chunked loss need no second path.

The chunked loss never holds all logits. It computes the head's matmul and the loss for one chunk of tokens at a time:

    hidden (N, D)   forward, for each chunk                                       kept for backward
    [n tokens]      logits (n, V) -> losses, added to the sum ()
    [n tokens]                    -> gradient of logits (n, V)  -> x weight       its rows of grad_hidden (N, D)
    [n tokens]                                                  -> x hidden       added to grad_weight (V, D)

Backward only scales the gradient of a sum of losses, so forward computes this gradient while it has the logits. Logits
are computed once, by the same three matmuls as in the plain loss. The plain loss holds several tensors of N x V
numbers, 4 GiB each in fp32 for 8,192 tokens of Llama 3. The chunked loss holds n x V numbers and grad_weight. Under TP,
subclasses in parallel/tensor_parallel.py compute the loss of a split vocabulary.

Legend: B batch, S sequence, N = B*S tokens, n tokens of a chunk, D model dim, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100  # a target that is not counted, neither in the loss nor in the number of tokens


class Head(nn.Linear):
    """The last projection, `output.weight` (V, D)."""

    def __init__(self, dim: int, vocab_size: int):
        super().__init__(dim, vocab_size, bias=False)
        self.chunked_loss: nn.Module | None = None  # if set, it computes logits and loss chunk by chunk

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """hidden (B, S, D) -> logits (B, S, V); with targets (B, S) -> the sum of token losses, () fp32.

        A sum and not a mean: the number of counted tokens differs from rank to rank and microbatch to microbatch, so a
        mean of means would weigh tokens unequally. `step.py` divides by the counted tokens of the global batch.
        """
        if targets is not None and self.chunked_loss is not None:
            return self.chunked_loss(hidden, self.weight, targets)
        logits = F.linear(hidden, self.weight)
        return logits if targets is None else self.sum_token_losses(logits.flatten(0, 1), targets.flatten())

    def sum_token_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits (N, V), targets (N,) int64 with IGNORE_INDEX -> the sum of the cross entropies, () fp32."""
        return F.cross_entropy(logits.float(), targets, reduction="sum", ignore_index=IGNORE_INDEX)


def count_valid_tokens(targets: Tensor) -> Tensor:
    """Count the valid targets, () int64 on the device of `targets`."""
    return torch.count_nonzero(targets != IGNORE_INDEX)


class ChunkedLoss(nn.Module):
    """Sum of the cross entropy of all valid tokens, in fp32: the same as Head.sum_token_losses."""

    def __init__(self, chunk_tokens: int):
        """`chunk_tokens` 0: one chunk of all tokens."""
        super().__init__()
        self.chunk_tokens = chunk_tokens

    def forward(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """hidden (B, S, D), weight (V, D), targets (B, S) int64 with IGNORE_INDEX -> () fp32."""
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        if torch.is_grad_enabled():
            return ChunkedCrossEntropy.apply(hidden, weight, targets, self)
        n = self.chunk_tokens or len(hidden)
        chunks = zip(hidden.split(n), targets.split(n), strict=True)
        return sum(self.differentiate(some @ weight.t(), theirs, with_gradient=False)[0] for some, theirs in chunks)

    def differentiate(
        self, logits: Tensor, targets: Tensor, *, with_gradient: bool, first_id: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """logits (n, V), targets (n,) -> sum of losses, () fp32, and its gradient with respect to the logits, (n, V).

        The first logit belongs to `first_id`. Logits are overwritten. Compiled if compile.components has "loss".
        """
        column = (targets - first_id)[:, None]
        is_here = (column >= 0) & (column < logits.shape[1])  # IGNORE_INDEX is negative: never
        column = column.where(is_here, 0)
        counted = targets[:, None] != IGNORE_INDEX

        values = logits.float()
        of_target = values.gather(1, column).where(is_here, 0)  # (n, 1), as all that follows but `values`
        largest = values.amax(1, keepdim=True)
        values.sub_(largest).exp_()
        log_total = largest + values.sum(1, keepdim=True).log()
        log_total, of_target = self.combine(log_total, of_target)
        loss = (log_total - of_target).where(counted, 0).sum()
        if not with_gradient:
            return loss, None

        values.mul_((largest - log_total).exp() * counted)  # probabilities
        at_target = values.gather(1, column) - is_here.float()
        return loss, values.to(logits.dtype).scatter_(1, column, at_target.to(logits.dtype))

    def combine(self, log_total: Tensor, of_target: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-sum-exp and target logit over the whole vocabulary. A subclass may hold only part of it."""
        return log_total, of_target


class ChunkedCrossEntropy(torch.autograd.Function):
    """The loop over chunks as one autograd function."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, loss: ChunkedLoss) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)  # the sum over many chunks would lose bits in bf16
        n = loss.chunk_tokens or len(hidden)
        pieces = (tensor.split(n) for tensor in (hidden, targets, grad_hidden))
        for some_hidden, some_targets, some_grad_hidden in zip(*pieces, strict=True):
            some_loss, grad_logits = loss.differentiate(some_hidden @ weight.t(), some_targets, with_gradient=True)
            total += some_loss
            torch.mm(grad_logits, weight, out=some_grad_hidden)
            add_product(grad_weight, grad_logits.t(), some_hidden)
            del grad_logits  # before the next chunk's logits are there
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total: Tensor) -> tuple[Tensor, Tensor, None, None]:
        # Not in place: a schedule that splits its backward comes here twice.
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_total, grad_weight * grad_total, None, None


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total`, fp32, in place."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:  # the matmul itself adds in fp32; there is no such kernel for a CPU
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b
