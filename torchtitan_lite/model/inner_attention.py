"""Define the base class of attention modules (attention.py, tools/kv_cache.py, parallel/context_parallel.py).

The class has its own file, because in attention.py it would close an import cycle: attention.py imports a fork's
attention, which imports this class.
"""

from torch import Tensor, nn

from torchtitan_lite.config.model_rows import ModelArgs


class InnerAttention(nn.Module):
    """Attention from queries to keys and values: `attention.inner` of a block. Its only parameters are sinks.

    A subclass has `forward(query, key, value, doc_ids)`: query (B, heads, S, E), key and value (B, kv heads, S, E) ->
    (B, heads, S, E). doc_ids is the result of `plan`, or None.
    """

    def __init__(self, model_args: ModelArgs | None = None, layer: int = 0):
        """Ignore the arguments. A subclass whose layers differ overrides this method and reads the arguments."""
        super().__init__()

    def plan(self, doc_ids: Tensor | None) -> object:
        """Prepare doc_ids (B, S), or None, for `forward`. The model calls this method once for all layers."""
        return doc_ids
