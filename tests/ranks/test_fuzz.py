"""For every combination of keys, a run either raises a ConfigError or starts. Values are drawn by the type of each key.

FUZZ=2500 draws 2500 configs, and FUZZ_RUNS=50 starts 50 runs.
"""

import json
import os
import random
import signal
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import warm_start
from made_corpora import BYTES, write_corpus
from test_check import EIGHT_H100

from torchtitan_lite.config.machine import GIB
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.reader import KEYS
from torchtitan_lite.config.schema import ParameterGroup
from torchtitan_lite.tools.check import resolve_on_hosts
from torchtitan_lite.tools.detect import detect_machine

N_CASES = int(os.environ.get("FUZZ", 150))
N_RUNS = int(os.environ.get("FUZZ_RUNS", 4))
LAPTOP = replace(detect_machine(), memory_bytes_per_device=2 * GIB)
NUMBERS = [-1, 0, 1, 2, 3, 4, 7, 8, 16, 64, 100, 1000]
FRACTIONS = [-0.1, 0.0, 1e-5, 0.1, 0.5, 0.999, 1.0, 1.5]
PATTERNS = ["*", "*norm*", "output.*", "nothing"]
TEXTS = ["", *'a debug debug_moe bytes 1 none true layers.0 a,b [1] " python_stdlib'.split()]
PATHS = [key for key in KEYS if "folder" in key or "path" in key or key.endswith("config_file")]

SMALL = """
job = {overwrite = true, dump_folder = "FOLDER/run"}
model = {dim = 32, n_layers = 2, n_heads = 2, n_kv_heads = 2, ffn_dim = 64, vocab_size = 264, hf_assets_path = "bytes"}
training = {dataset = ["FOLDER/out"], cache_folder = "FOLDER/cache", local_batch_size = 2, seq_len = 32}
validation = {enable = true, freq = 1, steps = 1}
checkpoint = {enable = true, interval = 1}
metrics = {log_freq = 1}
compile = {backend = "aot_eager"}
"""


def draw_value(draw: random.Random, kind: Any) -> object:
    """Return a value which in most cases fits the type of a key."""
    origin, inner = get_origin(kind), get_args(kind)
    if draw.random() < 0.1:
        return draw.choice(TEXTS)
    if origin is Annotated:
        return draw_value(draw, inner[0])
    if origin is Literal:
        return draw.choice(inner)
    if kind == list[ParameterGroup]:
        return f'[{{match="{draw.choice(PATTERNS)}", lr=0.5}}]'
    if origin is list:
        return [draw_value(draw, inner[0]) for _ in range(draw.randint(0, 2))]
    if inner:  # `X | None`
        return draw_value(draw, inner[0])
    return draw.choice({bool: [True, False], int: NUMBERS, float: FRACTIONS, str: TEXTS}[kind])


def draw_args(draw: random.Random, config: str, keys: list[str]) -> list[str]:
    """Return a command line with one to five keys."""
    args = ["--config", config]
    for key in draw.sample(keys, draw.randint(1, 5)):
        value = draw_value(draw, KEYS[key])
        args.append(f"--{key}={value if isinstance(value, str) else json.dumps(value)}")
    return args


@pytest.fixture
def small(tmp_path) -> str:
    """Write a small config and its corpus; return the path of the config."""
    documents = [
        BYTES.encode(f"document {n} says what {n + 1} says. " * 20, bos=True, eos=True)
        for n in range(40)
    ]
    write_corpus(tmp_path / "out", [documents[:28]], validation=[documents[28:]])
    (tmp_path / "small.toml").write_text(SMALL.replace("FOLDER", str(tmp_path)))
    return str(tmp_path / "small.toml")


def test_any_config_is_refused_with_remedies_or_makes_two_steps(pool, small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw = random.Random(1)
    n_sound = n_runs = 0
    starts = [(small, LAPTOP), ("debug_3d", LAPTOP), ("llama3_8b", EIGHT_H100)]
    for _ in range(N_CASES):
        config, machine = draw.choice(starts)
        keys = [key for key in KEYS if config != small or key not in PATHS]
        args = draw_args(draw, config, keys)
        n_ranks = 1 if config == small else draw.choice([None, 2, 8])
        try:
            resolve_on_hosts(args, machine=machine, n_ranks=n_ranks)
        except ConfigError as error:
            assert all(problem.why and problem.remedy for problem in error.problems), args
            continue
        n_sound += 1
        if config == small and n_runs < N_RUNS:
            n_runs += 1
            ((status, _),) = pool.run(warm_start.start, 1, args, 2)
            assert status in (0, 128 + signal.SIGTERM), args
    assert N_CASES // 20 < n_sound < N_CASES * 3 // 4 and n_runs == N_RUNS, "both kinds are drawn"
