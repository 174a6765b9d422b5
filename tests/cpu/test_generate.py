"""Compare generation with transformers: logits with a KV cache, temperature, top-k, top-p, and greedy tokens."""

from argparse import Namespace

import torch
from marks import each_row
from test_model import FLAVORS, build_ours
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from torchtitan_lite.tools.generate import choose_token, limit
from torchtitan_lite.tools.kv_cache import CachedModel

PLAIN = FLAVORS["Llama 3"]


def sampling(temperature: float, top_k: int = 0, top_p: float = 1.0) -> Namespace:
    """Return the sampling options of `generate`."""
    return Namespace(temperature=temperature, top_k=top_k, top_p=top_p)


# ---------------------------------------------------------------- the cache; test_windows.py tests its logits


def test_a_generation_step_computes_only_the_new_tokens_and_the_head_only_the_last_one():
    model = build_ours(PLAIN)
    cached = CachedModel(model)
    seen = []
    for module in (model.layers["0"].feed_forward, model.output):
        module.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    cached.read([1, 2, 3, 4, 5])
    cached.read([6])
    assert seen == [5, 1, 1, 1]


# ---------------------------------------------------------------- what is drawn


# temperature, top_k, top_p
LIMITS = """
0.7 0 1
1 5 1
1 500 1
1.3 0 0.3
0.6 20 0.8
"""


@each_row("words", LIMITS)
def test_temperature_top_k_and_top_p_limit_logits_as_in_transformers(words):
    temperature, top_k, top_p = map(float, words[0].split())
    top_k = int(top_k)
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(1)) * 3
    warpers = [TemperatureLogitsWarper(temperature)]
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    expected = logits
    for warper in warpers:
        expected = warper(None, expected)
    options = sampling(temperature, top_k, top_p)
    ours = torch.stack([limit(each, options) for each in logits])
    assert torch.equal(ours.isfinite(), expected.isfinite())
    assert torch.allclose(ours.softmax(1).float(), expected.softmax(1), atol=1e-6)


def test_tokens_are_drawn_with_their_probability():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 3.0])
    usable = torch.tensor([True, True, True, True, False])
    generator = torch.Generator().manual_seed(3)
    options = sampling(0.5, top_k=3)
    counts = torch.zeros(5)
    for _ in range(4000):
        token = choose_token(logits, options, generator, usable)
        counts[token] += 1
    # tokens 0, 1 and 2 are the three likeliest that may be drawn
    expected = torch.tensor([0.0, 2.0, 4.0]).softmax(0)
    assert counts[3:].sum() == 0
    found = counts[:3] / 4000
    assert torch.allclose(found, expected, atol=0.02)  # three standard deviations


def test_minimal_temperature_top_k_and_top_p_choose_the_most_likely_token():
    logits = torch.tensor([4.0, 9.0, 8.999, 7.0])
    usable = torch.ones(4, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    for options in (sampling(0), sampling(1e-300), sampling(1, top_k=1), sampling(1e4, top_p=0)):
        assert {choose_token(logits, options, generator, usable) for _ in range(20)} == {1}
    usable[1] = False
    assert choose_token(logits, sampling(0), generator, usable) == 2
