"""The central tests: every layout computes what the single-device model does, and refused layouts really fail."""

from functools import partial
from unittest.mock import patch

import compare
import pytest
from layouts import (
    BFLOAT16_LAYOUTS,
    CROSSES,
    FAST,
    FLOAT8_LAYOUTS,
    LAYOUTS,
    MODE,
    PP,
    SCHEDULE,
    read_rows,
)
from marks import each_row, slow

from torchtitan_lite.config import checks
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.model import resolve_model
from torchtitan_lite.tools.verify.ranks import RankFailure
from torchtitan_lite.tools.verify.trial import make_trial, try_precision

# These rows are slow tests. By default, the rows of Qwen2 and of one key/value head already test this code.
HELD = {"tp2", "tp2 rowwise", "pp2 x dp2 x tp2, gathered"}
HELD |= {name for name in BFLOAT16_LAYOUTS if name.startswith("pp2 x tp2 ")}


@each_row("name", [*FAST, *map(slow, CROSSES)])
def test_layout_computes_the_single_device_model(pool, tmp_path, name):
    trial = compare.try_row(LAYOUTS[name], pool.run, tmp_path)
    assert trial.faults == {}


@each_row("name", BFLOAT16_LAYOUTS, slow=HELD)
def test_layout_rounds_to_bfloat16_in_the_same_places_as_one_rank(pool, tmp_path, name):
    reduction = compare.reduce_row(BFLOAT16_LAYOUTS[name])
    assert try_precision("bfloat16", reduction, pool.run, tmp_path).faults == {}


@each_row("name", FLOAT8_LAYOUTS, slow=HELD)
def test_layout_rounds_to_float8_in_the_same_places_as_one_rank(pool, tmp_path, name):
    reduction = compare.reduce_row(FLOAT8_LAYOUTS[name])
    assert try_precision("float8", reduction, pool.run, tmp_path).faults == {}


# ---------------------------------------------------------------- refused

SPLIT = {PP: 2, SCHEDULE: "ZBVZeroBubble", MODE: "none"}
# Key of the problem | how the run would fail: words of the crash, or the measure that is wrong | ranks | keys.
# If a torch release repairs one of these, its test fails and says so.
REFUSED = f"""\
{SCHEDULE} | no gradient reaches | 4 | SPLIT ZERO=3
{MODE} | backward an extra time | 2 | SPLIT MODE=selective
parallelism.context_parallel_rotate_method | the ring has no masks | 2 | CP=2 RING DOCUMENTS
parallelism.context_parallel_rotate_method | the ring has no masks | 2 | CP=2 RING WINDOWS
"""
REFUSED_SLOWLY = f"""\
{SCHEDULE} | no gradient reaches | 4 | SPLIT ZERO=3 SCHEDULE=InterleavedZeroBubble
{SCHEDULE} | gradient | 4 | SPLIT ZERO=3 SCHEDULE=DualPipeV
compile.enable | Input: ['Tensor( | 2 | SPLIT COMPILED
"""


def refuse_nothing():
    return patch("torchtitan_lite.config.settings.find_refused", lambda *args: [])


@each_row("line", (REFUSED + REFUSED_SLOWLY).splitlines(), slow=REFUSED_SLOWLY.splitlines())
def test_refused_combination_is_refused_and_really_fails(pool, tmp_path, line):
    key, symptom, layout = line.split(" | ", 2)
    (row,) = read_rows(f"refused | {layout}", {"SPLIT": SPLIT}).values()
    config = compare.complete(row.overrides, row.world_size)
    model_args = resolve_model(config.model)
    with pytest.raises(ConfigError) as refusal:
        checks.plan_layout(config, model_args, row.world_size)
    named = [problem.key for problem in refusal.value.problems]
    assert key in named

    run_ranks = compare.ranks_inside(pool, refuse_nothing)
    attempt = partial(compare.try_row, row, run_ranks, tmp_path)
    trial = make_trial("table", attempt)
    said = []
    for kind, fault in trial.faults.items():
        said.append(f"{kind}: {fault.text}")
    assert symptom in "\n".join(said)


def test_the_pool_names_the_failing_rank_and_works_again_afterwards(pool):
    with pytest.raises(RankFailure, match="rank 1 of 2"):
        pool.run(compare.fail_on, 2, 1)
    assert pool.run(compare.fail_on, 2, -1) == [0, 1]
