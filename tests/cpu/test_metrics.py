"""Test the metrics of a run: how they are measured and computed, the console line, metrics.jsonl and TensorBoard."""

import logging
from pathlib import Path
from unittest.mock import MagicMock, Mock, patch

import pytest
from checkpoints import limit_files
from marks import read_lines
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from warm_start import read_records

from torchtitan_lite.config.block import count_flops_per_token
from torchtitan_lite.config.machine import peak_flops
from torchtitan_lite.config.schema import Config, Metrics, Training
from torchtitan_lite.extensions import wandb_sink
from torchtitan_lite.metrics import RunMetrics, describe_speed
from torchtitan_lite.models.llama3.table import FLAVORS

# torchtitan's published 8B row: 8 H100, one sequence of 8,192 tokens each, 5,762 tokens/s per GPU
NO_TENSORBOARD = Metrics(enable_tensorboard=False)
FLOPS = count_flops_per_token(FLAVORS["8B"], seq_len=8192)
STEP = {
    "loss": 6.123456,
    "grad_norm": 1.23456,
    "lr": 8e-4,
    "lr/*norm*": 4e-4,
    "peak_memory_gib": 1.5,
    "remaining_s": 5025.4,
    "step_time_s": 8192 / 5762,
    **describe_speed(5762, FLOPS, peak_flops("NVIDIA H100 80GB HBM3")),
}
VALIDATION = {"val_loss": 5.5, "val_perplexity": 244.69, "val_bits_per_byte": 2.25}
EXPERTS = {
    "expert_max_over_mean": 2.0,
    "expert_dead_share": 0.125,
    "router_entropy": 1.25,
    "expert_loads": [[4, 0]],
}


def make_writer(
    folder: Path, section: Metrics = NO_TENSORBOARD, resumed_step: int = 0
) -> RunMetrics:
    config = Config(training=Training(steps=2000), metrics=section)
    spec = MagicMock(config=config, model_args=FLAVORS["8B"])
    return RunMetrics(MagicMock(), spec, folder, resumed_step, MagicMock())


def close(writer: RunMetrics) -> None:
    # without a last line on the console
    writer.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return a dict mapping each tag to the steps and values of the events that TensorBoard shows."""
    events = EventAccumulator(str(folder)).Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def list_steps(folder: Path) -> list[int]:
    return [record["step"] for record in read_records(folder)]


@pytest.fixture
def list_logged(caplog, monkeypatch):
    """Return a function that lists the log lines of a level (INFO by default). The terminal is 200 columns wide."""
    monkeypatch.setenv("COLUMNS", "200")
    caplog.set_level(logging.INFO, "torchtitan_lite")

    def list_lines(level: str = "INFO") -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelname == level]

    return list_lines


# -- what is written

# By hand: 8,030 M parameters without embedding and norms are 7,505 M. 6 * 7.505e9 + 12 * 32 * 4096 * 8192 = 45.03e9 +
# 12.885e9 = 57.91 GFLOP per token; * 5,762 / 989e12 = 33.74 %. If the masked half of attention is not counted, a token
# takes 51.47 GFLOP.
LINES = """
step   10/2000  loss 6.12346  grad_norm 1.2346  1:23:45 left  5,762 tok/s/rank  MFU 33.7%  lr 8.00e-04  1.5 GiB  1.42 s
step   10/2000  loss 6.12346  grad_norm 1.2346  1:23:45 left  5,762 tok/s/rank  lr 8.00e-04  1.5 GiB  1.42 s
step   10/2000  loss 6.12346  grad_norm 1.2346  1:23:45 left  5,762 tok/s/rank  MFU 33.7%  experts 2.0x mean, 12% dead\
  lr 8.00e-04  1.5 GiB  1.42 s
