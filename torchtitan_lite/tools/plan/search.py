"""Rank every layout of a model on a cluster that `check` accepts, by forecast step time: `plan --search`.

    degrees x schedule x microbatch x ZeRO stage x recompute  ->  check's rules  ->  memory  ->  closed form, simulated

Layouts that fit are sorted by a lower bound of their step time. Their schedules are simulated in this order, until the
bound of the next one is above the last of the best: these are the layouts that simulating all would give. A forecast
cannot tell layouts within TIE of each other apart, so they are shown as ties, those with the fewest mesh dims first.
"""

import argparse
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

from torchtitan_lite.config.checks import find_refused
from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import Layout, plan_layout, resolve_config, resolve_model
from torchtitan_lite.config.machine import GIB
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.reader import dump_config_toml
from torchtitan_lite.config.schema import ActivationCheckpoint, Config, Parallelism
from torchtitan_lite.preflight import read_run_config
from torchtitan_lite.tools.plan.cluster import Cluster, find_cluster
from torchtitan_lite.tools.plan.forecast import Forecast, estimate_peak, forecast
from torchtitan_lite.tools.plan.planned_run import describe_workload
from torchtitan_lite.tools.plan.step_time import StepTime
from torchtitan_lite.tools.plan.timeline import list_samples
from torchtitan_lite.tools.tables import format_table

N_BEST = 10
TIE = 1.02
USABLE = 0.97  # of the memory: a forecast errs, and a run that goes out of memory ends
MICROBATCHES = (1, 2, 4, 8)  # sequences
STAGES_PER_RANK = (2, 4, 8)  # of interleaved schedules
LEAST_TOKENS = 1024  # of a sequence on a cp rank
RECOMPUTE = [ActivationCheckpoint(*each) for each in (("none",), ("selective", "op"), ("selective", "2"), ("full",))]


class Candidate:
    """A layout that `check` accepts, on a cluster."""

    def __init__(self, config: Config, model_args: ModelArgs, layout: Layout, cluster: Cluster):
        self.config, self.layout = config, layout
        self.workload = describe_workload(config, model_args, layout)
        self.schedule = config.parallelism.pipeline_parallel_schedule
        self.taken_bytes = cluster.reserve(estimate_peak(self.workload, self.schedule))  # of the GPU that holds most
        self.step_time = StepTime(self.workload, cluster)
        self.n_dims = sum(degree > 1 for dim, degree in layout.degrees.items() if dim != "dp_shard")

    def forecast(self) -> Forecast:
        layout = self.layout
        numbers = layout.pp, layout.n_microbatches, len(layout.stages) // layout.pp
        return forecast(self.step_time, list_samples(self.schedule, *numbers))

    def __str__(self) -> str:
        """Return "pp4 x tp2, Interleaved1F1B with 8 stages, microbatches: 32 x 1, ZeRO 1, recompute op (32)"."""
        layout, recompute = self.layout, self.workload.recompute
        schedule = f", {self.schedule} with {len(layout.stages)} stages" * (layout.pp > 1)
        modes = " and ".join(f"{mode} ({n})" for mode, n in recompute.items())
        batch = f"microbatches: {layout.n_microbatches} x {layout.microbatch_size}"
        return f"{layout}{schedule}, {batch}, ZeRO {layout.zero_stage}, recompute {modes}"


