"""What one optimizer step asks of each rank, in numbers alone: the ground that memory, traffic and time stand on.

    config + shape + layout  ->  Workload  ->  memory.py    bytes that a rank holds
                                           ->  traffic.py   bytes that a rank moves
                                           ->  forecast.py  seconds, tokens per second, MFU

Legend: B sequences of a microbatch, S sequence, D model dim, H query heads, K key/value heads, E head dim, F ffn dim,
V vocabulary, T = B*S/cp tokens of a microbatch on one rank.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil
from typing import Literal

from torchtitan_lite.config.case import recomputes_by_op
from torchtitan_lite.config.flavors import ModelArgs, count_layer_parameters
from torchtitan_lite.config.float8_plan import uses_float8
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.pipeline_plan import Stages, splits_backward
from torchtitan_lite.config.schema import ActivationCheckpoint, Config, ConfigError, Problem

# "alternate" is no choice of ours: torchtitan's policy of 2024, which published rows use. It keeps every second matmul.
Recompute = Literal["none", "op", "full", "alternate"]
STATE_BYTES = {"AdamW": 8, "AdamW bfloat16": 4, "SGD": 0}  # of the optimizer, per parameter: two moments, or none
MASTER_BYTES = 4  # of a parameter at rest, and of its gradient


@dataclass(frozen=True)
class Stage:
    """What a pipeline stage holds."""

    n_layers: int
    has_embedding: bool
    has_head: bool  # and the final norm


@dataclass(frozen=True)
class Workload:
    """One optimizer step of a model in a layout. Also of models and code that are not ours, for published rows."""

    shape: ModelArgs
    layout: Layout
    seq_len: int
    recompute: Counter  # Recompute -> how many layers of the whole model
    compute_dtype: str = "bfloat16"  # of activations and gathered parameters
    matmul_dtype: str = "bfloat16"  # "float8": of the linear layers, but not the head
    optimizer: str = "AdamW"
    splits_backward: bool = False
    shards_loss: bool = True
    loss_chunk_tokens: int = 0  # 0: all logits at once
    compiled: bool = False
    ring: bool = False  # how keys and values get around under cp; else by all-gather
    documents: bool = False  # no token sees another document's
    fused_attention: bool = True  # False: the scores (S, S) are written to memory, as before FlashAttention

    @property
    def compute_bytes(self) -> int:
        return 4 if self.compute_dtype == "float32" else 2

    @property
    def n_tokens(self) -> int:
        """T: tokens that one rank computes of a microbatch."""
        return self.layout.microbatch_size * self.seq_len // self.layout.cp

    @property
    def n_loss_chunks(self) -> int:
        """Of a microbatch."""
        return ceil(self.n_tokens / self.loss_chunk_tokens) if self.loss_chunk_tokens else 1

    @property
    def hidden_bytes(self) -> int:
        """Of the hidden states of a microbatch, (B, S/cp, D), whole."""
        return self.n_tokens * self.shape.dim * self.compute_bytes

    @property
    def keys_values_bytes(self) -> int:
        """Of the keys and values of a microbatch, of all cp ranks: 2 x (B, K/tp, S, E)."""
        width = 2 * self.shape.n_kv_heads * self.shape.head_dim // self.layout.tp
        return self.layout.microbatch_size * self.seq_len * width * self.compute_bytes

    @property
    def n_reductions(self) -> int:
        """How often a step reduces the gradients: once a microbatch where they are sharded, else once."""
        per_microbatch = self.layout.zero_stage > 1 and self.layout.pp == 1
        return self.layout.n_microbatches if per_microbatch else 1

    @property
    def tokens_per_step(self) -> int:
        return self.layout.global_batch_size * self.seq_len

    @property
    def n_shards(self) -> int:
        """Ranks that share parameters, gradients and optimizer state of a stage."""
        return self.layout.dp_shard * self.layout.cp

    @property
    def is_whole(self) -> bool:
        """A rank that has its stage alone and computes in fp32 runs without FSDP (parallelize.py)."""
        return self.layout.dp * self.layout.cp * self.layout.tp == 1 and self.compute_dtype == "float32"

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return count_modules(self.layout.stages)

    def average(self, by_mode: dict[str, float]) -> float:
        """The mean over all layers of what depends on how much a layer recomputes."""
        return sum(by_mode[mode] * n for mode, n in self.recompute.items()) / self.recompute.total()

    # ------------------------------------------------------------ parameters of one rank, before dp shards them

    @cached_property
    def layer_parameters(self) -> int:
        """tp shares the linear layers, and each of its ranks has the norms."""
        return count_layer_parameters(self.shape, tp=self.layout.tp)

    @cached_property
    def vocabulary_parameters(self) -> int:
        """Of the embedding, or of the head."""
        return self.shape.vocab_size * self.shape.dim // self.layout.tp

    def groups_of(self, stage: Stage) -> list[int]:
        """Parameters of each group that FSDP gathers at once; the head's, with the final norm, comes last (fsdp.py)."""
        embedding = [self.vocabulary_parameters] * stage.has_embedding
        head = [self.vocabulary_parameters + self.shape.dim] * stage.has_head
        if embedding and head and self.shape.tie_embeddings:
            embedding = []
        return embedding + [self.layer_parameters] * stage.n_layers + head

    def count_stage_parameters(self, stage: Stage) -> int:
        norm = self.shape.dim * stage.has_head
        n_vocabulary = self.count_vocabulary_tensors(stage)
        return self.layer_parameters * stage.n_layers + self.vocabulary_parameters * n_vocabulary + norm

    def count_vocabulary_tensors(self, stage: Stage) -> int:
        """Embedding and head; tied, they are one."""
        tied = stage.has_embedding and stage.has_head and self.shape.tie_embeddings
        return stage.has_embedding + stage.has_head - tied


