"""KV cache: with cached keys and values, reading one more token does not recompute the earlier tokens.

    read([a, b, c])    computes keys and values of a b c      caches a b c .     returns the logits after c
    read([d])          computes keys and values of d only     caches a b c d     returns the logits after d
    forget()           computes nothing                       caches . . . .

The cache replaces the submodule `attention.inner`, as document attention and context parallel do, so training and
generation run the same model code. It computes causal attention over one document that starts at position 0. In
config/choices.py, ATTENTIONS[name].is_plain says whether this is correct for a value of `model.attention`.

Legend: B batch (1 here), S sequence, Q tokens being read, L tokens read so far, H heads, K kv heads, E head dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtitan_lite.model.inner_attention import InnerAttention

# Without cuDNN, because it makes a plan for each new text length.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class CachedAttention(InnerAttention):
    """Causal attention from the tokens being read to themselves and to all cached tokens."""

    def __init__(self):
        super().__init__()
        self.cache: Tensor | None = None  # keys and values, (2, 1, K, L, E)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        doc_ids: Tensor | None = None,
    ) -> Tensor:
        """query (1, H, Q, E), key and value (1, K, Q, E) of the tokens being read -> (1, H, Q, E)."""
        key_value = torch.stack((key, value))
        if self.cache is not None:
            # This copies the cache, but attention reads all of it anyway, and no capacity must be known in advance.
            key_value = torch.cat((self.cache, key_value), dim=3)
        self.cache = key_value
        n_queries = query.shape[2]
        n_keys = key_value.shape[3]
        mask = None  # a single token attends to everything; an empty cache needs only is_causal
        if 1 < n_queries < n_keys:
            mask = query.new_ones(n_queries, n_keys, dtype=torch.bool).tril(n_keys - n_queries)
        return F.scaled_dot_product_attention(
            query,
            *key_value,
            attn_mask=mask,
            is_causal=n_queries == n_keys,
            enable_gqa=True,
        )


class CachedModel:
    """A full model with a KV cache in every block. Modifies the model, so do not train it afterwards."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.length = 0
        for block in model.layers.values():
            block.attention.inner = CachedAttention()
        # Only the last token's logits are needed. Logits for every token of a long prompt would take gigabytes.
        model.norm.register_forward_pre_hook(lambda norm, args: (args[0][:, -1:],))

    @torch.inference_mode()
    def read(self, tokens: list[int]) -> Tensor:
        """Append `tokens` to the cached text. Return the logits of the next token, (V,) fp32 on the CPU."""
        device = self.model.tok_embeddings.weight.device
        start = self.length
        self.length += len(tokens)
        positions = torch.arange(start, self.length, device=device)
        new = torch.tensor([tokens], device=device)
        with sdpa_kernel(KERNELS):
            logits = self.model(new, positions=positions[None])  # (1, 1, V)
        return logits[0, -1].float().cpu()

    def forget(self) -> None:
        """Empty the cache."""
        for block in self.model.layers.values():
            block.attention.inner.cache = None
        self.length = 0
