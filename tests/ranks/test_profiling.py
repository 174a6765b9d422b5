"""Test profiling: paths and contents of traces and memory snapshots. test_report.py tests traces of a run on several
ranks."""

from pathlib import Path

import pytest
import torch
from checkpoints import limit_files
from folders import list_files, load_json
from marks import each_row

from torchtitan_lite.components.diagnosis import explain_out_of_memory
from torchtitan_lite.components.profiling import profile_steps
from torchtitan_lite.config.schema import Profiling

# At the end of the first period, torch warns that the profiler clears its events. They are cleared on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")


def run_loop(section: Profiling, folder, *, n_steps: int, resumed_step: int = 0) -> None:
    """Run a loop in which step n multiplies an (n, n) matrix. The sizes in a trace therefore identify the steps."""
    with profile_steps(section, folder, rank=1, resumed_step=resumed_step) as end_step:
        for step in range(resumed_step + 1, resumed_step + n_steps + 1):
            torch.ones(step, step) @ torch.ones(step, step)
            end_step()


def traced_matmuls(path) -> list[int]:
    """Return the steps whose matmul is in the trace."""
    events = load_json(path)["traceEvents"]
    return [
        event["args"]["Input Dims"][0][0] for event in events if event.get("name") == "aten::mm"
    ]


@each_row("resumed_step", [0, 100])
def test_traces_contain_the_last_steps_of_every_full_period_and_their_number(
    tmp_path, resumed_step
):
    period = {"profile_freq": 3, "profiler_warmup": 1, "profiler_active": 2}
    section = Profiling(enable_profiling=True, save_traces_folder="elsewhere", **period)
    run_loop(section, tmp_path, n_steps=8, resumed_step=resumed_step)
    steps = [resumed_step + 3, resumed_step + 6]
    traces = {f"elsewhere/step-{step}/rank-1.json": step for step in steps}
    assert list_files(tmp_path) == set(traces)
    for trace, step in traces.items():
        assert traced_matmuls(tmp_path / trace) == [step - 1, step]


# ---------------------------------------------------------------- memory snapshots

BOTH = Profiling(
    enable_memory_snapshot=True, enable_profiling=True, profile_freq=3, profiler_warmup=1
)


@pytest.fixture
def recording(monkeypatch):
    """Replace CUDA's recording of allocations with a stub. Return the list of the stub's calls."""
    asked = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **options: asked.append(options))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: Path(path).write_text("snapshot."))
    return asked


def test_memory_snapshots_are_written_with_the_traces_and_recording_ends_with_the_loop(
    tmp_path, recording
):
    run_loop(BOTH, tmp_path, n_steps=7, resumed_step=10)
    expected = set()
    for step in (13, 16):
        expected |= {
            f"memory_snapshot/step-{step}/rank-1.pickle",
            f"traces/step-{step}/rank-1.json",
        }
    assert list_files(tmp_path) == expected
    assert [sorted(options) for options in recording] == [["max_entries"], ["enabled"]]
    assert recording[1] == {"enabled": None}


def test_out_of_memory_writes_a_snapshot_and_the_error_is_raised_again(tmp_path, recording):
    section = Profiling(enable_memory_snapshot=True, save_memory_snapshot_folder="memory")
    with (
        pytest.raises(RuntimeError) as caught,
        profile_steps(section, tmp_path, rank=0) as end_step,
    ):
        end_step()
        raise RuntimeError("a pipeline stage failed") from torch.OutOfMemoryError(
            "CUDA out of memory"
        )
    assert list_files(tmp_path) == {"memory/step-2-out-of-memory/rank-0.pickle"}
    assert recording[-1] == {"enabled": None}
    explain_out_of_memory(caught.value, tmp_path, 8)
    why, hint = str(caught.value).splitlines()
    assert why == "a pipeline stage failed" and hint.endswith(
        f"plan --gpus 8 --config {tmp_path}/config.toml"
    )


# ---------------------------------------------------------------- a disk that is full


def dump_large(path: str) -> None:
    Path(path).write_bytes(bytes(9999))


@pytest.mark.parametrize("is_folder", [True, False], ids=["no folder", "full"])
def test_a_file_that_cannot_be_written_causes_a_one_sentence_error_and_leaves_no_file(
    tmp_path, recording, monkeypatch, is_folder
):
    said: dict[str, list[str]] = {"error": [], "info": []}
    monkeypatch.setattr("torchtitan_lite.components.log.logger.error", said["error"].append)
    monkeypatch.setattr("torchtitan_lite.components.profiling.logger.info", said["info"].append)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump_large)
    folders = ("traces", "memory_snapshot")
    if is_folder:
        for name in folders:
            (tmp_path / name).touch()
    with limit_files(1000):
        run_loop(BOTH, tmp_path, n_steps=7)
    assert said["info"] == []
    assert is_folder or "disk is full" in said["error"][0]
    for error, name in zip(said["error"], folders, strict=True):
        assert error.startswith(
            f"{tmp_path / name} cannot be written, and the run continues: [Errno"
        )
    assert not [path for path in tmp_path.rglob("*/step-*/*")]
