"""No healthy layout is accused: random ones are certified, as they were asked for.

The default run tries two cheap ones, `tests/run.sh --all` six. `LAYOUTS=60 SEED=1 pytest -m "slow or not slow"
tests/test_drawn_layouts.py` tries more of them, `ONLY=7,40` these alone.
"""

import os
import random

import pytest
from drawn_layouts import draw_layout

from torchtitan_lite.config.command_lines import make_verify_parser
from torchtitan_lite.config.layout import plan_layout, resolve_model
from torchtitan_lite.verify import command as tool
from torchtitan_lite.verify.certificate import CERTIFIED, describe
from torchtitan_lite.verify.reduction import reduce_config

N_LAYOUTS, SEED = int(os.environ.get("LAYOUTS", 6)), int(os.environ.get("SEED", 0))


CHEAP = (2, 4)  # of seed 0: neither compiled nor on 8 ranks
ONLY = [int(n) for n in os.environ.get("ONLY", "").split(",") if n]


@pytest.mark.parametrize(
    "number", ONLY or [n if n in CHEAP else pytest.param(n, marks=pytest.mark.slow) for n in range(N_LAYOUTS)]
)
def test_a_drawn_layout_is_certified_as_it_runs(pool, tmp_path, number):
    config, world_size = draw_layout(random.Random(1000 * SEED + number))
    reduction = reduce_config(config, world_size)
    certificate = tool.verify("drawn", reduction, make_verify_parser().parse_args([]), pool.run, tmp_path)
    assert certificate.verdict == CERTIFIED, describe(certificate, verbose=False)
    assert reduction.degrees.reduced == {}
    runs = plan_layout(config, resolve_model(config.model), world_size).degrees
    wide = certificate.trials[0].difference
    of_ranks = [rank.coordinates for rank in wide.ranks]
    assert {dim: 1 + max(at[dim] for at in of_ranks) for dim in runs} == runs
