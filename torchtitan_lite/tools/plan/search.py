"""Rank every layout of a model on a cluster that `check` accepts, by forecast step time: `plan --search`.

    degrees x schedule x microbatch x ZeRO stage x recompute  ->  check's rules  ->  memory  ->  closed form, simulated

Layouts that fit are sorted by a lower bound of their step time. Their schedules are simulated in this order, until the
bound of the next one is above the last of the best: these are the layouts that simulating all would give. A forecast
cannot tell layouts within TIE of each other apart, so they are shown as ties: first those with the fewest mesh dims
besides FSDP's.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path

from torchtitan_lite.config.checks import find_refused
from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import Layout, plan_layout, resolve_config, resolve_model
from torchtitan_lite.config.machine import GIB
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.reader import dump_config_toml
from torchtitan_lite.config.schema import Config, Parallelism
from torchtitan_lite.preflight import read_run_config
from torchtitan_lite.tools.plan.cluster import Cluster
from torchtitan_lite.tools.plan.forecast import Forecast, estimate_peak, forecast_quickly
from torchtitan_lite.tools.plan.step_time import StepTime
from torchtitan_lite.tools.plan.workload import Workload, describe_workload
from torchtitan_lite.tools.tables import format_table

N_BEST = 10
TIE = 1.02
USABLE = 0.97  # of the memory: a forecast errs, and a run that goes out of memory ends
MICROBATCHES = (1, 2, 4, 8)  # sequences
STAGES_PER_RANK = (2, 4, 8)  # of interleaved schedules
LEAST_TOKENS = 1024  # of a sequence on a cp rank
RECOMPUTE = [("none", "op"), ("selective", "op"), ("selective", "2"), ("full", "op")]  # mode, selective_ac_option


@dataclass(frozen=True)
class Candidate:
    """A layout that `check` accepts."""

    config: Config
    workload: Workload
    taken_bytes: float  # of the GPU that holds most
    step_time: StepTime

    def forecast(self) -> Forecast:
        return forecast_quickly(self.step_time, self.config.parallelism.pipeline_parallel_schedule)

    def __str__(self) -> str:
        """Return "pp4 x dp_shard8 x tp2, Interleaved1F1B with 8 stages, microbatches: 32 x 1, ZeRO 1, recompute op"."""
        layout, section = self.workload.layout, self.config.parallelism
        parts = [str(layout)]
        if layout.pp > 1:
            parts.append(f"{section.pipeline_parallel_schedule} with {len(layout.stages)} stages")
        modes = " and ".join(f"{mode} ({n})" for mode, n in self.workload.recompute.items())
        modes = modes if len(self.workload.recompute) > 1 else next(iter(self.workload.recompute))
        batch = f"microbatches: {layout.n_microbatches} x {layout.microbatch_size}"
        return ", ".join([*parts, batch, f"ZeRO {layout.zero_stage}", f"recompute {modes}"])


@dataclass
class Search:
    """Layouts of `config`'s model on `world_size` GPUs with its global batch; after `rank`, the result of the search.

    `imbalance`: of the most loaded ep rank; if ep is smaller, ep.
    """

    config: Config
    model_args: ModelArgs
    world_size: int
    cluster: Cluster
    imbalance: float = 1.0
    n_accepted: int = 0
    fitting: list[Candidate] = field(default_factory=list)
    best: list[tuple[Candidate, Forecast]] = field(default_factory=list)
    leanest: Candidate | None = None  # with least memory
    refused: Counter = field(default_factory=Counter)  # key -> number of layouts that a rule refused
    examples: dict[str, Problem] = field(default_factory=dict)  # key -> one of their problems

    def rank(self, n_best: int = N_BEST) -> None:
        """Find the best layouts. Raises ConfigError."""
        node_size = self.cluster.node_size
        if self.world_size > node_size and self.world_size % node_size:
            why = f"nodes of this kind have {node_size} GPUs, and the last one would not be full"
            remedy = f"Use a multiple of {node_size}, or say node_size in a --hardware file"
            raise ConfigError([Problem("--gpus", self.world_size, why, remedy)])
        for candidate in self.list_candidates():
            self.n_accepted += 1
            if candidate.taken_bytes <= USABLE * self.cluster.memory_bytes:
                self.fitting.append(candidate)
            if self.leanest is None or candidate.taken_bytes < self.leanest.taken_bytes:
                self.leanest = candidate
        self.fitting.sort(key=lambda candidate: (candidate.step_time.lower_bound_s, candidate.taken_bytes))
        for candidate in self.fitting:
            if len(self.best) == n_best and candidate.step_time.lower_bound_s >= self.best[-1][1].step_time_s:
                break
            self.best.append((candidate, candidate.forecast()))
            self.best.sort(key=lambda pair: (pair[1].step_time_s, pair[0].taken_bytes))
            del self.best[n_best:]
        ties = [pair for pair in self.best if self.is_tie(pair[1])]
        self.best[: len(ties)] = sorted(ties, key=lambda pair: count_dims(pair[0].workload.layout))

    def is_tie(self, forecast: Forecast) -> bool:
        """Whether a forecast is as good as the best one."""
        return forecast.step_time_s <= TIE * min(other.step_time_s for _, other in self.best)

    def list_candidates(self) -> Iterator[Candidate]:
        """Yield the layouts that `check` accepts; count the others."""
        for proposal in self.list_proposals():
            try:
                layout = plan_layout(proposal, self.model_args, self.world_size)
            except ConfigError as error:
                self.refuse(error.problems)
                continue
            for mode, option in RECOMPUTE:
                section = replace(proposal.activation_checkpoint, mode=mode, selective_ac_option=option)
                candidate = replace(proposal, activation_checkpoint=section)
                if problems := find_refused(candidate, self.model_args, layout.zero_stage):
                    self.refuse(problems)
                    continue
                yield self.describe(candidate, layout)

    def refuse(self, problems: list[Problem]) -> None:
        for problem in problems:
            self.refused[problem.key] += 1
            self.examples.setdefault(problem.key, problem)

    def describe(self, config: Config, layout: Layout) -> Candidate:
        imbalance = min(self.imbalance, max(1, layout.ep))
        workload = describe_workload(config, self.model_args, layout, imbalance=imbalance)
        live_bytes = estimate_peak(workload, config.parallelism.pipeline_parallel_schedule)
        return Candidate(config, workload, self.cluster.reserve(live_bytes), StepTime(workload, self.cluster))

    # ------------------------------------------------------------ what is tried

    def list_proposals(self) -> Iterator[Config]:
        """Yield every layout to try, without recompute.

        tp stays inside a node; a shard group is all of dp, or 64 or 8.
        """
        seq_len, global_batch, moe = self.config.training.seq_len, self.find_global_batch(), self.model_args.moe
        tps, pps = (
            divisors(self.world_size, self.cluster.node_size),
            divisors(self.world_size, self.model_args.n_layers),
        )
        for tp, pp, cp in product(tps, pps, divisors(self.world_size, max(1, seq_len // LEAST_TOKENS))):
            dp, rest = divmod(self.world_size, tp * pp * cp)
            if rest:
                continue
            if global_batch % dp:
                why = f"{dp} data-parallel ranks (tp {tp}, pp {pp}, cp {cp}) cannot share it evenly"
                remedy = "Use a batch that more numbers divide, a power of two for instance"
                self.refuse([Problem("training.global_batch_size", global_batch, why, remedy)])
                continue
            for dp_shard in {n for n in (dp, 64, 8) if dp % n == 0}:
                for ep in divisors(moe.n_experts if moe else 1, dp_shard * cp * tp):
                    degrees = {
                        "tensor_parallel_degree": tp,
                        "pipeline_parallel_degree": pp,
                        "context_parallel_degree": cp,
                        "data_parallel_shard_degree": dp_shard,
                        "data_parallel_replicate_degree": dp // dp_shard,
                        "expert_parallel_degree": ep,
                    }
                    if dp_shard * cp * tp % ep == 0:
                        yield from self.list_batches(degrees, global_batch // dp, global_batch)

    def list_batches(self, degrees: dict[str, int], n_sequences: int, global_batch: int) -> Iterator[Config]:
        """Yield microbatches, ZeRO stages and schedules for one set of degrees; a rank has `n_sequences` a step."""
        config, pp = self.config, degrees["pipeline_parallel_degree"]
        for microbatch in (size for size in MICROBATCHES if n_sequences % size == 0):
            local_batch_size = n_sequences if pp > 1 else microbatch
            training = replace(config.training, local_batch_size=local_batch_size, global_batch_size=global_batch)
            for schedule in list_schedules(config.parallelism, pp, self.model_args.n_layers):
                for zero_stage in (1, 3) if pp > 1 else (1, 2, 3):
                    parallelism = replace(
                        config.parallelism,
                        **degrees,
                        **schedule,
                        zero_stage=zero_stage,
                        fsdp_reshard_after_forward="default",
                        pipeline_parallel_microbatch_size=microbatch if pp > 1 else 1,
                        pipeline_parallel_schedule_csv="",
                        module_fqns_per_model_part=[],
                    )
                    section = replace(config.activation_checkpoint, mode="none")
                    yield replace(config, training=training, parallelism=parallelism, activation_checkpoint=section)

    def find_global_batch(self) -> int:
        """Return the sequences of a step: from the config, or from its local batch and its own degrees."""
        training, section = self.config.training, self.config.parallelism
        if training.global_batch_size != -1:
            return training.global_batch_size
        degrees = section.pipeline_parallel_degree, section.context_parallel_degree, section.tensor_parallel_degree
        return training.local_batch_size * max(1, self.world_size // prod(degrees))


def count_dims(layout: Layout) -> int:
    """Count the mesh dims in use besides FSDP's."""
    return sum(degree > 1 for dim, degree in layout.degrees.items() if dim != "dp_shard")


