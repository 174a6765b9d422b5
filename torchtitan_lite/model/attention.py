"""Define the kinds of attention (model.attention). Each kind is a module that a block uses as `attention.inner`.

    causal      a token attends to itself and all earlier tokens
    document    a token attends to itself and all earlier tokens in its document

    doc_ids     0 0 0 1 1 2 2 2       query 4 attends to keys 3 and 4
    positions   0 1 2 0 1 0 1 2       restart with each document (data/dataset.py)

A model with windows or sinks uses extensions/windowed_attention.py in all layers, for both kinds.

To add a kind, add a row in config/choices.py that defines what tokens attend to. If the row is not plain (is_plain),
also add a module to ATTENTION_MODULES below.

Legend: B batch, S sequence, E head dim.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtitan_lite.config.block import has_masks
from torchtitan_lite.config.choices import ATTENTIONS
from torchtitan_lite.config.extensions import load_extension, load_module
from torchtitan_lite.config.machine import SAFE_KV_HEADS
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.model.inner_attention import InnerAttention

OTHER_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class CausalAttention(InnerAttention):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor | None) -> Tensor:
        """query (B, heads, S, E), key and value (B, kv heads, S, E) -> (B, heads, S, E)."""
        if avoids_cudnn(key):
            with sdpa_kernel(OTHER_KERNELS):
                return F.scaled_dot_product_attention(
                    query, key, value, is_causal=True, enable_gqa=True
                )
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def avoids_cudnn(key: Tensor) -> bool:
    """Return whether cuDNN's attention may be wrong for keys (B, kv heads, S, E) of a rank.

    On B200 GPUs, Qwen2.5 with 2 or 4 key/value heads gave wrong outputs; a Llama with 4 heads of size 64 did not
    (pytorch issue 193893, open in August 2026; the cause is unknown). This function was never run on such a GPU.
    """
    few = key.is_cuda and key.shape[1] < SAFE_KV_HEADS
    return few and torch.cuda.get_device_capability(key.device)[0] == 10


ATTENTION_MODULES: dict[str, Callable[[ModelArgs, int], InnerAttention]] = {
    # model.attention -> class or function of (model_args, layer), for rows of config/choices.py that are not plain
}


def build_attention(attention: str, model_args: ModelArgs, layer: int) -> InnerAttention:
    """Build the attention module of a layer."""
    if attention in ATTENTION_MODULES or not ATTENTIONS[attention].is_plain:
        return ATTENTION_MODULES[attention](model_args, layer)
    if has_masks(attention, model_args):
        windowed = load_extension("windowed_attention")
        return windowed.WindowedAttention(attention, model_args, layer)
    if ATTENTIONS[attention].uses_documents:
        return load_module("model.document_attention").DocumentAttention()
    return CausalAttention()
