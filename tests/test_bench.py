"""bench: who is measured in which order, the arithmetic of the ratios, and the command. Never how fast anything is."""

import gc
import json
import logging
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from unittest.mock import patch

import compare
import pytest
import torch
import torch.distributed as dist

from torchtitan_lite import __main__ as door
from torchtitan_lite.components import optim
from torchtitan_lite.components.log import LineFormatter
from torchtitan_lite.components.metrics import StepMetrics, format_console_lines
from torchtitan_lite.config.machine import Gpu
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.schema import Compile, Model, Training, with_value
from torchtitan_lite.tools.bench import command as bench
from torchtitan_lite.tools.bench import contenders, rounds
from torchtitan_lite.tools.bench import io as bench_io
from torchtitan_lite.tools.bench import peers as bench_peers
from torchtitan_lite.tools.bench import step as bench_step
from torchtitan_lite.tools.bench.bare_3d import Bare3D
from torchtitan_lite.tools.bench.command import compare_rounds, describe, report_for_programs
from torchtitan_lite.tools.bench.contenders import CONTENDERS, EXPERTS_CONFIG, ON_8_RANKS, RATIO_OF
from torchtitan_lite.tools.bench.rounds import Absent, BenchFailed, Report, measure_rounds
from torchtitan_lite.tools.bench.step import measure_step_memory, take_turns
from torchtitan_lite.tools.verify.ranks import RankFailure

TINY_CONFIG = replace(
    contenders.STEP_CONFIG,
    model=Model(flavor="debug", dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=128),
    training=Training(local_batch_size=2, seq_len=16, mixed_precision_param="float32"),
    compile=Compile(backend="eager"),  # inductor takes half a minute and a C++ compiler
)
TINY_3D_CONFIG = replace(contenders.STEP_3D_CONFIG, model=TINY_CONFIG.model, training=TINY_CONFIG.training)
TINY_EXPERTS_CONFIG = replace(
    EXPERTS_CONFIG,
    model=Model(flavor="debug_moe", dim=32, n_layers=2, n_heads=4, n_kv_heads=2, expert_ffn_dim=64, vocab_size=512),
    training=TINY_CONFIG.training,
)


@pytest.fixture
def on_the_pool(pool, monkeypatch):
    """Ranks of a bench are those of the tests' own pool."""
    monkeypatch.setattr(bench_step, "RankPool", lambda n_ranks: nullcontext(pool))


def run_tiny() -> Report:
    configs = {"config": TINY_CONFIG, "config_3d": TINY_3D_CONFIG, "config_experts": TINY_EXPERTS_CONFIG}
    return bench_step.bench_step(n_rounds=3, n_steps=1, **configs)


def make_report(step_times_s: dict[str, list[float]]) -> Report:
    ratio_of = {"bare_loop": ("trainer", "bare_loop"), "compile_over_eager": ("compiled", "trainer")}
    n_tokens = dict.fromkeys(step_times_s, 1000)
    return Report({"device": "x"}, "tokens", n_tokens, step_times_s, {"compiled": "no compiler"}, ratio_of)


# ---------------------------------------------------------------- rounds


def test_contenders_take_turns_timed_per_step_from_an_idle_device_to_an_idle_device():
    """Another one is first each round."""
    events, clock = [], count()
    times_s = measure_rounds(
        {name: lambda name=name: events.append(name) for name in "ab"},
        n_rounds=2,
        n_steps=4,
        wait_for_device=lambda: events.append("wait"),
        read_clock_s=lambda: events.append("clock") or next(clock),
        clean_up=lambda: events.append("clean"),
    )
    turns = [["wait", "clock", *name * 4, "wait", "clock", "clean"] for name in "abba"]
    assert events == sum(turns, [])
    assert times_s == {"a": [0.25, 0.25], "b": [0.25, 0.25]}


def test_no_garbage_is_collected_while_the_clock_runs_and_again_afterwards():
    seen = []

    def step() -> None:
        seen.append(gc.isenabled())
        if len(seen) == 2:
            raise KeyError("a step may fail")

    with pytest.raises(KeyError):
        measure_rounds({"a": step}, n_rounds=1, n_steps=2)
    assert seen == [False, False]
    assert gc.isenabled()


