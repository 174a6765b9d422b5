"""Test what is compiled, how often, where the code is stored, and which programs it needs.

layouts.py tests gradients.
"""

import os
from pathlib import Path

import compare
import torch
from layouts import COMPILED, MODE, TWO_LAYERS, read_rows
from marks import each_row
from torch._dynamo.utils import counters, get_compilation_metrics

from torchtitan_lite import step as stepping
from torchtitan_lite import validation
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.schema import Compile, Config, with_value
from torchtitan_lite.extensions import software
from torchtitan_lite.parallel.process_groups import prepare_process
from torchtitan_lite.tools.verify.ranks import RankPool

N_STEPS = 3


def list_compiled_by_step(
    rank: int, world_size: int, overrides: dict[str, object]
) -> list[list[str]]:
    """Worker: return what each of N_STEPS steps compiles. After step 1, validation's forward without gradients runs."""
    run = compare.build_table_run(world_size, overrides)
    compiled = []
    for step in range(N_STEPS):
        batch = compare.read_rows(run, step)
        # torch keeps the last 64 entries
        known = {id(entry) for entry in get_compilation_metrics()}
        stepping.train_step(run, batch)
        # Backwards are not counted: they have no names, and there is one for each forward.
        entries = [
            entry for entry in get_compilation_metrics() if id(entry) not in known and entry.co_name
        ]
        compiled.append([f"{entry.co_name} ({Path(entry.co_filename).name})" for entry in entries])
        if step == 0:
            validation.forward_only(
                run, stepping.shard_for_cp(run, batch), torch.ones((), dtype=torch.int64)
            )
    return compiled


OF_LOSS = ("differentiate_cross_entropy", "token_losses")
COMPILED_RUNS = read_rows("""
accumulation, chunks of two sizes | 1 | training.local_batch_size=2 CHUNKS
tp2, chunks of two sizes | 2 | TP=2 CHUNKS
pp2 | 2 | PP=2 MODE=none CHUNKS model.n_layers=4
cp2 ring | 2 | CP=2 RING
""")


@each_row("name", COMPILED_RUNS, fast=["tp2, chunks of two sizes"])
def test_blocks_share_a_compilation_and_nothing_is_compiled_after_the_second_step(pool, name):
    """With a compilation per block, torch would fail at the ninth block of a rank (its recompile_limit)."""
    world_size, keys = COMPILED_RUNS[name]
    by_rank = pool.run(list_compiled_by_step, world_size, {**COMPILED, **TWO_LAYERS, **keys})
    for first, second, *later in by_rank:
        assert len([call for call in first if not call.startswith(OF_LOSS)]) == 1
        assert not any(later), f"{first=} {second=} {later=}"


@each_row("components", [["model"], ["loss"]])
def test_only_the_named_components_are_compiled(pool, components):
    keys = {**COMPILED, **TWO_LAYERS, MODE: "none", "compile.components": components}
    (by_step,) = pool.run(list_compiled_by_step, 1, keys)
    functions = {"model": "forward (modules.py)", "loss": "differentiate_cross_entropy (head.py)"}
    assert set(by_step[0]) == {functions[component] for component in components}


# --- where compiled code is kept ---


def compile_a_matmul(rank: int, world_size: int, cache_folder: Path) -> tuple[int, int]:
    """Worker: return how many graphs were found in the cache, and how many were not."""
    # otherwise the run would use the folder that this variable names
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    prepare_process(with_value(Config(), "training.cache_folder", str(cache_folder)))
    # The compiled code only calls a matmul, so no C++ compiler is needed.
    compiled = torch.compile(lambda matrix: matrix @ matrix)
    compiled(torch.eye(3))
    found = counters["inductor"]
    return found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]


def test_a_second_run_finds_the_compiled_code_of_the_first_run(tmp_path):
    answers = []
    for _ in range(2):
        with RankPool() as own_pool:
            answers += own_pool.run(compile_a_matmul, 1, tmp_path)
    assert answers == [(0, 1), (1, 0)]
    assert list(tmp_path.iterdir()) == [tmp_path / "compiled"]


# --- the programs that compilation needs ---


# device | installed programs and headers | the variable CXX | what the problem says is missing
COMPILERS = """
cpu | g++ Python.h | |
cpu | mine Python.h | mine |
cpu | g++ Python.h | mine | compiler mine (CXX)
cpu | g++ | | Python.h
cuda | gcc Python.h | |
cuda | g++ Python.h | | compiler gcc clang (CC)
"""


@each_row("device_type, there, compiler, missing", COMPILERS)
def test_the_compiler_that_torch_or_triton_would_call_is_looked_for(
    monkeypatch, tmp_path, device_type, there, compiler, missing
):
    if "Python.h" in there:
        (tmp_path / "Python.h").touch()
    monkeypatch.setattr(software.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(software.shutil, "which", lambda name: name if name in there else None)
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    if compiler:
        monkeypatch.setenv("CXX", compiler)
    machine = Machine(device_type, 1, None, "")
    assert not [*software.check_software(Config(), machine)]
    config = Config(compile=Compile(enable=True))
    problems = [*software.check_software(config, machine)]
    assert bool(problems) == bool(missing)
    for key, why, remedy in problems:
        assert key == "compile.backend"
        assert missing in why
        assert "Install" in remedy
