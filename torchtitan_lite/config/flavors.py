"""Model sizes: one row of FLAVORS per model, and the dataclasses that make up a row.

The tests compare parameter counts with the model cards.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary wavelengths for contexts longer than the original training context.

    kind llama3 (Llama 3.1) scales only long wavelengths. kind linear scales all of them, and only uses `factor`.
    """

    factor: float  # scaled wavelengths are multiplied by this
    low_freq_factor: float = 1.0  # wavelengths above original_length / low_freq_factor are scaled
    high_freq_factor: float = 4.0  # wavelengths below original_length / high_freq_factor are not; between: interpolated
    original_length: int = 8192  # tokens in the original training context
    kind: Literal["llama3", "linear"] = "llama3"


@dataclass(frozen=True)
class MoEArgs:
    """An MoE feed-forward (model/moe.py): a router picks a few experts for each token."""

    n_experts: int
    top_k: int  # experts per token
    expert_ffn_dim: int  # hidden dim of one expert
    n_shared_experts: int = 0  # experts that see every token, merged into one feed-forward
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    normalize_top_k: bool = True  # scale the weights of a token's experts to a sum of 1
    n_first_dense_layers: int = 0  # number of layers at the start that have no experts
    moe_every: int = 1  # every n-th layer has experts


@dataclass(frozen=True)
class ModelArgs:
    """The architecture of one model."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qk_norm: bool = False  # an RMSNorm of each query and key head
    moe: MoEArgs | None = None  # None: every layer is dense
    name: str = "llama3"  # a row of BLOCKS

    def is_moe(self, layer: int) -> bool:
        """Whether this layer has experts."""
        moe = self.moe
        if moe is None or layer < moe.n_first_dense_layers:
            return False
        return (layer + 1) % moe.moe_every == 0


def mixtral(dim: int, n_layers: int, n_heads: int, ffn_dim: int) -> ModelArgs:
    """Return a Mixtral model (arXiv:2401.04088): two of eight experts in every layer."""
    moe = MoEArgs(n_experts=8, top_k=2, expert_ffn_dim=ffn_dim)
    return ModelArgs(dim, n_layers, n_heads, 8, 128, ffn_dim, 32000, rope_theta=1e6, moe=moe)


def qwen3(*numbers: int, tied: bool = False, expert_ffn_dim: int | None = None) -> ModelArgs:
    """Return a Qwen3 model (arXiv:2505.09388): head_dim is always 128, QK-norm; with experts, 8 of 128 per token."""
    dim, n_layers, n_heads, n_kv_heads, ffn_dim = numbers
    moe = MoEArgs(n_experts=128, top_k=8, expert_ffn_dim=expert_ffn_dim) if expert_ffn_dim else None
    family = {"norm_eps": 1e-6, "rope_theta": 1e6, "qk_norm": True, "tie_embeddings": tied, "moe": moe}
    return ModelArgs(dim, n_layers, n_heads, n_kv_heads, 128, ffn_dim, 151936, **family)


FLAVORS = {
    # vocabulary: 2,048 tokens of the shipped BPE + Llama 3's 256 special tokens
    "debug": ModelArgs(dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, ffn_dim=352, vocab_size=2304),
    # from torchtitan: ffn_dim is 8/3 of dim, rounded up to a multiple of 256
    "debugmodel": ModelArgs(256, 6, 16, 16, 16, 768, 2048, rope_scaling=RopeScaling(factor=8.0)),
    "1B": ModelArgs(2048, 16, 32, 8, 64, 8192, 128256, rope_scaling=RopeScaling(factor=32.0), tie_embeddings=True),
    "3B": ModelArgs(3072, 28, 24, 8, 128, 8192, 128256, rope_scaling=RopeScaling(factor=32.0), tie_embeddings=True),
    "8B": ModelArgs(4096, 32, 32, 8, 128, 14336, 128256, rope_scaling=RopeScaling(factor=8.0)),
    "70B": ModelArgs(8192, 80, 64, 8, 128, 28672, 128256, rope_scaling=RopeScaling(factor=8.0)),
    "405B": ModelArgs(16384, 126, 128, 8, 128, 53248, 128256, rope_scaling=RopeScaling(factor=8.0)),
    # 2M parameters, 1.1M active per token
    "debug_moe": ModelArgs(128, 4, 4, 2, 32, 352, 2304, moe=MoEArgs(8, top_k=2, expert_ffn_dim=96)),
    "Mixtral-8x7B": mixtral(4096, 32, 32, 14336),
    "Mixtral-8x22B": mixtral(6144, 56, 48, 16384),
    "Qwen3-0.6B": qwen3(1024, 28, 16, 8, 3072, tied=True),
    "Qwen3-1.7B": qwen3(2048, 28, 16, 8, 6144, tied=True),
    "Qwen3-4B": qwen3(2560, 36, 32, 8, 9728, tied=True),
    "Qwen3-8B": qwen3(4096, 36, 32, 8, 12288),
    "Qwen3-14B": qwen3(5120, 40, 40, 8, 17408),
    "Qwen3-32B": qwen3(5120, 64, 64, 8, 25600),
    "Qwen3-30B-A3B": qwen3(2048, 48, 32, 4, 6144, expert_ffn_dim=768),
    "Qwen3-235B-A22B": qwen3(4096, 94, 64, 4, 12288, expert_ffn_dim=1536),
}
AUTO = "auto"  # the model of the weights that the run loads (preflight.py); without weights, debug:
FLAVORS[AUTO] = FLAVORS["debug"]
