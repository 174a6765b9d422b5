"""Run the plain loop: a simple training loop in one process. Every layout must compute the same results as this loop.

    model      the user's class on one device; one explicit mask for documents; every expert computes every token
    batch      random tokens; every row masks a different fraction of its targets, and one row masks all of them
    step       cross entropy, backward, clipping as in torch, optimizer and schedule of the run, all on full tensors

The plain loop shares the model file, the initialization and the optimizer with a run on many ranks. Tests compare the
shared code with transformers and torch. The plain loop does not use step.py or parallel/.

The steps, with their positions in the learning-rate schedule:

    1  start                     gradients are clipped to half of their norm
    2  peak                      gradients are not clipped
    3  two steps before the end  a gradient of the last rank contains NaN, so the step must be skipped
    4  one step before the end   a gradient of the last rank contains infinity, so the step must be skipped
    5  end                       gradients are clipped to half of their norm
    6  end                       only with training.skip_spikes: a gradient has a spike, so the step must be skipped
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim.optimizer import Optimizer

from torchtitan_lite import build
from torchtitan_lite.checkpoint.load import set_step
from torchtitan_lite.components.optim import build_lr_scheduler, build_optimizer, require_gradients
from torchtitan_lite.config.choices import ATTENTIONS
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.config.model import resolve_model
from torchtitan_lite.config.schema import Config, LRScheduler
from torchtitan_lite.extensions.windowed_attention import WindowedAttention
from torchtitan_lite.model.attention import CausalAttention, InnerAttention
from torchtitan_lite.model.batch import Batch, find_fields
from torchtitan_lite.model.document_attention import DocumentAttention
from torchtitan_lite.model.head import Head
from torchtitan_lite.model.loss import (
    IGNORE_INDEX,
    Vocabulary,
    count_valid_tokens,
    find_formula,
)
from torchtitan_lite.model.moe import Experts, MoE, Router, list_moes
from torchtitan_lite.parallel.initial_weights import initialize_weights

SPIKE = 10.0  # size of the spike, in units of the largest norm that training.skip_spikes allows
STEPS = [  # for each step: ratio of max_norm to the gradient norm, and the value to write into one gradient (0: none)
    (0.5, 0.0),
    (2.0, 0.0),
    (2.0, math.nan),
    (2.0, math.inf),
    (0.5, 0.0),
    (2.0, SPIKE),
]
# Experts are tied if the scores of the last chosen and the first unchosen expert differ by less than this number: about
# fifty roundings.
TIE = 5e-6
DECIDES = 10.0  # larger than every score, so the biases choose the experts
# Without this factor, the values of the embedding would be so large that the outputs of layers and the eps of norms
# would have almost no effect. Multiplying by a power of two causes no rounding.
EMBEDDING_SCALE = 1 / 16
FIRST_EXPONENT = 13  # positions around 2**13 = 8,192 and the next six powers of two
N_EXPONENTS = 7


@dataclass(frozen=True)
class PlainStep:
    """Inputs and results of one step of the plain loop. Tensors are full, and keys are FQNs."""

    batch: Batch
    position: int  # in the learning-rate schedule
    max_norm: float
    spoiled_by: float  # NaN, infinity or a spike to write into one gradient, or 0 to write nothing
    weights: dict[str, Tensor]  # weights and expert biases before the step
    # FQN -> output, in the order of forward; the output of the head is the loss of each token
    outputs: dict[str, Tensor]
    # keys whose code is shared by the plain loop and the layout: a fork's loss or attention
    shared: set[str]
    ties: dict[int, tuple[Tensor, Tensor]]  # layer -> scores and experts of tokens with tied scores
    loss: float
    gradients: dict[str, Tensor]  # gradients before clipping, of all parameters that are not frozen
    norm: float
    rates: dict[str, float]  # learning rates of the step
    loads: dict[int, Tensor]  # layer -> number of tokens that each expert gets
    updated: dict[str, Tensor]  # weights after the step
    state: dict[str, dict[str, Tensor]]  # optimizer state after the step: FQN -> name -> tensor


def draw_batch(config: Config, seed: int) -> Batch:
    """Draw a global batch. The fraction of masked targets grows from 0 to 90 % over the batch. Row 1 is fully masked.

    With document attention, documents have two tokens on average in row 0, and eight in the other rows. The first
    positions of a row are small. The rest of the row is cut into pieces, whose positions are raised by 8,192, 16,384,
    and so on up to 524,288. The jumps reveal code that wraps or limits positions.
    """
    n_rows = config.training.global_batch_size
    seq_len = config.training.seq_len
    vocab_size = resolve_model(config.model).vocab_size
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (n_rows, seq_len + 1), generator=generator)
    fraction = torch.linspace(0, 0.9, n_rows * seq_len).view(n_rows, seq_len)
    masked = torch.rand(n_rows, seq_len, generator=generator) < fraction
    if n_rows > 2:
        masked[1] = True
    targets = tokens[:, 1:].masked_fill(masked, IGNORE_INDEX)
    positions = torch.arange(seq_len).repeat(n_rows, 1)
    documents = torch.zeros_like(positions)
    if ATTENTIONS[config.model.attention].uses_documents:
        rate = torch.full((n_rows, 1), 1 / 8)
        rate[0] = 1 / 2
        starts = torch.rand(n_rows, seq_len, generator=generator) < rate
        starts[:, 0] = False
        documents = starts.long().cumsum(1)
        positions -= (positions * starts).cummax(1).values
    _, *pieces = positions.tensor_split(N_EXPONENTS + 1, 1)
    for exponent, piece in enumerate(pieces, FIRST_EXPONENT):
        piece += 2**exponent
    batch = Batch(tokens[:, :-1].contiguous(), targets, positions, documents)
    return batch.with_fields(find_fields(config.training.loss, config.model.name))


def choose_positions(section: LRScheduler) -> list[int]:
    """Return each step's position in the learning-rate schedule: first, peak, the last three, and the last again."""
    last = section.total_steps - 1
    positions = [0, section.warmup_steps - 1, last - 2, last - 1, last, last]
    return [max(0, min(position, last)) for position in positions]


