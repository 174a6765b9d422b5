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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite import build
from torchtitan_lite.checkpoint.load import set_step
from torchtitan_lite.components.optim import build_lr_scheduler, build_optimizer
from torchtitan_lite.config.block import Parameter
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


@dataclass(frozen=True)
class PlainStep:
    """Inputs and results of one step of the plain loop. Tensors are whole, by FQN."""

    batch: Batch
    position: int  # in the schedule
    max_norm: float
    spoiled_by: float  # NaN or infinity to write into one gradient; 0: none
    weights: dict[str, Tensor]  # before the step, including expert biases
    outputs: dict[str, Tensor] | None  # of each module, in forward order; only in the first step
    ties: dict[int, tuple[Tensor, Tensor]]  # layer -> scores and experts of tokens with tied scores
    n_tokens: int
    loss: float
    gradients: dict[str, Tensor]  # before clipping
    rounding: dict[str, float]  # FQN of a norm or bias -> relative error of its gradient
    norm: float
    rate: float
    loads: dict[int, Tensor]  # layer -> tokens of each expert
    updated: dict[str, Tensor]  # weights after the step
    state: dict[str, dict[str, Tensor]]  # optimizer state after the step: name -> FQN -> tensor


def make_batch(config: Config, seed: int, inputs: Inputs = Inputs()) -> Batch:
    """Draw a global batch. Rows mask 0 to 90 % of their targets, and one row masks all; a single row masks its end.

    Row 0 has the largest positions, because most of its tokens count.
    """
    n_rows = config.training.global_batch_size
    seq_len = config.training.seq_len
    has_documents = ATTENTIONS[config.model.attention].uses_documents
    generator = torch.Generator().manual_seed(seed)
    vocab_size = resolve_model(config.model).vocab_size
    tokens = torch.randint(vocab_size, (n_rows, seq_len + 1), generator=generator)
    fraction = torch.linspace(0, 0.9, seq_len)
    if n_rows > 1:
        fraction = torch.linspace(0, 0.9, n_rows)[:, None]
    masked = torch.rand(n_rows, seq_len, generator=generator) < fraction
    if n_rows > 2:
        masked[1] = True
    positions = torch.arange(seq_len).repeat(n_rows, 1)
    documents = torch.zeros_like(positions)
    if has_documents:
        starts = torch.rand(n_rows, seq_len, generator=generator) < 1 / inputs.tokens_per_document
        starts[:, 0] = False
        documents = starts.long().cumsum(1)
        positions -= (positions * starts).cummax(1).values
    positions += find_offsets(positions, inputs.first_position, restarts=has_documents)
    targets = tokens[:, 1:].masked_fill(masked, IGNORE_INDEX)
    return Batch(tokens[:, :-1].contiguous(), targets, positions, documents)


