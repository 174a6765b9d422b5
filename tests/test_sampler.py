"""The order of samples: every one once per epoch, every source its share, and all of it a function of the seed."""

import math
import random
from collections import Counter
from fractions import Fraction

import pytest
import torch

from torchtitan_lite.data.corpus_folder import DRAWS_PER_ROUND, check_weights, split_round
from torchtitan_lite.data.sampler import Sampler, feistel_permute, place_in_parts

# ---------------------------------------------------------------- one permutation


def test_the_permutation_is_one_to_one_and_each_index_is_sent_by_itself():
    for n in [*range(1, 130), 1023, 1024, 1025, 99_991]:
        permuted = feistel_permute(torch.arange(n), n, key="17 source 2 5")
        assert torch.equal(permuted.sort().values, torch.arange(n)), n
        assert feistel_permute(torch.tensor([n // 2]), n, key="17 source 2 5").item() == permuted[n // 2]


@pytest.mark.parametrize("n", [2**33 + 1, 10**12 + 39, 2**62 - 57])
def test_a_permutation_of_more_indices_than_a_table_could_hold_stays_in_range_and_apart(n):
    some = torch.randint(0, n, (100_000,), generator=torch.Generator().manual_seed(0)).unique()
    permuted = feistel_permute(some, n, key="a")
    assert 0 <= permuted.min() and permuted.max() < n and len(permuted.unique()) == len(some)
    tenths = (permuted.double() / n * 10).long().bincount(minlength=10)
    assert tenths.min() > 0.95 * len(some) / 10 and tenths.max() < 1.05 * len(some) / 10


def test_the_permutation_sends_an_index_everywhere_equally_often_and_separates_neighbours():
    n, n_keys = 20, 2000
    places = torch.cat([feistel_permute(torch.tensor([7]), n, key=str(key)) for key in range(n_keys)])
    chi_square = ((places.bincount(minlength=n) - n_keys / n) ** 2 / (n_keys / n)).sum()
    assert (
        chi_square < 43.8
    )  # 19 degrees of freedom: one in a thousand fair permutations exceeds it; the keys are fixed
    permuted = feistel_permute(torch.arange(10_000), 10_000, key="a")
    distances = (permuted[1:] - permuted[:-1]).abs()
    assert (distances == 1).sum() < 20  # about 2 in a fair permutation, 9,999 without
    assert 0.3 < distances.double().mean() / 10_000 < 0.37  # 1/3 in a fair permutation


def test_places_in_parts_are_those_of_counting():
    sizes = [3, 1, 4, 1, 5]
    counted = [(part, place) for part, size in enumerate(sizes) for place in range(size)]
    parts, places = place_in_parts(torch.arange(sum(sizes)), sizes)
    assert list(zip(parts.tolist(), places.tolist(), strict=True)) == counted


# ---------------------------------------------------------------- without weights


@pytest.mark.parametrize("n_samples", [[1], [21], [5, 1, 30], [7, 7]])
def test_every_sample_is_drawn_once_per_epoch(n_samples):
    n = sum(n_samples)
    chosen = Sampler(n_samples, seed=3).choose(torch.arange(3 * n))
    everything = [(source, sample) for source, size in enumerate(n_samples) for sample in range(size)]
    assert all(sorted(chosen[start : start + n]) == everything for start in range(0, 3 * n, n))


def test_epochs_and_seeds_have_orders_of_their_own():
    n, two_epochs = 40, torch.arange(80)
    first, second = torch.tensor(Sampler([n], seed=0).choose(two_epochs))[:, 1].chunk(2)
    other_seed = torch.tensor(Sampler([n], seed=1).choose(two_epochs))[:n, 1]
    for one, another in ((first, second), (first, other_seed), (second, other_seed)):
        assert (one == another).sum() < 8  # one in a fair permutation


@pytest.mark.parametrize("weights", [(), (0.5, 0.2, 0.3)])
def test_a_draw_does_not_depend_on_those_asked_for_with_it(weights):
    def choose(draws: list[int]) -> list[tuple[int, int]]:
        return Sampler([9, 1000, 33], weights=weights, seed=8).choose(torch.tensor(draws))

    whole = choose([*range(25_000)])
    some = random.Random(0).sample(range(25_000), 200)
    assert choose(some) == [whole[draw] for draw in some]
    assert [choose([draw])[0] for draw in some[:20]] == [whole[draw] for draw in some[:20]]


def test_the_order_is_that_of_earlier_versions():
    """A resumed run must read on where it stopped, also after an update of this code."""
    draws = torch.tensor([0, 1, 2, 999, 1000, 123_456])
    assert Sampler([1000], seed=42).choose(draws) == [(0, n) for n in (327, 610, 658, 330, 574, 623)]
    drawn = [(1, 22), (0, 229), (0, 101), (1, 46), (0, 401), (0, 668)]
    assert Sampler([700, 50], weights=[3, 1], seed=42).choose(torch.arange(123_450, 123_456)) == drawn


# ---------------------------------------------------------------- with weights


def test_every_round_takes_its_share_from_each_source_spread_over_the_round():
    weights = [0.62, 3.1, 1]
    chosen = Sampler([5000, 300, 100_000], weights=weights, seed=0).choose(torch.arange(3 * DRAWS_PER_ROUND))
    for n, tolerance in ((DRAWS_PER_ROUND, 1), (1000, 60)):  # four standard deviations of 15
        for start in range(0, len(chosen), n):
            counts = Counter(source for source, _ in chosen[start : start + n])
            assert all(abs(counts[s] - weight / sum(weights) * n) < tolerance for s, weight in enumerate(weights))


def test_with_weights_every_source_has_epochs_and_an_order_of_its_own():
    n_samples = [101, 900, 900]
    chosen = Sampler(n_samples, weights=[1, 2, 2], seed=5).choose(torch.arange(2 * DRAWS_PER_ROUND))
    own = [[sample for source, sample in chosen if source == wanted] for wanted in range(3)]
    for samples, n in zip(own, n_samples, strict=True):
        assert len(samples) > 2 * n
        assert all(sorted(samples[at : at + n]) == [*range(n)] for at in range(0, len(samples) - n + 1, n))
        assert samples[:n] != samples[n : 2 * n]
    assert sum(one == other for one, other in zip(own[1][:900], own[2][:900], strict=True)) < 10


def split_exactly(weights: list[float]) -> list[int]:
    """The largest remainders in fractions, one by one."""
    shares = [Fraction(weight) / sum(map(Fraction, weights)) * DRAWS_PER_ROUND for weight in weights]
    counts = [math.floor(share) for share in shares]
    while sum(counts) < DRAWS_PER_ROUND:
        rests = [share - count for share, count in zip(shares, counts, strict=True)]
        counts[rests.index(max(rests))] += 1
    return counts


def test_a_round_is_split_by_the_largest_remainders():
    draw = random.Random(0)
    for _ in range(20):
        weights = [draw.uniform(0.01, 1) for _ in range(draw.randrange(1, 9))]
        assert split_round(weights) == split_exactly(weights) == split_round([1000 * weight for weight in weights])
    assert split_round([1, 1, 1]) == [3334, 3333, 3333]


@pytest.mark.parametrize(
    ("weights", "n_corpora", "is_sound"),
    [
        ([1.0, 2.0], 3, False),
        ([1.0], 2, False),
        ([1.0, 0.0], 2, False),
        ([1.0, -1.0], 2, False),
        ([1.0, 0.00001], 2, False),
        ([], 2, True),
        ([5.0, 1e-3], 2, True),
    ],
)
def test_weights_that_cannot_be_meant_are_refused(weights, n_corpora, is_sound):
    problems = [(problem.key, problem.value) for problem in check_weights(weights, n_corpora)]
    assert problems == ([] if is_sound else [("training.dataset_weights", weights)])
