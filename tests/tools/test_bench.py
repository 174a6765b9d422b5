"""bench: contenders take turns, ratios of each round, what a GPU is asked. Never how fast anything is."""

import json
from argparse import Namespace
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from torchtitan_lite import __main__ as door
from torchtitan_lite.components import optim
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.config.schema import Compile, Config, Model, Training
from torchtitan_lite.tools.bench import gpu, step

TINY = Model(
    flavor="debug",
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    ffn_dim=64,
    vocab_size=128,
)
TRAINING = Training(
    local_batch_size=2,
    seq_len=16,
    mixed_precision_param="float32",
)
TINY_CONFIG = replace(
    step.STEP_CONFIG,
    model=TINY,
    training=TRAINING,
    compile=Compile(backend="eager"),  # inductor takes half a minute and a C++ compiler
)


# ---------------------------------------------------------------- step


def test_contenders_take_turns_and_another_one_is_first_each_round():
    calls = []
    contenders = {name: lambda name=name: calls.append(name) for name in "ab"}
    rounds = step.measure_rounds(contenders, n_rounds=2, n_steps=3)
    assert "".join(calls) == "aaabbb" + "bbbaaa"
    for times_s in rounds:
        assert times_s.keys() == {"a", "b"}


def test_a_ratio_compares_the_turns_of_one_round():
    # The machine slows down from round to round. Medians of the speeds alone would say the opposite.
    rounds = [
        {"trainer": 1.0, "bare_loop": 2.0},
        {"trainer": 2.0, "bare_loop": 1.0},
        {"trainer": 8.0, "bare_loop": 4.0},
    ]
    assert step.compare_rounds(rounds) == {"bare_loop": [2.0, 0.5, 0.5]}


def test_step_compares_all_contenders(capsys):
    pytest.importorskip("transformers")
    assert step.main(Namespace(json=True, rounds=2, steps=1), TINY_CONFIG) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ratios"].keys() == step.RATIO_OF.keys()
    assert report["tokens_per_s"].keys() == {
        "trainer",
        "bare_loop",
        "transformers",
        "compiled",
    }
    assert not dist.is_initialized()


def test_step_compares_the_rest_without_transformers_and_a_compiler(monkeypatch, capsys):
    def refuse(name: str, extra: str) -> None:
        raise UserError(f"No module named {name!r}")

    monkeypatch.setattr(step, "import_extra", refuse)
    monkeypatch.setattr(
        step,
        "find_missing_compiler",
        lambda device_type: [("no C++ compiler", "Install one")],
    )
    assert step.main(Namespace(json=False, rounds=1, steps=1), TINY_CONFIG) == 0
    printed = capsys.readouterr()
    assert "transformers" in printed.err
    [line] = printed.out.splitlines()
    assert line.startswith("bare_loop")


def test_contenders_that_compute_something_else_are_not_compared(monkeypatch, capsys):
    def build_optimizer(section, *args):
        faster = replace(section, lr=section.lr * 1.1)
        return optim.build_optimizer(faster, *args)

    monkeypatch.setattr("torchtitan_lite.build.build_optimizer", build_optimizer)
    assert step.main(Namespace(json=True, rounds=1, steps=1), TINY_CONFIG) == 1
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------- gpu


def make_configs(size: str) -> list[Config]:
    fixed = gpu.set_keys(Config(), gpu.LONG | {"model.flavor": size})
    configs = []
    for plan in gpu.PLANS:
        keys = dict(zip(gpu.PLAN_KEYS, plan, strict=True))
        configs.append(gpu.set_keys(fixed, keys))
    return configs


class FakePool:
    """In place of a process for each question: notes the config, and raises or answers."""

    def __init__(self, error: Exception, n_failures: int):
        self.error = error
        self.n_failures = n_failures
        self.tried: list[Config] = []

    def __call__(self, *args):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass

    def submit(self, question, config: Config, argument):
        self.tried.append(config)
        return self

    def result(self) -> dict:
        if len(self.tried) <= self.n_failures:
            raise self.error
        return {"answer": 42}


def try_plans(monkeypatch, size: str, gib: float, pool: FakePool) -> dict:
    """Return the answer of `bench gpu` for a model, on a GPU with this memory."""
    machine = Machine("cuda", 1, int(gib * 2**30), "a GPU")
    monkeypatch.setattr(gpu, "detect_machine", lambda: machine)
    monkeypatch.setattr(gpu, "ProcessPoolExecutor", pool)
    return gpu.try_configs(gpu.measure_training, make_configs(size), "trace")


@pytest.mark.parametrize(
    ("size", "gib", "expected"),
    [
        ("8B", 140.4, ("bfloat16", "selective", 2)),
        ("3B", 79.6, ("float32", "none", 1)),
        ("1B", 79.6, ("float32", "none", 4)),
    ],
)
def test_a_size_is_trained_with_the_first_plan_that_fits(size, gib, expected, monkeypatch):
    pool = FakePool(RuntimeError(), 0)
    assert try_plans(monkeypatch, size, gib, pool) == {"answer": 42}
    assert tuple(gpu.get_value(pool.tried[0], key) for key in gpu.PLAN_KEYS) == expected


def test_8b_on_80_gb_says_what_it_needs(monkeypatch):
    answer = try_plans(monkeypatch, "8B", 80, FakePool(RuntimeError(), 0))
    assert "including 60 for weights and moments" in answer["absent"]


@pytest.mark.parametrize(
    ("error", "n_tried"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), 3),
        (BrokenProcessPool("it died"), 1),
    ],
)
def test_after_an_out_of_memory_error_a_plan_with_fewer_bytes_is_tried(error, n_tried, monkeypatch):
    pool = FakePool(error, 2)
    answer = try_plans(monkeypatch, "1B", 200, pool)
    assert len(pool.tried) == n_tried
    assert ("failed" in answer) == (n_tried == 1)
    n_bytes = [gpu.plan_memory(config).live for config in pool.tried]
    assert n_bytes == sorted(set(n_bytes), reverse=True)


def test_without_a_gpu_nothing_is_asked(capsys, monkeypatch):
    monkeypatch.setattr(gpu, "detect_machine", lambda: Machine("cpu", 1, 2**40, "x86_64 CPU"))
    assert door.main(["bench", "gpu"]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_the_questions_are_answered_on_a_cpu_too(tmp_path):
    config = gpu.set_keys(TINY_CONFIG, {"training.mixed_precision_param": "bfloat16"})
    trace = tmp_path / "trace.json.gz"
    answer = gpu.measure_training(config, trace)
    assert json.dumps(answer)
    assert answer["losses"][-1] < answer["losses"][0]
    assert answer["mfu_full"] is None
    assert trace.stat().st_size > 0
    answer = gpu.try_configs(gpu.compare_runs, [config], tmp_path)  # in a process of its own
    assert answer["errors"] == {"async": 0.0, "resumed": 0.0, "offload": 0.0}
    assert answer["save_blocked_s"].keys() == {"disabled", "async_with_pinned_mem"}
