"""Test parts of the single-device model. test_hugging_face.py compares whole models with transformers'."""

import json
from dataclasses import asdict, replace
from unittest.mock import patch

import pytest
import torch
from marks import each_row, read_lines

from torchtitan_lite.checkpoint.format import Manifest
from torchtitan_lite.checkpoint.starting_weights import parse_model_args
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.model import attention
from torchtitan_lite.model.attention import CausalAttention, avoids_cudnn
from torchtitan_lite.model.rotary import rotary_angles, rotate
from torchtitan_lite.models.llama3.modules import Llama3
from torchtitan_lite.parallel.initial_weights import initialize_weights

PLAIN = ModelArgs(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=96, vocab_size=128
)


def read_flavor(fields: str) -> ModelArgs:
    shape = asdict(PLAIN) | json.loads(fields)
    return parse_model_args(Manifest(0, {"shape": shape}, {}))


# name | fields that differ from PLAIN
FLAVORS = {
    name: read_flavor(fields)
    for name, fields in read_lines("""
Llama 3 | {}
Llama 3.1, scaled RoPE | {"rope_scaling": {"factor": 8.0, "original_length": 64}}
Llama 3.2, tied | {"rope_scaling": {"factor": 32.0, "original_length": 64}, "tie_embeddings": true}
head dim of its own | {"head_dim": 32}
one key/value head | {"n_kv_heads": 1}
Qwen2 | {"qkv_bias": true, "norm_eps": 1e-6}
Qwen3 | {"qk_norm": true, "head_dim": 24, "norm_eps": 1e-6}
Qwen2, windows | {"qkv_bias": true, "sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]}
Mixtral, windows | {"ffn_dim": 40, "moe": {"n_experts": 4, "top_k": 2, "expert_ffn_dim": 40}, "sliding_window": 30}
Mixtral | {"ffn_dim": 40, "moe": {"n_experts": 4, "top_k": 2, "expert_ffn_dim": 40}}
Qwen3-MoE | {"qk_norm": true, "head_dim": 32, "moe": {"n_experts": 8, "top_k": 3, "expert_ffn_dim": 40}}
Qwen3-MoE, a dense layer, weights as they are | {"qk_norm": true, "moe": {"n_experts": 8, "top_k": 2, \
    "expert_ffn_dim": 24, "normalize_top_k": false, "n_first_dense_layers": 1}}
""")
}


def build_ours(args: ModelArgs) -> Llama3:
    model = Llama3(args)
    initialize_weights(model, seed=1)
    with torch.no_grad():  # if all weights of norms were 1, a missing norm might not be detected
        for index, parameter in enumerate(model.parameters()):
            if parameter.dim() == 1:
                parameter += torch.linspace(-0.3, 0.3, parameter.numel()).roll(index)
    return model


def turn(values, turns):
    """Rotate by a complex multiplication in float64."""
    pairs = values.detach().double().unflatten(-1, (-1, 2))
    product = torch.view_as_complex(pairs) * turns
    return torch.view_as_real(product).flatten(-2).to(values.dtype)


ROTATION_ERRORS = {torch.float64: 1e-6, torch.float32: 1e-6, torch.bfloat16: 4e-3}


@each_row("compiled", [False, True])
@each_row("dtype", ROTATION_ERRORS)
def test_pairs_are_rotated_as_complex_numbers(monkeypatch, compiled, dtype):
    """Compare values and gradients. In memory, heads come before positions in the gradient, as attention returns it."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    head_dim = PLAIN.head_dim
    positions = torch.arange(50)[None]
    rotation = rotary_angles(positions, PLAIN)
    x = torch.randn(1, 50, 3, head_dim, dtype=dtype, requires_grad=True)
    weights = torch.randn(1, 3, 50, head_dim, dtype=dtype)
    weights = weights.transpose(1, 2)
    rotated = rotate(x, rotation)
    rotated.backward(weights)

    exponents = torch.arange(0, head_dim, 2).double() / head_dim
    angles = positions[..., None, None] * PLAIN.rope_theta**-exponents
    turns = torch.polar(torch.ones_like(angles), angles)
    gradient = turn(weights, turns.conj())
    error = ROTATION_ERRORS[dtype]
    close = {"rtol": error, "atol": 10 * error}
    torch.testing.assert_close(rotated, turn(x, turns), **close)
    torch.testing.assert_close(x.grad, gradient, **close)


def draw_weights(seed: int = 0, n_layers: int = 2, layer: int = 1) -> torch.Tensor:
    model = Llama3(replace(PLAIN, n_layers=n_layers))
    initialize_weights(model, seed)
    return model.layers[f"{layer}"].attention.wq.weight


def test_initial_weights_depend_on_seed_and_name_only():
    weights = draw_weights()
    assert torch.equal(weights, draw_weights(n_layers=4))
    assert not torch.equal(weights, draw_weights(seed=1))
    assert not torch.equal(weights, draw_weights(layer=0))


CUT = 0.9933  # standard deviation of a normal distribution with std 1 that is clamped at 3
# weight | mean | standard deviation before values are clamped
SPREAD = """
layers.0.attention.wq.weight | 0 | 0.02
layers.0.attention.wo.weight | 0 | 0.01
tok_embeddings.weight | 0 | 1
output.weight | 0 | 0.0625
layers.0.attention.wq.bias | 0 | 0
layers.0.attention.q_norm.weight | 1 | 0
norm.weight | 1 | 0
"""


def test_initial_weights_have_the_mean_and_standard_deviation_of_their_rule():
    model = Llama3(replace(PLAIN, dim=256, ffn_dim=512, qkv_bias=True, qk_norm=True))
    initialize_weights(model, seed=0)
    parameters = dict(model.named_parameters())
    for fqn, *expected in read_lines(SPREAD):
        mean, std = map(float, expected)
        values = parameters[fqn]
        assert values.mean().item() == pytest.approx(mean, abs=0.02 * std), fqn
        assert values.std().item() == pytest.approx(std * CUT, rel=0.03), fqn


class OnGPU(torch.Tensor):
    is_cuda = True


# capability of the GPU, key/value heads | whether cuDNN is avoided
CUDNN = """
10 4 | yes
10 8 |
9 4 |
"""


@each_row("case, avoids", CUDNN)
def test_cudnn_is_avoided_only_in_the_cases_in_which_its_results_were_wrong(
    monkeypatch, case, avoids
):
    capability, n_kv_heads = map(int, case.split())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    key = torch.empty(1, n_kv_heads, 1, 1).as_subclass(OnGPU)
    assert avoids_cudnn(key) == bool(avoids)
    query = torch.randn(1, 4, 8, 16)
    keys = torch.randn(2, 1, 2, 8, 16)
    expected = CausalAttention()(query, *keys, None)
    monkeypatch.setattr(attention, "avoids_cudnn", lambda key: True)
    assert torch.equal(CausalAttention()(query, *keys, None), expected)


def test_on_a_gpu_in_fp32_key_heads_are_repeated(monkeypatch):
    """torch's only kernel for fewer key heads than query heads would store S x S scores."""
    keys = torch.randn(2, 1, 2, 8, 16)
    with patch.object(attention.F, "scaled_dot_product_attention") as kernel:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        CausalAttention()(torch.randn(1, 4, 8, 16), *keys.as_subclass(OnGPU), None)
    for repeated, given in zip(kernel.call_args.args[1:], keys, strict=True):
        assert torch.equal(repeated, given[:, [0, 0, 1, 1]])
