"""From logits to the next token: temperature, top-k, top-p, and the loop that reads and draws in turns.

    logits  ->  / temperature  ->  the k most likely  ->  of these, the fewest that hold p of the probability  ->  draw

Temperature 0 takes the most likely token and draws nothing. Tokens are drawn on the CPU from a separate generator, so
equal logits and seeds give equal tokens on every device. Sources: top-p arXiv:1904.09751.

Legend: V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from torchtitan_lite.model.kv_cache import CachedModel


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 1.0  # 0: the most likely token
    top_k: int = 0  # draw from this many tokens only; 0: all
    top_p: float = 1.0  # draw only from the most likely tokens that together have this probability; 1: all


def generate(
    model: CachedModel, logits: Tensor, sampling: Sampling, *, seed: int, usable: Tensor, most_tokens: int
) -> Iterator[int]:
    """Yield up to `most_tokens` tokens, each a function of those before it and of `seed`. Does not stop at end tokens.

    `logits` (V,) are those after what `model` has read; `usable` (V,) bool marks the ids that may be drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    for n_tokens in range(1, most_tokens + 1):
        token = choose_token(logits, sampling, generator, usable)
        yield token
        if n_tokens < most_tokens:  # nothing follows the last one
            logits = model.read([token])


def choose_token(logits: Tensor, sampling: Sampling, generator: torch.Generator, usable: Tensor) -> int:
    """Return the id of a token. logits (V,) fp32, usable (V,) bool. Raises FloatingPointError for NaN or infinity."""
    if not logits.isfinite().all():
        bad = int((~logits.isfinite()).sum())
        raise FloatingPointError(f"{bad} of {len(logits)} logits are not finite: these weights do not make a model")
    logits = logits.masked_fill(~usable, -inf)
    if sampling.temperature == 0:
        return int(logits.argmax())
    probabilities = limit(logits, sampling).softmax(0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def limit(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return logits (V,) fp64 at this temperature, -inf where top-k or top-p exclude one. Keeps the most likely."""
    # The greatest becomes 0 first: however low the temperature, only what cannot be drawn overflows.
    logits = (logits.double() - logits.max()) / sampling.temperature
    if 0 < sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -inf)
    if sampling.top_p < 1:
        ordered, places = logits.sort(descending=True, stable=True)
        probabilities = ordered.softmax(0)
        more_likely = probabilities.cumsum(0) - probabilities  # probability of all more likely tokens
        out = places[more_likely >= sampling.top_p]
        logits = logits.index_fill(0, out[out != places[0]], -inf)
    return logits
