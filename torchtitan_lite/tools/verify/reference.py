"""The one process beside which a layout is run: plain torch, the whole batch, no ranks.

    model       the user's own class, on one device; document attention by one explicit mask
    batch       random tokens, of which 100 to 10 % count from row to row, and in one row none
    step        one backward over all rows; loss and norm in float64, clipping and SGD by step_formulas.py
    experts     step_formulas.py: each of them computes all tokens; the routes are recorded

What it shares with a run on many ranks is the model file and the rule of the initial weights, nothing else.
"""

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite import build
from torchtitan_lite.config.choices import ATTENTIONS
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.schema import Config
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.model.head import IGNORE_INDEX
from torchtitan_lite.parallel.initial_weights import initialize_weights
from torchtitan_lite.tools.verify.small_runs import WIDE, Method
from torchtitan_lite.tools.verify.step_formulas import (
    ExpertRecord,
    PlainMoEs,
    compute_clip_scale,
    draw_biases,
    move_sgd,
)

BLOCK = 1_000_003  # numbers; a prime, so that no two rows of a matrix are equal
EMBEDDING_SCALE = 0.05  # of numbers of 1; trained embeddings have 0.02 or so
NEVER_CLIPPED = 1e4  # no gradient norm of the second step is that many times max_norm


def make_batch(config: Config, step: int, method: Method = WIDE) -> Batch:
    """Return a global batch of random tokens. 0 to 90 % of the targets are not counted, by row; in one row none is.

    Of a single row, ever fewer targets are counted along the sequence. With documents, a new one starts at about every
    `tokens_per_document`-th token, at other places in each row, and its positions restart where the row's do.
    """
    n_rows, seq_len = config.training.global_batch_size, config.training.seq_len
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(resolve_model(config.model).vocab_size, (n_rows, seq_len + 1), generator=generator)
    masked_fraction = torch.linspace(0, 0.9, n_rows)[:, None] if n_rows > 1 else torch.linspace(0, 0.9, seq_len)
    masked = torch.rand(n_rows, seq_len, generator=generator) < masked_fraction
    if n_rows > 2:
        masked[1] = True
    targets = tokens[:, 1:].masked_fill(masked, IGNORE_INDEX)
    positions = torch.arange(seq_len).expand(n_rows, -1).contiguous()
    doc_ids = torch.zeros_like(targets)
    if ATTENTIONS[config.model.attention].uses_documents:
        starts = torch.rand(n_rows, seq_len, generator=generator) < 1 / method.tokens_per_document
        starts[:, 0] = False
        doc_ids = starts.long().cumsum(1)
        positions = positions - (positions * starts).cummax(1).values
    # Row 0 counts most, so it is the one with the farthest positions.
    first_positions = torch.tensor([method.farthest_position * (n_rows - row) // n_rows for row in range(n_rows)])
    return Batch(tokens[:, :-1].contiguous(), targets, positions + first_positions[:, None], doc_ids)


def choose_max_norm(config: Config, step: int) -> float:
    """Return the gradient norm above which a step is clipped: so low that the first one is, and the second is not."""
    return config.training.max_norm * (1 if step == 0 else NEVER_CLIPPED)


def choose_model(config: Config, method: Method) -> tuple[type[nn.Module], Callable]:
    """Return the user's class and its rule of the initial weights, changed as `method` says."""
    model_class, init_parameter = build.MODELS[config.model.name]
    if method.levels_weights:
        init_parameter = partial(level_weights, init_parameter)
    return model_class, partial(repeat_block, init_parameter) if method.repeats_weights else init_parameter


def level_weights(
    init_parameter: Callable, fqn: str, full: Tensor, args: ModelArgs, generator: torch.Generator
) -> None:
    """Fill the full tensor of one parameter in place; experts of narrow models are larger, the embedding is smaller.

    Without that, experts made 1e-5 of the norm of all gradients at dim 32: a norm that forgets them would be right. And
    beside an embedding of 1 nothing shows what blocks add, nor which eps a norm has.
    """
    init_parameter(fqn, full, args, generator)
    if fqn == "tok_embeddings.weight" and not args.tie_embeddings:
        full.mul_(EMBEDDING_SCALE)
    if full.dim() == 3:
        full.mul_(max(1.0, 50 / math.sqrt(args.dim)))  # from 0.02 to 1 / sqrt(dim)


def repeat_block(init_parameter: Callable, fqn: str, full: Tensor, args: ModelArgs, generator: torch.Generator) -> None:
    """Fill the full tensor of one parameter in place, ten times as fast where it is many times BLOCK."""
    if full.numel() <= BLOCK:
        init_parameter(fqn, full, args, generator)
        return
    n_rows = -(-BLOCK // full[0].numel())
    rows = full.new_empty(n_rows, *full.shape[1:])
    init_parameter(fqn, rows, args, generator)
    block, numbers = rows.flatten()[:BLOCK], full.view(-1)
    n_whole = len(numbers) // BLOCK * BLOCK
    numbers[:n_whole].view(-1, BLOCK).copy_(block)
    numbers[n_whole:].copy_(block[: len(numbers) - n_whole])


@dataclass
class ReferenceRun:
    """Numbers that one process computed."""

    method: Method
    initial: dict[str, Tensor]  # in the order of the model
    outputs: dict[str, Tensor]  # of modules, first batch, in forward order; of the head: the loss of each token (B, S)
    n_tokens: int  # counted in the first batch
    gradients: dict[str, Tensor]  # of the first batch, before clipping, in backward order
    weights: dict[str, Tensor]  # after the last step; none without updates
    losses: list[float]
    grad_norms: list[float]
    inputs: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # module -> argument -> value, as `outputs`
    experts: ExpertRecord | None = None  # None: the model has none

    def make_batch(self, config: Config, step: int) -> Batch:
        """Return the global batch of `step` with the routes that this process took."""
        batch = make_batch(config, step, self.method)
        return replace(batch, routes=self.experts.routes[step]) if self.experts else batch


def load_reference(path: str) -> ReferenceRun:
    """Read a reference from its file, whose tensors stay on disk until they are used."""
    return torch.load(path, weights_only=False, mmap=True)


def build_model(config: Config, method: Method) -> nn.Module:
    """Return the user's model with its initial weights; "document" attention is replaced by an explicit mask.

    What has experts is for PlainMoEs to replace.
    """
    model_class, init_parameter = choose_model(config, method)
    model = model_class(resolve_model(config.model), attention=config.model.attention)
    if config.model.attention == "document":
        for name, module in model.named_modules():
            if name.endswith("attention"):
                module.inner = PlainDocumentAttention()
    initialize_weights(model, init_parameter, config.debug.seed)
    return model


def run_one_process(config: Config, method: Method = WIDE) -> ReferenceRun:
    """Run the reference. `config` gives model, batch, seed, clipping and SGD; its layout is not looked at."""
    model = build_model(config, method)
    parameters = dict(model.named_parameters())
    initial = {fqn: parameter.detach() for fqn, parameter in parameters.items()}
    if method.updates:
        initial = {fqn: parameter.clone() for fqn, parameter in initial.items()}
    moes = PlainMoEs(model, config.training, biases=draw_biases(model.model_args))
    reference = ReferenceRun(method, initial, {}, 0, {}, {}, [], [], experts=moes.recorded)
    hooks = record_first_backward(model, reference)
    for step in range(method.n_steps):
        batch = make_batch(config, step, method)
        logits, loss = compute_gradients(model, moes, batch)
        if step == 0:
            reference.n_tokens = int((batch.targets != IGNORE_INDEX).sum())
            token_losses = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
            heads = [name for name, output in reference.outputs.items() if output.data_ptr() == logits.data_ptr()]
            reference.outputs |= dict.fromkeys(heads, token_losses.view_as(batch.targets))
            for hook in hooks:
                hook.remove()
        reference.losses.append(loss)
        reference.grad_norms.append(measure_norm(parameter.grad for parameter in parameters.values()))
        if method.updates:
            scale = compute_clip_scale(reference.grad_norms[step], choose_max_norm(config, step))
            with torch.no_grad():
                for parameter in parameters.values():
                    weight, gradient = parameter.double(), scale * parameter.grad.double()
                    move = move_sgd(config.optimizer, weight, gradient, {}, rate=config.optimizer.lr, step=step + 1)
                    parameter.copy_(weight + move.update)
            moes.move_biases()
    if method.updates:
        reference.weights = {fqn: parameter.detach() for fqn, parameter in parameters.items()}
        if reference.experts:
            reference.experts.biases = moes.biases
    return reference


def compute_gradients(model: nn.Module, moes: PlainMoEs, batch: Batch) -> tuple[Tensor, float]:
    """Return logits (B, S, V), and the mean loss of counted tokens. Gradients replace earlier ones."""
    model.zero_grad()
    logits = model(batch.tokens, positions=batch.positions, doc_ids=batch.doc_ids)
    loss = F.cross_entropy(logits.flatten(0, 1).double(), batch.targets.flatten())
    (loss + moes.sum_balance_losses()).backward()
    if moes.recorded:
        moes.record()
    return logits.detach(), loss.item()


def measure_norm(gradients: Iterable[Tensor]) -> float:
    """Return the 2-norm of all numbers, in float64: torch's own norm adds fp32 numbers one by one on a CPU."""
    pieces = (piece for gradient in gradients for piece in gradient.flatten().split(2**20))
    return math.sqrt(sum(piece.double().square().sum().item() for piece in pieces))


def record_first_backward(model: nn.Module, reference: ReferenceRun) -> list:
    """Return hooks, to remove, that note inputs and outputs in forward order, and gradients in backward order."""

    def note_inputs(module, args, kwargs, *, name):
        given = name_inputs(module, args, kwargs)
        reference.inputs[name] = {argument: value.detach() for argument, value in given.items()}

    def note_output(module, args, output, *, name):
        if (tensor := find_tensor(output)) is not None:
            reference.outputs[name] = tensor.detach()

    def note_gradient(parameter, *, fqn):
        reference.gradients[fqn] = parameter.grad

    hooks = []
    for name, module in model.named_modules():
        if name:
            hooks.append(module.register_forward_pre_hook(partial(note_inputs, name=name), with_kwargs=True))
            hooks.append(module.register_forward_hook(partial(note_output, name=name)))
    for fqn, parameter in model.named_parameters():
        hooks.append(parameter.register_post_accumulate_grad_hook(partial(note_gradient, fqn=fqn)))
    return hooks


def name_inputs(module: nn.Module, args: tuple, kwargs: dict[str, object]) -> dict[str, Tensor]:
    """Return the tensors that a call gives to a module, by the names of its class."""
    # The class is asked, because recompute and compile put another `forward` on the module itself.
    given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    return {name: value for name, value in given.items() if isinstance(value, Tensor)}


def find_tensor(output: object) -> Tensor | None:
    """Return what is compared of a module's output: the tensor, or the first one of several (a router's weights)."""
    first = output[0] if isinstance(output, tuple) else output
    return first if isinstance(first, Tensor) else None


class PlainDocumentAttention(nn.Module):
    """Causal attention within documents, by one explicit mask."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=find_visible(doc_ids), enable_gqa=True)


def find_visible(doc_ids: Tensor) -> Tensor:
    """Return whether a token sees another one, (B, 1, S, S) bool: earlier ones of its document, and itself."""
    causal = torch.ones(doc_ids.shape[1], doc_ids.shape[1], dtype=torch.bool).tril()
    return causal & (doc_ids[:, None, :, None] == doc_ids[:, None, None, :])


# ---------------------------------------------------------------- errors


def largest_relative(values: list[float], references: list[float]) -> float:
    """Return the largest relative error of pairs of numbers."""
    pairs = zip(values, references, strict=True)
    return max(relative_error(torch.tensor(value), torch.tensor(reference)) for value, reference in pairs)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """||value - reference|| / ||reference||; a zero reference demands zero. What is not finite is infinitely wrong."""
    difference, scale = (value.double() - reference.double()).norm().item(), reference.double().norm().item()
    if difference == 0:
        return 0.0
    return difference / scale if scale and math.isfinite(difference) else math.inf
