"""The ledger of a run: what it forecasts is what `explain` counts, and what it measures is what the stages did."""

import json
import logging
from collections import Counter
from pathlib import Path

import compare
import pytest
import torch
import torch.distributed as dist
from layouts import (
    ACCUMULATION_4,
    BUDGET,
    COMPILED,
    CP,
    DOCUMENTS,
    MODE,
    PLAIN_FOR,
    PP,
    REPLICATE,
    RING,
    SCHEDULE,
    TP,
    TWO_LAYERS,
)
from measure_memory import BATCH, plan
from torch._dynamo.utils import counters
from torchtitan_lite.plan.action_times import KINDS, ActionTimes, gather_timeline, time_actions
from torchtitan_lite.plan.ledger_forecast import Ledger, describe, open_ledger
from torchtitan_lite.plan.schedule_order import list_rows
from torchtitan_lite.plan.traffic_count import count_traffic, find_most_moved

from torchtitan_lite import step as stepping
from torchtitan_lite.components.metrics import StepMetrics, format_json_line
from torchtitan_lite.config.cluster import CLUSTERS, ROW_OF_GPU
from torchtitan_lite.config.hardware import Machine
from torchtitan_lite.parallel.pipeline import list_stages
from torchtitan_lite.plan import command as plan_tool
from torchtitan_lite.plan.dry_run import dry_run
from torchtitan_lite.plan.ledger import RunLedger
from torchtitan_lite.plan.traffic import Moved

CPU = Machine("cpu", 1, 2**34, "x86_64 CPU")
CSV = "parallelism.pipeline_parallel_schedule_csv"


def open_for(world_size: int, keys: dict, machine: Machine = CPU) -> Ledger:
    config, shape, layout = plan(world_size, keys, machine.device_type)
    return open_ledger(config, shape, layout, machine, list_rows(config.parallelism, layout))


# ---------------------------------------------------------------- the forecast


@pytest.mark.parametrize(
    ("world_size", "keys"),
    [
        (4, {TP: 2, BATCH: 4}),
        (8, {PP: 2, TP: 2, BATCH: 4}),
        (2, {CP: 2, BATCH: 4}),
        (2, {BATCH: 4, "model.tie_embeddings": True}),
    ],
)
def test_traffic_at_the_start_is_what_explain_counts(world_size, keys):
    """Calls and bytes over each axis, of the pipeline rank that moves most over it."""
    run = plan(world_size, {**keys, **TWO_LAYERS})
    seen: dict[str, tuple[float, int]] = {}
    for pp_rank in range(run[2].pp):
        n_bytes, calls = Counter(), Counter()
        for collective, times in dry_run(*run, pp_rank=pp_rank).collectives:
            n_bytes[collective.axis] += times * collective.n_bytes
            calls[collective.axis] += times
        seen |= {axis: max(seen.get(axis, (0, 0)), (n_bytes[axis], calls[axis])) for axis in calls}
    told = open_for(world_size, {**keys, **TWO_LAYERS}).predicted.traffic
    assert {axis: (moved.n_bytes, moved.n_calls) for axis, moved in told.items()} == seen


def test_every_gpu_that_is_known_by_name_has_a_row_and_others_of_its_chip_have_none():
    assert set(ROW_OF_GPU.values()) == CLUSTERS.keys() - {"cpu"}
    known, unknown = (
        open_for(4, {PP: 2}, Machine("cuda", 8, 2**36, f"NVIDIA H100 {kind}")) for kind in ("80GB HBM3", "PCIe")
    )
    assert known.hardware == "h100" and known.predicted.step_time_s < 0.1
    assert (unknown.predicted.step_time_s, unknown.predicted.bubble) == (None, None)
    assert unknown.predicted.traffic == known.predicted.traffic
    assert unknown.predicted.memory_bytes == known.predicted.memory_bytes
    assert "has no row for NVIDIA H100 PCIe" in describe(unknown)


def test_what_no_closed_form_knows_is_said_in_one_line_and_stops_nothing():
    told = describe(open_for(4, {TP: 2, **BUDGET})).splitlines()
    assert len(told) == 2
    assert "no forecast: activation_checkpoint.mode = 'memory_budget'" in told[-1]


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


def test_actions_are_told_by_kind_and_waits_between_them_are_no_work(monkeypatch):
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
    told = [(str(event.action), event.start, event.end) for event in times.list_events(pp_rank=1)]
    assert told == [("3F0", 0, 1), ("3B0", 11, 12), ("3I1", 12, 13), ("3W1", 13, 14)]
    assert vars(stage).keys() == {"now_s"}, "a failure leaves nothing patched"


class SpinningStage:
    """Its forward returns at once and has the device spin for some 50 ms; its backward asks nothing of it."""

    stage_index = 0

    def forward_one_chunk(self, microbatch):
        torch.cuda._sleep(10**8)

    def backward_one_chunk(self, microbatch, full_backward=True):
        pass

    backward_weight_one_chunk = backward_one_chunk


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


