"""transformers' model as one of the two that are compared: its forward, its routes, and another rounding of it.

Its mask is made here from the documents. Its routers, where it has some, choose the routes that both models then take:
with routes of their own the last bit of a score would send a token elsewhere, and no number could be compared.

Legend: B rows, S tokens of a row, T = B*S, K experts of a token, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchtitan_lite.data.dataset import Batch

Forward = Callable[[Batch], tuple[Tensor, Tensor]]  # -> logits (B, S, V), mean loss ()


def forward_theirs(theirs: nn.Module) -> Forward:
    """Return a call of transformers' model; its mask is made here, from the documents. Its routes may be given."""

    def forward(batch: Batch) -> tuple[Tensor, Tensor]:
        same_document = batch.doc_ids[:, :, None] == batch.doc_ids[:, None, :]
        length = batch.tokens.shape[1]
        sees = same_document & torch.ones(length, length, dtype=torch.bool).tril()
        mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)[:, None]  # (B, 1, S, S)
        with removed_afterwards([] if batch.routes is None else list(give_routes(theirs, batch.routes))):
            output = theirs(batch.tokens, position_ids=batch.positions, attention_mask=mask, use_cache=False)
        return output.logits.detach(), F.cross_entropy(output.logits.flatten(0, 1), batch.targets.flatten())

    return forward


def list_gates(theirs: nn.Module) -> dict[int, nn.Module]:
    """Return layer -> router of transformers' model. Its output is (logits, weights, routes), (T, ...) each."""
    return {n: block.mlp.gate for n, block in enumerate(theirs.model.layers) if hasattr(block.mlp, "gate")}


def give_routes(theirs: nn.Module, routes: Tensor) -> Iterator[RemovableHandle]:
    """Make transformers' model compute with `routes` (B, S, layers, K)."""

    def replace_output(gate: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...], *, layer: int):
        given = routes[:, :, layer].flatten(0, 1)
        weights = output[0].float().softmax(-1).gather(-1, given)
        if getattr(theirs.config, "norm_topk_prob", True):  # Mixtral has no choice
            weights = weights / weights.sum(-1, keepdim=True)
        return output[0], weights, given

    for layer, gate in list_gates(theirs).items():
        yield gate.register_forward_hook(partial(replace_output, layer=layer))


def choose_routes(theirs: nn.Module, batch: Batch) -> tuple[Tensor, dict[int, Tensor]]:
    """Return the routes of the reference, (B, S, layers, K), and layer -> its scores, (B, S, experts)."""
    seen: dict[int, tuple[Tensor, ...]] = {}
    hooks = [
        gate.register_forward_hook(lambda gate, inputs, output, layer=layer: seen.update({layer: output}))
        for layer, gate in list_gates(theirs).items()
    ]
    with removed_afterwards(hooks), torch.no_grad():
        forward_theirs(theirs)(batch)
    shape = batch.tokens.shape
    top_k = next(iter(seen.values()))[2].shape[-1]
    routes = torch.zeros(*shape, len(theirs.model.layers), top_k, dtype=torch.int64)
    for layer, output in seen.items():
        routes[:, :, layer] = output[2].view(*shape, -1)
    return routes, {layer: output[0].float().softmax(-1).view(*shape, -1) for layer, output in seen.items()}


@contextmanager
def rounded_otherwise(theirs: nn.Module) -> Iterator[None]:
    """Context manager: other kernels of attention, and rotary frequencies one fp32 number larger."""
    frequencies = [buffer for name, buffer in theirs.named_buffers() if name.endswith("inv_freq")]
    assert frequencies, "transformers' model has no buffer inv_freq any more: how it rounds is not known"
    kept = [buffer.clone() for buffer in frequencies]
    usual = theirs.config._attn_implementation
    theirs.set_attn_implementation("sdpa")
    for buffer in frequencies:
        buffer.copy_(torch.nextafter(buffer, torch.full_like(buffer, inf)))
    try:
        yield
    finally:
        theirs.set_attn_implementation(usual)
        for buffer, original in zip(frequencies, kept, strict=True):
            buffer.copy_(original)


@contextmanager
def removed_afterwards(handles: list[RemovableHandle]) -> Iterator[None]:
    """Context manager: removes hooks at its end."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
