"""A real config made small: the mesh that is tried, the relations that are kept, and the shapes of the small runs."""

from pathlib import Path

import compare
import pytest
from layouts import CP, EP, PP, SCHEDULE, TP

from torchtitan_lite.config.block import count_parameters
from torchtitan_lite.config.flavors import FLAVORS
from torchtitan_lite.config.layout import MESH_DIMS, plan_layout, resolve_model
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.config.schema import Config
from torchtitan_lite.tools.verify.degrees import DEGREE_KEYS, choose_degrees
from torchtitan_lite.tools.verify.reduction import count_layers, override, reduce_config
from torchtitan_lite.tools.verify.reference import run_one_process
from torchtitan_lite.tools.verify.small_runs import (
    MOST_PARAMETERS,
    deepen,
    fit_sizes,
    keep_width,
    lengthen,
    measure_available_memory,
)

CONFIGS = sorted(path.stem for path in (Path(__file__).resolve().parent.parent / "configs").glob("*.toml"))
SHARD, LAYERS_PER_STAGE = DEGREE_KEYS["dp_shard"], "parallelism.pipeline_parallel_layers_per_stage"
GIB = 2**30


def read(*args: str) -> Config:
    reading = read_config(list(args))
    assert reading.problems == []
    return reading.config


# ---------------------------------------------------------------- degrees


@pytest.mark.parametrize(
    ("max_ranks", "asked", "tried", "reduced", "given_up"),
    [
        # It fits: tried as it was asked for. Degrees that are not given are 1; dp_shard is automatic.
        (2, {"dp_replicate": 2}, {"dp_replicate": 2}, [], []),
        (8, {"dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 4}, [], []),
        (8, {"cp": 4, "tp": 2}, {"cp": 4, "tp": 2}, [], []),
        (8, {"pp": 3, "tp": 2}, {"pp": 3, "tp": 2}, [], []),
        (8, {"pp": 2, "dp_replicate": 2, "cp": 2}, {"pp": 2, "dp_replicate": 2, "cp": 2}, [], []),
        (8, {"dp_shard": 6}, {"dp_shard": 6}, [], []),
        (6, {"tp": 2}, {"dp_shard": 3, "tp": 2}, [], []),
        (1, {}, {}, [], []),
        # It does not: degrees shrink to 2, and cp and pp grow first.
        (8, {"pp": 16, "dp_shard": 128, "tp": 8}, {"pp": 2, "dp_shard": 2, "tp": 2}, ["pp", "dp_shard", "tp"], []),
        (16, {"pp": 16, "dp_shard": 128, "tp": 8}, {"pp": 4, "dp_shard": 2, "tp": 2}, ["pp", "dp_shard", "tp"], []),
        (8, {"pp": 16, "tp": 8}, {"pp": 2, "dp_shard": 2, "tp": 2}, ["pp", "tp"], []),
        (8, {"cp": 16, "dp_shard": 1, "tp": 8}, {"cp": 4, "tp": 2}, ["cp", "tp"], []),
        (6, {"cp": 6, "pp": 6, "dp_shard": 1}, {"cp": 3, "pp": 2}, ["pp", "cp"], []),
        (4, {"dp_shard": 6}, {"dp_shard": 3}, ["dp_shard"], []),
        (4, {"cp": 5, "dp_shard": 1}, {"cp": 4}, ["cp"], []),
        # Too few ranks for 2 of each: dims are given up.
        (16, dict.fromkeys(MESH_DIMS, 4), None, list(MESH_DIMS), ["dp_replicate"]),
        (8, dict.fromkeys(MESH_DIMS, 4), None, list(MESH_DIMS), ["dp_replicate", "dp_shard"]),
        (1, {"pp": 2, "tp": 2}, {}, ["pp", "tp"], ["pp", "tp"]),
    ],
)
def test_the_mesh_that_is_tried_is_the_one_asked_for_or_names_what_is_smaller(
    max_ranks, asked, tried, reduced, given_up
):
    keys = {DEGREE_KEYS[dim]: degree for dim, degree in asked.items()}
    degrees = choose_degrees(compare.override(compare.TABLE_CONFIG, keys).parallelism, max_ranks)
    if tried is not None:
        assert {dim: degree for dim, degree in degrees.tried.items() if degree > 1} == tried
    assert sorted(degrees.reduced) == sorted(reduced) and sorted(degrees.given_up) == sorted(given_up)
    assert ("reduced" in str(degrees)) == bool(reduced)


# ---------------------------------------------------------------- stages, microbatches, sizes

EVEN = ("--model.n_layers=30", f"--{PP}=4")  # embedding and head weigh a layer each: 32 on 4 stages
INTERLEAVED = (*EVEN, f"--{SCHEDULE}=Interleaved1F1B")


@pytest.mark.parametrize(
    ("args", "layers_of_stages"),
    [
        (EVEN, [2, 2]),
        ((*EVEN, "--model.n_layers=31"), [2, 1]),
        ((*INTERLEAVED, f"--{LAYERS_PER_STAGE}=4"), [1, 2, 2, 1]),
        ((*EVEN, f"--{SCHEDULE}=ZBVZeroBubble", "--activation_checkpoint.mode=none"), [1, 2, 2, 1]),
        ((*INTERLEAVED, f"--{LAYERS_PER_STAGE}=1"), [0, 1, 1, 0]),  # embedding and head alone
        (("--model.n_layers=3", f"--{PP}=4"), [1, 0]),
        (("--model.n_layers=2", f"--{PP}=4"), [0, 1]),  # both ends alone would be no model
    ],
)
def test_stages_stay_as_many_per_rank_and_as_even(args, layers_of_stages):
    config = read("--config", "llama3_8b", "--training.local_batch_size=16", "--compile.no_enable", *args)
    assert count_layers(reduce_config(config, 2).layout.stages) == layers_of_stages


def test_explicit_stages_keep_which_of_them_is_short():
    stages = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "layers.3"], ["layers.4", "layers.5"]]
    stages.append(["layers.6", "norm", "output"])
    args = ("--config", "debug", f"--{PP}=4", f"--{SHARD}=1", "--training.local_batch_size=8")
    config = override(read(*args), {"model.n_layers": 7, "parallelism.module_fqns_per_model_part": stages})
    assert count_layers(reduce_config(config, 4).layout.stages) == [1, 2, 2, 1]
    half = reduce_config(config, 2)
    assert [len(stage) for stage in half.layout.stages] == [2, 3]


