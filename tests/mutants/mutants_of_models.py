"""Mutants of what a model brings: a matrix that two stages hold, and biases."""

from contextlib import ExitStack
from unittest.mock import patch

from layouts import BIASES, PP, TIED, TP, Row
from mutant_table import mutant

from torchtitan_lite import step
from torchtitan_lite.extensions.tied_embeddings import TiedMatrix
from torchtitan_lite.parallel import initial_weights
from torchtitan_lite.parallel.tensor_parallel import ColwiseLinear

STAGES = Row(2, {PP: 2, **TIED})


@mutant(STAGES, "gradients", "tok_embeddings.weight", at=(TiedMatrix, "sum_gradients"))
def the_gradient_of_the_tied_head_is_lost(sum_gradients, tied):
    """The first stage trains with the gradient of its lookup alone."""


@mutant(STAGES, "gradients", "tok_embeddings.weight", at=(TiedMatrix, "sum_gradients"))
def tied_gradients_are_summed_twice(sum_gradients, tied):
    sum_gradients(tied)
    sum_gradients(tied)


@mutant(STAGES, "gradient norm", "all gradients")
def a_tied_matrix_counts_twice_in_the_norm():
    """The last stage counts its copy, as if it were another parameter."""
    copies, sum_gradients, measure = [], TiedMatrix.sum_gradients, step.sum_gradient_squares

    def sum_and_keep(tied):
        sum_gradients(tied)
        if tied.copy is not None:
            copies.append(tied.copy)

    def measure_all(parameters):
        return measure([*parameters, *copies[-1:]])

    stack = ExitStack()
    stack.enter_context(patch.object(TiedMatrix, "sum_gradients", sum_and_keep))
    stack.enter_context(patch.object(step, "sum_gradient_squares", measure_all))
    return stack


@mutant(
    Row(2, {TP: 2, **BIASES}),
    "gradients",
    "layers.1.attention.wv.bias",
    at=(ColwiseLinear, "compute"),
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
