"""Describe one optimizer step of a model in a layout as numbers. All formulas of the forecast use these numbers.

    planned_run.py  ->  Workload  ->  memory.py       bytes that are live on a rank
                                  ->  transfers.py    bytes that a rank moves
                                  ->  step_time.py    seconds of a step

Legend: B sequences of a microbatch, S sequence, D model dim, H query heads, K key/value heads, E head dim, F ffn dim,
V vocabulary, T = B*S/cp tokens of a microbatch on one rank, R = T/tp * top_k rows that this rank sends to experts.

FSDP shards the experts and routers over the axis "efsdp", and all other parameters over "fsdp", which is dp_shard x cp.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from torchtitan_lite.config.block import (
    list_added_ends,
    list_block_modules,
    list_end_modules,
    list_gathered,
)
from torchtitan_lite.config.experts import find_expert_dim
from torchtitan_lite.config.layout import Layout, Stages, gathers_whole_parts
from torchtitan_lite.config.model_rows import ModelArgs, ModuleRow
from torchtitan_lite.extensions.muon_rounds import deal_matrices
from torchtitan_lite.tools.host_rules import MASTER_BYTES
from torchtitan_lite.tools.plan.orders import Order, Pipeline, list_order

# A parameter on a rank before FSDP shards it: number of elements (with padding), bytes per element in an all-gather
Unsharded = tuple[int, int]
# Equal FSDP groups: axis, parameters of a group, number of groups
Group = tuple[str, list[Unsharded], int]


class Stage(NamedTuple):
    """The modules of a pipeline stage."""

    n_layers: tuple[int, int]  # dense layers, MoE layers
    has_head: bool
    ends: tuple[ModuleRow, ...]  # all modules before or after the layers


class Matrix(NamedTuple):
    """A matrix, or a batch of experts' matrices, that Muon updates."""

    sizes: tuple[int, ...]  # (..., rows, columns)
    # FSDP axis, number of FSDP ranks and number of tp ranks that shard the matrix
    owners: tuple[str, int, int]
    n_at_rest: int  # elements on rank 0 between steps


class LayerKind:
    """All dense layers of the model, or all MoE layers. `recompute` maps a recompute mode to a number of layers."""

    def __init__(self, w: "Workload", recompute: Counter, is_moe: bool):
        self.is_moe = is_moe
        self.recompute = recompute
        self.block = list_block_modules(w.args, moe=is_moe)  # modules that have weights
        self.groups = defaultdict(list)  # axis -> parameters
        self.matrices = []  # that Muon updates
        for module in self.block:
            axis, parameters = w.shard(module)
            self.groups[axis] += parameters
            if w.updates_matrices and module.kind in ("linear", "experts"):
                self.matrices.append(w.describe_matrix(module))
        # number of weights that FSDP all-gathers in float8
        self.n_float8 = sum(width == 1 for _, width in self.groups["fsdp"])
        # axis -> number of elements of all parameters; axis -> bytes that an all-gather returns
        self.sizes, self.gathered = sum_groups((*group, 1) for group in self.groups.items())
        self.colwise = self.select("linear", "colwise")  # tp all-gathers their input
        self.rowwise = self.select("linear", "rowwise")  # tp reduce-scatters their output
        self.norms = self.select("norm", "sequence")
        # The input of the first rowwise matmul is attention's output. The input of later rowwise matmuls is a product
        # (SwiGLU).
        self.products_dim = sum(module.weight[1] for module in self.rowwise[1:])
        # Blocks of Llama have SwiGLU and rotary embeddings; blocks of GPT have neither.
        self.is_gated = any(module.name.endswith("w3") for module in self.block)
        # Full recompute skips a rowwise matmul at the end of a block, because backward does not need the output of this
        # matmul. Full recompute does not skip experts at the end of a block, because the gradients of the routing
        # weights need the outputs of the experts.
        self.ends_in_rowwise = self.block[-1].kind == "linear"
        # number of modules that compute keys or values, or 0 if each tp rank has its own key/value heads
        self.n_shared = sum(module.kv_heads > 0 for module in self.block) if w.n_sharing > 1 else 0
        # tp all-gathers one input for wq, wk and wv, and reduce-scatters the partial sums of each rowwise layer.
        self.n_gathers = len(list_gathered(self.block))
        self.n_scatters = len(self.rowwise)

    def select(self, kind: str, tp_style: str) -> list[ModuleRow]:
        return [row for row in self.block if (row.kind, row.tp_style) == (kind, tp_style)]

    @property
    def gathers_again(self) -> float:
        """Number of all-gathers over tp that recompute repeats, averaged over the layers."""
        return self.average(op=1, alternate=1, full=1) * self.n_gathers

    @property
    def scatters_again(self) -> float:
        return self.average(full=1) * (self.n_scatters - self.ends_in_rowwise)

    def count(self, stage: Stage) -> int:
        """Return the number of layers of this kind in a stage."""
        return stage.n_layers[self.is_moe]

    def average(self, **by_mode: float) -> float:
        """Return the average over layers of a number that depends on the recompute mode. For a mode that is not in
        `by_mode`, the number is 0."""
        total = sum(by_mode.get(mode, 0.0) * n for mode, n in self.recompute.items())
        return total / self.recompute.total()


