"""ZeRO++: every layout computes what one process computes, also after a resume.

test_costs.py has its bytes and memory, test_check.py the settings that are refused.
"""

import compare
from layouts import read_rows
from marks import each_row

from torchtitan_lite.tools.verify.train_py import try_train

KEY, NODE = "parallelism.zero_plus_plus", "parallelism.zero_plus_plus_node_size"
ALL, ROUNDED = {KEY: ["hpz", "qwz", "qgz"], NODE: 2}, {KEY: ["qwz", "qgz"], NODE: 4}
HPZ = {KEY: ["hpz"], NODE: 2}
LAYOUTS = read_rows(
    """
dp4 | 4 | ALL TWO_LAYERS
dp4, hpZ alone | 4 | HPZ TWO_LAYERS
dp4 accumulation 2 | 4 | ALL ACCUMULATION_4 TWO_LAYERS
hsdp2x2 | 4 | ALL REPLICATE=2 TWO_LAYERS
dp2 x tp2 | 4 | ROUNDED TP=2 TWO_LAYERS
dp4 x tp2 | 8 | ALL TP=2 NODE=4 TWO_LAYERS
pp2 x dp2 x tp2 | 8 | ROUNDED PP=2 TP=2 TWO_LAYERS
experts, dp4 | 4 | ALL MOE
experts, dp4, matrices shared | 4 | ALL FIVE_EXPERTS
experts, dp2 x tp2, ep2 | 4 | ALL NODE=4 MOE TP=2 EP=2
""",
    globals(),
)
# Together, these rows cover every formula for the bytes that are moved.
PLANNED = (
    "dp4, hpZ alone",
    "dp4 accumulation 2",
    "hsdp2x2",
    "dp4 x tp2",
    "experts, dp2 x tp2, ep2",
)
RESUMED = ("dp4", "experts, dp4", "pp2 x dp2 x tp2")


@each_row("name", LAYOUTS, slow=("dp4 x tp2", "pp2 x dp2 x tp2"))
def test_a_layout_computes_what_one_process_computes(pool, tmp_path, name):
    trial = compare.try_row(LAYOUTS[name], pool.run, tmp_path)
    assert trial.faults == {}
    assert LAYOUTS[name].overrides[KEY] == ["hpz"] or 0.5 < trial.measures["packing"][0] <= 1, (
        "some errors reach the bound, so the bound is not too large"
    )


@each_row("name", RESUMED, fast=RESUMED[:1])
def test_train_py_saves_and_resumes_on_another_layout(pool, tmp_path, name):
    reduction = compare.reduce_row(LAYOUTS[name])
    assert try_train(reduction, pool.run, tmp_path).faults == {}
