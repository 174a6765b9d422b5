"""One optimizer step of a model in a layout, as numbers: the input of every closed form.

    config + model_args + layout  ->  Workload  ->  memory.py           bytes that a rank holds
                                                ->  plan/traffic.py     bytes that a rank moves
                                                ->  plan/step_time.py   seconds

Legend: B sequences of a microbatch, S sequence, D model dim, H query heads, K key/value heads, E head dim, F ffn dim,
V vocabulary, T = B*S/cp tokens of a microbatch on one rank, R = T/tp * top_k rows that it sends to experts.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import ceil, prod
from typing import Literal

from torchtitan_lite.config.block import BlockModule, count_expert_parameters, count_layer_parameters, list_block
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import Layout, choose_chunk_tokens
from torchtitan_lite.config.memory_bound import MASTER_BYTES, count_moment_bytes
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.schedule import Stages, splits_backward
from torchtitan_lite.config.schema import ActivationCheckpoint, Config

# No config asks for "alternate": it is torchtitan's policy of 2024, which keeps every second matmul. Published runs
# use it.
Recompute = Literal["none", "op", "full", "alternate"]


@dataclass(frozen=True)
class Stage:
    """What a pipeline stage holds."""

    n_layers: int
    has_embedding: bool
    has_head: bool  # and the final norm
    n_moes: int = 0  # of the layers: those with experts


@dataclass(frozen=True)
class LayerKind:
    """Layers that are alike: the dense ones, or those with experts."""

    args: ModelArgs
    is_moe: bool
    recompute: Counter  # Recompute -> number of layers of this kind in the whole model
    tp: int
    ep: int
    efsdp: int

    @cached_property
    def block(self) -> list[BlockModule]:
        """The modules of a block with weights."""
        return list_block(self.args, moe=self.is_moe)

    @cached_property
    def norms(self) -> list[BlockModule]:
        return [module for module in self.block if module.is_norm]

    @cached_property
    def n_gathers(self) -> int:
        """Modules whose input tp all-gathers: those with linear layers that it splits by columns."""
        return len({module.name.rpartition(".")[0] for module in self.block if module.split == "colwise"})

    @cached_property
    def n_rowwise(self) -> int:
        """Linear layers that tp splits by rows: their partial sums are reduce-scattered."""
        return sum(module.split == "rowwise" for module in self.block)

    @cached_property
    def product_widths(self) -> list[int]:
        """Inner widths of the feed-forwards that tp splits: the one of a dense block, or the shared experts."""
        return [module.weight[1] for module in self.block if module.split == "rowwise"][1:]

    @cached_property
    def ends_in_rowwise(self) -> bool:
        """Whether the block's last matmul is rowwise. Full recompute ends before it: backward does not need its output.

        The results of experts are multiplied by their weights, so backward needs them.
        """
        return self.block[-1].split != "experts"

    @cached_property
    def left_out_parameters(self) -> int:
        """Return the weights of the matmul that full recompute leaves out, before tp shards them."""
        last = [module for module in self.block if module.split == "rowwise"][-1]
        return prod(last.weight) * self.ends_in_rowwise

    def average(self, by_mode: dict[str, float]) -> float:
        """Return the mean over the layers of a number that depends on the recompute mode."""
        return sum(by_mode[mode] * n for mode, n in self.recompute.items()) / self.recompute.total()

    # ------------------------------------------------------------ parameters of one rank, before FSDP shards them

    @cached_property
    def router_parameters(self) -> int:
        """Parameters of the router, before FSDP pads it: every ep rank has the whole."""
        return sum(prod(module.weight) for module in self.block if module.split == "router")

    @cached_property
    def linear_parameters(self) -> int:
        """Weights of the matmuls that tp shares, before it does."""
        linears = count_layer_parameters(self.args, moe=self.is_moe, linear_only=True, experts=0)
        return linears - self.router_parameters

    @cached_property
    def parameters(self) -> int:
        """Parameters of the block without its MoE layer. tp shards the linear layers; every tp rank has the norms."""
        whole = count_layer_parameters(self.args, moe=self.is_moe, tp=self.tp, experts=0)
        return whole - self.router_parameters

    @cached_property
    def moe_parameters(self) -> int:
        """Parameters of router and experts on one of `ep` ranks. FSDP pads the router to equal rows for its ranks."""
        if not self.is_moe:
            return 0
        n_experts = self.args.moe.n_experts
        router = self.router_parameters // n_experts * ceil(n_experts / self.efsdp) * self.efsdp
        return router + n_experts // max(1, self.ep) * count_expert_parameters(self.args)


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
    recompute_of_moes: Counter = field(default_factory=Counter)  # of the layers with experts
    imbalance: float = 1.0  # rows that the most loaded of `ep` ranks receives, over their mean
    balances_by_loss: bool = False  # the auxiliary loss counts the routes of whole sequences

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
    def reduced_bytes(self) -> int:
        """Bytes of a number of a gradient that is summed over tp or ep. Sums over several microbatches are in fp32."""
        return self.compute_bytes if self.n_reductions == self.layout.n_microbatches else MASTER_BYTES

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
        return count_modules(self.layout.stages, self.args)

    @cached_property
    def kinds(self) -> list[LayerKind]:
        """The kinds of layers that the model has."""
        of_dense = self.recompute - self.recompute_of_moes
        kinds = (False, of_dense), (True, self.recompute_of_moes)
        degrees = self.layout.tp, self.layout.ep, self.layout.efsdp
        return [LayerKind(self.args, is_moe, modes, *degrees) for is_moe, modes in kinds if modes]

    # ------------------------------------------------------------ rows of an MoE layer

    @property
    def n_rows(self) -> int:
        return count_rows(self.args, self.layout, self.seq_len)

    @property
    def n_rows_each(self) -> int:
        """Rows that the most loaded ep rank receives from each of them, itself included."""
        return count_rows_each(self.n_rows, self.layout.ep, self.imbalance)

    @property
    def n_rows_received(self) -> int:
        """Rows whose experts the most loaded rank computes."""
        return self.n_rows_each * max(1, self.layout.ep)

    # ------------------------------------------------------------ parameters of one rank, before dp shards them

    @cached_property
    def vocabulary_parameters(self) -> int:
        """Parameters of the embedding, or of the head."""
        return self.args.vocab_size * self.args.dim // self.layout.tp

    def groups_of(self, stage: Stage) -> list[int]:
        """Return the parameters of each FSDP group, in forward order: embedding, layers, head with the final norm.

        MoE layers are groups of their own, over other ranks: see `count_stage_moes`.
        """
        embedding = [self.vocabulary_parameters] * stage.has_embedding
        head = [self.vocabulary_parameters + self.args.dim] * stage.has_head
        if embedding and head and self.args.tie_embeddings:
            embedding = []
        layers = [kind.parameters for kind in self.kinds for _ in range(count_layers(stage, kind))]
        return embedding + layers + head

    def count_stage_parameters(self, stage: Stage) -> int:
        """Return the parameters of a stage without its MoE layers."""
        return sum(self.groups_of(stage))

    def count_stage_moes(self, stage: Stage) -> int:
        return sum(kind.moe_parameters * count_layers(stage, kind) for kind in self.kinds)

    def count_at_rest(self, stage: Stage) -> float:
        """Return the parameters of a stage that one rank holds between steps."""
        of_moes = self.count_stage_moes(stage) / self.layout.efsdp
        return self.count_stage_parameters(stage) / self.n_shards + of_moes


def count_layers(stage: Stage, kind: LayerKind) -> int:
    """Return the layers of this kind on a stage."""
    return stage.n_moes if kind.is_moe else stage.n_layers - stage.n_moes


def count_rows(args: ModelArgs, layout: Layout, seq_len: int) -> int:
    """Return R: copies of a rank's own tokens of a microbatch, one for each expert of a token."""
    return layout.microbatch_size * seq_len // layout.cp // layout.tp * args.moe.top_k


