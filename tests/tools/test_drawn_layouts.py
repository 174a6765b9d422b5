"""`verify` finds no fault in correct layouts: it certifies random layouts with exactly their degrees.

Mesh, schedule, stages, recompute, loss, optimizer and precision are drawn. A refused config is drawn again.
`tests/run.sh --all` tries six. `LAYOUTS=60 SEED=1 pytest -m slow tests/tools/test_drawn_layouts.py` tries 60, and
`ONLY=7,40` only numbers 7 and 40.
"""

import os
import random
from collections import defaultdict
from contextlib import suppress
from math import prod

import compare
import pytest
from layouts import (
    CP,
    EMULATED,
    FLOAT8,
    PP,
    REPLICATE,
    SCHEDULE,
    SHARD,
    TP,
    read_rows,
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

FP8 = {**FLOAT8, **EMULATED}
# Groups of keys. One line of each group is drawn, with the weight in its second column.
CHOICES = """
batch | 1 | training.local_batch_size=4
batch | 1 | training.local_batch_size=8
batch | 1 | training.local_batch_size=12
accumulation | 6
accumulation | 1 | training.global_batch_size=48
accumulation | 1 | training.global_batch_size=96
sizes | 1 | training.seq_len=480 model.n_heads=24 model.n_kv_heads=12 model.head_dim=16 model.ffn_dim=1536 model.dim=768
vocabulary | 1 | model.vocab_size=2304
vocabulary | 1 | model.vocab_size=2316
vocabulary | 1 | model.vocab_size=2400
zero | 1 | ZERO=auto
zero | 1 | ZERO=1
zero | 1 | ZERO=2
zero | 1 | ZERO=3
chunk | 1 | CHUNK=0
chunk | 1 | CHUNK=24
chunk | 1 | CHUNK=1024
decay | 1 | lr_scheduler.decay_type=linear
decay | 1 | lr_scheduler.decay_type=sqrt
decay | 1 | lr_scheduler.decay_type=cosine
offload | 9
offload | 1 | training.enable_cpu_offload=true
compile | 9 | compile.enable=false
compile | 1 | compile.enable=true
recompute | 1 | MODE=none
recompute | 1 | MODE=full
recompute | 1 | MODE=selective OPTION=op
recompute | 1 | EVERY_SECOND
optimizer | 1 | optimizer.name=SGD optimizer.implementation=foreach
optimizer | 1 | optimizer.name=AdamW optimizer.implementation=fused
optimizer | 1 | optimizer.name=AdamW optimizer.implementation=for-loop
optimizer | 1 | optimizer.implementation=fused optimizer.moments_dtype=bfloat16
precision | 1 | training.mixed_precision_param=float32
precision | 1 | training.mixed_precision_param=bfloat16
precision | 1 | FP8
precision | 1 | FP8 quantize.linear.float8.recipe_name=rowwise
precision | 1 | FP8 quantize.linear.float8.enable_fsdp_float8_all_gather=true
ring | 7
ring | 3 | RING
documents | 7
documents | 3 | DOCUMENTS
layers | 1 | model.n_layers=4
layers | 1 | model.n_layers=9
layers | 1 | model.n_layers=13
first | 1 | parallelism.pipeline_parallel_first_stage_less_layers=0
first | 1 | parallelism.pipeline_parallel_first_stage_less_layers=1
last | 1 | parallelism.pipeline_parallel_last_stage_less_layers=0
last | 1 | parallelism.pipeline_parallel_last_stage_less_layers=1
experts | 14
experts | 1 | model.flavor=debug_moe flavor.top_k=1 flavor.normalize_top_k=false EP=1
experts | 1 | model.flavor=debug_moe flavor.top_k=1 flavor.normalize_top_k=false EP=2
experts | 1 | model.flavor=debug_moe flavor.top_k=2 EP=4
experts | 1 | model.flavor=debug_moe flavor.top_k=2 flavor.n_experts=24 EP=2
experts | 1 | model.flavor=debug_moe flavor.top_k=3 EP=8
experts | 1 | model.flavor=debug_moe flavor.top_k=3 flavor.n_experts=24 EP=2
tied | 7
tied | 3 | TIED
"""  # top_k=1: a token's only expert would have weight 1, and its router's gradient would be only rounding errors


FACTORS = [[2], [3], [2, 2], [2, 3], [2, 2, 2], [2, 2, 2]]  # of the number of ranks


def draw_choices(draw: random.Random) -> dict[str, object]:
    groups = defaultdict(list)
    for line in CHOICES.strip().splitlines():
        name, _, rest = line.partition(" | ")
        (row,) = read_rows(f"{name} | {rest}", globals()).values()
        groups[name] += [row.overrides] * row.world_size
    keys = {}
    for choices in groups.values():
        keys |= draw.choice(choices)
    return keys


def draw_layout(draw: random.Random) -> tuple[Config, int]:
    """Draw a config and a number of ranks, 2 to 8, on which it can run."""
    factors = draw.choice(FACTORS)
    world_size = prod(factors)
    degrees = dict.fromkeys((PP, REPLICATE, SHARD, CP, TP), 1)
    for factor in factors:
        dim = draw.choice(list(degrees))
        degrees[dim] *= factor
    debug = read_config(["--config", "debug"]).config
    while True:
        keys = draw_choices(draw) | degrees
        keys[SCHEDULE] = draw.choice(list(SCHEDULES))
        config = compare.override(debug, keys)
        with suppress(ConfigError):
            plan_layout(config, resolve_model(config.model), world_size)
            reduce_config(config, world_size)
            return config, world_size


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
    report["idle"] = []
    assert report["verdict"] == "certified", describe_report(report)
