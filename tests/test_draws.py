"""The order of samples: every one once per epoch, every source its share, and all of it a function of the seed."""

import math
import random
from collections import Counter
from fractions import Fraction

import pytest
import torch

from torchtitan_lite.data.corpora import DRAWS_PER_ROUND, check_weights, split_round
from torchtitan_lite.data.sampler import Sampler, place_in_parts, shuffle

# ---------------------------------------------------------------- one permutation


@pytest.mark.parametrize("key", ["", "0 all 0", "17 source 2 5"])
def test_shuffle_is_one_to_one(key):
    for n in [*range(1, 130), 1023, 1024, 1025, 99_991]:
        shuffled = shuffle(torch.arange(n), n, key=key)
        assert torch.equal(shuffled.sort().values, torch.arange(n)), n


def test_shuffle_of_one_index_does_not_depend_on_the_others():
    n = 1000
    whole = shuffle(torch.arange(n), n, key="a")
    for index in (0, 17, 999):
        assert shuffle(torch.tensor([index]), n, key="a").item() == whole[index]


@pytest.mark.parametrize("n", [2**33 + 1, 10**12 + 39, 2**62 - 57])
def test_shuffle_of_more_indices_than_a_table_could_hold_stays_in_range_and_apart(n):
    some = torch.randint(0, n, (100_000,), generator=torch.Generator().manual_seed(0)).unique()
    shuffled = shuffle(some, n, key="a")
    assert 0 <= shuffled.min() and shuffled.max() < n and len(shuffled.unique()) == len(some)
    tenths = (shuffled.double() / n * 10).long().bincount(minlength=10)
    assert tenths.min() > 0.95 * len(some) / 10 and tenths.max() < 1.05 * len(some) / 10


def test_shuffle_sends_an_index_everywhere_equally_often():
    n, n_keys = 20, 2000
    places = torch.cat([shuffle(torch.tensor([7]), n, key=str(key)) for key in range(n_keys)])
    chi_square = ((places.bincount(minlength=n) - n_keys / n) ** 2 / (n_keys / n)).sum()
    # of 19 degrees of freedom: one in a thousand fair shuffles exceeds it; the keys are fixed
    assert chi_square < 43.8


def test_shuffle_separates_neighbours():
    n = 10_000
    shuffled = shuffle(torch.arange(n), n, key="a")
    distances = (shuffled[1:] - shuffled[:-1]).abs()
    assert (distances == 1).sum() < 20  # about 2 in a fair shuffle, 9,999 without
    assert 0.3 < distances.double().mean() / n < 0.37  # 1/3 in a fair shuffle


def test_places_in_parts_are_those_of_counting():
    sizes = [3, 1, 4, 1, 5]
    counted = [(part, place) for part, size in enumerate(sizes) for place in range(size)]
    parts, places = place_in_parts(torch.arange(sum(sizes)), sizes)
    assert list(zip(parts.tolist(), places.tolist(), strict=True)) == counted


# ---------------------------------------------------------------- all samples alike


@pytest.mark.parametrize("n_samples", [[1], [21], [5, 1, 30], [7, 7]])
def test_every_sample_is_drawn_once_per_epoch(n_samples):
    n = sum(n_samples)
    chosen = Sampler(n_samples, seed=3).choose(torch.arange(3 * n))
    everything = [(source, sample) for source, size in enumerate(n_samples) for sample in range(size)]
    epochs = [chosen[start : start + n] for start in range(0, 3 * n, n)]
    assert all(sorted(epoch) == everything for epoch in epochs)


def test_epochs_and_seeds_have_orders_of_their_own():
    n, two_epochs = 40, torch.arange(80)
    first, second = torch.tensor(Sampler([n], seed=0).choose(two_epochs))[:, 1].chunk(2)
    other_seed = torch.tensor(Sampler([n], seed=1).choose(two_epochs))[:n, 1]
    for one, another in ((first, second), (first, other_seed), (second, other_seed)):
        assert (one == another).sum() < 8  # one in a fair shuffle


@pytest.mark.parametrize("weights", [(), (0.5, 0.2, 0.3)])
def test_a_draw_does_not_depend_on_those_asked_for_with_it(weights):
    def make() -> Sampler:
        return Sampler([9, 1000, 33], weights=weights, seed=8)

    whole = make().choose(torch.arange(25_000))
    random_draws = random.Random(0).sample(range(25_000), 200)
    assert make().choose(torch.tensor(random_draws)) == [whole[draw] for draw in random_draws]
    assert [make().choose(torch.tensor([draw]))[0] for draw in random_draws[:20]] == [
        whole[draw] for draw in random_draws[:20]
    ]


