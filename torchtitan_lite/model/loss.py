"""Compute the loss of tokens from their logits: a formula, and its reductions over the vocabulary.

A formula (training.loss) takes logits (n, V) in fp32, targets (n,) and a Vocabulary, and returns token losses (n,):

    def z_loss(logits, targets, vocabulary):
        log_total = vocabulary.logsumexp(logits)
        return log_total - vocabulary.target_logit(logits, targets) + 1e-4 * log_total.square()

A formula needs no derivative, because autograd differentiates it, one chunk of tokens at a time (head.py). Under TP, a
rank has V/tp of the logits, so a formula may reduce over the vocabulary only with the methods of Vocabulary.
Batch.fields are passed as keyword arguments. The default formula, cross entropy, also has a gradient in closed form,
which stores a quarter of the values that autograd would store.

Legend: n tokens of a chunk, V vocabulary, V/tp logits of a rank.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from torchtitan_lite.config.choices import LOSSES
from torchtitan_lite.config.extensions import find_code
from torchtitan_lite.config.messages import UserError

IGNORE_INDEX = -100  # a target that counts neither in the loss nor in the number of tokens

Formula = Callable[..., Tensor]


def count_valid_tokens(targets: Tensor) -> Tensor:
    """Count the valid targets, () int64 on the device of `targets`."""
    return torch.count_nonzero(targets != IGNORE_INDEX)


class Vocabulary:
    """Differentiable reductions over the vocabulary. TP replaces this class with SplitVocabulary, with one shard per
    rank."""

    shard = 0  # index of this rank's shard of the vocabulary, among shards of equal size

    def gather(self, own: Tensor) -> Tensor:
        """Stack the results of all shards, (...) -> (shards, ...). Every rank gets the same stack."""
        return own[None]

    def find(self, targets: Tensor, n_columns: int) -> tuple[Tensor, Tensor]:
        """Return the column of each target (n,) in this shard, and a mask of the targets in this shard, (n, 1) each."""
        column = (targets - self.shard * n_columns)[:, None]
        # False for IGNORE_INDEX, which is negative
        is_here = (column >= 0) & (column < n_columns)
        return column.where(is_here, 0), is_here

    def logsumexp(self, logits: Tensor) -> Tensor:
        """Return the logsumexp over the vocabulary, (n,), of logits (n, V/tp)."""
        return self.gather(logits.logsumexp(1)).logsumexp(0)

    def target_logit(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the logit of each target, (n,), from logits (n, V/tp). Zero for IGNORE_INDEX."""
        column, is_here = self.find(targets, logits.shape[1])
        own = logits.gather(1, column).where(is_here, 0)
        return self.gather(own.squeeze(1)).sum(0)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the vocabulary, (n,), of values (n, V/tp)."""
        return self.gather(values.sum(1)).sum(0)


def cross_entropy(logits: Tensor, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return the negative log-probability of each target, (n,)."""
    return vocabulary.logsumexp(logits) - vocabulary.target_logit(logits, targets)


def find_formula(name: str) -> Formula:
    """Return the formula of a row of LOSSES in config/choices.py."""
    return find_code(LOSSES[name].extension, name, __name__)


def differentiate_formula(
    token_losses: Callable[..., Tensor],
    logits: Tensor,
    targets: Tensor,
    fields: dict[str, Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of targets (n,), a () fp32 tensor, and its gradient with respect to logits (n, V/tp)."""
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        losses = token_losses(leaf, targets, **fields)
        if losses.shape != targets.shape:
            why = f"the formula of training.loss returned losses of shape {tuple(losses.shape)}"
            raise UserError(
                f"{why} for targets of shape {tuple(targets.shape)}. Return one loss per target"
            )
        loss = losses.where(targets != IGNORE_INDEX, 0).sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def differentiate_cross_entropy(
    logits: Tensor, targets: Tensor, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor]:
    """Like `differentiate_formula`, but for the cross entropy, in closed form. Overwrites the logits."""
    column, is_here = vocabulary.find(targets, logits.shape[1])
    counted = targets[:, None] != IGNORE_INDEX

    values = logits.float()
    of_target = values.gather(1, column)  # (n, 1), like all per-token values below
    of_target = of_target.where(is_here, 0)
    largest = values.amax(1, keepdim=True)
    values.sub_(largest)
    values.exp_()
    total = values.sum(1, keepdim=True)
    log_total = largest + total.log()
    both = torch.stack((log_total, of_target))
    log_totals, of_targets = vocabulary.gather(both).unbind(1)  # (shards, n, 1) each
    log_total = log_totals.logsumexp(0)
    token_losses = log_total - of_targets.sum(0)
    loss = token_losses.where(counted, 0).sum()

    normalizer = (largest - log_total).exp()
    values.mul_(normalizer * counted)  # probabilities
    at_target = values.gather(1, column) - is_here.float()
    # cast before the scatter: otherwise compiled code would store all fp32 values
    gradient = values.to(logits.dtype)
    gradient.scatter_(1, column, at_target.to(gradient.dtype))
    return loss, gradient
