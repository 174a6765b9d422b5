"""`plan --search`: rank all layouts of a model that `check` accepts, by forecast step time.

    degrees x schedule x microbatch x ZeRO stage x recompute  ->  check's rules  ->  memory  ->  simulated step time

Layouts that fit in memory are simulated in the order of a lower bound on their step time. The search stops when the
next lower bound exceeds the step time of the N_BEST-th layout, so the result equals an exhaustive search.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import ceil

from torchtitan_lite.config.checks import plan_layout
from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.config.layout import plan_batch, plan_degrees
from torchtitan_lite.config.machine import GIB
from torchtitan_lite.config.messages import ConfigError, UserError
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.config.reader import dump_config_toml
from torchtitan_lite.config.schema import ActivationCheckpoint, Config, get_value
from torchtitan_lite.config.settings import find_refused
from torchtitan_lite.tools.plan.cluster import CLUSTERS, Cluster
from torchtitan_lite.tools.plan.planned_run import PlannedRun, read_target
from torchtitan_lite.tools.plan.step_time import Forecast
from torchtitan_lite.tools.plan.unmodeled import warn_of_unmodeled
from torchtitan_lite.tools.tables import format_seconds, format_table, write_table

N_BEST = 10
# the report names a cause if it explains at least this fraction of the difference in step time
LEAST_CAUSE = 0.05
MICROBATCHES = (1, 2, 4, 8)  # sequences per microbatch
STAGES_PER_RANK = (2, 4, 8)  # for interleaved schedules
LEAST_TOKENS = 1024  # per sequence and cp rank
TITLE = "# Found by plan --search"  # first words of a config that plan --search wrote
# Printed if a model has experts, but its best layout has no ep. Sources: assets/benchmarks/2026-11-29-experts.md
NO_EP = """
Why the best layout has no ep: in this trainer, all-to-alls overlap with nothing and rows are
sorted twice, while the all-gathers of experts overlap with a large microbatch. ep inside a node
saves no network traffic: with and without ep, FSDP moves equally many bytes through each NIC.
With few tokens per rank, a layout with ep is faster than a layout without ep. One published
run contradicts this forecast: NeMo AutoModel trains Qwen3 30B-A3B with ep8 and DeepEP on 8 H100 at
12,040 tokens/s/GPU. Another published run agrees with the forecast: on 8 B200 with ep8, the
torchtitan fork of Nous Research reaches 9,930 tokens/s/GPU with torch's all-to-all. With DeepEP, it
reaches 14,796 tokens/s/GPU, and is as fast as without ep."""
RECOMPUTE = [
    ActivationCheckpoint("none"),
    ActivationCheckpoint("selective", "op"),
    ActivationCheckpoint("selective", "2"),
    ActivationCheckpoint("full"),
]


def list_candidates(
    config: Config, model_args: ModelArgs, world_size: int, cluster: Cluster
) -> Iterator[PlannedRun]:
    """Yield the layouts that `check` accepts and that fit in memory, with the config's model and global batch."""
    for proposal in list_proposals(config, model_args, world_size, cluster.node_size):
        with suppress(ConfigError):
            layout = plan_layout(proposal, model_args, world_size)
            first = PlannedRun(proposal, model_args, layout, cluster)
            for planned in map(first.with_recompute, RECOMPUTE):
                if planned.fits and not any(find_refused(planned.config, model_args, layout)):
                    yield planned


