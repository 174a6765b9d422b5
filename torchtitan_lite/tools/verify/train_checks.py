"""Checks of one start of train.py, in the order of time: the first one that fails names the fault.

    loaded state     of a resumed run
    of each step     rows, learning rate, loss, gradient norm, validation, weights and moments
    metrics.jsonl    the same numbers again

The rows of a rank follow from its number alone: tp, cp and pp peers read the same rows, data-parallel ranks others.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.schema import Config
from torchtitan_lite.tools.verify.module_outputs import find_rows_at
from torchtitan_lite.tools.verify.slices import Coordinates, add_gaps
from torchtitan_lite.tools.verify.train_reference import Expected
from torchtitan_lite.tools.verify.train_start import RankRecord, RowNumber
from torchtitan_lite.tools.verify.trial import Check, Culprit, check_values, find_disagreement

TOLERANCE = 1e-5  # of what is summed in another order, as in the trials of gradients
RATE_TOLERANCE = 1e-12

MEASURES = {  # measure -> what was compared
    "rows": "ranks that read others in one step",
    "learning rate": "of every rank in every step",
    "loss": "of every rank in every step",
    "gradient norm": "of every rank in every step",
    "validation": "loss, perplexity, bits per byte on held-out documents",
    "weights": "worst of all parameters in every step",
    "moments": "worst of all parameters in every step",
    "updates": "of all weights together, beyond what fp32 rounds off them",
    "resumed state": "worst of all weights and moments that were loaded",
    "logged numbers": "numbers of metrics.jsonl that are not those of rank 0",
}


@dataclass(frozen=True)
class StartPlan:
    """One start of train.py."""

    config: Config
    layout: Layout
    resumed_step: int

    @property
    def steps(self) -> range:
        """Return the steps that are trained, counted from 1."""
        return range(self.resumed_step + 1, self.config.training.steps + 1)

    @property
    def dump_folder(self) -> Path:
        return Path(self.config.job.dump_folder)

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a rank on the mesh: tp varies fastest, then cp, dp_shard, dp_replicate, pp."""
        coordinates = {}
        for dim, degree in reversed(self.layout.degrees.items()):
            rank, coordinates[dim] = divmod(rank, degree)
        return dict(reversed(coordinates.items()))

    def own_rows(self, rank: int) -> range:
        """Return the rows of a global batch that belong to this rank's replica of the model."""
        return find_rows_at(self.coordinates(rank), self.layout)

    def name_step(self, step: int) -> str:
        resumed = f" on {self.layout}, resumed after step {self.resumed_step}" if self.resumed_step else ""
        return f"step {step}{resumed}"


def list_checks(plan: StartPlan, expected: Expected, records: Sequence[RankRecord]) -> Iterator[Check]:
    """Yield all checks of one start, in the order of time; `records` by rank."""
    steps = sorted({record.resumed_step for record in records})
    detail = f"ranks resume after step {steps}, and the checkpoint is of step {plan.resumed_step}"
    error = 0.0 if steps == [plan.resumed_step] else math.inf
    yield Check("resumed state", error, TOLERANCE, Culprit("resume", "restore_or_load", detail))
    yield from check_state(plan, expected, [record.loaded for record in records], plan.resumed_step, loaded=True)
    for index, step in enumerate(plan.steps):
        if any(index >= len(record.losses) for record in records):
            yield Check("rows", math.inf, 0, Culprit("steps", "main", f"{plan.name_step(step)} was not made"))
            return
        yield check_rows(plan, step, [record.rows[index] for record in records])

        rate = expected.rates[step - 1]
        rates = [record.rates[index] for record in records]
        losses, norms = ([[getattr(record, name)[index]] for record in records] for name in ("losses", "grad_norms"))
        scalars = [
            ("learning rate", "learning rate", "lr_scheduler", rates, rate),
            ("loss", "loss", "train_step", losses, expected.losses[step - 1]),
            ("gradient norm", "gradient norm", "train_step", norms, expected.grad_norms[step - 1]),
        ]
        if step in (1, plan.steps[-1]):  # after which train.py always validates
            for what, right in expected.validation[step - 1].items():
                values = [[record.validation.get(step, {}).get(what, math.nan)] for record in records]
                scalars.append(("validation", what, "validate", values, right))
        for measure, what, name, values, right in scalars:
            kind = "validation loss" if measure == "validation" else measure
            culprit = Culprit(kind, name, f"{what} of {plan.name_step(step)}")
            pairs = [(plan.coordinates(rank), value) for rank, value in enumerate(values)]
            bound = RATE_TOLERANCE if measure == "learning rate" else TOLERANCE
            yield check_values(measure, culprit, pairs, right, bound)

        yield from check_state(plan, expected, [record.trained[index] for record in records], step)
        error, bound = add_gaps(record.updates[index] for record in records).relative(TOLERANCE)
        detail = f"after {plan.name_step(step)} the update of all weights together is off by {error:.1e}"
        yield Check("updates", error, bound, Culprit("updated weights", "all", detail))
    n_more = max(len(record.losses) for record in records) - len(plan.steps)
    culprit = Culprit("steps", "main", f"{n_more} steps were made after {plan.name_step(plan.steps[-1])}")
    yield Check("rows", n_more, 0, culprit)
    yield check_log(plan, records[0])


