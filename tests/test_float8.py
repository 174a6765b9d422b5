"""Float8: the arithmetic beside torchao's, bit by bit; layouts beside one process; what must be refused."""

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from unittest.mock import patch

import checkpoints
import compare
import pytest
import torch
from layouts import BFLOAT16, COMPILED, FLOAT8, FLOAT8_LAYOUTS, GATHER, MODE, PRECOMPUTE, REPLICATE, TP, Row
from mutants import MUTANTS
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_lite import step as stepping
from torchtitan_lite.config.flavors import FLAVORS
from torchtitan_lite.config.float8_plan import describe_float8, list_linears, plan_float8
from torchtitan_lite.config.hardware import GIB, Machine
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.config.schema import Checkpoint, Float8
from torchtitan_lite.model.float8_linear import E4M3, E5M2, RECIPES, Float8Linear, cast
from torchtitan_lite.model.llama3 import Llama3
from torchtitan_lite.parallel.float8 import Float8GatheredWeight, ParallelFloat8Linear, apply_float8, find_amax
from torchtitan_lite.preflight import preflight

# ---------------------------------------------------------------- one linear layer

INPUTS = {
    "ordinary": lambda x: x,
    "a token of zeros": lambda x: x.index_fill(0, torch.tensor([1]), 0.0),
    "zeros": lambda x: x * 0,
    "outliers": lambda x: x.index_fill(1, torch.tensor([3]), 1000.0),
    "tiny": lambda x: x * 1e-11,
    "nothing": lambda x: x * 1e-30,
    "a view": lambda x: x.t().contiguous().t(),
}


