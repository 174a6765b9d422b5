"""What a run of train.py has to do, computed by one process in plain torch: batches, rates, losses, weights.

    batches       the order of the samples is sampler.py's; the rows are cut from documents that the trial has written
    rates         the learning rate of each step, by its formula
    steps         one backward over all rows; norm, clipping, SGD or AdamW in float64
    validation    the held-out samples one by one, without padding

It shares the model file, the rule of the initial weights and the order of the samples with train.py, nothing else.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.config.schema import Config, LRScheduler, Optimizer
from torchtitan_lite.data.dataset import Batch
from torchtitan_lite.data.sampler import Sampler
from torchtitan_lite.model.head import IGNORE_INDEX
from torchtitan_lite.verify.reference import WIDE, build_model
from torchtitan_lite.verify.train_corpus import BEGIN, Text, cut_batch

State = dict[str, dict[str, Tensor]]  # "weight", or the name of a moment -> FQN -> full tensor


@dataclass(frozen=True)
class Expected:
    """Of lists, step n is number n - 1; there is one batch more than steps."""

    batches: list[Batch]  # global
    rates: list[float]
    losses: list[float]
    grad_norms: list[float]
    validation: dict[int, dict[str, float]]  # step -> what `validate` must return after it
    states: dict[int, State]  # after a step; 0: before the first one


def run_reference(
    config: Config,
    train: Sequence[Text],
    held_out: Sequence[Text],
    *,
    kept: Collection[int],
    validated: Collection[int],
) -> Expected:
    """Trains in this process to the last step whose state is `kept`.

    `config` has every size; its layout is not looked at.
    """
    n_steps = max(kept)
    model = build_model(config, WIDE)
    parameters = dict(model.named_parameters())
    optimizer = PlainOptimizer(parameters, config.optimizer)
    batches = [read_batch(config, train, step) for step in range(n_steps + 1)]
    expected = Expected(batches, [], [], [], {}, {0: optimizer.copy_state(with_moments=False)})
    for step, batch in enumerate(batches[:n_steps]):
        model.zero_grad()
        logits = model(batch.tokens, positions=batch.positions, doc_ids=batch.doc_ids)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())  # the mean over counted tokens
        loss.backward()
        expected.rates.append(config.optimizer.lr * compute_factor(config.lr_scheduler, step))
        expected.losses.append(loss.item())
        expected.grad_norms.append(optimizer.step(expected.rates[-1], config.training.max_norm))
        if step + 1 in kept:
            expected.states[step + 1] = optimizer.copy_state()
        if step + 1 in validated:
            expected.validation[step + 1] = validate_plainly(model, config, held_out)
    return expected


def read_batch(config: Config, texts: Sequence[Text], step: int) -> Batch:
    """The global batch of `step`, counted from 0."""
    training = config.training
    n_samples = [text.count_samples(training.seq_len) for text in texts]
    draws = Sampler(n_samples, weights=training.dataset_weights, seed=config.debug.seed)
    first = step * training.global_batch_size
    samples = draws.choose(torch.arange(first, first + training.global_batch_size))
    return cut_batch(texts, samples, training.seq_len, restart_positions=config.model.attention == "document")


def compute_factor(section: LRScheduler, step: int) -> float:
    """Share of the peak learning rate at `step`, counted from 0. `total_steps` is given."""
    total, warmup = section.total_steps, section.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    n_decaying = total if section.decay_ratio is None else round(section.decay_ratio * total)
    start = max(warmup, total - n_decaying)
    progress = min(max(step - start, 0) / max(total - start, 1), 1)
    left = {"linear": 1 - progress, "sqrt": 1 - progress**0.5, "cosine": math.cos(math.pi * progress / 2) ** 2}
    return 1 - (1 - section.min_lr_factor) * (1 - left[section.decay_type])


@torch.no_grad()
def validate_plainly(model: nn.Module, config: Config, texts: Sequence[Text]) -> dict[str, float]:
    """The mean loss of all counted held-out tokens, its perplexity, and bits per byte of text."""
    seq_len = config.training.seq_len
    samples = [(n, sample) for n, text in enumerate(texts) for sample in range(text.count_samples(seq_len))]
    batch = cut_batch(texts, samples, seq_len, restart_positions=config.model.attention == "document")
    logits = model(batch.tokens, positions=batch.positions, doc_ids=batch.doc_ids)
    counted = batch.targets != IGNORE_INDEX
    losses = F.cross_entropy(logits[counted].double(), batch.targets[counted], reduction="none")
    n_bytes = (batch.targets[counted] < BEGIN).sum().item()  # a token is a byte of text, or none
    return {
        "val_loss": losses.mean().item(),
        "val_perplexity": math.exp(losses.mean().item()),
        "val_bits_per_byte": losses.sum().item() / math.log(2) / n_bytes,
    }


class PlainOptimizer:
    """SGD, or AdamW with decoupled weight decay (arXiv:1711.05101), in float64; the model computes with fp32 copies."""

    def __init__(self, parameters: dict[str, Tensor], section: Optimizer):
        self.parameters, self.section, self.n_steps = parameters, section, 0
        self.weights = {fqn: parameter.detach().double() for fqn, parameter in parameters.items()}
        self.moments: State = {}
        if section.name == "AdamW":
            zeros = ("exp_avg", "exp_avg_sq")
            self.moments = {name: {fqn: torch.zeros_like(w) for fqn, w in self.weights.items()} for name in zeros}

    def copy_state(self, *, with_moments: bool = True) -> State:
        """Weights and moments as they are now, fp32. A run makes its moments in the first step."""
        state = {"weight": self.weights, **(self.moments if with_moments else {})}
        return {name: {fqn: tensor.float() for fqn, tensor in of_all.items()} for name, of_all in state.items()}

    @torch.no_grad()
    def step(self, rate: float, max_norm: float) -> float:
        """Clips, and updates the weights. Returns the gradient norm before."""
        gradients = {fqn: parameter.grad.double() for fqn, parameter in self.parameters.items()}
        norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients.values()))
        self.n_steps += 1
        for fqn, weight in self.weights.items():
            gradient = gradients[fqn] * min(1.0, max_norm / (norm + 1e-6))
            if self.moments:
                weight *= 1 - rate * self.section.weight_decay
                weight -= rate * self.advance_moments(fqn, gradient)
            else:
                weight -= rate * (gradient + self.section.weight_decay * weight)
            self.parameters[fqn].copy_(weight)
        return norm

    def advance_moments(self, fqn: str, gradient: Tensor) -> Tensor:
        """The direction of AdamW's step."""
        beta1, beta2 = self.section.beta1, self.section.beta2
        first, second = self.moments["exp_avg"][fqn], self.moments["exp_avg_sq"][fqn]
        first += (1 - beta1) * (gradient - first)
        second += (1 - beta2) * (gradient.square() - second)
        root = (second / (1 - beta2**self.n_steps)).sqrt()
        return first / (1 - beta1**self.n_steps) / (root + self.section.eps)
