"""Compute attention with windows and sinks (drawn for two layers, one with a window of 3, and a sink per head).

    keys                          0 1 2 3 4   sink
    query 4, layer with window        x x x    x      the softmax covers the scores and the sink, whose value is 0:
    query 4, layer without        x x x x x    x      out = sum of exp(score) * value / (sum of exp(score) + exp(sink))

A query attends to keys inside its window. If model.attention is "document", a query attends only to keys of its own
document. All layers of a model with windows or sinks use this module. The model computes one mask for each kind of
layer, once per batch. On a CPU, the mask is explicit, (B, 1, Q, K). On CUDA, flex attention gets a BlockMask, as in
model/document_attention.py. Flex attention computes the output without sinks. A sink then scales the output by exp(lse)
/ (exp(lse) + exp(sink)), where lse is the log-sum-exp of the scores. The CUDA path has never run on a GPU. Tests
compare the blocks and the outputs of this path on a CPU.

`attention.inner.sinks.weight` has a logit for each query head. tp splits the logits in the same way as the heads.

Legend: B batch, S sequence, Q and K queries and keys of one call, E head dim.
Sources: windows arXiv:2004.05150, Mistral arXiv:2310.06825; sinks arXiv:2309.17453, gpt-oss arXiv:2508.10925.
Effect: replaces attention.inner of every layer.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from torchtitan_lite.config.block import list_windows
from torchtitan_lite.config.choices import ATTENTIONS
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.model.document_attention import (
    DocumentAttention,
    attend_in_blocks,
    plan_mask,
)

Masks = list[Tensor | BlockMask]  # one mask for each kind of layer


class Sinks(nn.Module):
    """One logit for each query head."""

    def __init__(self, n_heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_heads))

    def forward(self) -> Tensor:
        """Return the logits of this rank's heads, (heads,)."""
        return self.weight


class WindowedAttention(DocumentAttention):
    """Attention of one layer. A token attends to itself and to the `window` - 1 tokens before it. If `window` is None,
    a token attends to itself and to all earlier tokens."""

    def __init__(self, attention: str, model_args: ModelArgs, layer: int):
        super().__init__()
        windows = list_windows(attention, model_args)
        self.window = windows[layer]
        self.kinds = list(dict.fromkeys(windows))
        self.uses_documents = ATTENTIONS[attention].uses_documents
        self.sinks = Sinks(model_args.n_heads) if model_args.attention_sinks else None

    def plan(self, doc_ids: Tensor | None) -> Masks | None:
        """Return the mask of each kind of layer. If doc_ids is None, return None, and each layer makes its own mask."""
        if doc_ids is None:
            return None
        if not self.uses_documents:
            doc_ids = torch.zeros_like(doc_ids[:1])
        places = self.positions(doc_ids.shape[1], doc_ids.device)
        return [plan_mask(doc_ids, *places, window) for window in self.kinds]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, doc_ids: Masks | None) -> Tensor:
        """Attend with the result of `plan`. query and result: (B, heads, Q, E). key, value: (B, kv heads, K, E)."""
        if doc_ids is None:
            doc_ids = torch.zeros_like(key[:1, 0, :, 0], dtype=torch.int64)
        if isinstance(doc_ids, Tensor):  # the model did not call `plan`
            doc_ids = self.plan(doc_ids)
        mask = doc_ids[self.kinds.index(self.window)]
        sinks = None if self.sinks is None else self.sinks()
        if isinstance(mask, BlockMask):
            return attend_in_windows(query, key, value, mask, sinks)
        return attend_with_mask(query, key, value, mask, sinks)


def attend_with_mask(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None
) -> Tensor:
    """Attend with an explicit mask (B, 1, Q, K). `sinks` is (heads,) or None."""
    if sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    # The sink acts as the score of one additional key, whose value is zero.
    sizes = query.shape[:3]
    scores = torch.zeros_like(mask, dtype=query.dtype)
    scores = scores.masked_fill(~mask, -math.inf)
    column = sinks.to(query.dtype)[None, :, None, None]
    column = column.expand(*sizes, 1)
    scores = scores.expand(*sizes, -1)
    bias = torch.cat((scores, column), 3)
    one_more = (0, 0, 0, 1)
    key = F.pad(key, one_more)
    value = F.pad(value, one_more)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=True)


def attend_in_windows(
    query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask, sinks: Tensor | None
) -> Tensor:
    """Attend with flex attention. `sinks` is (heads,) or None."""
    if sinks is None:
        return attend_in_blocks(query, key, value, blocks)
    out, aux = attend_in_blocks(query, key, value, blocks, return_aux=AuxRequest(lse=True))
    share = torch.sigmoid(aux.lse - sinks.float()[:, None])  # (B, heads, Q)
    return out * share[..., None].to(out.dtype)
