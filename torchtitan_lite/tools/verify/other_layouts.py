"""Layouts beside the one that was asked for: the smallest combination that still fails, and a grid of thirty.

    --bisect    One axis or option after the other is turned off. What still fails without it did not need it, so it
                stays off; what passes without it is needed, so it comes back. What is left is a combination from which
                nothing can be taken away. A part that other parts need, because the run without it is refused, is kept.
    --matrix    rows: what splits data, matrices or sequences, each of degree 2; columns: without pipeline, and pp2
                under some schedules. Every cell takes the options of the config, and its model reduced. A schedule
                that splits its backward refuses some options; they are then replaced, in that column only.

A layout of the grid that was not run is not certified: what takes more ranks than there are makes a certificate in
part. What is refused could not train either, and is missing nowhere.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import prod
from pathlib import Path

from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.config.flavors import ROPE_KEYS
from torchtitan_lite.config.layout import MESH_DIMS, Layout, plan_degrees, plan_layout, resolve_model
from torchtitan_lite.config.messages import ConfigError, format_table
from torchtitan_lite.config.schema import Config, Model
from torchtitan_lite.tools.verify.certificate import (
    CERTIFIED,
    CERTIFIED_IN_PART,
    EXIT_STATUS,
    IN_PART,
    NOT_FINISHED,
    WRONG,
)
from torchtitan_lite.tools.verify.degrees import DEGREE_KEYS, EP_KEY, give_degrees, limit_ep
from torchtitan_lite.tools.verify.gradient_trial import try_layout, try_wide
from torchtitan_lite.tools.verify.reduction import STAGES_BY_RULE, Reduction, override, reduce_config
from torchtitan_lite.tools.verify.trial import RunRanks, Trial, make_trial

# ---------------------------------------------------------------- the smallest combination that fails


FEATURES: dict[str, dict[str, object]] = {  # axis or option -> keys that turn it off
    # Axes first: with each, the trials that follow have fewer ranks.
    **{dim: {DEGREE_KEYS[dim]: 1} for dim in MESH_DIMS},
    "ep": {EP_KEY: 1},
    "pp": {DEGREE_KEYS["pp"]: 1, "parallelism.module_fqns_per_model_part": []},  # without pp none may be listed
    "compile": {"compile.enable": False},
    "recompute": {"activation_checkpoint.mode": "none"},
    "schedule": {**STAGES_BY_RULE, "parallelism.pipeline_parallel_schedule": "GPipe"},
    "ZeRO stage": {"parallelism.zero_stage": "auto", "parallelism.fsdp_reshard_after_forward": "default"},
    "ring": {"parallelism.context_parallel_rotate_method": "allgather"},
    "loss parallel": {"parallelism.disable_loss_parallel": True},
    "documents": {"model.attention": "causal"},
    "tied embeddings": {"model.tie_embeddings": False},
    "rope scaling": {"model.rope_scaling": "none", **{f"model.{key}": None for key in ROPE_KEYS.values()}},
    "accumulation": {},  # turn_off makes the batch smaller
}
# Axis or option -> the axis that must have several ranks; without them it does nothing.
OF_AXIS = {**{dim: dim for dim in MESH_DIMS}, "schedule": "pp", "ring": "cp", "loss parallel": "tp"}


def list_features(config: Config, layout: Layout) -> list[str]:
    """Return the features that a run uses: those whose keys would change it."""

    def resolve(config: Config) -> tuple:
        return resolve_model(config.model), config.model.attention, replace(config, model=Model())

    used = {name for name, off in FEATURES.items() if resolve(override(config, off)) != resolve(config)}
    used -= {name for name, dim in OF_AXIS.items() if layout.degrees[dim] == 1}
    if layout.pp == 1 and layout.n_microbatches > 1:
        used.add("accumulation")
    return [name for name in FEATURES if name in used]


def turn_off(config: Config, layout: Layout, names: frozenset[str]) -> tuple[Config, Layout]:
    """Return the run without these features. Raises ConfigError where it would be refused.

    Fewer data-parallel ranks get fewer sequences, so that each rank and microbatch works as before.
    """
    for name in names:
        config = override(config, FEATURES[name])
    degrees = plan_degrees(config.parallelism, 1)
    config = override(config, {EP_KEY: limit_ep(config.parallelism, degrees)})
    n_rows = config.training.local_batch_size if "accumulation" in names else layout.global_batch_size // layout.dp
    dp = degrees["dp_replicate"] * degrees["dp_shard"]
    config = override(config, {"training.global_batch_size": n_rows * dp})
    return config, plan_layout(config, resolve_model(config.model), prod(degrees.values()))


def find_smallest(
    config: Config,
    layout: Layout,
    fails: Callable[[Config, Layout], bool],
    note: Callable[[frozenset[str], bool | None], None],
) -> list[str]:
    """Return the features of the smallest run that fails.

    `note(off, outcome)` is called for each run that was tried: whether it fails, or None where it is refused.
    """
    names = list_features(config, layout)
    tried: set[frozenset[str]] = set()
    off: frozenset[str] = frozenset()
    changed = True
    while changed:  # what had to stay may go once others are gone
        changed = False
        for name in names:
            candidate = off | {name}
            if name in off or candidate in tried:
                continue
            tried.add(candidate)
            try:
                outcome = fails(*turn_off(config, layout, candidate))
            except ConfigError:
                outcome = None
            note(candidate, outcome)
            if outcome:
                off, changed = candidate, True
    return [name for name in names if name not in off]


def find_smallest_failing(reduction: Reduction, run_ranks: RunRanks, folder: Path) -> list[str]:
    """Return the smallest set of axes and options with which the wide trial finds a fault."""

    def fails(config: Config, layout: Layout) -> bool:
        options = {"find_culprit": False}
        return bool(make_trial("wide", try_layout, config, layout.world_size, run_ranks, folder, **options).faults)

    def note(off: frozenset[str], outcome: bool | None) -> None:
        shown = {True: "still fails", False: "passes", None: "cannot be tried"}[outcome]
        print(f"  without {', '.join(sorted(off))}: {shown}", file=sys.stderr)

    return find_smallest(reduction.config, reduction.layout, fails, note)


# ---------------------------------------------------------------- thirty layouts

ROWS = {
    "one rank": {},
    "dp2": {"dp_shard": 2},
    "ddp2": {"dp_replicate": 2},
    "tp2": {"tp": 2},
    "cp2": {"cp": 2},
    "dp2 x tp2": {"dp_shard": 2, "tp": 2},
}
NO_PIPELINE = "no pp"
COLUMNS = (NO_PIPELINE, "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")

FOR_SPLIT_BACKWARD = {"activation_checkpoint.mode": "full", "compile.enable": False, "parallelism.zero_stage": 1}
NOTE = "schedules with a split backward run with full recompute, without compile, under ZeRO-1"
OUTCOMES = {  # what became of a cell -> what the grid shows, where that is no error
    "right": "",
    "wrong": "FAILS",
    "not finished": "TIMEOUT",
    "refused": "refused",
    "not run": "-",
}


@dataclass(frozen=True)
class Cell:
    row: str
    column: str
    trial: Trial | None  # None: not run
    why_not: str = ""

    @property
    def outcome(self) -> str:
        """Return a key of OUTCOMES."""
        if self.trial is None:
            return "refused" if self.why_not else "not run"
        if not self.trial.finished:
            return "not finished"
        return "wrong" if self.trial.faults or self.trial.difference is None else "right"

    @property
    def text(self) -> str:
        if self.outcome == "right":
            return f"{max(self.trial.difference.gradient.values()):.0e}"
        return OUTCOMES[self.outcome]


def plan_cell(config: Config, row: str, column: str, max_ranks: int) -> Reduction:
    """Return the reduced run of one cell. Raises ConfigError where it is refused."""
    degrees = {**dict.fromkeys(MESH_DIMS, 1), "pp": 1 if column == NO_PIPELINE else 2, **ROWS[row]}
    keys = {
        **give_degrees(config, degrees),
        **STAGES_BY_RULE,
        "training.local_batch_size": 8,
        "training.global_batch_size": -1,
        "parallelism.pipeline_parallel_microbatch_size": 1,
    }
    if column != NO_PIPELINE:
        keys["parallelism.pipeline_parallel_schedule"] = column
        if SCHEDULES[column].splits_backward:
            keys |= FOR_SPLIT_BACKWARD | {"parallelism.fsdp_reshard_after_forward": "default"}
    return reduce_config(override(config, keys), max_ranks)


def verify_matrix(config: Config, max_ranks: int, run_ranks: RunRanks, folder: Path, *, as_json: bool) -> int:
    """Run the layouts for which there are ranks enough, and print the grid. Returns the exit status of its verdict."""
    cells: list[Cell] = []
    for row, column in product(ROWS, COLUMNS):
        cell = Cell(row, column, None)
        if (1 if column == NO_PIPELINE else 2) * 2 ** len(ROWS[row]) <= max_ranks:
            try:
                reduction = plan_cell(config, row, column, max_ranks)
                cell = replace(cell, trial=make_trial("wide", try_wide, reduction, run_ranks, folder))
            except ConfigError as error:
                cell = replace(cell, why_not="; ".join(str(problem) for problem in error.problems))
        cells.append(cell)
        print(f"  {row}, {column}: {cell.text}", file=sys.stderr)
    verdict = judge_matrix(cells)
    if as_json:
        rows = [
            {
                "row": cell.row,
                "column": cell.column,
                "outcome": cell.outcome,
                "result": cell.text,
                "refused": cell.why_not or None,
                "faults": cell.trial and cell.trial.faults,
                "culprit": cell.trial and cell.trial.culprit and asdict(cell.trial.culprit),
            }
            for cell in cells
        ]
        report = {"certified": verdict == CERTIFIED, "verdict": verdict, "counts": count_outcomes(cells)}
        print(json.dumps({**report, "cells": rows}, default=str))
    else:
        print(describe_grid(cells))
    return EXIT_STATUS[verdict]


def count_outcomes(cells: list[Cell]) -> dict[str, int]:
    """Return the number of cells of each outcome."""
    return {outcome: sum(cell.outcome == outcome for cell in cells) for outcome in OUTCOMES}


def judge_matrix(cells: list[Cell]) -> str:
    """Return the verdict on all cells together, in the words of certificate.py."""
    counts = count_outcomes(cells)
    if counts["wrong"]:
        return WRONG
    if counts["not finished"]:
        return NOT_FINISHED
    if not counts["right"]:
        return IN_PART
    return CERTIFIED_IN_PART if counts["not run"] else CERTIFIED


def describe_grid(cells: list[Cell]) -> str:
    """Return the grid of the worst gradient errors; below it counts, failures and refusals."""
    rows = [(row, *(cell.text for cell in cells if cell.row == row)) for row in ROWS]
    lines = [format_table([("", *COLUMNS), *rows], "<" + ">" * len(COLUMNS)), ""]
    lines.append(f"worst relative error of a gradient, in float32; {NOTE}")
    for cell in cells:
        if cell.trial is not None and cell.trial.culprit is not None:
            lines.append(f"{cell.row}, {cell.column}: {cell.trial.culprit}; cause: {cell.trial.culprit.cause}")
        elif cell.outcome in ("wrong", "not finished"):
            lines.append(f"{cell.row}, {cell.column}: {'; '.join(cell.trial.faults.values())}")
    lines += [f"refused: {reason}" for reason in dict.fromkeys(cell.why_not for cell in cells if cell.why_not)]
    counts = {outcome: n for outcome, n in count_outcomes(cells).items() if n}
    shown = ", ".join(f"{n} {outcome}" for outcome, n in counts.items())
    lines.append(f"{judge_matrix(cells)}: of {len(cells)} layouts {shown}")
    if "not run" in counts:
        lines.append(f"  {counts['not run']} need more ranks: --ranks 8 is enough for all of them")
    return "\n".join(lines)
