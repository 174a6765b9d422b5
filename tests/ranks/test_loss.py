"""Test losses that are written as formulas: in chunks and over shards of the vocabulary, their values and gradients
equal torch's.

test_costs.py tests their memory."""

import pytest
import torch
import torch.nn.functional as F
from compare import local, relative_error
from marks import each_row
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from torchtitan_lite.config.messages import UserError
from torchtitan_lite.model.head import Head
from torchtitan_lite.model.loss import IGNORE_INDEX, cross_entropy
from torchtitan_lite.parallel.fsdp import gather_plain
from torchtitan_lite.parallel.tensor_parallel import SplitHead

DIM = 16
VOCAB = 24
ROWS = 3
SEQ_LEN = 10


def z_loss(logits, targets, vocabulary):
    log_total = vocabulary.logsumexp(logits)
    return log_total - vocabulary.target_logit(logits, targets) + 0.1 * log_total.square()


def distilled(logits, targets, vocabulary, teacher):
    """Return the cross entropy with the probabilities of a teacher. The teacher's logits (n, V) come with the batch."""
    width = logits.shape[1]
    begin = vocabulary.shard * width
    probabilities = teacher.softmax(1)[:, begin : begin + width]
    return vocabulary.logsumexp(logits) - vocabulary.sum(probabilities * logits)


def averaged(logits, targets, vocabulary):
    return logits.mean()


class CappedHead(Head):
    def finish(self, logits):
        return 3 * torch.tanh(logits / 3)


Case = tuple[torch.Tensor, ...]  # weight, hidden, targets, a teacher's logits


def make_case(dtype: torch.dtype = torch.float32, vocab_size: int = VOCAB) -> Case:
    """Make a case in which some targets are not counted."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocab_size, DIM, generator=generator).to(dtype)
    hidden = torch.randn(ROWS, SEQ_LEN, DIM, generator=generator).to(dtype)
    targets = torch.randint(vocab_size, (ROWS, SEQ_LEN), generator=generator)
    targets[1] = IGNORE_INDEX
    targets[2, :3] = IGNORE_INDEX
    teacher = torch.randn(ROWS, SEQ_LEN, vocab_size, generator=generator)
    return weight, hidden, targets, teacher


def compute(
    name: str, case: Case, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss divided by 7 and the gradients of hidden and weight, with torch's own functions of all logits.

    `dtype`: the dtype of the matmuls.
    """
    weight, hidden, targets, *others = case
    weight = weight.to(dtype, copy=True).requires_grad_()
    hidden = hidden.to(dtype, copy=True).requires_grad_()
    logits = (hidden @ weight.t()).flatten(0, 1)
    if dtype != torch.float64:
        logits = logits.float()
    targets = targets.flatten()
    if name == "softcap":
        logits = 3 * torch.tanh(logits / 3)
    losses = F.cross_entropy(logits, targets, reduction="none")
    if name == "z_loss":
        counted = targets != IGNORE_INDEX
        losses = losses + 0.1 * logits.exp().sum(1).log().square() * counted
    if name == "distilled":
        probabilities = others[0].double().softmax(-1).flatten(0, 1)
        losses = F.cross_entropy(logits, probabilities, reduction="none")
        losses = losses[targets != IGNORE_INDEX]
    loss = losses.sum() / 7
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


def run_head(
    case: Case, chunk_tokens: int, name: str = "cross_entropy", rank: int = 0, world_size: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss divided by 7, and the gradients of this tp rank's hidden states and rows of the weight."""
    weight, hidden, targets, *others = case
    sizes = reversed(weight.shape)
    head = CappedHead(*sizes) if name == "softcap" else Head(*sizes)
    head.formula = globals().get(name, cross_entropy)
    head.chunk_tokens = chunk_tokens
    head.weight = nn.Parameter(weight)
    extra = {"teacher": others[0]} if name == "distilled" else {}
    if world_size > 1:
        mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp_shard", "tp"))
        parallelize_module(head, mesh["tp"], SplitHead())
        fully_shard(head, mesh=mesh["dp_shard"])
        gather_plain(head)
    hidden = hidden.chunk(world_size, 1)[rank].clone().requires_grad_()
    loss = head(hidden, targets, **extra) / 7
    loss.backward()
    return loss.detach(), hidden.grad, local(head.weight.grad)


def run_formula(rank: int, world_size: int, name: str, chunk_tokens: int) -> list[float]:
    """Worker: return the errors of loss, gradient of hidden and gradient of weight on a tp rank."""
    name, _, vocab_size = name.partition(" of ")
    weight, hidden, *others = make_case(vocab_size=int(vocab_size or VOCAB))
    # some logits are up to 1e5, and others up to 1e-3; exp(89) overflows in fp32
    if name.startswith(LARGE):
        hidden *= torch.tensor([1e-4, 1.0, 1e4])[:, None, None]
        name = name.removeprefix(LARGE)
    case = weight, hidden, *others
    found = run_head(case, chunk_tokens, name, rank, world_size)
    loss, of_hidden, of_weight = compute(name, case)
    own_hidden = of_hidden.chunk(world_size, 1)[rank]
    own_weight = of_weight.chunk(world_size)[rank]
    pairs = zip(found, (loss, own_hidden, own_weight), strict=True)
    return [relative_error(*pair) for pair in pairs]


LARGE = "large "
NAMES = "cross_entropy z_loss distilled softcap".split()
NAMES += [f"{LARGE}cross_entropy", f"{LARGE}distilled"]
CASES = [(name, *case) for name in NAMES for case in ((1, 0), (1, 7), (2, 7))]
CASES += [("cross_entropy", 1, n) for n in (1, SEQ_LEN, ROWS * SEQ_LEN, 1000)]
CASES.append((f"cross_entropy of {2**17}", 2, 0))  # a shard has more ids than 16 bits can hold


@each_row("name, n_ranks, chunk_tokens", CASES)
def test_a_loss_formula_in_chunks_equals_torchs_loss_on_all_logits(
    pool, name, n_ranks, chunk_tokens
):
    for errors in pool.run(run_formula, n_ranks, name, chunk_tokens):
        assert max(errors) < 1e-6, errors


def test_a_loss_formula_that_returns_no_loss_per_token_is_refused():
    with pytest.raises(UserError, match=r"returned losses of shape \(\) for targets of shape \("):
        run_head(make_case(), 7, "averaged")


# ---------------------------------------------------------------- numbers


@each_row("chunk_tokens", [1, 7, 1000])
def test_in_bfloat16_the_error_of_the_loss_is_at_most_that_of_torchs_loss(chunk_tokens):
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


def test_without_a_counted_target_loss_and_gradients_are_zero():
    weight, hidden, targets, *_ = make_case()
    for value in run_head((weight, hidden, torch.full_like(targets, IGNORE_INDEX)), 7):
        assert not value.any()  # fails for NaN too
