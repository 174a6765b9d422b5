"""Schedules on paper, against the formulas of the papers that describe them, and the pictures of them."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.config.flavors import FLAVORS
from torchtitan_lite.config.layout import plan_layout
from torchtitan_lite.config.pipeline_csv import Action, find_deadlock, find_missing_action
from torchtitan_lite.config.schema import Config, Parallelism, Training
from torchtitan_lite.parallel import pipeline
from torchtitan_lite.plan import simulator, step_measure, timeline
from torchtitan_lite.plan.simulator import (
    Durations,
    Timeline,
    count_in_flight,
    even_durations,
    extrapolate,
    pipeline_order,
    plan_order,
    simulate,
)
from torchtitan_lite.plan.timeline import draw_svg, draw_text, trace_chrome


def run(schedule: str, pp: int, n_microbatches: int, v: int = 1, **durations) -> Timeline:
    return simulate(pipeline_order(schedule, pp, n_microbatches, v), even_durations(pp * v, **durations))


@pytest.mark.parametrize("pp", [2, 8])
@pytest.mark.parametrize("rounds", [1, 5])
@pytest.mark.parametrize(
    ("schedule", "v"),
    [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 3), ("LoopedBFS", 2)],
)
def test_bubbles_are_those_of_the_formula(schedule, v, pp, rounds):
    m = pp * rounds
    timeline = run(schedule, pp, m, v)
    assert timeline.bubble == pytest.approx((pp - 1) / (v * m + pp - 1), abs=5e-5)
    assert timeline.end_time == 3 * (v * m + pp - 1)
    assert timeline.busy == [3 * v * m] * pp


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 8), (4, 20)])
def test_backwards_of_weights_fill_all_of_the_bubble_but_one_forward_a_rank(schedule, pp, m):
    assert run(schedule, pp, m, 2).bubble == pytest.approx((pp - 1) / (3 * 2 * m + pp - 1), abs=5e-5)


def test_cases_that_are_often_quoted_wrong():
    """Four stages without microbatches idle 75 %, with eight microbatches 27 %: (P-1)/M would say 300 and 38."""
    assert run("GPipe", 4, 1).bubble == pytest.approx(0.75)
    assert run("1F1B", 4, 8).bubble == pytest.approx(3 / 11)
    assert run("1F1B", 4, 8).end_time == run("GPipe", 4, 8).end_time, "1F1B has GPipe's bubble"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("m", [8, 12])
def test_the_order_of_every_schedule_is_complete_and_runs(schedule, m):
    rows = pipeline_order(schedule, 4, m, SCHEDULES[schedule].least_stages_per_rank)
    assert not find_missing_action(rows)
    assert not find_deadlock(rows)


def test_the_slowest_stage_and_the_way_between_ranks_count():
    """By hand, two stages and two microbatches, GPipe; the second stage is slower, a send takes 10:
    F0 0-1, F1 1-2 | stage 1: F0 11-13, F1 13-15, B0 15-22, B1 22-29 | stage 0: B0 32-35, B1 39-42."""
    durations = Durations((1.0, 2.0), (1.0, 3.0), (2.0, 4.0), send=10.0)
    timeline = simulate(pipeline_order("GPipe", 2, 2, 1), durations)
    times = {(event.rank, str(event.action)): (event.start, event.end) for event in timeline.events}
    assert times[1, "1F0"] == (11, 13)
    assert times[1, "1B0"] == (15, 22)
    assert times[0, "0B0"] == (32, 35)
    assert times[0, "0B1"] == (39, 42)
    assert timeline.end_time == 42
    assert timeline.busy == [8, 18]


def test_an_embedding_alone_computes_no_gradient_of_inputs():
    """Its backward is all W: a half of zero seconds is not taken for a whole backward."""
    durations = Durations((1.0, 1.0), (0.0, 1.0), (1.0, 1.0))
    assert [durations.of(Action(0, kind, 0)) for kind in "FIWB"] == [1, 0, 1, 1]


def test_stages_of_one_rank_hand_over_without_a_send():
    """In a V the last rank holds the two middle stages, one after the other."""
    timeline = simulate(pipeline_order("ZBVZeroBubble", 2, 4, 2), even_durations(4, send=5.0))
    start = {str(event.action): event.start for event in timeline.events}
    assert (start["0F0"], start["1F0"], start["2F0"], start["3F0"]) == (0, 6, 7, 13)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("pp", "m"), [(2, 9), (4, 29), (8, 40)])
def test_a_long_schedule_is_known_from_a_short_one(schedule, pp, m):
    v = SCHEDULES[schedule].least_stages_per_rank
    if SCHEDULES[schedule].in_rounds and m % (m // pp):
        m = m // pp * pp
    even = even_durations(pp * v, send=0.25)
    uneven = Durations(*(tuple(1 + 0.1 * (s * k % 3) for s in range(pp * v)) for k in (1, 2, 4)), send=0.3)

    def measure(n_microbatches: int, durations: Durations) -> float:
        return simulate(pipeline_order(schedule, pp, n_microbatches, v), durations).end_time

    def hold(n_microbatches: int, rank: int) -> int:
        return count_in_flight(pipeline_order(schedule, pp, n_microbatches, v)[rank]).total()

    assert extrapolate(lambda n: measure(n, even), m, pp) == pytest.approx(measure(m, even))
    # a pipeline of uneven stages takes longer to come to its rhythm
    assert extrapolate(lambda n: measure(n, uneven), m, pp) == pytest.approx(measure(m, uneven), rel=5e-3)
    for rank in range(pp):
        assert extrapolate(lambda n, rank=rank: hold(n, rank), m, pp) == hold(m, rank)


def test_microbatches_in_flight_are_those_of_the_papers():
    def held(*schedule) -> list[int]:
        return [count_in_flight(row).total() for row in pipeline_order(*schedule)]

    assert held("GPipe", 4, 8, 1) == [8, 8, 8, 8]
    assert held("1F1B", 4, 8, 1) == [4, 3, 2, 1]
    assert held("Interleaved1F1B", 4, 8, 2) == [11, 9, 7, 5]  # (v - 1) p + 2 (p - 1 - r) + 1
    assert held("ZBVZeroBubble", 4, 8, 2) == [8, 8, 8, 8]  # as 1F1B's first rank, in halves, on every rank


def test_the_backward_of_inputs_frees_nothing_yet():
    row = [Action(0, kind, microbatch) for kind, microbatch in [("F", 0), ("F", 1), ("I", 0), ("F", 2), ("W", 0)]]
    assert count_in_flight(row) == {0: 3}


def test_rows_of_a_layout_are_those_of_its_schedule_or_its_file(tmp_path):
    shape = FLAVORS["debug"]

    def rows(**keys):
        section = Parallelism(pipeline_parallel_degree=2, **keys)
        config = Config(training=Training(local_batch_size=2), parallelism=section)
        return plan_order(section, plan_layout(config, shape, 2))

    assert [list(map(str, row)) for row in rows(pipeline_parallel_schedule="GPipe")] == [
        ["0F0", "0F1", "0B0", "0B1"],
        ["1F0", "1F1", "1B0", "1B1"],
    ]
    file = tmp_path / "schedule.csv"
    file.write_text("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    assert list(map(str, rows(pipeline_parallel_schedule_csv=str(file))[1])) == ["1F0", "1B0", "1F1", "1B1"]
    assert list(map(str, pipeline_order("1F1B", 1, 2, 1)[0])) == ["0F0", "0B0", "0F1", "0B1"]


# ---------------------------------------------------------------- pictures


def test_the_text_shows_who_does_what_when():
    lines = draw_text(run("1F1B", 2, 4)).splitlines()
    assert lines == [
        "pp rank 0  F0F1....B0--F2B1--F3B2--..B3--",
        "pp rank 1  ..F0B0--F1B1--F2B2--F3B3--....",
    ]


@pytest.mark.parametrize(
    ("module", "schedule", "backward"),
    [(pipeline, "1F1B", 1), (simulator, "1F1B", 2), (step_measure, "1F1B", 2), (timeline, "GPipe", 2)],
)
def test_a_docstring_draws_the_pipeline_that_runs(module, schedule, backward):
    drawn = re.sub(r" \. ", " .. ", module.__doc__).replace(" ", "")  # a lone dot fills a column too
    halves = {"backward_input": backward / 2, "backward_weight": backward / 2}
    for line in draw_text(run(schedule, 2, 4, **halves)).splitlines():
        assert line.split()[-1] in drawn


def test_the_text_of_a_long_schedule_fits_the_line_and_shows_the_bubble():
    timeline = run("1F1B", 8, 64)
    lines = draw_text(timeline, width=100).splitlines()
    assert {len(line) for line in lines} == {100}
    drawn = sum(line.count(".") for line in lines) / (8 * 89)
    assert drawn == pytest.approx(timeline.bubble, abs=0.02)


def test_the_picture_has_a_box_for_each_action_and_says_the_bubble():
    timeline = run("InterleavedZeroBubble", 4, 8, 2)
    root = ElementTree.fromstring(draw_svg(timeline, "zero bubble & more"))
    boxes = [box for box in root.iter("{http://www.w3.org/2000/svg}rect") if len(box)]
    assert len(boxes) == len(timeline.events) == 4 * 8 * 2 * 3
    right_end = max(float(box.get("x")) + float(box.get("width")) for box in boxes)
    assert right_end <= 1000
    texts = "".join(root.itertext())
    assert f"{timeline.bubble:.1%}" in texts
    assert "zero bubble & more" in texts
    assert "stage 5, backward of weights, microbatch 3" in texts


def test_the_trace_is_json_whose_times_are_the_busy_times_in_microseconds():
    timeline = run("Interleaved1F1B", 2, 4, 2)
    events = json.loads(json.dumps(trace_chrome(timeline)))["traceEvents"]
    for rank in range(2):
        total = sum(event["dur"] for event in events if event["ph"] == "X" and event["tid"] == rank)
        assert total == pytest.approx(timeline.busy[rank] * 1e6)
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"pp rank 0", "pp rank 1"}
