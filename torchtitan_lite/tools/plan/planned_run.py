"""Describe a run on other machines: config + number of GPUs -> layout -> Workload."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from torchtitan_lite.config.block import list_linears, plan_float8
from torchtitan_lite.config.choices import OPTIMIZERS
from torchtitan_lite.config.layout import (
    Layout,
    choose_chunk_tokens,
    plan_layout,
    plan_recompute,
    resolve_config,
    resolve_model,
)
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.memory_bound import count_moment_bytes
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.config.reader import Prepared
from torchtitan_lite.config.schema import Config
from torchtitan_lite.preflight import choose_n_ranks, read_run_config
from torchtitan_lite.tools.plan.orders import Order, list_order
from torchtitan_lite.tools.plan.workload import Workload

ANY_CPU = Machine("cpu", 1, 0, "CPU")


def describe_workload(config: Config, args: ModelArgs, layout: Layout) -> Workload:
    """Return the workload of a run. "auto" values are resolved for a GPU. Raises ConfigError."""
    if config.activation_checkpoint.mode == "memory_budget":
        why = "the compiler decides what to recompute, so there is no closed form"
        remedy = 'Plan with "none" and with "full": the result is between the two'
        raise ConfigError([Problem("activation_checkpoint.mode", "memory_budget", why, remedy)])
    recompute = plan_recompute(config.activation_checkpoint, range(args.n_layers))
    dtype, float8 = config.training.mixed_precision_param, config.quantize.linear.float8
    asked = args, tuple(float8.filter_fqns), layout.tp, float8.recipe_name
    return Workload(
        args=args,
        layout=layout,
        seq_len=config.training.seq_len,
        recompute=Counter(recompute.values()),
        recompute_of_moes=Counter(mode for layer, mode in recompute.items() if args.is_moe(layer)),
        balances_by_loss=config.training.expert_balance_loss > 0,
        compute_dtype="bfloat16" if dtype == "auto" else dtype,
        float8=choose_float8(*asked) if config.model.uses_float8 else frozenset(),
        float8_recipe=float8.recipe_name.partition("_")[0],
        gathers_float8=config.model.uses_float8 and float8.enable_fsdp_float8_all_gather,
        zero_plus_plus=tuple(config.parallelism.zero_plus_plus),
        attention="triton" if config.model.attention == "document" else "cudnn",
        moment_bytes=count_moment_bytes(config.optimizer),
        updates_matrices=OPTIMIZERS[config.optimizer.name].updates_matrices,
        loss_chunk_tokens=choose_chunk_tokens(config.training, "cuda"),
        compiled=config.compile.compiles_blocks,
        compiles_loss=config.compile.enable and "loss" in config.compile.components,
        async_tp=config.parallelism.enable_async_tensor_parallel,
        ring=config.parallelism.context_parallel_rotate_method == "ring",
        documents=config.model.attention == "document",
    )


@lru_cache
def choose_float8(
    args: ModelArgs, filter_fqns: tuple[str, ...], tp: int, recipe_name: str
) -> frozenset[str]:
    """Return the names of a block's modules that compute in float8."""
    fqns = plan_float8(list_linears(args), list(filter_fqns), tp, recipe_name)
    return frozenset(fqn.split(".", 2)[2] for fqn in fqns)


@dataclass(frozen=True)
class PlannedRun:
    """A run on other machines, with a valid config."""

    config_name: str
    config: Config
    model_args: ModelArgs
    layout: Layout
    device_type: Literal["cuda", "cpu"]

    @cached_property
    def workload(self) -> Workload:
        return describe_workload(self.config, self.model_args, self.layout)

    @property
    def schedule(self) -> str:
        return self.config.parallelism.pipeline_parallel_schedule

    @property
    def pipeline(self) -> tuple[str, int, int, int]:
        """Schedule, pp ranks, microbatches and stages per rank: the arguments of list_order and list_samples."""
        layout = self.layout
        n_stages_per_rank = len(layout.stages) // layout.pp
        return self.schedule, layout.pp, layout.n_microbatches, n_stages_per_rank

    @property
    def order(self) -> Order:
        """The actions of each pp rank in one step."""
        return list_order(*self.pipeline)

    def __str__(self) -> str:
        """Return "pp4 x tp2, Interleaved1F1B, 8 stages, microbatches: 32 x 1, ZeRO 1, recompute op (32)"."""
        layout = self.layout
        parts = [str(layout)]
        if layout.pp > 1:
            parts += [self.schedule, f"{len(layout.stages)} stages"]
        parts.append(f"microbatches: {layout.n_microbatches} x {layout.microbatch_size}")
        parts.append(f"ZeRO {layout.zero_stage}")
        modes = [f"{mode} ({n})" for mode, n in self.workload.recompute.items()]
        return f"{', '.join(parts)}, recompute {' and '.join(modes)}"


def read_target(args: list[str], n_gpus: int | None) -> tuple[Prepared, int]:
    """Return a config with its model, and the number of ranks. Raises ConfigError with all problems.

    If n_gpus is None: the product of the degrees, or 2 if a degree is automatic.
    """
    reading = read_run_config(args)
    if reading.problems:
        raise ConfigError(reading.problems)
    reading.model_args = resolve_model(reading.config.model)
    return reading, n_gpus or choose_n_ranks(reading.config.parallelism, ANY_CPU, 1)


def plan_run(
    args: list[str], n_gpus: int | None, device_type: Literal["cuda", "cpu"]
) -> PlannedRun:
    """Return the run for these config arguments. See `read_target`."""
    reading, n_ranks = read_target(args, n_gpus)
    layout = plan_layout(reading.config, reading.model_args, n_ranks)
    config = resolve_config(reading.config, layout, device_type)
    return PlannedRun(reading.config_name, config, reading.model_args, layout, device_type)


def group_pp_ranks(planned: PlannedRun) -> dict[int, list[int]]:
    """Group pp ranks with equal stages: first rank -> all ranks of its group. The first rank uses the most memory."""
    alike = defaultdict(list)
    for rank in range(planned.layout.pp):
        indices = planned.layout.stages_of(rank)
        alike[tuple(planned.workload.stages[index] for index in indices)].append(rank)
    return {ranks[0]: ranks for ranks in alike.values()}
