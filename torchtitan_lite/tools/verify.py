"""`verify`: runs a config, reduced, beside one process, and prints a certificate or the first difference."""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from math import inf
from pathlib import Path

import torch

from torchtitan_lite.certificates import write_certificate
from torchtitan_lite.command_lines import make_verify_parser
from torchtitan_lite.config import Config, ConfigError
from torchtitan_lite.config_reader import read_config
from torchtitan_lite.tools import against_hf
from torchtitan_lite.tools.bisection import Step, bisect, find_smallest, list_features
from torchtitan_lite.tools.certificate import InBfloat16, describe, record_for_runs, report_for_programs
from torchtitan_lite.tools.comparison import Difference, total_update_error
from torchtitan_lite.tools.gradient_trial import measure_faults, save_oracle, try_layout
from torchtitan_lite.tools.matrix import COLUMNS, ROWS, Cell, describe_grid, try_cell
from torchtitan_lite.tools.ranks import RankPool
from torchtitan_lite.tools.reduction import DEGREE_KEYS, Reduction, override, reduce_config
from torchtitan_lite.tools.trial import RunRanks

SECONDS_FOR_A_RUN = 300  # after which ranks that wait for each other are given up; a busy laptop compiles slowly


def main(args: list[str]) -> int:
    """Exit status: 0 certified, 1 not, 2 wrong input."""
    options, config_args = make_verify_parser().parse_known_args(args)
    reading = read_config(config_args)
    if options.against_hf is not None:
        return against_hf.main(reading, options)
    try:
        if reading.problems:
            raise ConfigError(reading.problems)
        reduction = reduce_config(reading.config, options.ranks)
    except ConfigError as error:
        if options.json:
            print(json.dumps({"certified": False, "problems": [problem.for_json() for problem in error.list_first()]}))
        print(f"This run could not start:\n{error}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    n_ranks = options.ranks if options.matrix else reduction.layout.world_size
    print(f"starting {n_ranks} processes ...", file=sys.stderr)
    with RankPool(n_ranks) as pool, tempfile.TemporaryDirectory(prefix="verify-") as folder:
        run_ranks = partial(pool.run, timeout_s=SECONDS_FOR_A_RUN)
        if options.matrix:
            return verify_matrix(reading.config, options, run_ranks, Path(folder))
        report = verify(reading.config_name, reduction, options, run_ranks, Path(folder))
    if report["certified"]:
        keep_certificate(reading.config, report)
    return 0 if report["certified"] else 1


def verify(
    config_name: str, reduction: Reduction, options: argparse.Namespace, run_ranks: RunRanks, folder: Path
) -> dict[str, object]:
    """One layout: print its certificate, or what is wrong with it. Returns the report for programs."""
    config, layout = reduction.config, reduction.layout
    trial = try_layout(config, layout.world_size, run_ranks, folder)
    in_bfloat16 = measure_bfloat16(reduction, run_ranks, folder) if options.bf16 and not trial.faults else None
    steps: list[Step] = []
    if options.bisect and trial.faults:
        for step in bisect(config, layout, lambda *run: fails(*run, run_ranks, folder)):
            said = {True: "still fails", False: "passes", None: "cannot be tried"}[step.fails]
            print(f"  without {', '.join(sorted(step.off))}: {said}", file=sys.stderr)
            steps.append(step)
    smallest = find_smallest(list_features(config, layout), steps) if steps else None
    report = report_for_programs(config_name, reduction, trial, in_bfloat16)
    if options.json:
        print(json.dumps({**report, "smallest_failing_combination": smallest}, default=str))
    else:
        print(describe(config_name, reduction, trial, in_bfloat16, verbose=options.verbose))
        if smallest is not None:
            print(f"smallest combination that fails: {' + '.join(smallest) or 'one rank without any option'}")
    return report


def keep_certificate(config: Config, report: dict[str, object]) -> None:
    """Where runs of this config find it, so that their checkpoints carry it."""
    try:
        path = write_certificate(config, record_for_runs(report))
    except OSError as error:
        print(f"the certificate is not kept for runs: {error}", file=sys.stderr)
    else:
        print(f"kept for runs of this config: {path}", file=sys.stderr)


def fails(config: Config, layout, run_ranks: RunRanks, folder: Path) -> bool:
    return bool(try_layout(config, layout.world_size, run_ranks, folder, find_culprit=False).faults)


def measure_bfloat16(reduction: Reduction, run_ranks: RunRanks, folder: Path) -> InBfloat16:
    """The layout and one rank, both computing in bfloat16, against the float32 oracle."""
    oracle_path = save_oracle(reduction.config, folder)
    config = override(reduction.config, {"training.mixed_precision_param": "bfloat16"})
    alone = override(config, {key: 1 for key in DEGREE_KEYS.values()})
    alone = override(alone, {"training.local_batch_size": config.training.global_batch_size})
    n_ranks = reduction.layout.world_size
    difference, crash, _ = measure_faults(config, n_ranks, run_ranks, oracle_path, tolerance=inf)
    difference_of_one, crash_of_one, _ = measure_faults(alone, 1, run_ranks, oracle_path, tolerance=inf)
    if difference is None or difference_of_one is None:
        return InBfloat16(inf, inf, inf, inf, crash or crash_of_one)
    return judge_bfloat16(difference, difference_of_one)


def judge_bfloat16(difference: Difference, alone: Difference) -> InBfloat16:
    """At most twice the error of one rank: rounding, and no more."""
    errors = {
        "gradient": (max(difference.gradient.values()), max(alone.gradient.values())),
        "update": (total_update_error(difference), total_update_error(alone)),
    }
    faults = {
        f"{name} in bfloat16": f"{name} is off by {error:.1e} in bfloat16, that of one rank by {of_one:.1e}"
        for name, (error, of_one) in errors.items()
        if not error <= 2 * of_one
    }
    return InBfloat16(*errors["gradient"], *errors["update"], faults)


def verify_matrix(config: Config, options: argparse.Namespace, run_ranks: RunRanks, folder: Path) -> int:
    """Many layouts: print the grid."""

    def try_reduced(reduction: Reduction):
        return try_layout(reduction.config, reduction.layout.world_size, run_ranks, folder)

    cells: list[Cell] = []
    for row in ROWS:
        for column in COLUMNS:
            cells.append(try_cell(config, row, column, options.ranks, try_reduced))
            print(f"  {row}, {column}: {cells[-1].text}", file=sys.stderr)
    certified = not any(cell.trial and cell.trial.faults for cell in cells)
    if options.json:
        rows = [
            {
                "row": cell.row,
                "column": cell.column,
                "result": cell.text,
                "refused": cell.why_not or None,
                "faults": cell.trial.faults if cell.trial else None,
                "culprit": asdict(cell.trial.culprit) if cell.trial and cell.trial.culprit else None,
            }
            for cell in cells
        ]
        print(json.dumps({"certified": certified, "cells": rows}, default=str))
    else:
        print(describe_grid(cells))
    return 0 if certified else 1
