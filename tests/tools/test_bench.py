"""Test `bench`: contenders take turns, and ratios are computed within each round. No test depends on timing."""

from argparse import Namespace
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from layouts import read_rows
from marks import each_row

from torchtitan_lite.components import optim
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.parallel.gloo_workers import limit_gloo_workers
from torchtitan_lite.tools import bench, options
from torchtitan_lite.tools.verify.reduction import override

(TINY,) = read_rows("""
tiny | 1 | model.dim=32 model.n_layers=2 model.n_heads=4 model.n_kv_heads=2 model.ffn_dim=64 model.vocab_size=128 \
    training.local_batch_size=2 training.seq_len=16
""").values()
TINY_CONFIG = override(bench.STEP_CONFIG, TINY.overrides)
ONCE = Namespace(rounds=1, steps=1, layout=None)


def test_contenders_take_turns_and_a_different_one_starts_each_round():
    calls = []

    def make_step(name: str) -> torch.Tensor:
        calls.append(name)
        return torch.tensor(1.0)

    contenders = {name: partial(make_step, name) for name in "ab"}
    limit_gloo_workers()
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    rounds = bench.measure_rounds(contenders, Namespace(rounds=2, steps=3))
    dist.destroy_process_group()
    assert "".join(calls) == "aaabbb" + "bbbaaa"
    for turns in rounds:
        assert turns.keys() == {"a", "b"}


def test_a_ratio_compares_contenders_within_the_same_round(monkeypatch, capsys):
    # The machine slows down from round to round. A ratio of the median speeds would give the opposite result.
    rounds = []
    for trainer_s, loop_s in ((1.0, 2.0), (2.0, 1.0), (8.0, 4.0)):
        rounds.append({"trainer": bench.Turn(trainer_s, 0.5), "bare_loop": bench.Turn(loop_s, 0.7)})
    monkeypatch.setattr(bench, "measure_rounds", lambda *_: rounds)
    assert bench.main(ONCE, TINY_CONFIG) == 0
    printed = capsys.readouterr().out
    # the bare loop takes 2 s for 2 rows of 16 tokens
    row = "bare_loop           16 tokens/s   0.700 CPU s/step  trainer / bare_loop 0.500 (0.500 - 2.000)"
    assert row in printed.splitlines()


def test_ranks_of_a_layout_compute_the_loss_of_the_bare_loop(capsys):
    layout = [options.degree("pp2")]
    assert bench.main(Namespace(rounds=1, steps=1, layout=layout), TINY_CONFIG) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "trainer",
        "bare_loop",
    ]


@each_row("has_transformers", [True, False])
def test_the_contenders_that_can_run_are_compared(has_transformers, monkeypatch, capsys):
    def refuse(name: str, extra: str) -> None:
        raise UserError(f"No module named {name!r}")

    expected = ["trainer", "bare_loop"]
    if has_transformers:
        pytest.importorskip("transformers")
        expected.append("transformers")
    else:
        monkeypatch.setattr(bench, "import_extra", refuse)
    assert bench.main(ONCE, TINY_CONFIG) == 0
    printed = capsys.readouterr()
    assert ("transformers" in printed.err) != has_transformers
    assert [line.split()[0] for line in printed.out.splitlines()] == expected
    assert not dist.is_initialized()


def test_contenders_are_not_compared_if_their_results_differ(monkeypatch, capsys):
    def build_optimizer(section, *args):
        faster = replace(section, lr=section.lr * 1.1)
        return optim.build_optimizer(faster, *args)

    monkeypatch.setattr("torchtitan_lite.build.build_optimizer", build_optimizer)
    assert bench.main(ONCE, TINY_CONFIG) == 1
    assert capsys.readouterr().out == ""
