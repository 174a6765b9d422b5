"""One optimizer step of a model in a layout, as numbers: the input of every closed form.

    config + model_args + layout  ->  Workload  ->  config/memory.py    bytes that a rank holds
                                                ->  plan/traffic.py     bytes that a rank moves
                                                ->  plan/step_time.py   seconds

Legend: B sequences of a microbatch, S sequence, D model dim, H query heads, K key/value heads, E head dim, F ffn dim,
V vocabulary, T = B*S/cp tokens of a microbatch on one rank.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil, prod
from typing import Literal

from torchtitan_lite.config.choices import OPTIMIZERS
from torchtitan_lite.config.flavors import BlockModule, ModelArgs, count_layer_parameters, list_block
from torchtitan_lite.config.float8_plan import uses_float8
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.pipeline_plan import Stages, splits_backward
from torchtitan_lite.config.schema import ActivationCheckpoint, Config, Optimizer

# No config asks for "alternate": it is torchtitan's policy of 2024, which keeps every second matmul. Published runs
# use it.
Recompute = Literal["none", "op", "full", "alternate"]
MASTER_BYTES = 4  # fp32: of a parameter between steps, and of its gradient


@dataclass(frozen=True)
class Stage:
    """What a pipeline stage holds."""

    n_layers: int
    has_embedding: bool
    has_head: bool  # and the final norm


@dataclass(frozen=True)
class Workload:
    """One optimizer step of a model in a layout. Published runs of other code are described by it too."""

    args: ModelArgs
    layout: Layout
    seq_len: int
    recompute: Counter  # Recompute -> number of layers of the whole model
    compute_dtype: str = "bfloat16"  # of activations and gathered parameters
    matmul_dtype: str = "bfloat16"  # of the linear layers without the head; may be "float8"
    moment_bytes: int = 8  # optimizer state per parameter
    splits_backward: bool = False
    shards_loss: bool = True
    loss_chunk_tokens: int = 0  # 0: all logits at once
    compiled: bool = False
    ring: bool = False  # under cp, keys and values travel around a ring; else by all-gather
    documents: bool = False  # attention stays inside documents
    fused_attention: bool = True  # False: the scores (S, S) are written to memory, as before FlashAttention

    @property
    def compute_bytes(self) -> int:
        return 4 if self.compute_dtype == "float32" else 2

    @property
    def n_tokens(self) -> int:
        """T: tokens of a microbatch on one rank."""
        return self.layout.microbatch_size * self.seq_len // self.layout.cp

    @property
    def n_loss_chunks(self) -> int:
        """Chunks of the loss of one microbatch."""
        return ceil(self.n_tokens / self.loss_chunk_tokens) if self.loss_chunk_tokens else 1

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden states of a microbatch, (B, S/cp, D), before tp shards them."""
        return self.n_tokens * self.args.dim * self.compute_bytes

    @property
    def keys_values_bytes(self) -> int:
        """Bytes of the keys and values of a microbatch on all cp ranks: 2 x (B, K/tp, S, E)."""
        width = 2 * self.args.n_kv_heads * self.args.head_dim // self.layout.tp
        return self.layout.microbatch_size * self.seq_len * width * self.compute_bytes

    @property
    def n_reductions(self) -> int:
        """Reductions of the gradients in a step: one a microbatch where gradients are sharded, else one."""
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
        """Whether the rank runs without FSDP: it has its stage alone and computes in fp32 (parallelize.py)."""
        return self.layout.dp * self.layout.cp * self.layout.tp == 1 and self.compute_dtype == "float32"

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return count_modules(self.layout.stages)

    @cached_property
    def block(self) -> list[BlockModule]:
        """Norms and linear layers of a block. Each norm is followed by linear layers that tp splits by columns."""
        return list_block(self.args)

    @cached_property
    def n_norms(self) -> int:
        """Norms of a block: tp all-gathers the output of each."""
        return sum(not module.is_linear for module in self.block)

    @cached_property
    def n_rowwise(self) -> int:
        """Linear layers of a block that tp splits by rows: their partial sums are reduce-scattered."""
        return sum(module.split == "rowwise" for module in self.block)

    @cached_property
    def linear_parameters(self) -> int:
        """Weights of a block's matmuls, before tp shards them."""
        return count_layer_parameters(self.args, linear_only=True)

    @cached_property
    def last_linear_parameters(self) -> int:
        """Weights of the block's last matmul. Recompute ends before it: backward does not need its output."""
        return prod([module for module in self.block if module.split == "rowwise"][-1].weight)

    def average(self, by_mode: dict[str, float]) -> float:
        """Return the mean over all layers of a number that depends on the recompute mode."""
        return sum(by_mode[mode] * n for mode, n in self.recompute.items()) / self.recompute.total()

    # ------------------------------------------------------------ parameters of one rank, before dp shards them

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of a layer. tp shards the linear layers; every tp rank has the norms."""
        return count_layer_parameters(self.args, tp=self.layout.tp)

    @cached_property
    def vocabulary_parameters(self) -> int:
        """Parameters of the embedding, or of the head."""
        return self.args.vocab_size * self.args.dim // self.layout.tp

    def groups_of(self, stage: Stage) -> list[int]:
        """Return the parameters of each FSDP group, in forward order: embedding, layers, head with the final norm."""
        embedding = [self.vocabulary_parameters] * stage.has_embedding
        head = [self.vocabulary_parameters + self.args.dim] * stage.has_head
        if embedding and head and self.args.tie_embeddings:
            embedding = []
        return embedding + [self.layer_parameters] * stage.n_layers + head

    def count_stage_parameters(self, stage: Stage) -> int:
        return sum(self.groups_of(stage))


@lru_cache
def count_modules(stages: Stages) -> tuple[Stage, ...]:
    """Return what each stage holds, from the names of its modules. Cached: a search asks for few different stages."""
    return tuple(
        Stage(sum(fqn.startswith("layers.") for fqn in fqns), "tok_embeddings" in fqns, "output" in fqns)
        for fqns in stages
    )


def describe_workload(config: Config, args: ModelArgs, layout: Layout) -> Workload:
    """Return the workload of a run. A compute dtype of "auto" counts as a GPU's. Raises ConfigError."""
    if config.activation_checkpoint.mode == "memory_budget":
        why = "the compiler decides what is recomputed, so no closed form exists"
        remedy = 'Ask for "none" and for "full": the answer lies between'
        raise ConfigError([Problem("activation_checkpoint.mode", "memory_budget", why, remedy)])
    dtype = config.training.mixed_precision_param
    dtype = "bfloat16" if dtype == "auto" else dtype
    return Workload(
        args=args,
        layout=layout,
        seq_len=config.training.seq_len,
        recompute=count_recompute(config.activation_checkpoint, args.n_layers),
        compute_dtype=dtype,
        matmul_dtype="float8" if uses_float8(config) else dtype,
        moment_bytes=count_moment_bytes(config.optimizer),
        splits_backward=splits_backward(config.parallelism),
        shards_loss=not config.parallelism.disable_loss_parallel,
        loss_chunk_tokens=config.training.loss_chunk_tokens,
        compiled=config.compile.enable,
        ring=config.parallelism.context_parallel_rotate_method == "ring",
        documents=config.model.attention == "document",
    )


def count_moment_bytes(section: Optimizer) -> int:
    """Return the bytes of optimizer state per parameter."""
    return OPTIMIZERS[section.name].n_moments * {"float32": 4, "bfloat16": 2}[section.moments_dtype]


def count_recompute(section: ActivationCheckpoint, n_layers: int) -> Counter:
    """Return mode -> number of layers, as plan_recompute of activation_checkpoint.py has it layer by layer."""
    if section.mode != "selective" or section.is_by_op:
        return Counter({"op" if section.is_by_op else section.mode: n_layers})
    n_full = -(-n_layers // int(section.selective_ac_option))  # layers 0, n, 2n ...
    return Counter({"full": n_full, "none": n_layers - n_full})
