"""Reduce a real config to laptop size, but keep the size relations that can trigger faults in a layout.

    degrees         exactly as in the config; if they need too many ranks, an error has the command for a smaller layout
    kept relations  query heads per key/value head; one or several key/value heads per tp rank; which sizes tp x
                    dp_shard divides; one or several stages per rank; even or uneven stages; embedding or head alone on
                    a stage; fewer microbatches than stages, equally many, or more; gradient accumulation; whether FSDP
                    shards the number of experts or their matrices; dense layers
    unchanged       optimizer and learning rates, schedule, ZeRO stage, recompute, documents, ring, tied embeddings,
                    rotary scaling, loss parallel
    replaced        sizes, and features that a CPU does not have

Rows have about 41 tokens, an odd number if possible, and are longer than every attention window. A window that the
flavor sets is reduced. A window that a row in config/choices.py sets keeps its size.

The result is the config of the wide trial, and derived_configs.py derives the other trials from it. The
certificate lists every difference from the real config. This module does not import torch.
"""

import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import lcm

from torchtitan_lite.config.block import list_windows
from torchtitan_lite.config.checks import count_pieces, find_n_microbatches, plan_layout
from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.config.experts import find_expert_dim
from torchtitan_lite.config.float8 import FLOAT8_BLOCK
from torchtitan_lite.config.layout import Layout, count_stages, plan_stages
from torchtitan_lite.config.messages import ConfigError, Problem, UserError, name_command
from torchtitan_lite.config.model import find_model_row, resolve_model
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.config.schema import (
    Config,
    Metrics,
    Parallelism,
    get_value,
    with_value,
)
from torchtitan_lite.tools.plan.workload import round_up
from torchtitan_lite.tools.verify.degrees import (
    AUTOMATIC,
    SHARD,
    choose_dp_shard,
    count_ranks,
    list_smaller,
)

# ---------------------------------------------------------------- the small config

N_EXPERTS = 8
UNCHOSEN = 2  # minimum number of experts that a token does not choose
ALIGNED = 8  # dim and expert_ffn_dim are multiples of this, because grouped_mm needs rows aligned to 16 bytes
STAGES = "parallelism.pipeline_parallel_layers_per_stage"
FIRST = "parallelism.pipeline_parallel_first_stage_less_layers"
LAST = "parallelism.pipeline_parallel_last_stage_less_layers"
WINDOW = 12  # tokens of a reduced window; most tokens of a row are outside of it
BEYOND = 25  # a row is at least this much longer than the largest window
TOKENIZER = "bytes"
N_WORDS = 258  # vocabulary of this tokenizer
REPLACED = {
    "training.steps": 5,  # the wide trial has five or six steps
    "training.mixed_precision_param": "float32",  # a separate trial tests the precision of the run
    # Only train.py reads the keys below. Every step is logged and saved. Validation runs after the first and the last
    # step.
    "model.hf_assets_path": TOKENIZER,
    "training.cache_folder": "",
    "metrics": Metrics(log_freq=1, enable_tensorboard=False),
    "checkpoint.enable": True,
    "checkpoint.interval": 1,
    "checkpoint.keep_latest_k": 0,
    "comm.train_timeout_seconds": 300,
    "validation.enable": True,
    "validation.freq": 10**6,
}
# Sections and keys that are reset to their defaults. A separate trial tests float8. Async TP needs inductor and GPUs.
# Symmetric memory needs NCCL. Some settings of [profiling] need a GPU.
DEFAULTS = """
model.converters training.dtype training.dataset_path parallelism.enable_async_tensor_parallel
parallelism.fsdp_symmetric_memory profiling job.overwrite checkpoint.local_folder checkpoint.load_step
checkpoint.load_only checkpoint.exclude_from_loading checkpoint.initial_load_path checkpoint.last_save_model_only
checkpoint.last_save_in_hf validation.dataset validation.dataset_path
""".split()


@dataclass(frozen=True)
class Reduction:
    """A real config and its reduced version."""

    real: Config  # as given by the user; "auto" values are not resolved
    config: Config  # reduced config, for the wide trial
    layout: Layout  # layout of `config`


