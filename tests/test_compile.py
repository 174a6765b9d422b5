"""What is compiled, how often, where the result is kept, and what must be there. Gradients: the rows of layouts.py."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import compare
import pytest
import torch
from layouts import CHUNKS, COMPILED, MODE, PP, TP, TWO_LAYERS, WHOLE_LOGITS
from torch._dynamo.utils import get_compilation_metrics

import train
from torchtitan_lite import step as stepping
from torchtitan_lite.components import profiling
from torchtitan_lite.components.profiling import list_compiled_since, warn_on_recompile
from torchtitan_lite.config import hardware
from torchtitan_lite.config.machine import GIB, Machine
from torchtitan_lite.config.schema import Compile
from torchtitan_lite.preflight import check_compilers, preflight

REPOSITORY = Path(__file__).resolve().parent.parent
N_STEPS = 4


def list_compiled_by_step(rank: int, world_size: int, overrides: dict[str, object]) -> list[list[str]]:
    """Worker: what each of N_STEPS compiles. After the first, a forward without gradients, as validation makes it."""
    run = compare.build_table_run(world_size, overrides)
    compiled = []
    for step in range(N_STEPS):
        batch = compare.own_rows(run, compare.make_batch(step, 256))
        before = get_compilation_metrics()
        stepping.train_step(run, batch)
        compiled.append(list_compiled_since(before))
        if step == 0:
            stepping.forward_only(run, stepping.shard_for_cp(run, batch), torch.ones((), dtype=torch.int64))
    return compiled


COMPILED_RUNS = {  # name -> ranks, keys
    "chunks of two sizes": (1, {MODE: "full", **CHUNKS}),
    "plain loss, accumulation": (1, {**WHOLE_LOGITS, "training.local_batch_size": 2, "training.global_batch_size": 8}),
    "tp2": (2, {TP: 2, **CHUNKS}),
    "pp2": (2, {PP: 2, MODE: "none", **CHUNKS}),
}
SLOW = ["chunks of two sizes", "pp2"]  # tp2 has chunks of two sizes too


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in COMPILED_RUNS]
)
def test_nothing_is_compiled_after_the_second_step(pool, name):
    world_size, keys = COMPILED_RUNS[name]
    by_rank = pool.run(list_compiled_by_step, world_size, {**COMPILED, **TWO_LAYERS, **keys})
    for first, second, *later in by_rank:
        assert first, "the first step compiles"
        assert not any(later), f"{first=} {second=} {later=}"


@pytest.mark.parametrize("components", [["model"], ["loss"]])
def test_only_the_named_components_are_compiled(pool, components):
    keys = {**COMPILED, **TWO_LAYERS, MODE: "none", "compile.components": components}
    (by_step,) = pool.run(list_compiled_by_step, 1, keys)
    places = {entry.partition(":")[0] for entry in by_step[0]}
    files = {"model": "forward (llama3.py", "loss": "differentiate (head.py"}
    assert places == {files[component] for component in components}


def double_compiled():
    """A function that is compiled, for each new size."""
    torch._dynamo.reset()
    return torch.compile(lambda x: x * 2, backend="eager", dynamic=False)


def list_warnings(caplog) -> list[str]:
    """The warnings of components/profiling.py, without those of torch's own loggers."""
    return [record.getMessage() for record in caplog.records if record.name == profiling.__name__]


def test_only_a_late_recompilation_inside_a_step_is_logged_with_its_reason(caplog):
    double = double_compiled()
    with caplog.at_level(logging.WARNING):
        for step, size in [(1, 3), (2, 4), (3, 4), (4, 3)]:
            with warn_on_recompile(step):
                double(torch.ones(size))
        double(torch.ones(5))  # outside of a step: validation
        with warn_on_recompile(5):
            double(torch.ones(5))
        assert list_warnings(caplog) == []
        with warn_on_recompile(6):
            double(torch.ones(6))
    (line,) = list_warnings(caplog)
    assert "step 6" in line and "test_compile.py:" in line and "actual 6" in line


def test_the_log_is_right_when_torch_forgets_its_oldest_entries(caplog):
    doubles = [torch.compile(lambda x, n=n: x * n, backend="eager") for n in range(70)]  # torch keeps 64 entries
    for double in doubles:
        double(torch.ones(3))
    with caplog.at_level(logging.WARNING), warn_on_recompile(3):
        double_compiled()(torch.ones(3))
    assert len(list_warnings(caplog)) == 1


# --- where compiled code is kept ---

ONE_GRAPH = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import train
from torch._dynamo.utils import counters
train.keep_compiled_code(train.Path(sys.argv[2]))
torch.compile(lambda x: x @ x)(torch.eye(3))  # a matmul is called, not written: no C++ compiler is at work
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


def test_a_second_run_finds_what_the_first_has_compiled(tmp_path):
    command = [sys.executable, "-c", ONE_GRAPH, str(REPOSITORY), str(tmp_path)]
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # without a pool of processes
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    answers = [subprocess.run(command, env=environment, capture_output=True, text=True) for _ in range(2)]
    assert [answer.stdout.split() for answer in answers] == [["0", "1"], ["1", "0"]], answers[0].stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "compiled"]


def test_a_cache_that_the_user_has_named_stays_the_one(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    train.keep_compiled_code(tmp_path)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "mine")


# --- what must be there ---

LAPTOP = Machine("cpu", 1, 16 * GIB, "a laptop")


@pytest.fixture
def tools(monkeypatch, tmp_path):
    """Function: the compilers that there are, and no others. Python's headers and triton are there."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    monkeypatch.setattr(hardware.sysconfig, "get_path", lambda name: str(tmp_path / "include"))
    monkeypatch.setattr(hardware, "find_spec", lambda name: name)
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)

    def there_are(*names: str):
        monkeypatch.setattr(hardware.shutil, "which", lambda name: f"/usr/bin/{name}" if name in names else None)

    return there_are


@pytest.mark.parametrize(
    ("device_type", "there", "environment", "missing"),
    [
        ("cpu", ["g++"], {}, []),
        ("cpu", ["mine"], {"CXX": "mine"}, []),
        ("cpu", ["g++"], {"CXX": "mine"}, ["C++ compiler mine"]),
        ("cuda", ["gcc"], {}, []),
        ("cuda", ["g++"], {}, ["C compiler gcc or clang"]),
        ("cuda", ["gcc"], {"CC": "mine"}, ["C compiler mine"]),
    ],
)
def test_the_compiler_that_torch_or_triton_would_call_is_looked_for(
    tools, monkeypatch, device_type, there, environment, missing
):
    tools(*there)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    problems = check_compilers(Compile(enable=True), device_type)
    assert len(problems) == len(missing)
    assert all(words in problem.why for words, problem in zip(missing, problems, strict=True))
    assert check_compilers(Compile(enable=False), device_type) == []


def test_what_compile_lacks_is_refused_with_a_remedy(tools, monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=r"compile.backend = 'inductor'.*apt install g\+\+"):
        tools()
        preflight([f"--job.dump_folder={tmp_path}/run", "--compile.enable"], machine=LAPTOP, n_ranks=1)
    tools("g++", "gcc")
    (tmp_path / "include" / "Python.h").unlink()
    monkeypatch.setattr(hardware, "find_spec", lambda name: None)
    (on_cpu,) = check_compilers(Compile(enable=True), "cpu")
    assert "Python.h" in on_cpu.why and "python3-dev" in on_cpu.remedy
    assert len(check_compilers(Compile(enable=True), "cuda")) == 2
