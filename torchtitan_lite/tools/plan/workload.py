"""Describe one optimizer step of a model in a layout by numbers, which are the input of every closed form.

    planned_run.py  ->  Workload  ->  memory.py       bytes that a rank holds
                                  ->  transfers.py    bytes that a rank moves
                                  ->  step_time.py    seconds

Legend: B sequences of a microbatch, S sequence, D model dim, H query heads, K key/value heads, E head dim, F ffn dim,
V vocabulary, T = B*S/cp tokens of a microbatch on one rank, R = T/tp * top_k rows that it sends to experts.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
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


@dataclass
class LayerKind:
    """All dense layers of the model, or all MoE layers."""

    is_moe: bool
    recompute: Counter  # mode -> number of layers of this kind in the model
    block: list[ModuleRow]  # modules that have weights
    parameters: tuple[
        int, int
    ]  # per layer and rank, before FSDP shards them: all except the MoE (norms whole), MoE
    matrices: list[Matrix]  # of a layer
    packed: tuple[int, int]  # the bytes of these parameters, packed by ZeRO++

    def __post_init__(self):
        self.norms = [module for module in self.block if module.kind == "norm"]
        self.summed_over_tp = list_summed_over_tp(self.block)
        self.colwise = [
            row for row in self.block if (row.kind, row.split) == ("linear", "colwise")
        ]  # tp gathers their input
        self.rowwise = [
            module for module in self.block if module.split == "rowwise"
        ]  # tp scatters their output
        # The closed forms know matmuls that tp splits, experts, norms of hidden states, and Qwen3's norms of heads.
        timed = [
            *self.colwise,
            *self.rowwise,
            *(row for row in self.norms if row.split == "sequence"),
        ]
        known = {row.name for row in timed} | {"attention.q_norm", "attention.k_norm"}
        self.untimed = [
            row.name
            for row in self.block
            if row.name not in known and row.kind in ("linear", "norm")
        ]
        self.n_gathers = len(list_gathered(self.block))  # one for wq, wk, wv
        # Blocks of Llama have SwiGLU and rotary embeddings; blocks of GPT have neither.
        self.is_gated = self.is_moe or any(module.name.endswith("w3") for module in self.block)
        # Full recompute stops before a rowwise matmul at the end of a block, because backward does not need its output.
        # Backward needs the outputs of experts, because routing weights multiply them.
        self.ends_in_rowwise = self.block[-1].kind == "linear"

    def count(self, stage: Stage) -> int:
        """Return the number of layers of this kind in a stage."""
        return stage.n_moes if self.is_moe else stage.n_dense

    def average(self, **by_mode: float) -> float:
        """Average a number that depends on the recompute mode over the layers. Modes that are not given count as 0."""
        return (
            sum(by_mode.get(mode, 0.0) * n for mode, n in self.recompute.items())
            / self.recompute.total()
        )


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
    attention: Literal["cudnn", "flash2", "triton", "unfused"] = (
        "cudnn"  # unfused: scores are written to memory
    )
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
    keeps_logits: bool = (
        False  # the loss holds fp32 logits, log-softmax and gradients of all tokens at once
    )
    sequence_parallel: bool = True
    copies_gathered: bool = (
        True  # tp copies each all-gather's result, because DTensor gathers along the sequence
    )
    overlaps_reduction: bool = (
        False  # in a pipeline, gradient reduction overlaps with the last backwards
    )
    receive_buffers: int | None = (
        None  # per stage; None: one per microbatch, as in torch's pipeline
    )
    grad_bytes: int = MASTER_BYTES  # bytes per gradient element at rest ...
    reduce_bytes: int = MASTER_BYTES  # ... and during the reduction over dp

    def __post_init__(self):
        args, layout = self.args, self.layout
        self.tokens_per_step = layout.global_batch_size * self.seq_len
        self.compute_bytes = 4 if self.compute_dtype == "float32" else 2
        self.n_tokens = layout.microbatch_size * self.seq_len // layout.cp  # T
        self.n_rows = self.n_tokens // layout.tp * args.moe.top_k if args.moe else 0  # R
        # Hidden states of a microbatch, (B, S/cp, D), before tp shards them
        self.hidden_bytes = self.n_tokens * args.dim * self.compute_bytes
        # Keys and values of a microbatch on all cp ranks: 2 x (B, K/tp, S, E)
        width = 2 * args.n_kv_heads * args.head_dim // layout.tp
        self.keys_values_bytes = layout.microbatch_size * self.seq_len * width * self.compute_bytes
        # Ranks that share parameters, gradients and optimizer state of a stage
        self.n_shards = layout.dp_shard * layout.cp
        # A stage on a single rank in fp32 runs without FSDP (parallelize.py).
        self.is_whole = layout.dp * layout.cp * layout.tp == 1 and self.compute_dtype == "float32"
        # Gradients are reduced once per microbatch if they are sharded, otherwise once per step.
        self.n_reductions = layout.n_microbatches if layout.zero_stage > 1 and layout.pp == 1 else 1
        # Parameters of the embedding (or of the head) on one rank, before FSDP shards them
        self.vocabulary_parameters = pad(args.vocab_size // layout.tp, self.n_shards) * args.dim
        self.stages = count_modules(layout.stages, args)
        kinds = (False, self.recompute - self.recompute_of_moes), (True, self.recompute_of_moes)
        self.kinds = [self.describe_kind(modes, is_moe=is_moe) for is_moe, modes in kinds if modes]

    def describe_kind(self, recompute: Counter, *, is_moe: bool) -> LayerKind:
        layout, block, sizes, packed, matrices = (
            self.layout,
            list_block(self.args, moe=is_moe),
            [0, 0],
            [0, 0],
            [],
        )
        for module in block:
            rows, rest, of_moe = (
                module.weight[0],
                prod(module.weight[1:]),
                module.kind in ("router", "experts"),
            )
            n_shards = layout.efsdp if of_moe else self.n_shards
            if module.kind == "experts":
                n_here = rows // max(1, layout.ep)
                size = n_here * rest
                is_cut = (
                    find_expert_dim(self.args, layout.ep, layout.efsdp) != 0
                )  # otherwise FSDP shards by expert
                whole = n_here // (1 if is_cut else layout.efsdp), *module.weight[1:]
                matrices.append(Matrix(whole, 1, ("efsdp",) * is_cut, size // layout.efsdp))
            else:
                rows = rows // layout.tp if module.split == "colwise" else rows
                size = pad(rows, n_shards) * (
                    rest // layout.tp if module.split == "rowwise" else rest
                )
                matrix = Matrix(module.weight, layout.tp, ("dp_shard", "cp"), size // n_shards)
                matrices += [matrix] * (module.kind == "linear")
            sizes[of_moe] += size
            packed[of_moe] += pack(size, n_shards)
            if module.bias:
                size = pad(rows, n_shards)
                sizes[of_moe] += size
                packed[of_moe] += pack(size, n_shards)
        return LayerKind(is_moe, recompute, block, tuple(sizes), matrices, tuple(packed))

    def list_matrices(self, pp_rank: int) -> list[Matrix]:
        """List the matrices of a pp rank that Muon updates."""
        stages = [
            self.stages[index] for index in self.layout.stages_of(pp_rank) if self.updates_matrices
        ]
        return [
            matrix
            for stage in stages
            for kind in self.kinds
            for matrix in kind.matrices * kind.count(stage)
        ]

    def deal_rounds(
        self, pp_rank: int
    ) -> list[tuple[tuple[int, ...], dict[tuple[str, ...], float]]]:
        """Return the rounds of Muon: sizes of the largest matrix, mesh dims -> elements in an all-to-all of rank 0."""
        rounds, matrices = [], self.list_matrices(pp_rank)
        for tp, dims in dict.fromkeys((matrix.tp, matrix.shards) for matrix in matrices):
            alike, n = (
                [m for m in matrices if m.shards == dims],
                prod(getattr(self.layout, dim) for dim in dims),
            )
            for indices in deal_matrices([matrix.sizes for matrix in alike], n * tp):
                blocks, slices = zip(
                    *((prod(alike[i].sizes) // tp, alike[i].n_at_rest) for i in indices),
                    strict=True,
                )
                # The owners of the first tp matrices are rank 0 and its tp peers. Rank 0 owns the first.
                over_fsdp = sum(slices[tp:]) + sum(blocks[:tp]) - sum(slices[:tp])
                over_tp = sum(blocks[1:tp]) + blocks[0] * (tp - 1)
                moved = (dims, n, over_fsdp), (("tp",), tp, over_tp)
                # Slices go to their owners and come back: on average, an all-to-all with equal parts of this size.
                elements = {dims: n_moved / 2 * n / (n - 1) for dims, n, n_moved in moved if n > 1}
                rounds.append((alike[indices[0]].sizes, elements))
        return rounds

    def groups_of(self, stage: Stage) -> list[tuple[int, int]]:
        """Return the parameters and packed bytes of each FSDP group: embedding, layers without MoE, head and norm."""
        has_own_embedding = stage.has_embedding and not (
            stage.has_head and self.args.tie_embeddings
        )
        layers = [
            (kind.parameters[0], kind.packed[0])
            for kind in self.kinds
            for _ in range(kind.count(stage))
        ]
        n, table, norm = (
            self.n_shards,
            self.vocabulary_parameters,
            pad(self.args.dim, self.n_shards),
        )
        head = [(table + norm, pack(table, n) + pack(norm, n))] * stage.has_head
        return [(table, pack(table, n))] * has_own_embedding + layers + head

    @cached_property
    def parameters(self) -> dict[Stage, tuple[int, int]]:
        """Stage -> number of parameters (outside MoEs, in MoEs)."""
        return {
            stage: (
                sum(n for n, _ in self.groups_of(stage)),
                sum(k.parameters[1] * k.count(stage) for k in self.kinds),
            )
            for stage in set(self.stages)
        }

    def count_at_rest(self, stage: Stage) -> float:
        """Return the number of parameters of a stage that one rank holds between steps."""
        return (
            self.parameters[stage][0] / self.n_shards
            + self.parameters[stage][1] / self.layout.efsdp
        )


def list_summed_over_tp(rows: list[ModuleRow]) -> list[int]:
    """Return the size of each parameter that every tp rank has, and whose gradient each computes for its own tokens."""
    sizes = []
    for row in rows:
        if row.kind in ("router", "experts"):  # summed over ep
            continue
        if row.split in ("sequence", "heads"):
            sizes += map(prod, row.tensors.values())
        elif row.split == "rowwise" and row.bias:
            sizes.append(row.weight[0])
    return sizes


def pad(rows: int, n_shards: int) -> int:
    """Return the number of rows after FSDP's padding. Every rank gets the same number of rows."""
    return ceil(rows / n_shards) * n_shards


def pack(size: int, n_shards: int) -> int:
    """Return the bytes of all shards of a parameter, in the blocks of zero_plus_plus.py."""
    return n_shards * ceil(size / n_shards / INT8_BLOCK) * (INT8_BLOCK + 4)


@lru_cache
def count_modules(stages: Stages, args: ModelArgs) -> tuple[Stage, ...]:
    """Count the modules of each stage. Cached, because a search has few different stages."""
    found = []
    for fqns in stages:
        layers = [int(fqn.removeprefix("layers.")) for fqn in fqns if fqn.startswith("layers.")]
        n_moes = sum(map(args.is_moe, layers))
        found.append(
            Stage(len(layers) - n_moes, n_moes, "tok_embeddings" in fqns, "output" in fqns)
        )
    return tuple(found)
