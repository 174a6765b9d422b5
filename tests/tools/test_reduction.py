"""A real config made small: exactly its degrees, the relations that are kept, and the deep run."""

import compare
import pytest
from layouts import CP, EP, PP, REPLICATE, SCHEDULE, SHARD, TP

from torchtitan_lite.config.checks import plan_layout, resolve_model
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.reader import CONFIG_FOLDER, read_config
from torchtitan_lite.config.schema import Config
from torchtitan_lite.tools.verify.reduction import (
    count_layers,
    deepen,
    override,
    reduce_config,
)

CONFIGS = sorted(path.stem for path in CONFIG_FOLDER.glob("*.toml"))
LAYERS_PER_STAGE = "parallelism.pipeline_parallel_layers_per_stage"


ONE_COPY = "--parallelism.data_parallel_replicate_degree=1"
ANY_BATCH = "--training.global_batch_size=-1"


def read(*args: str) -> Config:
    # finetune names its model by an environment variable
    given = read_config(["--checkpoint.initial_load_path=", "--config", *args])
    assert not given.problems
    return given.config


# ---------------------------------------------------------------- degrees


@pytest.mark.parametrize(
    "max_ranks, asked, layout",
    [
        (8, {SHARD: 6}, "dp_shard6"),
        (8, {PP: 2, REPLICATE: 2, CP: 2, SHARD: 1}, "pp2 x dp_replicate2 x cp2"),
        (8, {CP: 4, TP: 2, SHARD: 1}, "cp4 x tp2"),
        (1, {SHARD: 1}, "one rank"),
        (
            8,
            {REPLICATE: 2},
            "dp_replicate2 x dp_shard4",
        ),  # an automatic dp_shard takes what is left
        (6, {TP: 2}, "dp_shard3 x tp2"),
    ],
)
def test_a_layout_that_fits_is_tried_exactly_as_asked(max_ranks, asked, layout):
    config = compare.override(
        read("debug", "--training.local_batch_size=8", "--training.global_batch_size=-1"), asked
    )
    assert str(reduce_config(config, max_ranks).layout) == layout


@pytest.mark.parametrize(
    "max_ranks, config, asked, layout",
    [
        # tp8 would leave no rank for an automatic dp_shard
        (8, "llama3_70b", {TP: 8}, "dp_shard2 x tp4"),
        (8, "llama3_8b", {PP: 16, SHARD: 128, TP: 8}, "pp2 x dp_shard2 x tp2"),
        (8, "llama3_8b", {CP: 16, SHARD: 1, TP: 8}, "cp2 x tp4"),
        (8, "mixtral_8x22b", {}, "dp_replicate2 x dp_shard2 x tp2, ep4"),
        (4, "qwen3_30b_a3b", {}, "dp_shard4, ep4"),
        (2, "debug_3d", {}, "tp2"),  # dims are given up
    ],
)
def test_a_layout_that_needs_more_ranks_is_refused_with_a_command_that_runs(
    max_ranks, config, asked, layout
):
    batch = []
    if not config.startswith("debug"):
        batch = ["--training.local_batch_size=16", ANY_BATCH]
    keys = [f"--{key}={value}" for key, value in asked.items()]
    with pytest.raises(ConfigError) as refusal:
        reduce_config(read(config, *batch, *keys), max_ranks)
    (problem,) = refusal.value.problems
    assert f"verify has {max_ranks}" in problem.why
    _, _, options = problem.remedy.partition(f"--ranks={max_ranks} ")
    smaller = options.split()
    names = {word.partition("=")[0] for word in smaller}
    kept = [key for key in keys if key.partition("=")[0] not in names]
    small = read(config, *batch, *kept, *smaller)
    assert str(reduce_config(small, max_ranks).layout) == layout


# ---------------------------------------------------------------- stages, microbatches, sizes

EVEN = (
    "--model.n_layers=30",
    f"--{PP}=4",
    f"--{SHARD}=1",
)  # embedding and head weigh a layer each: 32 on 4 stages
INTERLEAVED = (*EVEN, f"--{SCHEDULE}=Interleaved1F1B")


@pytest.mark.parametrize(
    "args, layers_of_stages",
    [
        (EVEN, [1, 2, 2, 1]),
        ((*EVEN, "--model.n_layers=31"), [2, 2, 2, 1]),
        ((*INTERLEAVED, f"--{LAYERS_PER_STAGE}=4"), [1, 2, 2, 2, 2, 2, 2, 1]),
        ((*INTERLEAVED, f"--{LAYERS_PER_STAGE}=1", "--model.n_layers=6"), [0, 1, 1, 1, 1, 1, 1, 0]),
        (("--model.n_layers=3", f"--{PP}=4", f"--{SHARD}=1"), [1, 1, 1, 0]),
    ],
)
def test_stages_stay_as_many_per_rank_and_as_even(args, layers_of_stages):
    config = read("llama3_8b", "--training.local_batch_size=16", ANY_BATCH, *args)
    assert count_layers(reduce_config(config, 4).layout.stages) == layers_of_stages


