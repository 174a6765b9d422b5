"""Traces of torch.profiler: where they lie, what they hold, and that a loop that ends early leaves no half of one."""

import json

import pytest
import torch

from torchtitan_lite.components.profiling import profile_steps
from torchtitan_lite.config import Profiling

# torch says so at the end of the first period; that is what we want.
pytestmark = pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")


def run_loop(section: Profiling, folder, *, n_steps: int, resumed_step: int = 0) -> None:
    """Step n multiplies an (n, n) matrix, so that a trace tells which steps are in it."""
    with profile_steps(section, folder, rank=1, resumed_step=resumed_step) as profiler:
        for step in range(resumed_step + 1, resumed_step + n_steps + 1):
            torch.ones(step, step) @ torch.ones(step, step)
            profiler.step()


def list_traces(folder) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.json"))


def traced_matmuls(path) -> list[int]:
    """Steps whose matrix product the trace holds."""
    events = json.loads(path.read_text())["traceEvents"]
    return [event["args"]["Input Dims"][0][0] for event in events if event.get("name") == "aten::mm"]


def test_traces_hold_the_last_steps_of_every_period_and_bear_their_number(tmp_path):
    section = Profiling(enable_profiling=True, profile_freq=4, profiler_warmup=1, profiler_active=2)
    run_loop(section, tmp_path, n_steps=8)
    assert list_traces(tmp_path) == ["traces/step-4/rank-1.json", "traces/step-8/rank-1.json"]
    assert traced_matmuls(tmp_path / "traces/step-4/rank-1.json") == [3, 4]
    assert traced_matmuls(tmp_path / "traces/step-8/rank-1.json") == [7, 8]


def test_a_resumed_loop_numbers_its_traces_by_the_steps_of_the_run(tmp_path):
    section = Profiling(enable_profiling=True, profile_freq=3, profiler_warmup=1, save_traces_folder="elsewhere")
    run_loop(section, tmp_path, n_steps=3, resumed_step=100)
    assert list_traces(tmp_path) == ["elsewhere/step-103/rank-1.json"]
    assert traced_matmuls(tmp_path / "elsewhere/step-103/rank-1.json") == [103]


def test_a_loop_that_ends_within_a_recording_leaves_no_trace_of_it(tmp_path):
    section = Profiling(enable_profiling=True, profile_freq=4, profiler_warmup=1, profiler_active=2)
    run_loop(section, tmp_path, n_steps=7)
    assert list_traces(tmp_path) == ["traces/step-4/rank-1.json"]


def test_nothing_is_written_when_profiling_is_off(tmp_path):
    run_loop(Profiling(enable_profiling=False, profile_freq=2, profiler_warmup=0), tmp_path, n_steps=4)
    assert list(tmp_path.iterdir()) == []
