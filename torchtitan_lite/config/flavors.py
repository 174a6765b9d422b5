"""Sizes of the models ("flavors"), what a block consists of, and what follows from these alone: parameters and FLOPs.

Legend: D model dim, L layers, H query heads, K key/value heads, E head dim, F ffn dim, V vocabulary, S sequence.
Published parameter counts that the tests compare with: Llama 3.1 8B / 70B / 405B and Llama 3.2 1B / 3B model cards.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Literal


@dataclass(frozen=True)
class RopeScaling:
    """How rotary wavelengths are stretched, so that a model reads more than the tokens that it was first trained on.

    llama3, as Llama 3.1 has it, stretches the long ones; linear stretches all, and reads the factor alone.
    """

    factor: float  # stretched wavelengths become this much longer
    low_freq_factor: float = 1.0  # wavelengths above original_length / this are stretched in full
    high_freq_factor: float = 4.0  # wavelengths below original_length / this are left alone; between: interpolated
    original_length: int = 8192  # tokens
    kind: Literal["llama3", "linear"] = "llama3"


ROPE_KEYS = {  # number of RopeScaling -> its key in [model]
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_length": "rope_original_max_position_embeddings",
}


@dataclass(frozen=True)
class ModelArgs:
    """The architecture of one model: everything that the model code needs to know."""

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
    name: str = "llama3"  # a row of BLOCKS


FLAVORS = {
    # 2,048 tokens of the shipped BPE + Llama 3's 256 special ones
    "debug": ModelArgs(dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, ffn_dim=352, vocab_size=2304),
    # torchtitan's: ffn_dim is 8/3 of dim, rounded up to a multiple of 256
    "debugmodel": ModelArgs(256, 6, 16, 16, 16, 768, 2048, rope_scaling=RopeScaling(factor=8.0)),
    "1B": ModelArgs(2048, 16, 32, 8, 64, 8192, 128256, rope_scaling=RopeScaling(factor=32.0), tie_embeddings=True),
    "3B": ModelArgs(3072, 28, 24, 8, 128, 8192, 128256, rope_scaling=RopeScaling(factor=32.0), tie_embeddings=True),
    "8B": ModelArgs(4096, 32, 32, 8, 128, 14336, 128256, rope_scaling=RopeScaling(factor=8.0)),
    "70B": ModelArgs(8192, 80, 64, 8, 128, 28672, 128256, rope_scaling=RopeScaling(factor=8.0)),
    "405B": ModelArgs(16384, 126, 128, 8, 128, 53248, 128256, rope_scaling=RopeScaling(factor=8.0)),
}
AUTO = "auto"  # the model of the Hugging Face folder that the run starts from (run_config.py), else:
FLAVORS[AUTO] = FLAVORS["debug"]


@dataclass(frozen=True)
class BlockModule:
    """A module of a transformer block with one weight."""

    name: str  # FQN inside the block
    weight: tuple[int, ...]  # (out, in) features of a linear layer; (size,) of a norm
    # Colwise, rowwise: tp splits out, or in. Else every tp rank holds the whole weight, and applies it to its slice of
    # the sequence, or to its heads (B, H/tp, S, E).
    tp: Literal["colwise", "rowwise", "sequence", "heads"] = "sequence"

    @property
    def is_linear(self) -> bool:
        return len(self.weight) == 2


def list_llama_block(args: ModelArgs) -> list[BlockModule]:
    """List the modules of a Llama block in the order of the model file: attention and SwiGLU, a norm before each."""
    query, key = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    return [
        BlockModule("attention_norm", (args.dim,)),
        BlockModule("attention.wq", (query, args.dim), "colwise"),
        BlockModule("attention.wk", (key, args.dim), "colwise"),
        BlockModule("attention.wv", (key, args.dim), "colwise"),
        BlockModule("attention.wo", (args.dim, query), "rowwise"),
        BlockModule("ffn_norm", (args.dim,)),
        BlockModule("feed_forward.w1", (args.ffn_dim, args.dim), "colwise"),
        BlockModule("feed_forward.w2", (args.dim, args.ffn_dim), "rowwise"),
        BlockModule("feed_forward.w3", (args.ffn_dim, args.dim), "colwise"),
    ]


# The TP plan, float8, counts, memory, traffic and FLOPs are derived from these tables.
BLOCKS: dict[str, Callable[[ModelArgs], list[BlockModule]]] = {  # model.name -> the modules of its block
    "llama3": list_llama_block,
}


def list_block(args: ModelArgs) -> list[BlockModule]:
    """List the modules with weights of one block of this model."""
    return BLOCKS[args.name](args)


def count_layer_parameters(args: ModelArgs, *, tp: int = 1, linear_only: bool = False) -> int:
    """Return the parameters of one block that one of `tp` ranks holds."""
    return sum(
        prod(module.weight) // (tp if module.is_linear else 1)
        for module in list_block(args)
        if module.is_linear or not linear_only
    )


def count_parameters(args: ModelArgs) -> int:
    """Return the number of all parameters, a tied embedding once. Equals what the model cards publish."""
    n_matrices = 1 if args.tie_embeddings else 2  # over the vocabulary
    return args.n_layers * count_layer_parameters(args) + (n_matrices * args.vocab_size + 1) * args.dim


@dataclass(frozen=True)
class FlopsPerToken:
    """FLOPs of one token, forward and backward, without recompute: attention counted in full, or its causal half."""

    full: int
    causal: int


def count_flops_per_token(args: ModelArgs, seq_len: int) -> FlopsPerToken:
    """Count 6 FLOPs per matmul weight and token, plus 12*L*H*E*S of attention (PaLM, app. B, arXiv:2204.02311).

    The embedding is a lookup and costs nothing; the head counts, also where both are one tied matrix. Norms have no
    matmul. Both conventions are in use: 57.9 GFLOP (full) and 51.5 (causal) for the 8B at 8,192 tokens.
    """
    matmul_weights = args.n_layers * count_layer_parameters(args, linear_only=True) + args.vocab_size * args.dim
    attention = 12 * args.n_layers * args.n_heads * args.head_dim * seq_len
    return FlopsPerToken(full=6 * matmul_weights + attention, causal=6 * matmul_weights + attention // 2)
