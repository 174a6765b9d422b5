"""Plan a pipeline: the modules of each stage, and the pp rank of each stage.

    placement "loop", pp=2, 4 stages     rank 0: stages 0, 2      rank 1: stages 1, 3
    placement "v",    pp=2, 4 stages     rank 0: stages 0, 3      rank 1: stages 1, 2

A CSV file may replace torch's schedules. It is simulated before launch, because a deadlock would hang every GPU.

    0F0,0F1,,0B0,0B1        row 1: pp rank 0, which holds stage 0. F forward, B backward, or its halves I and W
    ,1F0,1B0,1F1,1B1        row 2: pp rank 1. Empty cells are ignored: a rank waits for its inputs anyway
"""

import csv
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.config.messages import Problem
from torchtitan_lite.config.schema import Parallelism

Stages = tuple[tuple[str, ...], ...]  # FQNs of the modules of each stage, first to last


def splits_backward(parallelism: Parallelism) -> bool:
    """Whether the schedule computes gradients of inputs and of weights at different times."""
    if parallelism.pipeline_parallel_degree == 1:
        return False
    if parallelism.pipeline_parallel_schedule_csv:
        return any(action.kind in "IW" for action in list_csv_actions(parallelism))
    return SCHEDULES[parallelism.pipeline_parallel_schedule].splits_backward


# ---------------------------------------------------------------- stages


def plan_stages(parallelism: Parallelism, n_layers: int) -> tuple[Stages, list[Problem]]:
    """Return the FQNs of each stage, first to last, and problems.

    Every stage except the first and the last gets one layer. Each remaining layer goes to the stage with least load;
    ties go to a stage without layers, then to the earliest. The two `less_layers` keys are the loads of embedding and
    head, in layers. Llama 3 8B on pp4: 8, 9, 8, 7 layers. Llama 3 405B on 128 stages: 0, 1, 1, ..., 1, 0.
    """
    if parallelism.module_fqns_per_model_part:
        return check_given_stages(parallelism, n_layers)
    if parallelism.pipeline_parallel_degree == 1:
        return (name_modules(range(n_layers), first=True, last=True),), []
    n_stages, problems = count_stages(parallelism, n_layers)
    if problems:
        return (), problems

    n_layers_of = [0, *[1] * (n_stages - 2), 0]
    load = list(n_layers_of)
    load[0] += parallelism.pipeline_parallel_first_stage_less_layers
    load[-1] += parallelism.pipeline_parallel_last_stage_less_layers
    for _ in range(n_layers - sum(n_layers_of)):
        lightest = min(range(n_stages), key=lambda stage: (load[stage], n_layers_of[stage] > 0))
        n_layers_of[lightest] += 1
        load[lightest] += 1
    stages, start = [], 0
    for stage, n in enumerate(n_layers_of):
        stages.append(name_modules(range(start, start + n), first=stage == 0, last=stage == n_stages - 1))
        start += n
    return tuple(stages), []


def name_modules(layers: range, *, first: bool, last: bool) -> tuple[str, ...]:
    """Return the FQNs of a stage with these layers."""
    middle = tuple(f"layers.{layer}" for layer in layers)
    return ("tok_embeddings",) * first + middle + ("norm", "output") * last


