"""bench: who is measured, in which order, and the arithmetic of the ratios. Never how fast anything is."""

import gc
import json
import subprocess
import sys
from dataclasses import replace
from itertools import count

import pytest
import torch
import torch.distributed as dist

from torchtitan_lite import __main__ as door
from torchtitan_lite.bench import command as bench
from torchtitan_lite.bench import setting
from torchtitan_lite.bench import startup as bench_startup
from torchtitan_lite.bench import step as bench_step
from torchtitan_lite.bench.rounds import Report, compare_rounds, describe, measure_rounds, report_for_programs
from torchtitan_lite.bench.step_memory import measure_step_memory
from torchtitan_lite.components import optim
from torchtitan_lite.config.flavors import FlopsPerToken
from torchtitan_lite.config.hardware import Gpu, Machine
from torchtitan_lite.config.schema import Compile, Model, Training
from torchtitan_lite.data.prepare import Unfinished

TINY_CONFIG = replace(
    bench_step.STEP_CONFIG,
    model=Model(flavor="debug", dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=128),
    training=Training(local_batch_size=2, seq_len=16, mixed_precision_param="float32"),
    compile=Compile(backend="eager"),  # inductor takes half a minute and a C++ compiler
)


def run_tiny() -> Report:
    return bench_step.bench_step(n_rounds=3, n_steps=1, config=TINY_CONFIG)


def make_report(step_times_s: dict[str, list[float]]) -> Report:
    ratio_of = {"bare_loop": ("trainer", "bare_loop"), "compile_over_eager": ("compiled", "trainer")}
    n_tokens = dict.fromkeys(step_times_s, 1000)
    return Report({"device": "x"}, "tokens", n_tokens, step_times_s, {"compiled": "no compiler"}, ratio_of)


# ---------------------------------------------------------------- rounds


def test_contenders_take_turns_and_another_one_begins_each_round():
    calls = []
    contenders = {name: lambda name=name: calls.append(name) for name in "abc"}
    measure_rounds(contenders, n_rounds=4, n_steps=2, wait_for_device=lambda: None)
    assert "".join(calls) == "aabbcc" + "bbccaa" + "ccaabb" + "aabbcc"


def test_a_turn_is_timed_from_an_idle_device_to_an_idle_device():
    events = []
    clock = count()

    def read_clock_s() -> float:
        events.append("clock")
        return next(clock)

    contenders = {"a": lambda: events.append("step")}
    options = {"wait_for_device": lambda: events.append("wait"), "read_clock_s": read_clock_s}
    measure_rounds(contenders, n_rounds=1, n_steps=3, clean_up=lambda: events.append("clean"), **options)
    assert events == ["wait", "clock", "step", "step", "step", "wait", "clock", "clean"]