def test_a_ratio_is_the_median_of_the_ratios_of_each_round_and_a_speed_is_work_over_time():
    # The machine slows down from round to round. Medians of the speeds alone would say 2.0 / 4.0 the wrong way round.
    report = make_report({"trainer": [1.0, 2.0, 8.0], "bare_loop": [2.0, 1.0, 4.0]})
    assert compare_rounds(report) == {"bare_loop": [2.0, 0.5, 0.5]}
    values = report_for_programs(report)
    assert values["ratios"] == {"bare_loop": 0.5}
    assert values["contenders"]["trainer"]["tokens_per_s"] == {"median": 500.0, "min": 125.0, "max": 1000.0}
    report.units_per_step["bare_loop"] = 250
    assert compare_rounds(report) == {"bare_loop": [8.0, 2.0, 2.0]}


def test_the_table_has_every_contender_ratio_figure_and_what_is_absent():
    report = make_report({"trainer": [1.0, 1.0, 1.0], "bare_loop": [0.5, 0.5, 0.25]})
    table = describe(replace(report, figures={"memory_mib": [30.0, 10.0, 20.0]}))
    rows = [line.split() for line in table.splitlines()]
    assert ["trainer", "1000", "1000", "-", "1000", "1.000"] in rows
    assert ["bare_loop", "0.500", "0.250", "-", "0.500", "trainer", "/", "bare_loop"] in rows
    assert ["compiled", "absent:", "no", "compiler"] in rows
    assert ["memory_mib", "20.00", "10.00", "-", "30.00"] in rows
    assert "compile_over_eager" not in table


def test_the_memory_of_a_step_is_the_most_that_it_had_allocated_at_once():
    kept_before = [torch.ones(5000)]

    def step() -> None:
        kept_before.clear()  # was not allocated by the step
        kept = torch.ones(1000)
        torch.ones(3000)  # gone at once
        kept_before.append(kept + torch.ones(500).sum())

    assert measure_step_memory(step, torch.device("cpu")) == pytest.approx(4 * 4000, abs=200)


@pytest.mark.parametrize(("visible", "asked"), [("1", "GPU-b"), ("GPU-b,0", "GPU-b"), (None, "GPU-a")])
def test_clocks_are_those_of_the_first_gpu_that_is_used_or_none(visible, asked, monkeypatch):
    gpus = [Gpu(str(index), uuid, "NVIDIA H200", 2**37) for index, uuid in enumerate(("GPU-a", "GPU-b"))]

    def answer(command, **options):
        if f"--id={asked}" not in command:
            raise subprocess.CalledProcessError(1, command)
        return subprocess.CompletedProcess(command, 0, "1980 MHz, 1980 MHz, 3201 MHz, 690.12 W, 61\n")

    monkeypatch.setattr(rounds.subprocess, "run", answer)
    monkeypatch.setattr(rounds, "list_gpus", lambda: gpus)
    monkeypatch.setattr(rounds.os, "environ", {"CUDA_VISIBLE_DEVICES": visible} if visible else {})
    assert (rounds.read_clocks()["clocks.sm"], rounds.read_clocks()["power.draw"]) == ("1980 MHz", "690.12 W")
    monkeypatch.setattr(rounds, "list_gpus", lambda: [Gpu("0", "GPU-c", "NVIDIA H200", 2**37)])
    monkeypatch.setattr(rounds.os, "environ", {})
    assert rounds.read_clocks() is None, "nvidia-smi has failed"


# ---------------------------------------------------------------- bench step


def test_step_measures_all_contenders_and_leaves_no_process_group_behind(on_the_pool):
    report = run_tiny()
    assert not dist.is_initialized()
    names = {contender for pair in RATIO_OF.values() for contender in pair}
    assert {name: len(times) for name, times in report.step_times_s.items()} == dict.fromkeys(names, 3)
    assert "MFU" not in describe(report) and "GiB" in describe(report)
    values = json.loads(json.dumps(report_for_programs(report)))
    assert values["ratios"].keys() == RATIO_OF.keys()
    assert all(isinstance(ratio, float) and ratio > 0 for ratio in values["ratios"].values())
    assert values["absent"] == {}
    assert values["shape"]["dim"] == 32 and values["batch"] == {"sequences": 2, "seq_len": 16}
    assert values["versions"]["torch"] == torch.__version__
    assert {"bench", "device", "clocks", "threads", "date", "parameters", "dtype", "rounds"} <= values.keys()
    for name in CONTENDERS:
        contender = values["contenders"][name]
        assert contender["mfu_full"] is None and contender["mfu_causal"] is None, "a CPU's peak is not known"
        # float32: gradients at least, and no more than a few times what this model's activations take
        assert 26784 * 4 / 2**30 < contender["memory_gib"] < 26784 * 80 / 2**30, name


