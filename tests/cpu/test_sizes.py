"""Test the model tables and choices.py: sizes equal published sizes and torch's counts, and every name has code."""

from dataclasses import replace

import pytest
import torch
import torch.distributed.pipelining as pipelining
from marks import each_row
from torch.utils.flop_counter import FlopCounterMode

from torchtitan_lite.build import build_on_meta
from torchtitan_lite.config.block import count_flops_per_token, count_parameters, list_parameters
from torchtitan_lite.config.checks import plan_layout
from torchtitan_lite.config.choices import ATTENTIONS, OPTIMIZERS, SCHEDULES
from torchtitan_lite.config.extensions import load_extension
from torchtitan_lite.config.features import EXTENSIONS
from torchtitan_lite.config.messages import UserError, collecting
from torchtitan_lite.config.model import resolve_model
from torchtitan_lite.config.model_rows import ModuleRow
from torchtitan_lite.config.schema import Config, Model, with_value
from torchtitan_lite.models.llama3.modules import Llama3
from torchtitan_lite.models.llama3.table import FLAVORS
from torchtitan_lite.models.registry import MODELS

# Number of parameters in the published checkpoints of Llama 3.2 1B and 3B, Llama 3.1 8B, 70B and 405B, Mixtral v0.1,
# Qwen3.
PUBLISHED_PARAMETERS = """
debug 1,328,256
auto 1,328,256
debug_windows 1,328,272
debugmodel 6,163,712
1B 1,235,814,400
3B 3,212,749,824
8B 8,030,261,248
70B 70,553,706,496
405B 405,853,388,800
debug_moe 1,971,328
Mixtral-8x7B 46,702,792,704
Mixtral-8x22B 140,620,634,112
Qwen2.5-0.5B 494,032,768
Qwen2.5-1.5B 1,543,714,304
Qwen2.5-3B 3,085,938,688
Qwen2.5-7B 7,615,616,512
Qwen2.5-14B 14,770,033,664
Qwen2.5-32B 32,763,876,352
Qwen2.5-72B 72,706,203,648
Qwen3-0.6B 596,049,920
Qwen3-1.7B 1,720,574,976
Qwen3-4B 4,022,468,096
Qwen3-8B 8,190,735,360
Qwen3-14B 14,768,307,200
Qwen3-32B 32,762,123,264
Qwen3-30B-A3B 30,532,122,624
Qwen3-235B-A22B 235,093,634,560
"""  # debugmodel: the number that torchtitan logs
ACTIVE_PARAMETERS = """
Mixtral-8x7B | 12.9
Mixtral-8x22B | 39.2
Qwen3-30B-A3B | 3.4
Qwen3-235B-A22B | 22.2
"""  # in billions, as the model cards round them


@each_row("flavor", FLAVORS)
def test_the_number_of_parameters_is_that_of_the_model_and_of_the_published_checkpoint(flavor):
    with torch.device("meta"):
        model = Llama3(FLAVORS[flavor])
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(FLAVORS[flavor]) == n_parameters
    assert f"\n{flavor} {n_parameters:,}\n" in PUBLISHED_PARAMETERS


@each_row("flavor, billions", ACTIVE_PARAMETERS)
def test_the_number_of_active_parameters_is_the_published_one(flavor, billions):
    n_active = count_parameters(FLAVORS[flavor], active=True)
    assert f"{n_active / 1e9:.1f}" == billions


@each_row("flavor", ["debug", "1B"])
def test_flops_are_three_times_what_torch_counts_in_forward(flavor):
    args, seq_len = FLAVORS[flavor], 64
    with torch.device("meta"):
        model = Llama3(args)
        tokens = torch.zeros(1, seq_len, dtype=torch.int64)
        # The math backend computes attention by matmuls, whose FLOPs torch counts on every machine.
        with (
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
            FlopCounterMode(display=False) as counter,
        ):
            model(tokens, positions=torch.arange(seq_len)[None])
    assert 3 * counter.get_total_flops() == count_flops_per_token(args, seq_len).full * seq_len


def test_a_number_beside_the_flavor_overrides_its_row_and_a_new_width_gets_a_head_dim_that_fits_it():
    args = resolve_model(Model(flavor="8B", n_layers=4))
    assert (args.n_layers, args.dim) == (4, 4096) and args.rope_scaling is not None
    assert resolve_model(Model(flavor="debug", dim=256, n_heads=8)).head_dim == 32
    assert resolve_model(Model(flavor="debug", n_heads=8)).head_dim == 16


def test_every_row_of_choices_py_has_code():
    for name, row in OPTIMIZERS.items():
        module = load_extension(row.extension) if row.extension else torch.optim
        assert hasattr(module, name)
    for name in EXTENSIONS:
        load_extension(name)
    assert all(row.window or row.extension for row in ATTENTIONS.values())
    assert all(pipelining.schedules.get_schedule_class(name) for name in SCHEDULES)


@pytest.fixture
def add_row(monkeypatch):
    """Return a function that adds a module row to the table of a llama3 block."""

    def add(row: ModuleRow) -> None:
        llama = MODELS["llama3"]
        forked = replace(llama, list_block=lambda *args: [*llama.list_block(*args), row])
        monkeypatch.setitem(MODELS, "llama3", forked)
        list_parameters.cache_clear()

    yield add
    list_parameters.cache_clear()


def make_norm(n_features: int, tp_style: str = "sequence") -> ModuleRow:
    return ModuleRow("ffn_scale", "norm", (n_features,), tp_style, init_mean=1.0)


# 128 features in all heads together; each head has 32
OLMO_NORM = ModuleRow("attention.q_norm", "norm", (128,), "heads", init_mean=1.0)
TP = "parallelism.tensor_parallel_degree"
ROWS = [  # row, tp, key of the problem
    (OLMO_NORM, 2, TP),
    (OLMO_NORM, 1, None),
    (ModuleRow("ffn.gate", "linear", (1, 128), "colwise", 0.02), 2, TP),
    (make_norm(128, "rowwise"), 1, "model.name"),
    (ModuleRow("feed_forward.gate", "router", (8, 128), "sequence"), 2, "model.name"),
    (make_norm(256), 2, TP),  # a norm across ranks
]


@each_row("row, tp, key", ROWS)
def test_check_finds_problems_of_a_module_row_without_importing_the_module(row, tp, key, add_row):
    add_row(row)
    config = with_value(Config(), TP, tp)
    problems: list = []
    with collecting(problems):
        plan_layout(config, resolve_model(config.model), 2)
    assert [problem.key for problem in problems] == ([key] if key else [])


def test_a_table_that_differs_from_its_code_stops_a_run(add_row):
    add_row(OLMO_NORM)
    config = Config()
    with pytest.raises(UserError, match=r"layers\.0\.attention\.q_norm\.weight.*table\.py"):
        build_on_meta(config, resolve_model(config.model))
