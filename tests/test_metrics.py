"""The numbers of a run: the clocks and the arithmetic behind them, console line, metrics.jsonl, TensorBoard."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtitan_lite.components import metrics as metrics_module
from torchtitan_lite.components.log import ESCAPE_CODE
from torchtitan_lite.components.metrics import (
    MetricsWriter,
    PeakMemory,
    StepMeter,
    StepMetrics,
    StepTimes,
    compute_metrics,
    format_console_line,
    list_scalars,
    read_peak_memory,
)
from torchtitan_lite.config.flavors import FLAVORS, FlopsPerToken, count_flops_per_token
from torchtitan_lite.config.hardware import peak_flops
from torchtitan_lite.config.schema import Metrics

SOME_STEP = StepMetrics(
    step=10,
    loss=6.123456,
    grad_norm=1.23456,
    lr=8e-4,
    tokens=20480,
    tokens_per_s_per_rank=5762.4,
    mfu_full=0.337,
    mfu_causal=0.3,
    peak_memory_gib=1.5,
    step_time_s=0.25,
    data_time_s=0.01,
)
SOME_MEMORY = PeakMemory(peak_gib=1.5)
SOME_FLOPS = FlopsPerToken(full=2 * 10**9, causal=10**9)

PROCESS_STATUS = Path("/proc/self/status")


class FakeClock:
    """Time passes only when the test says so."""

    def __init__(self):
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def make_writer(folder, *, resumed_step=0, **section) -> MetricsWriter:
    return MetricsWriter(
        folder, Metrics(**section), n_steps=2000, resumed_step=resumed_step, flops_per_token=SOME_FLOPS
    )


# -- clocks and arithmetic


def test_meter_attributes_loading_to_data_time_and_everything_to_step_time():
    clock = FakeClock()
    meter = StepMeter(clock)
    for data_time_s, compute_time_s in ((1.0, 10.0), (3.0, 20.0)):
        with meter.loading():
            clock.advance(data_time_s)
        clock.advance(compute_time_s)
    assert meter.read() == StepTimes(step_time_s=17.0, data_time_s=2.0)


def test_meter_starts_anew_at_each_reading():
    clock = FakeClock()
    meter = StepMeter(clock)
    with meter.loading():
        clock.advance(5.0)
    meter.read()
    clock.advance(0.5)  # writing the log line belongs to the next step
    with meter.loading():
        clock.advance(1.0)
    clock.advance(2.0)
    assert meter.read() == StepTimes(step_time_s=3.5, data_time_s=1.0)


def test_what_is_paused_counts_for_no_step():
    clock = FakeClock()
    meter = StepMeter(clock)
    with meter.loading():
        clock.advance(1.0)
    clock.advance(2.0)
    with meter.paused():
        clock.advance(100.0)
    clock.advance(0.5)
    assert meter.read() == StepTimes(step_time_s=3.5, data_time_s=1.0)


def compute_8b_metrics(peak: float | None) -> StepMetrics:
    """torchtitan's published 8B row: 8 H100, one sequence of 8,192 tokens each, 5,762 tokens/s per GPU."""
    return compute_metrics(
        step=100,
        loss=2.0,
        grad_norm=1.0,
        lr=3e-4,
        times=StepTimes(step_time_s=8192 / 5762, data_time_s=0.01),
        memory=SOME_MEMORY,
        tokens_per_step=8 * 8192,
        world_size=8,
        flops_per_token=count_flops_per_token(FLAVORS["8B"], seq_len=8192),
        peak_flops=peak,
        validation={},
    )


def test_throughput_and_mfu_are_those_of_the_published_8b_row():
    metrics = compute_8b_metrics(peak_flops("NVIDIA H100 80GB HBM3"))
    assert metrics.tokens_per_s_per_rank == pytest.approx(5762)
    assert metrics.tokens == 100 * 8 * 8192
    # By hand: 8,030 M parameters without embedding and norms are 7,505 M. 6 * 7.505e9 + 12 * 32 * 4096 * 8192 =
    # 45.03e9 + 12.885e9 = 57.91 GFLOP per token; * 5,762 / 989e12 = 33.74 %. Half the attention less: 51.47 GFLOP.
    assert metrics.mfu_full == pytest.approx(0.3374, abs=5e-5)
    assert metrics.mfu_causal == pytest.approx(0.2999, abs=5e-5)


def test_mfu_is_unknown_where_the_peak_is():
    metrics = compute_8b_metrics(None)
    assert (metrics.mfu_full, metrics.mfu_causal) == (None, None)
    assert "MFU" not in format_console_line(metrics, 100)
    assert "mfu(%)" not in list_scalars(metrics, SOME_MEMORY, SOME_FLOPS)


@pytest.mark.skipif(not PROCESS_STATUS.exists(), reason="needs Linux: the oracle is /proc")
def test_peak_memory_of_a_cpu_is_what_the_kernel_says_of_this_process():
    block = torch.ones(2**26, dtype=torch.uint8)
    (line,) = [line for line in PROCESS_STATUS.read_text().splitlines() if line.startswith("VmHWM")]  # kB
    peak_gib = int(line.split()[1]) / 2**20
    # getrusage may count the program that started this one, but a wrong unit would be 1,024 off.
    assert 0.95 * peak_gib < read_peak_memory(torch.device("cpu")).peak_gib < 100 * peak_gib
    assert block.numel() == 2**26