def reduce_config(config: Config, max_ranks: int, config_args: Sequence[str] = ()) -> Reduction:
    """Reduce a config. Raises ConfigError if the real run cannot start, UserError if the layout needs more than
    `max_ranks` ranks."""
    n_ranks = count_ranks(config.parallelism)
    args = resolve_model(config.model)
    real = plan_layout(config, args, n_ranks)
    if n_ranks > max_ranks:
        why = f"the layout needs {n_ranks} ranks, but verify uses at most {max_ranks}"
        remedy = suggest_smaller(config, max_ranks, config_args)
        raise UserError(f"{Problem('--ranks', max_ranks, why, remedy)}")
    wide = replace(real, dp_shard=choose_dp_shard(config.parallelism, max_ranks))
    keys = {
        **REPLACED,
        **{key: get_value(Config(), key) for key in DEFAULTS},
        SHARD: wide.dp_shard,
        "lr_scheduler.total_steps": config.lr_scheduler.total_steps or config.training.steps,
        "training.dataset": [f"corpus-{number}" for number in range(len(config.training.dataset))],
        "debug.compare_copies_every": min(1, config.debug.compare_copies_every),
        **reduce_stages(config.parallelism, args.n_layers, real),
        **reduce_sizes(config, args, wide),
    }
    if config.training.loss_chunk_tokens:
        # The batch is small: to have several chunks, reduce the chunk size. A chunk size of 0 (no chunks) is kept.
        keys["training.loss_chunk_tokens"] = 24
    n_shards = wide.dp_shard * wide.cp
    of_node = config.parallelism.zero_plus_plus_node_size // wide.tp
    is_one_node = of_node >= n_shards > 2 and n_shards % 2 == 0
    if config.parallelism.zero_plus_plus and is_one_node:
        # ZeRO++ has an effect only if a group spans several nodes and has several ranks per node.
        keys["parallelism.zero_plus_plus_node_size"] = wide.tp * n_shards // 2
    if config.validation.steps != AUTOMATIC:
        # one batch is smaller than the validation split of the small corpus
        keys["validation.steps"] = 1
    if config.compile.enable:
        # aot_eager traces and differentiates like inductor, but generates no kernels.
        keys["compile.backend"] = "aot_eager"
    keys |= reduce_experts(args, wide, keys["model.dim"], N_EXPERTS)
    if args.sliding_window:
        keys["flavor.sliding_window"] = min(WINDOW, args.sliding_window)
        keys["flavor.layer_types"] = tuple(dict.fromkeys(args.layer_types))
    small = override(config, keys)
    small = override(small, reduce_batch(small, config, real, wide))
    layout = plan_layout(small, resolve_model(small.model), wide.world_size)
    return Reduction(config, small, layout)


def suggest_smaller(config: Config, max_ranks: int, config_args: Sequence[str]) -> str:
    """Return a command that verifies a smaller layout, or advice to use more ranks if there is no such layout."""
    for degrees in list_smaller(config):
        smaller = override(config, degrees)
        if count_ranks(smaller.parallelism) > max_ranks:
            continue
        with suppress(ConfigError):
            reduce_config(smaller, max_ranks)
            command = ["verify", *config_args, f"--ranks={max_ranks}"]
            for key, degree in degrees.items():
                if degree != get_value(config, key):
                    command.append(f"--{key}={degree}")
            return f"Verify a smaller layout: {name_command(shlex.join(command))}"
    return "Give a larger --ranks"


def override(config: Config, overrides: dict[str, object]) -> Config:
    """Set keys of a config ("section.key"). "flavor.NAME" sets a field of ModelArgs or of its `moe`."""
    for key, value in overrides.items():
        if key.startswith("flavor."):
            name = key.removeprefix("flavor.")
            row = find_model_row(config.model)
            if not hasattr(row, name):
                value = replace(row.moe, **{name: value})
                name = "moe"
            key = "model.row"
            value = replace(row, **{name: value})
        config = with_value(config, key, value)
    return config


# ---------------------------------------------------------------- sizes


