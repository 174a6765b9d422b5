"""The ledger of a run: its notes, the measured step, the actions of its pipeline, and `plan --score`."""

import json
import logging
from pathlib import Path

import compare
import pytest
import torch
import torch.distributed as dist
from layouts import BUDGET, MODE, PLAIN_FOR, PP, SCHEDULE, TP
from measure_memory import plan

from torchtitan_lite import step as stepping
from torchtitan_lite.components.metrics import StepMetrics, format_json_line
from torchtitan_lite.config.hardware import Machine
from torchtitan_lite.config.memory import Memory
from torchtitan_lite.parallel.pipeline import list_stages
from torchtitan_lite.plan import command as plan_tool
from torchtitan_lite.plan.ledger import Ledger, describe, draw_memory, open_ledger
from torchtitan_lite.plan.simulator import METHODS, plan_order
from torchtitan_lite.plan.step_measure import ActionTimes, RunLedger, gather_timeline, time_actions

CPU = Machine("cpu", 1, 2**34, "x86_64 CPU")
CSV, MEASURE = "parallelism.pipeline_parallel_schedule_csv", "metrics.measure_ledger"


def open_for(world_size: int, keys: dict, machine: Machine = CPU) -> Ledger:
    config, shape, layout = plan(world_size, keys, machine.device_type)
    return open_ledger(config, shape, layout, machine)[0]


# ---------------------------------------------------------------- the forecast


def test_a_gpu_without_a_row_has_no_times_but_traffic_and_memory():
    known, unknown = (
        open_for(4, {PP: 2}, Machine("cuda", 8, 2**36, f"NVIDIA H100 {kind}")) for kind in ("80GB HBM3", "PCIe")
    )
    assert known.hardware == "h100" and known.predicted.step_time_s < 0.1
    assert (unknown.predicted.step_time_s, unknown.predicted.bubble) == (None, None)
    assert unknown.predicted.traffic == known.predicted.traffic
    assert unknown.predicted.memory_bytes == known.predicted.memory_bytes
    assert any("NVIDIA H100 PCIe" in note for note in unknown.notes)
    offloaded = open_for(4, {PP: 2, "training.enable_cpu_offload": True}, Machine("cuda", 8, 2**36, "NVIDIA H100 PCIe"))
    assert offloaded.predicted.memory_bytes is None and offloaded.predicted.traffic == known.predicted.traffic


def test_without_a_closed_form_the_ledger_has_a_note_and_stops_nothing():
    ledger = open_for(4, {TP: 2, **BUDGET})
    assert ledger.predicted.traffic == {} and ledger.predicted.memory_bytes is None
    assert len(ledger.notes) == 1 and "activation_checkpoint.mode" in ledger.notes[0]
    assert len(describe(ledger).splitlines()) == 2


# ---------------------------------------------------------------- the actions of a step


class CountingStage:
    """Its calls take one second each on a clock that a test moves."""

    stage_index = 3

    def __init__(self):
        self.now_s = 0.0

    def forward_one_chunk(self, microbatch, *args, **kwargs):
        self.now_s += 1
        return microbatch, args, kwargs

    def backward_one_chunk(self, microbatch, loss=None, full_backward=True, last_backward=False):
        self.now_s += 1

    def backward_weight_one_chunk(self, microbatch, last_backward=False):
        self.now_s += 1
        if last_backward:
            raise ValueError("the last one")


def test_actions_are_recorded_by_kind_and_waits_between_them_are_no_work(monkeypatch):
    stage = CountingStage()
    monkeypatch.setattr(ActionTimes, "now", lambda self: stage.now_s)
    with pytest.raises(ValueError), time_actions([stage], torch.device("cpu")) as times:
        assert stage.forward_one_chunk(0, ("x",), {"y": 1}, save_forward_output=False) == (
            0,
            (("x",), {"y": 1}),
            {"save_forward_output": False},
        )
        stage.now_s += 10  # as a schedule waits for what another rank sends
        stage.backward_one_chunk(0, loss=None, last_backward=False)
        stage.backward_one_chunk(1, loss=None, full_backward=False, last_backward=False)
        stage.backward_weight_one_chunk(1, last_backward=False)
        stage.backward_weight_one_chunk(2, last_backward=True)
    events = [(str(event.action), event.start, event.end) for event in times.list_events(pp_rank=1)]
    assert events == [("3F0", 0, 1), ("3B0", 11, 12), ("3I1", 12, 13), ("3W1", 13, 14)]
    assert vars(stage).keys() == {"now_s"}, "a failure leaves nothing patched"


