"""Define the types of the rows that describe a model. Needs no torch. The rows themselves are in
`models/NAME/table.py`.

    ModelArgs     the sizes of a model, and the options that its modules share
    ModuleRow     one module: its weight and bias, how tp splits them, their initial values
    ModelTable    one model: its ModelArgs by flavor, its ModuleRows; models/registry.py lists the models

Everything else derives from these tables: counts and FLOPs, tensor parallel, float8, memory, traffic, initial weights
and the bounds of `verify`. family_rows.py has the types for Hugging Face folders.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

SLIDING = "sliding_attention"  # a type of layer in ModelArgs.layer_types
FULL = "full_attention"
LAYER_TYPES = (SLIDING, FULL)
# value of model.flavor: use the model of the loaded weights, or debug if the run loads no weights
AUTO = "auto"


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary wavelengths for contexts longer than the original training context.

    The kind "llama3" (Llama 3.1) scales only long wavelengths. The kind "linear" scales all wavelengths, and uses no
    field except `factor`.
    """

    factor: float  # scaled wavelengths are multiplied by this factor
    low_freq_factor: float = 1.0  # wavelengths above original_length / low_freq_factor are scaled
    # wavelengths below original_length / high_freq_factor are not scaled; between the two bounds, the scale is
    # interpolated
    high_freq_factor: float = 4.0
    original_length: int = 8192  # tokens in the original training context
    kind: Literal["llama3", "linear"] = "llama3"


@dataclass(frozen=True)
class MoEArgs:
    """An MoE feed-forward (model/moe.py): a router picks a few experts for each token."""

    n_experts: int
    top_k: int  # experts per token
    expert_ffn_dim: int  # hidden dim of one expert
    # number of experts that see every token; they are merged into one feed-forward
    n_shared_experts: int = 0
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    normalize_top_k: bool = True  # scale the routing weights of a token to a sum of 1
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
    moe: MoEArgs | None = None  # None if every layer is dense
    name: str = "llama3"  # a row of models/registry.py
    qkv_bias: bool = False  # a bias on the projections to queries, keys and values
    # number of tokens that a token attends to in layers of type "sliding_attention", itself included
    sliding_window: int | None = None
    # types of the layers (LAYER_TYPES), repeated if the model has more layers than types; empty: all layers have the
    # window
    layer_types: tuple[str, ...] = ()
    attention_sinks: bool = False  # each query head has a learned logit without a key or value

    def find_window(self, layer: int) -> int | None:
        """Return the number of tokens that a token attends to in this layer; None if it attends to all earlier
        tokens."""
        types = self.layer_types or (SLIDING,)
        return self.sliding_window if types[layer % len(types)] == SLIDING else None

    def is_moe(self, layer: int) -> bool:
        """Return whether this layer has experts."""
        moe = self.moe
        if moe is None or layer < moe.n_first_dense_layers:
            return False
        return (layer + 1) % moe.moe_every == 0


# kind of a module -> its values of tp_style, which parallel/tensor_parallel.py implements (experts: expert_parallel.py)
TP_STYLES = {
    "linear": "colwise rowwise sequence whole gathered vocabulary".split(),
    "norm": ("sequence", "heads", "whole", "colwise"),
    "embedding": ("vocabulary",),
    "router": ("sequence",),
    "experts": ("experts",),
}


@dataclass(frozen=True)
class ModuleRow:
    """One module with a weight, and perhaps a bias.

        kind                        weight
        linear, embedding, router   (out, in)
        norm                        (size,). Also for other elementwise modules
        experts                     (experts, in, out)

    Under tensor parallel:

        tp_style    the tensors on a tp rank                  how the module computes there
        colwise     its output features, of weight and bias   all tokens are all-gathered before its parent module
        rowwise     its input features; the whole bias        partial sums are reduce-scattered; then the bias is added
        vocabulary  its rows                                  embedding or head
        sequence    all                                       its own forward, on the rank's slice of the sequence
        heads       all                                       its own forward, on the rank's heads
        whole       all                                       its own forward, on all tokens and features (MLA latents)
        gathered    all                                       like sequence; its output is all-gathered, (B, S, out):
                                                              equal on all ranks, for a loss that the model adds
        experts     split over ep, not over tp                parallel/expert_parallel.py
    """

    # FQN relative to the block, or to the model if the module is outside the blocks; for experts, FQN of the parameter
    name: str
    kind: str  # a key of TP_STYLES
    weight: tuple[int, ...]
    tp_style: str
    # standard deviation of the normal initial weights, which are clamped at three standard deviations; 0: the constant
    # init_mean
    init_std: float = 0.0
    bias: bool = False  # whether the module has a bias, which starts at 0
    # a number, or a tuple that is broadcast to the weight, such as one value per head
    init_mean: float | tuple[float, ...] = 0.0
    # For colwise modules: number of key/value heads in the output. If tp has more ranks than there are heads, several
    # ranks share each head.
    kv_heads: int = 0
    # Rotary embedding rotates the output of this module. In Hugging Face files, the rows of each head have a different
    # order than in this trainer.
    is_rotated: bool = False
    # for a module outside the blocks: "first" or "last", the pipeline stage that has the module
    end: str = ""

    @property
    def child(self) -> str:
        """Name of the child of the model that contains this module."""
        return self.name.partition(".")[0]

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """FQN inside the block -> shape of each parameter."""
        if self.kind == "experts":
            return {self.name: self.weight}
        tensors = {f"{self.name}.weight": self.weight}
        if self.bias:
            tensors[f"{self.name}.bias"] = self.weight[:1]
        return tensors


@dataclass(frozen=True)
class ModelTable:
    """A model: its sizes by flavor (one must be "debug"), its modules, and the file with its Hugging Face families."""

    flavors: dict[str, ModelArgs]
    # function that lists the modules of a block, dense or with experts
    list_block: Callable[[ModelArgs, MoEArgs | None], list[ModuleRow]]
    # tok_embeddings, norm, output, and any other module outside the blocks, each with its `end`; the FQNs are relative
    # to the model
    list_ends: Callable[[ModelArgs], list[ModuleRow]]
    # module that defines FAMILIES (model_type -> Family), such as "models.llama3.hugging_face"; "": no Hugging Face
    # format
    families: str = ""
    # keyword argument of the model's forward -> function that computes it from a Batch (model/batch.py)
    fields: dict[str, Callable] = field(default_factory=dict)
    # how often training calls the head per microbatch; `plan` needs this number for FLOPs and step time
    head_calls: int = 1
