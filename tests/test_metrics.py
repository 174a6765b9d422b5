"""The numbers of a run: the clocks and the arithmetic behind them, console line, metrics.jsonl, TensorBoard."""

import json
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtitan_lite.components import metrics as metrics_module
from torchtitan_lite.components.expert_balance import ExpertLoad
from torchtitan_lite.components.log import ESCAPE_CODE
from torchtitan_lite.components.metrics import MetricsWriter, PeakMemory, StepMeter, StepTimes, read_peak_memory
from torchtitan_lite.config.block import FlopsPerToken, count_flops_per_token
from torchtitan_lite.config.flavors import FLAVORS
from torchtitan_lite.config.machine import peak_flops
from torchtitan_lite.config.schema import Metrics

PROCESS_STATUS = Path("/proc/self/status")

# torchtitan's published 8B row: 8 H100, one sequence of 8,192 tokens each, 5,762 tokens/s per GPU
RUN = {
    "n_steps": 2000,
    "resumed_step": 0,
    "tokens_per_step": 8 * 8192,
    "world_size": 8,
    "flops_per_token": count_flops_per_token(FLAVORS["8B"], seq_len=8192),
    "peak_flops": peak_flops("NVIDIA H100 80GB HBM3"),
    "settings": {"training": {"steps": 2000}},
}
STEP = {
    "loss": 6.123456,
    "grad_norm": 1.23456,
    "lr": 8e-4,
    "times": StepTimes(step_time_s=8192 / 5762, data_time_s=0.01),
    "memory": PeakMemory(peak_gib=1.5),
    "validation": {},
}
VALIDATION = {"val_loss": 5.5, "val_perplexity": 244.69, "val_bits_per_byte": 2.25}


def make_writer(folder: Path, section: Metrics | None = None, **changes) -> MetricsWriter:
    return MetricsWriter(folder, section or Metrics(enable_tensorboard=False), **(RUN | changes))


def read_lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


