"""Test how `verify` reduces a real config: degrees, the relations between sizes that it keeps, and the deep run."""

import json

import compare
import pytest
from layouts import EP, PP, SCHEDULE, SHARD, TP, read_rows
from marks import each_row

from torchtitan_lite.config.checks import plan_layout
from torchtitan_lite.config.messages import ConfigError, UserError
from torchtitan_lite.config.model import resolve_model
from torchtitan_lite.config.reader import CONFIG_FOLDER, read_config
from torchtitan_lite.config.schema import Config
from torchtitan_lite.tools.verify.derived_configs import deepen
from torchtitan_lite.tools.verify.reduction import (
    Reduction,
    override,
    reduce_config,
)

CONFIGS = sorted(path.stem for path in CONFIG_FOLDER.glob("*.toml"))
PER_STAGE = "parallelism.pipeline_parallel_layers_per_stage"


ANY_BATCH = "--training.global_batch_size=-1"


def read(*args: str) -> Config:
    # an empty path, because --config finetune takes the path from an environment variable, which is not set here
    given = read_config(["--checkpoint.initial_load_path=", "--config", *args])
    assert not given.problems
    return given.config


# ---------------------------------------------------------------- degrees


# layout | ranks of verify | keys. An automatic dp_shard takes the remaining ranks.
FITTING = read_rows("""
dp_shard6 | 8 | SHARD=6
pp2 x dp_replicate2 x cp2 | 8 | PP=2 REPLICATE=2 CP=2 SHARD=1
cp4 x tp2 | 8 | CP=4 TP=2 SHARD=1
one rank | 1 | SHARD=1
dp_replicate2 x dp_shard4 | 8 | REPLICATE=2
dp_shard3 x tp2 | 6 | TP=2
""")


@each_row("layout", FITTING)
def test_a_layout_that_fits_is_tried_exactly_as_asked(layout):
    max_ranks, asked = FITTING[layout]
    config = compare.override(read("debug", "--training.local_batch_size=8", ANY_BATCH), asked)
    assert str(reduce_config(config, max_ranks).layout) == layout


# config: layout of the command | ranks of verify | keys. With tp8, no rank would be left for an automatic dp_shard.
TOO_LARGE = read_rows("""
llama3_70b: dp_shard2 x tp4 | 8 | TP=8
llama3_8b: pp2 x dp_shard2 x tp2 | 8 | PP=16 SHARD=128 TP=8
llama3_8b: cp2 x tp4 | 8 | CP=16 SHARD=1 TP=8
mixtral_8x22b: dp_replicate2 x dp_shard2 x tp2, ep4 | 8
qwen3_30b_a3b: dp_shard4, ep4 | 4
debug_3d: tp2 | 2
""")


@each_row("name", TOO_LARGE)
def test_a_layout_that_needs_more_ranks_is_refused_with_a_command_that_runs(name):
    config, layout = name.split(": ")
    max_ranks, asked = TOO_LARGE[name]
    batch = []
    if not config.startswith("debug"):
        batch = ["--training.local_batch_size=16", ANY_BATCH]
    keys = [f"--{key}={value}" for key, value in asked.items()]
    with pytest.raises(UserError, match=f"verify uses at most {max_ranks}") as refusal:
        reduce_config(read(config, *batch, *keys), max_ranks)
    _, _, options = str(refusal.value).rstrip(".").partition(f"--ranks={max_ranks} ")
    smaller = options.split()
    names = {word.partition("=")[0] for word in smaller}
    kept = [key for key in keys if key.partition("=")[0] not in names]
    small = read(config, *batch, *kept, *smaller)
    assert str(reduce_config(small, max_ranks).layout) == layout


# ---------------------------------------------------------------- stages, microbatches, sizes

ARGS = {  # abbreviation in the table below -> arguments
    "EVEN": f"llama3_8b --{PP}=4 --{SHARD}=1 {ANY_BATCH} --training.local_batch_size=16 --model.n_layers=30",
    "INTERLEAVED": f"EVEN --{SCHEDULE}=Interleaved1F1B --{PER_STAGE}",
    "STAGES": f"llama3_8b --{PP}=4 --{SHARD}=1 {ANY_BATCH} --training.local_batch_size",
    "ODD": f"debug --{SHARD}=2 --{TP}=2 --model.vocab_size",
    "MIXTRAL": f"mixtral_8x22b --{PP}=1 --{TP}=1 --{EP}=4 --{SHARD}=8 --parallelism.data_parallel_replicate_degree=1",
    "QWEN": "qwen3_30b_a3b --parallelism.expert_parallel_degree",
    "NEAR": f'debug --parallelism.zero_plus_plus=["hpz"] --{SHARD}',
}


