"""Report a search: the ten best layouts, where the config's own loses, and the winner as a TOML file."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.config.layout import Layout, plan_layout, resolve_config
from torchtitan_lite.config.machine import GIB
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.reader import dump_config_toml
from torchtitan_lite.config.schema import Config
from torchtitan_lite.tools.plan.cluster import Cluster
from torchtitan_lite.tools.plan.dry_run import dry_run, is_uniform, shorten
from torchtitan_lite.tools.plan.forecast import Forecast
from torchtitan_lite.tools.plan.search import Candidate, Search, estimate_live_bytes
from torchtitan_lite.tools.plan.simulator import plan_order
from torchtitan_lite.tools.plan.traffic import estimate_traffic
from torchtitan_lite.tools.processes import end_with_parent, prepare_forkserver
from torchtitan_lite.tools.tables import format_table

N_DRY_RUNS = 3
Choice = tuple[Candidate, Forecast]


def print_search(found: Search, toml_file: Path, *, n_dry_runs: int = N_DRY_RUNS) -> None:
    """Search, print, and write the winner. Raises ConfigError where no layout fits."""
    found.rank()
    world_size, config = found.world_size, found.config
    print(
        f"{found.n_accepted:,} layouts on {world_size:,} GPUs with {found.find_global_batch():,} sequences of "
        f"{config.training.seq_len:,} tokens a step pass check, {sum(found.refused.values()):,} do not; "
        f"{len(found.fitting):,} fit the memory."
    )
    if not found.n_accepted:
        raise ConfigError([found.examples[key] for key, _ in found.refused.most_common()])
    if not found.best:
        raise ConfigError([describe_misfit(found)])
    print(f"\n{format_choices(found.best, found.cluster)}\n")
    print(explain_own(found))
    number = choose_by_dry_run(found.best, found.cluster, n_dry_runs) if n_dry_runs else 1
    toml_file.write_text(format_winner(found.best[number - 1], world_size), encoding="utf-8")
    print(f"\nNumber {number} is written to {toml_file}.")


def describe_misfit(found: Search) -> Problem:
    """Say how much memory is missing, and how many GPUs would suffice."""
    leanest, cluster, least = found.leanest, found.cluster, found.find_least_gpus()
    layout = leanest.workload.layout
    reserved, available = leanest.live_bytes * cluster.reserve_factor / GIB, cluster.memory_bytes / GIB
    why = f"the leanest layout ({layout}) needs {reserved:.1f} GiB on a GPU, which has {available:.1f} GiB"
    remedy = f"Use {least:,} such GPUs, the least that hold it"
    return Problem(
        "--gpus",
        layout.world_size,
        why,
        remedy if least else "No number of such GPUs below 64 times as many",
    )


# ---------------------------------------------------------------- the table


def format_choices(choices: list[Choice], cluster: Cluster) -> str:
    """Return a table with one line per layout."""
    rows = [("", "tok/s/GPU", "MFU", "step", "bubble", "GiB", "layout")]
    for number, (candidate, forecast) in enumerate(choices, 1):
        rate, reserved = forecast.rate, candidate.live_bytes * cluster.reserve_factor / GIB
        speed = f"{rate.tokens_per_s_per_gpu:,.0f}", f"{rate.mfu_full:.1%}", f"{rate.step_time_s:.2f}s"
        rows.append((str(number), *speed, f"{forecast.bubble:.1%}", f"{reserved:.1f}", name_layout(candidate)))
    return format_table(rows, ">>>>>>")


def name_layout(candidate: Candidate) -> str:
    """Return "pp4 x dp_shard8 x tp2, Interleaved1F1B with 8 stages, microbatches: 32 x 1, ZeRO 1, recompute op"."""
    layout, section = candidate.workload.layout, candidate.config.parallelism
    parts = [str(layout)]
    if layout.pp > 1:
        parts.append(f"{section.pipeline_parallel_schedule} with {len(layout.stages)} stages")
    parts.append(f"microbatches: {layout.n_microbatches} x {layout.microbatch_size}")
    modes = [
        f"{mode} ({n})" if len(candidate.workload.recompute) > 1 else mode
        for mode, n in candidate.workload.recompute.items()
    ]
    return ", ".join([*parts, f"ZeRO {layout.zero_stage}", f"recompute {' and '.join(modes)}"])


# ---------------------------------------------------------------- the config's own layout


def explain_own(found: Search) -> str:
    """Say where the layout of the config loses against the best."""
    world_size, cluster, best = found.world_size, found.cluster, found.best[0]
    try:
        layout = plan_layout(found.config, found.model_args, world_size)
        own = found.describe(found.config, layout, found.imbalance)
    except ConfigError as error:
        return f"The config's own layout does not run on {world_size:,} GPUs:\n{error}"
    forecast = own.forecast()
    slower = forecast.rate.step_time_s / best[1].rate.step_time_s - 1
    lines = [f"The config's own layout, {name_layout(own)}:"]
    if not found.fits(own):
        reserved = own.live_bytes * cluster.reserve_factor / GIB
        lines.append(f"  does not fit: {reserved:.1f} GiB of {cluster.memory_bytes / GIB:.1f}")
    lines.append(
        f"  {forecast.rate.tokens_per_s_per_gpu:,.0f} tok/s/GPU; a step takes {slower:+.1%} against the best, of which:"
    )
    of_best = split_step(*best)
    rows = [
        (f"    {what}", f"{seconds:.2f} s", "best", f"{of_best[what]:.2f} s")
        for what, seconds in split_step(own, forecast).items()
    ]
    return "\n".join([*lines, format_table(rows, "<><>")]) + "\n"


def split_step(candidate: Candidate, forecast: Forecast) -> dict[str, float]:
    """Return the seconds of a step by purpose, of the rank that works longest."""
    model = candidate.step_time
    exposed, m = model.exposed_s, candidate.workload.layout.n_microbatches
    names = {"tp": "tp", "cp": "cp", "dp": "parameters, gradients", "ep": "experts' rows"}
    waits = {f"waiting for {words}": exposed[axis] for axis, words in names.items() if axis in exposed}
    busy = m * model.max_over_ranks(model.durations.busy)
    idle = forecast.rate.step_time_s - busy - model.once_s - model.optimizer_s
    rest = {
        "recompute": m * model.max_over_ranks([phases.again for phases in model.stages]),
        "pipeline idle (bubble)": max(0.0, idle),
        "optimizer": model.optimizer_s,
    }
    computing = forecast.rate.step_time_s - sum(waits.values()) - sum(rest.values())
    return {"computing": computing, **rest, **waits}


# ---------------------------------------------------------------- the dry run, the file


def choose_by_dry_run(best: list[Choice], cluster: Cluster, n_dry_runs: int) -> int:
    """Return the number of the first layout that fits the memory by its dry run too; 1 where none does.

    Prints the dry runs of the first few layouts, which run side by side, and of more until one fits.
    """
    winner, numbered = None, [(number, candidate) for number, (candidate, _) in enumerate(best, 1)]
    n_workers = min(n_dry_runs, os.cpu_count() or 1)
    context = multiprocessing.get_context("forkserver")
    prepare_forkserver([__name__])
    with ProcessPoolExecutor(n_workers, context, initializer=start_worker) as workers:
        answers = [workers.submit(compare_with_dry_run, *pair) for pair in numbered[:n_dry_runs]]
        for number, candidate in numbered:
            if number > n_dry_runs and winner:
                break
            if number > len(answers):
                answers.append(workers.submit(compare_with_dry_run, number, candidate))
            live_bytes, lines = answers[number - 1].result()
            fits = live_bytes * cluster.reserve_factor <= cluster.memory_bytes
            print(lines + "\n  which does not fit" * (not fits), flush=True)
            winner = winner or (number if fits else None)
    return winner or 1


def start_worker() -> None:
    torch.set_num_threads(1)
    end_with_parent()


def compare_with_dry_run(number: int, candidate: Candidate) -> tuple[int, str]:
    """Compare the closed form with dry runs of the first and the last pp rank.

    Returns the higher peak of the two, in bytes, and a line for each.
    """
    layout, workload = candidate.workload.layout, candidate.workload
    resolved = resolve_config(candidate.config, layout, "cuda")
    short = fill_pipeline(resolved, layout)
    short_workload = replace(workload, layout=short)
    lines, most = [], 0
    for pp_rank in sorted({0, layout.pp - 1}):
        options = {"pp_rank": pp_rank, "device_type": "cuda", "imbalance": workload.imbalance}
        measured = dry_run(resolved, workload.args, short, **options)
        further_data = measured.memory["data"] * (layout.n_microbatches / short.n_microbatches - 1)
        live = measured.peak_bytes + int(further_data)
        most = max(most, live)
        closed = estimate_live_bytes(workload, resolved.parallelism.pipeline_parallel_schedule, pp_rank)
        moved = sum(call.n_bytes * count for call, count in measured.collectives)
        traffic = estimate_traffic(short_workload, pp_rank, plan_order(resolved.parallelism, short))
        closed_moved = sum(each.n_bytes for each in traffic.values())
        of_some = f" ({short.n_microbatches} microbatches)" * (short != layout)
        lines.append(
            f"dry run of {number}, pp rank {pp_rank}: live {live / GIB:.2f} GiB "
            f"(closed form {closed / live - 1:+.1%}), moved {moved / GIB:.2f} GiB{of_some} "
            f"(closed form {closed_moved / max(1, moved) - 1:+.2%})"
        )
    return most, "\n".join(lines)


def fill_pipeline(config: Config, layout: Layout) -> Layout:
    """Return the layout with two rounds of microbatches, where a dry run of all of them would take minutes.

    An interleaved 1F1B works in rounds of pp microbatches and holds most activations within two rounds. Only its batch
    and receive buffers grow with the number of microbatches.
    """
    schedule = SCHEDULES[config.parallelism.pipeline_parallel_schedule]
    is_interleaved = layout.pp > 1 and schedule.in_rounds and not schedule.splits_backward
    if is_uniform(config, layout) or not is_interleaved or layout.n_microbatches <= 2 * layout.pp:
        return layout
    return shorten(layout, 2 * layout.pp)


def format_winner(best: Choice, world_size: int) -> str:
    """Return the config of the best layout as TOML, which `--config` takes."""
    candidate, forecast = best
    resolved = resolve_config(candidate.config, candidate.workload.layout, "cuda")
    rate = forecast.rate
    return (
        f"# Found by plan --search for {world_size:,} GPUs: {name_layout(candidate)}\n"
        f"# predicted: {rate.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, a step in {rate.step_time_s:.2f} s\n\n"
        f"{dump_config_toml(resolved)}"
    )
