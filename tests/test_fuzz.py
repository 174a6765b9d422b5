"""Whatever a user writes, `check` ends soon, with status 0 or 2 and a screen of text; what it accepts does train.

FUZZ=2500 samples so many configs of each seed, FUZZ_RUNS=200 starts so many runs, FUZZ_SEEDS=7,8 uses other seeds. All
seeds but the first run with tests/run.sh --all only.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from fuzz import MACHINES, Case, Cases, make_odd_files
from fuzz_judge import judge, memory_limited
from small_corpora import prepare_some, write_inputs
from two_steps import make_two_steps

from torchtitan_lite.config.hardware import detect_machine
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.reader import CONFIG_FOLDER, REPOSITORY
from torchtitan_lite.preflight import preflight

N_CASES = int(os.environ.get("FUZZ", 250))
N_RUNS = int(os.environ.get("FUZZ_RUNS", 8))
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
        verdict = judge(Case([*args, "--ranks=2"], MACHINES[0]))
    assert not verdict.faults and not verdict.accepted


@pytest.mark.parametrize("seed", [SEEDS[0], *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[1:])])
def test_check_says_in_a_second_and_on_a_screen_what_is_wrong_with_any_config(seed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases = Cases(seed, tmp_path, [CONFIG_FOLDER / f"{name}.toml" for name in ("debug", "debug_3d", "llama3_8b")])
    found = []
    n_accepted = 0
    with memory_limited(gib=2):
        for n in range(N_CASES):
            case = cases.next()
            verdict = judge(case)
            n_accepted += verdict.accepted
            found += [f"case {n}: {fault}: {case}" for fault in verdict.faults]
    assert not found, "\n".join(found)
    assert N_CASES // 20 < n_accepted < N_CASES // 2, "either half is tried"


@pytest.mark.parametrize("seed", SEEDS[:1])
def test_what_check_accepts_starts_and_makes_two_steps(seed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{Path(__file__).parent}")  # of the processes that are forked
    write_inputs(tmp_path, {f"{n}.txt": f"document {n} says what {n + 1} says. " * 20 for n in range(40)})
    assert prepare_some(tmp_path, "--tokenizer", "bytes") == 0
    Path("small.toml").write_text(SMALL)
    cases = Cases(seed, tmp_path, [Path("small.toml")])
    machine = replace(detect_machine(), memory_bytes_per_device=2**32)  # others need the rest of this one's
    found = []
    n_runs = 0
    while n_runs < N_RUNS:
        args = cases.next_args()
        try:
            prepared = preflight(args, machine=machine, n_ranks=1)
        except ConfigError:
            continue
        if prepared.shape.n_layers > 1000:
            continue  # sound, and slow: a step of 16,383 layers takes three minutes on one core
        folders = (prepared.dump_folder, prepared.cache_folder)
        if not all(folder.resolve().is_relative_to(tmp_path) for folder in folders):
            continue  # it would write outside this folder
        n_runs += 1
        n_steps, end = make_two_steps(args, tmp_path / "log")
        if n_steps != min(2, prepared.config.training.steps) or end not in ("stopped", "exit status 0"):
            found.append(f"{n_steps} steps, {end}: {args}")
    assert not found, "\n".join(found)