@pytest.mark.parametrize(
    ("n_real", "schedule", "n_small"),
    [(4, "1F1B", 2), (16, "1F1B", 4), (7, "1F1B", 3), (2, "GPipe", 1), (8, "Interleaved1F1B", 4), (12, "DualPipeV", 5)],
)
def test_microbatches_keep_their_relation_to_the_stages(n_real, schedule, n_small):
    args = (f"--training.local_batch_size={n_real}", "--activation_checkpoint.mode=none", f"--{PP}=4")
    config = read("--config", "llama3_8b", "--compile.no_enable", *args, f"--{SCHEDULE}={schedule}")
    assert reduce_config(config, 2).layout.n_microbatches == n_small


def test_accumulation_documents_recompute_and_sizes_that_do_not_divide_are_kept():
    batch = ("--training.local_batch_size=4", "--training.global_batch_size=32")
    options = ("--model.attention=document", "--activation_checkpoint.selective_ac_option=4")
    reduction = reduce_config(read("--config", "debug", f"--{SHARD}=2", *batch, *options), 8)
    assert reduction.layout.n_microbatches == 3  # so that a third one that is left out is seen
    assert reduction.config.model.attention == "document"
    assert reduction.config.activation_checkpoint.selective_ac_option == "2"
    odd = read("--config", "debug", f"--{SHARD}=4", f"--{TP}=2", "--model.vocab_size=2306")  # 2306 = 2 * 1153
    assert reduce_config(odd, 4).args.vocab_size % 4 == 2
    assert reduce_config(override(odd, {"model.vocab_size": 2304}), 4).args.vocab_size % 4 == 0
    with pytest.raises(ConfigError, match="n_kv_heads"):  # the real run could not start
        reduce_config(read("--config", "debug", f"--{TP}=4"), 8)


# ---------------------------------------------------------------- experts

MIXTRAL = ("--config", "llama3_8b", "--model.flavor=Mixtral-8x7B")
QWEN = ("--config", "llama3_8b", "--model.flavor=Qwen3-30B-A3B")