def write_csv(folder: Path) -> str:
    """GPipe on two ranks with split backwards."""
    path = folder / "schedule.csv"
    path.write_text("0F0,0F1,,,0I0,0I1,0W0,0W1\n,1F0,1F1,1I0,1I1,1W0,1W1,\n")
    return str(path)


def time_schedules(rank: int, world_size: int, all_keys: list[dict]) -> list[tuple[list, bool, list[float]]]:
    """Worker: of each schedule the timeline, as rank 0 sees it, whether the loss is the one without a clock, and what
    has remained on the stages."""
    told = []
    for keys in all_keys:
        run = compare.build_table_run(world_size, {PP: 2, **keys})
        batch = compare.own_rows(run, compare.make_batch(0, run.config.model.vocab_size))
        n_tokens = stepping.count_global_tokens(run, batch)
        untimed = stepping.forward_backward(run, batch, n_tokens).item()
        dist.barrier()
        with time_actions(list_stages(run.schedule), run.device) as times:
            timed = stepping.forward_backward(run, batch, n_tokens).item()
        timeline = gather_timeline(times.list_events(rank), [0, 1], dist.group.WORLD)
        rows = list_rows(run.config.parallelism, run.layout)
        left = [name for stage in list_stages(run.schedule) for name in KINDS if name in vars(stage)]
        told.append((timeline, rows, timed == untimed, left))
    return told


def test_each_kind_of_schedule_tells_what_each_rank_did_in_the_order_of_the_plan(pool, tmp_path):
    names = ("GPipe", "1F1B", "ZBVZeroBubble", "DualPipeV")  # loops of their own, halves, a V, two actions at a time
    all_keys = [{SCHEDULE: name, **PLAIN_FOR[name]} for name in names]
    all_keys.append({CSV: write_csv(tmp_path), MODE: "none", "parallelism.pipeline_parallel_microbatch_size": 4})
    first, second = pool.run(time_schedules, 2, all_keys)
    assert all(timeline is None for timeline, *_ in second)
    for (timeline, rows, same_loss, left), keys in zip(first, all_keys, strict=True):
        for rank, row in enumerate(rows):
            events = [event for event in timeline.events if event.rank == rank]
            assert [event.action for event in events] == row, keys
            assert all(one.end <= other.start for one, other in zip(events, events[1:], strict=False))
        assert timeline.events[0].start == 0 and 0 <= timeline.bubble < 1
        assert same_loss and left == []


# ---------------------------------------------------------------- the traffic of a step


def count_steps(rank: int, world_size: int, all_keys: list[dict]) -> list[tuple[dict, dict, int]]:
    """Worker: of each layout what its second step was forecast to move, and moved, and what was compiled for it."""
    elsewhere = dist.new_group(list(range(world_size)), backend="gloo")
    told = []
    for keys in all_keys:
        torch._dynamo.reset()
        run = compare.build_table_run(world_size, keys)
        batch = compare.own_rows(run, compare.make_batch(0, run.config.model.vocab_size))
        stepping.train_step(run, batch)
        stepping.forward_only(
            run, stepping.shard_for_cp(run, batch), torch.ones((), dtype=torch.int64)
        )  # as validation
        if run.schedule is not None or run.config.compile.enable:  # sets itself up, or compiles, once more
            stepping.train_step(run, batch)
        n_graphs = counters["stats"]["unique_graphs"]
        with count_traffic(run.layout, besides=elsewhere) as count:
            stepping.train_step(run, batch)
            dist.all_reduce(torch.ones(1000), group=elsewhere)
        counted = dict(count.moved)
        stepping.train_step(run, batch)
        assert count.moved == counted, "what comes after is not counted"
        rows = list_rows(run.config.parallelism, run.layout)
        forecast = open_ledger(run.config, resolve(run), run.layout, CPU, rows).predicted.traffic
        told.append((forecast, find_most_moved(counted, elsewhere), counters["stats"]["unique_graphs"] - n_graphs))
    dist.destroy_process_group(elsewhere)
    return told


@pytest.mark.parametrize(
    ("world_size", "all_keys"),
    [
        (8, [{PP: 2, TP: 2}]),
        (4, [{TP: 2, MODE: "full"}, {CP: 2, **DOCUMENTS}, {REPLICATE: 2}, {PP: 2, **ACCUMULATION_4}]),
        (2, [{CP: 2, **RING}, {TP: 2, **COMPILED}, {CP: 2, **COMPILED}]),
    ],
)
def test_a_real_step_moves_what_was_forecast(pool, world_size, all_keys):
    """Bytes and calls over each axis, from the operators that gloo is called through."""
    for of_layouts in pool.run(count_steps, world_size, [{**keys, **TWO_LAYERS} for keys in all_keys]):
        for (forecast, counted, n_compiled), keys in zip(of_layouts, all_keys, strict=True):
            assert forecast.keys() == counted.keys(), keys
            for axis, moved in forecast.items():
                assert counted[axis].n_bytes == pytest.approx(moved.n_bytes, rel=1e-9), (keys, axis)
                assert counted[axis].n_calls == moved.n_calls, (keys, axis)
            assert n_compiled == 0, "counting leaves compiled code as it is"