def test_without_transformers_and_a_compiler_two_rows_say_so_and_the_rest_is_measured(monkeypatch, on_the_pool):
    def refuse(graph, inputs):
        raise RuntimeError("no C++ compiler here\nand much more")

    monkeypatch.setattr(contenders, "transformers", None)
    torch._dynamo.reset()  # what was compiled before needs no compiler
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, **options: compile(forward, backend=refuse))
    values = report_for_programs(run_tiny())
    theirs = dict.fromkeys(("transformers", "mixtral"), "transformers is not installed")
    assert values["absent"] == {**theirs, "compiled": "no C++ compiler here"}
    assert values["ratios"].keys() == RATIO_OF.keys() - {"transformers", "compile_over_eager", "experts_over_mixtral"}


def test_contenders_that_compute_something_else_are_not_compared(monkeypatch, capsys):
    build = optim.build_optimizer
    monkeypatch.setattr(
        "torchtitan_lite.step.build_optimizer",
        lambda section, parameters: build(replace(section, lr=section.lr * 1.1), parameters),
    )
    monkeypatch.setattr(bench, "BENCHES", {"step": run_tiny})
    assert bench.main(["step", "--json"]) == 1
    said = capsys.readouterr()
    assert "trainer and bare_loop" in said.err and said.out == ""


def norms_left_out():
    return patch.object(Bare3D, "normalize", lambda bare, x, name: x)


def test_a_hand_written_3d_step_that_computes_something_else_is_not_compared(pool):
    batch = contenders.make_batch(with_value(TINY_3D_CONFIG, "training.local_batch_size", 4))
    with pytest.raises(RankFailure, match="trainer_3d and bare_3d start from the same weights and do not compute"):
        compare.ranks_inside(pool, norms_left_out)(take_turns, 8, ON_8_RANKS, TINY_3D_CONFIG, batch, 1, 1)


# ---------------------------------------------------------------- bench step --peers