step   10/2000  val_loss 5.50000  perplexity 244.7  2.2500 bits/byte
step   10/2000  loss 6.12346  grad_norm 1.2346  1:23:45 left
"""


def test_steps_and_validations_have_console_lines_that_fit_the_terminal_and_show_mfu_if_it_is_known(
    tmp_path, list_logged, monkeypatch
):
    writer = make_writer(tmp_path)
    writer.record("start", 0, world_size=8)
    writer.record("step", 10, **STEP)
    writer.record("step", 10, **(STEP | describe_speed(5762, FLOPS, None)))
    writer.record("step", 10, **STEP, **EXPERTS)
    writer.record("validation", 10, **VALIDATION)
    monkeypatch.setenv("COLUMNS", "80")
    writer.record("step", 10, **STEP)
    assert list_logged() == LINES.strip().splitlines()


def test_a_record_is_a_json_object_and_a_number_that_is_not_finite_is_null(tmp_path):
    writer = make_writer(tmp_path)
    writer.record("step", 10, **STEP)
    writer.record("step", 20, **(STEP | {"loss": float("nan"), "grad_norm": float("inf")}))
    first, second = read_records(tmp_path)  # before close
    assert first["mfu_full"] == pytest.approx(0.3374, abs=5e-5)
    assert first["mfu_causal"] == pytest.approx(0.2999, abs=5e-5)
    assert first["tokens_per_s_per_rank"] == pytest.approx(5762)
    assert first.pop("time").startswith("20")
    assert first == {"kind": "step", "step": 10, **STEP}
    assert second["loss"] is None
    assert second["grad_norm"] is None
    assert second["lr"] == 8e-4
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


# tag in torchtitan | the last value that TensorBoard shows
LAST = """
grad_norm | 1.23456
throughput(tps) | 5762
mfu(%) | 33.74
time_metrics/data_loading(%) | 4
memory/max_active(GiB) | 1.5
memory/max_active(%) | 20
memory/num_ooms | 1
experts/dead_share | 0.125
validation_metrics/bits_per_byte | 2.25
"""


def test_a_killed_and_resumed_run_leaves_each_step_once_and_tensorboard_has_torchtitans_tags(
    tmp_path,
):
    section = Metrics(save_tb_folder="events")
    tmp_path = tmp_path / "my_run"
    tmp_path.mkdir()
    killed = make_writer(tmp_path, section)
    for step in (1, 10, 20, 30):
        killed.record("step", step, **(STEP | {"loss": 1.0}))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4')  # the kill came while this line was written
    # The writer is never closed, as in a run that was killed. Everything that was logged must be on disk.
    events = read_events(tmp_path / "events" / "my_run")
    assert [step for step, _ in events["grad_norm"]] == [1, 10, 20, 30]
    assert "experts/dead_share" not in events

    resumed = make_writer(tmp_path, section, resumed_step=20)
    more = {"loss": 2.0, "peak_memory_share": 0.2, "data_time_share": 0.04}
    for step in (30, 40):
        resumed.record("step", step, **(STEP | more), n_ooms=1, **EXPERTS)
    resumed.record("validation", 40, **VALIDATION)
    close(resumed)
    close(killed)
    losses = [(1, 1.0), (10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0)]
    lines = read_records(tmp_path)
    assert [(line["step"], line["loss"]) for line in lines if "loss" in line] == losses
    events = read_events(tmp_path / "events" / "my_run")
    assert events["loss_metrics/global_avg_loss"] == losses
    for tag, value in read_lines(LAST):
        assert events[tag][-1][1] == pytest.approx(float(value), rel=1e-3), tag


# -- what cannot be written


def test_a_full_disk_causes_one_line_for_each_file_and_its_records_are_written_later(
    tmp_path, list_logged
):
    events = tmp_path / "tb" / tmp_path.name
    events.parent.write_text("a file")  # this file prevents the creation of the folder
    writer = make_writer(tmp_path, Metrics())
    writer.record("step", 1, **STEP)
    events.parent.unlink()
    writer.record("step", 2, **STEP)
    paths = [tmp_path / "metrics.jsonl", *events.iterdir()]
    largest = max(path.stat().st_size for path in paths)
    with limit_files(largest + 100):
        for step in range(3, 9):
            writer.record("step", step, **STEP)
    writer.record("step", 9, **STEP)
    close(writer)
    for path, named in zip([events, tmp_path / "metrics.jsonl"], list_logged("ERROR"), strict=True):
        assert str(path) in named
    steps = list(range(1, 10))
    assert list_steps(tmp_path) == steps
    assert [step for step, _ in read_events(events)["grad_norm"]] == steps[1:]
    assert len(list_logged()) == len(steps)


def test_a_run_ends_although_its_last_records_cannot_be_written(tmp_path, list_logged):
    writer = make_writer(tmp_path)
    with limit_files(10):
        writer.record("step", 1, **STEP)
        close(writer)
    assert len(list_logged("ERROR")) == 1


def test_records_that_cannot_be_truncated_are_kept_and_the_console_continues(tmp_path, list_logged):
    for step in (1, 3):
        make_writer(tmp_path, resumed_step=9).record("step", step, **STEP)
    (tmp_path / "metrics.jsonl.new").mkdir()  # raises the error of a full disk
    make_writer(tmp_path, resumed_step=1).record("step", 2, **STEP)
    (error,) = list_logged("ERROR")
    assert "metrics.jsonl" in error
    assert list_steps(tmp_path) == [1, 3]
    assert list_logged()[-1].startswith("step    2/")


def test_records_of_a_start_that_was_not_resumed_are_kept(tmp_path):
    (tmp_path / "metrics-1.jsonl").write_text("of a start before")
    make_writer(tmp_path).record("start", 0)  # ended before its first step
    killed = make_writer(tmp_path)
    killed.record("start", 0)
    killed.record("step", 1, **STEP)
    before = (tmp_path / "metrics.jsonl").read_text()
    again = make_writer(tmp_path)
    again.record("step", 1, **STEP)
    assert list_steps(tmp_path) == [1]
    assert (tmp_path / "metrics-1.jsonl").read_text() == "of a start before"
    assert (tmp_path / "metrics-2.jsonl").read_text() == before
    assert before.count('"start"') == 2


def test_lines_that_are_not_records_move_to_a_different_file(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1}\n[3]\nof another program\n')
    make_writer(tmp_path).record("step", 1, **STEP)
    assert "another program" in (tmp_path / "metrics-1.jsonl").read_text()


def test_a_resumed_run_continues_its_wandb_run_and_a_full_disk_leaves_no_partial_id(tmp_path):
    wandb = Mock()
    section = Metrics(enable_tensorboard=False, enable_wandb=True)
    with patch.object(wandb_sink, "import_extra", return_value=wandb):
        with limit_files(8):
            make_writer(tmp_path, section).record("step", 1, **STEP)
        assert not (tmp_path / "wandb_id").exists()
        for resumed_step in (0, 10):
            writer = make_writer(tmp_path, section, resumed_step)
            writer.record("start", resumed_step, world_size=8)
            writer.record("step", resumed_step + 10, **STEP)
            close(writer)
    run_id = (tmp_path / "wandb_id").read_text()
    started = [(call.kwargs["id"], call.kwargs["resume"]) for call in wandb.init.call_args_list]
    assert started == [(run_id, "allow")] * 2
    run = wandb.init.return_value
    logged = [(call.kwargs["step"], call.args[0]["lr"]) for call in run.log.call_args_list]
    assert logged == [(10, 8e-4), (20, 8e-4)] and run.finish.call_count == 2