def layers_of_stages(reduction: Reduction) -> list[int]:
    counts = []
    for stage in reduction.layout.stages:
        counts.append(sum(fqn.startswith("layers.") for fqn in stage))
    return counts


def n_microbatches(reduction: Reduction) -> list[int]:
    return [reduction.layout.n_microbatches]


def remainder_of_vocabulary(reduction: Reduction) -> list[int]:
    return [reduction.config.model.vocab_size % 4]


def experts(reduction: Reduction) -> tuple[int, ...]:
    """Return ep, the number of ranks that share an expert, the numbers of experts in wide and deep trial, and top_k."""
    wide, deep = (resolve_model(c.model).moe for c in (reduction.config, deepen(reduction)))
    assert wide.top_k == deep.top_k
    layout = reduction.layout
    return layout.ep, layout.efsdp, wide.n_experts, deep.n_experts, wide.top_k


def nodes(reduction: Reduction) -> tuple[int, int]:
    return reduction.layout.fsdp_near, reduction.layout.fsdp_far


# Embedding and head count as a layer each, which matters for 32 layers on 4 stages. 2306 = 2 * 1153, a prime.
KEPT = f"""
EVEN | layers_of_stages | [1, 2, 2, 1]
EVEN --model.n_layers=31 | layers_of_stages | [2, 2, 2, 1]
INTERLEAVED=4 | layers_of_stages | [1, 2, 2, 2, 2, 2, 2, 1]
INTERLEAVED=1 --model.n_layers=6 | layers_of_stages | [0, 1, 1, 1, 1, 1, 1, 0]
EVEN --model.n_layers=3 | layers_of_stages | [1, 1, 1, 0]
STAGES=4 | n_microbatches | [4]
STAGES=16 | n_microbatches | [6]
STAGES=2 --{SCHEDULE}=GPipe | n_microbatches | [2]
debug --{SHARD}=2 --training.local_batch_size=4 --training.global_batch_size=32 | n_microbatches | [3]
ODD=2306 | remainder_of_vocabulary | [2]
ODD=2304 | remainder_of_vocabulary | [0]
MIXTRAL | experts | [4, 2, 8, 8, 2]
QWEN=8 --{SHARD}=8 | experts | [8, 1, 16, 24, 8]
QWEN=2 --{SHARD}=4 --{TP}=2 | experts | [2, 4, 16, 24, 8]
debug_moe_3d | experts | [4, 1, 8, 8, 2]
NEAR=4 | nodes | [2, 2]
NEAR=4 --{TP}=2 | nodes | [2, 2]
NEAR=8 | nodes | [4, 2]
NEAR=2 | nodes | [1, 1]
"""


@each_row("args, relation, value", KEPT)
def test_a_reduced_config_keeps_the_relations_between_sizes(args, relation, value):
    for word in ("INTERLEAVED", *ARGS):
        args = args.replace(word, ARGS[word])
    reduction = reduce_config(read(*args.split()), 8)
    assert list(globals()[relation](reduction)) == json.loads(value)


def test_a_config_whose_real_run_cannot_start_is_refused():
    """Otherwise the reduced run would have experts, although the real run has none."""
    config = override(read("debug_moe"), {"model.n_layers": 1, "flavor.moe_every": 2})
    with pytest.raises(ConfigError, match="no layer has experts"):
        reduce_config(config, 8)


# ---------------------------------------------------------------- every shipped config, and the deep run


@each_row("name", CONFIGS)
def test_each_reduced_run_keeps_the_layout_and_the_deep_run_has_many_layers_and_tokens(name):
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
    assert (layout.degrees, layout.ep) == (reduction.layout.degrees, reduction.layout.ep)
    for relation in (
        lambda args: args.n_heads // args.n_kv_heads,
        lambda args: args.dim == args.n_heads * args.head_dim,
        lambda args: (args.rope_scaling, args.tie_embeddings),
    ):
        assert relation(small) == relation(real)
    assert small.dim <= 512 and small.n_layers <= 16
    assert reduction.config.optimizer == deep.optimizer == config.optimizer
    assert reduction.config.model.attention == config.model.attention
    assert deep.model.n_layers >= 12 and deep.training.seq_len > 256
    assert layout.n_microbatches >= 12 or layout.pp == 1
    assert deep.training.seq_len / deep.training.loss_chunk_tokens >= 11
