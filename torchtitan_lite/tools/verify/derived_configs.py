"""Derive the configs of the other trials from the reduced config of the wide trial (reduction.py).

                layers             sequence                         microbatches    experts
    wide        1 or 2 per stage   about 41, odd if possible        as in the run   8
    deep        12 or more         280 tokens, 560 with documents   12 with pp      20

The deep trial finds faults that occur only with many layers, long rows or large counts. This trial has the options of
the wide trial, except recompute and compile. The functions after `deepen` change the layout or the compiler of a
config. This module does not import torch.
"""

from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import gcd, lcm

from torchtitan_lite.config.checks import find_n_microbatches, plan_layout
from torchtitan_lite.config.choices import ATTENTIONS
from torchtitan_lite.config.layout import count_stages
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.model import resolve_model
from torchtitan_lite.config.schema import Config, Parallelism, get_value
from torchtitan_lite.tools.plan.workload import round_up
from torchtitan_lite.tools.verify.degrees import DEGREES, EP, SHARD, TP
from torchtitan_lite.tools.verify.reduction import (
    FIRST,
    LAST,
    STAGES,
    Reduction,
    give_batch,
    override,
    reduce_experts,
)

# ---------------------------------------------------------------- the deep trial

# layer numbers with two digits show whether code sorts the numbers as text (10 before 2)
N_LAYERS = 12
# Tokens per row. With document attention, rows are twice as long, because documents in row 0 have two tokens on
# average. A row has more than 256 tokens, and row 0 has more than 256 documents, so an index that is stored in one byte
# overflows.
N_TOKENS = 280
N_MICROBATCHES = 12
N_DEEP_EXPERTS = 20
DIM = 16


def deepen(reduction: Reduction) -> Config:
    """Return the config of the deep trial: many narrow layers and long rows."""
    layout = reduction.layout
    real = reduction.real
    args = resolve_model(real.model)
    tp = layout.tp
    # Turn off recompute and the compiler: they would take most of the time, and the wide trial covers them.
    keys = {
        STAGES: None,
        FIRST: 1,
        LAST: 1,
        "compile.enable": False,
        "activation_checkpoint.mode": "none",
    }
    small = override(reduction.config, keys)
    n_stages = count_stages(small.parallelism, N_LAYERS)
    n_microbatches = 1
    if layout.pp > 1:
        n_microbatches = find_n_microbatches(small.parallelism, N_MICROBATCHES, n_stages)
    keys = {
        "model.n_layers": max(N_LAYERS, n_stages),
        "model.dim": DIM,
        "model.n_heads": tp * min(2, args.n_heads // max(tp, args.n_kv_heads)),
        "model.n_kv_heads": min(tp, args.n_kv_heads),
        "model.head_dim": lcm(4, max(1, tp // args.n_kv_heads)),
        "model.ffn_dim": round_up(24, tp),
        "model.vocab_size": round_up(64, tp),
        **reduce_experts(args, layout, DIM, N_DEEP_EXPERTS),
    }
    n_tokens = N_TOKENS
    if ATTENTIONS[real.model.attention].uses_documents:
        n_tokens = 2 * N_TOKENS
    small = override(small, keys)
    return override(small, give_batch(small, layout, 1, n_microbatches, n_tokens))


# ---------------------------------------------------------------- other trials


def leave_out_compiler(config: Config) -> Config:
    """Turn compile off. Replace the recompute mode memory_budget, which needs the compiler, with `full`."""
    keys: dict[str, object] = {"compile.enable": False}
    if config.activation_checkpoint.mode == "memory_budget":
        keys["activation_checkpoint.mode"] = "full"
    return override(config, keys)


def put_on_one_rank(config: Config, local_batch_size: int) -> Config:
    """Return the config without parallelism. If there are more rows than `local_batch_size`, gradients are
    accumulated."""
    section = replace(Parallelism(), data_parallel_shard_degree=1)
    keys = {"parallelism": section, "training.local_batch_size": local_batch_size}
    return override(leave_out_compiler(config), keys)


def choose_other_layout(config: Config, n_ranks: int) -> Config:
    """Return the config on a different mesh of these ranks, with the same global batch and a different ep if possible.

    The mesh has tp = 2, and dp_shard over the remaining ranks. If tp = 2 is impossible, dp_shard covers all ranks.
    """
    args = resolve_model(config.model)
    asked = {key: get_value(config, key) for key in DEGREES}
    eps = [1]
    if args.moe:
        eps = sorted((2, n_ranks, 1), key=lambda ep: ep == asked[EP])
    for ep, tp in product(eps, (gcd(2, n_ranks), 1)):
        degrees = dict.fromkeys(DEGREES, 1) | {TP: tp, SHARD: n_ranks // tp, EP: ep}
        other = override(config, degrees)
        with suppress(ConfigError):
            plan_layout(other, args, n_ranks)
            if degrees != asked:
                return other
    return config
