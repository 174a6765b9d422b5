"""Define the Llama family in single-device code: no ranks, no process groups, no environment variables.

    tokens -> tok_embeddings -> n_layers x (attention, feed-forward) -> norm -> output -> logits, or the loss

Mixtral is the same model with experts in place of the feed-forward network (model/moe.py). Qwen2 adds a bias to
queries, keys and values. Qwen3 adds an RMSNorm to each query and key head. table.py lists the modules and their initial
weights.

Legend: B batch, S sequence, D model dim, H query heads, K key/value heads, E head dim, F ffn dim, V vocabulary.
Sources: Llama 3, arXiv:2407.21783; RoPE 2104.09864; RMSNorm 1910.07467; SwiGLU 2002.05202; GQA 2305.13245;
QK-norm 2302.05442.

Modules and parameters are named as in Meta's checkpoints (`layers.3.attention.wq.weight`).
"""

import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.config.extensions import load_module
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.model.attention import build_attention
from torchtitan_lite.model.head import Head
from torchtitan_lite.model.rotary import rotary_angles, rotate


class Llama3(nn.Module):
    """The full model, or one pipeline stage: absent children are None, and `layers` has only the stage's layers."""

    def __init__(self, model_args: ModelArgs, *, attention: str = "causal"):
        """`attention` is a key of ATTENTIONS (config/choices.py)."""
        super().__init__()
        self.model_args = model_args
        self.tok_embeddings = nn.Embedding(model_args.vocab_size, model_args.dim)
        # The keys of this dict are layer numbers, so FQNs on a pipeline stage with layers 3 and 4 contain these
        # numbers.
        self.layers = nn.ModuleDict()
        for layer in range(model_args.n_layers):
            inner = build_attention(attention, model_args, layer)
            block = TransformerBlock(model_args, inner, is_moe=model_args.is_moe(layer))
            self.layers[str(layer)] = block
        self.norm = nn.RMSNorm(model_args.dim, eps=model_args.norm_eps)
        self.output = Head(model_args.dim, model_args.vocab_size)
        if model_args.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor,
        doc_ids: Tensor | None = None,
        targets: Tensor | None = None,
        **extra: Tensor,
    ) -> Tensor:
        """Run this part. x: tokens (B, S) int64 if this part has the embedding, otherwise hidden states (B, S, D).

        positions, doc_ids, targets: (B, S) int64; only document attention reads doc_ids. Returns logits (B, S, V) or,
        given targets, the sum of token losses, () fp32. A part without head returns hidden states (B, S, D). The head
        passes `extra` to the loss.
        """
        hidden = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        rotation = rotary_angles(positions, self.model_args)
        blocks = list(self.layers.values())
        if blocks:
            doc_ids = blocks[0].attention.inner.plan(doc_ids)  # computed once for all layers
        for block in blocks:
            hidden = block(hidden, rotation, doc_ids)
        if self.output is None:
            return hidden
        return self.output(self.norm(hidden), targets, **extra)


class TransformerBlock(nn.Module):
    def __init__(self, model_args: ModelArgs, inner_attention: nn.Module, *, is_moe: bool):
        super().__init__()
        self.attention_norm = nn.RMSNorm(model_args.dim, eps=model_args.norm_eps)
        self.attention = Attention(model_args, inner_attention)
        self.ffn_norm = nn.RMSNorm(model_args.dim, eps=model_args.norm_eps)
        self.feed_forward = FeedForward(model_args.dim, model_args.ffn_dim)
        # A feed-forward network for every token, in addition to the routed experts
        self.shared_experts = None
        if is_moe:
            moe = model_args.moe
            self.feed_forward = load_module("model.moe").MoE(model_args.dim, moe)
            if moe.n_shared_experts:
                ffn_dim = moe.n_shared_experts * moe.expert_ffn_dim
                self.shared_experts = FeedForward(model_args.dim, ffn_dim)

    def forward(self, x: Tensor, rotation: Tensor, doc_ids: Tensor | None) -> Tensor:
        """x (B, S, D) -> (B, S, D). doc_ids: (B, S), or the result of the attention's `plan`."""
        x = self.attend(x, rotation, doc_ids)
        normed = self.ffn_norm(x)
        x = x + self.feed_forward(normed)
        return x if self.shared_experts is None else x + self.shared_experts(normed)

    def attend(self, x: Tensor, rotation: Tensor, doc_ids: Tensor | None) -> Tensor:
        """Add attention to the residual stream: (B, S, D) -> (B, S, D)."""
        return x + self.attention(self.attention_norm(x), rotation, doc_ids)


class Attention(nn.Module):
    """Grouped-query attention: H query heads share K key/value heads."""

    def __init__(self, model_args: ModelArgs, inner: nn.Module):
        super().__init__()
        dim = model_args.dim
        head_dim = model_args.head_dim
        query_dim = model_args.n_heads * head_dim
        kv_dim = model_args.n_kv_heads * head_dim
        bias = model_args.qkv_bias
        self.head_dim = head_dim
        self.wq = nn.Linear(dim, query_dim, bias=bias)
        self.wk = nn.Linear(dim, kv_dim, bias=bias)
        self.wv = nn.Linear(dim, kv_dim, bias=bias)
        self.wo = nn.Linear(query_dim, dim, bias=False)
        self.q_norm = None
        self.k_norm = None
        if model_args.qk_norm:
            self.q_norm = nn.RMSNorm(head_dim, eps=model_args.norm_eps)
            self.k_norm = nn.RMSNorm(head_dim, eps=model_args.norm_eps)
        self.inner = inner

    def forward(self, x: Tensor, rotation: Tensor, doc_ids: Tensor | None) -> Tensor:
        """x (B, S, D) -> (B, S, D)."""
        # The number of heads follows from the projections (-1), so TP can split the heads without changes here.
        shape = (-1, self.head_dim)
        query = self.wq(x).unflatten(-1, shape)  # (B, S, H, E)
        key = self.wk(x).unflatten(-1, shape)  # (B, S, K, E)
        value = self.wv(x).unflatten(-1, shape)
        if self.q_norm is not None:
            query = self.q_norm(query)
            key = self.k_norm(key)
        query = rotate(query, rotation).transpose(1, 2)
        key = rotate(key, rotation).transpose(1, 2)
        value = value.transpose(1, 2)
        heads = self.inner(query, key, value, doc_ids)  # (B, H, S, E)
        heads = heads.transpose(1, 2)
        return self.wo(heads.flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, ffn_dim: int):
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, D) -> (B, S, D)."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


Model = Llama3
