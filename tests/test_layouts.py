"""The heart of the tests: every layout computes the single-device model."""

import compare
import pytest
import torch
from layouts import (
    BFLOAT16,
    BFLOAT16_LAYOUTS,
    CROSSES,
    FAST,
    FLOAT8,
    FLOAT8_LAYOUTS,
    FP32_TOLERANCE,
    LAYOUTS,
    SLOW_FLOAT8_LAYOUTS,
    Row,
)

from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.tools.verify.module_outputs import judge_routes, measure_routes
from torchtitan_lite.tools.verify.ranks import RankFailure


@pytest.fixture(scope="module")
def measure(pool, oracle):
    """Function: row of the table -> difference between that layout and one process in fp32."""
    known = {}

    def measure_once(row: Row) -> compare.Difference:
        key = row.world_size, str(row.overrides)
        if key not in known:
            path = oracle(row.overrides)
            ranks = pool.run(compare.measure_layout, row.world_size, row.overrides, path)
            known[key] = compare.merge(ranks, fqns=set(torch.load(path, weights_only=False, mmap=True).gradients))
        return known[key]

    return measure_once


def mark_slow(names) -> list:
    return [pytest.param(name, marks=pytest.mark.slow) for name in sorted(names)]


@pytest.mark.parametrize("name", [*FAST, *mark_slow(CROSSES.keys() - FAST.keys())])
def test_layout_computes_the_single_device_model(measure, name):
    assert compare.find_faults(measure(LAYOUTS[name]), FP32_TOLERANCE) == {}


@pytest.mark.parametrize(
    "name", ["dp2, ep2", "tp2, ep2", "cp2 ring, ep2", "accumulation 2", "pp2 ZBVZeroBubble", "tp2, ep2, shared experts"]
)
def test_routers_choose_the_experts_that_those_of_one_process_choose(pool, oracle, name):
    row = LAYOUTS[f"experts, {name}"]
    config = compare.complete(row.overrides, row.world_size)
    flips = judge_routes(pool.run(measure_routes, row.world_size, config, oracle(row.overrides)))
    n_routes = 8 * 32 * 2 * resolve_model(config.model).n_moe_layers
    assert flips.faults == {} and f"of {n_routes:,} routes" in flips.measures[0].of


@pytest.mark.parametrize("name", BFLOAT16_LAYOUTS)
def test_bfloat16_layout_errs_at_most_twice_as_much_as_one_rank(measure, name):
    difference, alone = measure(BFLOAT16_LAYOUTS[name]), measure(Row(1, BFLOAT16))
    assert all(difference.initial_equal.values())
    assert max(difference.gradient.values()) <= 2 * max(alone.gradient.values())
    assert difference.update <= 2 * alone.update
    assert max(alone.gradient.values()) < 0.05  # bf16 has 8 bits; more than a few percent would be a bug, not rounding


@pytest.mark.parametrize("name", [*FLOAT8_LAYOUTS, *mark_slow(SLOW_FLOAT8_LAYOUTS)])
def test_each_gradient_of_a_float8_layout_errs_at_most_twice_as_much_as_on_one_rank(measure, name):
    difference, alone = measure({**FLOAT8_LAYOUTS, **SLOW_FLOAT8_LAYOUTS}[name]), measure(Row(1, FLOAT8))
    assert all(difference.initial_equal.values()) and not difference.unequal_replicas
    too_large = {fqn: e for fqn, e in difference.gradient.items() if e > 2 * alone.gradient[fqn]}
    assert too_large == {}
    assert difference.update <= 2 * alone.update
    assert 0.01 < max(alone.gradient.values()) < 0.2  # 3 bits of fraction, 2 for gradients


def test_a_parameter_that_no_rank_reports_fails_the_comparison(measure):
    ranks = measure(Row(2, {"parallelism.pipeline_parallel_degree": 2})).ranks
    with pytest.raises(AssertionError, match="not compared"):
        compare.merge(ranks[:1], {fqn for rank in ranks for fqn in rank.initial_equal})


def test_pool_names_the_failing_rank_and_works_again_afterwards(pool):
    with pytest.raises(RankFailure, match="rank 1 of 2"):
        pool.run(compare.fail_on, 2, 1)
    assert pool.run(compare.all_ranks_agree, 2, "alive") == [True, True]