@pytest.mark.parametrize(
    ("args", "ranks", "ep", "efsdp", "n_experts", "top_k"),
    [
        ((*MIXTRAL, f"--{EP}=8", f"--{SHARD}=8"), 8, 8, 1, 8, 2),
        ((*MIXTRAL, f"--{EP}=8", f"--{SHARD}=64"), 8, 4, 2, 12, 2),  # FSDP shares matrices before and after
        ((*MIXTRAL, f"--{EP}=4", f"--{SHARD}=4", f"--{TP}=2"), 4, 2, 2, 8, 2),  # it shares experts
        ((*MIXTRAL, f"--{EP}=8", f"--{SHARD}=16"), 2, 2, 1, 8, 2),  # of two ranks there is nothing to share
        ((*MIXTRAL, f"--{EP}=8"), 8, 8, 1, 8, 2),  # an automatic dp_shard
        ((*MIXTRAL, f"--{EP}=8"), 1, 1, 1, 8, 2),
        ((*QWEN, f"--{EP}=8", f"--{SHARD}=8"), 8, 8, 1, 16, 8),
        ((*QWEN, f"--{EP}=2", f"--{SHARD}=4", f"--{TP}=2"), 8, 2, 4, 16, 8),
        (("--config", "debug_moe_3d"), 8, 4, 1, 8, 2),
        (("--config", "debug_moe_3d"), 2, 1, 1, 8, 2),
    ],
)
def test_experts_keep_top_k_and_are_shared_as_before(args, ranks, ep, efsdp, n_experts, top_k):
    config = read(*args)
    reduction = reduce_config(config, ranks)
    asked = config.parallelism.expert_parallel_degree
    assert (reduction.layout.ep, reduction.layout.efsdp) == (ep, efsdp)
    assert ("ep" in reduction.degrees.reduced) == (ep < asked) and ("ep" in reduction.degrees.given_up) == (ep == 1)
    for run in (reduction.config, *(make(reduction).config for make in (deepen, lengthen, keep_width))):
        moe = resolve_model(run.model).moe
        assert (moe.n_experts, moe.top_k) == (n_experts, top_k)
        assert run.training.seq_len not in (moe.n_experts, moe.expert_ffn_dim, top_k)
        assert moe.expert_ffn_dim % 8 == 0  # which grouped_mm needs


def test_layers_without_experts_are_kept_where_there_are_two():
    layers = {"flavor.n_first_dense_layers": 3, "flavor.moe_every": 4, "flavor.n_shared_experts": 1}
    reduction = reduce_config(override(read("--config", "debug_moe", "--model.n_layers=8"), layers), 2)
    assert [reduction.args.is_moe(layer) for layer in range(4)] == [False, True, False, True]
    assert resolve_model(keep_width(reduction).config.model).n_moe_layers == 1
    assert {"flavor.n_first_dense_layers", "flavor.moe_every"} <= {change.key for change in reduction.changes}


def test_loads_are_uneven_and_one_expert_of_each_layer_gets_no_token():
    loads = run_one_process(reduce_config(read("--config", "debug_moe"), 2).config).experts.loads
    for of_layer in (layer for step in loads for layer in step.tolist()):
        assert of_layer.count(0) == 1 and max(of_layer) > 1.5 * sorted(of_layer)[1]


# ---------------------------------------------------------------- every shipped config

