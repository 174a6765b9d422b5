"""The heart of the tests: every layout computes the single-device model."""

import compare
import pytest
import torch
from layouts import BFLOAT16, BFLOAT16_LAYOUTS, CROSSES, FP32_TOLERANCE, LAYOUTS, Row

from torchtitan_lite.verify.ranks import RankFailure


def measure(pool, oracle, row: Row) -> compare.Difference:
    path = oracle(row.overrides)
    shares = pool.run(compare.measure_layout, row.world_size, row.overrides, path)
    return compare.merge(shares, fqns=set(torch.load(path, weights_only=False, mmap=True).gradients))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_computes_the_single_device_model(pool, oracle, name):
    difference = measure(pool, oracle, LAYOUTS[name])
    assert compare.find_faults(difference, FP32_TOLERANCE) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CROSSES.keys() - LAYOUTS.keys()))
def test_layout_of_a_full_cross_computes_the_single_device_model(pool, oracle, name):
    difference = measure(pool, oracle, CROSSES[name])
    assert compare.find_faults(difference, FP32_TOLERANCE) == {}


@pytest.fixture(scope="module")
def one_rank_in_bfloat16(pool, oracle):
    return measure(pool, oracle, Row(1, BFLOAT16))


@pytest.mark.parametrize("name", BFLOAT16_LAYOUTS)
def test_bfloat16_layout_errs_at_most_twice_as_much_as_one_rank(pool, oracle, one_rank_in_bfloat16, name):
    difference = measure(pool, oracle, BFLOAT16_LAYOUTS[name])
    alone = one_rank_in_bfloat16
    assert all(difference.initial_equal.values())
    assert max(difference.gradient.values()) <= 2 * max(alone.gradient.values())
    assert difference.update <= 2 * alone.update
    assert max(alone.gradient.values()) < 0.05  # bf16 has 8 bits; more than a few percent would be a bug, not rounding


def test_a_parameter_that_no_rank_reports_fails_the_comparison(pool, oracle):
    shares = pool.run(compare.measure_layout, 2, {"parallelism.pipeline_parallel_degree": 2}, oracle({}))
    fqns = set(torch.load(oracle({}), weights_only=False).gradients)
    with pytest.raises(AssertionError, match="not compared"):
        compare.merge(shares[:1], fqns)


def test_pool_names_the_failing_rank_and_works_again_afterwards(pool):
    with pytest.raises(RankFailure, match="rank 1 of 2"):
        pool.run(compare.fail_on, 2, 1)
    assert pool.run(compare.all_ranks_agree, 2, "alive") == [True, True]
