"""Mutants of MoE layers: errors in routing, the all-to-all of rows, gradients over ep, loads and biases."""

from unittest.mock import patch

import torch
from mutant_table import mutant
from torch.distributed.tensor import DTensor

from torchtitan_lite.components import expert_balance
from torchtitan_lite.components.expert_balance import ExpertBalance
from torchtitan_lite.model import moe
from torchtitan_lite.parallel import initial_weights

EP2 = "experts, dp2, ep2"


# ---------------------------------------------------------------- gradients and their norm


@mutant(EP2, "gradients", "layers.1.feed_forward.experts.w3", at=(moe.Experts, "activate"))
def expert_gradients_divided_by_ep(original, experts, *inputs):
    """Average the gradients of experts over ep, as if the ranks held copies."""
    for weight in experts.parameters():
        weight.register_hook(lambda gradient: gradient / 2)
    return original(experts, *inputs)


def is_of_experts(tensor) -> bool:
    return isinstance(tensor, DTensor) and tensor.dim() == 3


@mutant(
    EP2,
    "initial weights",
    "layers.0.feed_forward.experts.w1",
    at=(initial_weights, "copy_local_shard"),
    dims=("dp_shard",),
)
def experts_drawn_alike_on_ep_ranks(original, parameter, full):
    """Every ep rank draws its experts with the same seed, so all ranks have equal experts."""
    original(parameter, full)
    if is_of_experts(parameter):
        own = parameter.to_local()
        own.copy_(full[: len(own), : own.shape[1], : own.shape[2]])


# ---------------------------------------------------------------- rows


@mutant(
    EP2, "module output", "layers.0.feed_forward", at=(moe, "multiply_groups"), dims=("dp_shard",)
)
def rows_beyond_the_capacity_dropped(original, rows, matrices, ends):
    """Each expert computes at most three times its fair share of the rows, and drops the rest, as with buffers of a
    fixed size."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    place = torch.arange(len(rows)) - (ends - counts).repeat_interleave(counts)
    return original(rows, matrices, ends) * (place < 3 * len(rows) // len(ends))[:, None]


# ---------------------------------------------------------------- loads and biases


@mutant(EP2, "expert loads", "layers.0.feed_forward.router")
def loads_of_own_tokens():
    """Loads are not summed over the ranks."""
    return patch.object(expert_balance, "dist")


@mutant(
    "experts, pp2",
    "expert loads",
    "layers.6.feed_forward.router",
    trial="deep",
    at=(ExpertBalance, "update"),
)
def loads_summed_in_bfloat16(original, balance, finite):
    """Loads are rounded to bf16 before they are summed over the ranks."""
    balance.loads.copy_(balance.loads.bfloat16())
    return original(balance, finite)


@mutant(
    EP2, "expert biases", "layers.0.feed_forward.router.expert_bias", at=(ExpertBalance, "update")
)
def bias_moved_by_a_step_that_is_left_out(original, balance, finite):
    """A step that is skipped because of a NaN or infinite gradient still changes the biases."""
    return original(balance, torch.ones_like(finite))
