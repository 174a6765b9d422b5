"""Compute attention inside documents: a token attends to itself and all earlier tokens in its document.

On a CPU, document attention uses an explicit mask (B, 1, queries, keys), which is simple but slow. On CUDA, document
attention uses compiled flex attention, which skips every block of 128 x 128 query-key pairs in which all pairs are
masked. The model computes the mask or the BlockMask once per batch, before the first layer. On CUDA, the code that
computes the BlockMask is compiled too, so no mask of queries x keys is stored.

Queries and keys may be any part of the sequence in any order, because under context parallel a rank has only some of
the queries. The CUDA path has never been run on a GPU. Tests on a CPU check the blocks and the outputs of this path,
and that it compiles without graph breaks.

Legend: B batch, S sequence, Q and K queries and keys of one call, E head dim.
Sources: documents in a batch: Llama 3, arXiv:2407.21783; FlexAttention arXiv:2412.05496.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)

from torchtitan_lite.model.attention import InnerAttention


class DocumentAttention(InnerAttention):
    def plan(self, doc_ids: Tensor) -> Tensor | BlockMask:
        """Return the attention mask that all layers share."""
        positions = self.positions(doc_ids.shape[1], doc_ids.device)
        return plan_mask(doc_ids, *positions)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor | BlockMask
    ) -> Tensor:
        """Attend; `doc_ids` is the result of `plan`. query and result: (B, heads, Q, E). key, value: (B, kv heads, S,
        E)."""
        if isinstance(doc_ids, Tensor) and doc_ids.dim() == 2:  # the model did not call `plan`
            doc_ids = self.plan(doc_ids)
        if isinstance(doc_ids, BlockMask):
            return attend_in_blocks(query, key, value, doc_ids)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=doc_ids, enable_gqa=True)


def plan_mask(
    doc_ids: Tensor, query_positions: Tensor, key_positions: Tensor, window: int | None = None
) -> Tensor | BlockMask:
    """Return the attention mask: a bool tensor (B, 1, Q, K) on CPU, or a BlockMask for flex attention on CUDA.

    doc_ids (B, S) cover the full sequence; query_positions (Q,) and key_positions (K,) index into it.
    """
    query_docs = doc_ids[:, query_positions]
    key_docs = doc_ids[:, key_positions]

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query_positions[query] - key_positions[key]
        is_seen = (distance >= 0) & (query_docs[row, query] == key_docs[row, key])
        return is_seen & (distance < window) if window else is_seen

    create = create_mask
    if doc_ids.device.type != "cpu":
        create = compile_once(create_block_mask)
    return create(
        sees,
        B=len(doc_ids),
        H=None,
        Q_LEN=len(query_positions),
        KV_LEN=len(key_positions),
        device=doc_ids.device.type,
    )


def attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask, **options: AuxRequest
) -> Tensor:
    """Call flex attention with `options`. query and result: (B, heads, Q, E). key and value: (B, kv heads, K, E)."""
    # Inside a compiled block, flex attention is compiled with the block. Eager flex attention would store all scores.
    attend = flex_attention
    if not torch.compiler.is_compiling():
        attend = compile_once(flex_attention)
    return attend(query, key, value, block_mask=blocks, enable_gqa=True, **options)


@cache
def compile_once(function: Callable) -> Callable:
    """Return the compiled function. Call this function only when flex attention is first used, because torch.compile
    loads inductor."""
    # With this option, selective recompute sees a compiled region as an operator, and can save its output
    # (activation_checkpoint.py).
    options = {"wrap_inductor_compiled_regions": True}
    return torch.compile(function, dynamic=False, options=options)