def gather_by_inductor(rank: int, world_size: int) -> tuple[dict, int]:
    """Worker: what a function moves that inductor has compiled before; and how often it was compiled while counted."""

    @torch.compile
    def gather(x: torch.Tensor) -> torch.Tensor:  # needs no kernel of its own, and so no C++ compiler
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(x, world_size, dist.group.WORLD.group_name)
        return torch.ops._c10d_functional.wait_tensor(gathered)

    x = torch.full((10, 8), float(rank))
    gather(x)
    n_graphs = counters["stats"]["unique_graphs"]
    with count_traffic(plan(world_size, {TP: 2})[2], besides=dist.new_group(backend="gloo")) as count:
        assert gather(x)[:, 0].tolist() == [0.0] * 10 + [1.0] * 10
    return count.moved, counters["stats"]["unique_graphs"] - n_graphs


def test_what_inductor_has_compiled_is_counted_too(pool):
    assert pool.run(gather_by_inductor, 2) == [({"tp": Moved(1, 320.0)}, 0)] * 2  # 320 bytes from the other rank


# ---------------------------------------------------------------- a run


def train_with_ledger(rank: int, world_size: int, folder: Path) -> list[tuple[object, bool]]:
    """Worker: three steps from step 11 on; of each what the ledger has for metrics.jsonl, and whether it was timed."""
    logging.disable(logging.CRITICAL)
    run = compare.build_table_run(world_size, {PP: 2})
    ledger = RunLedger(run.config, resolve(run), run.layout, CPU, folder)
    group = dist.new_group([0, 1], backend="gloo")
    batch = compare.own_rows(run, compare.make_batch(0, run.config.model.vocab_size))
    told = []
    for step in (11, 12, 13):
        with ledger.measured(step, run, group, besides=group):
            is_timed = "forward_one_chunk" in vars(run.schedule._stage)
            stepping.train_step(run, batch)
        told.append((ledger.take(), is_timed))
    dist.destroy_process_group(group)
    logging.disable(logging.NOTSET)
    return told


def resolve(run: stepping.Run):
    return compare.resolve_model(run.config.model)


SOME_STEP = StepMetrics(12, 6.1, 1.2, 8e-4, 1000, 100.0, None, None, 0.4, 0.25, 0.01)


def test_the_second_step_of_a_process_is_measured_and_scored(pool, tmp_path, capsys):
    of_rank_0, of_rank_1 = pool.run(train_with_ledger, 2, tmp_path)
    assert [is_timed for _, is_timed in of_rank_0] == [is_timed for _, is_timed in of_rank_1] == [False, True, False]
    before, values, after = (values for values, _ in of_rank_0)
    assert before is after is None and all(values is None for values, _ in of_rank_1)
    assert values["step"] == 12
    measured = values["measured"]
    assert measured["tokens_per_s_per_rank"] == pytest.approx(8 * 32 / measured["step_time_s"] / 2)
    assert {path.name for path in tmp_path.iterdir()} == {"timeline.svg", "timeline.json"}
    boxes = [box for box in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"] if box["ph"] == "X"]
    assert sum(box["dur"] for box in boxes) < 2e6 * measured["step_time_s"], "two ranks work no longer than the step"
    in_all = max(box["ts"] + box["dur"] for box in boxes)
    assert measured["bubble"] == pytest.approx(1 - sum(box["dur"] for box in boxes) / in_all / 2)

    line = format_json_line(StepMetrics(**{**vars(SOME_STEP), "ledger": values}))
    (tmp_path / "metrics.jsonl").write_text(format_json_line(SOME_STEP) + line + '{"step": 1')
    for run in (tmp_path, tmp_path / "metrics.jsonl"):
        assert plan_tool.main(["--score", str(run), "--json"]) == 0
        ratios = json.loads(capsys.readouterr().out)["measured_over_predicted"]
        assert ratios["bubble"] == measured["bubble"] / values["predicted"]["bubble"]
        assert ratios["over pp"] == 1
    assert plan_tool.main(["--score", str(tmp_path)]) == 0
    rows = {line[:20].strip(): line.split() for line in capsys.readouterr().out.splitlines()}
    assert float(rows["step time"][-1]) == pytest.approx(ratios["step_time_s"], rel=0.01)
    assert float(rows["over pp"][-1]) == 1


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (None, "cannot be read"),
        ([format_json_line(SOME_STEP), "step 2 loss 8", "3"], "none of the 3 lines"),
    ],
)
def test_a_folder_without_a_ledger_is_told(tmp_path, capsys, lines, why):
    if lines:
        (tmp_path / "metrics.jsonl").write_text("\n".join(map(str.strip, lines)))
    assert plan_tool.main(["--score", str(tmp_path)]) == 2
    heading, problem = capsys.readouterr().err.splitlines()
    assert heading == "There is no score:" and why in problem