def list_proposals(
    config: Config, model_args: ModelArgs, world_size: int, node_size: int
) -> Iterator[Config]:
    """Yield the config of every layout to try. tp stays within a node, and dp_shard is dp, 64 or 8."""
    n_layers = model_args.n_layers
    n_experts = model_args.moe.n_experts if model_args.moe else 1
    degrees = plan_degrees(config.parallelism, world_size)
    global_batch = plan_batch(config, degrees)["global_batch_size"]
    for tp, pp, cp in product(
        divisors(world_size, node_size),
        divisors(world_size, n_layers),
        divisors(world_size, max(1, config.training.seq_len // LEAST_TOKENS)),
    ):
        dp, rest = divmod(world_size, tp * pp * cp)
        if rest or global_batch % dp:
            continue
        for dp_shard, microbatch, (schedule, layers), zero_stage, ep in product(
            {n for n in (dp, 64, 8) if dp % n == 0},
            [n for n in MICROBATCHES if global_batch // dp % n == 0],
            list_schedules(config, pp, n_layers),
            (1, 3) if pp > 1 else (1, 2, 3),
            divisors(n_experts, world_size),
        ):
            training = replace(
                config.training,
                local_batch_size=microbatch,
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
                pipeline_parallel_schedule=schedule,
                pipeline_parallel_layers_per_stage=layers,
            )
            # Some schedules do not support the config's recompute mode. list_candidates tries all recompute modes.
            yield replace(
                config,
                training=training,
                parallelism=parallelism,
                activation_checkpoint=RECOMPUTE[0],
            )


def list_schedules(config: Config, pp: int, n_layers: int) -> list[tuple[str, int | None]]:
    """Return (schedule, layers per stage) pairs. The layers per stage are None if the schedule sets the number of
    stages."""
    section = config.parallelism
    if pp == 1:
        return [(section.pipeline_parallel_schedule, None)]
    weight = n_layers + section.pipeline_parallel_first_stage_less_layers
    weight += section.pipeline_parallel_last_stage_less_layers
    pairs = []
    for name, schedule in SCHEDULES.items():
        if schedule.splits_backward and config.compile.enable:
            continue  # compile is not supported with these schedules (settings.py)
        layers_per_stage = {None}
        if schedule.most_stages_per_rank is None:
            layers_per_stage = {ceil(weight / pp / n_stages) for n_stages in STAGES_PER_RANK}
        pairs += product([name], layers_per_stage)
    return pairs


def divisors(n: int, most: int) -> list[int]:
    """Return the divisors of n up to `most`."""
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]


def rank_layouts(fitting: list[PlannedRun], n_best: int = N_BEST) -> list[PlannedRun]:
    """Return the `n_best` fastest of these layouts."""
    best: list[PlannedRun] = []
    for planned in sorted(fitting, key=lambda planned: planned.step_time.lower_bound_s):
        if len(best) == n_best and planned.step_time.lower_bound_s >= best[-1].forecast.step_time_s:
            break
        best.append(planned)
        best.sort(key=lambda planned: (planned.forecast.step_time_s, planned.taken_bytes))
        del best[n_best:]
    return best


def is_common(planned: PlannedRun) -> bool:
    """Return whether publications often use the combination of parallelisms of this run.

    Common layouts use cp only for long sequences, 1F1B on up to 16 pp ranks, and ep only for models with experts and
    only inside a node.
    """
    w = planned.workload
    layout = w.layout
    is_simple = layout.pp == 1 or (layout.pp <= 16 and w.schedule in ("1F1B", "Interleaved1F1B"))
    is_long = w.seq_len > 8192
    least_ep = 2 if w.args.moe else 0
    is_near = least_ep <= layout.ep <= planned.cluster.node_size
    return is_simple and is_near and (is_long or layout.cp == 1)


def explain_common(common: list[PlannedRun], best: Forecast) -> str:
    """Describe the fastest common layout, and why it is slower than the best layout."""
    if not common:
        return "No layout with a commonly published combination of parallelisms fits."
    (planned,) = rank_layouts(common, 1)
    expected = planned.forecast
    if expected.step_time_s <= best.step_time_s:
        return "The best layout has a commonly published combination of parallelisms."
    extra = Counter(expected.parts_s)
    extra.subtract(best.parts_s)
    causes = [
        f"{what} +{format_seconds(seconds)}"
        for what, seconds in extra.most_common(3)
        if seconds > LEAST_CAUSE * extra.total()
    ]
    return (
        f"The fastest layout with a commonly published combination of parallelisms is {planned}\n"
        f"{expected.tokens_per_s_per_gpu:,.0f} tok/s/GPU; a step takes {format_seconds(expected.step_time_s)} "
        f"instead of {format_seconds(best.step_time_s)}, because of: {', '.join(causes)}"
    )


def search_layouts(options: argparse.Namespace) -> str:
    """Search, write the best layout to `--toml`, and return the report.

    Raises UserError if no layout fits, or if the search must not replace the file.
    """
    file = options.toml
    if file and file.is_file() and not file.read_bytes().startswith(TITLE.encode()):
        raise UserError(
            f"--toml: {file} exists, and plan --search did not write it. Name a different file"
        )
    given, model_args, n_gpus = read_target(options.config_args, options.gpus, options.gpu)
    fitting = list(list_candidates(given.config, model_args, n_gpus, CLUSTERS[options.gpu]))
    if not fitting:
        raise UserError(
            f"--gpus = {n_gpus}: no layout that check accepts fits in memory. Use more GPUs, a "
            'training.global_batch_size with many divisors, or optimizer.moments_dtype = "bfloat16"'
        )
    best = rank_layouts(fitting)
    winner = best[0]
    replaced = []
    for key in sorted(given.chosen):
        value = get_value(given.config, key)
        if get_value(winner.config, key) != value:
            replaced.append(f"{key} = {value}")
    if file:
        title = f"{TITLE} for {n_gpus:,} GPUs: {winner}"
        write_table(file, f"{title}\n\n{dump_config_toml(winner.resolved)}")
    table = [("", "tok/s/GPU", "MFU", "bubble", "GiB", "layout")]
    for number, planned in enumerate(best, 1):
        table.append(
            (
                str(number),
                f"{planned.forecast.tokens_per_s_per_gpu:,.0f}",
                f"{planned.forecast.mfu_full:.1%}",
                f"{planned.forecast.bubble:.1%}",
                f"{planned.taken_bytes / GIB:.1f}",
                str(planned),
            )
        )
    ending = []
    for remark in (*given.notices, *warn_of_unmodeled(winner)):
        ending.append(f"\n\nremark: {remark}")
    if file:
        ending.append(f"\n\nThe best layout is in {file}")
    return (
        f"{len(fitting):,} layouts fit in the memory of {n_gpus:,} GPUs.\n"
        f"Your values that the best layout replaces: {', '.join(replaced) or 'none'}.\n\n"
        f"{format_table(table, '>>>>>')}\n\n"
        f"{explain_common(list(filter(is_common, fitting)), winner.forecast)}"
        f"{NO_EP if winner.layout.ep == 1 else ''}"
        f"{''.join(ending)}"
    )