# ---------------------------------------------------------------- the model


class PlainAttention(InnerAttention):
    """Attention with documents, windows and sinks. Uses an explicit mask and a hand-written softmax."""

    def __init__(self, replaced: InnerAttention, *, uses_documents: bool):
        super().__init__()
        self.uses_documents = uses_documents
        self.window: int | None = getattr(replaced, "window", None)
        self.sinks: nn.Module | None = getattr(replaced, "sinks", None)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor) -> Tensor:
        seq_len = query.shape[2]
        mask = torch.ones(seq_len, seq_len, dtype=torch.bool).tril()
        if self.window:
            mask = mask.triu(1 - self.window)
        if self.uses_documents:
            rows = doc_ids[:, None, :, None]
            mask = mask & (rows == rows.mT)
        n_sharing = query.shape[1] // key.shape[1]
        keys = key.repeat_interleave(n_sharing, 1)
        values = value.repeat_interleave(n_sharing, 1)
        scores = query @ keys.mT / math.sqrt(query.shape[-1])
        scores = scores.masked_fill(~mask, -math.inf)
        total = scores.logsumexp(-1)
        if self.sinks is not None:
            total = total.logaddexp(self.sinks.weight[:, None])
        return (scores - total[..., None]).exp() @ values


# attention classes that PlainAttention replaces
MASKED_ATTENTIONS = (DocumentAttention, WindowedAttention)
OF_LOSS = ("forward", "differentiate", "token_losses")  # methods of a head


