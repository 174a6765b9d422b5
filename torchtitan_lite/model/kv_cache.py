"""Keys and values of what a model has read, so that one more token costs one token's work.

    read([a, b, c])    computes keys and values of a b c      keeps a b c .      gives the logits after c
    read([d])          computes those of d only               keeps a b c d      gives the logits after d
    rewind(3)          computes nothing                       keeps a b c .      as if d had never been read

The cache stands at the seam `attention.inner`, as document attention and context parallel do, so the model's own code
is what trains and what generates. What is read is one document that begins at position 0: inside one document,
`model.attention = "document"` and "causal" are the same, so one cache serves models trained with either.

Legend: B batch (1 here), S sequence, Q tokens being read, L tokens at hand after that, H heads, K kv heads, E head dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.config.flavors import ModelArgs


class CachedAttention(nn.Module):
    """Causal attention of the tokens being read to themselves and to all that were read before."""

    def __init__(self, shape: ModelArgs, capacity: int, *, dtype: torch.dtype, device: torch.device):
        super().__init__()
        # One allocation for good: growing would copy everything now and then. In time's order along dim 2.
        kept = (1, shape.n_kv_heads, capacity, shape.head_dim)
        self.keys = torch.empty(kept, dtype=dtype, device=device)
        self.values = torch.empty(kept, dtype=dtype, device=device)
        self.length = 0  # tokens that are kept; what lies behind them is not looked at

    def forward(self, query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        """query (1, H, Q, E), key and value (1, K, Q, E) of the tokens being read -> (1, H, Q, E)."""
        n_read = query.shape[2]
        start, self.length = self.length, self.length + n_read
        self.keys[:, :, start : self.length] = key
        self.values[:, :, start : self.length] = value
        if start == 0:  # nothing before them: no mask of Q x L numbers is needed
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        keys, values = self.keys[:, :, : self.length], self.values[:, :, : self.length]  # (1, K, L, E)
        mask = None  # a single token sees all there is
        if n_read > 1:
            mask = torch.ones(n_read, self.length, dtype=torch.bool, device=query.device).tril(start)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


class CachedModel:
    """A whole model that remembers what it has read. It takes the model over: training goes on with another copy."""

    def __init__(self, model: nn.Module, capacity: int):
        """`capacity` is the number of tokens that can be kept; it takes count_cache_bytes of memory."""
        weight = model.tok_embeddings.weight
        self.model, self.capacity, self.device = model, capacity, weight.device
        self.length = 0
        self.caches: list[CachedAttention] = []
        for block in model.layers.values():
            cache = CachedAttention(model.shape, capacity, dtype=weight.dtype, device=weight.device)
            block.attention.inner = cache
            self.caches.append(cache)
        # Only the last token's logits are asked for, and V numbers for each token of a long prompt are gigabytes.
        model.norm.register_forward_pre_hook(lambda norm, args: (args[0][:, -1:],))

    @torch.inference_mode()
    def read(self, tokens: list[int]) -> Tensor:
        """Read `tokens` after those that are kept. Logits of what comes next, (V,) fp32 on the CPU."""
        start, stop = self.length, self.length + len(tokens)
        assert tokens and stop <= self.capacity, f"{stop} tokens in a cache of {self.capacity}"
        x = torch.tensor([tokens], device=self.device)
        positions = torch.arange(start, stop, device=self.device)[None]
        logits = self.model(x, positions=positions)  # (1, 1, V)
        self.length = stop
        return logits[0, -1].float().cpu()

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        assert 0 <= length <= self.length, f"{length} of {self.length} tokens"
        for cache in self.caches:
            cache.length = length
        self.length = length


def count_cache_bytes(shape: ModelArgs, capacity: int, dtype: torch.dtype) -> int:
    """Memory of a cache: keys and values of every layer."""
    return 2 * shape.n_layers * shape.n_kv_heads * shape.head_dim * capacity * dtype.itemsize