def run_linear(linear: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = x.clone().requires_grad_()
    y = linear(x)
    return y.detach(), *torch.autograd.grad(y, (x, linear.weight), dy)


def make_linear(recipe_name: str, weight: torch.Tensor, *, emulate: bool) -> Float8Linear:
    out_features, in_features = weight.shape
    linear = Float8Linear(in_features, out_features, recipe_name=recipe_name, emulate=emulate)
    linear.weight = nn.Parameter(weight.clone())
    return linear


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("emulate", [False, True], ids=["scaled_mm", "emulate"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe_name", RECIPES)
def test_output_and_gradients_have_the_bits_of_torchaos(recipe_name, dtype, emulate, inputs):
    torchao = pytest.importorskip("torchao.float8", reason="torchao is not installed; it is only an oracle")
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    weight, x, dy = (
        (0.02 * draw(96, 64)).to(dtype),
        INPUTS[inputs](draw(32, 64)).to(dtype),
        (draw(32, 96) / 1e4).to(dtype),
    )
    weight[:, 5] *= 4096  # next to it, others are small enough to lose bits under a scale for the whole tensor

    plain = nn.Linear(64, 96, bias=False)
    plain.weight = nn.Parameter(weight.clone())
    recipe = replace(torchao.Float8LinearConfig.from_recipe_name(recipe_name), emulate=emulate)
    (oracle,) = torchao.convert_to_float8_training(nn.Sequential(deepcopy(plain)), config=recipe)

    ours = run_linear(make_linear(recipe_name, weight, emulate=emulate), x, dy)
    for own, other in zip(ours, run_linear(oracle, x, dy), strict=True):
        assert torch.equal(own, other)


def list_float8(bits_of_exponent: int, bits_of_fraction: int, bias: int) -> torch.Tensor:
    """All finite positive numbers of such a format, by its definition."""
    n = 2**bits_of_fraction
    below_normal = [m / n * 2.0 ** (1 - bias) for m in range(n)]
    normal = [(1 + m / n) * 2.0 ** (e - bias) for e in range(1, 2**bits_of_exponent) for m in range(n)]
    return torch.tensor(below_normal + normal, dtype=torch.float64)


@pytest.mark.parametrize(("dtype", "numbers"), [(E4M3, list_float8(4, 3, 7)), (E5M2, list_float8(5, 2, 15))])
def test_numbers_are_rounded_to_the_nearest_float8_and_too_large_ones_to_the_largest(dtype, numbers):
    numbers = numbers[numbers <= torch.finfo(dtype).max]
    x = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 2000)
    rounded = cast(x, torch.tensor(2.0), dtype).double()
    nearest = (numbers[:, None] - (2 * x.double().abs())[None]).abs().amin(0)
    assert torch.equal((rounded.abs() - 2 * x.double().abs()).abs(), nearest)
    assert torch.equal(rounded.sign()[rounded != 0], x.double().sign()[rounded != 0])


@pytest.mark.parametrize("recipe_name", RECIPES)
def test_emulation_differs_from_the_scaled_matmul_by_the_order_of_additions_alone(recipe_name):
    generator = torch.Generator().manual_seed(0)
    weight, x, dy = (torch.randn(*shape, generator=generator) for shape in ((96, 64), (32, 64), (32, 96)))
    emulated = run_linear(make_linear(recipe_name, weight, emulate=True), x, dy)
    scaled = run_linear(make_linear(recipe_name, weight, emulate=False), x, dy)
    for one, other in zip(emulated, scaled, strict=True):
        assert compare.relative_error(one, other) < (1e-6 if recipe_name == "tensorwise" else 2**-8)


# ---------------------------------------------------------------- layouts


def measure(pool, oracle, row: Row) -> compare.Difference:
    path = oracle(row.overrides)
    shares = pool.run(compare.measure_layout, row.world_size, row.overrides, path)
    return compare.merge(shares, fqns=set(torch.load(path, weights_only=False, mmap=True).gradients))


@pytest.fixture(scope="module")
def one_rank_in_float8(pool, oracle):
    return measure(pool, oracle, Row(1, FLOAT8))


@pytest.mark.parametrize("name", FLOAT8_LAYOUTS)
def test_each_gradient_of_a_float8_layout_errs_at_most_twice_as_much_as_on_one_rank(
    pool, oracle, one_rank_in_float8, name
):
    difference, alone = measure(pool, oracle, FLOAT8_LAYOUTS[name]), one_rank_in_float8
    assert all(difference.initial_equal.values()) and not difference.unequal_replicas
    too_large = {fqn: e for fqn, e in difference.gradient.items() if e > 2 * alone.gradient[fqn]}
    assert too_large == {}
    assert difference.update <= 2 * alone.update
    assert 0.01 < max(alone.gradient.values()) < 0.2  # 3 bits of fraction, 2 for gradients


def measure_rounding(rank: int, world_size: int, overrides: dict, mutant: str | None) -> float:
    """Worker: how far are the weights that blocks multiply by from the trained ones, as a share of what is allowed?

    The optimizer triples all weights at each step, so that a scale of another step does not pass.
    """
    with MUTANTS[mutant].patch() if mutant else nullcontext():
        run = compare.build_table_run(world_size, overrides)

        @torch.no_grad()
        def triple(*_):
            torch._foreach_mul_([compare.local(p).detach() for p in run.parameters.values()], 3.0)

        run.optimizer.register_step_post_hook(triple)
        vocab_size = run.config.model.vocab_size
        for step in range(2):
            rows = compare.make_batch(step, vocab_size, run.layout.global_batch_size)
            stepping.train_step(run, compare.own_rows(run, rows))
        full = {fqn: p.full_tensor().detach() for fqn, p in run.parameters.items() if isinstance(p, DTensor)}
        shares = []

        def look(module, args, *, fqn):
            used, trained = module.weight, full[f"{fqn}.weight"]
            if isinstance(used, DTensor):
                mesh, (placement,) = used.device_mesh, used.placements
                trained = trained.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()]
                used = used._local_tensor
            assert type(used) is Float8GatheredWeight
            rounded = used.data8.double() / used.scale
            least = find_amax(full[f"{fqn}.weight"]) / 448 / 1024  # half a step of the smallest float8
            allowed = (trained.double().abs() / 16).clamp(min=least)  # half a step of 3 bits
            shares.append(((rounded - trained).abs() / allowed).max().item())

        for part in run.parts:
            for fqn, module in part.named_modules():
                if isinstance(module, ParallelFloat8Linear):
                    module.register_forward_pre_hook(lambda module, args, fqn=fqn: look(module, args, fqn=fqn))
        batch = stepping.shard_for_cp(run, compare.own_rows(run, rows))
        stepping.forward_only(run, batch, stepping.count_global_tokens(run, batch))
        assert len(shares) == 28 * run.layout.n_microbatches
    return max(shares)


UNEVEN = {"training.local_batch_size": 2, "training.global_batch_size": 6}
GATHERED = {
    "dp2": Row(2, GATHER),
    "dp3, rows that 3 does not divide": Row(3, {**GATHER, **UNEVEN}),
    "dp2 precomputed, in bfloat16": Row(2, {**PRECOMPUTE, **BFLOAT16}),
    "dp2 x tp2": Row(4, {TP: 2, **GATHER}),
    "hsdp2x2": Row(4, {REPLICATE: 2, **PRECOMPUTE}),
}


@pytest.mark.parametrize("name", GATHERED)
def test_blocks_multiply_by_the_weights_of_the_last_step_rounded_once(pool, name):
    row = GATHERED[name]
    assert max(pool.run(measure_rounding, row.world_size, row.overrides, None)) <= 1.001


@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if mutant.trial == "float8"])
def test_a_broken_gather_is_noticed(pool, name):
    row = MUTANTS[name].row
    assert max(pool.run(measure_rounding, row.world_size, row.overrides, name)) > 1.1


