"""The plain loop: a simple training loop in one process. Every layout must compute the same.

    model      the user's class on one device; one explicit mask for documents; every expert computes every token
    batch      random tokens; every row masks a different fraction of its targets, and one row masks all
    step       F.cross_entropy, backward, clipping as in torch, optimizer and schedule of the run, on whole tensors

The plain loop shares the model file, the initialization and the optimizer with a run on many ranks. The tests compare
these with transformers and torch. It does not use step.py or the parallelisms.

The steps:

    1  start of the schedule     gradients are clipped to half
    2  peak of the schedule      gradients are not clipped
    3  in the decay              one gradient of the last rank is NaN: the step must be skipped
    4  in the decay              the same with infinity
    5  end of the schedule       gradients are clipped to half
"""

import copy
import math
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite import build
from torchtitan_lite.checkpoint.load import set_step
from torchtitan_lite.components.optim import build_lr_scheduler, build_optimizer
from torchtitan_lite.config.block import Parameter, list_parameters
from torchtitan_lite.config.choices import ATTENTIONS
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.schema import Config, LRScheduler
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.model.head import IGNORE_INDEX, Head
from torchtitan_lite.model.inner_attention import InnerAttention
from torchtitan_lite.model.moe import MoE, list_moes
from torchtitan_lite.parallel.initial_weights import fill_tensor, initialize_weights

CLIPPED, LEFT = 0.5, 2.0  # max_norm of a step, in units of its gradient norm
STEPS = [
    (CLIPPED, 0.0),
    (LEFT, 0.0),
    (LEFT, math.nan),
    (LEFT, math.inf),
    (CLIPPED, 0.0),
]  # (clip, spoiled_by)
TIE = 5e-6  # a smaller margin between the last chosen and the first unchosen expert is a tie: about fifty roundings
DECIDES = 10.0  # a bias larger than every score


@dataclass(frozen=True)
class Inputs:
    """Settings of the batches and of the plain loop."""

    n_steps: int = len(STEPS)
    first_position: int = 0  # row 0 crosses it; later rows are closer to 0
    tokens_per_document: int = 8  # on average, with document attention
    biases_decide: bool = (
        False  # biases choose the same experts for every token, whatever the rounding
    )
    growth: float = 1.0  # factor by which the last rows of each weight grow after each step


@dataclass(frozen=True)
class PlainStep:
    """Inputs and results of one step of the plain loop. Tensors are whole, by FQN."""

    batch: Batch
    position: int  # in the schedule
    max_norm: float
    spoiled_by: float  # NaN or infinity to write into one gradient; 0: none
    weights: dict[str, Tensor]  # before the step, including expert biases
    ties: dict[
        int, tuple[Tensor, Tensor]
    ]  # layer -> scores and chosen experts of tokens with tied scores
    n_tokens: int
    loss: float
    gradients: dict[str, Tensor]  # before clipping, in backward order
    rounding: dict[
        str, float
    ]  # FQN of a norm or bias -> error of its gradient against float64, relative
    norm: float
    rate: float
    loads: dict[int, Tensor]  # layer -> tokens of each expert
    updated: dict[str, Tensor]  # weights after the step
    state: dict[str, dict[str, Tensor]]  # optimizer state after the step: name -> FQN -> tensor


def make_batch(config: Config, seed: int, inputs: Inputs = Inputs()) -> Batch:
    """Draw a global batch. Rows mask 0 to 90 % of their targets, and one row masks all; a single row masks its end.

    Row 0 has the largest positions, because most of its tokens count.
    """
    n_rows, seq_len = config.training.global_batch_size, config.training.seq_len
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(
        resolve_model(config.model).vocab_size, (n_rows, seq_len + 1), generator=generator
    )
    fraction = (
        torch.linspace(0, 0.9, n_rows)[:, None] if n_rows > 1 else torch.linspace(0, 0.9, seq_len)
    )
    masked = torch.rand(n_rows, seq_len, generator=generator) < fraction
    if n_rows > 2:
        masked[1] = True
    positions, documents = (
        torch.arange(seq_len).repeat(n_rows, 1),
        torch.zeros(n_rows, seq_len, dtype=torch.int64),
    )
    if ATTENTIONS[config.model.attention].uses_documents:
        starts = torch.rand(n_rows, seq_len, generator=generator) < 1 / inputs.tokens_per_document
        starts[:, 0] = False
        documents = starts.long().cumsum(1)
        positions -= (positions * starts).cummax(1).values
    positions += find_offsets(n_rows, seq_len, inputs.first_position)
    return Batch(
        tokens[:, :-1].contiguous(),
        tokens[:, 1:].masked_fill(masked, IGNORE_INDEX),
        positions,
        documents,
    )


