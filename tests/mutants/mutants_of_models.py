"""Mutants of what a model brings: a matrix that two stages hold, and biases."""

from layouts import BIASES, PP, TIED, TP, Row
from mutant_table import mutant

from torchtitan_lite.extensions.tied_embeddings import TiedSchedule
from torchtitan_lite.parallel import initial_weights
from torchtitan_lite.parallel.tensor_parallel import ColwiseParallel


@mutant(
    Row(2, {PP: 2, **TIED}),
    "gradients",
    "tok_embeddings.weight",
    at=(TiedSchedule, "sum_gradients"),
)
def the_gradient_of_the_tied_head_is_lost(sum_gradients, tied):
    """The first stage trains with the gradient of its lookup alone."""


@mutant(
    Row(2, {TP: 2, **BIASES}),
    "gradients",
    "layers.1.attention.wv.bias",
    at=(ColwiseParallel, "compute"),
)
def a_bias_is_added_for_every_tp_rank(compute, style, module, ranks, x):
    """Biases start at zero, so only their gradients show it in the first step."""
    out = compute(style, module, ranks, x)
    return out if module.bias is None else out + (ranks.n - 1) * module.bias


@mutant(
    Row(2, BIASES),
    "initial weights",
    "layers.0.attention.wq.bias",
    at=(initial_weights, "fill_tensor"),
)
def a_bias_starts_as_a_norm(fill_tensor, full, entry, generator):
    """Whatever has one dimension starts at one."""
    fill_tensor(full, entry, generator)
    if full.dim() == 1:
        full.fill_(1.0)