def count_rows_each(n_rows: int, ep: int, imbalance: float) -> int:
    """Return how many of its `n_rows` rows each of `ep` ranks sends to the most loaded one.

    That one receives `imbalance` times the mean. No rank has more than all rows, so ep is the largest imbalance.
    """
    return min(n_rows, round(n_rows * imbalance / ep)) if ep > 1 else n_rows


@lru_cache
def count_modules(stages: Stages, args: ModelArgs) -> tuple[Stage, ...]:
    """Return what each stage holds, from the names of its modules. Cached: a search asks for few different stages."""
    found = []
    for fqns in stages:
        layers = [int(fqn.removeprefix("layers.")) for fqn in fqns if fqn.startswith("layers.")]
        n_moes = sum(map(args.is_moe, layers))
        found.append(Stage(len(layers), "tok_embeddings" in fqns, "output" in fqns, n_moes))
    return tuple(found)


def describe_workload(config: Config, args: ModelArgs, layout: Layout, *, imbalance: float = 1.0) -> Workload:
    """Return the workload of a run. Automatic values are those of a GPU. Raises ConfigError."""
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
        recompute=count_recompute(config.activation_checkpoint, range(args.n_layers)),
        recompute_of_moes=count_recompute(config.activation_checkpoint, filter(args.is_moe, range(args.n_layers))),
        imbalance=imbalance,
        balances_by_loss=config.training.expert_balance_loss > 0,
        compute_dtype=dtype,
        matmul_dtype="float8" if config.model.uses_float8 else dtype,
        moment_bytes=count_moment_bytes(config.optimizer),
        splits_backward=splits_backward(config.parallelism),
        shards_loss=not config.parallelism.disable_loss_parallel,
        loss_chunk_tokens=choose_chunk_tokens(config.training, "cuda"),
        compiled=config.compile.enable,
        ring=config.parallelism.context_parallel_rotate_method == "ring",
        documents=config.model.attention == "document",
    )


def count_recompute(section: ActivationCheckpoint, layers: Iterable[int]) -> Counter:
    """Return mode -> number of these layers, as plan_recompute of activation_checkpoint.py has it layer by layer."""
    by_op = section.selective_ac_option == "op"
    if section.mode != "selective" or by_op:
        return Counter(section.mode if section.mode != "selective" else "op" for _ in layers)
    every = int(section.selective_ac_option)
    return Counter("none" if layer % every else "full" for layer in layers)
