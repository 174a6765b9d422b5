"""Thirty layouts of one model: `verify --matrix`. Which of them compute the one-process model, and how exactly.

    rows       what splits data, matrices or sequences, each of degree 2
    columns    without pipeline, and pp2 under some schedules

Every cell takes the options of the config, and its model reduced. A schedule that splits its backward refuses some of
them; those are then replaced, in that column only, and the grid says so.

A layout that was not run is not certified: what takes more ranks than there are makes a certificate in part. What is
refused could not train either, and is missing nowhere.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.schema import Config
from torchtitan_lite.verify.certificate import CERTIFIED, CERTIFIED_IN_PART, IN_PART, NOT_FINISHED, WRONG, Trial
from torchtitan_lite.verify.degrees import DEGREE_KEYS
from torchtitan_lite.verify.reduction import Reduction, override, reduce_config

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


OUTCOMES = {  # what became of a cell -> what the grid shows, where that is no error
    "right": "",
    "wrong": "FAILS",
    "not finished": "TIMEOUT",
    "refused": "refused",
    "not run": "-",
}


def plan_cell(config: Config, row: str, column: str, max_ranks: int) -> Reduction:
    """Return the reduced run of one cell. Raises ConfigError where it is refused."""
    degrees = {"pp": 1 if column == NO_PIPELINE else 2, **ROWS[row]}
    wanted = {key: degrees.get(dim, 1) for dim, key in DEGREE_KEYS.items()}
    wanted |= {
        "training.local_batch_size": 8,
        "training.global_batch_size": -1,
        "parallelism.pipeline_parallel_schedule_csv": "",
        "parallelism.pipeline_parallel_layers_per_stage": None,
        "parallelism.module_fqns_per_model_part": [],
        "parallelism.pipeline_parallel_microbatch_size": 1,
    }
    if column != NO_PIPELINE:
        wanted["parallelism.pipeline_parallel_schedule"] = column
        if SCHEDULES[column].splits_backward:
            wanted |= FOR_SPLIT_BACKWARD | {"parallelism.fsdp_reshard_after_forward": "default"}
    return reduce_config(override(config, wanted), max_ranks)


def try_cell(config: Config, row: str, column: str, max_ranks: int, try_reduced: Callable[[Reduction], Trial]) -> Cell:
    n_ranks = (1 if column == NO_PIPELINE else 2) * 2 ** len(ROWS[row])
    if n_ranks > max_ranks:
        return Cell(row, column, None)
    try:
        reduction = plan_cell(config, row, column, max_ranks)
    except ConfigError as error:
        return Cell(row, column, None, why_not="; ".join(str(problem) for problem in error.problems))
    return Cell(row, column, try_reduced(reduction))


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
    by_place = {(cell.row, cell.column): cell for cell in cells}
    widths = [max(len(column), 8) for column in COLUMNS]
    lines = [f"{'':12}" + "  ".join(f"{column:>{width}}" for column, width in zip(COLUMNS, widths, strict=True))]
    for row in ROWS:
        texts = [by_place[row, column].text for column in COLUMNS]
        lines.append(f"{row:12}" + "  ".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True)))
    lines += ["", f"worst relative error of a gradient, in float32; {NOTE}"]
    for cell in cells:
        if cell.trial is not None and cell.trial.culprit is not None:
            lines.append(f"{cell.row}, {cell.column}: {cell.trial.culprit}; cause: {cell.trial.culprit.cause}")
        elif cell.outcome in ("wrong", "not finished"):
            lines.append(f"{cell.row}, {cell.column}: {'; '.join(cell.trial.faults.values())}")
    reasons = dict.fromkeys(cell.why_not for cell in cells if cell.why_not)
    lines += [f"refused: {reason}" for reason in reasons]
    counts = ", ".join(f"{n} {outcome}" for outcome, n in count_outcomes(cells).items() if n)
    lines.append(f"{judge_matrix(cells)}: of {len(cells)} layouts {counts}")
    if missing := sum(cell.outcome == "not run" for cell in cells):
        lines.append(f"  {missing} need more ranks: --ranks 8 is enough for all of them")
    return "\n".join(lines)
