"""Parameters and FLOPs against what was published, and against what torch counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from torchtitan_lite.config.flavors import FLAVORS, count_flops_per_token, count_parameters
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.schema import Model
from torchtitan_lite.model.llama3 import Llama3

# As the published checkpoints hold them: Llama 3.2 1B and 3B, Llama 3.1 8B, 70B and 405B.
PUBLISHED_PARAMETERS = {
    "1B": 1_235_814_400,
    "3B": 3_212_749_824,
    "8B": 8_030_261_248,
    "70B": 70_553_706_496,
    "405B": 405_853_388_800,
}


@pytest.mark.parametrize("flavor", PUBLISHED_PARAMETERS)
def test_parameters_are_those_of_the_published_checkpoints(flavor):
    assert count_parameters(FLAVORS[flavor]) == PUBLISHED_PARAMETERS[flavor]


@pytest.mark.parametrize("flavor", FLAVORS)
def test_the_model_has_as_many_parameters_as_its_shape_says(flavor):
    with torch.device("meta"):
        model = Llama3(FLAVORS[flavor])
    assert sum(parameter.numel() for parameter in model.parameters()) == count_parameters(FLAVORS[flavor])


def test_flops_of_llama3_8b_at_8192_tokens_are_the_known_ones():
    flops = count_flops_per_token(FLAVORS["8B"], seq_len=8192)
    assert round(flops.full / 1e9, 1) == 57.9
    assert round(flops.causal / 1e9, 1) == 51.5


@pytest.mark.parametrize("flavor", ["debug", "1B"])
def test_flops_are_three_times_what_torch_counts_in_forward(flavor):
    shape, seq_len = FLAVORS[flavor], 64
    with torch.device("meta"):
        model = Llama3(shape)
        tokens = torch.zeros(1, seq_len, dtype=torch.int64)
        # The plain matmuls of attention: the counter knows each of them, whatever kernel this machine would take.
        with (
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
            FlopCounterMode(display=False) as counter,
        ):
            model(tokens, positions=torch.arange(seq_len)[None])
    assert 3 * counter.get_total_flops() == count_flops_per_token(shape, seq_len).full * seq_len


def test_a_number_beside_the_flavor_overrides_its_row():
    shape = resolve_model(Model(flavor="8B", n_layers=4))
    assert (shape.n_layers, shape.dim) == (4, 4096)


def test_a_new_width_gets_a_head_dim_that_fits_it():
    assert resolve_model(Model(flavor="debug", dim=256, n_heads=8)).head_dim == 32


def test_rope_scaling_none_turns_llama_3_1_into_llama_3():
    assert resolve_model(Model(flavor="8B")).rope_scaling is not None
    assert resolve_model(Model(flavor="8B", rope_scaling="none")).rope_scaling is None


@pytest.mark.parametrize(
    ("model", "key"),
    [
        (Model(flavor="9B"), "model.flavor"),
        (Model(flavor="debug", dim=130), "model.n_heads"),
        (Model(flavor="debug", n_kv_heads=3), "model.n_kv_heads"),
        (Model(flavor="debug", head_dim=31), "model.head_dim"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_by_key(model, key):
    with pytest.raises(ConfigError) as error:
        resolve_model(model)
    assert [problem.key for problem in error.value.problems] == [key]