@dataclass
class Workload:
    """One optimizer step of a model in a layout."""

    args: ModelArgs
    layout: Layout
    seq_len: int
    # is_moe -> recompute mode -> number of layers. The modes are none, op and full. Published runs can also have
    # "alternate", torchtitan's policy of 2024.
    recompute: dict[bool, Counter]
    compute_dtype: str = "bfloat16"  # dtype of activations and unsharded parameters
    float8: frozenset[str] = frozenset()  # names of a block's modules that compute in float8
    # tensorwise, rowwise, or te (Transformer Engine, which fuses casts)
    float8_recipe: str = "tensorwise"
    gathers_float8: bool = False  # whether FSDP all-gathers weights in float8
    # whether float8 scales are reduced once per step, not at each all-gather
    precomputes_scales: bool = False
    zero_plus_plus: tuple[str, ...] = ()  # hpz, qwz, qgz
    schedule: str = "1F1B"  # of the pipeline
    attention_row: str = "causal"  # model.attention
    # triton: the kernel for documents, windows and sinks
    attention: str = "cudnn"
    weight_bytes: int = MASTER_BYTES  # bytes per element of a weight, and of its gradient
    moment_bytes: int = 8  # optimizer state per parameter
    # Whether Muon updates the matrices. Muon's optimizer state is MASTER_BYTES smaller per element than AdamW's.
    updates_matrices: bool = False
    loss_chunk_tokens: int = 0  # 0 computes all logits at once
    compiled: bool = False
    compiles_loss: bool = False
    async_tp: bool = False
    # Whether cp passes keys and values around a ring. If false, cp all-gathers them.
    ring: bool = False
    balances_by_loss: bool = False  # the auxiliary loss counts routes over full sequences
    # Properties of other trainers, for published runs. The defaults describe this trainer.
    grad_bytes: int = MASTER_BYTES  # bytes per element of a gradient between microbatches
    reduce_bytes: int = MASTER_BYTES  # bytes per element of a gradient in the reduction over dp

    def __post_init__(self):
        args = self.args
        layout = self.layout
        self.tokens_per_step = layout.global_batch_size * self.seq_len
        self.compute_bytes = 4 if self.compute_dtype == "float32" else 2
        row_tokens = layout.microbatch_size * self.seq_len
        self.n_tokens = row_tokens // layout.cp  # T
        self.chunk_tokens = min(self.loss_chunk_tokens or self.n_tokens, self.n_tokens)
        self.n_rows = 0  # R
        if args.moe:
            self.n_rows = self.n_tokens // layout.tp * args.moe.top_k
        # Bytes of the keys of one head. The values of the head have as many bytes as the keys.
        self.head_bytes = self.n_tokens * args.head_dim * self.compute_bytes
        self.rows_bytes = self.n_rows * args.dim * self.compute_bytes
        # Hidden states of a microbatch, (B, S/cp, D), before tp shards them
        self.hidden_bytes = self.n_tokens * args.dim * self.compute_bytes
        # Number of key/value heads that a tp rank uses, and number of tp ranks that share each head
        self.n_kv_heads = max(1, args.n_kv_heads // layout.tp)
        self.n_sharing = max(1, layout.tp // args.n_kv_heads)
        # Keys and values of a microbatch on all cp ranks: 2 x (B, K/tp, S, E)
        width = 2 * self.n_kv_heads * args.head_dim
        self.keys_values_bytes = row_tokens * width * self.compute_bytes
        self.fp32_keys_values_bytes = row_tokens * width * MASTER_BYTES
        # An fp32 stage on a single rank runs without FSDP (parallelize.py).
        is_alone = layout.dp * layout.cp * layout.tp == 1
        self.is_whole = is_alone and self.compute_bytes == self.weight_bytes == MASTER_BYTES
        # Gradients are reduced once per microbatch if they are sharded, otherwise once per step.
        self.n_reductions = 1
        if layout.zero_stage > 1 and layout.pp == 1:
            self.n_reductions = layout.n_microbatches
        # Whether FSDP shards the matrices of each expert, because the ranks cannot share whole experts equally
        self.cuts_experts = find_expert_dim(args, layout.ep, layout.efsdp) != 0
        ends = {row.name: row for row in list_end_modules(args)}
        self.head = ends["output"]
        # Number of elements of the embedding on a tp rank. In the shipped models, the output head has the same size.
        _, ((self.table, _),) = self.shard(ends["tok_embeddings"])
        n_stages_per_rank = len(layout.stages) // layout.pp
        self.pipeline = Pipeline(self.schedule, layout.pp, layout.n_microbatches, n_stages_per_rank)
        self.stages = count_modules(layout.stages, args)
        self.has_added_ends = bool(list_added_ends(args))
        self.kinds = [LayerKind(self, modes, is_moe) for is_moe, modes in self.recompute.items()]
        # Each stage has two dicts: axis -> number of parameters on a rank before FSDP shards them, and axis -> bytes
        # that an all-gather returns.
        found = {stage: sum_groups(self.groups_of(stage)) for stage in set(self.stages)}
        self.sizes, self.gathered = zip(*map(found.get, self.stages), strict=True)
        self.stages_by_rank = []  # first to last
        self.at_rest = []  # number of parameters that a rank stores between steps, by pp rank
        for pp_rank in range(layout.pp):
            indices = layout.stages_of(pp_rank)
            self.stages_by_rank.append([self.stages[index] for index in indices])
            at_rest = 0.0
            for axis, n_parameters in self.sum_stages(self.sizes, pp_rank).items():
                at_rest += n_parameters / getattr(layout, axis)
            self.at_rest.append(at_rest)

    def with_recompute(self, recompute: dict[bool, Counter]) -> "Workload":
        """Return this workload with different recompute modes. The copy shares all other values with this workload."""
        other = copy(self)
        other.recompute = recompute
        other.kinds = []
        for kind in map(copy, self.kinds):
            kind.recompute = recompute[kind.is_moe]
            other.kinds.append(kind)
        return other

    def shape_on_rank(self, module: ModuleRow) -> list[int]:
        """Return the shape of a module's weight on one rank of tp and ep, before FSDP shards it."""
        shape = list(module.weight)
        if module.tp_style in ("colwise", "vocabulary"):
            shape[0] //= self.layout.tp
        elif module.tp_style == "rowwise":
            shape[1] //= self.layout.tp
        elif module.tp_style == "experts":
            shape[0] //= max(1, self.layout.ep)
        return shape

    def shard(self, module: ModuleRow) -> tuple[str, list[Unsharded]]:
        """Return the axis over which FSDP shards a module, and the sizes of the module's weight and bias."""
        axis = "efsdp" if module.kind in ("router", "experts") else "fsdp"
        rows, *others = self.shape_on_rank(module)
        if module.kind != "experts":
            rows = round_up(rows, getattr(self.layout, axis))
        in_float8 = self.gathers_float8 and module.name in self.float8
        weight = (rows * prod(others), 1 if in_float8 else self.compute_bytes)
        return axis, [weight, *[(rows, self.compute_bytes)] * module.bias]

    # ------------------------------------------------------------ pipeline

    @cached_property
    def order(self) -> Order:
        """The actions of each pp rank in one step."""
        return list_order(self.pipeline)

    @cached_property
    def alike(self) -> list[list[int]]:
        """Groups of pp ranks with equal stages.

        The first pp rank of a group has the most microbatches in flight, except in V schedules.
        """
        groups = defaultdict(list)
        for rank, stages in enumerate(self.stages_by_rank):
            groups[tuple(stages)].append(rank)
        return list(groups.values())

    # ------------------------------------------------------------ parameters

    def groups_of(self, stage: Stage) -> list[Group]:
        """Return the FSDP groups of a stage: embedding, head, root, layers, in this order."""
        is_shared = self.args.tie_embeddings and self.layout.pp == 1
        embedding = []
        head = []
        root = []  # the FSDP group of all modules that have no group of their own (fsdp.py)
        for row in stage.ends:
            _, parameters = self.shard(row)
            if row.name == "tok_embeddings":
                embedding += [] if is_shared else parameters
            elif row.name == "output" and not (self.has_added_ends and is_shared):
                head += parameters
            elif row.name == "norm" and not self.has_added_ends:
                head += parameters
            else:
                root += parameters
        groups = [("fsdp", group, bool(group)) for group in (embedding, head, root)]
        for kind in self.kinds:
            groups += [(*group, kind.count(stage)) for group in kind.groups.items()]
        if gathers_whole_parts(self.layout, self.compute_dtype):
            whole = [each for _, parameters, n_groups in groups for each in parameters * n_groups]
            none = ("fsdp", [], 0)
            groups = [none, none, ("fsdp", whole, 1)]
        return groups

    def sum_stages(self, counts: Sequence[Counter[str]], pp_rank: int) -> Counter[str]:
        """Sum `counts` over the stages of a pp rank."""
        indices = self.layout.stages_of(pp_rank)
        return sum((counts[index] for index in indices), Counter())

    # ------------------------------------------------------------ Muon

    def list_matrices(self, pp_rank: int) -> list[Matrix]:
        """List the matrices of a pp rank that Muon updates."""
        matrices = []
        for stage, kind in product(self.stages_by_rank[pp_rank], self.kinds):
            matrices += kind.matrices * kind.count(stage)
        return matrices

    def describe_matrix(self, module: ModuleRow) -> Matrix:
        axis, ((size, _), *_) = self.shard(module)
        n_shards = getattr(self.layout, axis)
        n_at_rest = size // n_shards
        if module.kind != "experts":
            return Matrix(module.weight, (axis, n_shards, self.layout.tp), n_at_rest)
        # an FSDP rank has whole experts, or a slice of every expert
        n_slices = n_shards if self.cuts_experts else 1
        rows, *others = self.shape_on_rank(module)
        return Matrix((rows * n_slices // n_shards, *others), (axis, n_slices, 1), n_at_rest)

    def deal_rounds(self, pp_rank: int) -> list[tuple[tuple[int, ...], dict[str, float]]]:
        """Return, for each round of Muon, the sizes of its largest matrix, and axis -> elements in an all-to-all of
        rank 0.

        A round has two all-to-alls, to the owners of the matrices and back. The number of elements is the average of
        the two all-to-alls.
        """
        rounds = []
        alike = defaultdict(list)
        for matrix in self.list_matrices(pp_rank):
            alike[matrix.owners].append(matrix)
        for (axis, n, tp), matrices in alike.items():
            sizes = [matrix.sizes for matrix in matrices]
            for indices in deal_matrices(sizes, n * tp):
                blocks = [prod(sizes[index]) // tp for index in indices]
                slices = [matrices[index].n_at_rest for index in indices]
                # Rank 0 and its tp peers own the first tp matrices. Rank 0 owns the first matrix.
                over_fsdp = sum(slices[tp:]) + sum(blocks[:tp]) - sum(slices[:tp])
                over_tp = sum(blocks[1:tp]) + blocks[0] * (tp - 1)
                # An all-to-all of this many elements, with equal splits, moves the average of the two directions.
                elements = {}
                if n > 1:
                    elements[axis] = over_fsdp / 2 * n / (n - 1)
                if tp > 1:
                    elements["tp"] = over_tp / 2 * tp / (tp - 1)
                largest = indices[0]
                rounds.append((sizes[largest], elements))
        return rounds


def sum_groups(groups: Iterable[Group]) -> tuple[Counter[str], Counter[str]]:
    """Sum groups by axis. Return axis -> number of elements, and axis -> bytes that an all-gather returns."""
    sizes = Counter()
    gathered = Counter()
    for axis, parameters, n_groups in groups:
        if n_groups:
            sizes[axis] += n_groups * sum([size for size, _ in parameters])
            gathered[axis] += n_groups * sum([size * width for size, width in parameters])
    return sizes, gathered


def round_up(size: int, unit: int) -> int:
    """Round up to a multiple of `unit`, as FSDP does when it pads the rows of a weight."""
    return -(-size // unit) * unit


@lru_cache
def count_modules(stages: Stages, args: ModelArgs) -> tuple[Stage, ...]:
    """Count the modules of each stage. Cached, because the layouts of a search have few different stages."""
    found = []
    for fqns in stages:
        layers = [int(fqn.removeprefix("layers.")) for fqn in fqns if fqn.startswith("layers.")]
        n_layers = Counter(map(args.is_moe, layers))
        ends = tuple(row for row in list_end_modules(args) if row.child in fqns)
        n_of_each = (n_layers[False], n_layers[True])
        found.append(Stage(n_of_each, "output" in fqns, ends))
    return tuple(found)
