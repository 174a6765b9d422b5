"""Schedules on paper, against the formulas of the papers that describe them, and the pictures of them."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.config.flavors import FLAVORS
from torchtitan_lite.config.layout import plan_layout
from torchtitan_lite.config.schedule import Action, find_deadlock, find_missing_action
from torchtitan_lite.config.schema import Config, Parallelism, Training
from torchtitan_lite.parallel import pipeline
from torchtitan_lite.tools.plan import simulator
from torchtitan_lite.tools.plan.simulator import (
    Durations,
    Timeline,
    count_in_flight,
    draw_svg,
    draw_text,
    extrapolate_in_flight,
    list_samples,
    pipeline_order,
    plan_order,
    simulate,
)


def even(n_stages: int, forward=1.0, backward_input=1.0, backward_weight=1.0, send=0.0) -> Durations:
    return Durations(*((seconds,) * n_stages for seconds in (forward, backward_input, backward_weight)), send)


def run(schedule: str, pp: int, n_microbatches: int, v: int = 1, **durations) -> Timeline:
    return simulate(pipeline_order(schedule, pp, n_microbatches, v), even(pp * v, **durations))


def stages_of(schedule: str) -> int:
    return SCHEDULES[schedule].least_stages_per_rank


@pytest.mark.parametrize(
    ("schedule", "v", "pp", "m"),
    [
        ("GPipe", 1, 4, 1),  # idles 75 %, where (P-1)/M, which is often quoted, says 300
        ("GPipe", 1, 8, 40),
        ("1F1B", 1, 4, 8),
        ("1F1B", 1, 8, 8),
        ("Interleaved1F1B", 2, 2, 10),
        ("Interleaved1F1B", 3, 8, 8),
        ("LoopedBFS", 2, 8, 40),
    ],
)
def test_bubbles_are_those_of_the_formula(schedule, v, pp, m):
    timeline = run(schedule, pp, m, v)
    assert timeline.bubble == pytest.approx((pp - 1) / (v * m + pp - 1), abs=5e-5)
    assert timeline.end_time == 3 * (v * m + pp - 1)
    assert timeline.busy == [3 * v * m] * pp


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 20)])
def test_backwards_of_weights_fill_all_of_the_bubble_but_one_forward_a_rank(schedule, pp, m):
    assert run(schedule, pp, m, 2).bubble == pytest.approx((pp - 1) / (3 * 2 * m + pp - 1), abs=5e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_order_of_every_schedule_is_complete_and_runs(schedule):
    rows = pipeline_order(schedule, 4, 12, stages_of(schedule))
    assert not find_missing_action(rows)
    assert not find_deadlock(rows)


def test_the_slowest_stage_and_the_way_between_ranks_count():
    """By hand, two stages and two microbatches, GPipe; the second stage is slower, a send takes 10:
    F0 0-1, F1 1-2 | stage 1: F0 11-13, F1 13-15, B0 15-22, B1 22-29 | stage 0: B0 32-35, B1 39-42."""
    durations = Durations((1.0, 2.0), (1.0, 3.0), (2.0, 4.0), send=10.0)
    timeline = simulate(pipeline_order("GPipe", 2, 2, 1), durations)
    times = {(event.rank, str(event.action)): (event.start, event.end) for event in timeline.events}
    assert (times[1, "1F0"], times[1, "1B0"]) == ((11, 13), (15, 22))
    assert (times[0, "0B0"], times[0, "0B1"]) == ((32, 35), (39, 42))
    assert timeline.end_time == 42
    assert timeline.busy == [8, 18]


def test_an_embedding_alone_computes_no_gradient_of_inputs():
    """Its backward is all W: a half of zero seconds is not taken for a whole backward."""
    durations = Durations((1.0, 1.0), (0.0, 1.0), (1.0, 1.0))
    assert [durations.of(Action(0, kind, 0)) for kind in "FIWB"] == [1, 0, 1, 1]


def test_stages_of_one_rank_hand_over_without_a_send():
    """In a V the last rank holds the two middle stages, one after the other."""
    timeline = run("ZBVZeroBubble", 2, 4, 2, send=5.0)
    start = {str(event.action): event.start for event in timeline.events}
    assert (start["0F0"], start["1F0"], start["2F0"], start["3F0"]) == (0, 6, 7, 13)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_long_schedule_is_known_from_a_short_one(schedule):
    pp, m, v = 4, 28, stages_of(schedule)
    uneven = Durations(*(tuple(1 + 0.1 * (s * k % 3) for s in range(pp * v)) for k in (1, 2, 4)), send=0.3)
    # A pipeline of uneven stages takes longer to come to its rhythm.
    for durations, tolerance in ((even(pp * v, send=0.25), 1e-6), (uneven, 5e-3)):

        def measure(n_microbatches: int, durations: Durations = durations) -> float:
            return simulate(pipeline_order(schedule, pp, n_microbatches, v), durations).end_time

        extrapolated = sum(weight * measure(length) for length, weight in list_samples(m, pp))
        assert extrapolated == pytest.approx(measure(m), rel=tolerance)
    in_flight = [count_in_flight(row, 1.6).total() for row in pipeline_order(schedule, pp, m, v)]
    assert [each.total() for each in extrapolate_in_flight(schedule, pp, m, v, 1.6)] == in_flight


@pytest.mark.parametrize(
    ("schedule", "v", "held"),
    [
        ("GPipe", 1, [8, 8, 8, 8]),
        ("1F1B", 1, [4, 3, 2, 1]),
        ("Interleaved1F1B", 2, [11, 9, 7, 5]),  # (v - 1) p + 2 (p - 1 - r) + 1
        ("ZBVZeroBubble", 2, [8, 8, 8, 8]),  # as 1F1B's first rank, in halves, on every rank
    ],
)
def test_microbatches_in_flight_are_those_of_the_papers(schedule, v, held):
    assert [count_in_flight(row).total() for row in pipeline_order(schedule, 4, 8, v)] == held


def test_the_backward_of_inputs_frees_nothing_yet_and_keeps_gradients():
    actions = [("F", 0), ("F", 1), ("F", 2), ("I", 0), ("W", 0), ("I", 1), ("I", 2), ("W", 1), ("W", 2)]
    row = [Action(0, *action) for action in actions]
    assert +count_in_flight(row, 1.2) == {(0, "F"): 2, (0, "I"): 1}
    assert +count_in_flight(row, 2.5) == {(0, "I"): 2}


def test_the_order_is_that_of_the_schedule_or_of_the_csv_file(tmp_path):
    file = tmp_path / "schedule.csv"
    file.write_text("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    expected = {
        ("pipeline_parallel_schedule", "GPipe"): ["1F0", "1F1", "1B0", "1B1"],
        ("pipeline_parallel_schedule_csv", str(file)): ["1F0", "1B0", "1F1", "1B1"],
    }
    for (key, value), second_row in expected.items():
        section = Parallelism(pipeline_parallel_degree=2, **{key: value})
        layout = plan_layout(Config(training=Training(local_batch_size=2), parallelism=section), FLAVORS["debug"], 2)
        assert list(map(str, plan_order(section, layout)[1])) == second_row
    assert list(map(str, pipeline_order("1F1B", 1, 2, 1)[0])) == ["0F0", "0B0", "0F1", "0B1"]


# ---------------------------------------------------------------- pictures


@pytest.mark.parametrize(
    ("module", "schedule", "backward"),
    [(pipeline, "1F1B", 1), (simulator, "1F1B", 2)],
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
    assert sum(line.count(".") for line in lines) / (8 * 89) == pytest.approx(timeline.bubble, abs=0.02)


def test_the_picture_has_a_box_for_each_action_and_says_the_bubble():
    timeline = run("InterleavedZeroBubble", 4, 8, 2)
    root = ElementTree.fromstring(draw_svg(timeline, "zero bubble & more"))
    boxes = [box for box in root.iter("{http://www.w3.org/2000/svg}rect") if len(box)]
    assert len(boxes) == len(timeline.events) == 4 * 8 * 2 * 3
    assert max(float(box.get("x")) + float(box.get("width")) for box in boxes) <= 1000
    texts = "".join(root.itertext())
    for text in (f"{timeline.bubble:.1%}", "zero bubble & more", "stage 5, backward of weights, microbatch 3"):
        assert text in texts
