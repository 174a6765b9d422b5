"""Test every layout: it computes the same as the single-device model. Layouts that `check` refuses fail if they run
anyway."""

from functools import partial
from unittest.mock import patch

import compare
import pytest
from layouts import (
    BFLOAT16_LAYOUTS,
    FAST,
    FLOAT8_LAYOUTS,
    LAYOUTS,
    MODE,
    MUON_LAYOUTS,
    PP,
    SCHEDULE,
    ZERO_PP_LAYOUTS,
    read_rows,
)
from marks import each_row, read_lines

from torchtitan_lite.config import checks
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.model import resolve_model
from torchtitan_lite.tools.verify.plain import STEPS
from torchtitan_lite.tools.verify.trial import make_trial, try_precision

ROUNDED = {"bfloat16": BFLOAT16_LAYOUTS, "float8": FLOAT8_LAYOUTS}
# Rows that are tested by default. These rows and the certificate in test_verify.py (bfloat16 on dp2) together cover
# every feature of the slow rows.
FAST_ROUNDED = read_lines("""
bfloat16 | dp2 x tp2 many chunks
bfloat16 | pp2
bfloat16 | cp2 ring
bfloat16 | pp2 ZBVZeroBubble
float8 | cp2
float8 | dp2 x tp2, gathered
float8 | tp2 rowwise, one key/value head
float8 | dp2 full recompute, gathered
float8 | dp3, rows that 3 does not divide, gathered
""")


@each_row("name", LAYOUTS, fast=FAST)
def test_layout_computes_the_single_device_model(pool, tmp_path, name):
    trial = compare.try_row(LAYOUTS[name], pool.run, tmp_path)
    assert trial.faults == {}


@each_row(
    "precision, name",
    [[precision, name] for precision, rows in ROUNDED.items() for name in rows],
    fast=FAST_ROUNDED,
)
def test_layout_rounds_in_the_same_places_as_one_rank(pool, tmp_path, precision, name):
    reduction = compare.reduce_row(ROUNDED[precision][name])
    assert try_precision(precision, reduction, pool.run, tmp_path).faults == {}


# By default, only these rows and "pp2 tied, Muon" run. Together they cover every feature of the slow rows.
FAST_MUON = (
    "dp3, odd sizes and an empty slice",
    "experts whose matrices FSDP cuts",
    "shared experts",
)


@each_row("name", MUON_LAYOUTS, fast=[f"Muon, {name}" for name in FAST_MUON])
def test_muon_has_the_same_weights_and_state_on_a_layout_and_in_one_process(pool, tmp_path, name):
    """Make five steps. Some of them are clipped, and some are skipped. Updates may differ by 1e-5."""
    trial = compare.try_row(MUON_LAYOUTS[name], pool.run, tmp_path, len(STEPS))
    assert not trial.faults and {"state", "updates"} <= trial.measures.keys()


@each_row("name", ZERO_PP_LAYOUTS, slow=["ZeRO++, dp4 x tp2", "ZeRO++, pp2 x dp2 x tp2"])
def test_zero_plus_plus_computes_the_single_device_model(pool, tmp_path, name):
    trial = compare.try_row(ZERO_PP_LAYOUTS[name], pool.run, tmp_path)
    assert trial.faults == {}
    assert "hpZ alone" in name or 0.5 < trial.measures["packing"][0] <= 1, (
        "some errors reach the bound, so the bound is not too large"
    )


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
def test_refused_combination_is_refused_and_fails_if_it_runs_anyway(pool, tmp_path, line):
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
