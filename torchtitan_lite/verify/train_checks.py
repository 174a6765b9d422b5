"""What the ranks of one start of train.py did, judged in the order of time: the first check that fails names the fault.

    loaded state     of a resumed run
    of each step     rows, learning rate, loss, gradient norm, validation, weights and moments
    metrics.jsonl    the same numbers again

A rank's rows follow from its number alone: tp, cp and pp peers read the same, data-parallel ranks one share each.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.schema import Config
from torchtitan_lite.verify.culprit import Culprit
from torchtitan_lite.verify.difference import find_disagreement
from torchtitan_lite.verify.one_rank import Coordinates
from torchtitan_lite.verify.train_reference import Expected
from torchtitan_lite.verify.train_start import Place, Seen, Squares

TOLERANCE = 1e-5  # of what is summed in another order, as in the trials of gradients

BOUNDS = {  # measure -> the largest error that is right, and what it is of
    "rows": (0, "ranks that read others in one step"),
    "learning rate": (1e-12, "of every rank in every step"),
    "loss": (TOLERANCE, "of every rank in every step"),
    "gradient norm": (TOLERANCE, "of every rank in every step"),
    "validation": (TOLERANCE, "loss, perplexity, bits per byte on held-out documents"),
    "weights": (TOLERANCE, "worst of all parameters, of several steps"),
    "moments": (TOLERANCE, "worst of all parameters, of several steps"),
    "updates": (TOLERANCE, "of all weights together, beyond what fp32 rounds off them"),
    "resumed state": (TOLERANCE, "worst of all weights and moments that were loaded"),
    "logged numbers": (0, "numbers of metrics.jsonl that are not those of rank 0"),
}


@dataclass(frozen=True)
class StartPlan:
    """One start of train.py."""

    config: Config
    layout: Layout
    resumed_step: int
    last_step: int

    @property
    def steps(self) -> range:
        """Return the steps that are trained, counted from 1."""
        return range(self.resumed_step + 1, self.last_step + 1)

    @property
    def validated(self) -> tuple[int, int]:
        """Return the steps after which train.py always validates: the first of all and the last."""
        return 1, self.last_step

    @property
    def dump_folder(self) -> Path:
        return Path(self.config.job.dump_folder)

    def coordinates(self, rank: int) -> Coordinates:
        """Return a rank's place on the mesh: tp varies fastest, then cp, dp_shard, dp_replicate, pp."""
        coordinates = {}
        for dim, degree in reversed(self.layout.degrees.items()):
            rank, coordinates[dim] = divmod(rank, degree)
        return dict(reversed(coordinates.items()))

    def own_rows(self, rank: int) -> range:
        """Return the rows of a global batch that belong to this rank's replica of the model."""
        at, layout = self.coordinates(rank), self.layout
        share = layout.global_batch_size // (layout.dp_replicate * layout.dp_shard)
        first = (at["dp_replicate"] * layout.dp_shard + at["dp_shard"]) * share
        return range(first, first + share)

    def when(self, step: int) -> str:
        resumed = f" on {self.layout}, resumed after step {self.resumed_step}" if self.resumed_step else ""
        return f"step {step}{resumed}"


@dataclass(frozen=True)
class Check:
    """One comparison; `culprit` is named if its error is beyond the bound of its measure."""

    measure: str
    error: float
    culprit: Culprit

    @property
    def is_right(self) -> bool:
        return self.error <= BOUNDS[self.measure][0]