def train_steps(rank: int, world_size: int, overrides: dict, n_steps: int) -> list[float]:
    """Worker: the losses. From the third step on nothing may be compiled anew."""
    run = compare.build_table_run(world_size, overrides)
    losses = checkpoints.train(run, range(2))
    with patch.object(torch._dynamo.config, "error_on_recompile", True):
        return losses + checkpoints.train(run, range(2, n_steps))


def test_weights_that_travel_as_float8_are_the_same_as_weights_that_are_rounded_on_arrival(pool):
    losses = [pool.run(train_steps, 2, keys, 4) for keys in (FLOAT8, GATHER, PRECOMPUTE)]
    assert losses[0] == losses[1] == losses[2] and len(set(losses[0][0])) == 4


def test_nothing_is_compiled_anew_after_the_second_step(pool):
    assert len(pool.run(train_steps, 2, {**PRECOMPUTE, **COMPILED}, 5)[0]) == 5


class RecordMatmuls(TorchDispatchMode):
    """Notes of each float8 matmul whether it may sum in fewer bits."""

    def __init__(self):
        super().__init__()
        self.fast: list[bool] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.aten._scaled_mm.default:
            bound = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False), **kwargs)
            self.fast.append(bound.get("use_fast_accum", False))
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize(("recipe_name", "n_matmuls"), [("tensorwise", 3), ("rowwise", 3), ("rowwise_with_gw_hp", 2)])
def test_activations_are_summed_fast_and_gradients_exactly(recipe_name, n_matmuls):
    linear = make_linear(recipe_name, torch.ones(32, 16), emulate=False)
    with RecordMatmuls() as matmuls:
        run_linear(linear, torch.ones(48, 16), torch.ones(48, 32))
    assert matmuls.fast == [True] + [False] * (n_matmuls - 1)


def count_matmuls(rank: int, world_size: int, overrides: dict) -> int:
    """Worker: float8 matmuls in one step."""
    run = compare.build_table_run(world_size, overrides)
    with RecordMatmuls() as matmuls:
        checkpoints.train(run, range(1))
    return len(matmuls.fast)


@pytest.mark.parametrize(("mode", "matmuls_per_layer"), [("none", 3), ("selective", 3), ("full", 4)])
def test_per_op_recompute_keeps_what_float8_matmuls_gave(pool, mode, matmuls_per_layer):
    (n,) = pool.run(count_matmuls, 1, {**FLOAT8, MODE: mode})
    assert n == matmuls_per_layer * 7 * compare.TABLE_CONFIG.model.n_layers


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(PRECOMPUTE, PRECOMPUTE), (PRECOMPUTE, {}), ({}, PRECOMPUTE)])
def test_checkpoints_hold_high_precision_under_the_usual_names(pool, tmp_path, saved_by, loaded_by):
    section = Checkpoint(enable=True)
    saved = pool.run(checkpoints.train_and_save, 2, saved_by, str(tmp_path), 2, section)[0]
    loaded = pool.run(checkpoints.load_and_train, 2, loaded_by, str(tmp_path), None, section)[0]
    assert checkpoints.list_differing(saved[0], loaded[0]) == []
    assert {tensor.dtype for tensor in saved[0].values()} == {torch.float32}
    assert set(saved[0]) == {f"model.{fqn}" for fqn, _ in Llama3(TABLE_SHAPE).named_parameters()}
    assert (saved[1] == loaded[1]) == (saved_by == loaded_by)  # the losses of the steps that follow


