"""bench gpu: what is run, in which order, what is kept of a run that goes wrong, and the arithmetic of the table."""

import json
import math
import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchtitan_lite import __main__ as door
from torchtitan_lite.config.layout import plan_layout, resolve_config, resolve_model
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.schema import Config
from torchtitan_lite.tools.bench import gpu as bench_gpu
from torchtitan_lite.tools.bench.command import describe, report_for_programs
from torchtitan_lite.tools.plan.dry_run import dry_run

GIB = 2**30
H200 = Machine("cuda", 1, 143771 * 2**20, "NVIDIA H200")
H100 = Machine("cuda", 1, 81559 * 2**20, "NVIDIA H100 80GB HBM3")
ROWS = [f"{size} {mode}" for size in ("8B", "3B", "1B") for mode in ("eager", "compile", "compile + float8")]


@pytest.fixture
def on_h200(monkeypatch):
    """The rows and the report of a machine that this one is not. No row runs: `run_row` must be replaced."""
    monkeypatch.setattr(bench_gpu, "detect_machine", lambda: H200)
    monkeypatch.setattr(bench_gpu, "read_setting", lambda name: {"device": H200.name, "date": "2026-11-21T12:00"})
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)


def result_of(config: Config, step_time_s: float) -> dict[str, object]:
    n_tokens = config.training.local_batch_size * config.training.seq_len
    return {
        "tokens_per_step": n_tokens,
        "step_time_s": [step_time_s, step_time_s * 2, step_time_s],
        "matmul_flops": {"bfloat16": 800e12, "float8": 1400e12},
        "peak_memory_gib": 100.0,
        "clocks": {"clocks.sm": "1980 MHz"},
    }


def read_lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---------------------------------------------------------------- what is run


def test_the_nine_rows_are_fixed_and_the_largest_comes_first():
    rows = bench_gpu.build_rows(H200, tiny=False)
    assert list(rows) == ROWS
    for name, plans in rows.items():
        for plan in plans:
            assert (plan.model.flavor, plan.training.seq_len) == (name[:2], 8192)
            assert plan.compile.enable == ("compile" in name)
            assert plan.model.converters == (["float8"] if "float8" in name else [])
            assert plan.training.mixed_precision_param == "bfloat16"


@pytest.mark.parametrize(
    ("machine", "size", "expected"),
    [
        (H200, "1B", (4, "none", "float32")),
        pytest.param(H100, "3B", (1, "none", "float32"), marks=pytest.mark.slow),
    ],
)
def test_a_size_is_trained_with_the_first_plan_that_fits(machine, size, expected):
    plan = bench_gpu.build_rows(machine, tiny=False)[f"{size} eager"][0]
    assert tuple(bench_gpu.describe_plan(plan)[key] for key in ("sequences", "recompute", "moments")) == expected
    model_args = resolve_model(plan.model)
    layout = plan_layout(plan, model_args, 1)
    peak_bytes = dry_run(resolve_config(plan, layout, "cuda"), model_args, layout, device_type="cuda").peak_bytes
    assert bench_gpu.count_bytes(plan) == pytest.approx(peak_bytes, rel=0.05)


# ---------------------------------------------------------------- what is kept


def test_where_memory_runs_out_the_next_plan_is_tried_and_other_failures_cost_one_row(monkeypatch, on_h200, tmp_path):
    """On an H100 no plan of the 8B fits."""
    tried = []

    def run_row(config: Config, **options) -> dict[str, object]:
        tried.append((config.model.flavor, config.training.local_batch_size, config.activation_checkpoint.mode))
        if tried[-1] == ("1B", 4, "none"):
            return {"failed": "CUDA out of memory", "out_of_memory": True}
        return {"failed": "its process died"} if config.model.flavor == "3B" else result_of(config, 1.0)

    monkeypatch.setattr(bench_gpu, "detect_machine", lambda: H100)
    monkeypatch.setattr(bench_gpu, "run_row", run_row)
    report = bench_gpu.bench_gpu(out=str(tmp_path / "rows.jsonl"))
    assert tried[:5] == [("3B", 1, "none")] * 3 + [("1B", 4, "none"), ("1B", 2, "none")]
    assert {name: report.absent[name] for name in ROWS[3:6]} == dict.fromkeys(ROWS[3:6], "its process died")
    assert all("does not fit" in report.absent[name] for name in ROWS[:3])
    assert report.units_per_step["1B eager"] == 2 * 8192
    assert "3B compile" not in report_for_programs(report)["ratios"]