class PlainExperts:
    """Replaces the forward of an MoE: every expert computes every token, and the weight of an unchosen expert is 0.

    The biases are set so that one expert of every layer gets no tokens. If top_k is at least 2, a second expert of
    every layer gets all tokens. If `biases_decide`, biases choose the same experts for every token, so rounding cannot
    change the choice.
    """

    def __init__(self, moe: MoE, layer: int, *, biases_decide: bool):
        self.moe = moe
        router = moe.router
        top_k = router.args.top_k
        n_decided = top_k if biases_decide else min(1, top_k - 1)
        bias = torch.zeros(router.n_experts)
        bias[0] = -DECIDES
        bias[1 : 1 + n_decided] = DECIDES
        router.expert_bias = bias.roll(layer)
        moe.forward = self.forward

    def forward(self, x: Tensor) -> Tensor:
        router = self.moe.router
        args = router.args
        top_k = args.top_k
        experts = self.moe.experts
        logits = x @ router.weight.t()
        scores = logits.sigmoid()  # (B, S, E)
        if args.router_scores == "softmax":
            scores = logits.softmax(-1)
        biased = (scores + router.expert_bias).detach()
        values, order = biased.sort(-1, descending=True)
        routes = order[..., :top_k]
        last_chosen = values[..., top_k - 1]
        first_left_out = values[..., top_k]
        is_tie = last_chosen - first_left_out < TIE
        self.ties = (scores[is_tie].detach(), routes[is_tie])
        chosen = F.one_hot(routes, router.n_experts).sum(-2)  # (B, S, E)
        weights = scores * chosen
        if args.normalize_top_k:
            weights = weights / weights.sum(-1, keepdim=True)
        tokens = x.flatten(0, 1)  # (T, D) times (E, D, F)
        gate = F.silu(tokens @ experts.w1)
        hidden = gate * (tokens @ experts.w3)
        outputs = hidden @ experts.w2
        self.load = chosen.sum((0, 1))
        fraction = chosen.float().mean(1) * router.n_experts / top_k
        probabilities = scores / scores.sum(-1, keepdim=True)
        per_sequence = (fraction * probabilities.mean(1)).sum(-1)
        self.imbalance = per_sequence.mean()
        self.z_loss = logits.logsumexp(-1).square().mean()
        return torch.einsum("etd,te->td", outputs, weights.flatten(0, 1)).view_as(x)


class PlainModel:
    """The model with its initial weights. The MoE layers store the expert loads and the tied scores of the last
    forward."""

    def __init__(self, config: Config):
        self.section = config.training
        args = resolve_model(config.model)
        model_class = build.find_model_class(args.name)
        self.model = model_class(args, attention=config.model.attention)
        # module -> output in the last forward, in the order of execution
        self.outputs: dict[str, Tensor] = {}
        self.shared: set[str] = set()  # keys whose formula is neither in this file nor in torch
        uses_documents = ATTENTIONS[config.model.attention].uses_documents
        for name, module in self.model.named_modules():
            if name:
                module.register_forward_hook(partial(self.keep_output, name))
            inner = getattr(module, "inner", None)
            if type(inner) in MASKED_ATTENTIONS:
                module.inner = PlainAttention(inner, uses_documents=uses_documents)
            is_attention = isinstance(module, InnerAttention)
            if is_attention and type(module) not in (CausalAttention, PlainAttention):
                self.shared.add("model.attention")
        initialize_weights(self.model, config.debug.seed)
        self.model.tok_embeddings.weight.data *= EMBEDDING_SCALE
        biases_decide = self.section.mixed_precision_param == "bfloat16"
        self.experts: dict[int, PlainExperts] = {}
        for layer, moe in list_moes(self.model):
            for module, known in ((moe, MoE), (moe.router, Router), (moe.experts, Experts)):
                if type(module) is not known:
                    raise UserError(
                        f"layers.{layer} has {type(module).__name__}, but verify only supports {known.__name__}. "
                        f"In {__file__}, add the formula to PlainExperts, and the class to the check above this error."
                    )
            self.experts[layer] = PlainExperts(moe, layer, biases_decide=biases_decide)
        self.parameters = dict(self.model.named_parameters())
        self.model.output.formula = find_formula(self.section.loss)

    def keep_output(self, name: str, module: nn.Module, args: tuple, output: object) -> None:
        if isinstance(output, Tensor):  # a fork's module may return a tuple
            self.outputs[name] = output.detach()

    def backward(self, batch: Batch) -> tuple[float, dict[str, Tensor]]:
        """Return the mean loss over valid tokens, and the gradients.

        torch computes the cross entropy. A loss that is not the cross entropy is computed by its formula, or by the
        model itself if the model has a loss of its own.
        """
        if self.finds_own_loss(batch.take_rows(range(1))):
            self.shared.add("training.loss")
            loss = self.call(batch, targets=batch.targets) / count_valid_tokens(batch.targets)
            del self.outputs["output"]  # the head may have been called several times
        else:
            loss = self.compute_loss(batch)
        total = loss
        for experts in self.experts.values():
            total = total + self.section.expert_balance_loss * experts.imbalance
            total = total + self.section.router_z_loss * experts.z_loss
        trained = {fqn: own for fqn, own in self.parameters.items() if own.requires_grad}
        found = torch.autograd.grad(total, trained.values(), allow_unused=True)
        gradients = dict(zip(trained, found, strict=True))
        require_gradients(gradients)
        # the optimizer's fused kernels need contiguous tensors
        return loss.item(), {fqn: own.contiguous() for fqn, own in gradients.items()}

    def call(self, batch: Batch, **options: Tensor) -> Tensor:
        fields = {"positions": batch.positions, "doc_ids": batch.doc_ids, **batch.extra}
        return self.model(batch.tokens, **fields, **options)

    def finds_own_loss(self, batch: Batch) -> bool:
        """Return whether the model has a loss of its own. For example, a fork may add terms to the loss, or call a
        second head."""
        head = self.model.output
        calls = []
        hook = head.register_forward_hook(lambda *call: calls.append(call[-1]))
        loss = self.call(batch, targets=batch.targets)
        hook.remove()
        own = ["forward" in vars(self.model)]  # replaced by an extension
        own += [getattr(type(head), name) is not getattr(Head, name) for name in OF_LOSS]
        return any(own) or len(calls) != 1 or loss is not calls[0]

    def compute_loss(self, batch: Batch) -> Tensor:
        """Return the mean loss over valid targets, computed from full logits by cross entropy or the run's formula."""
        logits = self.call(batch)
        exact = logits.double().flatten(0, 1)
        targets = batch.targets.flatten()
        if self.section.loss == "cross_entropy":
            losses = F.cross_entropy(exact, targets, ignore_index=IGNORE_INDEX, reduction="none")
        else:
            extra = {name: values.flatten(0, 1) for name, values in batch.extra.items()}
            losses = self.model.output.formula(exact, targets, Vocabulary(), **extra)
        counted = targets != IGNORE_INDEX
        losses = losses.where(counted, 0)
        self.outputs["output"] = losses.detach().view_as(batch.targets)
        return losses.sum() / counted.sum()

    def move_biases(self) -> None:
        for experts in self.experts.values():
            load = experts.load.double()
            direction = torch.sign(load.mean() - load).float()
            experts.moe.router.expert_bias += self.section.expert_bias_rate * direction


