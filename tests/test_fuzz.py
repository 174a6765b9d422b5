"""Whatever a user writes, `check` ends soon, with status 0 or 2 and a screen of text; what it accepts does train.

FUZZ=2500 samples so many configs of each seed, FUZZ_RUNS=200 starts so many runs, FUZZ_SEEDS=7,8 uses other seeds. All
seeds but the first run with tests/run.sh --all only.
"""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import warm_start
from fuzz import MACHINES, Case, Cases, judge, make_odd_files, memory_limited
from made_corpora import BYTES, write_corpus

from torchtitan_lite.config.machine import detect_machine
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.reader import CONFIG_FOLDER, KEYS, REPOSITORY
from torchtitan_lite.config.schema import Range
from torchtitan_lite.preflight import preflight

N_CASES = int(os.environ.get("FUZZ", 250))
N_RUNS = int(os.environ.get("FUZZ_RUNS", 5))
SEEDS = [int(seed) for seed in os.environ.get("FUZZ_SEEDS", "1,2,3,4").split(",")]
PP2 = ["--parallelism.pipeline_parallel_degree=2"]
PP4000 = ["--parallelism.pipeline_parallel_degree=4000"]

SMALL = """
[job]
overwrite = true
[model]
dim = 32
n_layers = 2
n_heads = 2
n_kv_heads = 2
ffn_dim = 64
vocab_size = 264
hf_assets_path = "bytes"
[training]
dataset = ["out"]
local_batch_size = 2
seq_len = 32
[validation]
enable = true
freq = 1
steps = 1
[checkpoint]
enable = true
interval = 1
[metrics]
log_freq = 1
"""


ODD = {  # name -> command line, config file
    "a name of 300 bytes": (["--job.dump_folder", "n" * 300], ""),
    "a config name of 300 bytes": (["--config", "n" * 300], ""),
    "NUL in a name": ([], "[training]\ncache_folder = 'a\\u0000b'".replace("'", '"')),
    "a whole number beyond every float": ([], f"[optimizer]\nlr = 1{'0' * 400}"),
    "more digits than Python reads": ([], f"[training]\nsteps = {'1' * 5000}"),
    "hexadecimal digits that Python does not write": ([], f"[training]\nsteps = 0x{'f' * 5000}"),
    "lists 900 deep": ([], f"[model]\nconverters = {'[' * 900}{']' * 900}"),
    "tables 3,000 deep": ([], f"{'.'.join('a' * 3000)} = 1"),
    "a command line of many dots": (["--" + "a." * 60_000], ""),
    "4,000 unknown keys": ([], "[model]\n" + "\n".join(f"k{n} = {n}" for n in range(4000))),
    "20,000 arguments": (["--training.steps=1"] * 20_000, ""),
    "a billion layers": (["--model.n_layers", "1000000000"], ""),
    "a schedule in a pipe": (["--parallelism.pipeline_parallel_schedule_csv=pipe/schedule.csv", *PP2], ""),
    "a schedule without an end": (["--parallelism.pipeline_parallel_schedule_csv=/dev/zero", *PP2], ""),
    "a schedule of many waits": (["--parallelism.pipeline_parallel_schedule_csv=chain.csv", *PP4000], ""),
    "a config without an end": (["--config=sparse/odd.toml"], ""),
    "escapes in names": ([], '["\\u001b[2J"]\n"\\r" = 1\n[model]\n"\\u202e" = "\\u0007"'),
    "a section in itself": ([], f"[{'.'.join(['model'] * 200)}]\nx = 1"),
    "4,000 tables of one name": ([], "[[model.model]]\n" * 4000),
    "2,000 sections": ([], "".join(f"[s{n}]\nx = 1\n" for n in range(2000))),
    "a long name": ([], f'"{"k" * 20_000}" = 1\n[model]\n"{"k" * 20_000}" = 1'),
    "a value in the place of a section": ([], "model = 1\nquantize = [1]"),
    "a section in the place of a value": ([], "[float8]\nemulate = {a.a.a = 1}\n[[training]]\nsteps = 1"),
    "a section twice": ([], "[model]\ndim = 1\n" * 2),
    "a byte order mark": ([], "\ufeff[modell]\ndim = 1"),
    **{f"a config of {kind}": ([f"--config={kind}/odd.toml"], "") for kind in ("nul", "bytes", "deep", "pipe", "loop")},
    "10 MB": (["--job.description", "d" * 10_000_000, "--model.flavor", "f" * 10_000_000], ""),
}


