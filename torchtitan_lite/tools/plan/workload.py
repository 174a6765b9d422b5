"""Describe one optimizer step of a model in a layout by numbers, which are the input of every closed form.

    planned_run.py  ->  Workload  ->  memory.py       bytes that a rank holds
                                  ->  transfers.py    bytes that a rank moves
                                  ->  step_time.py    seconds

Legend: B sequences of a microbatch, S sequence, D model dim, H query heads, K key/value heads, E head dim, F ffn dim,
V vocabulary, T = B*S/cp tokens of a microbatch on one rank, R = T/tp * top_k rows that it sends to experts.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, prod
from typing import Literal, NamedTuple

from torchtitan_lite.config.block import (
    INT8_BLOCK,
    deal_matrices,
    find_expert_dim,
    list_block,
    list_gathered,
)
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.memory_bound import MASTER_BYTES
from torchtitan_lite.config.model_rows import ModelArgs, ModuleRow
from torchtitan_lite.config.schedule import Stages

# The mesh dims over which FSDP shards parameters, and those of an MoE
SHARD_DIMS = {"fsdp": ("dp_shard", "cp"), "efsdp": ("efsdp",)}


@dataclass(frozen=True)
class Stage:
    """The modules of a pipeline stage."""

    n_dense: int  # layers without experts
    n_moes: int  # layers with experts
    has_embedding: bool
    has_head: bool  # and the final norm


class Matrix(NamedTuple):
    """A matrix that Muon updates, or a batch of experts."""

    sizes: tuple[int, ...]  # (..., rows, columns)
    tp: int  # number of ranks among which tp cuts it; 1 for experts
    shards: tuple[str, ...]  # mesh dims over which FSDP cuts it
    n_at_rest: int  # elements on rank 0


class FsdpGroup(NamedTuple):
    """Parameters of one rank that FSDP gathers together."""

    axis: str  # a key of SHARD_DIMS
    n_shards: int
    sizes: list[int]  # elements of each parameter before FSDP shards it, with padding

    @property
    def n_parameters(self) -> int:
        return sum(self.sizes)

    @property
    def near(self) -> tuple[str]:
        """The mesh dim of ranks inside a node."""
        return (f"{self.axis}_near",)

    @property
    def far(self) -> tuple[str]:
        return (f"{self.axis}_far",)

    @property
    def packed_bytes(self) -> int:
        """Bytes of all shards in the blocks of zero_plus_plus.py."""
        n_bytes = 0
        for size in self.sizes:
            n_blocks = ceil(size / self.n_shards / INT8_BLOCK)
            n_bytes += self.n_shards * n_blocks * (INT8_BLOCK + 4)
        return n_bytes


Groups = list[tuple[FsdpGroup, int]]  # how often each group occurs, for example in a stage


@dataclass
class LayerKind:
    """All dense layers of the model, or all MoE layers."""

    is_moe: bool
    recompute: Counter  # mode -> number of layers of this kind in the model
    block: list[ModuleRow]  # modules that have weights
    dense: FsdpGroup  # all parameters of a layer, except the MoE
    moe: FsdpGroup  # router and experts; no parameters in a dense layer
    matrices: list[Matrix]  # of a layer, if Muon updates them

    def __post_init__(self):
        by_split = defaultdict(list)
        for row in self.block:
            by_split[row.split].append(row)
        self.colwise = by_split["colwise"]  # tp gathers their input
        self.rowwise = by_split["rowwise"]  # tp scatters their output
        self.norms = [row for row in by_split["sequence"] if row.kind == "norm"]
        # The closed forms know matmuls that tp splits, experts, norms of hidden states, and Qwen3's norms of heads.
        known = {"attention.q_norm", "attention.k_norm"}
        for row in self.colwise + self.rowwise + self.norms:
            known.add(row.name)
        others = [row.name for row in self.block if row.kind in ("linear", "norm")]
        self.untimed = [name for name in others if name not in known]
        self.n_gathers = len(list_gathered(self.block))  # one for wq, wk, wv
        # Blocks of Llama have SwiGLU and rotary embeddings; blocks of GPT have neither.
        has_gate = any(row.name.endswith("w3") for row in self.block)
        self.is_gated = self.is_moe or has_gate
        # Full recompute stops before a rowwise matmul at the end of a block, because backward does not need its output.
        # Backward needs the outputs of experts, because routing weights multiply them.
        self.ends_in_rowwise = self.block[-1].kind == "linear"

    @property
    def groups(self) -> Groups:
        """FSDP groups of one layer."""
        return [(self.dense, 1), (self.moe, int(self.is_moe))]

    def count(self, stage: Stage) -> int:
        """Return the number of layers of this kind in a stage."""
        return stage.n_moes if self.is_moe else stage.n_dense

    def average(self, **by_mode: float) -> float:
        """Average a number that depends on the recompute mode over the layers. Modes that are not given count as 0."""
        total = sum(by_mode.get(mode, 0.0) * n for mode, n in self.recompute.items())
        return total / self.recompute.total()


@dataclass
class Workload:
    """One optimizer step of a model in a layout."""

    args: ModelArgs
    layout: Layout
    seq_len: int
    # none, op, full, or (published runs only) alternate, torchtitan's policy of 2024 -> number of layers
    recompute: Counter
    recompute_of_moes: Counter = field(default_factory=Counter)  # the same, for the MoE layers only
    compute_dtype: str = "bfloat16"  # dtype of activations and gathered parameters
    float8: frozenset[str] = frozenset()  # names of a block's modules that compute in float8
    float8_recipe: str = "tensorwise"  # selects the field "<recipe>_efficiency" of Cluster
    gathers_float8: bool = False  # FSDP all-gathers in float8
    zero_plus_plus: tuple[str, ...] = ()  # hpz, qwz, qgz
    # unfused: scores are written to memory
    attention: Literal["cudnn", "flash2", "triton", "unfused"] = "cudnn"
    moment_bytes: int = 8  # optimizer state per parameter
    updates_matrices: bool = False  # by Muon, which keeps MASTER_BYTES less for them
    shards_loss: bool = True
    loss_chunk_tokens: int = 0  # 0: all logits at once
    compiled: bool = False
    compiles_loss: bool = False
    async_tp: bool = False
    ring: bool = False  # cp passes keys and values around a ring; otherwise it all-gathers them
    documents: bool = False  # attention stays inside documents
    balances_by_loss: bool = False  # the auxiliary loss counts routes over whole sequences
    # Properties of other trainers, for published runs. The defaults describe this trainer.
    keeps_logits: bool = False  # fp32 logits, log-softmax and gradients of all tokens at once
    sequence_parallel: bool = True
    copies_gathered: bool = True  # by tp, because DTensor gathers along the sequence
    overlaps_reduction: bool = False  # in a pipeline, gradients are reduced beside last backwards
    receive_buffers: int | None = None  # per stage; None: one per microbatch, as torch's pipeline
    grad_bytes: int = MASTER_BYTES  # bytes per gradient element at rest ...
    reduce_bytes: int = MASTER_BYTES  # ... and during the reduction over dp

    def __post_init__(self):
        args = self.args
        layout = self.layout
        self.tokens_per_step = layout.global_batch_size * self.seq_len
        self.compute_bytes = 4 if self.compute_dtype == "float32" else 2
        row_tokens = layout.microbatch_size * self.seq_len
        self.n_tokens = row_tokens // layout.cp  # T
        self.n_rows = 0  # R
        if args.moe:
            self.n_rows = self.n_tokens // layout.tp * args.moe.top_k
        # Hidden states of a microbatch, (B, S/cp, D), before tp shards them
        self.hidden_bytes = self.n_tokens * args.dim * self.compute_bytes
        # Keys and values of a microbatch on all cp ranks: 2 x (B, K/tp, S, E)
        width = 2 * args.n_kv_heads * args.head_dim // layout.tp
        self.keys_values_bytes = row_tokens * width * self.compute_bytes
        # Ranks that share parameters, gradients and optimizer state of a stage
        self.n_shards = layout.dp_shard * layout.cp
        # A stage on a single rank in fp32 runs without FSDP (parallelize.py).
        is_alone = layout.dp * layout.cp * layout.tp == 1
        self.is_whole = is_alone and self.compute_dtype == "float32"
        # Gradients are reduced once per microbatch if they are sharded, otherwise once per step.
        self.n_reductions = layout.n_microbatches if layout.zero_stage > 1 and layout.pp == 1 else 1
        # Whether FSDP shards the matrices of each expert, because the number of experts does not divide
        self.cuts_experts = find_expert_dim(args, layout.ep, layout.efsdp) != 0
        table = pad(args.vocab_size // layout.tp, self.n_shards) * args.dim
        norm = pad(args.dim, self.n_shards)
        self.embedding = FsdpGroup("fsdp", self.n_shards, [table])
        self.head = FsdpGroup("fsdp", self.n_shards, [table, norm])
        self.stages = count_modules(layout.stages, args)
        self.kinds = []
        if of_dense := self.recompute - self.recompute_of_moes:
            self.kinds.append(self.describe_kind(of_dense, is_moe=False))
        if self.recompute_of_moes:
            self.kinds.append(self.describe_kind(self.recompute_of_moes, is_moe=True))

    def describe_kind(self, recompute: Counter, *, is_moe: bool) -> LayerKind:
        """Count the parameters of one layer."""
        layout = self.layout
        block = list_block(self.args, moe=is_moe)
        dense = FsdpGroup("fsdp", self.n_shards, [])
        moe = FsdpGroup("efsdp", layout.efsdp, [])
        matrices = []
        for module in block:
            group = moe if module.kind in ("router", "experts") else dense
            rows = module.weight[0]
            columns = prod(module.weight[1:])
            if module.kind == "experts":
                rows //= max(1, layout.ep)
                n_at_rest = rows * columns // layout.efsdp
                moe.sizes.append(rows * columns)
                shards = SHARD_DIMS["efsdp"] if self.cuts_experts else ()
                n_whole = rows if self.cuts_experts else rows // layout.efsdp
                matrices.append(Matrix((n_whole, *module.weight[1:]), 1, shards, n_at_rest))
                continue
            if module.split == "colwise":
                rows //= layout.tp
            elif module.split == "rowwise":
                columns //= layout.tp
            size = pad(rows, group.n_shards) * columns
            group.sizes.append(size)
            if module.bias:
                group.sizes.append(pad(rows, group.n_shards))
            if module.kind == "linear":
                n_at_rest = size // self.n_shards
                matrices.append(Matrix(module.weight, layout.tp, SHARD_DIMS["fsdp"], n_at_rest))
        if not self.updates_matrices:
            matrices = []
        return LayerKind(is_moe, recompute, block, dense, moe, matrices)

    def count_ranks(self, dims: tuple[str, ...]) -> int:
        """Return the size of a group of ranks along these mesh dims."""
        return prod(getattr(self.layout, dim) for dim in dims)

    def list_matrices(self, pp_rank: int) -> list[Matrix]:
        """List the matrices of a pp rank that Muon updates."""
        matrices = []
        for index in self.layout.stages_of(pp_rank):
            for kind in self.kinds:
                matrices += kind.matrices * kind.count(self.stages[index])
        return matrices

    def deal_rounds(
        self, pp_rank: int
    ) -> list[tuple[tuple[int, ...], dict[tuple[str, ...], float]]]:
        """Return the rounds of Muon: sizes of the largest matrix, mesh dims -> elements in an all-to-all of rank 0."""
        rounds = []
        alike = defaultdict(list)
        for matrix in self.list_matrices(pp_rank):
            alike[matrix.tp, matrix.shards].append(matrix)
        for (tp, dims), matrices in alike.items():
            n = self.count_ranks(dims)
            for indices in deal_matrices([matrix.sizes for matrix in matrices], n * tp):
                blocks = [prod(matrices[index].sizes) // tp for index in indices]
                slices = [matrices[index].n_at_rest for index in indices]
                # The owners of the first tp matrices are rank 0 and its tp peers. Rank 0 owns the first.
                over_fsdp = sum(slices[tp:]) + sum(blocks[:tp]) - sum(slices[:tp])
                over_tp = sum(blocks[1:tp]) + blocks[0] * (tp - 1)
                # Slices go to their owners and come back: on average, an all-to-all with equal parts of this size.
                elements = {}
                if n > 1:
                    elements[dims] = over_fsdp / 2 * n / (n - 1)
                if tp > 1:
                    elements[("tp",)] = over_tp / 2 * tp / (tp - 1)
                rounds.append((matrices[indices[0]].sizes, elements))
        return rounds

    def has_own_embedding(self, stage: Stage) -> bool:
        """Whether the embedding of a stage is not the matrix of its head."""
        is_tied = stage.has_head and self.args.tie_embeddings
        return stage.has_embedding and not is_tied

    def groups_of(self, stage: Stage) -> Groups:
        """Return the FSDP groups of a stage."""
        groups = [(self.embedding, self.has_own_embedding(stage)), (self.head, stage.has_head)]
        for kind in self.kinds:
            for group, n in kind.groups:
                groups.append((group, n * kind.count(stage)))
        return groups

    def count_parameters(self, stage: Stage) -> int:
        """Return the number of parameters of a stage on one rank, before FSDP shards them."""
        return sum(group.n_parameters * n for group, n in self.groups_of(stage))

    def count_at_rest(self, stage: Stage) -> float:
        """Return the number of parameters of a stage that one rank holds between steps."""
        return sum(group.n_parameters * n / group.n_shards for group, n in self.groups_of(stage))


def list_summed_over_tp(rows: list[ModuleRow]) -> list[int]:
    """Return the size of each parameter that every tp rank has, and whose gradient each computes for its own tokens."""
    sizes = []
    for row in rows:
        if (
            row.split in ("sequence", "heads") and row.kind != "router"
        ):  # routers are summed over ep
            sizes += map(prod, row.tensors.values())
        elif row.split == "rowwise" and row.bias:
            sizes.append(row.weight[0])
    return sizes


def pad(rows: int, n_shards: int) -> int:
    """Return the number of rows after FSDP's padding. Every rank gets the same number of rows."""
    return ceil(rows / n_shards) * n_shards


@lru_cache
def count_modules(stages: Stages, args: ModelArgs) -> tuple[Stage, ...]:
    """Count the modules of each stage. Cached, because a search has few different stages."""
    found = []
    for fqns in stages:
        layers = [int(fqn.removeprefix("layers.")) for fqn in fqns if fqn.startswith("layers.")]
        n_moes = sum(map(args.is_moe, layers))
        has_embedding = "tok_embeddings" in fqns
        found.append(Stage(len(layers) - n_moes, n_moes, has_embedding, "output" in fqns))
    return tuple(found)
