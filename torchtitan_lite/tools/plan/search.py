"""`plan --search`: rank all layouts of a model that `check` accepts, by forecast step time.

    degrees x schedule x microbatch x ZeRO stage x recompute  ->  check's rules  ->  memory  ->  closed form, simulated

Layouts that fit in memory are sorted by a lower bound on their step time and simulated in this order. The search stops
when the next bound exceeds the step time of the N_BEST-th layout, so the result equals an exhaustive search. Layouts
within TIE of the best are shown as ties, those with the fewest mesh dims first: a forecast cannot tell them apart.
"""

import argparse
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, inf

from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.config.layout import (
    Layout,
    plan_batch,
    plan_degrees,
    plan_layout,
    resolve_config,
    resolve_model,
)
from torchtitan_lite.config.machine import GIB
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.config.reader import dump_config_toml
from torchtitan_lite.config.schema import ActivationCheckpoint, Config, Parallelism
from torchtitan_lite.preflight import read_run_config
from torchtitan_lite.tools.plan.bars import find_most_taken
from torchtitan_lite.tools.plan.cluster import Cluster, find_cluster
from torchtitan_lite.tools.plan.forecast import Forecast, estimate_peak, forecast
from torchtitan_lite.tools.plan.planned_run import describe_workload
from torchtitan_lite.tools.plan.step_time import StepTime
from torchtitan_lite.tools.plan.timeline import list_samples
from torchtitan_lite.tools.plan.workload import Workload
from torchtitan_lite.tools.tables import format_table

N_BEST = 10
TIE = 1.02
MICROBATCHES = (1, 2, 4, 8)  # sequences per microbatch
STAGES_PER_RANK = (2, 4, 8)  # for interleaved schedules
LEAST_TOKENS = 1024  # per sequence and cp rank
RECOMPUTE = [
    ActivationCheckpoint("none"),
    ActivationCheckpoint("selective", "op"),
    ActivationCheckpoint("selective", "2"),
    ActivationCheckpoint("full"),
]


class Candidate:
    """A layout that `check` accepts, and its memory and step time on a cluster."""

    def __init__(self, config: Config, model_args: ModelArgs, layout: Layout, cluster: Cluster):
        self.config = config
        self.layout = layout
        self.workload = describe_workload(config, model_args, layout)
        self.schedule = config.parallelism.pipeline_parallel_schedule
        live_bytes = estimate_peak(self.workload, self.schedule)
        # Of the fullest GPU, at the upper end of the error bar
        self.taken_bytes = find_most_taken(cluster, live_bytes, layout.tp)
        self.step_time = StepTime(self.workload, cluster)
        self.n_dims = sum(degree > 1 for dim, degree in layout.degrees.items() if dim != "dp_shard")

    def forecast(self) -> Forecast:
        layout = self.layout
        n_stages_per_rank = len(layout.stages) // layout.pp
        samples = list_samples(self.schedule, layout.pp, layout.n_microbatches, n_stages_per_rank)
        return forecast(self.step_time, samples)

    def __str__(self) -> str:
        return describe_layout(self.workload, self.schedule)


def describe_layout(workload: Workload, schedule: str) -> str:
    """Return "pp4 x tp2, Interleaved1F1B, 8 stages, microbatches: 32 x 1, ZeRO 1, recompute op (32)"."""
    layout = workload.layout
    parts = [str(layout)]
    if layout.pp > 1:
        parts += [schedule, f"{len(layout.stages)} stages"]
    parts.append(f"microbatches: {layout.n_microbatches} x {layout.microbatch_size}")
    modes = [f"{mode} ({n})" for mode, n in workload.recompute.items()]
    return ", ".join([*parts, f"ZeRO {layout.zero_stage}", f"recompute {' and '.join(modes)}"])


