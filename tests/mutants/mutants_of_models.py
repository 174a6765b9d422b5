"""Mutants in features that only some models have: a matrix that two stages hold, and biases."""

from mutant_table import mutant

from torchtitan_lite.extensions.tied_embeddings import TiedSchedule
from torchtitan_lite.parallel.tensor_parallel import ColwiseParallel


@mutant(
    "2 | PP=2 TIED",
    "gradients",
    "tok_embeddings.weight",
    at=(TiedSchedule, "sum_gradients"),
)
def the_gradient_of_the_tied_head_is_lost(sum_gradients, tied):
    """The first stage trains the tied matrix with the gradient of the embedding alone, without the head's."""


@mutant(
    "2 | TP=2 BIASES",
    "gradients",
    "layers.1.attention.wv.bias",
    at=(ColwiseParallel, "compute"),
)
def a_bias_is_added_for_every_tp_rank(compute, style, module, ranks, x):
    """Every tp rank adds the whole bias. Biases start at zero, so only their gradients are wrong in the first step."""
    out = compute(style, module, ranks, x)
    return out if module.bias is None else out + (ranks.n - 1) * module.bias