def test_the_order_is_that_of_earlier_versions():
    """A resumed run must read on where it stopped, also after an update of this code."""
    draws = torch.tensor([0, 1, 2, 999, 1000, 123_456])
    assert Sampler([1000], seed=42).choose(draws) == [(0, n) for n in (327, 610, 658, 330, 574, 623)]
    drawn = [(1, 22), (0, 229), (0, 101), (1, 46), (0, 401), (0, 668)]
    assert Sampler([700, 50], weights=[3, 1], seed=42).choose(torch.arange(123_450, 123_456)) == drawn


# ---------------------------------------------------------------- with weights


def test_every_round_takes_from_each_source_its_share():
    weights = [0.62, 3.1, 1]
    chosen = Sampler([5000, 300, 100_000], weights=weights, seed=0).choose(torch.arange(3 * DRAWS_PER_ROUND))
    for start in range(0, len(chosen), DRAWS_PER_ROUND):
        counts = Counter(source for source, _ in chosen[start : start + DRAWS_PER_ROUND])
        for source, weight in enumerate(weights):
            assert abs(counts[source] - weight / sum(weights) * DRAWS_PER_ROUND) < 1


def test_shares_are_spread_over_the_round():
    chosen = Sampler([5000, 5000], weights=[1, 9], seed=0).choose(torch.arange(DRAWS_PER_ROUND))
    for start in range(0, DRAWS_PER_ROUND, 1000):
        rare = sum(source == 0 for source, _ in chosen[start : start + 1000])
        assert 60 < rare < 140  # 100 in the mean, and four standard deviations of 9


def test_with_weights_every_source_has_epochs_of_its_own():
    n_samples = [101, 900, 7000]
    chosen = Sampler(n_samples, weights=[1, 2, 3], seed=5).choose(torch.arange(2 * DRAWS_PER_ROUND))
    for source, n in enumerate(n_samples):
        own = [sample for other, sample in chosen if other == source]
        assert len(own) > n
        for start in range(0, len(own) - n + 1, n):
            assert sorted(own[start : start + n]) == list(range(n))
        assert own[:n] != own[n : 2 * n]


def test_sources_of_one_size_have_different_orders():
    chosen = Sampler([500, 500], weights=[1, 1], seed=5).choose(torch.arange(DRAWS_PER_ROUND))
    first, second = ([sample for source, sample in chosen if source == wanted][:500] for wanted in (0, 1))
    assert sum(one == other for one, other in zip(first, second, strict=True)) < 10


def split_exactly(weights: list[float]) -> list[int]:
    """The largest remainders in fractions, one by one."""
    shares = [Fraction(weight) / sum(map(Fraction, weights)) * DRAWS_PER_ROUND for weight in weights]
    counts = [math.floor(share) for share in shares]
    while sum(counts) < DRAWS_PER_ROUND:
        rests = [share - count for share, count in zip(shares, counts, strict=True)]
        counts[rests.index(max(rests))] += 1
    return counts


@pytest.mark.parametrize("seed", range(20))
def test_a_round_is_split_by_the_largest_remainders(seed):
    draw = random.Random(seed)
    weights = [draw.uniform(0.01, 1) for _ in range(draw.randrange(1, 9))]
    assert split_round(weights) == split_exactly(weights)
    assert split_round([1000 * weight for weight in weights]) == split_round(weights)


def test_a_round_of_equal_weights_is_shared_out_whole():
    assert split_round([0.1]) == [10_000]
    assert split_round([1, 1, 1]) == [3334, 3333, 3333]
    assert split_round([0.1, 0.2, 0.7]) == [1000, 2000, 7000]


@pytest.mark.parametrize(
    ("weights", "n_corpora", "why"),
    [
        ([1.0, 2.0], 3, "training.dataset names 3 corpora"),
        ([1.0], 2, "training.dataset names 2 corpora"),
        ([1.0, 0.0], 2, "above 0"),
        ([1.0, -1.0], 2, "above 0"),
        ([1.0, 0.00001], 2, "means never"),
    ],
)
def test_weights_that_cannot_be_meant_are_refused(weights, n_corpora, why):
    (problem,) = check_weights(weights, n_corpora)
    assert (problem.key, problem.value) == ("training.dataset_weights", weights) and why in problem.why
    assert problem.remedy


@pytest.mark.parametrize("weights", [[], [5.0, 1e-3], [0.5, 0.5]])
def test_sound_weights_are_no_problem(weights):
    assert check_weights(weights, 2) == []
