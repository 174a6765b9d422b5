"""The one process beside which a layout is run: plain torch, the whole batch, no ranks.

    model       the user's own class, on one device; document attention by one explicit mask
    batch       random tokens, of which 0 to 90 % count from row to row, and in one row none
    step        one backward over all rows, torch's clipping, torch's SGD

What it shares with a run on many ranks is the model file and the rule of the initial weights, nothing else.
"""

import inspect
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite import step as stepping
from torchtitan_lite.components.data import Batch
from torchtitan_lite.config import Config
from torchtitan_lite.model.head import IGNORE_INDEX
from torchtitan_lite.parallel.initial_weights import initialize_weights
from torchtitan_lite.sizes import resolve_shape

N_STEPS = 2


def make_batch(step: int, *, n_rows: int, seq_len: int, vocab_size: int, documents: bool) -> Batch:
    """Random tokens. From row to row 0 to 90 % of the targets are not counted, in one row none is.

    With `documents`, a new one begins at every eighth token or so, at other places in each row.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(vocab_size, (n_rows, seq_len + 1), generator=generator)
    masked_share = torch.linspace(0, 0.9, n_rows)[:, None]
    masked = torch.rand(n_rows, seq_len, generator=generator) < masked_share
    if n_rows > 1:
        masked[1] = True
    targets = tokens[:, 1:].masked_fill(masked, IGNORE_INDEX)
    positions = torch.arange(seq_len).expand(n_rows, -1).contiguous()
    doc_ids = torch.zeros_like(targets)
    if documents:
        begins = torch.rand(n_rows, seq_len, generator=generator) < 1 / 8
        begins[:, 0] = False
        doc_ids = begins.long().cumsum(1)
        positions = positions - (positions * begins).cummax(1).values
    return Batch(tokens[:, :-1].contiguous(), targets, positions, doc_ids)


def make_batch_of(config: Config, step: int) -> Batch:
    """The global batch that a config asks for."""
    return make_batch(
        step,
        n_rows=config.training.global_batch_size,
        seq_len=config.training.seq_len,
        vocab_size=resolve_shape(config.model).vocab_size,
        documents=config.model.attention == "document",
    )


@dataclass
class Outcome:
    """What one process computed."""

    initial: dict[str, Tensor]  # in the order of the model
    outputs: dict[str, Tensor]  # of modules, first batch, in forward order; of the head: the loss of each token (B, S)
    n_tokens: int  # counted in the first batch
    gradients: dict[str, Tensor]  # of the first batch, before clipping, in backward order
    weights: dict[str, Tensor]  # after N_STEPS
    losses: list[float]
    grad_norms: list[float]
    inputs: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # module -> argument -> value, as `outputs`


def run_one_process(config: Config) -> Outcome:
    """The oracle. `config` gives model, batch, seed, clipping and SGD; its layout is not looked at."""
    model_class, init_parameter = stepping.MODELS[config.model.name]
    model = model_class(resolve_shape(config.model), attention=config.model.attention)
    if config.model.attention == "document":
        for name, module in model.named_modules():
            if name.endswith("attention"):
                module.inner = PlainDocumentAttention()
    initialize_weights(model, init_parameter, config.debug.seed)
    parameters = dict(model.named_parameters())
    initial = {fqn: parameter.detach().clone() for fqn, parameter in parameters.items()}
    section = config.optimizer
    optimizer = torch.optim.SGD(model.parameters(), lr=section.lr, weight_decay=section.weight_decay)
    outcome = Outcome(initial, {}, 0, {}, {}, [], [])
    hooks = record_first_backward(model, outcome)
    for step in range(N_STEPS):
        batch = make_batch_of(config, step)
        optimizer.zero_grad()
        logits = model(batch.tokens, positions=batch.positions, doc_ids=batch.doc_ids)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())  # the mean over counted tokens
        loss.backward()
        if step == 0:
            outcome.n_tokens = int((batch.targets != IGNORE_INDEX).sum())
            token_losses = F.cross_entropy(logits.detach().flatten(0, 1), batch.targets.flatten(), reduction="none")
            heads = [name for name, output in outcome.outputs.items() if output.data_ptr() == logits.data_ptr()]
            outcome.outputs |= dict.fromkeys(heads, token_losses.view_as(batch.targets))
            for hook in hooks:
                hook.remove()
        # In float64, for torch's own norm adds fp32 numbers one after another on a CPU.
        norm = sum(parameter.grad.double().square().sum() for parameter in parameters.values()).sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters.values(), config.training.max_norm, norm)
        optimizer.step()
        outcome.losses.append(loss.item())
        outcome.grad_norms.append(norm.item())
    outcome.weights = {fqn: parameter.detach() for fqn, parameter in parameters.items()}
    return outcome


def record_first_backward(model: nn.Module, outcome: Outcome) -> list:
    """Has a model note its modules' inputs and outputs in forward order and its gradients in backward order; hooks to
    remove.
    """
    hooks = []
    for name, module in model.named_modules():

        def note_inputs(module, args, kwargs, *, name=name):
            if name:
                outcome.inputs[name] = {key: value.detach() for key, value in name_inputs(module, args, kwargs).items()}

        def note_output(module, args, output, *, name=name):
            if name and isinstance(output, Tensor):
                outcome.outputs[name] = output.detach()

        hooks.append(module.register_forward_pre_hook(note_inputs, with_kwargs=True))
        hooks.append(module.register_forward_hook(note_output))
    for fqn, parameter in model.named_parameters():

        def note_gradient(parameter, *, fqn=fqn):
            outcome.gradients[fqn] = parameter.grad.clone()

        hooks.append(parameter.register_post_accumulate_grad_hook(note_gradient))
    return hooks


def name_inputs(module: nn.Module, args: tuple, kwargs: dict[str, object]) -> dict[str, Tensor]:
    """The tensors that a call gives to a module, by the names that its class has for them."""
    # The class is asked, because recompute and compile put another `forward` on the module itself.
    given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    return {name: value for name, value in given.items() if isinstance(value, Tensor)}


class PlainDocumentAttention(nn.Module):
    """Causal attention within documents, by the one explicit mask that leaves no room for mistakes."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor) -> Tensor:
        seq_len = query.shape[2]
        causal = torch.ones(seq_len, seq_len, dtype=torch.bool).tril()
        mask = causal & (doc_ids[:, None, :, None] == doc_ids[:, None, None, :])
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
