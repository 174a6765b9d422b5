"""Map hidden states to logits, or to the sum of token losses.

The projection and the loss are one module: hidden states and targets go in, the loss comes out. The module never stores
all logits: it computes the projection and the loss for one chunk of tokens at a time.

    hidden (N, D)   forward, for each chunk                                       saved for backward
    [n tokens]      logits (n, V) -> losses, added to the sum ()
    [n tokens]                    -> gradient of logits (n, V)  -> x weight       rows of grad_hidden (N, D)
    [n tokens]                                                  -> x hidden       added to grad_weight (V, D)

Forward already computes the gradient of the summed loss, while it has the logits. Backward only multiplies this
gradient by the gradient of the loss, a scalar. torch's cross entropy would store several tensors of N x V values, 4 GiB
each in fp32 for 8,192 tokens of Llama 3. This head stores only the n x V values of one chunk, and grad_weight in fp32.
loss.py has the formula. With TP, parallel/tensor_parallel.py gives the head its shard of the vocabulary.

Legend: B batch, S sequence, N = B*S tokens, n tokens of a chunk, D model dim, V vocabulary.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchtitan_lite.model.loss import (
    Formula,
    Vocabulary,
    cross_entropy,
    differentiate_cross_entropy,
    differentiate_formula,
)


class Head(nn.Linear):
    """The output projection with `output.weight` (V, D), and the summed loss in fp32. A model may override `finish`."""

    def __init__(self, dim: int, vocab_size: int):
        super().__init__(dim, vocab_size, bias=False)
        self.chunk_tokens = 0  # tokens per chunk; 0 puts all tokens into one chunk
        self.formula: Formula = cross_entropy  # the formula of training.loss
        self.vocabulary = Vocabulary()  # TP replaces this object

    def forward(self, hidden: Tensor, targets: Tensor | None = None, **fields: Tensor) -> Tensor:
        """Return the logits (B, S, V) of hidden (B, S, D) or, given targets (B, S), the sum of token losses, () fp32.

        The loss is a sum, because ranks and microbatches have different numbers of valid tokens: a mean of means would
        weight tokens unequally. `step.py` divides by the number of valid tokens in the global batch. `fields`: the
        extra fields of the batch, (B, S, ...) each. Without gradients, the loss is always the cross entropy.
        """
        weight = self.weight
        if targets is None:
            return self.finish(F.linear(hidden, weight))
        hidden = hidden.flatten(0, 1)
        targets = targets.flatten()
        fields = {name: field.flatten(0, 1) for name, field in fields.items()}
        if torch.is_grad_enabled():
            return ChunkedLoss.apply(hidden, weight, targets, fields, self)
        total = torch.zeros((), device=hidden.device)
        for some_hidden, some_targets in self.split(hidden, targets):
            logits = self.finish(some_hidden @ weight.t())
            loss, _ = self.differentiate_cross_entropy(logits, some_targets)
            total += loss
        return total

    def finish(self, logits: Tensor) -> Tensor:
        """Return the logits of the model, (..., V). A model with logit softcapping overrides this method."""
        return logits

    def split(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the rows of each chunk."""
        chunk_tokens = self.chunk_tokens or len(tensors[0])
        return zip(*(tensor.split(chunk_tokens) for tensor in tensors), strict=True)

    def differentiate(
        self, logits: Tensor, targets: Tensor, fields: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the summed loss of targets (n,), a () fp32 tensor, and its gradient with respect to logits (n, V).

        May overwrite the logits.
        """
        if self.formula is cross_entropy and type(self).finish is Head.finish:
            return self.differentiate_cross_entropy(logits, targets)
        return differentiate_formula(self.token_losses, logits, targets, fields)

    def differentiate_cross_entropy(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Call `differentiate_cross_entropy` of loss.py. torch.compile replaces this method (compile.components)."""
        return differentiate_cross_entropy(logits, targets, self.vocabulary)

    def token_losses(self, logits: Tensor, targets: Tensor, **fields: Tensor) -> Tensor:
        """Compiled if compile.components has "loss"."""
        return self.formula(self.finish(logits).float(), targets, self.vocabulary, **fields)


class ChunkedLoss(torch.autograd.Function):
    """Runs the loop over all chunks as one autograd function."""

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        fields: dict[str, Tensor],
        head: Head,
    ) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        # fp32, because a sum over many chunks is too inexact in bf16.
        grad_weight = torch.empty_like(weight, dtype=torch.float32)
        beta = 0  # the first chunk overwrites the sum
        chunks = head.split(hidden, targets, grad_hidden, *fields.values())
        for some_hidden, some_targets, some_grad_hidden, *values in chunks:
            logits = some_hidden @ weight.t()
            some_fields = dict(zip(fields, values, strict=True))
            some_loss, grad_logits = head.differentiate(logits, some_targets, some_fields)
            del logits
            total += some_loss
            torch.mm(grad_logits, weight, out=some_grad_hidden)
            add_product(grad_weight, grad_logits.t(), some_hidden, beta)
            beta = 1
            del grad_logits  # free this tensor before allocating the next chunk's logits
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        # not in-place, because this function runs twice if a pipeline schedule splits backward
        grad_hidden, sums = ctx.saved_tensors
        grad_weight = torch.empty_like(sums, dtype=ctx.weight_dtype)
        torch.mul(sums, grad_total, out=grad_weight)  # one kernel scales in fp32, and then casts
        return grad_hidden * grad_total, grad_weight, None, None, None


def add_product(total: Tensor, a: Tensor, b: Tensor, beta: int) -> None:
    """Set `total` (fp32) to beta * total + a @ b in-place. If beta is 0, `total` is not read."""
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=beta)
    elif a.is_cuda:  # the matmul kernel accumulates into fp32; CPUs have no such kernel
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    elif beta:
        total += a @ b
    else:
        total.copy_(a @ b)


def is_tied_inside(part: nn.Module) -> bool:
    """Return whether this model part has an embedding and a head that share a weight. tied_embeddings.py handles
    pipelines."""
    has_both = part.tok_embeddings is not None and part.output is not None
    return has_both and part.model_args.tie_embeddings


def share_embedding(part: nn.Module) -> None:
    """Restore the tie between the weights of the embedding and the head. `parallelize_module` and `to_empty` replace
    the shared tensor by two tensors, with equal placements."""
    if is_tied_inside(part):
        part.output.weight = part.tok_embeddings.weight