def count_stages(parallelism: Parallelism, n_layers: int) -> tuple[int, list[Problem]]:
    """Return the number of stages from the schedule and layers_per_stage, and problems.

    The first stage may have only the embedding, and the last only norm and head. Every other stage needs a layer.
    """
    pp, name = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule
    schedule, layers_per_stage = SCHEDULES[name], parallelism.pipeline_parallel_layers_per_stage
    if parallelism.pipeline_parallel_schedule_csv:
        n_stages, name = count_csv_stages(parallelism), "the CSV schedule"
    elif layers_per_stage is None:
        n_stages = pp * schedule.least_stages_per_rank
    else:
        weights = parallelism.pipeline_parallel_first_stage_less_layers
        weights += parallelism.pipeline_parallel_last_stage_less_layers
        n_stages = -(-(n_layers + weights) // layers_per_stage)
    if not can_run(parallelism, n_stages):
        least, only = schedule.least_stages_per_rank, "exactly" if schedule.most_stages_per_rank else "at least"
        why = f"it makes {n_stages} stages for {pp} pp ranks, but {name} needs {only} {least} per rank"
        remedy = f"Remove the key to get {pp * schedule.least_stages_per_rank} stages, or choose another schedule"
        key = "parallelism.pipeline_parallel_layers_per_stage"
        return 0, [Problem(key, layers_per_stage, why, remedy)]
    if n_layers < n_stages - 2:
        why = f"each of the {n_stages} pipeline stages ({pp} pp ranks, {name}) needs a layer, except the first and last"
        return 0, [Problem("model.n_layers", n_layers, why, f"Use {n_stages - 2} layers or more, or fewer pp ranks")]
    return n_stages, []


def can_run(parallelism: Parallelism, n_stages: int) -> bool:
    """Whether the schedule can run this number of stages."""
    if parallelism.pipeline_parallel_schedule_csv:
        return n_stages == count_csv_stages(parallelism)
    schedule = SCHEDULES[parallelism.pipeline_parallel_schedule]
    per_rank, rest = divmod(n_stages, parallelism.pipeline_parallel_degree)
    return not rest and schedule.least_stages_per_rank <= per_rank <= (schedule.most_stages_per_rank or per_rank)


def check_given_stages(parallelism: Parallelism, n_layers: int) -> tuple[Stages, list[Problem]]:
    """Return the stages in module_fqns_per_model_part, and problems if they do not list all modules in order."""
    key, given = "parallelism.module_fqns_per_model_part", parallelism.module_fqns_per_model_part
    problems = []
    expected = list(name_modules(range(n_layers), first=True, last=True))
    may_lack_layers = {0: ["tok_embeddings"], len(given) - 1: ["norm", "output"]}
    lacking = [
        index
        for index, stage in enumerate(given)
        if not any(fqn.startswith("layers.") for fqn in stage) and stage != may_lack_layers.get(index)
    ]
    if [fqn for stage in given for fqn in stage] != expected:
        why = "together the lists must name every module once, in the order of the model"
        problems.append(Problem(key, given, why, f"The order is {', '.join(expected)}"))
    elif lacking:
        why = f"stage {lacking[0]} has no layer; only a first stage [tok_embeddings] and a last [norm, output] may"
        problems.append(Problem(key, given, why, "Give it a layer"))
    if parallelism.pipeline_parallel_degree == 1 or not can_run(parallelism, len(given)):
        order = parallelism.pipeline_parallel_schedule_csv or parallelism.pipeline_parallel_schedule
        why = f"it lists {len(given)} stages for {parallelism.pipeline_parallel_degree} pp ranks under {order}"
        problems.append(Problem(key, given, why, "List one group of modules for each stage of the schedule"))
    return tuple(tuple(stage) for stage in given), problems


def place_stages(parallelism: Parallelism, n_stages: int) -> tuple[int, ...]:
    """Return the pp rank of each stage."""
    pp = parallelism.pipeline_parallel_degree
    if pp > 1 and parallelism.pipeline_parallel_schedule_csv:
        rows = read_rows(parallelism.pipeline_parallel_schedule_csv)
        rank_of = {action.stage: rank for rank, row in enumerate(rows) for action in row}
        return tuple(rank_of[stage] for stage in range(n_stages))
    if pp > 1 and SCHEDULES[parallelism.pipeline_parallel_schedule].placement == "v":
        return tuple(min(stage % (2 * pp), 2 * pp - 1 - stage % (2 * pp)) for stage in range(n_stages))
    return tuple(stage % pp for stage in range(n_stages))


# ---------------------------------------------------------------- microbatches


def check_microbatches(
    parallelism: Parallelism, local_batch_size: int, n_microbatches: int, n_stages: int
) -> list[Problem]:
    """Return a problem if the schedule cannot run this number of microbatches."""
    name, pp = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree
    schedule, rounds = SCHEDULES[name], max(1, n_microbatches // pp)
    if parallelism.pipeline_parallel_schedule_csv:
        written = 1 + max(action.microbatch for action in list_csv_actions(parallelism))
        if written == n_microbatches:
            return []
        why = f"the CSV schedule has {written}"
        remedy = f"Choose batch sizes that give {written}, or write another schedule"
    elif schedule.fills_pipeline and n_microbatches < n_stages:
        why = f"{name} needs at least one for each of the {n_stages} stages"
        remedy = "Raise it (or global_batch_size), lower pipeline_parallel_microbatch_size, or use GPipe"
    elif schedule.in_rounds and n_microbatches % rounds:
        why, remedy = f"{name} runs them in {rounds} equal rounds", f"Use a multiple of {pp} microbatches"
    else:
        return []
    why = f"it makes {n_microbatches} microbatches, but {why}"
    return [Problem("training.local_batch_size", local_batch_size, why, remedy)]


# ---------------------------------------------------------------- schedules from files

CELL = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """One cell of a CSV schedule: `0F3` is stage 0, forward, microbatch 3."""

    stage: int
    kind: str  # F forward; B backward, or its halves I (gradients of inputs) and W (of weights)
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def read_rows(path: str) -> list[list[Action]]:
    """Return the actions of each pp rank, without the empty cells. Raises ValueError with the reason."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    rows = []
    for number, cells in enumerate(csv.reader(lines), 1):
        matches = [(cell, CELL.fullmatch(cell)) for cell in map(str.strip, cells) if cell]
        if wrong := [cell for cell, match in matches if match is None]:
            raise ValueError(f"has the cell {wrong[0]!r} in line {number}; an action looks like 0F3, 0B3, 0I3, 0W3")
        rows.append([Action(int(match[1]), match[2], int(match[3])) for _, match in matches])
    if not any(rows):
        raise ValueError("has no actions")
    return rows


def list_csv_actions(parallelism: Parallelism) -> list[Action]:
    return [action for row in read_rows(parallelism.pipeline_parallel_schedule_csv) for action in row]


def count_csv_stages(parallelism: Parallelism) -> int:
    return 1 + max(action.stage for action in list_csv_actions(parallelism))


def find_csv_fault(parallelism: Parallelism) -> str:
    """Describe the first problem with the CSV file as a predicate ("has no actions"); empty if there is none."""
    path, pp = parallelism.pipeline_parallel_schedule_csv, parallelism.pipeline_parallel_degree
    if not path or pp == 1:
        return ""
    try:
        rows = read_rows(path)
    except ValueError as error:
        return str(error)
    wrong_number = f"has {len(rows)} rows for {pp} pp ranks" if len(rows) != pp else ""
    return wrong_number or find_missing_action(rows) or find_deadlock(rows)


def find_missing_action(rows: list[list[Action]]) -> str:
    """Describe a stage and microbatch without exactly F and B, or F, I and W; empty if there is none."""
    ranks_of, kinds = defaultdict(set), defaultdict(str)
    for rank, row in enumerate(rows):
        for stage, kind, microbatch in row:
            ranks_of[stage].add(rank + 1)
            kinds[stage, microbatch] += kind
    for stage, ranks in ranks_of.items():
        if len(ranks) > 1:
            return f"has stage {stage} on rows {sorted(ranks)}, but a stage belongs to one rank"
    for stage in range(1 + max(stage for stage, _ in kinds)):
        for microbatch in range(1 + max(microbatch for _, microbatch in kinds)):
            found = "".join(sorted(kinds[stage, microbatch]))
            if found not in ("BF", "FIW"):
                work = f"microbatch {microbatch} of stage {stage}"
                return f"has {found or 'nothing'} for {work}, which needs F and B, or F, I and W"
    return ""


def find_deadlock(rows: list[list[Action]]) -> str:
    """Describe the actions that wait for each other; empty if the schedule completes."""
    n_run = Counter(rank for rank, *_ in run_on_paper(rows, lambda action: 1.0))
    stuck = [f"row {rank + 1} at {row[n_run[rank]]}" for rank, row in enumerate(rows) if n_run[rank] < len(row)]
    return f"deadlocks: {', '.join(stuck)} wait for one another" if stuck else ""


def run_on_paper(rows: list[list[Action]], seconds_of: Callable[[Action], float], send: float = 0.0) -> Iterator[tuple]:
    """Simulate the schedule and yield (rank, start, end, action). Sending to another rank takes `send` seconds."""
    last_stage = max(action.stage for row in rows for action in row)
    rank_of = {action.stage: rank for rank, row in enumerate(rows) for action in row}
    done: dict[tuple[int, str, int], float] = {}
    clocks, next_of, progressed = [0.0] * len(rows), [0] * len(rows), True
    while progressed:
        progressed = False
        for rank, row in enumerate(rows):
            while next_of[rank] < len(row):
                needs = list_needs(action := row[next_of[rank]], last_stage)
                if any(need not in done for need in needs):
                    break
                start = max([clocks[rank], *(done[need] + send * (rank_of[need[0]] != rank) for need in needs)])
                clocks[rank] = start + seconds_of(action)
                for kind in "IW" if action.kind == "B" else action.kind:  # B does both halves
                    done[action.stage, kind, action.microbatch] = clocks[rank]
                yield rank, start, clocks[rank], action
                next_of[rank] += 1
                progressed = True


def list_needs(action: Action, last_stage: int) -> list[tuple[int, str, int]]:
    """Return what an action waits for. F: the previous stage. Backward: its F and the next stage. W: its I."""
    stage, kind, microbatch = action
    if kind == "F":
        return [(stage - 1, "F", microbatch)] if stage else []
    if kind == "W":
        return [(stage, "I", microbatch)]
    return [(stage, "F", microbatch), (stage + 1, "I", microbatch)][: 1 + (stage < last_stage)]