@pytest.mark.parametrize("name", ODD)
def test_check_survives(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_odd_files(tmp_path)
    args, text = ODD[name]
    if text:
        Path("odd.toml").write_text(text)
        args = ["--config", "odd.toml"]
    with memory_limited(gib=2):
        assert judge(Case([*args, "--ranks=2"], MACHINES[0])) == (False, [])


@pytest.mark.parametrize("seed", [SEEDS[0], *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[1:])])
def test_check_says_in_a_second_and_on_a_screen_what_is_wrong_with_any_config(seed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases = Cases(seed, tmp_path, [CONFIG_FOLDER / f"{name}.toml" for name in ("debug", "debug_3d", "llama3_8b")])
    found = []
    n_accepted = 0
    with memory_limited(gib=2):
        for n in range(N_CASES):
            case = cases.next()
            accepted, faults = judge(case)
            n_accepted += accepted
            found += [f"case {n}: {fault}: {case}" for fault in faults]
    assert not found, "\n".join(found)
    assert N_CASES // 20 < n_accepted < N_CASES // 2, "either half is tried"


@pytest.fixture
def small(tmp_path, monkeypatch) -> Path:
    """A working directory with a small config and its corpus; returns the config."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{Path(__file__).parent}")  # of the processes that are forked
    documents = [BYTES.encode(f"document {n} says what {n + 1} says. " * 20, bos=True, eos=True) for n in range(40)]
    write_corpus(tmp_path / "out", [documents[:28]], validation=[documents[28:]])
    Path("small.toml").write_text(SMALL)
    return Path("small.toml")


def test_what_check_accepts_starts_and_makes_two_steps(pool, small, tmp_path):
    cases = Cases(SEEDS[0], tmp_path, [small])
    machine = replace(detect_machine(), memory_bytes_per_device=2**32)  # others need the rest of this one's
    found = []
    n_runs = 0
    while n_runs < N_RUNS:
        args = cases.next_args()
        try:
            prepared = preflight(args, machine=machine, n_ranks=1)
        except ConfigError:
            continue
        if prepared.model_args.n_layers > 1000:
            continue  # sound, and slow: a step of 16,383 layers takes three minutes on one core
        folders = (prepared.dump_folder, Path(prepared.config.training.cache_folder))
        if not all(folder.resolve().is_relative_to(tmp_path) for folder in folders):
            continue  # it would write outside this folder
        n_runs += 1
        (status,) = pool.run(warm_start.start, 1, args, 2)
        if status not in (0, 128 + signal.SIGTERM):
            found.append(f"exit status {status}: {args}")
    assert not found, "\n".join(found)


# Numbers that neither memory nor time bounds, nor another key.
FREE = """metrics.log_freq training.gc_freq training.max_norm training.loss_chunk_tokens optimizer.lr optimizer.beta1
    optimizer.beta2 optimizer.eps lr_scheduler.warmup_steps lr_scheduler.total_steps lr_scheduler.decay_ratio
    lr_scheduler.min_lr_factor model.norm_eps model.rope_theta checkpoint.interval checkpoint.keep_latest_k
    checkpoint.keep_every_m comm.trace_buf_size debug.seed""".split()
AT_THE_END = {
    "low": ["--training.seq_len=1", "--model.n_layers=1"],
    "high": ["--comm.init_timeout_seconds=315360000", "--comm.train_timeout_seconds=315360000", "--training.seq_len=8"]
    + ["--profiling.enable_profiling", "--profiling.profile_freq=1000000000000000"],
}


def find_range(annotation: object) -> Range:
    """The limits in the type of a key, which may be optional."""
    return next(limits for part in (annotation, *get_args(annotation)) for limits in getattr(part, "__metadata__", ()))


@pytest.mark.parametrize("end", AT_THE_END)
def test_a_run_at_the_ends_of_the_ranges_makes_two_steps_and_saves_them(pool, end, small, tmp_path):
    keys = [f"--{key}={getattr(find_range(KEYS[key]), end)}" for key in FREE] + AT_THE_END[end]
    keys += ["--job.dump_folder=run", "--validation.no_enable", "--training.steps=2"]
    assert pool.run(warm_start.start, 1, [f"--config={small}", *keys]) == [0]
    assert (tmp_path / "run" / "checkpoint" / "step-2" / "manifest.json").is_file()
