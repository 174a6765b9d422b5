"""Compare the forecast with published runs. The code's error bars equal the result of cross-validation by source."""

from itertools import pairwise
from math import exp

import pytest

from assets.benchmarks import published
from torchtitan_lite.models.registry import MODELS
from torchtitan_lite.tools.plan.bars import BARS


@pytest.fixture(autouse=True)
def gpt_block(monkeypatch):
    monkeypatch.setitem(MODELS, "gpt", published.GPT)


@pytest.mark.slow
def test_the_error_bars_in_the_code_contain_the_promised_fraction_of_held_out_runs():
    groups = published.find_unseen(published.read_rows())
    for name, unseen in groups.items():
        bar = published.make_bar(unseen)
        assert (bar.n_stacks < published.LEAST_STACKS) == (name not in BARS), name
        if printed := BARS.get(name):
            assert printed[:3] == pytest.approx(bar[:3], abs=0.011), name
            assert printed.n_rows == bar.n_rows
            assert 0.7 <= published.share_held(printed, unseen) <= 0.95, name
            assert 0.7 <= published.share_held_of_others(unseen) <= 0.92, name
    errors = [error for _, error in groups["memory of experts"]]
    assert all(abs(exp(error) - 1) < 0.15 for error in errors)
    # At most one run needs more memory than the upper end of the error bar.
    high = BARS["memory of experts"].high
    assert sum(round(exp(-error), 2) > high for error in errors) <= 1
    assert BARS["dense"].median <= 0.076 and BARS["memory"].median <= 0.06
    least = {"dense": 0.8, "experts": 0.7}
    for name, coefficient in least.items():
        assert published.rank_correlation(groups[name]) > coefficient
    quoted = {}  # four runs of Qwen3 30B-A3B that are often compared: published speed -> forecast
    for row, error in groups["experts"]:
        published_speed = row.values["tokens_per_s_per_gpu"]
        if published_speed in (12040, 8826, 6125, 3602):
            quoted[published_speed] = published_speed * exp(error)
    forecasts = [quoted[speed] for speed in sorted(quoted)]
    assert len(forecasts) == 4
    # The forecasts are in the same order as the measured speeds. Two forecasts within 1 % of each other count as equal.
    assert all(fast > 0.99 * slow for slow, fast in pairwise(forecasts))
    for row, error in groups["TP or PP"]:
        assert not row.is_eager_tp or abs(exp(error) - 1) < 0.155


def test_forecast_terms_equal_the_measurements_that_they_cite():
    """Compare two terms of the forecast with measurements. The first term is the time to add rows one by one in
    backward, on B200 and Hopper. The second term is the largest load of a rank or an expert."""
    for gpu, n_rows, dim, seconds in [
        ("b200", 196608, 2048, 1.85e-3),
        ("h100", 65536, 4096, 2.65e-3),
    ]:
        row = next(each for each in published.read_rows() if each.values["gpu"] == gpu)
        cluster = row.find_cluster({})
        bandwidth = cluster.memory_bandwidth * cluster.adding_efficiency
        assert 3 * n_rows * dim * 2 / bandwidth == pytest.approx(seconds, rel=0.15)
    loads = {}
    for row in published.read_rows():
        w = row.workload
        if w.is_unbalanced:
            n_rows = w.n_rows * w.layout.tp
            loads[w.layout.ep, w.args.moe.n_experts] = n_rows / (w.n_tokens * w.args.moe.top_k)
    assert loads[8, 128] == pytest.approx(1.57, abs=0.02)
    assert loads[2, 128] == pytest.approx(1.1, abs=0.01)
    assert loads[1, 128] == 1 and loads[1, 8] < 8 / 2
