"""Test pipelines: layers of the stages, orders of actions (which equal torch's and never deadlock), simulations and
pictures."""

import xml.etree.ElementTree as ElementTree
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
from marks import each_row
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _PipelineSchedule,
    get_schedule_class,
)

from torchtitan_lite.config.checks import explain_microbatches
from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.config.layout import name_stages, plan_stages
from torchtitan_lite.config.schema import Parallelism
from torchtitan_lite.models.llama3.table import FLAVORS
from torchtitan_lite.tools.plan.orders import (
    Action,
    Order,
    Pipeline,
    count_in_flight,
    extrapolate_in_flight,
    list_order,
    shorten,
)
from torchtitan_lite.tools.plan.timeline import Timeline, draw_timeline, simulate


def make_section(**keys: object) -> Parallelism:
    return Parallelism(**{f"pipeline_parallel_{key}": value for key, value in keys.items()})


# pp, schedule | keys | layers of each stage. Embedding and head count as one layer each.
STAGES = """
4 1F1B | | 8 9 8 7
2 1F1B | first_stage_less_layers=5 | 2 6
4 Interleaved1F1B | | 1 1 1 1 1 1 1 1
2 LoopedBFS | layers_per_stage=3 | 2 3 3 2
16 1F1B | | 7 8 8 8 8 8 8 8 8 8 8 8 8 8 8 7
4 1F1B | | 1 1 1 0
2 Interleaved1F1B | first_stage_less_layers=3 | 0 3 3 2
4 1F1B | first_stage_less_layers=0 last_stage_less_layers=0 | 0 1 1 0
"""


@each_row("row", STAGES)
def test_layers_are_spread_evenly_with_embedding_and_head_counted(row):
    (pp, schedule), words, layers = map(str.split, row)
    layers = [*map(int, layers)]
    n_layers = sum(layers)
    keys: dict = {"degree": int(pp), "schedule": schedule}
    for word in words:
        key, _, n = word.partition("=")
        keys[key] = int(n)
    assert plan_stages(make_section(**keys), n_layers) == layers
    model_args = replace(FLAVORS["debug"], n_layers=n_layers)
    stages = name_stages(tuple(layers), model_args)
    whole = name_stages((n_layers,), model_args)
    assert (sum(stages, ()),) == whole
    for n, stage in zip(layers, stages, strict=True):
        assert sum(fqn.startswith("layers.") for fqn in stage) == n


# ---------------------------------------------------------------- orders

KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def make_torchs_schedule(
    schedule: str, pp: int, n_stages: int, n_microbatches: int
) -> _PipelineSchedule:
    """Return torch's schedule for rank 0, whose stages are stubs. Raises ValueError."""
    schedule_class = get_schedule_class(schedule)
    stages = []
    for index in range(0, n_stages, pp):
        stage = SimpleNamespace(stage_index=index, num_stages=n_stages, group_size=pp, group_rank=0)
        stage.is_first = index == 0
        stage.is_last = index == n_stages - 1
        stage.submod = None
        stage.has_backward = True
        stages.append(stage)
    if issubclass(schedule_class, PipelineScheduleSingle):
        (stages,) = stages
    return schedule_class(stages, n_microbatches, loss_fn=lambda output, target: output)


def read_torchs_order(schedule: str, pp: int, n_microbatches: int, n_stages_per_rank: int) -> Order:
    """Return the order of actions in the schedule table that torch makes for these numbers of ranks, microbatches and
    stages."""
    made = make_torchs_schedule(schedule, pp, pp * n_stages_per_rank, n_microbatches)
    rows = []
    for rank in range(pp):
        row = [action for cell in made.pipeline_order[rank] if cell for action in unfold(cell)]
        # In 1F1B, torch 2.13 numbers the forwards of the last rank from 1, but runs microbatches from 0.
        first = min(action.microbatch for action in row if action.kind == "F")
        rows.append([a._replace(microbatch=a.microbatch - first * (a.kind == "F")) for a in row])
    return rows


def unfold(cell) -> list[Action]:
    """Return the actions in a cell of torch's table: usually one, two in DualPipeV, none for sends and reductions."""
    if cell.sub_actions:
        return [action for part in cell.sub_actions for action in unfold(part)]
    kind = KINDS.get(cell.computation_type.name)
    return [Action(cell.stage_index, kind, cell.microbatch_index)] if kind else []


