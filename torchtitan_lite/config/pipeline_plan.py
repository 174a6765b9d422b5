"""Plan a pipeline: which stage holds which modules, and which pp rank holds which stage.

    placement "loop", pp=2, 4 stages     rank 0: stages 0, 2      rank 1: stages 1, 3
    placement "v",    pp=2, 4 stages     rank 0: stages 0, 3      rank 1: stages 1, 2

Numbers and names only. torch.distributed.pipelining has the order of work of each schedule; a CSV file may have another
(pipeline_csv.py).

Sources: GPipe arXiv:1811.06965; 1F1B, interleaved 2104.04473; breadth first 2211.05953; zero bubble 2401.10241;
DualPipe 2412.19437.
"""

from itertools import zip_longest

from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.config.messages import Problem
from torchtitan_lite.config.pipeline_csv import read_rows
from torchtitan_lite.config.schema import Parallelism

Stages = tuple[tuple[str, ...], ...]  # FQNs of the modules of each stage, first to last


def splits_backward(parallelism: Parallelism) -> bool:
    """Whether the schedule splits a backward in two: gradients of inputs, and of weights."""
    if parallelism.pipeline_parallel_degree == 1:
        return False
    if parallelism.pipeline_parallel_schedule_csv:
        rows = read_rows(parallelism.pipeline_parallel_schedule_csv)
        return any(action.kind in "IW" for row in rows for action in row)
    return SCHEDULES[parallelism.pipeline_parallel_schedule].splits_backward


# ---------------------------------------------------------------- stages


def plan_stages(parallelism: Parallelism, n_layers: int) -> tuple[Stages, list[Problem]]:
    """Return the FQNs of each stage, first to last, and what is wrong with them.

    Every stage between the first and the last gets one layer. Each further layer goes to the stage with the least load;
    of equal ones to a stage without a layer, then to the earliest. The two `less_layers` keys are the loads of
    embedding and head. Llama 3 8B on pp4: 8, 9, 8, 7 layers. Llama 3 405B on 128 stages: 0, 1, 1, ..., 1, 0.
    """
    pp = parallelism.pipeline_parallel_degree
    if parallelism.module_fqns_per_model_part:
        return check_given_stages(parallelism, n_layers)
    if pp == 1:
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
    starts = [sum(n_layers_of[:stage]) for stage in range(n_stages + 1)]
    return tuple(
        name_modules(range(starts[i], starts[i + 1]), first=i == 0, last=i == n_stages - 1) for i in range(n_stages)
    ), []


def name_modules(layers: range, *, first: bool, last: bool) -> tuple[str, ...]:
    """Return the names of the modules of a stage with these layers."""
    middle = tuple(f"layers.{layer}" for layer in layers)
    return ("tok_embeddings",) * first + middle + ("norm", "output") * last