def reduce_sizes(config: Config, args: ModelArgs, layout: Layout) -> dict[str, int]:
    """Return model sizes with a dim of about 64 to 128. If tp x dp_shard x cp divides ffn_dim or vocab_size of the real
    model, the product also divides the reduced size. If dp_shard is automatic, this is guaranteed for tp, but not for
    the product."""
    tp = layout.tp
    n_kv_heads = min(2 * tp, args.n_kv_heads)
    n_heads = n_kv_heads * (args.n_heads // args.n_kv_heads)
    n_sharing = max(1, tp // n_kv_heads)  # number of ranks that share a head
    head_dim = lcm(8 if n_heads <= 32 else 4, n_sharing)
    unit = tp
    if config.model.uses_float8:
        head_dim = FLOAT8_BLOCK * n_sharing
        unit = FLOAT8_BLOCK * tp
    dim = n_heads * head_dim
    if args.dim != args.n_heads * args.head_dim:
        # make dim differ from n_heads * head_dim, so that code that confuses them fails
        dim += 16
    dim = round_up(dim, unit)
    split = tp
    if config.parallelism.data_parallel_shard_degree != AUTOMATIC:
        split *= layout.dp_shard * layout.cp
    return {
        "model.dim": dim,
        "model.n_heads": n_heads,
        "model.n_kv_heads": n_kv_heads,
        "model.head_dim": head_dim,
        "model.ffn_dim": reduce_size(args.ffn_dim, dim * 3 // 2, unit, split),
        "model.vocab_size": reduce_size(args.vocab_size, N_WORDS, tp, split),
    }


def reduce_size(real: int, wanted: int, unit: int, split: int) -> int:
    """Return a multiple of `unit` near `wanted`. If `split` divides `real`, `split` also divides the result. If `split`
    divides neither `real` nor `unit`, it does not divide the result."""
    size = round_up(wanted, unit)
    while unit % split and (real % split == 0) != (size % split == 0):
        size += unit
    return size


def reduce_experts(args: ModelArgs, layout: Layout, dim: int, n_wanted: int) -> dict[str, int]:
    """Return the sizes of a small MoE with about `n_wanted` experts. top_k is the real top_k, but at most N_EXPERTS.

    As in the real run, FSDP shards either the number of experts or their matrices. If the real model has both MoE and
    dense layers, the small model has both too. Returns {} for a dense model.
    """
    moe = args.moe
    if moe is None:
        return {}
    ep = layout.ep
    efsdp = layout.efsdp
    top_k = min(moe.top_k, N_EXPERTS)
    n_experts = round_up(min(moe.n_experts, max(n_wanted, top_k + UNCHOSEN)), ep)
    shares_experts = find_expert_dim(args, ep, efsdp) == 0 or efsdp == 1 or dim % efsdp > 0
    while (n_experts // ep % efsdp == 0) != shares_experts:
        n_experts += ep
    return {
        "flavor.n_experts": n_experts,
        "flavor.top_k": top_k,
        "flavor.expert_ffn_dim": round_up(dim // 2, lcm(ALIGNED, efsdp, layout.tp)),
        "flavor.n_first_dense_layers": min(moe.n_first_dense_layers, 1),
        "flavor.moe_every": min(moe.moe_every, 2),
    }


# ---------------------------------------------------------------- stages and batch


def reduce_stages(section: Parallelism, n_layers: int, real: Layout) -> dict[str, object]:
    """Return the keys for layers and stages, with at most two stages per rank if the schedule allows it.

    The small run has the first stages and the last stage of the real run. A small stage has one layer if the
    corresponding real stage has the minimum number of layers, and two layers if the real stage has more. A stage
    without layers remains without layers.
    """
    if real.pp == 1:
        return {"model.n_layers": min(2, n_layers), STAGES: None}
    counts = plan_stages(section, n_layers)
    least = SCHEDULES[section.pipeline_parallel_schedule].least_stages_per_rank
    n_stages = real.pp * max(least, min(2, len(counts) // real.pp))
    fewest = min(filter(None, counts))
    kept = [*counts[: n_stages - 1], counts[-1]]
    fewer = [min(count, 1 if count == fewest else 2) for count in kept]
    layers_per_stage = [None, 1, 2, 3]
    loads = range(4)  # values of FIRST and LAST
    for values in product(layers_per_stage, loads, loads):
        keys = dict(zip((STAGES, FIRST, LAST), values, strict=True))
        small = override(Config(parallelism=section), keys)
        if plan_stages(small.parallelism, sum(fewer)) == fewer:
            return keys | {"model.n_layers": sum(fewer)}
    raise ValueError(f"no values of the pipeline keys give stages with {fewer} layers")


def reduce_batch(small: Config, config: Config, real: Layout, wide: Layout) -> dict[str, object]:
    """Return the keys of a small batch. The small batch has more microbatches than stages if the real batch has enough
    microbatches. cp and tp divide the sequence length."""
    accumulates = real.global_batch_size > config.training.local_batch_size * real.dp
    n_rows = 2
    n_microbatches = 3 if accumulates else 1
    if real.pp > 1:
        n_rows = min(2, real.microbatch_size)
        n_stages = count_stages(small.parallelism, small.model.n_layers)
        # Use more microbatches than stages, but not more microbatches than in the real run. The number is even if
        # possible, because then a run on a different layout can resume with the same batch.
        wanted = min(real.n_microbatches, 2 * (n_stages // 2 + 1))
        n_microbatches = find_n_microbatches(small.parallelism, wanted, n_stages)
    unit = FLOAT8_BLOCK if config.model.uses_float8 else 1
    # A row has 41 tokens, an odd number, unless tp, cp, float8 or a long window requires more. A row with an odd number
    # of tokens shows whether code that halves rows keeps the last token.
    keys = give_batch(small, wide, n_rows, n_microbatches, 41, unit)
    if accumulates:
        keys["training.local_batch_size"] = n_rows
    return keys


def give_batch(
    small: Config,
    layout: Layout,
    n_rows: int,
    n_microbatches: int,
    least_tokens: int,
    unit: int = 1,
) -> dict[str, object]:
    """Return the keys for a batch with `n_rows` rows per microbatch, each longer than every attention window.

    A row has at least `least_tokens` tokens. cp and tp split a row into pieces that each have a multiple of `unit`
    tokens.
    """
    windows = list_windows(small.model.attention, resolve_model(small.model))
    n_tokens = max([least_tokens, *(BEYOND + window for window in windows if window)])
    local_batch_size = n_rows * n_microbatches
    return {
        "training.local_batch_size": local_batch_size,
        "training.global_batch_size": local_batch_size * layout.dp,
        "training.seq_len": round_up(n_tokens, count_pieces(small.parallelism) * unit),
        "parallelism.pipeline_parallel_microbatch_size": n_rows if layout.pp > 1 else 1,
    }