def list_schedules(section: Parallelism, pp: int, n_layers: int) -> list[dict[str, object]]:
    """Return the keys of every schedule; with a few numbers of stages a rank if the schedule takes any."""
    if pp == 1:
        return [{"pipeline_parallel_layers_per_stage": None}]
    weight = n_layers + section.pipeline_parallel_first_stage_less_layers
    weight += section.pipeline_parallel_last_stage_less_layers
    keys = []
    for name, schedule in SCHEDULES.items():
        for per_rank in STAGES_PER_RANK if schedule.most_stages_per_rank is None else (None,):
            layers = None if per_rank is None else -(-weight // (pp * per_rank))
            if per_rank and -(-weight // layers) != pp * per_rank:
                continue  # no length of a stage makes this number of them
            keys.append({"pipeline_parallel_schedule": name, "pipeline_parallel_layers_per_stage": layers})
    return keys


def divisors(n: int, most: int) -> list[int]:
    """Return the divisors of n up to `most`."""
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]


# ---------------------------------------------------------------- the report


def search_layouts(options: argparse.Namespace, cluster: Cluster) -> None:
    """Search, print, and write the winner. Raises ConfigError if no layout fits."""
    reading = read_run_config(options.config_args)
    problems = list(reading.problems)
    if options.gpus is None:
        problems.append(Problem("--gpus", None, "a search needs their number", "Write --gpus 64, for instance"))
    if problems:
        raise ConfigError(problems)
    found = Search(reading.config, resolve_model(reading.config.model), options.gpus, cluster, options.imbalance)
    found.rank()
    print(
        f"{found.n_accepted:,} layouts on {options.gpus:,} GPUs with {found.find_global_batch():,} sequences of "
        f"{reading.config.training.seq_len:,} tokens a step pass check, {sum(found.refused.values()):,} do not; "
        f"{len(found.fitting):,} fit the memory."
    )
    if not found.n_accepted:
        raise ConfigError([found.examples[key] for key, _ in found.refused.most_common()])
    if not found.best:
        needed, there = found.leanest.taken_bytes / GIB, cluster.memory_bytes / GIB
        why = f"the leanest layout ({found.leanest}) needs {needed:.1f} GiB on a GPU, which has {there:.1f} GiB"
        remedy = "Use more GPUs, or moments of the optimizer in bfloat16 (optimizer.moments_dtype)"
        raise ConfigError([Problem("--gpus", options.gpus, why, remedy)])
    print(f"\n{format_best(found)}\n\n{explain_own(found)}")
    toml_file = options.toml or Path(f"{reading.config_name}_{options.gpus}_{options.gpu}.toml")
    toml_file.write_text(format_winner(found), encoding="utf-8")
    print(f"\nNumber 1 is written to {toml_file}.")


def format_best(found: Search) -> str:
    """Return a table with one line per layout."""
    rows = [("", "tok/s/GPU", "MFU", "step", "bubble", "GiB", "layout")]
    for number, (candidate, forecast) in enumerate(found.best, 1):
        speed = f"{forecast.tokens_per_s_per_gpu:,.0f}", f"{forecast.mfu_full:.1%}", f"{forecast.step_time_s:.2f}s"
        taken = f"{candidate.taken_bytes / GIB:.1f}"
        sign = "=" if found.is_tie(forecast) else " "
        rows.append((f"{sign} {number}", *speed, f"{forecast.bubble:.1%}", taken, str(candidate)))
    ties = f"= within {TIE - 1:.0%} of the best: a tie, fewest mesh dims first"
    return f"{format_table(rows, '>>>>>>')}\n{ties}"


def explain_own(found: Search) -> str:
    """Say why the layout of the config loses against the best."""
    candidate, best = found.best[0]
    try:
        own = found.describe(found.config, plan_layout(found.config, found.model_args, found.world_size))
    except ConfigError as error:
        return f"The config's own layout does not run on {found.world_size:,} GPUs:\n{error}"
    forecast = own.forecast()
    slower = forecast.step_time_s / best.step_time_s - 1
    lines = [f"The config's own layout, {own}:"]
    if own.taken_bytes > found.cluster.memory_bytes:
        there = found.cluster.memory_bytes / GIB
        lines.append(f"  does not fit: {own.taken_bytes / GIB:.1f} GiB of {there:.1f}")
    lines.append(
        f"  {forecast.tokens_per_s_per_gpu:,.0f} tok/s/GPU; a step takes {slower:+.1%} against number 1, of which:"
    )
    parts = dict.fromkeys([*forecast.parts_s, *best.parts_s])
    differences = {what: forecast.parts_s.get(what, 0.0) - best.parts_s.get(what, 0.0) for what in parts}
    rows = [
        (f"    {what}", f"{forecast.parts_s.get(what, 0.0):.2f} s", f"number 1: {best.parts_s.get(what, 0.0):.2f} s")
        for what in parts
    ]
    loses = max(differences, key=differences.get)
    return "\n".join([*lines, format_table(rows, "<>"), f"  It loses most by {loses}: {differences[loses]:+.2f} s."])


def format_winner(found: Search) -> str:
    """Return the config of the best layout as TOML, which `--config` takes."""
    candidate, forecast = found.best[0]
    resolved = resolve_config(candidate.config, candidate.workload.layout, "cuda")
    return (
        f"# Found by plan --search for {found.world_size:,} GPUs: {candidate}\n# forecast: "
        f"{forecast.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, a step in {forecast.step_time_s:.2f} s\n\n"
        f"{dump_config_toml(resolved)}"
    )