def count_stages(parallelism: Parallelism, n_layers: int) -> tuple[int, list[Problem]]:
    """Return the number of stages that schedule and layers_per_stage make, and what is wrong with it."""
    pp, name = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule
    if parallelism.pipeline_parallel_schedule_csv:
        n_stages = count_csv_stages(parallelism)
        return n_stages, check_enough_layers(n_layers, n_stages, pp, "the CSV schedule")
    schedule = SCHEDULES[name]
    layers_per_stage = parallelism.pipeline_parallel_layers_per_stage
    if layers_per_stage is None:
        n_stages = pp * schedule.least_stages_per_rank
    else:
        weights = parallelism.pipeline_parallel_first_stage_less_layers
        weights += parallelism.pipeline_parallel_last_stage_less_layers
        n_stages = -(-(n_layers + weights) // layers_per_stage)
    if not can_run(parallelism, n_stages):
        count = {1: "one stage", 2: "two stages"}[schedule.least_stages_per_rank]
        needs = f"exactly {count}" if schedule.most_stages_per_rank else f"{count} or more"
        why = f"it makes {n_stages} stages for {pp} pp ranks, and {name} takes {needs} on every rank"
        remedy = f"Remove the key, for {pp * schedule.least_stages_per_rank} stages, or choose another schedule"
        key = "parallelism.pipeline_parallel_layers_per_stage"
        return 0, [Problem(key, layers_per_stage, why, remedy)]
    return n_stages, check_enough_layers(n_layers, n_stages, pp, name)


def count_csv_stages(parallelism: Parallelism) -> int:
    """Return the number of stages in the schedule file."""
    return 1 + max(action.stage for row in read_rows(parallelism.pipeline_parallel_schedule_csv) for action in row)


def can_run(parallelism: Parallelism, n_stages: int) -> bool:
    """Whether the schedule takes this number of stages."""
    if parallelism.pipeline_parallel_schedule_csv:
        return n_stages == count_csv_stages(parallelism)
    schedule = SCHEDULES[parallelism.pipeline_parallel_schedule]
    per_rank, rest = divmod(n_stages, parallelism.pipeline_parallel_degree)
    return not rest and schedule.least_stages_per_rank <= per_rank <= (schedule.most_stages_per_rank or per_rank)


def check_enough_layers(n_layers: int, n_stages: int, pp: int, schedule: str) -> list[Problem]:
    """Find stages without a layer. The first may hold the embedding alone, and the last norm and head."""
    if n_layers >= n_stages - 2:
        return []
    why = f"{n_stages} pipeline stages ({pp} pp ranks, {schedule}) need a layer each, the first and the last excepted"
    remedy = f"Use a parallelism.pipeline_parallel_degree of at most {max(1, (n_layers + 2) * pp // n_stages)}"
    return [Problem("model.n_layers", n_layers, why, remedy)]


def check_given_stages(parallelism: Parallelism, n_layers: int) -> tuple[Stages, list[Problem]]:
    """Return the stages of module_fqns_per_model_part, which must list every module once, in the order of the model."""
    key, given = "parallelism.module_fqns_per_model_part", parallelism.module_fqns_per_model_part
    pp = parallelism.pipeline_parallel_degree
    problems = []
    expected = list(name_modules(range(n_layers), first=True, last=True))
    may_lack_layers = {0: ["tok_embeddings"], len(given) - 1: ["norm", "output"]}
    lacking = [
        index
        for index, stage in enumerate(given)
        if not any(fqn.startswith("layers.") for fqn in stage) and stage != may_lack_layers.get(index)
    ]
    listed = [fqn for stage in given for fqn in stage]
    if listed != expected:
        pairs = zip_longest(listed, expected, fillvalue="nothing")
        seen, wanted = next(pair for pair in pairs if pair[0] != pair[1])
        why = f"all lists together must name every module once, in the order of the model; there is {seen} for {wanted}"
        problems.append(Problem(key, given, why, f"The order is {', '.join(expected)}"))
    elif lacking:
        why = f"stage {lacking[0]} has no layer; only a first one of tok_embeddings and a last one of norm, output may"
        problems.append(Problem(key, given, why, "Give it one at least"))
    n_stages, per_rank = len(given), SCHEDULES[parallelism.pipeline_parallel_schedule].least_stages_per_rank
    if pp == 1 or not can_run(parallelism, n_stages):
        csv = parallelism.pipeline_parallel_schedule_csv
        why = f"it lists {n_stages} stages for {pp} pp ranks under {csv or parallelism.pipeline_parallel_schedule}"
        remedy = "Raise pipeline_parallel_degree"
        if pp > 1:  # without a pipeline nobody has checked the schedule file
            remedy = f"List {count_csv_stages(parallelism) if csv else pp * per_rank} stages"
        problems.append(Problem(key, given, why, remedy))
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
    """Find a number of microbatches that the schedule cannot run."""
    name, pp = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree
    schedule, rounds = SCHEDULES[name], max(1, n_microbatches // pp)
    why = ""
    if parallelism.pipeline_parallel_schedule_csv:
        rows = read_rows(parallelism.pipeline_parallel_schedule_csv)
        written = 1 + max(action.microbatch for row in rows for action in row)
        if written != n_microbatches:
            why = f"the CSV schedule has {written}"
            remedy = f"Choose batch sizes that make {written}, or write another schedule"
    elif schedule.fills_pipeline and n_microbatches < n_stages:
        why = f"{name} needs one for each of the {n_stages} stages"
        remedy = "Raise it (or global_batch_size), lower pipeline_parallel_microbatch_size, or use GPipe"
    elif schedule.in_rounds and n_microbatches % rounds:
        why, remedy = f"{name} runs them in {rounds} equal rounds", f"Use a number of microbatches that {pp} divides"
    if not why:
        return []
    why = f"it makes {n_microbatches} microbatches, and {why}"
    return [Problem("training.local_batch_size", local_batch_size, why, remedy)]
