"""Test float8: results are bitwise identical to torchao's, weights are gathered as float8, and the right layers compute
in float8.

test_layouts.py tests gradients of layouts, and test_check.py tests refused configs."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from marks import each_row
from torch import nn

from torchtitan_lite.config.float8 import list_linears, plan_float8
from torchtitan_lite.config.machine import GIB, Machine
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.config.settings import check_settings
from torchtitan_lite.extensions import float8_rowwise
from torchtitan_lite.model import float8_linear
from torchtitan_lite.models.llama3.table import FLAVORS

# ---------------------------------------------------------------- one linear layer

RECIPES = float8_linear.RECIPES | float8_rowwise.ROWWISE_RECIPES

INPUTS = {
    "ordinary": lambda x: x,
    "a token of zeros": lambda x: x.index_fill(0, torch.tensor([1]), 0.0),
    "zeros": lambda x: x * 0,
    "outliers": lambda x: x.index_fill(1, torch.tensor([3]), 1000.0),
    "tiny": lambda x: x * 1e-11,
    "nothing": lambda x: x * 1e-30,
    "a view": lambda x: x.t().contiguous().t(),
}


def run_linear(linear: nn.Module, x, dy) -> list[torch.Tensor]:
    """Return the output and the gradients of x and the weight."""
    x = x.clone().requires_grad_()
    y = linear(x)
    gradients = torch.autograd.grad(y, (x, linear.weight), dy)
    return [y.detach(), *gradients]


def make_linear(recipe_name: str, weight, *, emulate: bool) -> torch.nn.Linear:
    out_features, in_features = weight.shape
    linear = torch.nn.Linear(in_features, out_features, bias=False)
    float8_linear.convert_to_float8(linear, RECIPES[recipe_name], emulate=emulate)
    linear.weight = nn.Parameter(weight.clone())
    return linear


@pytest.mark.parametrize("emulate", [False, True], ids=["scaled_mm", "emulate"])
@each_row("dtype", [torch.bfloat16, torch.float32])
@each_row("recipe_name", RECIPES)
def test_output_and_gradients_are_bitwise_identical_to_torchaos(recipe_name, dtype, emulate):
    torchao = pytest.importorskip(
        "torchao.float8", reason="torchao is not installed; only tests need it"
    )
    torch.manual_seed(0)
    weight = 0.02 * torch.randn(96, 64)
    # with one scale for the whole tensor, the numbers in all other columns lose bits
    weight[:, 5] *= 4096
    weight = weight.to(dtype)
    x = torch.randn(32, 64)
    dy = torch.randn(32, 96).to(dtype) / 1e4

    plain = nn.Linear(64, 96, bias=False)
    plain.weight = nn.Parameter(weight.clone())
    recipe = torchao.Float8LinearConfig.from_recipe_name(recipe_name)
    recipe = replace(recipe, emulate=emulate)
    (oracle,) = torchao.convert_to_float8_training(nn.Sequential(plain), config=recipe)
    linear = make_linear(recipe_name, weight, emulate=emulate)
    for name, change in INPUTS.items():
        changed = change(x).to(dtype)
        found = run_linear(linear, changed, dy)
        expected = run_linear(oracle, changed, dy)
        assert all(map(torch.equal, found, expected)), name


# recipe | number of float8 matmuls
SUMMED = """
tensorwise | 3
rowwise | 3
rowwise_with_gw_hp | 2
"""


@each_row("recipe_name, n_matmuls", SUMMED)
def test_float8_matmuls_use_fast_accumulation_in_forward_but_not_in_backward(
    recipe_name, n_matmuls
):
    linear = make_linear(recipe_name, torch.ones(32, 16), emulate=False)
    with patch.object(torch, "_scaled_mm", wraps=torch._scaled_mm) as multiply:
        run_linear(linear, torch.ones(48, 16), torch.ones(48, 32))
    fast = [call.kwargs["use_fast_accum"] for call in multiply.call_args_list]
    assert fast == [True] + [False] * (int(n_matmuls) - 1)


# ---------------------------------------------------------------- which layers


def test_float8_skips_layers_by_name_and_by_dims_on_every_rank():
    linears = {
        "layers.0.attention.wq": (64, 64),
        "layers.0.attention.wk": (32, 64),
        "layers.1.attention.wk": (24, 64),
    }
    wq, wk, _ = linears
    assert plan_float8(linears, ["output"], tp=1) == [wq, wk]
    assert plan_float8(linears, ["output"], tp=4) == [wq]
    assert plan_float8(linears, ["wq", "layers.1"], tp=1) == [wk]


@each_row("recipe_name", ["tensorwise", "rowwise"])
@each_row("flavor", ["1B", "8B", "70B"])
def test_auto_filter_small_kn_skips_the_same_layers_as_torchao(flavor, recipe_name):
    torchao = pytest.importorskip(
        "torchao.float8", reason="torchao is not installed; only tests need it"
    )
    names = ["output", "auto_filter_small_kn"]
    computes = torchao._auto_filter_for_recipe(recipe_name, names)
    linears = list_linears(replace(FLAVORS[flavor], n_layers=1))
    expected = []
    for fqn, (out_features, in_features) in linears.items():
        linear = nn.Linear(in_features, out_features, device="meta")
        if computes(linear, fqn):
            expected.append(fqn)
    assert plan_float8(linears, names, 1, recipe_name) == expected


# ---------------------------------------------------------------- config

GPUS = """
A100-SXM4-80GB | refused
A10G | refused
GeForce RTX 3090 Ti | refused
RTX A6000 | refused
H100 80GB HBM3 |
L4 |
GeForce RTX 4090 |
RTX 2000 Ada Generation |
B200 |
"""


@each_row("name, refused", GPUS)
def test_a_gpu_without_float8_is_refused_unless_float8_is_emulated(name, refused):
    machine = Machine("cuda", 2, 80 * GIB, f"NVIDIA {name}")
    keys = ["--model.converters=float8"]
    assert any(check_settings(read_config(keys).config, machine)) == bool(refused)
    keys.append("--quantize.linear.float8.emulate")
    assert not any(check_settings(read_config(keys).config, machine))
