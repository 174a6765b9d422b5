"""The chunked loss gives the plain loss's numbers without storing all logits. test_loss.py: float32, many ranks."""

import math
from unittest.mock import patch

import compare
import pytest
import torch
import torch.nn.functional as F
from measure_memory import count_head_peak_bytes

from torchtitan_lite.model.head import Head
from torchtitan_lite.model.loss import IGNORE_INDEX
from torchtitan_lite.parallel import exchange
from torchtitan_lite.parallel.exchange import Ranks
from torchtitan_lite.parallel.tensor_parallel import SplitVocabulary

ROWS, SEQ_LEN, DIM, VOCAB = 3, 20, 16, 50
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_case(dtype: torch.dtype = torch.float32) -> tuple[Head, torch.Tensor, torch.Tensor]:
    """Return a head, hidden states, and targets. One whole row of targets and a part of another are not counted."""
    generator = torch.Generator().manual_seed(0)
    head = Head(DIM, VOCAB)
    with torch.no_grad():
        head.weight.copy_(torch.randn(VOCAB, DIM, generator=generator))
    hidden = torch.randn(ROWS, SEQ_LEN, DIM, generator=generator).to(dtype)
    targets = torch.randint(VOCAB, (ROWS, SEQ_LEN), generator=generator)
    targets[1] = IGNORE_INDEX
    targets[2, :5] = IGNORE_INDEX
    return head.to(dtype), hidden, targets


def run_head(head: Head, hidden: torch.Tensor, targets: torch.Tensor, chunk_tokens: int) -> Tensors:
    """Return the loss divided by 7, and the gradients of hidden states and weight. chunk_tokens 0: one chunk."""
    head.chunk_tokens = chunk_tokens
    head.weight.grad, hidden = None, hidden.clone().requires_grad_()
    loss = head(hidden, targets) / 7
    loss.backward()
    return loss.detach(), hidden.grad, head.weight.grad


def compute(dtype: torch.dtype, head: Head, hidden: torch.Tensor, targets: torch.Tensor) -> Tensors:
    """Return the same as run_head, by torch's own cross entropy of all logits, with matmuls in `dtype`."""
    weight = head.weight.detach().to(dtype).requires_grad_()
    hidden = hidden.to(dtype, copy=True).requires_grad_()
    logits = (hidden @ weight.t()).flatten(0, 1)
    if dtype != torch.float64:
        logits = logits.float()
    loss = F.cross_entropy(logits, targets.flatten(), reduction="sum") / 7
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("chunk_tokens", [1, 7, 1000])
def test_in_bfloat16_it_errs_no_more_than_torchs_loss(chunk_tokens):
    head, hidden, targets = make_case(torch.bfloat16)
    truth = compute(torch.float64, head, hidden, targets)
    plain = compute(torch.bfloat16, head, hidden, targets)
    chunked = run_head(head, hidden, targets, chunk_tokens)
    assert [value.dtype for value in chunked] == [torch.float32, torch.bfloat16, torch.bfloat16]
    for one, other, true in zip(chunked, plain, truth, strict=True):
        bound = 1.25 * compare.relative_error(other, true) + 1e-6
        assert compare.relative_error(one, true) <= bound


def test_in_bfloat16_a_token_that_is_almost_certain_still_has_a_gradient():
    # The target's probability is 0.9991. bfloat16 would round it to 1, and its gradient, probability - 1, to 0.
    head, hidden, targets = (
        Head(2, 2).bfloat16(),
        torch.tensor([[[7.0, 0.0]]]).bfloat16(),
        torch.tensor([[0]]),
    )
    with torch.no_grad():
        head.weight.copy_(torch.eye(2))
    _, _, gradient = run_head(head, hidden, targets, 1)
    assert (
        compare.relative_error(gradient, compute(torch.float64, head, hidden, targets)[2]) < 2**-7
    )


def test_logits_of_any_size_neither_overflow_nor_vanish():
    head, hidden, targets = make_case()
    sizes = torch.tensor([1e-4, 1.0, 1e4])  # logits up to 1e5; exp(89) is more than fp32 holds
    hidden *= sizes[:, None, None]
    found = run_head(head, hidden, targets, 7)
    expected = compute(torch.float64, head, hidden, targets)
    for value, truth in zip(found, expected, strict=True):
        assert compare.relative_error(value, truth) < 1e-6


def test_totals_of_two_shards_of_any_size_are_combined():
    total = torch.tensor([[-1e4], [1.0], [1e4]])
    ranks = Ranks(0, 2, "tp")
    with patch.object(exchange, "all_gather", lambda own, ranks, dim: torch.cat([own, own])):
        combined = SplitVocabulary(ranks).logsumexp(total)[:, None]
    expected = total.double() + math.log(2)  # two equal shards double the sum
    assert compare.relative_error(combined, expected) < 1e-6


def test_without_a_counted_target_loss_and_gradients_are_zero():
    head, hidden, targets = make_case()
    for value in run_head(head, hidden, torch.full_like(targets, IGNORE_INDEX), 7):
        assert not value.any()  # fails for NaN too


def test_memory_of_the_head_does_not_grow_with_sequence_times_vocabulary():
    sizes = {"dim": 64, "vocab_size": 128256, "chunk_tokens": 512}
    short, long = (count_head_peak_bytes(n_tokens=n, **sizes) for n in (1024, 8192))
    # The gradient of a hidden state is stored twice: as it is computed, and as backward scales it.
    assert 0 <= long - short <= 7168 * 2 * 64 * 4
    assert long < 2 * 512 * 128256 * 4
    whole = count_head_peak_bytes(n_tokens=2048, **sizes | {"chunk_tokens": 0})
    assert count_head_peak_bytes(n_tokens=2048, **sizes) < 0.5 * whole