def check_rows(plan: StartPlan, step: int, rows: Sequence[list[RowNumber | None]]) -> Check:
    """Check the rows of a step. `rows`: where in the data each rank's rows are."""
    wrong = [rank for rank, found in enumerate(rows) if found != [(step, row) for row in plan.own_rows(rank)]]
    if not wrong:
        return Check("rows", 0, 0, Culprit("rows", "rows_of_rank", ""))
    first, own = wrong[0], plan.own_rows(wrong[0])
    if all(row and row[0] == step for found in rows for row in found):
        name = "rows_of_rank"
    elif all([row and row[1] for row in found] == list(plan.own_rows(rank)) for rank, found in enumerate(rows)):
        name = "prefetch"  # the right rows, of another step
    else:
        name = "SampleStream"
    coordinates = ", ".join(f"{dim} {at}" for dim, at in plan.coordinates(first).items())
    detail = (
        f"in {plan.name_step(step)}, rank {first} ({coordinates}) is given {describe_rows(rows[first])} instead of "
        f"{describe_rows([(step, row) for row in own])}; {len(wrong)} of {len(rows)} ranks are given others"
    )
    return Check("rows", len(wrong), 0, Culprit("rows", name, detail, find_unlike_peers(plan, rows)))


def find_unlike_peers(plan: StartPlan, rows: Sequence[list[RowNumber | None]]) -> list[str]:
    """Return the mesh dims along which neighbors must read the same rows, and do not."""
    values = [(plan.coordinates(rank), rows.index(found)) for rank, found in enumerate(rows)]
    return [dim for dim in find_disagreement(values, 0.0) if dim in ("pp", "cp", "tp")]


def describe_rows(rows: Sequence[RowNumber | None]) -> str:
    """Return `rows 0 to 3 of step 2`, where that is what they are."""
    if None in rows:
        return "rows that no step has"
    steps, numbers = {step for step, _ in rows}, [row for _, row in rows]
    if len(steps) == 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"rows {numbers[0]} to {numbers[-1]} of step {steps.pop()}"
    return "rows " + ", ".join(f"{row} of step {step}" for step, row in rows)


def check_state(
    plan: StartPlan, expected: Expected, of_ranks: Sequence[dict], step: int, *, loaded: bool = False
) -> Iterator[Check]:
    """Check weights and moments at the start of a run, or after a step: slices of all ranks together."""
    for name, tensors in expected.states[step].items():
        for fqn in tensors:
            gaps = [state[name][fqn] for state in of_ranks if fqn in state.get(name, {})]
            error, bound = add_gaps(gaps).relative(TOLERANCE)
            off = f"{name} of {fqn} is off by {error:.1e}"
            if not loaded:
                measure, kind = ("weights", "updated weights") if name == "weight" else ("moments", "moments")
                detail = f"after {plan.name_step(step)} {off}; rows, learning rate, loss and gradient norm are right"
            elif step == 0:
                measure, kind, detail = "weights", "initial weights", off
            else:
                measure, kind = "resumed state", "resume"
                detail = f"loaded from the checkpoint of step {step} on {plan.layout}, {off}"
            yield Check(measure, error, bound, Culprit(kind, fqn, detail))


def check_log(plan: StartPlan, record: RankRecord) -> Check:
    """Check that metrics.jsonl holds the numbers of rank 0, to the last digit."""
    lines = [json.loads(line) for line in (plan.dump_folder / "metrics.jsonl").read_text().splitlines()]
    logged: dict[int, dict] = {}
    for line in lines:
        logged.setdefault(line["step"], {}).update(line)
    tokens_per_step = plan.layout.global_batch_size * plan.config.training.seq_len
    wrong = []
    for index, step in enumerate(plan.steps):
        expected = {
            "loss": record.losses[index],
            "grad_norm": record.grad_norms[index],
            "lr": record.rates[index][0],
            "tokens": step * tokens_per_step,
            **record.validation.get(step, {}),
        }
        line = logged.get(step, {})
        wrong += [(name, step, line.get(name), value) for name, value in expected.items() if line.get(name) != value]
    if not wrong:
        return Check("logged numbers", 0, 0, Culprit("logged numbers", "metrics.jsonl", ""))
    name, step, value, right = wrong[0]
    detail = f"{name} of {plan.name_step(step)} is {value} instead of {right}; {len(wrong)} numbers are wrong"
    return Check("logged numbers", len(wrong), 0, Culprit(f"logged {name}", "metrics.jsonl", detail))