def find_offsets(n_rows: int, seq_len: int, far: int) -> Tensor:
    """Return what to add to the positions of a batch, (B, S), so that they come close to `far`.

    Attention depends only on differences of positions. So positions that wrap are seen only if the wrap is inside a
    row. Row 0 crosses every power of two from 8,192 to `far`, and `far`. Later rows cross a position closer to 0.
    """
    crossed = [[far * (n_rows - row) // n_rows] for row in range(n_rows)]
    powers = [2**exponent for exponent in range(13, 64) if 2**exponent < far]
    crossed[0] = [*powers, far]
    offsets = torch.zeros(n_rows, seq_len, dtype=torch.int64)
    for row, places in enumerate(crossed):
        edges = [seq_len * number // len(places) for number in range(len(places) + 1)]
        for place, start, end in zip(places, edges[:-1], edges[1:], strict=True):
            offsets[row, start:end] = max(0, place - (start + end) // 2)
    return offsets


def choose_positions(section: LRScheduler) -> list[int]:
    """Return the position of each step in the schedule of the run: start, peak, two in the decay, end."""
    ratio = 1.0 if section.decay_ratio is None else section.decay_ratio
    start = max(section.warmup_steps, section.total_steps - round(ratio * section.total_steps))
    last = section.total_steps - 1
    start = min(start, last)
    places = [
        0,
        section.warmup_steps - 1,
        start + (last - start) // 3,
        start + 2 * (last - start) // 3,
        last,
    ]
    return [min(max(0, place), last) for place in places]


# ---------------------------------------------------------------- the model


def init_leveled(full: Tensor, entry: Parameter, generator: torch.Generator) -> None:
    """Initialize one parameter. Experts are larger and a large embedding smaller, or experts would hardly matter."""
    fill_tensor(full, entry, generator)
    if entry.row.kind == "embedding" and entry.row.start == 1.0:
        full.mul_(0.05)
    if entry.row.kind == "experts":
        dim = full.shape[2] if entry.row.name.endswith("w2") else full.shape[1]
        full.mul_(max(1.0, 50 / math.sqrt(dim)))


class PlainDocuments(InnerAttention):
    """Causal attention within documents, with an explicit mask."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor) -> Tensor:
        causal = torch.ones(doc_ids.shape[1], doc_ids.shape[1], dtype=torch.bool).tril()
        mask = causal & (doc_ids[:, None, :, None] == doc_ids[:, None, None, :])
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


class PlainExperts:
    """Replaces the forward of an MoE: every expert computes every token. The weight of an unchosen expert is 0."""

    def __init__(self, moe: MoE, layer: int, balance_loss: float, *, biases_decide: bool):
        self.moe, self.balance_loss = moe, balance_loss
        self.routes: Tensor | None = None  # of the last forward
        self.given: Tensor | None = None  # routes to take instead of the best
        router = moe.router
        router.reset(torch.device("cpu"))
        n_experts, top_k = router.n_experts, router.args.top_k
        bias = 0.005 * torch.randn(n_experts, generator=torch.Generator().manual_seed(layer))
        if n_experts > top_k:
            bias[layer % n_experts] = -DECIDES  # gets no token
        if n_experts > top_k > 1:
            bias[(layer + 1) % n_experts] = DECIDES  # gets every token
        if biases_decide:
            bias[[(layer + place) % n_experts for place in range(1, top_k + 1)]] = DECIDES
        router.expert_bias.copy_(bias)
        moe.forward = self.forward

    def forward(self, x: Tensor) -> Tensor:
        router, experts, args = self.moe.router, self.moe.experts, self.moe.router.args
        logits = x @ router.weight.t()
        scores = (
            logits.softmax(-1) if args.router_scores == "softmax" else logits.sigmoid()
        )  # (B, S, E)
        ranked = (scores + router.expert_bias).detach().sort(-1, descending=True)
        routes = ranked.indices[..., : args.top_k] if self.given is None else self.given
        self.routes = routes
        self.ties = scores[:0, 0].detach(), routes[:0, 0]
        if args.top_k < args.n_experts:
            is_tie = ranked.values[..., args.top_k - 1] - ranked.values[..., args.top_k] < TIE
            self.ties = scores[is_tie].detach(), routes[is_tie]
        chosen = F.one_hot(routes, args.n_experts).sum(-2)  # (B, S, E)
        weights = scores * chosen
        if args.normalize_top_k:
            weights = weights / weights.sum(-1, keepdim=True)
        tokens = x.flatten(0, 1)[None]  # (1, T, D) times (E, D, F)
        outputs = (F.silu(tokens @ experts.w1) * (tokens @ experts.w3)) @ experts.w2
        self.load = chosen.sum((0, 1))
        fraction = chosen.float().mean(1) * args.n_experts / args.top_k
        probabilities = scores / scores.sum(-1, keepdim=True)
        self.auxiliary = self.balance_loss * (fraction * probabilities.mean(1)).sum(-1).mean()
        return torch.einsum("etd,te->td", outputs, weights.flatten(0, 1)).view_as(x)


class PlainModel:
    """The model with its initial weights, and its MoE layers with the loads and ties of the last forward."""

    def __init__(self, config: Config, *, biases_decide: bool = False):
        args = resolve_model(config.model)
        self.config = config
        self.model = build.find_model_class(args.name)(args, attention=config.model.attention)
        if config.model.attention == "document":
            for name, module in self.model.named_modules():
                if name.endswith("attention"):
                    module.inner = PlainDocuments()
        initialize_weights(self.model, config.debug.seed, fill=init_leveled)
        self.parameters = dict(self.model.named_parameters())
        loss = config.training.expert_balance_loss
        self.experts = {
            n: PlainExperts(m, n, loss, biases_decide=biases_decide)
            for n, m in list_moes(self.model)
        }
        self.biases = {
            f"layers.{n}.feed_forward.router.expert_bias": plain.moe.router.expert_bias
            for n, plain in self.experts.items()
        }

    def copy_weights(self) -> dict[str, Tensor]:
        return {
            fqn: tensor.detach().clone() for fqn, tensor in (self.parameters | self.biases).items()
        }

    def logits(self, batch: Batch) -> Tensor:
        return self.model(batch.tokens, positions=batch.positions, doc_ids=batch.doc_ids)

    def compute_loss(self, batch: Batch) -> Tensor:
        """Return the mean loss over tokens that count, computed here unless the model has a loss of its own."""
        logits, targets = self.logits(batch).flatten(0, 1), batch.targets.flatten()
        if not has_own_loss(self.model):
            return F.cross_entropy(logits.double(), targets)
        counted = targets != IGNORE_INDEX
        of_total, _ = self.model.output.weigh_total(logits.logsumexp(-1))
        of_target = logits.gather(1, targets.where(counted, 0)[:, None])[:, 0]
        return (of_total - of_target)[counted].mean()

    def measure_rounding(
        self, exact: "PlainModel", batch: Batch, gradients: dict[str, Tensor]
    ) -> dict[str, float]:
        """Return FQN -> relative error of the gradient of each norm and bias, against a float64 model, `exact`.

        These gradients are sums over all tokens, whose terms may cancel. Experts are those of the float32 model.
        """
        for fqn, parameter in exact.parameters.items():
            parameter.data.copy_(self.parameters[fqn])
        for layer, experts in exact.experts.items():
            experts.given = self.experts[layer].routes
        _, right = exact.backward(batch)
        errors = {}
        for fqn, entry in list_parameters(resolve_model(self.config.model)).items():
            if entry.is_bias or entry.row.kind == "norm":
                error = (gradients[fqn] - right[fqn]).norm() / right[fqn].norm()
                errors[fqn] = error.item()
        return errors

    def backward(self, batch: Batch) -> tuple[float, dict[str, Tensor]]:
        """Return the mean loss over tokens that count, and the gradients in backward order."""
        gradients: dict[str, Tensor] = {}
        hooks = []
        for fqn, parameter in self.parameters.items():
            parameter.grad = None
            keep = partial(lambda fqn, p: gradients.update({fqn: p.grad}), fqn)
            hooks.append(parameter.register_post_accumulate_grad_hook(keep))
        loss = self.compute_loss(batch)
        (loss + sum(plain.auxiliary for plain in self.experts.values())).backward()
        for hook in hooks:
            hook.remove()
        return loss.item(), {fqn: gradient.clone() for fqn, gradient in gradients.items()}

    @torch.no_grad()
    def move_biases(self) -> None:
        for plain, bias in zip(self.experts.values(), self.biases.values(), strict=True):
            load = plain.load.double()
            bias += self.config.training.expert_bias_rate * torch.sign(load.mean() - load).float()


def has_own_loss(model: nn.Module) -> bool:
    """Whether the head of a model computes another loss than the cross entropy in model/head.py."""
    return type(model.output).weigh_total is not Head.weigh_total


def run_plainly(config: Config, inputs: Inputs) -> list[PlainStep]:
    """Run the plain loop. The parallelism of `config` is ignored."""
    plain, section = PlainModel(config, biases_decide=inputs.biases_decide), config.lr_scheduler
    exact = copy.deepcopy(plain)
    exact.model.double()
    optimizer = build_optimizer(
        replace(config.optimizer, implementation="for-loop"), plain.parameters
    )
    scheduler, steps = build_lr_scheduler(section, optimizer), []
    for number, position in enumerate(choose_positions(section)[: inputs.n_steps]):
        if number:
            set_step(scheduler, position)
        clip, spoiled_by = STEPS[number]
        weights, batch = plain.copy_weights(), make_batch(config, number, inputs)
        loss, gradients = plain.backward(batch)
        rounding = {} if spoiled_by else plain.measure_rounding(exact, batch, gradients)
        norm = math.sqrt(
            sum(gradient.double().square().sum().item() for gradient in gradients.values())
        )
        rate = scheduler.get_last_lr()[0]
        if not spoiled_by:
            for parameter in plain.parameters.values():
                parameter.grad.mul_(min(1.0, clip * norm / (norm + 1e-6)))
            optimizer.step()
            plain.move_biases()
            for parameter in plain.parameters.values():  # later rows grow more
                rows = torch.linspace(1, inputs.growth, len(parameter))
                parameter.data *= rows.view(-1, *[1] * (parameter.dim() - 1))
        of = optimizer.state
        names = {name for state in of.values() for name, value in state.items() if value.dim()}
        steps.append(
            PlainStep(
                batch=batch,
                position=position,
                max_norm=clip * norm,
                spoiled_by=spoiled_by,
                weights=weights,
                ties={layer: experts.ties for layer, experts in plain.experts.items()},
                n_tokens=int((batch.targets != IGNORE_INDEX).sum()),
                loss=loss,
                gradients=gradients,
                rounding=rounding,
                norm=norm,
                rate=rate,
                loads={layer: experts.load for layer, experts in plain.experts.items()},
                updated=plain.copy_weights(),
                state={
                    name: {
                        fqn: of[p][name].clone()
                        for fqn, p in plain.parameters.items()
                        if name in of[p]
                    }
                    for name in names
                },
            )
        )
    return steps
