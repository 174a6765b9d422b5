"""Attention that stops at the borders of documents packed into a sequence: a token sees its document up to itself.

    doc_ids     0 0 0 1 1 2 2 2       keys that query 4 sees: 3, 4
    positions   0 1 2 0 1 0 1 2       restart with each document (components/data.py)

On a CPU an explicit mask (B, 1, queries, keys), which is readable and slow. On CUDA flex attention, compiled: it skips
the blocks of 128 x 128 that no document reaches into, and no mask of queries x keys exists. The CUDA path was not run
by the authors of this file; tests check its blocks, and on a CPU its forward numbers and that it compiles unbroken.

Queries and keys may be any part of the sequence in any order, so that a rank can ask for its own queries only.

Legend: B batch, S sequence, Q and K queries and keys at hand, E head dim.
Sources: documents in a batch: Llama 3, arXiv:2407.21783; FlexAttention arXiv:2412.05496.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128

compiled_flex_attention = torch.compile(flex_attention, dynamic=False)  # not compiled, it makes all the scores


class DocumentAttention(nn.Module):
    """At the seam `attention.inner`, in the place of CausalAttention."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        """query (B, heads, S, E), key and value (B, kv heads, S, E), doc_ids (B, S) -> (B, heads, S, E)."""
        places = torch.arange(query.shape[2], device=query.device)
        return attend_within_documents(query, key, value, doc_ids, query_places=places, key_places=places)


def attend_within_documents(
    query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor | None, *, query_places: Tensor, key_places: Tensor
) -> Tensor:
    """query (B, heads, Q, E), key and value (B, kv heads, K, E) -> (B, heads, Q, E).

    doc_ids (B, S) of the whole sequence; the places, (Q,) and (K,), say where in it queries and keys stand.
    """
    if doc_ids is None:
        raise ValueError('model.attention = "document" needs doc_ids (B, S): the model was called without')
    attend = attend_masked if query.device.type == "cpu" else attend_in_blocks
    return attend(query, key, value, doc_ids, query_places, key_places)


def attend_masked(
    query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor, query_places: Tensor, key_places: Tensor
) -> Tensor:
    sees = visibility(doc_ids, query_places, key_places)
    rows, queries, keys = (torch.arange(len(each), device=query.device) for each in (doc_ids, query_places, key_places))
    mask = sees(rows[:, None, None, None], None, queries[:, None], keys)  # (B, 1, Q, K)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor, query_places: Tensor, key_places: Tensor
) -> Tensor:
    block_mask = plan_blocks(doc_ids, query_places, key_places)
    return compiled_flex_attention(query, key, value, block_mask=block_mask, enable_gqa=True)


def visibility(doc_ids: Tensor, query_places: Tensor, key_places: Tensor) -> Callable[..., Tensor]:
    """The rule, once for both ways: (row, head, query, key), all indices that broadcast, -> whether it sees it."""

    def sees(row: Tensor, head: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
        query_place, key_place = query_places[query], key_places[key]
        return (doc_ids[row, query_place] == doc_ids[row, key_place]) & (query_place >= key_place)

    return sees


def plan_blocks(doc_ids: Tensor, query_places: Tensor, key_places: Tensor) -> BlockMask:
    """Which blocks of queries x keys flex attention must look into, from the least and the greatest of each block.

    A block counts if some query of it could see some key: one too many is only slower, for inside a block each pair is
    looked at again. So nothing of size Q x K is made.
    """
    n_rows = len(doc_ids)
    first_query, last_query = bounds_of_blocks(query_places.expand(n_rows, -1))  # (B, blocks)
    first_key, last_key = bounds_of_blocks(key_places.expand(n_rows, -1))
    low_query, high_query = bounds_of_blocks(doc_ids[:, query_places])
    low_key, high_key = bounds_of_blocks(doc_ids[:, key_places])
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
        mask_mod=visibility(doc_ids, query_places, key_places),
        seq_lengths=(len(query_places), len(key_places)),
    )


def bounds_of_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest of each BLOCK neighbours, (B, n) -> twice (B, blocks). The last block may be shorter."""
    n = values.shape[1]
    n_blocks = -(-n // BLOCK)
    inside = torch.arange(n_blocks * BLOCK, device=values.device).clamp(max=n - 1)
    return values[:, inside].unflatten(1, (n_blocks, BLOCK)).aminmax(dim=2)
