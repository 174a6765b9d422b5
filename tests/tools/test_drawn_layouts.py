"""`verify` accuses no correct layout: it certifies random layouts, exactly as asked for.

Mesh, schedule, stages, recompute, loss, optimizer and precision are drawn. A refused config is drawn again.
`tests/run.sh --all` tries six. `LAYOUTS=60 SEED=1 pytest -m slow tests/tools/test_drawn_layouts.py` tries 60, and
`ONLY=7,40` only numbers 7 and 40.
"""

import os
import random
from math import prod

import compare
import pytest
from layouts import (
    CHUNK,
    CP,
    DOCUMENTS,
    EP,
    EVERY_SECOND,
    MODE,
    OPTION,
    PP,
    REPLICATE,
    RING,
    SCHEDULE,
    SHARD,
    TP,
    ZERO,
)

from torchtitan_lite.config.checks import plan_layout
from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.model import resolve_model
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.config.schema import Config
from torchtitan_lite.tools.verify.command import describe_report, make_report, make_trials
from torchtitan_lite.tools.verify.reduction import reduce_config

N_LAYOUTS, SEED = int(os.environ.get("LAYOUTS", 6)), int(os.environ.get("SEED", 0))
ONLY = [int(n) for n in os.environ.get("ONLY", "").split(",") if n]

FLOAT8 = "quantize.linear.float8"
HEADS = {
    "model.n_heads": 24,
    "model.n_kv_heads": 12,
    "model.head_dim": 16,
    "model.ffn_dim": 720,
    "model.dim": 240,
}
OPTIMIZERS = [
    {"optimizer.name": "SGD", "optimizer.implementation": "foreach"},
    {"optimizer.name": "AdamW", "optimizer.implementation": "fused"},
    {"optimizer.name": "AdamW", "optimizer.implementation": "for-loop"},
    {"optimizer.implementation": "fused", "optimizer.moments_dtype": "bfloat16"},
]
EMULATED = {"model.converters": ["float8"], f"{FLOAT8}.emulate": True}
PRECISIONS = [
    {"training.mixed_precision_param": "float32"},
    {"training.mixed_precision_param": "bfloat16"},
    EMULATED,
    {**EMULATED, f"{FLOAT8}.recipe_name": "rowwise"},
    {**EMULATED, f"{FLOAT8}.enable_fsdp_float8_all_gather": True},
]
RECOMPUTE = [
    {MODE: "none"},
    {MODE: "full"},
    {MODE: "selective", OPTION: "op"},
    EVERY_SECOND,
]


def draw_layout(draw: random.Random) -> tuple[Config, int]:
    """Draw a config and a number of ranks, 2 to 8, on which it can run."""
    factors = draw.choice([[2], [3], [2, 2], [2, 3], [2, 2, 2], [2, 2, 2]])
    degrees = dict.fromkeys((PP, REPLICATE, SHARD, CP, TP), 1)
    for factor in factors:
        degrees[draw.choice(list(degrees))] *= factor
    while True:
        config = compare.override(
            read_config(["--config", "debug"]).config, draw_keys(draw, degrees)
        )
        try:
            plan_layout(config, resolve_model(config.model), prod(factors))
            reduce_config(config, prod(factors))
        except ConfigError:
            continue
        return config, prod(factors)


def draw_keys(draw: random.Random, degrees: dict[str, int]) -> dict[str, object]:
    """Draw keys that differ from the debug config. Some combinations of them are refused."""
    local_batch_size = (
        draw.choice([2, 4, 6, 8]) if degrees[PP] == 1 else draw.choice([1, 2, 3]) * 2 * degrees[PP]
    )
    keys = {
        **HEADS,
        **degrees,
        SHARD: draw.choice([-1, degrees[SHARD]]),
        "model.vocab_size": draw.choice([2304, 2316, 2400]),
    }
    keys |= {"training.local_batch_size": local_batch_size, "training.seq_len": 480}
    if draw.random() < 0.4:
        n_times = draw.choice([2, 3, 4])
        keys["training.global_batch_size"] = (
            local_batch_size * degrees[REPLICATE] * degrees[SHARD] * n_times
        )
    if degrees[PP] > 1:
        keys[SCHEDULE] = draw.choice(list(SCHEDULES))
        keys["model.n_layers"] = draw.randint(2 * degrees[PP], 3 * degrees[PP] + 1)
        for end in ("first", "last"):
            keys[f"parallelism.pipeline_parallel_{end}_stage_less_layers"] = draw.choice([0, 1])
    else:
        keys["flavor.tie_embeddings"] = draw.random() < 0.3
    keys[ZERO] = draw.choice(["auto", 1, 2, 3])
    keys[CHUNK] = draw.choice([0, 24, 1024])
    keys["lr_scheduler.decay_type"] = draw.choice(["linear", "sqrt", "cosine"])
    keys["training.enable_cpu_offload"] = draw.random() < 0.1
    keys["compile.enable"] = draw.random() < 0.1
    keys |= draw.choice(RECOMPUTE) | draw.choice(OPTIMIZERS) | draw.choice(PRECISIONS)
    if draw.random() < 0.3:
        n_ranks = degrees[SHARD] * degrees[CP] * degrees[TP]
        experts = {
            "model.flavor": "debug_moe",
            EP: draw.choice([n for n in (1, 2, 4, 8) if n_ranks % n == 0]),
        }
        top_k = draw.choice([1, 2, 3])
        # A token's only expert would have weight 1, and the router's gradient would be nothing but rounding errors.
        experts |= {
            "flavor.n_experts": draw.choice([8, 24]),
            "flavor.top_k": top_k,
            "flavor.normalize_top_k": top_k > 1,
        }
        keys = experts | keys
    for option in (RING, DOCUMENTS):
        keys |= option if draw.random() < 0.3 else {}
    return keys


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    ONLY or range(N_LAYOUTS),
)
def test_a_drawn_layout_is_certified_as_it_runs(pool, tmp_path, number):
    config, world_size = draw_layout(random.Random(1000 * SEED + number))
    reduction = reduce_config(config, world_size)
    assert (
        reduction.layout.degrees
        == plan_layout(config, resolve_model(config.model), world_size).degrees
    )
    report = make_report("drawn", reduction, make_trials(reduction, pool.run, tmp_path))
    assert report["verdict"] == "certified", describe_report(report)