# ---------------------------------------------------------------- which layers

TABLE_SHAPE = resolve_model(compare.TABLE_CONFIG.model)


@pytest.mark.parametrize("flavor", ["debug", "1B", "405B"])
def test_the_plan_knows_every_linear_layer_of_the_model_but_the_head(flavor):
    with torch.device("meta"):
        model = Llama3(replace(FLAVORS[flavor], n_layers=2))
    linears = {fqn: tuple(module.weight.shape) for fqn, module in model.named_modules() if type(module) is nn.Linear}
    assert list_linears(replace(FLAVORS[flavor], n_layers=2)) == linears and len(linears) == 14


def test_layers_are_left_out_by_name_and_by_dims_on_every_rank():
    linears = {"layers.0.attention.wq": (64, 64), "layers.0.attention.wk": (32, 64), "layers.1.attention.wk": (24, 64)}
    plan = plan_float8(linears, Float8(), tp=1)
    assert plan.fqns == ("layers.0.attention.wq", "layers.0.attention.wk")
    assert plan.skipped == {"layers.1.attention.wk": "24 x 64 is not in multiples of 16"}
    assert plan_float8(linears, Float8(), tp=4).fqns == ("layers.0.attention.wq",)
    assert plan_float8(linears, Float8(filter_fqns=["wq", "layers.1"]), tp=1).fqns == ("layers.0.attention.wk",)


def list_swapped(overrides: dict) -> set[str]:
    config = compare.override(compare.TABLE_CONFIG, overrides)
    with torch.device("meta"):
        model = Llama3(TABLE_SHAPE)
    apply_float8(model, config.quantize.linear.float8, 1)
    return {fqn for fqn, module in model.named_modules() if isinstance(module, Float8Linear)}


def test_the_layers_of_the_plan_are_those_that_compute_in_float8():
    keys = {"quantize.linear.float8.filter_fqns": ["wk", "layers.2."]}
    config = compare.override(compare.TABLE_CONFIG, keys)
    planned = plan_float8(list_linears(TABLE_SHAPE), config.quantize.linear.float8, 1).fqns
    assert list_swapped(keys) == set(planned) and len(planned) == 18


# ---------------------------------------------------------------- config

LAPTOP = Machine("cpu", 1, 64 * GIB, "a laptop")
SECTION = "--quantize.linear.float8"
GATHERS, PRECOMPUTES = (
    f"{SECTION}.{name}" for name in ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp")
)


def prepare(args: str, tmp_path, machine: Machine = LAPTOP, n_ranks: int = 2):
    folders = ["--job.dump_folder", str(tmp_path / "run"), "--training.cache_folder", str(tmp_path / "cache")]
    return preflight(["--model.converters=float8", *args.split(), *folders], machine=machine, n_ranks=n_ranks)


BAD_INPUT = [  # what is wrong | arguments | key, value, part of the reason, part of the remedy
    ("name", "--model.converters=mx", "model.converters", "mx", "no such choice", "'float8'"),
    ("dims", "--model.dim 72 --model.n_heads 4 --model.n_kv_heads 2", "model.converters", ["float8"], "72", "Leave"),
    ("filtered", f"{SECTION}.filter_fqns=attention,feed", "model.converters", ["float8"], "filter_fqns names", "Leave"),
    ("tokens", "--training.seq_len=12 --training.local_batch_size=1", "training.seq_len", 12, "12 tokens", "16"),
    ("rows", f"{GATHERS} {SECTION}.recipe_name=rowwise", "recipe_name", "rowwise", "one scale", "tensorwise"),
    ("scales", PRECOMPUTES, "precompute_float8", True, "gathered in float8", "enable_fsdp_float8_all_gather = true"),
    ("misspelt", f"{SECTION}.emulat", "quantize.linear.float8.emulat", None, "no such key", "emulate"),
]


