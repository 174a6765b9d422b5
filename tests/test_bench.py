"""bench: who is measured in which order, the arithmetic of the ratios, and the command. Never how fast anything is."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import count

import pytest
import torch
import torch.distributed as dist

from torchtitan_lite import REPOSITORY
from torchtitan_lite import __main__ as door
from torchtitan_lite.components import optim
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.schema import Compile, Model, Training
from torchtitan_lite.tools.bench import command as bench
from torchtitan_lite.tools.bench import contenders
from torchtitan_lite.tools.bench.command import compare_rounds, describe, report_for_programs
from torchtitan_lite.tools.bench.contenders import CONTENDERS, RATIO_OF
from torchtitan_lite.tools.bench.rounds import BenchFailed, Report, measure_rounds
from torchtitan_lite.tools.bench.step import bench_step, measure_step_memory

TINY_CONFIG = replace(
    contenders.STEP_CONFIG,
    model=Model(flavor="debug", dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=128),
    training=Training(local_batch_size=2, seq_len=16, mixed_precision_param="float32"),
    compile=Compile(backend="eager"),  # inductor takes half a minute and a C++ compiler
)


def run_tiny() -> Report:
    return bench_step(n_rounds=3, n_steps=1, config=TINY_CONFIG)


def make_report(step_times_s: dict[str, list[float]]) -> Report:
    ratio_of = {"bare_loop": ("trainer", "bare_loop"), "compile_over_eager": ("compiled", "trainer")}
    n_tokens = dict.fromkeys(step_times_s, 1000)
    return Report({"device": "x"}, "tokens", n_tokens, step_times_s, {"compiled": "no compiler"}, ratio_of)


@pytest.mark.slow  # a Python of its own imports transformers: eight seconds
def test_transformers_prints_no_warnings_of_packages_that_it_imports():
    pytest.importorskip("torchao", reason="torchao is not installed; importing it warns")
    program = "import torch; from test_bench import TINY_CONFIG, contenders\n"
    program += "contenders.build_transformers(TINY_CONFIG, contenders.make_batch(TINY_CONFIG), torch.device('cpu'))"
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    answer = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert (answer.returncode, answer.stderr) == (0, "")


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


# ---------------------------------------------------------------- bench step


def test_step_measures_all_contenders_and_leaves_no_process_group_behind():
    report = run_tiny()
    assert not dist.is_initialized()
    assert {name: len(times) for name, times in report.step_times_s.items()} == dict.fromkeys(CONTENDERS, 3)
    assert "MFU" not in describe(report) and "GiB" in describe(report)
    values = json.loads(json.dumps(report_for_programs(report)))
    assert values["ratios"].keys() == RATIO_OF.keys() and values["absent"] == {}
    assert all(isinstance(ratio, float) and ratio > 0 for ratio in values["ratios"].values())
    assert values["shape"]["dim"] == 32 and values["batch"] == {"sequences": 2, "seq_len": 16}
    assert values["versions"]["torch"] == torch.__version__
    assert {"bench", "device", "clocks", "threads", "date", "parameters", "dtype", "rounds"} <= values.keys()
    for name in CONTENDERS:
        contender = values["contenders"][name]
        assert contender["mfu_full"] is None and contender["mfu_causal"] is None, "a CPU's peak is not known"
        # float32: gradients at least, and no more than a few times what this model's activations take
        assert 26784 * 4 / 2**30 < contender["memory_gib"] < 26784 * 80 / 2**30, name


def test_without_transformers_and_a_compiler_two_rows_say_so_and_the_rest_is_measured(monkeypatch):
    def refuse(graph, inputs):
        raise RuntimeError("no C++ compiler here\nand much more")

    monkeypatch.setattr(contenders, "transformers", None)
    torch._dynamo.reset()  # what was compiled before needs no compiler
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, **options: compile(forward, backend=refuse))
    values = report_for_programs(run_tiny())
    assert values["absent"] == {"transformers": "transformers is not installed", "compiled": "no C++ compiler here"}
    assert values["ratios"].keys() == {"bare_loop"}


def test_contenders_that_compute_something_else_are_not_compared(monkeypatch, capsys):
    build = optim.build_optimizer
    monkeypatch.setattr(
        "torchtitan_lite.build.build_optimizer",
        lambda section, parameters: build(replace(section, lr=section.lr * 1.1), parameters),
    )
    monkeypatch.setattr(bench, "BENCHES", {"step": run_tiny})
    assert door.main(["bench", "step", "--json"]) == 1
    said = capsys.readouterr()
    assert "trainer and bare_loop" in said.err and said.out == ""


# ---------------------------------------------------------------- the command


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

    monkeypatch.setattr(bench, "BENCHES", {"step": fail})
    assert door.main(["bench", "step"]) == status
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