class SpinningStage(CountingStage):
    """Its forward returns at once and has the device spin for some 50 ms; its backward asks nothing of it."""

    def forward_one_chunk(self, microbatch):
        torch.cuda._sleep(10**8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: reads CUDA events")
def test_actions_of_a_gpu_last_as_long_as_its_stream_works_on_them():
    stage = SpinningStage()
    torch.cuda.synchronize()
    with time_actions([stage], torch.device("cuda")) as times:
        stage.forward_one_chunk(0)
        stage.backward_one_chunk(0)
    torch.cuda.synchronize()
    forward, backward = times.list_events(pp_rank=0)
    assert 0 <= forward.start < forward.end <= backward.start <= backward.end
    assert forward.end - forward.start > 10 * (backward.end - backward.start)


def time_schedules(rank: int, world_size: int, all_keys: list[dict]) -> list:
    """Worker: of each schedule the timeline on rank 0, and the planned order. The clock changes no loss and leaves no
    trace."""
    results = []
    for keys in all_keys:
        run = compare.build_table_run(world_size, {PP: 2, **keys})
        batch = compare.own_rows(run, compare.make_batch(0, run.config.model.vocab_size))
        n_tokens = stepping.count_global_tokens(run, batch)
        untimed = stepping.forward_backward(run, batch, n_tokens).item()
        dist.barrier()
        with time_actions(list_stages(run.schedule), run.device) as times:
            assert stepping.forward_backward(run, batch, n_tokens).item() == untimed
        assert not [name for stage in list_stages(run.schedule) for name in METHODS if name in vars(stage)]
        timeline = gather_timeline(times.list_events(rank), [0, 1], dist.group.WORLD)
        results.append((timeline, plan_order(run.config.parallelism, run.layout)))
    return results


def test_the_measured_timeline_of_each_kind_of_schedule_has_the_planned_order(pool, tmp_path):
    names = ("1F1B", "ZBVZeroBubble", "DualPipeV")  # a loop of its own, halves in a V, two actions at a time
    all_keys = [{SCHEDULE: name, **PLAIN_FOR[name]} for name in names]
    (tmp_path / "split.csv").write_text("0F0,0F1,,,0I0,0I1,0W0,0W1\n,1F0,1F1,1I0,1I1,1W0,1W1,\n")
    csv = {CSV: str(tmp_path / "split.csv"), "parallelism.pipeline_parallel_microbatch_size": 4}
    first, second = pool.run(time_schedules, 2, [*all_keys, {**csv, MODE: "none"}])
    assert all(timeline is None for timeline, _ in second)
    for timeline, rows in first:
        for rank, row in enumerate(rows):
            events = [event for event in timeline.events if event.rank == rank]
            assert [event.action for event in events] == row
            assert all(one.end <= other.start for one, other in zip(events, events[1:], strict=False))
        assert timeline.events[0].start == 0 and 0 <= timeline.bubble < 1


# ---------------------------------------------------------------- a run


def train_with_ledger(rank: int, world_size: int, folder: Path, measure: bool) -> list[tuple[object, bool, dict]]:
    """Worker: steps from step 11 on; of each what the ledger has for metrics.jsonl, whether it was timed, pictures."""
    logging.disable(logging.CRITICAL)
    run = compare.build_table_run(world_size, {PP: 2, MEASURE: measure})
    ledger = RunLedger(run.config, compare.resolve_model(run.config.model), run.layout, CPU, folder)
    group = dist.new_group([0, 1], backend="gloo")
    batch = compare.own_rows(run, compare.make_batch(0, run.config.model.vocab_size))
    results = []
    for step in (11, 12, 13):
        with ledger.measured(step, run, group, besides=group):
            is_timed = "forward_one_chunk" in vars(run.schedule._stage)
            stepping.train_step(run, batch)
        results.append((ledger.take(), is_timed, ledger.take_pictures()))
    dist.destroy_process_group(group)
    logging.disable(logging.NOTSET)
    return results


SOME_STEP = StepMetrics(12, 6.1, 1.2, 8e-4, 1000, 100.0, None, None, 0.4, 0.25, 0.01)


def test_the_second_step_of_a_process_is_measured_and_scored(pool, tmp_path, capsys):
    of_rank_0, of_rank_1 = pool.run(train_with_ledger, 2, tmp_path, True)
    values_of_0, timed_0, pictures = zip(*of_rank_0, strict=True)
    values_of_1, timed_1, pictures_of_1 = zip(*of_rank_1, strict=True)
    assert timed_0 == timed_1 == (False, True, False)
    before, values, after = values_of_0
    assert before is after is None and values_of_1 == (None, None, None) and not any(pictures_of_1)
    names = [{"memory forecast", "pipeline forecast"}, {"ledger", "pipeline measured"}, set()]
    assert [set(each) for each in pictures] == names, "the ledger comes once, after the measured step"
    assert values["step"] == 12
    measured = values["measured"]
    assert measured["traffic"]["pp"] == values["predicted"]["traffic"]["pp"]
    measured["traffic"]["pp"]["n_bytes"] *= 2
    assert measured["tokens_per_s_per_rank"] == pytest.approx(8 * 32 / measured["step_time_s"] / 2)
    assert {path.name for path in tmp_path.iterdir()} == {"timeline.svg", "timeline.json"}
    boxes = [box for box in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"] if box["ph"] == "X"]
    assert sum(box["dur"] for box in boxes) < 2e6 * measured["step_time_s"], "two ranks work no longer than the step"
    in_all = max(box["ts"] + box["dur"] for box in boxes)
    assert measured["bubble"] == pytest.approx(1 - sum(box["dur"] for box in boxes) / in_all / 2)

    # Of an earlier process, and of this one.
    earlier, line = (
        format_json_line(StepMetrics(**{**vars(SOME_STEP), "ledger": {**values, "measured": columns}}))
        for columns in ({**measured, "bubble": 0.5, "traffic": {}}, measured)
    )
    (tmp_path / "metrics.jsonl").write_text(earlier + format_json_line(SOME_STEP) + line + '{"step": 1')
    assert plan_tool.main(["--score", str(tmp_path / "metrics.jsonl"), "--json"]) == 0
    ratios = json.loads(capsys.readouterr().out)["measured_over_predicted"]
    assert ratios["bubble"] == measured["bubble"] / values["predicted"]["bubble"]
    assert ratios["over pp"] == 2
    assert plan_tool.main(["--score", str(tmp_path)]) == 0
    assert "measured / forecast" in capsys.readouterr().out


def test_without_the_key_no_step_is_measured_and_nothing_is_patched(pool, tmp_path):
    of_ranks = pool.run(train_with_ledger, 2, tmp_path, False)
    assert [[result[:2] for result in results] for results in of_ranks] == [[(None, False)] * 3] * 2
    assert "ledger" in of_ranks[0][0][2], "the forecast alone, before the first step"
    assert not list(tmp_path.iterdir())


def test_a_bar_of_memory_is_as_long_as_its_share_of_the_largest_rank():
    ranks = [Memory(10, 10, 20, 0, 40, 0, 0), Memory(5, 5, 10, 0, 20, 0, 0)]
    first, second, *_ = draw_memory(ranks, width=80).splitlines()
    assert first == "pp rank 0  " + "P" * 10 + "G" * 10 + "O" * 20 + "A" * 40
    assert second == "pp rank 1  " + "P" * 5 + "G" * 5 + "O" * 10 + "A" * 20


@pytest.mark.parametrize("lines", [None, [format_json_line(SOME_STEP), "step 2 loss 8", "3"]])
def test_a_folder_without_a_ledger_ends_with_status_2(tmp_path, capsys, lines):
    if lines:
        (tmp_path / "metrics.jsonl").write_text("\n".join(map(str.strip, lines)))
    assert plan_tool.main(["--score", str(tmp_path)]) == 2
    assert "--score" in capsys.readouterr().err