def check_start(plan: StartPlan, expected: Expected, seen: Sequence[Seen]) -> list[Check]:
    """Return all checks of one start, in the order of time; `seen` by rank."""
    checks = [check_resumed_step(plan, seen), *check_state(plan, expected, seen, plan.resumed_step, "loaded")]
    for index, step in enumerate(plan.steps):
        if any(index >= len(of_rank.losses) for of_rank in seen):
            return [*checks, Check("rows", math.inf, Culprit("steps", "main", f"{plan.when(step)} was not made"))]
        checks.append(check_rows(plan, step, [of_rank.rows[index] for of_rank in seen]))
        rate = expected.rates[step - 1]
        rates = [max(of_rank.rates[index], key=lambda one, rate=rate: abs(one - rate)) for of_rank in seen]
        losses, norms = ([getattr(of_rank, name)[index] for of_rank in seen] for name in ("losses", "grad_norms"))
        for measure, name, values, value in (
            ("learning rate", "lr_scheduler", rates, rate),
            ("loss", "train_step", losses, expected.losses[step - 1]),
            ("gradient norm", "train_step", norms, expected.grad_norms[step - 1]),
        ):
            checks.append(check_values(plan, step, measure, Culprit(measure, name, measure), values, value))
        for name, value in (expected.validation[step] if step in plan.validated else {}).items():
            values = [of_rank.validation.get(step, {}).get(name, math.nan) for of_rank in seen]
            culprit = Culprit("validation loss", "validate", name)
            checks.append(check_values(plan, step, "validation", culprit, values, value))
        checks += check_state(plan, expected, seen, step, "trained") + check_update(plan, seen, step)
    n_more = max(len(of_rank.losses) for of_rank in seen) - len(plan.steps)
    culprit = Culprit("steps", "main", f"{n_more} steps were made after {plan.when(plan.last_step)}")
    return [*checks, Check("rows", n_more, culprit), check_log(plan, seen[0])]


def check_resumed_step(plan: StartPlan, seen: Sequence[Seen]) -> Check:
    """Check that every rank resumes after the saved step."""
    steps = sorted({of_rank.resumed_step for of_rank in seen})
    detail = f"ranks go on after step {steps}, and the checkpoint is of step {plan.resumed_step}"
    wrong = steps != [plan.resumed_step]
    return Check("resumed state", math.inf if wrong else 0.0, Culprit("resume", "restore_or_load", detail))


def check_rows(plan: StartPlan, step: int, rows: Sequence[list[Place | None]]) -> Check:
    """Check the rows of a step. `rows`: where in the data each rank's rows are."""
    wrong = [rank for rank, found in enumerate(rows) if found != [(step, row) for row in plan.own_rows(rank)]]
    if not wrong:
        return Check("rows", 0, Culprit("rows", "rows_of_rank", ""))
    first, own = wrong[0], plan.own_rows(wrong[0])
    if all(place and place[0] == step for found in rows for place in found):
        name = "rows_of_rank"
    elif all([place and place[1] for place in found] == list(plan.own_rows(r)) for r, found in enumerate(rows)):
        name = "prefetch"  # the right rows, of another step
    else:
        name = "SampleStream"
    given, right = describe_rows(rows[first]), describe_rows([(step, row) for row in own])
    detail = (
        f"in {plan.when(step)}, rank {first} ({describe_coordinates(plan, first)}) is given {given}, and {right} are "
        f"its own; {len(wrong)} of {len(rows)} ranks are given others"
    )
    return Check("rows", len(wrong), Culprit("rows", name, detail, find_unlike_peers(plan, rows)))


def find_unlike_peers(plan: StartPlan, rows: Sequence[list[Place | None]]) -> list[str]:
    """Return the mesh dims along which neighbours must read the same rows, and do not."""
    ranks = {tuple(plan.coordinates(rank).values()): found for rank, found in enumerate(rows)}
    dims = []
    for index, dim in enumerate(plan.layout.degrees):
        firsts = [(at, (*at[:index], 0, *at[index + 1 :])) for at in ranks]
        if dim in ("pp", "cp", "tp") and any(ranks[at] != ranks[first] for at, first in firsts):
            dims.append(dim)
    return dims


def describe_rows(places: Sequence[Place | None]) -> str:
    """Return `rows 0 to 3 of step 2`, where that is what they are."""
    if None in places:
        return "rows that no step has"
    runs = {step for step, _ in places}
    numbers = [row for _, row in places]
    if len(runs) == 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"rows {numbers[0]} to {numbers[-1]} of step {runs.pop()}"
    return "rows " + ", ".join(f"{row} of step {step}" for step, row in places)


def describe_coordinates(plan: StartPlan, rank: int) -> str:
    return ", ".join(f"{dim} {at}" for dim, at in plan.coordinates(rank).items())


