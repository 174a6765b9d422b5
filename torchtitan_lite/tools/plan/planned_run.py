"""Describe a run on a cluster: from the config and the number of GPUs to layout, Workload, memory and time."""

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from torchtitan_lite.checkpoint.starting_weights import check_loaded_model
from torchtitan_lite.config.block import has_masks
from torchtitan_lite.config.checks import plan_layout, resolve_config
from torchtitan_lite.config.choices import ATTENTIONS, OPTIMIZERS
from torchtitan_lite.config.float8 import check_matmul, list_linears, plan_float8
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.messages import ConfigError, Problem, Problems
from torchtitan_lite.config.model import resolve_model
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.config.reader import UserConfig
from torchtitan_lite.config.recompute import plan_recompute
from torchtitan_lite.config.schema import ActivationCheckpoint, Config
from torchtitan_lite.preflight import choose_n_ranks, read_run
from torchtitan_lite.tools.host_rules import count_moment_bytes, count_weight_bytes
from torchtitan_lite.tools.plan.bars import BARS, Bar, find_bar_family
from torchtitan_lite.tools.plan.cluster import (
    CLUSTERS,
    OWN_CONTEXT_BYTES,
    OWN_RESERVE,
    Cluster,
)
from torchtitan_lite.tools.plan.memory import Memory, RankMemory
from torchtitan_lite.tools.plan.step_time import Forecast, StepTime
from torchtitan_lite.tools.plan.workload import Workload

ANY_CPU = Machine("cpu", 1, 0, "CPU")


def describe_workload(config: Config, args: ModelArgs, layout: Layout) -> Workload:
    """Return the workload of a run with a resolved config. Raises ConfigError."""
    if config.activation_checkpoint.mode == "memory_budget":
        why = "the compiler chooses what to recompute, so there is no closed form for this mode"
        remedy = 'Plan with the modes "none" and "full". The result for memory_budget is between these two results'
        raise ConfigError(Problem("activation_checkpoint.mode", "memory_budget", why, remedy))
    float8 = config.quantize.linear.float8
    in_float8 = []  # FQNs
    if config.model.uses_float8:
        linears = list_linears(args)
        in_float8 = plan_float8(linears, float8.filter_fqns, layout.tp, float8.recipe_name)
    row = ATTENTIONS[config.model.attention]
    is_masked = row.uses_documents or has_masks(config.model.attention, args)
    return Workload(
        args=args,
        layout=layout,
        schedule=config.parallelism.pipeline_parallel_schedule,
        seq_len=config.training.seq_len,
        recompute=count_recompute(config.activation_checkpoint, args),
        balances_by_loss=config.training.expert_balance_loss > 0,
        compute_dtype=config.training.mixed_precision_param,
        float8=frozenset(fqn.split(".", 2)[2] for fqn in in_float8),
        float8_recipe=float8.recipe_name.partition("_")[0],
        gathers_float8=float8.enable_fsdp_float8_all_gather,
        precomputes_scales=float8.precompute_float8_dynamic_scale_for_fsdp,
        zero_plus_plus=tuple(config.parallelism.zero_plus_plus),
        attention_row=config.model.attention,
        attention="triton" if is_masked else "cudnn",
        weight_bytes=count_weight_bytes(config),
        moment_bytes=count_moment_bytes(config.optimizer),
        updates_matrices=OPTIMIZERS[config.optimizer.name].updates_matrices,
        loss_chunk_tokens=config.training.loss_chunk_tokens,
        compiled=config.compile.compiles_blocks,
        compiles_loss=config.compile.enable and "loss" in config.compile.components,
        async_tp=config.parallelism.enable_async_tensor_parallel,
        ring=config.parallelism.context_parallel_rotate_method == "ring",
    )


@lru_cache
def count_recompute(section: ActivationCheckpoint, args: ModelArgs) -> dict[bool, Counter]:
    """Return is_moe -> recompute mode -> number of layers."""
    counts = defaultdict(Counter)
    for layer, mode in plan_recompute(section, range(args.n_layers)).items():
        counts[args.is_moe(layer)][mode] += 1
    return counts


