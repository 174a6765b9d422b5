"""Attention that stops at the borders of documents packed into a sequence: a token sees its document up to itself.

    doc_ids     0 0 0 1 1 2 2 2       keys that query 4 sees: 3, 4
    positions   0 1 2 0 1 0 1 2       restart with each document (data/dataset.py)

On a CPU an explicit mask (B, 1, queries, keys), which is readable and slow. On CUDA flex attention: document_blocks.py.

Queries and keys may be any part of the sequence in any order, so that a rank can ask for its own queries only.

Legend: B batch, S sequence, Q and K queries and keys at hand, E head dim.
Source: documents in a batch: Llama 3, arXiv:2407.21783.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if torch.cuda.is_available():  # the import takes 1.6 s, which a CPU need not pay
    from torchtitan_lite.model.document_blocks import attend_in_blocks


class DocumentAttention(nn.Module):
    """At the seam `attention.inner`, in the place of CausalAttention."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        """query (B, heads, S, E), key and value (B, kv heads, S, E), doc_ids (B, S) -> (B, heads, S, E)."""
        places = torch.arange(query.shape[2], device=query.device)
        return attend_within_documents(query, key, value, doc_ids, query_positions=places, key_places=places)


def attend_within_documents(
    query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor | None, *, query_positions: Tensor, key_places: Tensor
) -> Tensor:
    """query (B, heads, Q, E), key and value (B, kv heads, K, E) -> (B, heads, Q, E).

    doc_ids (B, S) of the whole sequence; the places, (Q,) and (K,), say where in it queries and keys stand.
    """
    if doc_ids is None:
        raise ValueError('model.attention = "document" needs doc_ids (B, S): the model was called without')
    sees = visibility(doc_ids, query_positions, key_places)
    if query.device.type != "cpu":
        places = {"query_positions": query_positions, "key_places": key_places}
        return attend_in_blocks(query, key, value, doc_ids, **places, sees=sees)
    rows, queries, keys = (torch.arange(len(each)) for each in (doc_ids, query_positions, key_places))
    mask = sees(rows[:, None, None, None], None, queries[:, None], keys)  # (B, 1, Q, K)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def visibility(doc_ids: Tensor, query_positions: Tensor, key_places: Tensor) -> Callable[..., Tensor]:
    """The rule, once for both ways: (row, head, query, key), all indices that broadcast, -> whether it sees it."""

    def sees(row: Tensor, head: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
        query_place, key_place = query_positions[query], key_places[key]
        return (doc_ids[row, query_place] == doc_ids[row, key_place]) & (query_place >= key_place)

    return sees