# -- what is written


def test_console_line_of_a_step_says_all_in_one_line():
    line = ESCAPE_CODE.sub("", format_console_line(SOME_STEP, n_steps=2000))
    assert line == (
        "step   10/2000  loss  6.12346  grad_norm  1.2346  lr 8.00e-04  5,762 tokens/s/rank"
        "  MFU 33.7% (causal 30.0%)  1.50 GiB  0.250 s"
    )


def test_a_validated_step_says_so_behind_the_rest_and_to_tensorboard():
    validated = replace(SOME_STEP, val_loss=5.5, val_perplexity=244.69, val_bits_per_byte=2.25)
    line = ESCAPE_CODE.sub("", format_console_line(validated, n_steps=2000))
    plain = ESCAPE_CODE.sub("", format_console_line(SOME_STEP, n_steps=2000))
    assert line == plain + "  val_loss 5.50000  perplexity 244.7  2.2500 bits/byte"
    scalars, others = (list_scalars(metrics, SOME_MEMORY, SOME_FLOPS) for metrics in (validated, SOME_STEP))
    assert {tag: scalars[tag] for tag in scalars.keys() - others.keys()} == {
        "validation_metrics/global_avg_loss": 5.5,
        "validation_metrics/perplexity": 244.69,
        "validation_metrics/bits_per_byte": 2.25,
    }


def test_each_logged_step_is_one_console_line_and_one_json_object(tmp_path, monkeypatch):
    console_lines = []
    monkeypatch.setattr(metrics_module.logger, "info", console_lines.append)
    writer = make_writer(tmp_path, enable_tensorboard=False)
    writer.write(SOME_STEP, SOME_MEMORY)
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()] == [asdict(SOME_STEP)]  # before close
    assert console_lines == [format_console_line(SOME_STEP, 2000)]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    writer.close()


def test_a_loss_that_is_not_finite_is_still_json(tmp_path):
    writer = make_writer(tmp_path, enable_tensorboard=False)
    writer.write(replace(SOME_STEP, loss=float("nan"), grad_norm=float("inf"), mfu_full=None), SOME_MEMORY)
    writer.close()

    def refuse(constant: str):
        raise ValueError(f"{constant} is not JSON")

    values = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (values["loss"], values["grad_norm"], values["mfu_full"], values["lr"]) == (None, None, None, 8e-4)


def test_a_killed_and_resumed_run_leaves_each_step_once(tmp_path):
    killed = make_writer(tmp_path, enable_tensorboard=False)
    for step in (1, 10, 20, 30):
        killed.write(replace(SOME_STEP, step=step, loss=1.0), SOME_MEMORY)
    killed.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4')  # the kill came while this line was written
    resumed = make_writer(tmp_path, resumed_step=20, enable_tensorboard=False)
    for step in (30, 40):
        resumed.write(replace(SOME_STEP, step=step, loss=2.0), SOME_MEMORY)
    resumed.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0)]


def test_tensorboard_has_torchtitans_tags_and_each_step_once_after_a_resume(tmp_path):
    killed = make_writer(tmp_path, save_tb_folder="events")
    for step in (10, 20):
        killed.write(replace(SOME_STEP, step=step, loss=1.0), SOME_MEMORY)
    # Never closed, as after a kill: what was logged is on disk all the same.
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [event.step for event in events.Scalars("grad_norm")] == [10, 20]

    resumed = make_writer(tmp_path, resumed_step=10, save_tb_folder="events")
    resumed.write(replace(SOME_STEP, step=20, loss=2.0), SOME_MEMORY)
    resumed.close()
    killed.close()
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("loss_metrics/global_avg_loss")]
    assert losses == [(10, 1.0), (20, 2.0)]
    last = {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}
    assert last == pytest.approx(
        {
            "loss_metrics/global_avg_loss": 2.0,
            "grad_norm": 1.23456,
            "lr": 8e-4,
            "throughput(tps)": 5762.4,
            "tflops": 11.5248,  # 5762.4 tokens/s of 2 GFLOP each
            "mfu(%)": 33.7,
            "time_metrics/end_to_end(s)": 0.25,
            "time_metrics/data_loading(s)": 0.01,
            "time_metrics/data_loading(%)": 4.0,
            "memory/max_active(GiB)": 1.5,
        }
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: reads the statistics of torch's CUDA allocator")
def test_peak_memory_of_a_gpu_counts_from_the_last_reading():
    device = torch.device("cuda")
    read_peak_memory(device)
    base_gib = read_peak_memory(device).peak_gib
    block = torch.empty(2**28, dtype=torch.uint8, device=device)
    del block
    with_block, without = read_peak_memory(device), read_peak_memory(device)
    assert with_block.peak_gib - base_gib == pytest.approx(0.25, abs=0.002)
    assert without.peak_gib == pytest.approx(base_gib)
    assert with_block.reserved_gib >= with_block.peak_gib
    total_gib = torch.cuda.get_device_properties(device).total_memory / 2**30
    assert with_block.peak_percent == pytest.approx(100 * with_block.peak_gib / total_gib)
