"""The chunked loss gives the same numbers as the plain loss. See also test_loss.py, and test_costs.py for memory."""

import math
from unittest.mock import patch

import pytest
import torch
from compare import relative_error
from test_loss import Case, compute, make_case
from torch import nn

from torchtitan_lite.model.head import Head
from torchtitan_lite.model.loss import IGNORE_INDEX
from torchtitan_lite.parallel import exchange
from torchtitan_lite.parallel.exchange import Ranks
from torchtitan_lite.parallel.tensor_parallel import SplitVocabulary


def run_head(case: Case, chunk_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss divided by 7, and the gradients of hidden states and weight."""
    weight, hidden, targets, *_ = case
    head = Head(*reversed(weight.shape))
    head.weight = nn.Parameter(weight)
    head.chunk_tokens = chunk_tokens
    hidden = hidden.clone().requires_grad_()
    loss = head(hidden, targets) / 7
    loss.backward()
    return loss.detach(), hidden.grad, head.weight.grad


@pytest.mark.parametrize("chunk_tokens", [1, 7, 1000])
def test_in_bfloat16_it_errs_no_more_than_torchs_loss(chunk_tokens):
    case = make_case(torch.bfloat16)
    truth = compute("cross_entropy", case)
    plain = compute("cross_entropy", case, torch.bfloat16)
    chunked = run_head(case, chunk_tokens)
    assert [value.dtype for value in chunked] == [torch.float32, torch.bfloat16, torch.bfloat16]
    for one, other, true in zip(chunked, plain, truth, strict=True):
        assert relative_error(one, true) <= 1.25 * relative_error(other, true) + 1e-6


def test_in_bfloat16_a_token_that_is_almost_certain_still_has_a_gradient():
    # The target's probability is 0.9991. bfloat16 would round it to 1, and its gradient, probability - 1, to 0.
    hidden = torch.tensor([[[7.0, 0.0]]])
    case = torch.eye(2).bfloat16(), hidden.bfloat16(), torch.tensor([[0]])
    expected = compute("cross_entropy", case)
    assert relative_error(run_head(case, 1)[2], expected[2]) < 2**-7


def test_logits_of_any_size_neither_overflow_nor_vanish():
    weight, hidden, targets, *_ = make_case()
    sizes = torch.tensor([1e-4, 1.0, 1e4])  # logits up to 1e5; exp(89) is more than fp32 holds
    case = weight, hidden * sizes[:, None, None], targets
    found = run_head(case, 7)
    for value, truth in zip(found, compute("cross_entropy", case), strict=True):
        assert relative_error(value, truth) < 1e-6


def test_totals_of_two_shards_of_any_size_are_combined():
    total = torch.tensor([[-1e4], [1.0], [1e4]])
    ranks = Ranks(0, 2, "tp")
    with patch.object(exchange, "all_gather", lambda own, ranks, dim: torch.cat([own, own])):
        combined = SplitVocabulary(ranks).logsumexp(total)[:, None]
    expected = total.double() + math.log(2)  # two equal shards double the sum
    assert relative_error(combined, expected) < 1e-6


def test_without_a_counted_target_loss_and_gradients_are_zero():
    weight, hidden, targets, *_ = make_case()
    for value in run_head((weight, hidden, torch.full_like(targets, IGNORE_INDEX)), 7):
        assert not value.any()  # fails for NaN too
