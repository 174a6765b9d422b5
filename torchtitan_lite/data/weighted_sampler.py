"""Choose samples by training.dataset_weights: each source gets a fraction of the draws, and has its own epochs.

A source is a corpus. CYCLE points divide a circle, and each source owns an arc whose length is its share. Draw d uses
the source whose arc contains point d * STRIDE. STRIDE / CYCLE is about 0.618, the golden ratio modulo 1, so the draws
fill the circle evenly: after n draws, the number of draws from a source is within about 3 of n times its share.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_lite.data.dataset import Sampler

CYCLE = 2**20  # shares are rounded to multiples of 1 / CYCLE
STRIDE = 648055  # an odd number near CYCLE times the golden ratio, modulo 1


class WeightedSampler(Sampler):
    """Draws from each source in proportion to its weight. The order depends only on the seed."""

    def __init__(self, n_samples: Sequence[int], seed: int, weights: Sequence[float]):
        """`n_samples`: number of samples per source. `weights`: one number per source; the sum need not be 1."""
        super().__init__(n_samples, seed)
        amounts = torch.tensor(weights, dtype=torch.float64)
        self.shares = amounts / amounts.sum()
        ends = self.shares.cumsum(0) * CYCLE
        ends = ends.round().long()
        points = torch.arange(CYCLE) * STRIDE
        points %= CYCLE
        self.sources = torch.searchsorted(ends, points, right=True)
        self.n_draws = self.sources.bincount(minlength=len(ends))  # per source and cycle
        # sample number of the first sample of each source
        self.starts = torch.tensor([0, *n_samples]).cumsum(0)
        # number of earlier draws from the same source in the cycle
        self.n_earlier = torch.empty_like(points)
        for source, n_draws in enumerate(self.n_draws.tolist()):
            is_own = self.sources == source
            self.n_earlier[is_own] = torch.arange(n_draws)

    def count_epochs(self, n_draws: int) -> list[float]:
        """Return the number of epochs of each source in the first `n_draws` draws."""
        return (n_draws * self.shares / torch.tensor(self.n_samples)).tolist()

    def choose(self, draws: Tensor) -> Tensor:
        """Return the sample number of each draw. `draws` and the result are (n,) int64; draws are consecutive."""
        point = draws % CYCLE
        sources = self.sources[point]
        turns = draws // CYCLE * self.n_draws[sources] + self.n_earlier[point]
        samples = torch.empty_like(draws)
        for source in sources.unique().tolist():
            own = sources == source
            n_samples = self.n_samples[source]
            samples[own] = self.permute(turns[own], n_samples, name=f"source {source}")
        return self.starts[sources] + samples
