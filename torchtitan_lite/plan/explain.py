"""`explain`: print who holds which slice of which weight, and every collective of a step.

Everything is recorded in a dry run of step.py (dry_run.py); no table says what should happen.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch

from torchtitan_lite.config.command_lines import make_explain_parser
from torchtitan_lite.config.messages import ConfigError, Problem, format_bytes
from torchtitan_lite.config.reader import find_config_file
from torchtitan_lite.plan.dry_run import DryRun
from torchtitan_lite.plan.explain_text import (
    describe_step,
    draw_mesh,
    format_collectives,
    format_holdings,
    list_exchanges,
)
from torchtitan_lite.plan.planned import Planned, group_pp_ranks, plan_run


def main(args: list[str]) -> int:
    options, config_args = make_explain_parser().parse_known_args(args)
    torch.set_num_threads(1)
    try:
        planned = plan_run(config_args, options.gpus, options.device)
        if options.stage is not None and not 0 <= options.stage < planned.layout.pp:
            why, remedy = f"there are {planned.layout.pp} pp ranks", f"Use 0 to {planned.layout.pp - 1}"
            raise ConfigError([Problem("--stage", options.stage, why, remedy)])
        of_base = read_base(options, config_args, planned.config.job.config_file) if options.against else None
    except ConfigError as error:
        print(f"This run could not start:\n{error}", file=sys.stderr)
        return 2
    groups = group_pp_ranks(planned) if options.stage is None else {options.stage: [options.stage]}
    runs = {rank: planned.dry_run(rank) for rank in groups}
    if of_base is not None:
        return report_difference(list_for_programs(runs), of_base, options.against)
    if options.json:
        print(json.dumps({"layout": asdict(planned.layout), "collectives": list_for_programs(runs)}))
    else:
        print(explain(planned, groups, runs))
    return 0


def explain(planned: Planned, groups: dict[int, list[int]], runs: dict[int, DryRun]) -> str:
    """Return the whole explanation, for people."""
    layout = planned.layout
    blocks = [f"{planned.config_name} on {layout.world_size:,} ranks: {layout}", draw_mesh(layout)]
    for rank, alike in groups.items():
        title = f"pp rank {rank}" + f" (and {len(alike) - 1} like it)" * (len(alike) > 1) if layout.pp > 1 else "rank 0"
        blocks += [
            f"---- {title}: parameters",
            format_holdings(layout, runs[rank]),
            f"---- {title}: collectives of one step, bytes that one rank moves",
            format_collectives(list_exchanges(runs[rank])),
        ]
    return "\n\n".join([*blocks, "---- one step in words", describe_step(planned, runs)])


# ---------------------------------------------------------------- differences


def list_for_programs(runs: dict[int, DryRun]) -> list[dict[str, object]]:
    """Return every collective, in the order of its first time."""
    return [
        {"pp_rank": rank, "times": times, **asdict(collective)}
        for rank, run in runs.items()
        for collective, times in run.collectives
    ]


def read_base(options: argparse.Namespace, config_args: list[str], config_name: str) -> list[dict[str, object]]:
    """Return the collectives of another config with this code, or of this config with another checkout's code."""
    folder = Path(options.against)
    if not folder.is_dir():
        base = plan_run(["--config", options.against], options.gpus, options.device)
        ranks = group_pp_ranks(base) if options.stage is None else [options.stage]
        return list_for_programs({rank: base.dry_run(rank) for rank in ranks})
    if not (folder / "torchtitan_lite" / "__main__.py").is_file():
        why = "this folder is no checkout: there is no torchtitan_lite/__main__.py in it"
        raise ConfigError([Problem("--against", options.against, why, "Name a TOML file or a checkout")])
    command = [sys.executable, "-m", "torchtitan_lite", "explain", "--json", "--device", options.device, *config_args]
    command += ["--config", str(find_config_file(config_name).resolve())]  # ours: that checkout's own may differ
    command += ["--gpus", str(options.gpus)] * (options.gpus is not None)
    command += ["--stage", str(options.stage)] * (options.stage is not None)
    # Python imports torchtitan_lite from its working directory first.
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if answer.returncode != 0:
        last_line = "".join(answer.stderr.strip().splitlines()[-1:]).strip()
        why = f"its own `explain` ended with {answer.returncode}: {last_line}"
        raise ConfigError([Problem("--against", options.against, why, "Name a checkout that can run this config")])
    return json.loads(answer.stdout)["collectives"]


def report_difference(ours: list[dict], base: list[dict], name: str) -> int:
    """Print collectives that are new or gone; return the exit status. Line numbers are printed but not compared."""
    counts, lines, sizes = (Counter(), Counter()), {}, {}
    for count, records in zip(counts, (base, ours), strict=True):
        for record in records:
            key = key_of(record)
            count[key] += record["times"]
            lines[key] = f"{record['place']['line']} {record['place']['function']}"
            sizes[key] = record["n_bytes"]
    changed = [key for key in lines if counts[0][key] != counts[1][key]]
    if not changed:
        print(f"the same collectives as {name}")
        return 0
    print(f"against {name}, in one step of each kind of pp rank:")
    for key in changed:
        pp_rank, operation, axis, shape, dtype, module, walk = key
        place = f"{walk or 'between'} {module}".rstrip()
        before, after = (count[key] for count in counts)
        print(
            f"  {'+' if after > before else '-'} {abs(after - before)} x {operation} over {axis}, {list(shape)} "
            f"{dtype}, {format_bytes(sizes[key])} each ({before} -> {after})\n"
            f"      pp rank {pp_rank}, {place}: {lines[key]}"
        )
    return 1


def key_of(record: dict) -> tuple:
    """Return what two equal collectives share; all layers of a model count as one."""
    place = record["place"]
    module = ".".join("*" if part.isdecimal() else part for part in place["module"].split("."))
    shape = tuple(record["shape"])
    return record["pp_rank"], record["operation"], record["axis"], shape, record["dtype"], module, place["walk"]
