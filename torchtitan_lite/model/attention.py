"""The kinds of attention (model.attention), at the one seam of a block: the submodule `attention.inner`.

    causal      a token sees itself and all tokens before it
    document    a token sees itself and all tokens before it in its own document

    doc_ids     0 0 0 1 1 2 2 2       keys that query 4 sees: 3, 4
    positions   0 1 2 0 1 0 1 2       restart with each document (data/dataset.py)

On a CPU document attention uses an explicit mask (B, 1, queries, keys), readable and slow. On CUDA it is compiled flex
attention, which skips the blocks that no document reaches into, and no mask of queries x keys exists:

    doc_ids 0 0 | 0 1 | 1 1        key blocks       blocks of 2 here, of 128 in the code
    query blocks      0 0          x
                      0 1          x   x
                      1 1          .   x   x        . would be computed without doc_ids

Queries and keys may be any part of the sequence in any order, so that a context-parallel rank can ask for its own
queries only. The CUDA path was not run by the authors of this file; tests check its blocks, and on a CPU its forward
numbers and that it compiles without a graph break.

A new kind is a module here with a row in ATTENTIONS, and a row in config/choices.py, which says where else it can be
computed: under context parallel, in the cache of `generate`.

Legend: B batch, S sequence, Q and K queries and keys at hand, E head dim.
Sources: documents in a batch: Llama 3, arXiv:2407.21783; FlexAttention arXiv:2412.05496.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128  # tokens
LEAST_HEAD_DIM = 16  # of flex attention on CUDA


class CausalAttention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        """query (B, heads, S, E), key and value (B, kv heads, S, E) -> (B, heads, S, E)."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


class DocumentAttention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        """query (B, heads, S, E), key and value (B, kv heads, S, E), doc_ids (B, S) -> (B, heads, S, E)."""
        positions = torch.arange(query.shape[2], device=query.device)
        return attend_within_documents(query, key, value, doc_ids, query_positions=positions, key_positions=positions)


ATTENTIONS = {  # model.attention, rows of config/choices.py
    "causal": CausalAttention,
    "document": DocumentAttention,
}


def attend_within_documents(
    query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor | None, *, query_positions: Tensor, key_positions: Tensor
) -> Tensor:
    """query (B, heads, Q, E), key and value (B, kv heads, K, E) -> (B, heads, Q, E).

    doc_ids (B, S) of the whole sequence; query_positions (Q,) and key_positions (K,) index into it. Raises ValueError
    without doc_ids.
    """
    if doc_ids is None:
        raise ValueError('model.attention = "document" needs doc_ids (B, S): the model was called without')
    if query.device.type != "cpu":
        block_mask = plan_blocks(doc_ids, query_positions, key_positions)
        # A compiled block compiles it too. Not compiled, it makes all the scores.
        attend = flex_attention if torch.compiler.is_compiling() else compile_flex_attention()
        head_dim = query.shape[-1]
        missing = max(0, LEAST_HEAD_DIM - head_dim)  # zeros change no score
        query, key, value = (F.pad(each, (0, missing)) if missing else each for each in (query, key, value))
        out = attend(query, key, value, block_mask=block_mask, enable_gqa=True, scale=head_dim**-0.5)
        return out[..., :head_dim]
    rows, queries, keys = (torch.arange(len(each)) for each in (doc_ids, query_positions, key_positions))
    sees = visibility(doc_ids, query_positions, key_positions)
    mask = sees(rows[:, None, None, None], None, queries[:, None], keys)  # (B, 1, Q, K)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def visibility(doc_ids: Tensor, query_positions: Tensor, key_positions: Tensor) -> Callable[..., Tensor]:
    """Return the mask as a function of indices that broadcast: (row, head, query, key) -> whether query sees key."""

    def sees(row: Tensor, head: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
        at, of = query_positions[query], key_positions[key]
        return (doc_ids[row, at] == doc_ids[row, of]) & (at >= of)

    return sees


# ---------------------------------------------------------------- flex attention


@cache
def compile_flex_attention() -> Callable[..., Tensor]:
    """Return the compiled operator: at its first use, because torch.compile loads inductor (1 s and 50 MB)."""
    return torch.compile(flex_attention, dynamic=False)


def plan_blocks(doc_ids: Tensor, query_positions: Tensor, key_positions: Tensor) -> BlockMask:
    """Plan which blocks of queries x keys flex attention reads, from the minimum and maximum of each block.

    A block is read if some query of it could see some key. One block too many costs time only, because mask_mod masks
    each pair inside a block. No tensor of size Q x K is made.
    """
    n_rows = len(doc_ids)
    first_query, last_query = bounds_of_blocks(query_positions.expand(n_rows, -1))  # (B, blocks)
    first_key, last_key = bounds_of_blocks(key_positions.expand(n_rows, -1))
    low_query, high_query = bounds_of_blocks(doc_ids[:, query_positions])
    low_key, high_key = bounds_of_blocks(doc_ids[:, key_positions])
    visible = (
        (last_query[:, :, None] >= first_key[:, None])
        & (high_query[:, :, None] >= low_key[:, None])
        & (low_query[:, :, None] <= high_key[:, None])
    )  # (B, query blocks, key blocks)
    # For each block of queries the numbers of the key blocks, those that count first, and how many count.
    order = visible.int().argsort(dim=-1, descending=True, stable=True)
    return BlockMask.from_kv_blocks(
        visible.sum(-1, dtype=torch.int32)[:, None],
        order[:, None].to(torch.int32),
        BLOCK_SIZE=BLOCK,
        mask_mod=visibility(doc_ids, query_positions, key_positions),
        seq_lengths=(len(query_positions), len(key_positions)),
    )


def bounds_of_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return minimum and maximum of each block, (B, n) -> twice (B, blocks). The last block may be shorter."""
    n = values.shape[1]
    n_blocks = -(-n // BLOCK)
    inside = torch.arange(n_blocks * BLOCK, device=values.device).clamp(max=n - 1)
    return values[:, inside].unflatten(1, (n_blocks, BLOCK)).aminmax(dim=2)