def find_offsets(positions: Tensor, far: int, *, restarts: bool) -> Tensor:
    """Return what to add to the positions of a batch, (B, S), so that they cross `far`.

    Attention depends only on differences of positions. So positions that wrap are seen only if the wrap is inside a
    row. Row 0 crosses every power of two from 8,192 to `far`, and `far`. Later rows cross a position closer to 0.
    `restarts`: each document crosses it between its first and second token.
    """
    n_rows, seq_len = positions.shape
    offsets = torch.zeros_like(positions)
    for row in range(n_rows):
        crossed = [far * (n_rows - row) // n_rows]
        if row == 0:
            powers = [2**exponent for exponent in range(13, 64)]
            crossed = [power for power in powers if power < far] + [far]
        for index, place in enumerate(crossed):
            start = seq_len * index // len(crossed)
            end = seq_len * (index + 1) // len(crossed)
            before = 1 if restarts else (start + end) // 2
            offsets[row, start:end] = max(0, place - before)
    return offsets


def choose_positions(section: LRScheduler) -> list[int]:
    """Return the position of each step in the schedule of the run: start, peak, two in the decay, end."""
    ratio = 1.0 if section.decay_ratio is None else section.decay_ratio
    start = max(section.warmup_steps, section.total_steps - round(ratio * section.total_steps))
    last = section.total_steps - 1
    start = min(start, last)
    length = last - start
    peak = min(max(0, section.warmup_steps - 1), last)
    return [0, peak, start + length // 3, start + 2 * length // 3, last]


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
        router = self.moe.router
        experts = self.moe.experts
        n_experts = router.n_experts
        top_k = router.args.top_k
        logits = x @ router.weight.t()
        scores = logits.sigmoid()  # (B, S, E)
        if router.args.router_scores == "softmax":
            scores = logits.softmax(-1)
        ranked = (scores + router.expert_bias).detach().sort(-1, descending=True)
        routes = self.given
        if routes is None:
            routes = ranked.indices[..., :top_k]
        self.routes = routes
        last_chosen = ranked.values[..., top_k - 1]
        first_unchosen = F.pad(ranked.values, (0, 1), value=-math.inf)[..., top_k]
        is_tie = last_chosen - first_unchosen < TIE
        self.ties = (scores[is_tie].detach(), routes[is_tie])
        chosen = F.one_hot(routes, n_experts).sum(-2)  # (B, S, E)
        weights = scores * chosen
        if router.args.normalize_top_k:
            weights = weights / weights.sum(-1, keepdim=True)
        tokens = x.flatten(0, 1)[None]  # (1, T, D) times (E, D, F)
        gate = F.silu(tokens @ experts.w1)
        outputs = (gate * (tokens @ experts.w3)) @ experts.w2
        self.load = chosen.sum((0, 1))
        fraction = chosen.float().mean(1) * n_experts / top_k
        probabilities = scores / scores.sum(-1, keepdim=True)
        per_sequence = (fraction * probabilities.mean(1)).sum(-1)
        self.auxiliary = self.balance_loss * per_sequence.mean()
        return torch.einsum("etd,te->td", outputs, weights.flatten(0, 1)).view_as(x)


class PlainModel:
    """The model with its initial weights, and its MoE layers with the loads and ties of the last forward."""

    def __init__(self, config: Config, *, biases_decide: bool = False):
        self.config = config
        self.args = resolve_model(config.model)
        model_class = build.find_model_class(self.args.name)
        self.model = model_class(self.args, attention=config.model.attention)
        if config.model.attention == "document":
            for name, module in self.model.named_modules():
                if name.endswith("attention"):
                    module.inner = PlainDocuments()
        initialize_weights(self.model, config.debug.seed, fill=init_leveled)
        self.parameters = dict(self.model.named_parameters())
        self.experts: dict[int, PlainExperts] = {}
        self.biases: dict[str, Tensor] = {}
        for layer, moe in list_moes(self.model):
            loss = config.training.expert_balance_loss
            self.experts[layer] = PlainExperts(moe, layer, loss, biases_decide=biases_decide)
            self.biases[f"layers.{layer}.feed_forward.router.expert_bias"] = moe.router.expert_bias

    def copy_weights(self) -> dict[str, Tensor]:
        tensors = self.parameters | self.biases
        return {fqn: tensor.detach().clone() for fqn, tensor in tensors.items()}

    def backward(
        self, batch: Batch, outputs: dict[str, Tensor] | None = None
    ) -> tuple[float, dict[str, Tensor]]:
        """Return the mean loss over tokens that count, and the gradients.

        The loss is computed here, unless the model has a loss of its own. `outputs` receives the output of each module
        in forward order; for the head, token losses.
        """
        hooks = []
        for name, module in self.model.named_modules():
            if name and outputs is not None:

                def keep(module: nn.Module, args: tuple, output: Tensor, name: str = name) -> None:
                    outputs[name] = output.detach()

                hooks.append(module.register_forward_hook(keep))
        logits = self.model(batch.tokens, positions=batch.positions, doc_ids=batch.doc_ids)
        for hook in hooks:
            hook.remove()
        if outputs is not None:
            losses = F.cross_entropy(logits.transpose(1, 2), batch.targets, reduction="none")
            outputs["output"] = losses.detach()
        logits = logits.flatten(0, 1)
        targets = batch.targets.flatten()
        if has_own_loss(self.model):
            counted = targets != IGNORE_INDEX
            of_total, _ = self.model.output.weigh_total(logits.logsumexp(-1))
            of_target = logits.gather(1, targets.where(counted, 0)[:, None])[:, 0]
            losses = of_total - of_target
            loss = losses[counted].mean()
        else:
            loss = F.cross_entropy(logits.double(), targets)
        total = loss + sum(experts.auxiliary for experts in self.experts.values())
        found = torch.autograd.grad(total, self.parameters.values())
        gradients = [gradient.contiguous() for gradient in found]  # as fused kernels expect
        return loss.item(), dict(zip(self.parameters, gradients, strict=True))

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
        for fqn, gradient in right.items():
            if gradient.dim() == 1:
                errors[fqn] = ((gradients[fqn] - gradient).norm() / gradient.norm()).item()
        return errors

    @torch.no_grad()
    def move_biases(self) -> None:
        for experts in self.experts.values():
            load = experts.load.double()
            direction = torch.sign(load.mean() - load).float()
            experts.moe.router.expert_bias += self.config.training.expert_bias_rate * direction


def has_own_loss(model: nn.Module) -> bool:
    """Whether the head of a model computes another loss than the cross entropy in model/head.py."""
    return type(model.output).weigh_total is not Head.weigh_total


def run_plainly(config: Config, inputs: Inputs) -> list[PlainStep]:
    """Run the plain loop. The parallelism of `config` is ignored."""
    plain = PlainModel(config, biases_decide=inputs.biases_decide)
    exact = copy.deepcopy(plain)
    exact.model.double()
    section = replace(config.optimizer, implementation="for-loop")
    optimizer = build_optimizer(section, plain.parameters)
    scheduler = build_lr_scheduler(config.lr_scheduler, optimizer)
    positions = choose_positions(config.lr_scheduler)
    steps: list[PlainStep] = []
    for number, position in enumerate(positions[: inputs.n_steps]):
        if number:
            set_step(scheduler, position)
        clip, spoiled_by = STEPS[number]
        batch = make_batch(config, number, inputs)
        weights = plain.copy_weights()
        outputs: dict[str, Tensor] | None = None if number else {}
        loss, gradients = plain.backward(batch, outputs)
        ties = {layer: experts.ties for layer, experts in plain.experts.items()}
        loads = {layer: experts.load for layer, experts in plain.experts.items()}
        norm = torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm()
        norm = norm.item()
        rate = scheduler.get_last_lr()[0]
        rounding = {}
        if not spoiled_by:
            rounding = plain.measure_rounding(exact, batch, gradients)
            for fqn, parameter in plain.parameters.items():
                parameter.grad = gradients[fqn] * min(1.0, clip * norm / (norm + 1e-6))
            optimizer.step()
            plain.move_biases()
        steps.append(
            PlainStep(
                batch=batch,
                position=position,
                max_norm=clip * norm,
                spoiled_by=spoiled_by,
                weights=weights,
                outputs=outputs,
                ties=ties,
                n_tokens=int((batch.targets != IGNORE_INDEX).sum()),
                loss=loss,
                gradients=gradients,
                rounding=rounding,
                norm=norm,
                rate=rate,
                loads=loads,
                updated=plain.copy_weights(),
                state=copy_state(optimizer, plain.parameters),
            )
        )
    return steps


def copy_state(
    optimizer: torch.optim.Optimizer, parameters: dict[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """Return name -> FQN -> tensor of the optimizer state, without step counters."""
    copied: dict[str, dict[str, Tensor]] = {}
    for fqn, parameter in parameters.items():
        for name, value in optimizer.state[parameter].items():
            if value.dim():
                copied.setdefault(name, {})[fqn] = value.clone()
    return copied