@lru_cache
def count_modules(stages: Stages) -> tuple[Stage, ...]:
    """What each stage holds, from the names of its modules. Kept: a search asks for the same stages again and again."""
    return tuple(
        Stage(sum(fqn.startswith("layers.") for fqn in fqns), "tok_embeddings" in fqns, "output" in fqns)
        for fqns in stages
    )


def describe_workload(config: Config, shape: ModelArgs, layout: Layout) -> Workload:
    """A step of a run. Where the compute dtype is still "auto", that of a GPU is taken. Raises ConfigError."""
    if config.activation_checkpoint.mode == "memory_budget":
        why = "what is computed again is the compiler's choice, which no closed form knows"
        remedy = 'Ask for "none" and for "full": it lies between them'
        raise ConfigError([Problem("activation_checkpoint.mode", "memory_budget", why, remedy)])
    dtype = config.training.mixed_precision_param
    dtype = "bfloat16" if dtype == "auto" else dtype
    return Workload(
        shape=shape,
        layout=layout,
        seq_len=config.training.seq_len,
        recompute=count_recompute(config.activation_checkpoint, shape.n_layers, recomputes_by_op(config)),
        compute_dtype=dtype,
        matmul_dtype="float8" if uses_float8(config) else dtype,
        optimizer="AdamW bfloat16" if config.optimizer.moments_dtype == "bfloat16" else config.optimizer.name,
        splits_backward=splits_backward(config.parallelism),
        shards_loss=not config.parallelism.disable_loss_parallel,
        loss_chunk_tokens=config.training.loss_chunk_tokens,
        compiled=config.compile.enable,
        ring=config.parallelism.context_parallel_rotate_method == "ring",
        documents=config.model.attention == "document",
    )


def count_recompute(section: ActivationCheckpoint, n_layers: int, by_op: bool) -> Counter:
    """How many layers recompute how much, as plan_recompute of activation_checkpoint.py has it layer by layer."""
    if section.mode != "selective":
        return Counter({section.mode: n_layers})
    if by_op:
        return Counter({"op": n_layers})
    n_full = -(-n_layers // int(section.selective_ac_option))  # layers 0, n, 2n ...
    return Counter({"full": n_full, "none": n_layers - n_full})