def run_plainly(config: Config, n_steps: int) -> list[PlainStep]:
    """Run the first steps of the plain loop. The parallelism of `config` is ignored.

    Raises UserError if the loop diverges, because NaN cannot be compared.
    """
    plain = PlainModel(config)
    optimizer = build_optimizer(
        replace(config.optimizer, implementation="for-loop"), plain.parameters
    )
    scheduler = build_lr_scheduler(config.lr_scheduler, optimizer)
    positions = choose_positions(config.lr_scheduler)
    steps: list[PlainStep] = []
    for number in range(n_steps):
        clip, spoiled_by = STEPS[number]
        if number:
            set_step(scheduler, positions[number])
        batch = draw_batch(config, number)
        weights = copy_tensors(plain.model.state_dict())
        loss, gradients = plain.backward(batch)
        norm = get_total_norm([gradient.double() for gradient in gradients.values()]).item()
        if not math.isfinite(norm):
            raise UserError(f"the gradient norm of step {number + 1} is {norm}. Lower optimizer.lr")
        if spoiled_by == SPIKE:
            spoiled_by = SPIKE * config.training.skip_spikes * norm
        if not spoiled_by:
            for fqn, gradient in gradients.items():
                plain.parameters[fqn].grad = gradient * min(1.0, clip * norm / (norm + 1e-6))
            optimizer.step()
            plain.move_biases()
        state = {fqn: copy_tensors(optimizer.state[own]) for fqn, own in plain.parameters.items()}
        steps.append(
            PlainStep(
                batch=batch,
                position=positions[number],
                max_norm=clip * norm,
                spoiled_by=spoiled_by,
                weights=weights,
                outputs=dict(plain.outputs),
                shared=plain.shared,
                ties={layer: experts.ties for layer, experts in plain.experts.items()},
                loss=loss,
                gradients=gradients,
                norm=norm,
                rates=list_used_rates(optimizer),
                loads={layer: experts.load for layer, experts in plain.experts.items()},
                updated=copy_tensors(plain.model.state_dict()),
                state=state,
            )
        )
    return steps


def list_used_rates(optimizer: Optimizer) -> dict[str, float]:
    """Return a dict mapping each FQN to the learning rate that the optimizer uses now."""
    rates = {}
    for group in optimizer.param_groups:
        rates |= dict.fromkeys(group["param_names"], group["lr"])
    return rates


def copy_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the tensors. Scalars, which are an optimizer's step counters, are left out."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items() if tensor.dim()}