def check_values(
    plan: StartPlan, step: int, measure: str, culprit: Culprit, values: Sequence[float], expected: float
) -> Check:
    """Check one number of each rank; all must have the same. `culprit.detail` names it."""
    errors = [abs(value - expected) / abs(expected) for value in values]
    errors = [error if math.isfinite(error) else math.inf for error in errors]
    worst = max(range(len(values)), key=lambda rank: errors[rank])
    n_wrong = sum(error > BOUNDS[measure][0] for error in errors)
    detail = (
        f"{culprit.detail} of {plan.when(step)} is {values[worst]:.9g} on rank {worst} "
        f"({describe_coordinates(plan, worst)}), and {expected:.9g} is right; wrong on {n_wrong} of {len(values)} ranks"
    )
    pairs = [(plan.coordinates(rank), value) for rank, value in enumerate(values)]
    dims = find_disagreement(pairs, BOUNDS[measure][0])
    return Check(measure, errors[worst], Culprit(culprit.kind, culprit.name, detail, dims))


def check_state(plan: StartPlan, expected: Expected, seen: Sequence[Seen], step: int, when: str) -> list[Check]:
    """Check weights and moments, "loaded" or "trained" at the end of a step: slices of all ranks together."""
    checks = []
    for name, tensors in expected.states.get(step, {}).items():
        of_ranks = [of_rank.states[when].get(step, {}).get(name, {}) for of_rank in seen]
        errors = {fqn: add_up([held[fqn] for held in of_ranks if fqn in held]) for fqn in tensors}
        wrong = [fqn for fqn, error in errors.items() if not error <= TOLERANCE] or [max(errors, key=errors.get)]
        what = f"{name} of {wrong[0]}"
        found = f"is off by {errors[wrong[0]]:.1e}, and {len(wrong)} of {len(errors)} are off"
        if when == "trained":
            measure, kind = ("weights", "updated weights") if name == "weight" else ("moments", "moments")
            detail = f"after {plan.when(step)} {what} {found}; rows, learning rate, loss and gradient norm are right"
        elif step == 0:
            measure, kind, detail = "weights", "initial weights", f"{what} {found}"
        else:
            measure, kind = "resumed state", "resume"
            detail = f"loaded from the checkpoint of step {step} on {plan.layout}, {what} {found}"
        checks.append(Check(measure, max(errors.values()), Culprit(kind, wrong[0], detail)))
    return checks


def check_update(plan: StartPlan, seen: Sequence[Seen], step: int) -> list[Check]:
    """Check the move of all weights together since before the first step."""
    if step not in seen[0].updates:
        return []
    error = add_up([of_rank.updates[step] for of_rank in seen])
    detail = f"after {plan.when(step)} all weights together have moved otherwise, by {error:.1e} of what they should"
    return [Check("updates", error, Culprit("updated weights", "all", detail))]


def add_up(squares: Sequence[Squares]) -> float:
    """Return the relative error of slices together; infinite where no rank holds one."""
    wrong, whole = (sum(pair[i] for pair in squares) for i in (0, 1))
    if not squares or not math.isfinite(wrong):
        return math.inf
    return math.sqrt(wrong / whole) if wrong else 0.0


def check_log(plan: StartPlan, seen: Seen) -> Check:
    """Check that metrics.jsonl holds the numbers of rank 0, to the last digit."""
    lines = [json.loads(line) for line in (plan.dump_folder / "metrics.jsonl").read_text().splitlines()]
    logged = {line["step"]: line for line in lines}
    tokens_per_step = plan.layout.global_batch_size * plan.config.training.seq_len
    wrong = []
    for index, step in enumerate(plan.steps):
        expected = {
            "loss": seen.losses[index],
            "grad_norm": seen.grad_norms[index],
            "lr": seen.rates[index][0],
            "tokens": step * tokens_per_step,
            **seen.validation.get(step, {}),
        }
        line = logged.get(step, {})
        wrong += [(name, step, line.get(name), value) for name, value in expected.items() if line.get(name) != value]
    if not wrong:
        return Check("logged numbers", 0, Culprit("logged numbers", "metrics.jsonl", ""))
    name, step, value, right = wrong[0]
    detail = f"{name} of {plan.when(step)} is {value}, and {right} is right; {len(wrong)} numbers are wrong"
    return Check("logged numbers", len(wrong), Culprit(f"logged {name}", "metrics.jsonl", detail))