def test_times_are_per_step_and_belong_to_the_contender_that_took_them():
    now_s = 0.0

    def spend(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    contenders = {"fast": lambda: spend(0.25), "slow": lambda: spend(2.0)}
    times_s = measure_rounds(
        contenders, n_rounds=3, n_steps=4, wait_for_device=lambda: None, read_clock_s=lambda: now_s
    )
    assert times_s == {"fast": [0.25] * 3, "slow": [2.0] * 3}


def test_no_garbage_is_collected_while_the_clock_runs_and_again_afterwards():
    seen = []

    def step() -> None:
        seen.append(gc.isenabled())
        if len(seen) == 2:
            raise KeyError("a step may fail")

    with pytest.raises(KeyError):
        measure_rounds({"a": step}, n_rounds=1, n_steps=2, wait_for_device=lambda: None)
    assert seen == [False, False]
    assert gc.isenabled()


def test_a_ratio_is_the_median_of_the_ratios_of_each_round():
    # The machine slows down from round to round. Medians of the speeds alone would say 2.0 / 4.0 the wrong way round.
    report = make_report({"trainer": [1.0, 2.0, 8.0], "bare_loop": [2.0, 1.0, 4.0]})
    assert compare_rounds(report) == {"bare_loop": [2.0, 0.5, 0.5]}
    assert report_for_programs(report)["ratios"] == {"bare_loop": 0.5}


def test_speed_is_work_over_time():
    told = report_for_programs(make_report({"trainer": [1.0, 2.0, 4.0], "bare_loop": [1.0, 1.0, 1.0]}))
    trainer = told["contenders"]["trainer"]
    assert trainer["tokens_per_s"] == {"median": 500.0, "min": 250.0, "max": 1000.0}
    assert trainer["step_time_s"] == {"median": 2.0, "rounds": [1.0, 2.0, 4.0]}


def test_contenders_with_unequal_work_are_compared_by_their_speeds():
    report = make_report({"trainer": [1.0, 2.0, 4.0], "bare_loop": [1.0, 1.0, 1.0]})
    report.units_per_step["bare_loop"] = 250
    assert compare_rounds(report) == {"bare_loop": [4.0, 2.0, 1.0]}
    assert report_for_programs(report)["contenders"]["bare_loop"]["tokens_per_s"]["median"] == 250.0


def test_what_has_no_contenders_is_told_too():
    report = replace(make_report({"trainer": [1.0] * 3}), figures={"memory_mib": [30.0, 10.0, 20.0]})
    assert report_for_programs(report)["figures"] == {"memory_mib": {"median": 20.0, "rounds": [30.0, 10.0, 20.0]}}
    assert describe(report).splitlines()[-1].split() == ["memory_mib", "20.00", "10.00", "-", "30.00"]


def test_the_table_names_each_ratio_and_what_is_absent():
    table = describe(make_report({"trainer": [1.0, 1.0, 1.0], "bare_loop": [0.5, 0.5, 0.25]}))
    rows = {line.split()[0]: line.split() for line in table.splitlines() if line}
    assert rows["trainer"][1:] == ["1000", "1000", "-", "1000", "1.000"]
    assert table.count("bare_loop") == 3  # contender, ratio, and what it divides
    assert "0.500  0.250 - 0.500     trainer / bare_loop" in table
    assert rows["compiled"][1:] == ["absent:", "no", "compiler"]
    assert "compile_over_eager" not in table


def test_mfu_is_the_flops_of_the_tokens_over_the_peak_and_memory_stands_beside_it():
    report = replace(
        make_report({"trainer": [1.0, 2.0, 4.0], "bare_loop": [1.0] * 3}),  # 500 and 1000 tokens a second
        flops_per_token={"trainer": FlopsPerToken(full=800, causal=600)},
        peak_flops=1e6,
        matmul_flops={"trainer": 8e5},
        memory_gib={"trainer": 1.5},
    )
    told = report_for_programs(report)["contenders"]
    assert told["trainer"]["mfu_full"] == 0.4 and told["trainer"]["mfu_causal"] == 0.3
    assert told["trainer"]["share_of_matmul"] == 0.5 and told["trainer"]["memory_gib"] == 1.5
    assert told["bare_loop"].keys() == {"tokens_per_s", "step_time_s"}
    rows = {line.split()[0]: line.split() for line in describe(report).splitlines() if line}
    assert rows["trainer"][5:] == ["2.000", "40.0%", "30.0%", "50.0%", "1.50"]
    assert ["1000", "1000", "-", "1000", "1.000", "-", "-", "-", "-"] in [
        line.split()[1:] for line in describe(report).splitlines()
    ]
    without_peak = replace(report, peak_flops=None)
    assert report_for_programs(without_peak)["contenders"]["trainer"]["mfu_full"] is None
    assert "MFU" not in describe(without_peak) and "of matmul" in describe(without_peak)


def test_the_memory_of_a_step_is_the_most_that_it_had_allocated_at_once():
    lies_there = [torch.ones(5000)]

    def step() -> None:
        lies_there.clear()  # was not allocated by the step
        kept = torch.ones(1000)
        torch.ones(3000)  # gone at once
        lies_there.append(kept + torch.ones(500).sum())

    assert measure_step_memory(step, torch.device("cpu")) == pytest.approx(4 * 4000, abs=200)


@pytest.mark.parametrize(("visible", "asked"), [(None, "GPU-a"), ("1", "GPU-b"), ("GPU-b,0", "GPU-b")])
def test_clocks_are_those_of_the_first_gpu_that_is_used(visible, asked, monkeypatch):
    gpus = [Gpu(str(index), uuid, "NVIDIA H200", 2**37) for index, uuid in enumerate(("GPU-a", "GPU-b"))]
    commands = []

    def answer(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "1980 MHz, 1980 MHz, 3201 MHz, 690.12 W, 61\n")

    monkeypatch.setattr(setting, "list_gpus", lambda: gpus)
    monkeypatch.setattr(setting.subprocess, "run", answer)
    monkeypatch.setattr(setting.os, "environ", {"CUDA_VISIBLE_DEVICES": visible} if visible else {})
    assert setting.read_clocks()["clocks.sm"] == "1980 MHz"
    assert setting.read_clocks()["power.draw"] == "690.12 W"
    assert f"--id={asked}" in commands[0]


def test_clocks_that_nobody_tells_are_none(monkeypatch):
    def fail(command, **options):
        raise subprocess.CalledProcessError(1, command)

    assert setting.read_clocks() is None or torch.cuda.is_available()
    monkeypatch.setattr(setting, "list_gpus", lambda: [Gpu("0", "GPU-a", "NVIDIA H200", 2**37)])
    monkeypatch.setattr(setting.subprocess, "run", fail)
    assert setting.read_clocks() is None


# ---------------------------------------------------------------- bench step


def test_step_measures_all_contenders_and_leaves_no_process_group_behind():
    report = run_tiny()
    assert not dist.is_initialized()
    assert {name: len(times_s) for name, times_s in report.step_times_s.items()} == dict.fromkeys(
        bench_step.CONTENDERS, 3
    )
    told = json.loads(json.dumps(report_for_programs(report)))
    assert told["ratios"].keys() == {"bare_loop", "transformers", "compile_over_eager"}
    assert all(isinstance(ratio, float) and ratio > 0 for ratio in told["ratios"].values())
    assert told["contenders"].keys() == bench_step.CONTENDERS.keys()
    assert told["absent"] == {}
    assert told["shape"]["dim"] == 32 and told["batch"] == {"sequences": 2, "seq_len": 16}
    assert told["versions"]["torch"] == torch.__version__
    assert {"bench", "device", "clocks", "threads", "date", "parameters", "dtype", "rounds"} <= told.keys()
    for name, contender in told["contenders"].items():
        assert contender["mfu_full"] is None and contender["mfu_causal"] is None, "a CPU's peak is not known"
        # float32: gradients at least, and no more than a few times what this model's activations take
        assert 26784 * 4 / 2**30 < contender["memory_gib"] < 26784 * 80 / 2**30, name


def test_without_transformers_one_row_says_so_and_the_rest_is_measured(monkeypatch):
    monkeypatch.setattr(bench_step, "transformers", None)
    told = report_for_programs(run_tiny())
    assert told["absent"] == {"transformers": "transformers is not installed"}
    assert told["ratios"].keys() == {"bare_loop", "compile_over_eager"}


def test_without_a_working_compiler_one_row_says_so(monkeypatch):
    def refuse(graph, inputs):
        raise RuntimeError("no C++ compiler here\nand much more")

    torch._dynamo.reset()  # what was compiled before needs no compiler
    monkeypatch.setattr(
        "torchtitan_lite.parallel.parallelize.compile_block",
        lambda block, section, *options: setattr(block, "forward", torch.compile(block.forward, backend=refuse)),
    )
    told = report_for_programs(run_tiny())
    assert told["absent"] == {"compiled": "no C++ compiler here"}
    assert told["ratios"].keys() == {"bare_loop", "transformers"}


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


# ---------------------------------------------------------------- bench startup


# Stands in for run_train.sh: prints what a start prints, and leaves what it was told.
FAKE_START = """
import json, os, sys
arguments = sys.argv[1:]
folder = arguments[arguments.index("--job.dump_folder") + 1]
os.makedirs(folder, exist_ok=True)
with open(os.environ["SEEN"], "a") as seen:
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "") if "--compile.enable" in arguments else None
    print(json.dumps([os.environ["NGPU"], cache]), file=seen)
if "--compile.enable" in arguments and "NO_COMPILER" in os.environ:
    sys.exit("compile.enable = True: there is no compiler")
print("debug is sound on x86_64 CPU:", file=sys.stderr, flush=True)
print("  model   llama3 debug, 1,328,256 parameters, 6.98 MFLOP per token", file=sys.stderr, flush=True)
print("12:00:00 debug model: 1,328,256 parameters, dp_shard2", flush=True)
with open(folder + "/metrics.jsonl", "w") as metrics:
    print(json.dumps({"step": 1, "data_time_s": 0.0001, "step_time_s": 0.0003}), file=metrics)
print("12:00:01 step 1/1  loss  8.26116", flush=True)
"""


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Function: what every start so far was told, (ranks, cache of compiled code)."""
    (tmp_path / "start.py").write_text(FAKE_START)
    monkeypatch.setattr(bench_startup, "TRAIN", [sys.executable, "-S", str(tmp_path / "start.py")])
    monkeypatch.setattr(bench_startup, "detect_machine", lambda: Machine("cpu", 1, 2**40, "x86_64 CPU"))
    monkeypatch.setattr(bench_startup, "run_whole", lambda command: {"whole": 2.0})
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    return lambda: [tuple(json.loads(line)) for line in (tmp_path / "seen").read_text().splitlines()]


def test_a_start_is_cut_into_what_the_user_waits_for(started, tmp_path):
    phases = bench_startup.watch_start(tmp_path, 2, cache=None)
    assert list(phases) == ["check", "launch", "build", "batch", "step", "whole"]
    assert phases["batch"] == 0.0001 and phases["step"] == pytest.approx(0.0002)
    assert sum(phases.values()) == pytest.approx(2 * phases["whole"])
    assert started() == [("2", None)]


def test_cold_starts_have_an_empty_cache_each_and_warm_ones_share_one_that_was_filled(started):
    report = bench_startup.bench_startup(n_rounds=3)
    contenders = [f"{kind}_{n}" for n in (1, 2) for kind in ("eager", "warm", "cold")]
    assert list(report.step_times_s) == ["import_torch", "import_train", "check", *contenders]
    assert {len(times_s) for times_s in report.step_times_s.values()} == {3}
    seen = started()
    warm = {cache for _, cache in seen if cache and cache.endswith("compiled")}
    cold = [cache for _, cache in seen if cache and not cache.endswith("compiled")]
    assert len(warm) == 1 and len(cold) == len(set(cold)) == 2 * 3
    assert [cache for n_ranks, cache in seen if n_ranks == "1"][1] in warm, "filled before anything is timed"
    told = report_for_programs(report)
    assert told["ratios"]["check"] == 1.0 and told["ratios"]["import_train"] == 1.0
    assert {"cold_over_warm_1", "cold_over_warm_2", "eager_1", "cold_2"} <= told["ratios"].keys()
    assert len(told["figures"]["cold_2 step s"]["rounds"]) == 3


def test_without_a_compiler_the_compiled_starts_are_absent(started, monkeypatch):
    monkeypatch.setenv("NO_COMPILER", "1")
    report = bench_startup.bench_startup(n_rounds=3)
    assert "cold_1" not in report.step_times_s and "eager_2" in report.step_times_s
    why = "compile.enable = True: there is no compiler"
    assert report.absent == dict.fromkeys(["warm_1", "cold_1", "warm_2", "cold_2"], why)


def test_a_start_that_does_not_come_to_its_first_step_fails_with_what_it_said(started, monkeypatch, capsys, tmp_path):
    (tmp_path / "start.py").write_text("print('debug is sound on x86_64 CPU:')\nraise SystemExit('out of luck')")
    assert bench.main(["startup"]) == 1
    assert capsys.readouterr().err.endswith("debug is sound on x86_64 CPU:\nout of luck\n")


def test_one_gpu_starts_one_rank(started, monkeypatch):
    monkeypatch.setattr(bench_startup, "detect_machine", lambda: Machine("cuda", 1, 2**40, "NVIDIA H200"))
    bench_startup.bench_startup(n_rounds=3)
    assert {n_ranks for n_ranks, _ in started()} == {"1"}


def test_the_real_command_prints_what_the_clock_waits_for(tmp_path):
    phases = bench_startup.watch_start(tmp_path, 1, cache=None)
    assert all(seconds > 0 for seconds in phases.values())


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["speed"], "step"),
        ([], "NAME"),
        (["step", "--rounds", "2"], "3 or more"),
        (["step", "--rounds", "many"], "'many'"),
        (["step", "--steps", "0"], "1 or more"),
        (["step", "--step", "3"], "--step"),
    ],
)
def test_wrong_input_ends_with_status_2_and_says_what_is_right(args, named, capsys):
    with pytest.raises(SystemExit) as ended:
        door.main(["bench", *args])
    assert ended.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]


def test_what_is_not_given_the_bench_decides(monkeypatch, capsys):
    asked = []

    def measure(**options) -> Report:
        asked.append(options)
        return make_report({"trainer": [1.0] * 3})

    monkeypatch.setattr(bench, "BENCHES", {"data": measure})
    assert door.main(["bench", "data"]) == 0
    assert door.main(["bench", "data", "--rounds", "3"]) == 0
    assert asked == [{}, {"n_rounds": 3}]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "TMPDIR"),
        (Unfinished("A worker ended with exit status -9."), "status -9"),
    ],
)
def test_what_cannot_be_measured_ends_with_status_1_and_prints_no_report(error, said, monkeypatch, capsys):
    def fail() -> Report:
        raise error

    monkeypatch.setattr(bench, "BENCHES", {"data": fail})
    assert bench.main(["data"]) == 1
    printed = capsys.readouterr()
    assert said in printed.err and printed.out == ""


@pytest.mark.parametrize("as_json", [True, False])
def test_the_command_hands_its_numbers_on_and_prints_one_report(as_json, monkeypatch, capsys):
    asked = {}

    def measure(**options) -> Report:
        asked.update(options)
        return make_report({"trainer": [1.0] * 3, "bare_loop": [1.0] * 3})

    monkeypatch.setattr(bench, "BENCHES", {"step": measure})
    assert door.main(["bench", "step", "--rounds", "7", "--steps", "2", *["--json"] * as_json]) == 0
    assert asked == {"n_rounds": 7, "n_steps": 2}
    printed = capsys.readouterr().out
    assert json.loads(printed)["ratios"] == {"bare_loop": 1.0} if as_json else "trainer / bare_loop" in printed