@pytest.fixture
def console(monkeypatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(metrics_module.logger, "info", lambda line: lines.append(ESCAPE_CODE.sub("", line)))
    return lines


# -- clocks and arithmetic


def test_the_meter_counts_everything_but_pauses_as_step_time_and_starts_anew_at_each_reading():
    now_s = 1000.0
    meter = StepMeter(lambda: now_s)
    for data_time_s, compute_time_s in ((1.0, 10.0), (3.0, 20.0)):
        with meter.loading():
            now_s += data_time_s
        now_s += compute_time_s
    with meter.paused():
        now_s += 100.0
    assert meter.read() == StepTimes(step_time_s=17.0, data_time_s=2.0)
    now_s += 0.5  # writing the log line belongs to the next step
    with meter.loading():
        now_s += 1.0
    now_s += 2.0
    assert meter.read() == StepTimes(step_time_s=3.5, data_time_s=1.0)


@pytest.mark.skipif(not PROCESS_STATUS.exists(), reason="needs Linux: the oracle is /proc")
def test_peak_memory_of_a_cpu_is_what_the_kernel_says_of_this_process():
    block = torch.ones(2**26, dtype=torch.uint8)
    (line,) = [line for line in PROCESS_STATUS.read_text().splitlines() if line.startswith("VmHWM")]  # kB
    peak_gib = int(line.split()[1]) / 2**20
    # getrusage may count the program that started this one, but a wrong unit would be 1,024 off.
    assert 0.95 * peak_gib < read_peak_memory(torch.device("cpu")).peak_gib < 100 * peak_gib
    assert block.numel() == 2**26


# -- what is written


def test_a_step_is_one_console_line_and_one_json_object_with_throughput_and_mfu(tmp_path, console):
    writer = make_writer(tmp_path)
    writer.write(10, **STEP)
    # By hand: 8,030 M parameters without embedding and norms are 7,505 M. 6 * 7.505e9 + 12 * 32 * 4096 * 8192 =
    # 45.03e9 + 12.885e9 = 57.91 GFLOP per token; * 5,762 / 989e12 = 33.74 %. Half the attention less: 51.47 GFLOP.
    assert console == [
        "step   10/2000  loss 6.12346  grad_norm 1.2346  lr 8.00e-04  5,762 tok/s/rank  MFU 33.7%  1.5 GiB  1.42 s"
    ]
    (values,) = read_lines(tmp_path)  # before close
    assert (values.pop("mfu_full"), values.pop("mfu_causal")) == pytest.approx((0.3374, 0.2999), abs=5e-5)
    assert values.pop("tokens_per_s_per_rank") == pytest.approx(5762)
    assert values == {
        "step": 10,
        "loss": 6.123456,
        "grad_norm": 1.23456,
        "lr": 8e-4,
        "tokens": 10 * 8 * 8192,
        "peak_memory_gib": 1.5,
        "step_time_s": 8192 / 5762,
        "data_time_s": 0.01,
        **dict.fromkeys(["val_loss", "val_perplexity", "val_bits_per_byte"]),
        **dict.fromkeys(["expert_max_over_mean", "expert_dead_share", "router_entropy"]),
    }
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_what_is_not_known_is_left_out_and_only_validation_has_a_line_of_its_own(tmp_path, console):
    writer = make_writer(tmp_path, peak_flops=None)
    writer.write(10, **STEP)
    writer.write(10, **(STEP | {"validation": VALIDATION}), experts=ExpertLoad(2.0, 1, 0.125, 1.25))
    assert "MFU" not in console[0]
    assert console[1:] == [
        console[0] + "  experts 2.0x mean, 12% dead",
        "step   10/2000  val_loss 5.50000  perplexity 244.7  2.2500 bits/byte",
    ]
    plain, validated = read_lines(tmp_path)
    assert (plain["mfu_full"], plain["mfu_causal"]) == (None, None)
    experts = {"expert_max_over_mean": 2.0, "expert_dead_share": 0.125, "router_entropy": 1.25}
    assert validated == plain | VALIDATION | experts


def test_a_loss_that_is_not_finite_is_still_json(tmp_path):
    make_writer(tmp_path).write(1, **(STEP | {"loss": float("nan"), "grad_norm": float("inf")}))

    def refuse(constant: str):
        raise ValueError(f"{constant} is not JSON")

    values = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (values["loss"], values["grad_norm"], values["lr"]) == (None, None, 8e-4)


def test_a_killed_and_resumed_run_leaves_each_step_once(tmp_path):
    killed = make_writer(tmp_path)
    for step in (1, 10, 20, 30):
        killed.write(step, **(STEP | {"loss": 1.0}))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4')  # the kill came while this line was written
    resumed = make_writer(tmp_path, resumed_step=20)
    for step in (30, 40):
        resumed.write(step, **(STEP | {"loss": 2.0}))
    lines = [(line["step"], line["loss"]) for line in read_lines(tmp_path)]
    assert lines == [(1, 1.0), (10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0)]


def test_tensorboard_has_torchtitans_tags_and_each_step_once_after_a_resume(tmp_path):
    section = Metrics(save_tb_folder="events")
    run = {"flops_per_token": FlopsPerToken(full=2 * 10**9, causal=10**9), "peak_flops": 10**14}
    killed = make_writer(tmp_path, section, **run)
    for step in (10, 20):
        killed.write(step, **(STEP | {"loss": 1.0}))
    # Never closed, as after a kill: what was logged is on disk all the same.
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [event.step for event in events.Scalars("grad_norm")] == [10, 20]
    assert not {"memory/max_reserved(GiB)", "experts/dead_share"} & set(events.Tags()["scalars"])

    resumed = make_writer(tmp_path, section, resumed_step=10, **run)
    more = {"loss": 2.0, "validation": VALIDATION, "times": StepTimes(0.25, 0.01)}
    more |= {"memory": PeakMemory(1.5, 20.0, 1.75, 25.0, n_alloc_retries=3, n_ooms=1)}
    resumed.write(20, **(STEP | more), experts=ExpertLoad(2.5, 1, 0.125, 1.25))
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
            "throughput(tps)": 32768.0,
            "tflops": 65.536,  # 32,768 tokens/s of 2 GFLOP each
            "mfu(%)": 65.536,
            "time_metrics/end_to_end(s)": 0.25,
            "time_metrics/data_loading(s)": 0.01,
            "time_metrics/data_loading(%)": 4.0,
            "memory/max_active(GiB)": 1.5,
            "memory/max_active(%)": 20.0,
            "memory/max_reserved(GiB)": 1.75,
            "memory/max_reserved(%)": 25.0,
            "memory/num_alloc_retries": 3.0,
            "memory/num_ooms": 1.0,
            "experts/max_over_mean": 2.5,
            "experts/dead_share": 0.125,
            "experts/router_entropy": 1.25,
            "validation_metrics/global_avg_loss": 5.5,
            "validation_metrics/perplexity": 244.69,
            "validation_metrics/bits_per_byte": 2.25,
        }
    )


FAKE_WANDB = """
import json

class init:
    def __init__(self, **given):
        self.file = open(given["dir"] + "/calls.jsonl", "a")
        self.note("init", given)

    def note(self, *call):
        self.file.write(json.dumps(call) + chr(10))
        self.file.flush()

    def log(self, values, step):
        self.note("log", step, values)

    def finish(self):
        self.note("finish")
"""


def test_wandb_gets_config_and_scalars_of_each_step(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    section = Metrics(enable_tensorboard=False, enable_wandb=True)
    for resumed_step in (0, 10):
        writer = make_writer(tmp_path, section, resumed_step=resumed_step)
        writer.write(resumed_step + 10, **(STEP | {"validation": VALIDATION}))
        writer.close()
    sys.modules.pop("wandb")
    first, *_, last = calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").open()]
    assert first == ["init", {"dir": str(tmp_path), "config": RUN["settings"], "resume": None}]
    assert calls[3][1]["resume"] == "auto" and last == ["finish"] and len(calls) == 6
    name, step, values = calls[1]
    assert (name, step, values["grad_norm"]) == ("log", 10, 1.23456)
    assert values["validation_metrics/global_avg_loss"] == 5.5


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
