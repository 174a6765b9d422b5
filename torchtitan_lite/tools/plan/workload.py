"""One optimizer step of a model in a layout, as numbers: the input of every closed form.

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
from typing import Literal

from torchtitan_lite.config.block import BlockModule, list_block
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.memory_bound import MASTER_BYTES
from torchtitan_lite.config.schedule import Stages


@dataclass(frozen=True)
class Stage:
    """What a pipeline stage holds."""

    n_dense: int  # layers without experts
    n_moes: int  # layers with experts
    has_embedding: bool
    has_head: bool  # and the final norm


@dataclass
class LayerKind:
    """Layers that are alike: the dense ones, or those with experts."""

    is_moe: bool
    recompute: Counter  # mode -> number of layers of this kind in the whole model
    block: list[BlockModule]  # the modules of a block with weights
    parameters: tuple[int, int]  # of one rank before FSDP shards them: all but experts (with whole norms), MoE

    def __post_init__(self):
        self.norms = [module for module in self.block if module.is_norm]
        self.colwise = [module for module in self.block if module.split == "colwise"]  # tp gathers their input
        self.rowwise = [module for module in self.block if module.split == "rowwise"]  # tp scatters their output
        self.n_gathers = len({module.name.rpartition(".")[0] for module in self.colwise})  # one for wq, wk, wv
        # Llama's block has SwiGLU and rotary embedding, GPT's has neither.
        self.is_gated = self.is_moe or any(module.name.endswith("w3") for module in self.block)
        # Full recompute stops before a last rowwise matmul, whose output backward does not need. It needs the outputs
        # of experts, because weights multiply them.
        self.ends_in_rowwise = self.block[-1].split != "experts"

    def count(self, stage: Stage) -> int:
        """Return the layers of this kind on a stage."""
        return stage.n_moes if self.is_moe else stage.n_dense

    def average(self, **by_mode: float) -> float:
        """Return the mean over the layers of a number that depends on the recompute mode. Other modes count 0."""
        return sum(by_mode.get(mode, 0.0) * n for mode, n in self.recompute.items()) / self.recompute.total()


@dataclass
class Workload:
    """One optimizer step of a model in a layout."""

    args: ModelArgs
    layout: Layout
    seq_len: int
    # none, op, full, or for published runs alternate (torchtitan's policy of 2024) -> number of layers of the model
    recompute: Counter
    recompute_of_moes: Counter = field(default_factory=Counter)  # of the layers with experts
    compute_dtype: str = "bfloat16"  # of activations and gathered parameters
    float8: frozenset[str] = frozenset()  # modules of a block that compute in float8
    float8_recipe: str = "tensorwise"  # a field of Cluster: "<recipe>_efficiency"
    gathers_float8: bool = False  # FSDP's all-gathers
    attention: Literal["cudnn", "flash2", "triton", "unfused"] = "cudnn"  # unfused: scores are written to memory
    moment_bytes: int = 8  # optimizer state per parameter
    shards_loss: bool = True
    loss_chunk_tokens: int = 0  # 0: all logits at once
    compiled: bool = False
    compiles_loss: bool = False
    async_tp: bool = False
    ring: bool = False  # under cp, keys and values travel around a ring; else by all-gather
    documents: bool = False  # attention stays inside documents
    balances_by_loss: bool = False  # the auxiliary loss counts the routes of whole sequences
    # How other code differs, for published runs: the defaults are this trainer's.
    sequence_parallel: bool = True
    copies_gathered: bool = True  # the result of tp's all-gathers, because DTensor gathers along the sequence
    overlaps_reduction: bool = False  # of gradients in a pipeline, with the last backwards
    receive_buffers: int | None = None  # of a stage; None: one for each microbatch, as torch's pipeline has them
    grad_bytes: int = MASTER_BYTES  # of a gradient at rest ...
    reduce_bytes: int = MASTER_BYTES  # ... and while it is summed over dp

    def __post_init__(self):
        args, layout = self.args, self.layout
        self.tokens_per_step = layout.global_batch_size * self.seq_len
        self.compute_bytes = 4 if self.compute_dtype == "float32" else 2
        self.n_tokens = layout.microbatch_size * self.seq_len // layout.cp  # T
        self.n_rows = self.n_tokens // layout.tp * args.moe.top_k if args.moe else 0  # R; as many come back
        # Hidden states of a microbatch, (B, S/cp, D), before tp shards them
        self.hidden_bytes = self.n_tokens * args.dim * self.compute_bytes
        # Keys and values of a microbatch on all cp ranks: 2 x (B, K/tp, S, E)
        width = 2 * args.n_kv_heads * args.head_dim // layout.tp
        self.keys_values_bytes = layout.microbatch_size * self.seq_len * width * self.compute_bytes
        # Ranks that share parameters, gradients and optimizer state of a stage
        self.n_shards = layout.dp_shard * layout.cp
        # A rank that has its stage alone and computes in fp32 runs without FSDP (parallelize.py).
        self.is_whole = layout.dp * layout.cp * layout.tp == 1 and self.compute_dtype == "float32"
        # Gradients are reduced once a microbatch where they are sharded, else once a step.
        self.n_reductions = layout.n_microbatches if layout.zero_stage > 1 and layout.pp == 1 else 1
        # Parameters of the embedding, or of the head, before dp shards them
        self.vocabulary_parameters = pad(args.vocab_size // layout.tp, self.n_shards) * args.dim
        self.stages = count_modules(layout.stages, args)
        kinds = (False, self.recompute - self.recompute_of_moes), (True, self.recompute_of_moes)
        self.kinds = [self.describe_kind(modes, is_moe=is_moe) for is_moe, modes in kinds if modes]

    def describe_kind(self, recompute: Counter, *, is_moe: bool) -> LayerKind:
        layout, block, dense, moes = self.layout, list_block(self.args, moe=is_moe), 0, 0
        for module in block:
            rows, rest = module.weight[0], prod(module.weight[1:])
            if module.split == "router":
                moes += pad(rows, layout.efsdp) * rest
            elif module.split == "experts":
                moes += rows // max(1, layout.ep) * rest
            else:
                rows = rows // layout.tp if module.split == "colwise" else rows
                dense += pad(rows, self.n_shards) * (rest // layout.tp if module.split == "rowwise" else rest)
        return LayerKind(is_moe, recompute, block, (dense, moes))

    def groups_of(self, stage: Stage) -> list[int]:
        """Return the parameters of each FSDP group of one rank: embedding, layers without experts, head with norm."""
        has_own_embedding = stage.has_embedding and not (stage.has_head and self.args.tie_embeddings)
        layers = [kind.parameters[0] for kind in self.kinds for _ in range(kind.count(stage))]
        head = [self.vocabulary_parameters + pad(self.args.dim, self.n_shards)] * stage.has_head
        return [self.vocabulary_parameters] * has_own_embedding + layers + head

    @cached_property
    def parameters(self) -> dict[Stage, tuple[int, int]]:
        """Stage -> its parameters: all but experts, and MoEs."""
        return {
            stage: (sum(self.groups_of(stage)), sum(kind.parameters[1] * kind.count(stage) for kind in self.kinds))
            for stage in set(self.stages)
        }

    def count_at_rest(self, stage: Stage) -> float:
        """Return the parameters of a stage that one rank holds between steps."""
        return self.parameters[stage][0] / self.n_shards + self.parameters[stage][1] / self.layout.efsdp


def pad(rows: int, n_shards: int) -> int:
    """Return the rows of a parameter that FSDP shards: it gives every rank equally many."""
    return ceil(rows / n_shards) * n_shards


@lru_cache
def count_modules(stages: Stages, args: ModelArgs) -> tuple[Stage, ...]:
    """Return what each stage holds, from the names of its modules. Cached: a search asks for few different stages."""
    found = []
    for fqns in stages:
        layers = [int(fqn.removeprefix("layers.")) for fqn in fqns if fqn.startswith("layers.")]
        n_moes = sum(map(args.is_moe, layers))
        found.append(Stage(len(layers) - n_moes, n_moes, "tok_embeddings" in fqns, "output" in fqns))
    return tuple(found)
