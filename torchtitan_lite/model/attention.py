"""The kinds of attention (model.attention). Each is a module that a block holds as `attention.inner`.

    causal      a token sees itself and all tokens before it
    document    a token sees itself and all tokens before it in its own document

    doc_ids     0 0 0 1 1 2 2 2       keys that query 4 sees: 3, 4
    positions   0 1 2 0 1 0 1 2       restart with each document (data/dataset.py)

On a CPU document attention uses an explicit mask (B, 1, queries, keys), readable and slow. On CUDA it is compiled flex
attention, which reads only the blocks of 128 x 128 pairs that a document reaches. The model plans these blocks once per
batch, before the first layer. Both are compiled, so no mask of queries x keys is stored.

Queries and keys may be any part of the sequence in any order: a context-parallel rank asks for its own queries. The
CUDA path was not run on a GPU; on a CPU, tests check its blocks, its outputs, and that it compiles without a graph
break.

To add a kind, write a module here with a row in ATTENTION_MODULES, and a row in config/choices.py. That row says where
else it can be computed: under context parallel, in the cache of `generate`.

Legend: B batch, S sequence, Q and K queries and keys of one call, E head dim.
Sources: documents in a batch: Llama 3, arXiv:2407.21783; FlexAttention arXiv:2412.05496.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

LEAST_HEAD_DIM = 16  # of flex attention on CUDA


class CausalAttention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        """query (B, heads, S, E), key and value (B, kv heads, S, E) -> (B, heads, S, E)."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


class DocumentAttention(nn.Module):
    def plan(self, doc_ids: Tensor) -> Tensor | BlockMask:
        """Prepare doc_ids (B, S) for `forward`, once for all layers."""
        return plan_documents(doc_ids)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor | BlockMask | None = None) -> Tensor:
        """query (B, heads, S, E), key and value (B, kv heads, S, E), doc_ids (B, S) or a plan -> (B, heads, S, E)."""
        if isinstance(doc_ids, BlockMask):
            return attend_in_blocks(query, key, value, doc_ids)
        positions = torch.arange(query.shape[2], device=query.device)
        return attend_within_documents(query, key, value, doc_ids, query_positions=positions, key_positions=positions)


ATTENTION_MODULES = {  # model.attention, rows of config/choices.py
    "causal": CausalAttention,
    "document": DocumentAttention,
}


def attend_within_documents(
    query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor | None, *, query_positions: Tensor, key_positions: Tensor
) -> Tensor:
    """Attend with an explicit mask. query (B, heads, Q, E), key and value (B, kv heads, K, E) -> (B, heads, Q, E).

    doc_ids (B, S) of the whole sequence; query_positions (Q,) and key_positions (K,) index into it. Raises ValueError
    without doc_ids.
    """
    if doc_ids is None:
        raise ValueError('model.attention = "document" needs doc_ids (B, S): the model was called without')
    same = doc_ids[:, query_positions, None] == doc_ids[:, None, key_positions]
    mask = same & (query_positions[:, None] >= key_positions)  # (B, Q, K)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None], enable_gqa=True)


# ---------------------------------------------------------------- flex attention


def attend_in_blocks(query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask) -> Tensor:
    """query (B, heads, Q, E), key and value (B, kv heads, K, E) -> (B, heads, Q, E)."""
    # A compiled block compiles it too. Not compiled, it makes all the scores.
    attend = flex_attention if torch.compiler.is_compiling() else compile_once(flex_attention)
    head_dim = query.shape[-1]
    missing = max(0, LEAST_HEAD_DIM - head_dim)  # zeros change no score
    query, key, value = (F.pad(each, (0, missing)) if missing else each for each in (query, key, value))
    return attend(query, key, value, block_mask=blocks, enable_gqa=True, scale=head_dim**-0.5)[..., :head_dim]


@cache
def compile_once(function: Callable) -> Callable:
    """Return the compiled function: at its first use, because torch.compile loads inductor (1 s and 50 MB)."""
    # The option shows the compiled region to per-op recompute, which keeps its output (activation_checkpoint.py).
    is_visible = hasattr(torch.ops.higher_order, "inductor_compiled_code")
    options = {"wrap_inductor_compiled_regions": True} if is_visible else None
    return torch.compile(function, dynamic=False, options=options)


def plan_documents(doc_ids: Tensor, *positions: Tensor) -> Tensor | BlockMask:
    """Return the blocks that flex attention reads, as `plan_blocks`; on a CPU return doc_ids (B, S)."""
    return doc_ids if doc_ids.device.type == "cpu" else plan_blocks(doc_ids, *positions)


def plan_blocks(
    doc_ids: Tensor, query_positions: Tensor | None = None, key_positions: Tensor | None = None
) -> BlockMask:
    """Plan which blocks of queries x keys flex attention reads. Without positions, both are the whole sequence."""
    query_docs, key_docs = (
        doc_ids if positions is None else doc_ids[:, positions] for positions in (query_positions, key_positions)
    )

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        rises = query >= key if query_positions is None else query_positions[query] >= key_positions[key]
        return rises & (query_docs[row, query] == key_docs[row, key])

    create = create_block_mask if doc_ids.device.type == "cpu" else compile_once(create_block_mask)
    sizes = {"B": len(doc_ids), "H": None, "Q_LEN": query_docs.shape[1], "KV_LEN": key_docs.shape[1]}
    return create(sees, **sizes, device=doc_ids.device.type)
