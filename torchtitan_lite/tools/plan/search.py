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

from torchtitan_lite.config.checks import find_refused
from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.config.layout import Layout, plan_layout, resolve_config, resolve_model
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
from torchtitan_lite.tools.tables import format_table

N_BEST = 10
TIE = 1.02
MICROBATCHES = (1, 2, 4, 8)  # sequences per microbatch
STAGES_PER_RANK = (2, 4, 8)  # for interleaved schedules
LEAST_TOKENS = 1024  # per sequence and cp rank
RECOMPUTE = [
    ActivationCheckpoint(*each)
    for each in (("none",), ("selective", "op"), ("selective", "2"), ("full",))
]


class Candidate:
    """A layout that `check` accepts, and its memory and step time on a cluster."""

    def __init__(self, config: Config, model_args: ModelArgs, layout: Layout, cluster: Cluster):
        self.config, self.layout = config, layout
        self.workload = describe_workload(config, model_args, layout)
        self.schedule = config.parallelism.pipeline_parallel_schedule
        # Of the fullest GPU, at the upper end of the error bar
        self.taken_bytes = find_most_taken(
            cluster, estimate_peak(self.workload, self.schedule), layout.tp
        )
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
    """Searches the layouts of a model on `world_size` GPUs, with the model and the global batch of `config`."""

    config: Config
    model_args: ModelArgs
    world_size: int
    cluster: Cluster

    def rank(self, n_best: int = N_BEST) -> list[tuple[Candidate, Forecast]]:
        """Return the best layouts, ties first. Raises ConfigError if check accepts no layout or none fits in memory."""
        self.n_accepted, fitting, best, leanest = 0, [], [], None
        for candidate in self.list_candidates():
            self.n_accepted += 1
            leanest = min(leanest or candidate, candidate, key=lambda each: each.taken_bytes)
            if candidate.taken_bytes <= self.cluster.memory_bytes:
                fitting.append(candidate)
        self.n_fitting = len(fitting)
        if not fitting:
            why = f"no layout with {self.find_global_batch()} sequences per step passes check"
            remedy = "Use full nodes, and a training.global_batch_size with many divisors"
            if leanest:
                why = f"the smallest layout ({leanest}) needs {leanest.taken_bytes / GIB:.1f} GiB per GPU"
                remedy = "Use more GPUs, or optimizer moments in bfloat16 (optimizer.moments_dtype)"
            raise ConfigError([Problem("--gpus", self.world_size, why, remedy)])
        fitting.sort(
            key=lambda candidate: (candidate.step_time.lower_bound_s, candidate.taken_bytes)
        )
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
        """Yield every layout to try. Nodes are full, tp stays within a node, dp_shard is all of dp, 64, or 8."""
        config, world_size, node_size = self.config, self.world_size, self.cluster.node_size
        n_layers, moe, global_batch = (
            self.model_args.n_layers,
            self.model_args.moe,
            self.find_global_batch(),
        )
        if world_size > node_size and world_size % node_size:
            return
        cps = divisors(world_size, max(1, config.training.seq_len // LEAST_TOKENS))
        for tp, pp, cp in product(
            divisors(world_size, node_size), divisors(world_size, n_layers), cps
        ):
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
                training = replace(
                    config.training, local_batch_size=local_batch, global_batch_size=global_batch
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
                    **schedule,
                )
                yield replace(
                    config,
                    training=training,
                    parallelism=parallelism,
                    activation_checkpoint=RECOMPUTE[0],
                )

    def find_global_batch(self) -> int:
        """Return the sequences per step: global_batch_size, or local_batch_size times dp of the config."""
        training, section = self.config.training, self.config.parallelism
        if training.global_batch_size != -1:
            return training.global_batch_size
        degrees = (
            section.pipeline_parallel_degree
            * section.context_parallel_degree
            * section.tensor_parallel_degree
        )
        return training.local_batch_size * max(1, self.world_size // degrees)


def list_schedules(section: Parallelism, pp: int, n_layers: int) -> list[dict[str, object]]:
    """Return the config keys of every schedule. Schedules with any number of stages are tried with STAGES_PER_RANK."""
    if pp == 1:
        return [{"pipeline_parallel_layers_per_stage": None}]
    weight = n_layers + section.pipeline_parallel_first_stage_less_layers
    weight += section.pipeline_parallel_last_stage_less_layers
    keys = []
    for name, schedule in SCHEDULES.items():
        for per_rank in STAGES_PER_RANK if schedule.most_stages_per_rank is None else (None,):
            layers = None if per_rank is None else -(-weight // (pp * per_rank))
            if per_rank and -(-weight // layers) != pp * per_rank:
                continue  # no number of layers per stage gives this number of stages
            keys.append(
                {"pipeline_parallel_schedule": name, "pipeline_parallel_layers_per_stage": layers}
            )
    return keys


def divisors(n: int, most: int) -> list[int]:
    """Return the divisors of n up to `most`."""
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]


def search_layouts(options: argparse.Namespace) -> str:
    """Search, write the best layout to `--toml`, and return the report. Raises ConfigError if no layout fits."""
    reading = read_run_config(options.config_args)
    problems = list(reading.problems)
    if options.gpus is None:
        problems.append(
            Problem(
                "--gpus", None, "a search needs the number of GPUs", "For example, use --gpus 64"
            )
        )
    if problems:
        raise ConfigError(problems)
    search = Search(
        reading.config, resolve_model(reading.config.model), options.gpus, find_cluster(options.gpu)
    )
    best = search.rank()
    if options.toml:
        options.toml.write_text(format_winner(*best[0]), encoding="utf-8")
    fastest = min(expected.step_time_s for _, expected in best)
    table = [("", "tok/s/GPU", "MFU", "step", "bubble", "GiB", "layout")]
    for number, pair in enumerate(best, 1):
        table.append(
            (f"{'=' * (pair[1].step_time_s <= TIE * fastest)} {number}", *format_row(*pair))
        )
    own, verdict = judge_own(search, best[0][1])
    return (
        f"{search.n_accepted:,} layouts on {options.gpus:,} GPUs with {search.find_global_batch():,} sequences of "
        f"{reading.config.training.seq_len:,} tokens per step pass check; {search.n_fitting:,} fit in memory.\n\n"
        f"{format_table(table + own, '>>>>>>')}\n= tied, within {TIE - 1:.0%} of the best; fewest mesh dims first\n\n"
        f"{verdict}"
    )


def format_row(candidate: Candidate, expected: Forecast) -> tuple[str, ...]:
    speed = (
        f"{expected.tokens_per_s_per_gpu:,.0f}",
        f"{expected.mfu_full:.1%}",
        f"{expected.step_time_s:.2f}s",
    )
    return *speed, f"{expected.bubble:.1%}", f"{candidate.taken_bytes / GIB:.1f}", str(candidate)


def judge_own(search: Search, best: Forecast) -> tuple[list[tuple[str, ...]], str]:
    """Return the config's layout as a table row (none if it does not run), and why it is slower than number 1."""
    try:
        layout = plan_layout(search.config, search.model_args, search.world_size)
    except ConfigError as error:
        return [], f"The layout of the config does not run on {search.world_size:,} GPUs:\n{error}"
    own = Candidate(search.config, search.model_args, layout, search.cluster)
    expected = own.forecast()
    verdict = f"Step time of the config's layout against number 1: {expected.step_time_s / best.step_time_s - 1:+.1%}"
    lost = {
        what: seconds - best.parts_s.get(what, 0.0) for what, seconds in expected.parts_s.items()
    }
    worst = max(lost, key=lost.get)
    verdict += f". The largest difference is {worst}: {lost[worst]:+.2f} s."
    if own.taken_bytes > search.cluster.memory_bytes:
        verdict += (
            f" The layout does not fit in the {search.cluster.memory_bytes / GIB:.1f} GiB of a GPU."
        )
    return [("own", *format_row(own, expected))], verdict


def format_winner(candidate: Candidate, expected: Forecast) -> str:
    """Return the config of the best layout as TOML for `--config`."""
    return (
        f"# Found by plan --search for {candidate.layout.world_size:,} GPUs: {candidate}\n# forecast: "
        f"{expected.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, a step in {expected.step_time_s:.2f} s\n\n"
        f"{dump_config_toml(resolve_config(candidate.config, candidate.layout, 'cuda'))}"
    )