@dataclass(frozen=True)
class PlannedRun:
    """A run with a valid config on a cluster, and the forecasts for this run."""

    config: Config
    model_args: ModelArgs
    layout: Layout
    cluster: Cluster
    notices: tuple[str, ...] = ()  # about the config

    @property
    def resolved(self) -> Config:
        """The config, without automatic values."""
        device_type = "cpu" if self.cluster.name == "cpu" else "cuda"
        return resolve_config(self.config, self.layout, device_type)

    @cached_property
    def workload(self) -> Workload:
        return describe_workload(self.resolved, self.model_args, self.layout)

    def with_recompute(self, section: ActivationCheckpoint) -> "PlannedRun":
        """Return a copy of this run with these recompute settings. The copy shares all values that depend only on the
        layout."""
        planned = replace(self, config=replace(self.config, activation_checkpoint=section))
        counts = count_recompute(section, self.model_args)
        vars(planned)["workload"] = self.workload.with_recompute(counts)
        return planned

    def find_most_taken(self, live_bytes: float) -> float:
        """Return the memory that a GPU needs for `live_bytes`, at the upper end of the error bar. This includes the
        memory that the allocator reserves and does not use."""
        cluster = self.cluster
        if self.has_own_reserve:
            return live_bytes * OWN_RESERVE[self.layout.zero_stage] + OWN_CONTEXT_BYTES
        factor = cluster.tp_reserve_factor if self.layout.tp > 1 else cluster.reserve_factor
        return live_bytes * factor * self.memory_bar.high + cluster.context_bytes

    @property
    def family(self) -> str:
        return find_bar_family(self.workload)

    @property
    def speed_bar(self) -> Bar:
        return BARS[self.family]

    @property
    def memory_bar(self) -> Bar:
        return BARS["memory of experts" if self.model_args.moe else "memory"]

    @property
    def source_of_reserve(self) -> str:
        if self.has_own_reserve:
            return (
                "the allocator's reserve was measured for this trainer without a GPU; it has no error bar, because no "
                "run confirmed it"
            )
        return self.memory_bar.describe(self.cluster.name)

    @property
    def has_own_reserve(self) -> bool:
        """Whether the forecast uses the ratio of reserved to allocated memory that was measured for this trainer
        (OWN_RESERVE). True on one GPU, because published runs use several GPUs."""
        return self.layout.world_size == 1 and self.cluster.name != "cpu"

    def name_rank(self, pp_rank: int) -> str:
        """Return the name under which a pp rank appears in the output. Without a pipeline, all ranks are alike."""
        return f"pp rank {pp_rank}" if self.layout.pp > 1 else "every rank"

    @cached_property
    def memory(self) -> Memory:
        """Bytes of the fullest rank at its peak."""
        return RankMemory(self.workload).fullest

    @property
    def taken_bytes(self) -> float:
        """Memory taken on the fullest GPU, at the upper end of the error bar."""
        return self.find_most_taken(self.memory.live)

    @property
    def fits(self) -> bool:
        return self.taken_bytes <= self.cluster.memory_bytes

    @cached_property
    def step_time(self) -> StepTime:
        return StepTime(self.workload, self.cluster)

    @cached_property
    def forecast(self) -> Forecast:
        return self.step_time.forecast()

    def __str__(self) -> str:
        """Return "pp4 x tp2, 1F1B, 4 stages, microbatches: 32 of size 1, ZeRO 1, recompute op (32 layers)"."""
        layout = self.layout
        parts = [str(layout)]
        if layout.pp > 1:
            parts += [self.workload.schedule, f"{len(layout.stages)} stages"]
        parts.append(f"microbatches: {layout.n_microbatches} of size {layout.microbatch_size}")
        parts.append(f"ZeRO {layout.zero_stage}")
        n_layers = sum(self.workload.recompute.values(), Counter())
        modes = [f"{mode} ({n} layers)" for mode, n in n_layers.items()]
        return f"{', '.join(parts)}, recompute {' and '.join(modes)}"


def read_target(
    args: list[str], n_gpus: int | None, gpu: str = "cpu"
) -> tuple[UserConfig, ModelArgs, int]:
    """Return the config, its model and the number of ranks. Raises ConfigError with all problems.

    If n_gpus is None, the number of ranks is the product of the degrees, or 2 if a degree is automatic. `gpu`: a row of
    CLUSTERS.
    """
    given, weights = read_run(args)
    if given.problems:
        raise ConfigError(*given.problems)
    config = given.config
    model_args = resolve_model(config.model)
    found = Problems(config, model_args)
    if weights:
        check_loaded_model(found, weights)
    if config.model.uses_float8:
        machine = replace(ANY_CPU, name=gpu.upper())
        found += Problems(config, rules=check_matmul(config, machine))
    if found:
        raise ConfigError(*found)
    given.notices += found.notices
    return given, model_args, n_gpus or choose_n_ranks(config.parallelism, ANY_CPU, 1)


def plan_run(args: list[str], n_gpus: int | None, gpu: str) -> PlannedRun:
    """Return the planned run for the config arguments `args` on GPUs of the type `gpu`. For `n_gpus`, see
    `read_target`."""
    given, model_args, n_ranks = read_target(args, n_gpus, gpu)
    layout = plan_layout(given.config, model_args, n_ranks)
    return PlannedRun(given.config, model_args, layout, CLUSTERS[gpu], tuple(given.notices))