# A trainer that logs speeds and computes nothing. Its first steps are slow, and one of the later ones is.
STAND_IN = """
import re, sys
config = open(sys.argv[-1]).read()
n_steps, n_ranks = int(re.search(r"\\b(?:total_train_)?steps\\W+(\\d+)", config)[1]), int(sys.argv[1])
with open({starts!r}, "a") as starts:
    starts.write(f"{name} {{n_ranks}}\\n")
for step in range(1, n_steps + 1):
    print({line!r}.format(step, {speed} / (100 if step < 4 or step == 6 else 1)))
{ending}
"""
SPEEDS = {"torchtitan": "step: {0:2}  loss: -2.00000  memory:  0.00GiB(0.00%)  tps: {1:,.0f}  tflops: 0.02  mfu: 0.01%"}
SPEEDS["picotron"] = (
    "[rank 2] Step: {0:<5d} | Loss: 7.1 | Tokens/s: {1:.2f}K | Tokens/s/GPU: 9.99K | Tokens: 8K | MFU: 0%"
)
SPEEDS["torchtitan_lite"] = "07:29:31 step  {0}/9  loss 8.1  lr 8.00e-04  {1:,.0f} tok/s/rank  0.50 GiB  0.719 s"


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Return a function that makes stand-ins in tmp_path: name -> what they log as speed, and their last line of code.

    A rank of a real run is started by torchrun, which takes seconds: here a stand-in is told how many it stands for.
    """
    scripts = {"torchtitan": "torchtitan/train.py", "picotron": "train.py", "torchtitan_lite": "train.py"}

    def make(**trainers: tuple[float, str]) -> Path:
        for name, (speed, ending) in trainers.items():
            values = {"name": name, "line": SPEEDS[name], "speed": speed, "ending": ending}
            script = tmp_path / name / scripts[name]
            script.parent.mkdir(parents=True)
            script.write_text(STAND_IN.format(starts=str(tmp_path / "starts"), **values))
        return tmp_path

    def start(python: str, n_ranks: int) -> list[str]:
        code = "import runpy, sys; sys.argv[0:3] = sys.argv[2:0:-1]; runpy.run_path(sys.argv[0])"
        return [sys.executable, "-S", "-c", code, str(n_ranks)]

    monkeypatch.setattr(bench_peers, "start_ranks", start)
    monkeypatch.setattr(bench_peers, "REPOSITORY", tmp_path / "torchtitan_lite")
    command = "{checkout}/torchtitan/train.py --job.config_file {config}"
    torchtitan = replace(bench_peers.TRAINERS["torchtitan"], command=command)
    monkeypatch.setitem(bench_peers.TRAINERS, "torchtitan", torchtitan)
    return make


def test_peers_take_turns_and_the_ratio_is_that_of_the_speeds_they_log(stand_ins, tmp_path, capsys):
    """Medians of the steps after the warm-up, counted over all ranks. picotron logs thousands, of all ranks at once."""
    folder = stand_ins(torchtitan=(1500, ""), picotron=(6, ""), torchtitan_lite=(3000, ""))
    assert door.main(["bench", "step", "--peers", str(folder), "--steps", "5", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    expected = {"torchtitan": 2.0, "picotron": 0.5, "torchtitan_3d": 2.0, "picotron_3d": 4.0}
    assert values["ratios"] == pytest.approx(expected, rel=0.01)
    assert values["contenders"]["torchtitan_3d"]["tokens_per_s"]["median"] == pytest.approx(12000)
    turns = ["torchtitan", "picotron", "torchtitan_lite"]
    orders = [turns[first:] + turns[:first] for first in range(3)]
    expected = [f"{name} {n_ranks}" for n_ranks in (1, 8) for order in orders for name in order]
    assert (tmp_path / "starts").read_text().splitlines() == expected


def test_a_peer_that_fails_is_absent_with_its_exception_and_is_not_started_again(stand_ins, tmp_path):
    ending = "if n_ranks == 8: raise AssertionError('Torch not compiled with CUDA enabled')"
    folder = stand_ins(torchtitan=(1500, ending), picotron=(6, "sys.exit(1)"), torchtitan_lite=(3000, ""))
    report = bench_peers.bench_peers(peers=folder, n_steps=5)
    assert report.absent.keys() == {"torchtitan_3d", "picotron", "picotron_3d"}
    assert report.absent["torchtitan_3d"].startswith(
        "AssertionError: Torch not compiled with CUDA enabled (what it needs"
    )
    assert report.absent["picotron"].startswith("[rank 2] Step: 8")
    assert compare_rounds(report).keys() == {"torchtitan"}
    assert (tmp_path / "starts").read_text().splitlines().count("picotron 1") == 1


def test_a_peer_that_hangs_is_stopped_and_one_that_logs_too_little_is_not_measured(stand_ins):
    folder = stand_ins(picotron=(6, "import signal; signal.pause()"), torchtitan_lite=(3000, ""))
    config = folder / "picotron.config"
    config.write_text('{"total_train_steps": 8}')
    with pytest.raises(Absent, match="it took longer than 1 s"):
        bench_peers.run("picotron", folder / "picotron", config, 1, timeout_s=1)
    output = bench_peers.run("torchtitan_lite", folder / "torchtitan_lite", config, 1, timeout_s=60)
    ours = bench_peers.TRAINERS["torchtitan_lite"]
    assert bench_peers.read_speed(ours, output, n_ranks=1, n_steps=8) == 3000
    with pytest.raises(Absent, match="speed of 8 steps, not of 9"):
        bench_peers.read_speed(ours, output, n_ranks=1, n_steps=9)


def test_our_speed_is_read_from_the_line_that_train_logs():
    formatter = LineFormatter(rank=0, date_format="%H:%M:%S", color=False)
    output = ""
    for step in range(1, 5):
        metrics = StepMetrics(step, 6.1, 1.2, 8e-4, 1000, 12345.4, None, None, 0.4, 0.25, 0.01)
        (line,) = format_console_lines(metrics, n_steps=4)
        output += formatter.format(logging.makeLogRecord({"msg": line, "levelno": logging.INFO})) + "\n"
    ours = bench_peers.TRAINERS["torchtitan_lite"]
    assert bench_peers.read_speed(ours, output, n_ranks=2, n_steps=4) == 2 * 12345


def test_the_reason_of_a_failure_is_the_first_exception_of_a_rank():
    """torchrun's own comes after it."""
    output = "Traceback:\n  x\n[rank3]: RuntimeError: no CUDA\n...elastic.errors.ChildFailedError: \n=====\n"
    assert bench_peers.find_reason(output) == "[rank3]: RuntimeError: no CUDA"
    assert bench_peers.find_reason("killed\n\n") == "killed" and bench_peers.find_reason("") == "it printed nothing"