def test_rows_that_do_not_fit_into_the_time_are_named(monkeypatch, on_h200, tmp_path):
    now_s = 1000.0
    timeouts = []

    def run_row(config: Config, timeout_s: float, **options) -> dict[str, object]:
        nonlocal now_s
        timeouts.append(timeout_s)
        now_s += 120 if config.model.flavor == "8B" else 50
        return result_of(config, 1.0)

    monkeypatch.setattr(bench_gpu.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(bench_gpu, "run_row", run_row)
    report = bench_gpu.bench_gpu(out=str(tmp_path / "rows.jsonl"), seconds=530)
    # the last of them begins where 70 seconds are left, and leaves 20: the shortest row took 50
    assert timeouts == [530, 410, 290, 170, 120, 70]
    assert list(report.step_times_s) == ROWS[:6]
    assert report.absent == dict.fromkeys(ROWS[6:], "not run: the time was up")
    assert [line.get("failed") for line in read_lines(tmp_path / "rows.jsonl")][5:] == [None, *report.absent.values()]


# ---------------------------------------------------------------- what is printed


def test_the_table_compares_with_the_peak_with_the_matmuls_and_with_the_row_before(monkeypatch, on_h200, tmp_path):
    seconds = {"eager": 1.4, "compile": 1.2, "float8": 0.8}

    def run_row(config: Config, **options) -> dict[str, object]:
        mode = "float8" if config.model.converters else "compile" if config.compile.enable else "eager"
        return result_of(config, seconds[mode])

    monkeypatch.setattr(bench_gpu, "run_row", run_row)
    report = bench_gpu.bench_gpu(out=str(tmp_path / "rows.jsonl"))
    values = report_for_programs(report)
    assert values["ratios"]["8B compile"] == pytest.approx(1.4 / 1.2)
    assert values["ratios"]["8B compile + float8"] == pytest.approx(1.2 / 0.8)
    assert values["ratio_of"]["3B compile + float8"] == ["3B compile + float8", "3B compile"]
    eager = values["contenders"]["8B eager"]
    assert eager["tokens_per_s"]["median"] == pytest.approx(8192 / 1.4)
    # 57.9 and 51.5 GFLOP per token: what is published for the 8B at this length
    assert eager["mfu_full"] == pytest.approx(57.9e9 * 8192 / 1.4 / 989e12, rel=1e-3)
    assert eager["mfu_causal"] == pytest.approx(51.5e9 * 8192 / 1.4 / 989e12, rel=1e-3)
    assert eager["share_of_matmul"] == pytest.approx(57.9e9 * 8192 / 1.4 / 800e12, rel=1e-3)
    assert eager["memory_gib"] == 100.0
    assert values["clocks"]["1B eager"] == "1980 MHz"
    assert values["plans"]["8B eager"] == "1 8192 none bfloat16"
    assert values["figures"]["matmul_float8_tflops"]["median"] == 1400.0
    rows = [line for line in describe(report).splitlines() if line.startswith("8B eager ")]
    assert rows[0].split()[2] == "5851" and rows[0].split()[-4:] == ["34.3%", "30.5%", "42.4%", "100.00"]


def test_without_a_gpu_the_command_says_what_can_be_done(capsys, monkeypatch):
    monkeypatch.setattr(bench_gpu, "detect_machine", lambda: Machine("cpu", 1, 2**40, "x86_64 CPU"))
    assert door.main(["bench", "gpu"]) == 2
    assert "--tiny" in capsys.readouterr().err


# ---------------------------------------------------------------- a row


@pytest.mark.slow
def test_the_rows_of_a_size_train_a_model_that_a_cpu_carries(monkeypatch, tmp_path):
    def measure_here(config: Config, *, timeout_s: float, **options) -> dict[str, object]:
        torch._dynamo.reset()  # as in a new process
        return bench_gpu.measure_row(config, **options)

    monkeypatch.setattr(bench_gpu, "run_row", measure_here)
    monkeypatch.setattr(bench_gpu, "SIZES", ("1B",))
    for keys in bench_gpu.MODES.values():  # inductor takes half a minute and a C++ compiler
        if keys:
            monkeypatch.setitem(keys, "compile.backend", "eager")
    report = bench_gpu.bench_gpu(n_rounds=3, n_steps=1, out=str(tmp_path / "rows.jsonl"), tiny=True)
    assert not dist.is_initialized()
    assert report.absent == {}
    assert list(report.step_times_s) == ROWS[6:]
    assert all(len(times_s) == 3 for times_s in report.step_times_s.values())
    for line in read_lines(tmp_path / "rows.jsonl"):
        first, last = line["first_and_last_loss"]
        assert math.log(512) < last < first < 10, "random weights know nothing, and the same tokens again are easier"
        assert line["matmul_flops"]["bfloat16"] > 0
    values = json.loads(json.dumps(report_for_programs(report)))
    assert values["ratios"].keys() == {"1B compile", "1B compile + float8"}
    assert values["contenders"]["1B eager"]["mfu_full"] is None


def test_a_row_has_a_process_of_its_own_that_ends_with_it():
    others = set(multiprocessing.active_children())
    config = bench_gpu.build_rows(Machine("cpu", 1, 2**40, "x86_64 CPU"), tiny=True)["8B eager"][0]
    result = bench_gpu.run_row(config, n_rounds=3, n_steps=1, timeout_s=120)
    assert "failed" not in result and len(result["step_time_s"]) == 3
    assert not dist.is_initialized() and set(multiprocessing.active_children()) == others
