"""The base of the kinds of attention (attention.py, tools/kv_cache.py, parallel/context_parallel.py)."""

from torch import Tensor, nn


class InnerAttention(nn.Module):
    """Attention from queries to keys and values: `attention.inner` of a block. It has no parameters.

    A subclass has `forward(query, key, value, doc_ids)`: query (B, heads, S, E), key and value (B, kv heads, S, E) ->
    (B, heads, S, E). doc_ids is the result of `plan`, or None.
    """

    def plan(self, doc_ids: Tensor | None) -> object:
        """Prepare doc_ids (B, S), or None, for `forward`. The model calls it once for all layers."""
        return doc_ids
