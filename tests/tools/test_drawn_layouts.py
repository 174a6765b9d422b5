"""`verify` finds no fault in correct layouts: it certifies layouts whose keys are drawn from all tables of layouts.

Each draw merges the keys of four rows. If the config is refused or needs more ranks, keys are drawn again.
`tests/run.sh --all` tries six.
`LAYOUTS=60 SEED=1 pytest -m slow tests/tools/test_drawn_layouts.py` tries 60. ONLY=7,40 tries only layouts 7 and 40.
"""

import os
import random
from contextlib import suppress

import compare
import pytest
from layouts import BFLOAT16_LAYOUTS, FLOAT8_LAYOUTS, LAYOUTS, Row, read_rows
from marks import each_row

from torchtitan_lite.config.messages import UserError
from torchtitan_lite.tools.verify.command import describe_report, make_report, make_trials
from torchtitan_lite.tools.verify.reduction import Reduction

N_LAYOUTS, SEED = int(os.environ.get("LAYOUTS", 6)), int(os.environ.get("SEED", 0))
ONLY = [int(n) for n in os.environ.get("ONLY", "").split(",") if n]

# Keys that no row of layouts.py has. With top_k=1 and normalized weights, each routing weight would be 1, so the
# gradients of the router would consist of rounding errors.
MORE = read_rows("""
12 rows | 1 | training.global_batch_size=96
sizes that 3 divides | 1 | training.seq_len=480 model.n_heads=24 model.n_kv_heads=12 model.head_dim=16 model.dim=384
an odd vocabulary | 1 | model.vocab_size=2316
layers with two digits | 1 | model.n_layers=13
layers that 2 does not divide | 1 | model.n_layers=9
large chunks | 1 | CHUNK=1024
no chunks | 1 | CHUNK=0
square root | 1 | ADAMW lr_scheduler.decay_type=sqrt lr_scheduler.decay_ratio=0.5
cosine | 1 | ADAMW lr_scheduler.decay_type=cosine lr_scheduler.decay_ratio=0.5
SGD | 1 | optimizer.name=SGD optimizer.implementation=foreach
loops | 1 | ADAMW optimizer.implementation=for-loop
moments in bfloat16 | 1 | ADAMW optimizer.moments_dtype=bfloat16
one expert of 8 | 1 | MOE flavor.top_k=1 flavor.normalize_top_k=false
three experts of 24 | 1 | MOE EP=2 flavor.top_k=3 flavor.n_experts=24
""")
TABLES = (LAYOUTS, BFLOAT16_LAYOUTS, FLOAT8_LAYOUTS, MORE)
ROWS = [row for table in TABLES for row in table.values()]


def draw_layout(draw: random.Random) -> Reduction:
    while True:
        keys = {"model.flavor": "debug"}  # comes before other sizes
        for row in draw.sample(ROWS, 4):
            keys |= row.overrides
        with suppress(UserError):  # refused, or needs more ranks
            return compare.reduce_row(Row(draw.choice((2, 3, 4, 6, 8)), keys))


@pytest.mark.slow
@each_row("number", ONLY or range(N_LAYOUTS))
def test_a_randomly_drawn_layout_is_certified(pool, tmp_path, number):
    reduction = draw_layout(random.Random(1000 * SEED + number))
    report = make_report("drawn", reduction, make_trials(reduction, pool.run, tmp_path))
    report["idle"] = []
    assert report["verdict"] == "certified", describe_report(report)