@pytest.mark.parametrize("folders", [None, ["nanotron"]])
def test_a_folder_without_peers_is_refused_before_anything_starts(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_peers, "run", None)
    for name in folders or []:
        (tmp_path / "peers" / name).mkdir(parents=True)
    assert door.main(["bench", "step", "--peers", str(tmp_path / "peers")]) == 2
    why = "it has no folder torchtitan or picotron" if folders else "there is no such folder"
    said = capsys.readouterr()
    assert why in said.err and "Beside other trainers" in said.err and said.out == ""


# ---------------------------------------------------------------- bench io


def test_io_has_one_ratio_for_checkpoint_data_and_start_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    started = []
    monkeypatch.setattr(bench_io, "START", [sys.executable, "-S", "-c", "0"])
    read = bench_io.SampleStream.batch
    monkeypatch.setattr(
        bench_io.SampleStream,
        "batch",
        lambda self, step, rows: started.append((step, rows)) or read(self, step, rows),
    )
    report = bench_io.bench_io(n_rounds=3, n_tensors=1, n_tokens=20_000, n_windows=16)
    assert list(tmp_path.iterdir()) == [] and not dist.is_initialized()
    n_rows = Training.local_batch_size
    n_batches = 16 // n_rows
    assert started == [(step, range(n_rows)) for step in range(4 * n_batches)], "one turn more than rounds, to warm up"
    times_s, ratios = report.step_times_s, compare_rounds(report)
    for number in range(3):
        slower = max(times_s["write"][number], times_s["hash"][number])
        assert ratios["save"][number] == pytest.approx(slower / times_s["save"][number])
    values = json.loads(json.dumps(report_for_programs(report)))
    assert values["ratios"].keys() == {"save", "batches", "start"}


def test_a_start_that_fails_ends_the_bench_with_its_output(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_io, "START", [sys.executable, "-S", "-c", "raise SystemExit('out of luck')"])
    with pytest.raises(BenchFailed, match="out of luck"):
        bench_io.build_starts(tmp_path)["start"]()


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize("args", [["speed"], ["step", "--rounds", "2"], ["io", "--x", "3"]])
def test_wrong_input_ends_with_status_2(args):
    with pytest.raises(SystemExit) as ended:
        door.main(["bench", *args])
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OSError(28, "No space left on device"), 1),
        (BenchFailed("trainer and bare_loop do not compute the same"), 1),
        (ConfigError([Problem("bench gpu", None, "no GPU", "Use --tiny")]), 2),
    ],
)
def test_a_bench_that_fails_prints_no_report(error, status, monkeypatch, capsys):
    def fail() -> Report:
        raise error

    monkeypatch.setattr(bench, "BENCHES", {"io": fail})
    assert bench.main(["io"]) == status
    printed = capsys.readouterr()
    assert printed.err and printed.out == ""


@pytest.mark.parametrize(
    ("args", "expected"), [([], {}), (["--rounds", "7", "--steps", "2"], {"n_rounds": 7, "n_steps": 2})]
)
def test_the_command_passes_on_what_is_given_and_prints_one_report(args, expected, monkeypatch, capsys):
    asked = []

    def measure(**options) -> Report:
        asked.append(options)
        return make_report({"trainer": [1.0] * 3, "bare_loop": [1.0] * 3})

    monkeypatch.setattr(bench, "BENCHES", {"step": measure})
    assert door.main(["bench", "step", *args, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ratios"] == {"bare_loop": 1.0}
    assert door.main(["bench", "step", *args]) == 0
    assert "trainer / bare_loop" in capsys.readouterr().out
    assert asked == [expected] * 2
