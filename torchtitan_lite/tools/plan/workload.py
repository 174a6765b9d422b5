"""One optimizer step of a model in a layout, as numbers: the input of every closed form.

    config + model_args + layout  ->  Workload  ->  memory.py       bytes that a rank holds
                                                ->  transfers.py    bytes that a rank moves
                                                ->  step_time.py    seconds

Legend: B sequences of a microbatch, S sequence, D model dim, H query heads, K key/value heads, E head dim, F ffn dim,
V vocabulary, T = B*S/cp tokens of a microbatch on one rank, R = T/tp * top_k rows that it sends to experts.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import ceil, prod
from typing import Literal

from torchtitan_lite.config.block import BlockModule, list_block, list_linears, plan_float8
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import Layout, choose_chunk_tokens, plan_layout, resolve_config, resolve_model
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.memory_bound import MASTER_BYTES, count_moment_bytes
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.schedule import Stages, splits_backward
from torchtitan_lite.config.schema import ActivationCheckpoint, Config
from torchtitan_lite.preflight import choose_n_ranks, read_run_config

ANY_CPU = Machine("cpu", 1, 0, "CPU")

# No config asks for "alternate", torchtitan's policy of 2024, which keeps every second matmul: published runs used it.
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

    is_moe: bool
    recompute: Counter  # Recompute -> number of layers of this kind in the whole model
    block: list[BlockModule]  # the modules of a block with weights
    is_gated: bool  # Llama's block: SwiGLU of three matrices, and rotary embedding. GPT's has neither
    n_gathers: int  # modules whose input tp all-gathers: those with linear layers that it splits by columns
    rowwise: list[BlockModule]  # linear layers that tp splits by rows: their partial sums are reduce-scattered
    # Parameters of one rank, before FSDP shards them
    parameters: int  # of the block without its experts: every tp rank has the norms
    router_parameters: int  # before FSDP pads it: every ep rank has the whole
    moe_parameters: int  # of router and experts

    @property
    def norms(self) -> list[BlockModule]:
        return [module for module in self.block if module.is_norm]

    @property
    def ends_in_rowwise(self) -> bool:
        """Whether the block's last matmul is rowwise. Full recompute ends before it: backward does not need its output.

        The results of experts are multiplied by their weights, so backward needs them.
        """
        return self.block[-1].split != "experts"

    def average(self, by_mode: dict[str, float]) -> float:
        """Return the mean over the layers of a number that depends on the recompute mode."""
        return sum(by_mode[mode] * n for mode, n in self.recompute.items()) / self.recompute.total()


def describe_kind(args: ModelArgs, layout: Layout, recompute: Counter, *, is_moe: bool) -> LayerKind:
    """Return the layers with or without experts. FSDP pads each parameter to equal rows for its ranks."""
    block, n_shards, parameters, moe_parameters = list_block(args, moe=is_moe), layout.dp_shard * layout.cp, 0, 0
    for module in block:
        rows, rest = module.weight[0], prod(module.weight[1:])
        if module.split == "router":
            moe_parameters += pad(rows, layout.efsdp) * rest
        elif module.split == "experts":
            moe_parameters += rows // max(1, layout.ep) * rest
        else:
            rows = rows // layout.tp if module.split == "colwise" else rows
            parameters += pad(rows, n_shards) * (rest // layout.tp if module.split == "rowwise" else rest)
    return LayerKind(
        is_moe=is_moe,
        recompute=recompute,
        block=block,
        is_gated=is_moe or any(module.name.endswith("w3") for module in block),
        n_gathers=len({module.name.rpartition(".")[0] for module in block if module.split == "colwise"}),
        rowwise=[module for module in block if module.split == "rowwise"],
        parameters=parameters,
        router_parameters=sum(prod(module.weight) for module in block if module.split == "router"),
        moe_parameters=moe_parameters,
    )


def pad(rows: int, n_shards: int) -> int:
    """Return the rows of a parameter that FSDP shards: it gives every rank as many."""
    return ceil(rows / n_shards) * n_shards


@dataclass(frozen=True)
class Workload:
    """One optimizer step of a model in a layout."""

    args: ModelArgs
    layout: Layout
    seq_len: int
    recompute: Counter  # Recompute -> number of layers of the whole model
    recompute_of_moes: Counter = field(default_factory=Counter)  # of the layers with experts
    compute_dtype: str = "bfloat16"  # of activations and gathered parameters
    float8: frozenset[str] = frozenset()  # modules of a block that compute in float8
    float8_recipe: str = "tensorwise"  # a field of Cluster: "<recipe>_efficiency"
    gathers_float8: bool = False  # FSDP's all-gathers
    attention: Literal["cudnn", "flash2", "triton", "unfused"] = "cudnn"  # unfused: scores are written to memory
    moment_bytes: int = 8  # optimizer state per parameter
    splits_backward: bool = False
    shards_loss: bool = True
    loss_chunk_tokens: int = 0  # 0: all logits at once
    compiled: bool = False
    compiles_loss: bool = False
    async_tp: bool = False
    ring: bool = False  # under cp, keys and values travel around a ring; else by all-gather
    documents: bool = False  # attention stays inside documents
    imbalance: float = 1.0  # rows that the most loaded of `ep` ranks receives, over their mean
    balances_by_loss: bool = False  # the auxiliary loss counts the routes of whole sequences
    # How other code differs, for published runs: the defaults are this trainer's.
    sequence_parallel: bool = True
    copies_gathered: bool = True  # the result of tp's all-gathers, because DTensor gathers along the sequence
    overlaps_reduction: bool = False  # of gradients in a pipeline, with the last backwards
    receive_buffers: int | None = None  # of a stage; None: one for each microbatch, as torch's pipeline has them
    grad_bytes: int = MASTER_BYTES  # of a gradient at rest ...
    reduce_bytes: int = MASTER_BYTES  # ... and while it is summed over dp

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
        kinds = (False, self.recompute - self.recompute_of_moes), (True, self.recompute_of_moes)
        return [describe_kind(self.args, self.layout, modes, is_moe=is_moe) for is_moe, modes in kinds if modes]

    # ------------------------------------------------------------ rows of an MoE layer

    @property
    def n_rows(self) -> int:
        """R: copies of a rank's own tokens of a microbatch, one for each expert of a token."""
        return self.n_tokens // self.layout.tp * self.args.moe.top_k

    @property
    def n_rows_each(self) -> int:
        """Rows that the most loaded of ep ranks receives from each of them, itself included.

        It receives `imbalance` times the mean. No rank has more than all rows, so ep is the largest imbalance.
        """
        ep = self.layout.ep
        return min(self.n_rows, round(self.n_rows * self.imbalance / ep)) if ep > 1 else self.n_rows

    @property
    def n_rows_received(self) -> int:
        """Rows whose experts the most loaded rank computes."""
        return self.n_rows_each * max(1, self.layout.ep)

    # ------------------------------------------------------------ parameters of one rank, before dp shards them

    @cached_property
    def vocabulary_parameters(self) -> int:
        """Parameters of the embedding, or of the head."""
        return pad(self.args.vocab_size // self.layout.tp, self.n_shards) * self.args.dim

    def groups_of(self, stage: Stage) -> list[int]:
        """Return the parameters of each FSDP group, in forward order: embedding, layers, head with the final norm.

        MoE layers are groups of their own, over other ranks: see `count_stage_moes`.
        """
        has_own_embedding = stage.has_embedding and not (stage.has_head and self.args.tie_embeddings)
        layers = [kind.parameters for kind in self.kinds for _ in range(count_layers(stage, kind))]
        head = [self.vocabulary_parameters + pad(self.args.dim, self.n_shards)] * stage.has_head
        return [self.vocabulary_parameters] * has_own_embedding + layers + head

    @cached_property
    def stage_parameters(self) -> dict[Stage, int]:
        """Parameters of a stage without its experts."""
        return {stage: sum(self.groups_of(stage)) for stage in set(self.stages)}

    def count_stage_moes(self, stage: Stage) -> int:
        return sum(kind.moe_parameters * count_layers(stage, kind) for kind in self.kinds)

    def count_at_rest(self, stage: Stage) -> float:
        """Return the parameters of a stage that one rank holds between steps."""
        return self.stage_parameters[stage] / self.n_shards + self.count_stage_moes(stage) / self.layout.efsdp


def count_layers(stage: Stage, kind: LayerKind) -> int:
    """Return the layers of this kind on a stage."""
    return stage.n_moes if kind.is_moe else stage.n_layers - stage.n_moes


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
    float8 = config.quantize.linear.float8
    chosen = frozenset()
    if config.model.uses_float8:
        chosen = choose_float8(args, tuple(float8.filter_fqns), layout.tp, float8.recipe_name)
    return Workload(
        args=args,
        layout=layout,
        seq_len=config.training.seq_len,
        recompute=count_recompute(config.activation_checkpoint, range(args.n_layers)),
        recompute_of_moes=count_recompute(config.activation_checkpoint, filter(args.is_moe, range(args.n_layers))),
        imbalance=imbalance,
        balances_by_loss=config.training.expert_balance_loss > 0,
        compute_dtype=dtype,
        float8=chosen,
        float8_recipe=float8.recipe_name.partition("_")[0],
        gathers_float8=config.model.uses_float8 and float8.enable_fsdp_float8_all_gather,
        attention="triton" if config.model.attention == "document" else "cudnn",
        moment_bytes=count_moment_bytes(config.optimizer),
        splits_backward=splits_backward(config.parallelism),
        shards_loss=not config.parallelism.disable_loss_parallel,
        loss_chunk_tokens=choose_chunk_tokens(config.training, "cuda"),
        compiled=config.compile.compiles_blocks,
        compiles_loss=config.compile.enable and "loss" in config.compile.components,
        async_tp=config.parallelism.enable_async_tensor_parallel,
        ring=config.parallelism.context_parallel_rotate_method == "ring",
        documents=config.model.attention == "document",
    )


@lru_cache
def choose_float8(args: ModelArgs, filter_fqns: tuple[str, ...], tp: int, recipe_name: str) -> frozenset[str]:
    """Return the modules of a block that compute in float8."""
    fqns = plan_float8(list_linears(args), list(filter_fqns), tp, recipe_name)
    return frozenset(fqn.split(".", 2)[2] for fqn in fqns)


@dataclass(frozen=True)
class PlannedRun:
    """A run on other machines, whose config is sound."""

    config_name: str
    config: Config  # resolved
    model_args: ModelArgs
    layout: Layout
    device_type: Literal["cuda", "cpu"]
    imbalance: float = 1.0

    @property
    def workload(self) -> Workload:
        return describe_workload(self.config, self.model_args, self.layout, imbalance=self.imbalance)


def plan_run(
    args: list[str], n_gpus: int | None, device_type: Literal["cuda", "cpu"], imbalance: float = 1.0
) -> PlannedRun:
    """Return the run of these arguments of a config. Raises ConfigError with every problem.

    Without n_gpus: the product of the degrees, or two if one of them is automatic. Files, memory and GPUs of this
    machine are not checked.
    """
    reading = read_run_config(args)
    if reading.problems:
        raise ConfigError(reading.problems)
    model_args = resolve_model(reading.config.model)
    layout = plan_layout(reading.config, model_args, n_gpus or choose_n_ranks(reading.config.parallelism, ANY_CPU, 1))
    config = resolve_config(reading.config, layout, device_type)
    most = max(1, layout.ep)
    if imbalance > most:
        why = f"parallelism.expert_parallel_degree = {most}: no rank can compute more than {most} times the mean"
        remedy = f"Use {f'1 to {most}' if most > 1 else '1'}, or a larger parallelism.expert_parallel_degree"
        raise ConfigError([Problem("--imbalance", imbalance, why, remedy)])
    return PlannedRun(reading.config_name, config, model_args, layout, device_type, imbalance)


def group_pp_ranks(planned: PlannedRun) -> dict[int, list[int]]:
    """Return pp rank -> pp ranks with equal stages, itself included. The key is the first, which holds most."""
    workload, layout = planned.workload, planned.layout
    alike: dict[tuple, list[int]] = {}
    for rank in range(layout.pp):
        alike.setdefault(tuple(workload.stages[index] for index in layout.stages_of(rank)), []).append(rank)
    return {ranks[0]: ranks for ranks in alike.values()}


def count_recompute(section: ActivationCheckpoint, layers: Iterable[int]) -> Counter:
    """Return mode -> number of these layers, as plan_recompute of activation_checkpoint.py has it layer by layer."""
    by_op = section.selective_ac_option == "op"
    if section.mode != "selective" or by_op:
        return Counter(section.mode if section.mode != "selective" else "op" for _ in layers)
    every = int(section.selective_ac_option)
    return Counter("none" if layer % every else "full" for layer in layers)