@pytest.mark.parametrize(
    ("args", "key", "value", "why", "remedy"), [row[1:] for row in BAD_INPUT], ids=[row[0] for row in BAD_INPUT]
)
def test_what_cannot_be_is_refused_with_its_reason_and_a_remedy(tmp_path, args, key, value, why, remedy):
    with pytest.raises(ConfigError) as error:
        prepare(args, tmp_path)
    (problem,) = error.value.problems
    assert key in problem.key and problem.value == value and why in problem.why and remedy in problem.remedy


def test_weights_that_the_host_holds_are_not_gathered_as_float8(tmp_path):
    with pytest.raises(ConfigError, match="enable_fsdp_float8_all_gather = false") as error:
        prepare(f"--training.enable_cpu_offload {GATHERS}", tmp_path, Machine("cuda", 2, 80 * GIB, "NVIDIA H200"))
    assert [problem.key for problem in error.value.problems] == ["training.enable_cpu_offload"]


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("NVIDIA A100-SXM4-80GB", True),
        ("NVIDIA A10G", True),
        ("NVIDIA GeForce RTX 3090 Ti", True),
        ("NVIDIA RTX A6000", True),
        ("NVIDIA H100 80GB HBM3", False),
        ("NVIDIA L4", False),
        ("NVIDIA GeForce RTX 4090", False),
        ("NVIDIA RTX 2000 Ada Generation", False),
        ("NVIDIA B200", False),
    ],
)
def test_a_gpu_without_float8_is_told_so_and_may_emulate(tmp_path, name, lacks):
    gpus = Machine("cuda", 2, 80 * GIB, name)
    prepare(f"{SECTION}.emulate", tmp_path, gpus)
    if not lacks:
        prepare("", tmp_path, gpus)
        return
    with pytest.raises(ConfigError, match=f"{name} does not multiply in float8.*emulate = true"):
        prepare("", tmp_path, gpus)


def test_the_start_of_a_run_says_which_layers_are_left_out(tmp_path):
    assert prepare("--model.n_kv_heads=1 --model.head_dim=24", tmp_path).notices == [
        "20 of 28 linear layers compute in float8 (tensorwise); "
        "not layers.*.attention.wk: 24 x 128 is not in multiples of 16; "
        "not layers.*.attention.wv: 24 x 128 is not in multiples of 16"
    ]
    assert prepare("--model.converters=", tmp_path).notices == []


def test_float8_keys_mean_nothing_while_nobody_asks_for_float8(tmp_path):
    args = [
        f"{PRECOMPUTES}",
        f"{SECTION}.recipe_name=rowwise",
        "--training.seq_len=12",
        "--job.dump_folder",
        str(tmp_path),
    ]
    assert preflight(args, machine=LAPTOP, n_ranks=2).config.model.converters == []


# What torchtitan's llama3_405b.toml says of it, as v0.1 and v0.2 spell it.
TORCHTITAN_405B = {
    "v0.1": '[model]\nconverters = ["float8"]\n[float8]\nfilter_fqns = ["output"]\n',
    "v0.2": '[model]\nconverters = ["quantize.linear.float8"]\n[quantize.linear.float8]\nfilter_fqns = ["output"]\n',
}


@pytest.mark.parametrize("version", TORCHTITAN_405B)
def test_float8_as_torchtitan_writes_it_means_the_same_here(tmp_path, version):
    flags = "enable_fsdp_float8_all_gather = true\nprecompute_float8_dynamic_scale_for_fsdp = true\n"
    path = tmp_path / "llama3_405b.toml"
    path.write_text(TORCHTITAN_405B[version] + flags)
    reading = read_config(["--config", str(path), "--model.flavor", "405B"])
    assert reading.problems == []
    assert reading.config.quantize.linear.float8 == Float8("tensorwise", ["output"], True, True)
    assert describe_float8(reading.config, FLAVORS["405B"], tp=8) == [
        "882 of 882 linear layers compute in float8 (tensorwise)"
    ]
