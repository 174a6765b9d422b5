"""bench: contenders take turns, ratios of each round, what a GPU is asked. Never how fast anything is."""

import json
from argparse import Namespace
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from torchtitan_lite import __main__ as door
from torchtitan_lite.components import optim
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.config.schema import Config
from torchtitan_lite.tools.bench import gpu, step
from torchtitan_lite.tools.verify.reduction import override

TINY_CONFIG = override(
    step.STEP_CONFIG,
    {
        "model.dim": 32,
        "model.n_layers": 2,
        "model.n_heads": 4,
        "model.n_kv_heads": 2,
        "model.ffn_dim": 64,
        "model.vocab_size": 128,
        "training.local_batch_size": 2,
        "training.seq_len": 16,
        "compile.backend": "eager",  # inductor takes half a minute and a C++ compiler
    },
)
ONCE = Namespace(json=False, rounds=1, steps=1)


# ---------------------------------------------------------------- step


def test_contenders_take_turns_and_another_one_is_first_each_round():
    calls = []

    def make_step(name: str) -> torch.Tensor:
        calls.append(name)
        return torch.tensor(1.0)

    contenders = {name: partial(make_step, name) for name in "ab"}
    rounds = step.measure_rounds(contenders, Namespace(rounds=2, steps=3))
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
    assert report["tokens_per_s"].keys() == {"trainer", "bare_loop", "transformers", "compiled"}
    assert not dist.is_initialized()


def test_step_compares_the_rest_without_transformers_and_a_compiler(monkeypatch, capsys):
    def refuse(name: str, extra: str) -> None:
        raise UserError(f"No module named {name!r}")

    monkeypatch.setattr(step, "import_extra", refuse)
    monkeypatch.setattr(
        step,
        "find_missing_compiler",
        lambda device_type: "there is no compiler",
    )
    assert step.main(ONCE, TINY_CONFIG) == 0
    printed = capsys.readouterr()
    assert "transformers" in printed.err
    assert [line.split()[0] for line in printed.out.splitlines()] == [
        "trainer",
        "bare_loop",
        "bare_loop",
    ]


def test_contenders_that_compute_something_else_are_not_compared(monkeypatch, capsys):
    def build_optimizer(section, *args):
        faster = replace(section, lr=section.lr * 1.1)
        return optim.build_optimizer(faster, *args)

    monkeypatch.setattr("torchtitan_lite.build.build_optimizer", build_optimizer)
    assert step.main(ONCE, TINY_CONFIG) == 1
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------- gpu


class FakePool:
    """In place of a process for each measurement: notes the config, and raises or answers."""

    def __init__(self, error: Exception, n_failures: int):
        self.error = error
        self.n_failures = n_failures
        self.tried: list[Config] = []

    def __call__(self, *args):
        return nullcontext(self)

    def submit(self, measure, config: Config, *args):
        self.tried.append(config)
        return self

    def result(self) -> dict:
        if len(self.tried) <= self.n_failures:
            raise self.error
        return {"mfu_full": 0.5}


def measure(monkeypatch, size: str, gib: float, pool: FakePool) -> dict:
    """Return the answer of `bench gpu` for a model, on a GPU with this memory."""
    machine = Machine("cuda", 1, int(gib * 2**30), "a GPU")
    monkeypatch.setattr(gpu, "detect_machine", lambda: machine)
    monkeypatch.setattr(gpu, "ProcessPoolExecutor", pool)
    return gpu.measure_first_that_fits(gpu.LONG | {"model.flavor": size}, "trace", ONCE)


@pytest.mark.parametrize(
    ("size", "gib", "expected"),
    [
        ("8B", 140.4, {"plan": ("bfloat16", "selective", 2), "mfu_full": 0.5}),
        ("3B", 79.6, {"plan": ("float32", "none", 1), "mfu_full": 0.5}),
        ("1B", 79.6, {"plan": ("float32", "none", 4), "mfu_full": 0.5}),
        ("8B", 80, {"absent": "needs 108 GiB; 76 GiB are usable here"}),
    ],
)
def test_a_size_is_trained_with_the_first_plan_that_fits(size, gib, expected, monkeypatch):
    assert measure(monkeypatch, size, gib, FakePool(RuntimeError(), 0)) == expected


@pytest.mark.parametrize(
    ("error", "n_tried"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), 3),
        (BrokenProcessPool("it died"), 1),
    ],
)
def test_after_an_out_of_memory_error_the_next_plan_is_tried(error, n_tried, monkeypatch):
    pool = FakePool(error, 2)
    answer = measure(monkeypatch, "1B", 200, pool)
    assert len(pool.tried) == n_tried
    assert ("failed" in answer) == (n_tried == 1)


def test_without_a_gpu_nothing_is_measured(capsys, monkeypatch):
    monkeypatch.setattr(gpu, "detect_machine", lambda: Machine("cpu", 1, 2**40, "x86_64 CPU"))
    assert door.main(["bench", "gpu"]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_a_measurement_works_on_a_cpu_too(tmp_path):
    trace = tmp_path / "trace.json.gz"
    answer = gpu.measure_training(TINY_CONFIG, trace, ONCE)
    assert json.dumps(answer)
    assert answer["tokens_per_s_per_rank"] > 0
    assert answer["mfu_full"] is None
    assert trace.stat().st_size > 0
