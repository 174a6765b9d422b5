"""Muon is the same on every layout. test_parameter_groups.py: one process; test_costs.py: its plan."""

import compare
from layouts import TWO_LAYERS, read_rows
from marks import each_row
from mutants_of_muon import MUON

from torchtitan_lite.tools.verify.plain import STEPS
from torchtitan_lite.tools.verify.trial import try_layout

LAYOUTS = read_rows("""
one rank | 1
dp4 | 4
dp3, odd sizes and an empty slice | 3 | training.global_batch_size=6 model.ffn_dim=4
hsdp2x2 | 4 | REPLICATE=2
dp2, ZeRO 2 | 2 | ZERO=2 ACCUMULATION_4
dp2 x tp2 | 4 | TP=2
cp2 x tp2 | 4 | CP=2 TP=2
pp2 x dp2 x tp2 | 8 | PP=2 TP=2 GROUPS
debug_moe_3d | 8 | MOE PP=2 TP=2 EP=4 GROUPS
experts whose matrices FSDP cuts | 4 | FIVE_EXPERTS
shared experts | 4 | SHARED EP=2 TP=2
""")
# By default, these rows and "pp2 tied, Muon" of layouts.py test all parts of the other rows.
FAST = ("dp3, odd sizes and an empty slice", "experts whose matrices FSDP cuts", "shared experts")


@each_row("name", LAYOUTS, fast=FAST)
def test_weights_and_state_are_those_of_one_process(pool, tmp_path, name):
    """Make five steps. Some of them are clipped, and some are skipped. Updates may differ by 1e-5."""
    world_size, keys = LAYOUTS[name]
    trial = try_layout(
        name,
        compare.complete({**TWO_LAYERS, **MUON, **keys}, world_size),
        world_size,
        pool.run,
        tmp_path,
        len(STEPS),
    )
    assert not trial.faults and {"state", "updates"} <= trial.measures.keys()