@pytest.mark.parametrize(
    "n_real, schedule, n_small",
    [(4, "1F1B", 4), (16, "1F1B", 6), (2, "GPipe", 2)],
)
def test_microbatches_keep_their_relation_to_the_stages(n_real, schedule, n_small):
    args = (
        f"--training.local_batch_size={n_real}",
        f"--{PP}=4",
        f"--{SHARD}=1",
        f"--{SCHEDULE}={schedule}",
    )
    assert reduce_config(read("llama3_8b", ANY_BATCH, *args), 4).layout.n_microbatches == n_small


def test_accumulation_documents_recompute_and_sizes_that_do_not_divide_are_kept():
    batch = ("--training.local_batch_size=4", "--training.global_batch_size=32")
    documents = "--model.attention=document"
    reduction = reduce_config(read("debug", f"--{SHARD}=2", *batch, documents), 8)
    assert reduction.layout.n_microbatches == 3  # so that a third one that is left out is seen
    assert reduction.config.model.attention == "document"
    odd = read("debug", f"--{SHARD}=2", f"--{TP}=2", "--model.vocab_size=2306")  # 2306 = 2 * 1153
    assert reduce_config(odd, 4).config.model.vocab_size % 4 == 2
    assert (
        reduce_config(override(odd, {"model.vocab_size": 2304}), 4).config.model.vocab_size % 4 == 0
    )
    with pytest.raises(ConfigError, match="n_kv_heads"):  # the real run could not start
        reduce_config(read("debug", f"--{TP}=4", f"--{SHARD}=1"), 8)


@pytest.mark.parametrize(
    "args, efsdp, n_experts, n_deep",
    [
        (
            ("mixtral_8x22b", f"--{PP}=1", f"--{TP}=1", f"--{EP}=4", f"--{SHARD}=8", ONE_COPY),
            2,
            8,
            8,
        ),  # FSDP shares experts
        (("qwen3_30b_a3b", f"--{EP}=8", f"--{SHARD}=8"), 1, 16, 24),
        (("qwen3_30b_a3b", f"--{EP}=2", f"--{SHARD}=4", f"--{TP}=2"), 4, 16, 24),
        (("debug_moe_3d",), 1, 8, 8),
    ],
)
def test_experts_keep_top_k_and_are_shared_as_before(args, efsdp, n_experts, n_deep):
    config = read(*args)
    reduction = reduce_config(config, 8)
    assert (reduction.layout.ep, reduction.layout.efsdp) == (
        config.parallelism.expert_parallel_degree,
        efsdp,
    )
    for small, n in ((reduction.config, n_experts), (deepen(reduction), n_deep)):
        of_experts = resolve_model(small.model).moe
        assert (of_experts.n_experts, of_experts.top_k) == (
            n,
            resolve_model(config.model).moe.top_k,
        )


@pytest.mark.parametrize("tp, n_shards, near", [(1, 4, 2), (2, 4, 2), (1, 8, 4), (1, 2, 1)])
def test_nodes_of_zero_plus_plus_split_a_group_that_is_large_enough(tp, n_shards, near):
    args = ('--parallelism.zero_plus_plus=["hpz"]', f"--{TP}={tp}", f"--{SHARD}={n_shards}")
    layout = reduce_config(read("debug", *args), 8).layout
    assert (layout.fsdp_near, layout.fsdp_far) == (near, n_shards // near if near > 1 else 1)


# ---------------------------------------------------------------- every shipped config, and the deep run


@pytest.mark.parametrize("name", CONFIGS)
def test_each_small_run_keeps_the_layout_and_the_deep_one_is_deep_long_and_far(name):
    config = read(name)
    if name == "mixtral_8x22b":
        config = override(config, {"parallelism.data_parallel_replicate_degree": 2, TP: 2, EP: 4})
    if name == "llama3_405b":
        config = override(
            config, {PP: 4, TP: 2, "parallelism.pipeline_parallel_layers_per_stage": None}
        )
    reduction, real = reduce_config(config, 16), resolve_model(config.model)
    small, deep = resolve_model(reduction.config.model), deepen(reduction)
    layout = plan_layout(deep, resolve_model(deep.model), reduction.layout.world_size)
    assert layout.degrees == reduction.layout.degrees and layout.ep == reduction.layout.ep
    assert small.n_heads // small.n_kv_heads == real.n_heads // real.n_kv_heads
    assert (small.dim == small.n_heads * small.head_dim) == (
        real.dim == real.n_heads * real.head_dim
    )
    assert small.rope_scaling == real.rope_scaling and small.tie_embeddings == real.tie_embeddings
    assert small.dim <= 512 and small.n_layers <= 16
    assert reduction.config.optimizer == config.optimizer and deep.optimizer == config.optimizer
    assert deep.model.n_layers >= 12 and deep.training.seq_len > 256
    assert layout.n_microbatches >= 12 or layout.pp == 1
    assert deep.training.seq_len / deep.training.loss_chunk_tokens >= 11