@dataclass
class Search:
    """Layouts of `config`'s model on `world_size` GPUs with its global batch."""

    config: Config
    model_args: ModelArgs
    world_size: int
    cluster: Cluster

    def rank(self, n_best: int = N_BEST) -> list[tuple[Candidate, Forecast]]:
        """Return the best layouts, ties first. Raises ConfigError if no layout runs or fits."""
        self.n_accepted, fitting, best, leanest = 0, [], [], None
        for candidate in self.list_candidates():
            self.n_accepted += 1
            leanest = min(leanest or candidate, candidate, key=lambda each: each.taken_bytes)
            if candidate.taken_bytes <= USABLE * self.cluster.memory_bytes:
                fitting.append(candidate)
        self.n_fitting = len(fitting)
        if not fitting:
            why = f"no layout of {self.find_global_batch()} sequences a step passes check"
            remedy = "Use whole nodes, and a training.global_batch_size that many numbers divide"
            if leanest:
                why = f"the leanest layout ({leanest}) needs {leanest.taken_bytes / GIB:.1f} GiB on a GPU"
                remedy = "Use more GPUs, or moments of the optimizer in bfloat16 (optimizer.moments_dtype)"
            raise ConfigError([Problem("--gpus", self.world_size, why, remedy)])
        fitting.sort(key=lambda candidate: (candidate.step_time.lower_bound_s, candidate.taken_bytes))
        for candidate in fitting:
            if len(best) == n_best and candidate.step_time.lower_bound_s >= best[-1][1].step_time_s:
                break
            best.append((candidate, candidate.forecast()))
            best.sort(key=lambda pair: (pair[1].step_time_s, pair[0].taken_bytes))
            del best[n_best:]
        n_ties = sum(expected.step_time_s <= TIE * best[0][1].step_time_s for _, expected in best)
        return sorted(best[:n_ties], key=lambda pair: pair[0].n_dims) + best[n_ties:]

    def list_candidates(self) -> Iterator[Candidate]:
        """Yield the layouts that `check` accepts."""
        for proposal in self.list_proposals():
            with suppress(ConfigError):
                layout = plan_layout(proposal, self.model_args, self.world_size)
                for section in RECOMPUTE:
                    config = replace(proposal, activation_checkpoint=section)
                    if not find_refused(config, self.model_args, layout.zero_stage):
                        yield Candidate(config, self.model_args, layout, self.cluster)

    def list_proposals(self) -> Iterator[Config]:
        """Yield every layout to try. Nodes are full, tp stays inside a node; a shard group is all of dp, or 64 or 8."""
        config, world_size, node_size = self.config, self.world_size, self.cluster.node_size
        n_layers, moe, global_batch = self.model_args.n_layers, self.model_args.moe, self.find_global_batch()
        if world_size > node_size and world_size % node_size:
            return
        cps = divisors(world_size, max(1, config.training.seq_len // LEAST_TOKENS))
        for tp, pp, cp in product(divisors(world_size, node_size), divisors(world_size, n_layers), cps):
            dp, rest = divmod(world_size, tp * pp * cp)
            if rest or global_batch % dp:
                continue
            for dp_shard, microbatch, schedule, zero_stage, ep in product(
                {n for n in (dp, 64, 8) if dp % n == 0},
                [n for n in MICROBATCHES if global_batch // dp % n == 0],
                list_schedules(config.parallelism, pp, n_layers),
                (1, 3) if pp > 1 else (1, 2, 3),
                divisors(moe.n_experts, world_size) if moe else [1],
            ):
                if dp_shard * cp * tp % ep:
                    continue
                local_batch = global_batch // dp if pp > 1 else microbatch
                training = replace(config.training, local_batch_size=local_batch, global_batch_size=global_batch)
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
                    pipeline_parallel_schedule_csv="",
                    module_fqns_per_model_part=[],
                    **schedule,
                )
                yield replace(config, training=training, parallelism=parallelism, activation_checkpoint=RECOMPUTE[0])

    def find_global_batch(self) -> int:
        """Return the sequences of a step: from the config, or from its local batch and its own degrees."""
        training, section = self.config.training, self.config.parallelism
        if training.global_batch_size != -1:
            return training.global_batch_size
        degrees = section.pipeline_parallel_degree * section.context_parallel_degree * section.tensor_parallel_degree
        return training.local_batch_size * max(1, self.world_size // degrees)


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


def search_layouts(options: argparse.Namespace) -> str:
    """Search, and write the winner if a file is named. Return the report. Raises ConfigError if no layout fits."""
    reading = read_run_config(options.config_args)
    problems = list(reading.problems)
    if options.gpus is None:
        problems.append(Problem("--gpus", None, "a search needs their number", "Write --gpus 64, for instance"))
    if problems:
        raise ConfigError(problems)
    search = Search(reading.config, resolve_model(reading.config.model), options.gpus, find_cluster(options.gpu))
    best = search.rank()
    if options.toml:
        options.toml.write_text(format_winner(*best[0]), encoding="utf-8")
    fastest = min(expected.step_time_s for _, expected in best)
    table = [("", "tok/s/GPU", "MFU", "step", "bubble", "GiB", "layout")]
    for number, pair in enumerate(best, 1):
        table.append((f"{'=' * (pair[1].step_time_s <= TIE * fastest)} {number}", *format_row(*pair)))
    own, verdict = judge_own(search, best[0][1])
    return (
        f"{search.n_accepted:,} layouts on {options.gpus:,} GPUs with {search.find_global_batch():,} sequences of "
        f"{reading.config.training.seq_len:,} tokens a step pass check; {search.n_fitting:,} fit the memory.\n\n"
        f"{format_table(table + own, '>>>>>>')}\n= within {TIE - 1:.0%} of the best: a tie, fewest mesh dims first\n\n"
        f"{verdict}"
    )


def format_row(candidate: Candidate, expected: Forecast) -> tuple[str, ...]:
    speed = f"{expected.tokens_per_s_per_gpu:,.0f}", f"{expected.mfu_full:.1%}", f"{expected.step_time_s:.2f}s"
    return *speed, f"{expected.bubble:.1%}", f"{candidate.taken_bytes / GIB:.1f}", str(candidate)


def judge_own(search: Search, best: Forecast) -> tuple[list[tuple[str, ...]], str]:
    """Return the config's own layout as a row of the table, if it runs, and why it loses against number 1."""
    try:
        layout = plan_layout(search.config, search.model_args, search.world_size)
    except ConfigError as error:
        return [], f"The config's own layout does not run on {search.world_size:,} GPUs:\n{error}"
    own = Candidate(search.config, search.model_args, layout, search.cluster)
    expected = own.forecast()
    verdict = f"The config's own layout takes {expected.step_time_s / best.step_time_s - 1:+.1%} against number 1"
    lost = {what: seconds - best.parts_s.get(what, 0.0) for what, seconds in expected.parts_s.items()}
    worst = max(lost, key=lost.get)
    verdict += f", and loses most by {worst}: {lost[worst]:+.2f} s."
    if own.taken_bytes > search.cluster.memory_bytes:
        verdict += f" It does not fit the {search.cluster.memory_bytes / GIB:.1f} GiB of a GPU."
    return [("own", *format_row(own, expected))], verdict


def format_winner(candidate: Candidate, expected: Forecast) -> str:
    """Return the config of the best layout as TOML, which `--config` takes."""
    return (
        f"# Found by plan --search for {candidate.layout.world_size:,} GPUs: {candidate}\n# forecast: "
        f"{expected.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, a step in {expected.step_time_s:.2f} s\n\n"
        f"{dump_config_toml(resolve_config(candidate.config, candidate.layout, 'cuda'))}"
    )