@each_row("schedule", SCHEDULES)
def test_every_order_of_actions_equals_torchs_and_never_deadlocks(schedule):
    row = SCHEDULES[schedule]
    n_compared = 0
    most = row.most_stages_per_rank or 3
    for v in range(row.least_stages_per_rank, most + 1):
        for pp, m in product((2, 3, 4, 8), (2, 7, 8, 24)):
            is_short = row.fills_pipeline and m < pp * v
            is_uneven = row.in_rounds and m % max(1, m // pp)
            if is_short or is_uneven:
                continue  # `check` and torch refuse this combination
            order = list_order(Pipeline(schedule, pp, m, v))
            assert order == read_torchs_order(schedule, pp, m, v), (pp, m, v)
            assert len(simulate(order, seconds_of).events) == sum(map(len, order))
            n_compared += 1
    assert n_compared >= 4


@each_row("name", SCHEDULES)
def test_microbatch_numbers_that_torch_refuses_are_refused_before_launch(name):
    section = make_section(degree=4, schedule=name)
    n_stages = 4 * SCHEDULES[name].least_stages_per_rank
    for n_microbatches in range(1, 14):
        is_refused = bool(explain_microbatches(section, n_microbatches, n_stages))
        expectation = pytest.raises(ValueError) if is_refused else nullcontext()
        with expectation:
            make_torchs_schedule(name, 4, n_stages, n_microbatches)


# ---------------------------------------------------------------- on paper


def seconds_of(action: Action) -> float:
    return {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}[action.kind]


def run(schedule: str, pp: int, m: int, v: int = 1, send: float = 0.0) -> Timeline:
    return simulate(list_order(Pipeline(schedule, pp, m, v)), seconds_of, send)


# schedule, stages per rank, pp, microbatches | idle time | microbatches in flight on each rank
PAPERS = """
GPipe 1 4 1 | 9 | 1 1 1 1      # idles 75 %, though (P-1)/M, which is often quoted, says 300
GPipe 1 4 8 | 9 | 8 8 8 8
1F1B 1 4 8 | 9 | 4 3 2 1
Interleaved1F1B 2 4 8 | 9 | 11 9 7 5  # (v - 1) p + 2 (p - 1 - r) + 1
Interleaved1F1B 3 8 8 | 21 |
LoopedBFS 2 8 40 | 21 |
InterleavedZeroBubble 2 4 20 | 3 |  # one forward per rank
ZBVZeroBubble 2 4 20 | 3 |
DualPipeV 2 4 20 | 3 |
"""


@each_row("row", PAPERS)
def test_bubbles_and_microbatches_in_flight_equal_the_formulas_of_the_papers(row):
    (schedule, *sizes), (idle,), in_flight = map(str.split, row)
    v, pp, m, idle = map(int, [*sizes, idle])
    timeline = run(schedule, pp, m, v)
    assert timeline.end_time == 3 * v * m + idle
    assert timeline.bubble == pytest.approx(idle / timeline.end_time, abs=5e-5)
    if in_flight:
        counts = [count_in_flight(row) for row in list_order(Pipeline(schedule, pp, m, v))]
        tenths = [max(each.total() for each in count.values()) for count in counts]
        assert tenths == [10 * int(n) for n in in_flight]


def test_simulated_times_include_the_slowest_stage_and_the_sends_between_ranks():
    """Computed by hand: GPipe, two stages, two microbatches. The second stage is slower, and a send takes 10:
    F0 0-1, F1 1-2 | stage 1: F0 11-13, F1 13-15, B0 15-22, B1 22-29 | stage 0: B0 32-35, B1 39-42."""
    seconds = {"0F": 1, "1F": 2, "0B": 3, "1B": 7}
    order = list_order(Pipeline("GPipe", 2, 2, 1))
    timeline = simulate(order, lambda action: seconds[str(action)[:2]], 10.0)
    times = {str(event.action): (event.start, event.end) for event in timeline.events}
    expected = {"1F0": (11, 13), "1B0": (15, 22), "0B0": (32, 35), "0B1": (39, 42)}
    assert {action: times[action] for action in expected} == expected
    events = run("ZBVZeroBubble", 2, 4, 2, send=5.0).events
    start = {str(event.action): event.start for event in events}
    # stages 1 and 2 are on the same rank, so there is no send between them
    assert [start[f"{stage}F0"] for stage in range(4)] == [0, 6, 7, 13]


@each_row("schedule", SCHEDULES)
def test_a_long_schedule_is_extrapolated_from_short_ones(schedule):
    pp, m, v = 4, 28, SCHEDULES[schedule].least_stages_per_rank
    pipeline = Pipeline(schedule, pp, m, v)
    lengths = shorten(pipeline)
    assert len(lengths) == 2
    extrapolated = 0.0
    for short, weight in lengths:
        extrapolated += weight * simulate(list_order(short), seconds_of, 0.25).end_time
    assert extrapolated == pytest.approx(run(schedule, pp, m, v, 0.25).end_time, rel=1e-6)
    in_flight = [count_in_flight(row) for row in list_order(pipeline)]
    extrapolated = [extrapolate_in_flight(pipeline, rank) for rank in range(pp)]
    assert extrapolated == in_flight


def test_the_picture_has_a_box_for_each_action():
    timeline = run("InterleavedZeroBubble", 4, 8, 2)
    root = ElementTree.fromstring(draw_timeline(timeline))
    boxes = [box for box in root.iter("svg") if box.get("class") == "box"]
    assert len(boxes) == len(timeline.events) == 4 * 8 * 2 * 3
    assert max(float(box.get("x")[:-1]) + float(box.get("width")[:-1]) for box in boxes) <= 100.01
    assert "W3 of stage 5" in "".join(root.itertext())
