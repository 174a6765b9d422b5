"""Cache the keys and values of attention. Reading one more token then does not recompute the keys and values of the
earlier tokens.

    read([a, b, c])    computes keys and values of a b c      caches a b c .     returns the logits after c
    read([d])          computes keys and values of d only     caches a b c d     returns the logits after d
    forget()           computes nothing                       caches . . . .

The cache replaces the submodule `attention.inner`, as context parallel does, so training and generation run the same
model code. The cache computes attention over one document that starts at position 0, with the window and the sinks of
its layer. A value of model.attention is supported if its row in config/choices.py names no file. A model with custom
attention (model/own_attention.py) is not supported.

Legend: B batch (1 here), S sequence, Q tokens being read, L tokens read so far, H heads, K kv heads, E head dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from torchtitan_lite.config.messages import UserError
from torchtitan_lite.extensions.windowed_attention import attend_with_mask
from torchtitan_lite.model.attention import (
    OTHER_KERNELS,
    InnerAttention,
    build_attention,
    stack_heads,
)
from torchtitan_lite.model.own_attention import explain_own_attention, list_attentions

MOST_ERROR = 2e-5  # largest allowed error, as a fraction of the largest logit; correct models have errors of about 1e-6


class CachedAttention(InnerAttention):
    """Causal attention. Each new token attends to the cached tokens and to the new tokens up to itself, within the
    window."""

    def __init__(self, replaced: InnerAttention):
        super().__init__()
        self.window: int | None = getattr(replaced, "window", None)
        self.sinks: nn.Module | None = getattr(replaced, "sinks", None)
        # keys and values (2, 1, K, L, E). If there is a window, the cache has only the tokens to which later tokens can
        # attend.
        self.cache: Tensor | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        doc_ids: Tensor | None = None,
    ) -> Tensor:
        """query (1, H, Q, E), key and value (1, K, Q, E) of the tokens being read -> (1, H, Q, E)."""
        key_value = stack_heads(key, value)
        if self.cache is not None:
            # This copies the cache. The copy costs little, because attention reads the whole cache anyway. Because of
            # this copy, no memory has to be reserved in advance.
            key_value = torch.cat((self.cache, key_value), dim=3)
        n_queries = query.shape[2]
        n_keys = key_value.shape[3]
        first_kept = max(0, n_keys + 1 - self.window) if self.window else 0
        self.cache = key_value[:, :, :, first_kept:]
        if self.window or self.sinks is not None or 1 < n_queries < n_keys:
            keys = torch.arange(n_keys, device=query.device)
            distance = keys[-n_queries:, None] - keys
            mask = (distance >= 0) & (distance < (self.window or n_keys))
            sinks = None if self.sinks is None else self.sinks()
            return attend_with_mask(query, *key_value, mask, sinks)
        # A single token attends to all keys. If the cache is empty, is_causal is the correct mask.
        return F.scaled_dot_product_attention(
            query,
            *key_value,
            is_causal=n_queries == n_keys,
            enable_gqa=True,
        )


class CachedModel:
    """A full model with a KV cache in every attention. Modifies the model, so do not train it afterwards.

    Raises UserError if the model has custom attention. The cache would replace the custom code, or the custom code
    would not use the cache.
    """

    def __init__(self, model: nn.Module, attention: str = "causal"):
        """`attention` is the value of model.attention. The row of this value in ATTENTIONS must name no file."""
        self.model = model
        self.length = 0
        expected = type(build_attention(attention, model.model_args, 0))
        if why := explain_own_attention(model, expected):
            raise UserError(
                f"The KV cache cannot serve this attention: {why}. Use eval. If this attention differs from causal "
                "attention only in its windows, describe the windows in a row of ATTENTIONS (config/choices.py)."
            )
        self.caches = []
        for fqn, inner in list_attentions(model).items():
            cached = CachedAttention(inner)
            model.set_submodule(fqn, cached)
            self.caches.append(cached)
        # Only the last token's logits are needed. Logits for every token of a long prompt would take gigabytes.
        model.norm.register_forward_pre_hook(lambda norm, args: (args[0][:, -1:],))
        self.require_equal_pieces()

    def require_equal_pieces(self) -> None:
        """Raise UserError if reading a token after 64 others gives different logits than reading all tokens at once.

        The logits differ if layers mix tokens outside attention, or call an attention several times. The check runs
        only in float32, because rounding in bfloat16 hides the difference. Also raises UserError if the model fails
        with the cache.
        """
        tokens = [0, 1] * 32
        try:
            at_once = self.read([*tokens, 0])
        except Exception as error:
            raise UserError(
                "The KV cache cannot serve this model. The forward fails if targets and extra fields are missing, or "
                f"if the cache is used: {error}. Use eval."
            ) from error
        self.forget()
        self.read(tokens)
        alone = self.read([0])
        self.forget()
        error = (alone - at_once).abs().max() / at_once.abs().max()
        if error > MOST_ERROR and self.model.output.weight.dtype == torch.float32:
            raise UserError(
                "The KV cache cannot serve this model: layers mix tokens outside of attention.inner, or call it "
                f"several times. The cache changes the logits by {error:.0e}. Use eval, which needs no cache."
            )

    @torch.inference_mode()
    def read(self, tokens: list[int]) -> Tensor:
        """Append `tokens` to the cached text. Return the logits of the next token, (V,) fp32 on the CPU."""
        device = self.model.tok_embeddings.weight.device
        start = self.length
        self.length += len(tokens)
        positions = torch.arange(start, self.length, device=device)
        new = torch.tensor([tokens], device=device)
        # without cuDNN, which builds a new execution plan for each sequence length
        with sdpa_kernel(OTHER_KERNELS):
            logits = self.model(new, positions=positions[None])  # (1, 1, V)
        return logits[0, -1].float().cpu()

    def forget(self) -> None:
        """Empty the cache."""
        for cached in self.caches:
            cached.cache = None
        self.length = 0
