"""A cache of keys and values: one more token costs the work of one token, not of the whole text.

    read([a, b, c])    computes keys and values of a b c      keeps a b c .      returns the logits after c
    read([d])          computes those of d only               keeps a b c d      returns the logits after d
    rewind(3)          computes nothing                       keeps a b c .      as if d had never been read

The cache replaces the submodule `attention.inner`, as document attention and context parallel do, so training and
generation run the same model code. It computes causal attention over one document that starts at position 0. Which
values of `model.attention` that is right for, config/choices.py says: ATTENTIONS[name].is_plain.

Legend: B batch (1 here), S sequence, Q tokens being read, L tokens read so far, H heads, K kv heads, E head dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtitan_lite.config.flavors import ModelArgs

# cuDNN's kernel is left out: it builds a plan for each length of the text, 0.4 s each.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class CachedAttention(nn.Module):
    """Causal attention of the tokens being read to themselves and to all tokens before them."""

    def __init__(self, model_args: ModelArgs, capacity: int, *, dtype: torch.dtype, device: torch.device):
        super().__init__()
        # Allocated once: growing would copy everything now and then. Dim 2 is the position.
        kept = (1, model_args.n_kv_heads, capacity, model_args.head_dim)
        self.keys = torch.empty(kept, dtype=dtype, device=device)
        self.values = torch.empty(kept, dtype=dtype, device=device)
        self.length = 0  # tokens that are kept; the rest of the buffers is undefined

    def forward(self, query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        """query (1, H, Q, E), key and value (1, K, Q, E) of the tokens being read -> (1, H, Q, E)."""
        n_read = query.shape[2]
        start, self.length = self.length, self.length + n_read
        self.keys[:, :, start : self.length] = key
        self.values[:, :, start : self.length] = value
        if start == 0:  # nothing before them: no mask (Q, L) is needed
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        keys, values = self.keys[:, :, : self.length], self.values[:, :, : self.length]  # (1, K, L, E)
        mask = None  # a single token attends to everything
        if n_read > 1:
            mask = torch.ones(n_read, self.length, dtype=torch.bool, device=query.device).tril(start)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


class CachedModel:
    """A whole model with a cache in every block. Changes the model: train with another copy."""

    def __init__(self, model: nn.Module, capacity: int):
        """Allocate the cache for `capacity` tokens."""
        weight = model.tok_embeddings.weight
        self.model, self.capacity, self.device = model, capacity, weight.device
        self.length = 0
        self.caches: list[CachedAttention] = []
        for block in model.layers.values():
            cache = CachedAttention(model.model_args, capacity, dtype=weight.dtype, device=weight.device)
            block.attention.inner = cache
            self.caches.append(cache)
        # Only the last token's logits are needed; V numbers for each token of a long prompt are gigabytes.
        model.norm.register_forward_pre_hook(lambda norm, args: (args[0][:, -1:],))

    @torch.inference_mode()
    def read(self, tokens: list[int]) -> Tensor:
        """Read `tokens` after those that are kept. Return the logits of the next token, (V,) fp32 on the CPU."""
        start, stop = self.length, self.length + len(tokens)
        assert tokens and stop <= self.capacity, f"{stop} tokens in a cache of {self.capacity}"
        x = torch.tensor([tokens], device=self.device)
        positions = torch.arange(start, stop, device=self.device)[None]
        with sdpa_kernel(KERNELS):
            logits = self.model(x, positions=positions)  # (1, 1, V)
        self.length = stop
        return logits[0, -1].float().cpu()

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        assert 0 <= length <= self.length, f"{length} of {self.length} tokens"
        for cache in self.caches:
            cache.length = length
        self.length = length
