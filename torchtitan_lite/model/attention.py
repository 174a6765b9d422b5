"""Define the kinds of attention (model.attention). Each kind is a module that a block uses as `attention.inner`.

    causal      a token attends to itself and all earlier tokens
    document    a token attends to itself and all earlier tokens in its document

    doc_ids     0 0 0 1 1 2 2 2       query 4 attends to keys 3 and 4
    positions   0 1 2 0 1 0 1 2       restart with each document (data/dataset.py)

A model with windows or sinks uses extensions/windowed_attention.py in all layers, for both kinds of attention.

To add a kind, add a row to ATTENTIONS in config/choices.py. The row must have a `window`, or name the file in
extensions/ that contains the code.

Legend: B batch, S sequence, E head dim.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtitan_lite.config.block import has_masks
from torchtitan_lite.config.choices import ATTENTIONS
from torchtitan_lite.config.extensions import find_code, load_extension, load_module
from torchtitan_lite.config.machine import SAFE_KV_HEADS
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.config.model_rows import ModelArgs

OTHER_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class InnerAttention(nn.Module):
    """Attention from queries to keys and values: `attention.inner` of a block. Its only parameters are sinks.

    A subclass defines `forward(query, key, value, doc_ids)`. query has shape (B, heads, S, E), and so has the result.
    key and value have shape (B, kv heads, S, E). doc_ids is the result of `plan`, or None.
    """

    def plan(self, doc_ids: Tensor | None) -> object:
        """Preprocess `doc_ids`, a (B, S) tensor or None, for `forward`. The model calls this once for all layers."""
        return doc_ids

    def positions(self, n_keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the positions of the queries, (Q,), and of the keys, (S,), in the full sequence. Context parallel
        overrides this method, because a cp rank has only some of the queries, and because the all-gathered keys are not
        in the order of the sequence."""
        positions = torch.arange(n_keys, device=device)
        return positions, positions


class CausalAttention(InnerAttention):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor | None) -> Tensor:
        """Attend: query (B, heads, S, E), key and value (B, kv heads, S, E) -> (B, heads, S, E)."""
        if key.is_cuda and key.dtype == torch.float32:
            # Give each query head its own key head: in fp32, torch's only kernel for grouped-query attention stores S x
            # S scores.
            n_copies = query.shape[1] // key.shape[1]
            key = key.repeat_interleave(n_copies, 1)
            value = value.repeat_interleave(n_copies, 1)
        with sdpa_kernel(OTHER_KERNELS) if avoids_cudnn(key) else nullcontext():
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )


def avoids_cudnn(key: Tensor) -> bool:
    """Return whether cuDNN's attention may be wrong for this rank's keys (B, kv heads, S, E).

    On B200 GPUs, Qwen2.5 with 2 or 4 key/value heads gave wrong outputs; a Llama with 4 heads of size 64 did not
    (pytorch issue 193893, open in August 2026; the cause is unknown). This function has never been run on a B200 GPU.
    """
    few = key.is_cuda and key.shape[1] < SAFE_KV_HEADS
    return few and torch.cuda.get_device_capability(key.device)[0] == 10


def stack_heads(key: Tensor, value: Tensor) -> Tensor:
    """Stack keys and values, (2, B, kv heads, S, E). Raises UserError if their shapes differ."""
    if key.shape != value.shape:
        raise UserError(
            f"keys have the shape {tuple(key.shape)}, but values {tuple(value.shape)}. Context parallel and the KV "
            "cache need equal shapes: pad the smaller tensor"
        )
    return torch.stack((key, value))


def build_attention(attention: str, model_args: ModelArgs, layer: int) -> InnerAttention:
    """Build the attention module of a layer. Raises UserError if a fork's row has no code, or if the code does not
    return an InnerAttention."""
    row = ATTENTIONS[attention]
    if row.extension or row.window is None:
        inner = find_code(row.extension, attention)(model_args, layer)
        if not isinstance(inner, InnerAttention):
            raise UserError(
                f"model.attention = {attention!r} has the class {type(inner).__name__}. "
                "Return an InnerAttention (model/attention.py)"
            )
        return inner
    if has_masks(attention, model_args):
        windowed = load_extension("windowed_attention")
        return windowed.WindowedAttention(attention, model_args, layer)
    if row.uses_documents:
        return load_module("model.document_attention").DocumentAttention()
    return CausalAttention()
