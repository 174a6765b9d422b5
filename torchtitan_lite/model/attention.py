"""The kinds of attention (model.attention), at the one seam of a block: the submodule `attention.inner`.

    causal      a token sees itself and all tokens before it
    document    a token sees itself and all tokens before it in its own document

    doc_ids     0 0 0 1 1 2 2 2       keys that query 4 sees: 3, 4
    positions   0 1 2 0 1 0 1 2       restart with each document (data/dataset.py)

Document attention uses an explicit mask (B, 1, queries, keys) on a CPU, readable and slow, and flex attention on CUDA
(document_blocks.py). Its queries and keys may be any part of the sequence in any order, so that a context-parallel rank
can ask for its own queries only.

A new kind is a module here with a row in ATTENTIONS, and a row in config/choices.py, which says where else it can be
computed: under context parallel, in the cache of `generate`.

Legend: B batch, S sequence, Q and K queries and keys at hand, E head dim.
Source: documents in a batch: Llama 3, arXiv:2407.21783.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if torch.cuda.is_available():  # the import takes 1.6 s, which a CPU need not pay
    from torchtitan_lite.model.document_blocks import attend_in_blocks


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
    sees = visibility(doc_ids, query_positions, key_positions)
    if query.device.type != "cpu":
        return attend_in_blocks(query, key, value, doc_ids, query_positions, key_positions, sees)
    rows, queries, keys = (torch.arange(len(each)) for each in (doc_ids, query_positions, key_positions))
    mask = sees(rows[:, None, None, None], None, queries[:, None], keys)  # (B, 1, Q, K)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def visibility(doc_ids: Tensor, query_positions: Tensor, key_positions: Tensor) -> Callable[..., Tensor]:
    """Return the mask as a function of indices that broadcast: (row, head, query, key) -> whether query sees key."""

    def sees(row: Tensor, head: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
        at, of = query_positions[query], key_positions[key]
        return (doc_ids[row, at] == doc_ids[row, of]) & (at >= of)

    return sees
