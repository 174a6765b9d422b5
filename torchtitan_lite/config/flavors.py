"""Model shapes ("flavors") and what follows from a shape alone: parameters and FLOPs.

Legend: D model dim, L layers, H query heads, K key/value heads, E head dim, F ffn dim, V vocabulary, S sequence.
Published parameter counts that the tests compare with: Llama 3.1 8B / 70B / 405B and Llama 3.2 1B / 3B model cards.
"""

from dataclasses import dataclass, fields, replace

from torchtitan_lite.config.schema import ConfigError, Model, Problem


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of long rotary wavelengths, so that a model trained on `original_length` reads on."""

    factor: float  # long wavelengths become this much longer
    low_freq_factor: float = 1.0  # wavelengths above original_length / this are stretched in full
    high_freq_factor: float = 4.0  # wavelengths below original_length / this are left alone; between: interpolated
    original_length: int = 8192  # tokens


@dataclass(frozen=True)
class ModelArgs:
    """The architecture of one Llama: everything that the model code needs to know."""

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


FLAVORS = {
    # 2,048 tokens of the shipped BPE + Llama 3's 256 special ones
    "debug": ModelArgs(dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, ffn_dim=352, vocab_size=2304),
    "1B": ModelArgs(2048, 16, 32, 8, 64, 8192, 128256, rope_scaling=RopeScaling(factor=32.0), tie_embeddings=True),
    "3B": ModelArgs(3072, 28, 24, 8, 128, 8192, 128256, rope_scaling=RopeScaling(factor=32.0), tie_embeddings=True),
    "8B": ModelArgs(4096, 32, 32, 8, 128, 14336, 128256, rope_scaling=RopeScaling(factor=8.0)),
    "70B": ModelArgs(8192, 80, 64, 8, 128, 28672, 128256, rope_scaling=RopeScaling(factor=8.0)),
    "405B": ModelArgs(16384, 126, 128, 8, 128, 53248, 128256, rope_scaling=RopeScaling(factor=8.0)),
}
FLAVORS["debugmodel"] = FLAVORS["debug"]  # torchtitan's name for it


def resolve_model(model: Model) -> ModelArgs:
    """The flavor's row of FLAVORS with the numbers that the config gives next to it. Raises ConfigError."""
    if model.flavor not in FLAVORS:
        why, remedy = "there is no such flavor", f"Known: {', '.join(FLAVORS)}"
        raise ConfigError([Problem("model.flavor", model.flavor, why, remedy)])
    row = FLAVORS[model.flavor]
    given = {f.name: getattr(model, f.name, None) for f in fields(ModelArgs) if f.name != "rope_scaling"}
    given = {name: value for name, value in given.items() if value is not None}
    if model.rope_scaling == "none":
        given["rope_scaling"] = None
    elif model.rope_scaling == "llama3" and row.rope_scaling is None:
        given["rope_scaling"] = RopeScaling(factor=8.0)
    if "head_dim" not in given and ("dim" in given or "n_heads" in given):
        dim, n_heads = given.get("dim", row.dim), given.get("n_heads", row.n_heads)
        if dim % n_heads:
            why, remedy = f"it does not divide model.dim = {dim}", "Choose a divisor, or give model.head_dim"
            raise ConfigError([Problem("model.n_heads", n_heads, why, remedy)])
        given["head_dim"] = dim // n_heads
    shape = replace(row, **given)
    problems = []
    if shape.n_heads % shape.n_kv_heads:
        why, remedy = f"it does not divide model.n_heads = {shape.n_heads}", "Choose a divisor of n_heads"
        problems.append(Problem("model.n_kv_heads", shape.n_kv_heads, why, remedy))
    if shape.head_dim % 2:
        why, remedy = "rotary embedding turns pairs of numbers", "Choose dim, n_heads or head_dim so that it is even"
        problems.append(Problem("model.head_dim", shape.head_dim, why, remedy))
    if problems:
        raise ConfigError(problems)
    return shape


def is_counted(model: Model) -> bool:
    """Whether what is counted here is counted of this model: a fork's own has the same sizes and other modules."""
    return model.name == "llama3"


def count_layer_parameters(shape: ModelArgs) -> int:
    """Parameters of one transformer block: wq, wo (H*E*D each), wk, wv (K*E*D each), w1, w2, w3, two norms."""
    attention = 2 * shape.dim * shape.head_dim * (shape.n_heads + shape.n_kv_heads)
    feed_forward = 3 * shape.dim * shape.ffn_dim
    return attention + feed_forward + 2 * shape.dim


def count_parameters(shape: ModelArgs) -> int:
    """All parameters, a tied embedding once. Equals what the model cards publish."""
    matrices_over_vocabulary = 1 if shape.tie_embeddings else 2
    return (
        shape.n_layers * count_layer_parameters(shape) + (matrices_over_vocabulary * shape.vocab_size + 1) * shape.dim
    )


@dataclass(frozen=True)
class FlopsPerToken:
    """Forward and backward of one token, without recompute; attention counted in full, and its causal half."""

    full: int
    causal: int


def count_flops_per_token(shape: ModelArgs, seq_len: int) -> FlopsPerToken:
    """6 FLOPs per matmul weight and token, plus 12*L*H*E*S for attention scores and values (PaLM, app. B, 2204.02311).

    The embedding is a lookup and costs nothing; the head counts, also where both are one tied matrix. Norms have no
    matmul. Both conventions are in use: 57.9 GFLOP (full) and 51.5 (causal) for the 8B at 8,192 tokens.
    """
    per_layer = count_layer_parameters(shape) - 2 * shape.dim  # without the norms
    matmul_weights = shape.n_layers * per_layer + shape.vocab_size * shape.dim
    attention = 12 * shape.n_layers * shape.n_heads * shape.head_dim * seq_len
    return FlopsPerToken(full=6 * matmul_weights + attention, causal=6 * matmul_weights + attention // 2)