@dataclass
class Search:
    """Searches the layouts of a model on `world_size` GPUs, with the model and the global batch of `config`."""

    config: Config
    model_args: ModelArgs
    world_size: int
    cluster: Cluster

    def rank(self) -> list[tuple[Candidate, Forecast]]:
        """Return the best layouts, ties first. Raises ConfigError if check accepts no layout or none fits in memory."""
        self.n_accepted = 0
        self.fitting = []
        least_bytes = inf
        for candidate in self.list_candidates():
            self.n_accepted += 1
            least_bytes = min(least_bytes, candidate.taken_bytes)
            if candidate.taken_bytes <= self.cluster.memory_bytes:
                self.fitting.append(candidate)
        if not self.fitting:
            raise ConfigError([self.describe_failure(least_bytes)])
        self.fitting.sort(key=lambda candidate: candidate.step_time.lower_bound_s)
        best = []
        for candidate in self.fitting:
            if len(best) == N_BEST and candidate.step_time.lower_bound_s >= best[-1][1].step_time_s:
                break
            best.append((candidate, candidate.forecast()))
            best.sort(key=lambda pair: (pair[1].step_time_s, pair[0].taken_bytes))
            del best[N_BEST:]
        tie_s = TIE * best[0][1].step_time_s
        ties = [pair for pair in best if pair[1].step_time_s <= tie_s]
        return sorted(ties, key=lambda pair: pair[0].n_dims) + best[len(ties) :]

    def describe_failure(self, least_bytes: float) -> Problem:
        """Return why no layout fits. `least_bytes`: of the layout that takes least; infinite if check accepts none."""
        why = f"no layout with {self.find_global_batch()} sequences per step passes check"
        remedy = "Use full nodes, and a training.global_batch_size with many divisors"
        if least_bytes < inf:
            why = f"the smallest layout needs {least_bytes / GIB:.1f} GiB per GPU"
            remedy = "Use more GPUs, or optimizer moments in bfloat16 (optimizer.moments_dtype)"
        return Problem("--gpus", self.world_size, why, remedy)

    def list_candidates(self) -> Iterator[Candidate]:
        """Yield the layouts that `check` accepts."""
        for config in self.list_proposals():
            with suppress(ConfigError):
                layout = plan_layout(config, self.model_args, self.world_size)
                yield Candidate(config, self.model_args, layout, self.cluster)

    def list_proposals(self) -> Iterator[Config]:
        """Yield every layout to try. tp stays within a node; dp_shard is all of dp, 64, or 8."""
        config = self.config
        world_size = self.world_size
        n_layers = self.model_args.n_layers
        n_experts = self.model_args.moe.n_experts if self.model_args.moe else 1
        global_batch = self.find_global_batch()
        for tp, pp, cp in product(
            divisors(world_size, self.cluster.node_size),
            divisors(world_size, n_layers),
            divisors(world_size, max(1, config.training.seq_len // LEAST_TOKENS)),
        ):
            dp, rest = divmod(world_size, tp * pp * cp)
            if rest or global_batch % dp:
                continue
            for dp_shard, microbatch, (schedule, layers), zero_stage, ep, recompute in product(
                {n for n in (dp, 64, 8) if dp % n == 0},
                [n for n in MICROBATCHES if global_batch // dp % n == 0],
                list_schedules(config.parallelism, pp, n_layers),
                (1, 3) if pp > 1 else (1, 2, 3),
                divisors(n_experts, world_size),
                RECOMPUTE,
            ):
                if dp_shard * cp * tp % ep:
                    continue
                training = replace(
                    config.training,
                    local_batch_size=global_batch // dp if pp > 1 else microbatch,
                    global_batch_size=global_batch,
                )
                parallelism = replace(
                    config.parallelism,
                    tensor_parallel_degree=tp,
                    pipeline_parallel_degree=pp,
                    context_parallel_degree=cp,
                    data_parallel_shard_degree=dp_shard,
                    data_parallel_replicate_degree=dp // dp_shard,
                    expert_parallel_degree=ep,
                    zero_stage=zero_stage,
                    fsdp_reshard_after_forward="default",
                    pipeline_parallel_microbatch_size=microbatch if pp > 1 else 1,
                    module_fqns_per_model_part=[],
                    pipeline_parallel_schedule=schedule,
                    pipeline_parallel_layers_per_stage=layers,
                )
                yield replace(
                    config,
                    training=training,
                    parallelism=parallelism,
                    activation_checkpoint=recompute,
                )

    def find_global_batch(self) -> int:
        """Return the sequences per step: global_batch_size, or local_batch_size times dp of the config."""
        degrees = plan_degrees(self.config.parallelism, self.world_size)
        return plan_batch(self.config, degrees)["global_batch_size"]


def list_schedules(section: Parallelism, pp: int, n_layers: int) -> list[tuple[str, int | None]]:
    """Return every schedule with its layers per stage; None: as many stages as the schedule has."""
    if pp == 1:
        return [(section.pipeline_parallel_schedule, None)]
    weight = n_layers + section.pipeline_parallel_first_stage_less_layers
    weight += section.pipeline_parallel_last_stage_less_layers
    pairs = []
    for name, schedule in SCHEDULES.items():
        layers_per_stage = {None}
        if schedule.most_stages_per_rank is None:
            layers_per_stage = {ceil(weight / pp / n_stages) for n_stages in STAGES_PER_RANK}
        pairs += product([name], layers_per_stage)
    return pairs


def divisors(n: int, most: int) -> list[int]:
    """Return the divisors of n up to `most`."""
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]


def search_layouts(options: argparse.Namespace) -> str:
    """Search, write the best layout to `--toml`, and return the report. Raises ConfigError if no layout fits."""
    reading = read_run_config(options.config_args)
    problems = list(reading.problems)
    n_gpus = options.gpus
    if n_gpus is None:
        why = "a search needs the number of GPUs"
        problems.append(Problem("--gpus", None, why, "For example, use --gpus 64"))
    if problems:
        raise ConfigError(problems)
    cluster = find_cluster(options.gpu)
    search = Search(reading.config, resolve_model(reading.config.model), n_gpus, cluster)
    best = search.rank()
    if options.toml:
        options.toml.write_text(format_winner(*best[0]), encoding="utf-8")
    tie_s = TIE * min(expected.step_time_s for _, expected in best)
    table = [("", "tok/s/GPU", "MFU", "step", "bubble", "GiB", "layout")]
    for number, (candidate, expected) in enumerate(best, 1):
        mark = "=" if expected.step_time_s <= tie_s else ""
        row = (
            f"{mark} {number}",
            f"{expected.tokens_per_s_per_gpu:,.0f}",
            f"{expected.mfu_full:.1%}",
            f"{expected.step_time_s:.2f}s",
            f"{expected.bubble:.1%}",
            f"{candidate.taken_bytes / GIB:.1f}",
            str(candidate),
        )
        table.append(row)
    batch = (
        f"{search.find_global_batch():,} sequences of {reading.config.training.seq_len:,} tokens"
    )
    return (
        f"{search.n_accepted:,} layouts on {n_gpus:,} GPUs with {batch} per step pass check; "
        f"{len(search.fitting):,} fit in memory.\n\n{format_table(table, '>>>>>>')}\n"
        f"= tied, within {TIE - 1:.0%} of the best; fewest mesh dims first"
    )


def format_winner(candidate: Candidate, expected: Forecast) -> str:
    """Return the config of the best layout as TOML for `--config`."""
    config = resolve_config(candidate.config, candidate.layout, "cuda")
    speed = f"{expected.tokens_per_s_per_gpu:,.0f} tokens/s/GPU"
    return (
        f"# Found by plan --search for {candidate.layout.world_size:,} GPUs: {candidate}\n"
        f"# forecast: {speed}, a step in {expected.step_time_s:.2f} s\n\n{dump_config_toml(config)}"
    )