OTHERS = {  # what no shipped config asks for
    "interleaved": (
        *("--config", "llama3_8b", f"--{PP}=4", f"--{SCHEDULE}=Interleaved1F1B"),
        *("--training.local_batch_size=8", f"--{LAYERS_PER_STAGE}=3"),
    ),
    "V": (
        *("--config", "llama3_8b", f"--{PP}=2", f"--{SCHEDULE}=ZBVZeroBubble"),
        *("--training.local_batch_size=4", "--activation_checkpoint.mode=none", "--compile.no_enable"),
    ),
    "cp": ("--config", "llama3_8b", f"--{CP}=8", "--training.seq_len=8192"),
    "documents": ("--config", "debug", "--model.attention=document", "--training.seq_len=1024"),
}
ASKED = {name: ("--config", name) for name in CONFIGS} | OTHERS


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("ranks", [1, 8, 16])
def test_each_small_run_keeps_the_layout_and_has_the_depth_the_length_and_the_width(name, ranks):
    config = read(*ASKED[name])
    reduction, real = reduce_config(config, ranks), resolve_model(config.model)
    small = reduction.args
    assert reduction.layout.world_size <= ranks
    assert small.n_heads // small.n_kv_heads == real.n_heads // real.n_kv_heads
    assert (small.dim == small.n_heads * small.head_dim) == (real.dim == real.n_heads * real.head_dim)
    assert small.rope_scaling == real.rope_scaling and small.tie_embeddings == real.tie_embeddings
    assert small.dim <= 512 and small.n_layers <= 16
    listed = {change.key for change in reduction.changes}
    assert {"optimizer.name", "training.seq_len"} <= listed
    assert "model.n_layers" in listed or small.n_layers == real.n_layers

    deep, long, wide = deepen(reduction), lengthen(reduction), keep_width(reduction, 8 * GIB)
    n_ranks = reduction.layout.world_size
    layouts = [plan_layout(run.config, resolve_model(run.config.model), n_ranks) for run in (deep, long, wide)]
    for run, layout in zip((deep, long, wide), layouts, strict=True):
        shape = resolve_model(run.config.model)
        assert layout.degrees == reduction.layout.degrees
        assert run.config.training.seq_len not in (shape.dim, shape.ffn_dim, shape.vocab_size, shape.head_dim)
        kept = ("zero_stage", "context_parallel_rotate_method", "disable_loss_parallel")
        assert all(getattr(run.config.parallelism, key) == getattr(config.parallelism, key) for key in kept)
        assert run.config.activation_checkpoint == reduction.config.activation_checkpoint
        assert run.config.compile.enable == (config.compile.enable and run is deep)

    deep_layout, long_layout, wide_layout = layouts
    assert deep.config.model.n_layers >= 12 and resolve_model(deep.config.model).dim == 16
    assert any({"layers.9", "layers.10"} <= set(stage) for stage in deep_layout.stages)
    assert len(set(count_layers(deep_layout.stages))) > 1 or len(deep_layout.stages) == deep_layout.pp
    assert len(deep_layout.stages) == len(long_layout.stages) == len(reduction.layout.stages)

    assert long.config.training.seq_len >= max(512, min(config.training.seq_len, 2048))
    assert long.config.model.n_layers <= max(2, len(long_layout.stages) - 2)
    chunks = -(-long.config.training.seq_len // long_layout.cp // long.config.training.loss_chunk_tokens)
    assert chunks >= 11

    shape = resolve_model(wide.config.model)
    assert (shape.n_heads, shape.n_kv_heads, shape.head_dim) == (real.n_heads, real.n_kv_heads, real.head_dim)
    assert shape.n_layers == max(1, wide_layout.pp - 2)
    assert count_parameters(shape) <= MOST_PARAMETERS
    tensors = (shape.dim * shape.n_heads * shape.head_dim, shape.dim * shape.ffn_dim, shape.dim * shape.vocab_size)
    if real.dim >= 2048:
        assert max(tensors) >= (2e6 if real.moe else 4e6) and shape.dim >= 512  # experts count for as much
    else:
        assert (shape.dim, shape.ffn_dim, shape.vocab_size) == (real.dim, real.ffn_dim, real.vocab_size)


def test_a_small_run_says_what_of_it_is_real():
    large = reduce_config(read("--config", "llama3_8b"), 8)
    assert lengthen(large).subject.startswith("2,048 of 8,192 tokens, at positions below 10,240")
    assert "dim 2,048 of 4,096" in keep_width(large, 8 * GIB).subject
    three_d = reduce_config(read("--config", "debug_3d"), 8)
    assert deepen(three_d).subject == "12 layers of dim 16, 6, 6 a stage"
    assert keep_width(three_d, 8 * GIB).subject.endswith("1F1B, one stage a rank")


def test_little_memory_halves_vocabulary_first_then_ffn_dim_then_dim(tmp_path):
    shape = FLAVORS["8B"]
    assert fit_sizes(FLAVORS["debug"], 1, 2**28) == FLAVORS["debug"]
    one_layer = resolve_model(override(read("--config", "llama3_8b"), {"model.n_layers": 1}).model)
    sizes = [fit_sizes(one_layer, 1, memory * GIB // 256) for memory in (400, 96, 64, 1)]
    assert [size.vocab_size for size in sizes] == [shape.vocab_size, 16032, 4008, 2004]
    assert [size.ffn_dim for size in sizes] == [shape.ffn_dim, shape.ffn_dim, shape.ffn_dim, 1792]
    assert [size.dim for size in sizes] == [4096, 4096, 4096, 512]
    file = tmp_path / "meminfo"
    file.write_text("MemTotal: 2048 kB\nMemAvailable:    1024 kB\n")
    assert measure_available_memory(file) == 2**20
    assert measure_available_memory(tmp_path / "none") > 2**20
