"""Choose the sample of each draw: a pure function of the seed and the number of the draw, without a table.

    draw      0, 1, 2, ... over the whole run; step s draws s*B .. s*B + B-1 (B sequences of the global batch)
    source    one corpus of n samples; its k-th draw is a permutation of 0 .. n-1 in every epoch k // n

Without weights, all sources are one row of samples, and an epoch has each sample of each source once. With weights,
every round of 10,000 draws takes its share from each source, spread over the round by a permutation, and each source
has epochs of its own.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from torchtitan_lite.data.corpus_folder import split_round


class Sampler:
    """The samples of one or several sources in the order in which a run draws them."""

    def __init__(self, n_samples: Sequence[int], *, weights: Sequence[float] = (), seed: int):
        """`n_samples` of each source; `weights`, one for each, need not add up to 1."""
        self.n_samples, self.seed = list(n_samples), seed
        self.mixture = plan_mixture(split_round(weights), key=f"{seed} round") if weights else None

    def choose(self, draws: Tensor) -> list[tuple[int, int]]:
        """Return (source, sample) of each of `draws`, (n,) int64."""
        if self.mixture is None:
            places = self._permute(draws, sum(self.n_samples), name="all")
            sources, samples = place_in_parts(places, self.n_samples)
        else:
            sources, turns = self.mixture.find_turns(draws)
            samples = torch.empty_like(draws)
            for source in sources.unique().tolist():
                own = sources == source
                samples[own] = self._permute(turns[own], self.n_samples[source], name=f"source {source}")
        return list(zip(sources.tolist(), samples.tolist(), strict=True))

    def _permute(self, draws: Tensor, n: int, *, name: str) -> Tensor:
        """Send each draw d to its place: permutation number d // n, applied to d % n."""
        places = torch.empty_like(draws)
        for epoch in (draws // n).unique().tolist():
            in_epoch = draws // n == epoch
            places[in_epoch] = feistel_permute(draws[in_epoch] % n, n, key=f"{self.seed} {name} {epoch}")
        return places


@dataclass(frozen=True)
class MixtureSchedule:
    """The sources of the draws of one round; every round is the same. All fields int64."""

    sources: Tensor  # (draws per round,)
    turns: Tensor  # (draws per round,) how often its source was drawn from before in this round
    counts: Tensor  # (sources,) draws per round

    def find_turns(self, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Return the source of each draw, and how often it was drawn from before in the whole run."""
        rounds, places = draws // len(self.sources), draws % len(self.sources)
        sources = self.sources[places]
        return sources, rounds * self.counts[sources] + self.turns[places]


def plan_mixture(counts: Sequence[int], *, key: str) -> MixtureSchedule:
    """Spread `counts` draws of each source over one round, by a permutation that `key` chooses."""
    n = sum(counts)
    sources, _ = place_in_parts(feistel_permute(torch.arange(n), n, key=key), counts)
    turns = torch.empty_like(sources)
    for source, count in enumerate(counts):
        turns[sources == source] = torch.arange(count)
    return MixtureSchedule(sources, turns, torch.tensor(counts))


def place_in_parts(places: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return part, and place in it, of `places` in parts of these sizes laid end to end; (n,) int64 each."""
    ends = torch.tensor(list(accumulate(sizes)))
    parts = torch.searchsorted(ends, places, right=True)
    return parts, places - (ends - torch.tensor(sizes))[parts]


def feistel_permute(index: Tensor, n: int, *, key: str) -> Tensor:
    """Return where a permutation of 0 .. n-1, chosen by `key`, sends each `index` (any shape, int64).

    A Feistel network on the cells of the smallest square that holds n: each round adds a hash of the column to the row,
    modulo the side, and swaps the two. The column could be used to subtract that hash again, so a round is one-to-one
    for any hash, and no table of n entries is needed. A cell outside 0 .. n-1 is permuted again until it is inside
    ("cycle walking"), which stays one-to-one. Luby & Rackoff 1988; Black & Rogaway 2002.
    """
    side = math.isqrt(n - 1) + 1
    row, column = index // side, index % side
    for round_number in range(6):
        round_key = hashlib.blake2b(f"{key} {round_number}".encode(), digest_size=4).digest()
        hashed = hash_32_bits(column ^ int.from_bytes(round_key, "big"))
        row, column = column, (row + hashed) % side
    permuted = row * side + column
    outside = permuted >= n
    if outside.any():
        permuted[outside] = feistel_permute(permuted[outside], n, key=key)
    return permuted


def hash_32_bits(x: Tensor) -> Tensor:
    """Mix the bits of numbers below 2**32. The factor is below 2**27, so no product overflows int64."""
    x = (x ^ (x >> 16)) * 0x45D9F3B & 0xFFFFFFFF
    x = (x ^ (x >> 16)) * 0x45D9F3B & 0xFFFFFFFF
    return x ^ (x >> 16)
