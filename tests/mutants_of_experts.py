"""Mutants of experts: routing, the exchange of rows, gradients over ep, loads and biases."""

from unittest.mock import patch

import torch
import torch.distributed as dist
from layouts import FAST
from mutant_table import mutant
from torch.distributed.tensor import DTensor, Replicate

from torchtitan_lite.components import expert_balance, optim
from torchtitan_lite.components.expert_balance import ExpertBalance
from torchtitan_lite.model import moe
from torchtitan_lite.parallel import expert_parallel, initial_weights, parallelize, pipeline

EP2, TP2 = FAST["experts, dp2, ep2"], FAST["experts, tp2, ep2"]
SHARED_TP2 = FAST["experts, tp2, ep2, shared experts"]
# ---------------------------------------------------------------- gradients and their norm


@mutant(EP2, "gradients", "layers.1.feed_forward.experts.w2", at=(expert_parallel, "local_experts"))
def expert_gradients_divided_by_ep(original, weight):
    """Average the gradients of experts over ep, as if the ranks held copies."""
    own = original(weight)
    return (own + own.detach()) / 2


@mutant(EP2, "gradient norm", "all gradients", at=(optim, "count_copies"))
def norm_counts_experts_once_per_ep_rank(original, tensor):
    """Squares of the experts' gradients are summed over ep and multiplied by it."""
    return original(tensor) / (2 if is_of_experts(tensor) else 1)


def is_of_experts(tensor) -> bool:
    return isinstance(tensor, DTensor) and tensor.dim() == 3


@mutant(TP2, "gradients", "layers.1.feed_forward.router.weight")
def router_gradient_of_own_tokens():
    """Each tensor-parallel rank has a router's gradient of its slice of the sequence, and nobody adds them."""
    return patch.object(expert_parallel, "Partial", Replicate)


@mutant(SHARED_TP2, "gradients", "layers.1.feed_forward.router.weight", at=(parallelize, "share_sequences"))
def auxiliary_loss_of_a_slice_of_the_sequence(original, part, groups):
    """Each rank balances the routes of its slice of a sequence, though the loss is defined for whole ones."""


@mutant(
    EP2,
    "initial weights",
    "layers.0.feed_forward.experts.w1",
    at=(initial_weights, "copy_local_shard"),
    dims=("dp_shard",),
)
def experts_drawn_alike_on_ep_ranks(original, parameter, full):
    """Every ep rank seeds its generator alike and draws its own experts."""
    original(parameter, full)
    if is_of_experts(parameter):
        own = parameter.to_local()
        own.copy_(full[: len(own), : own.shape[1], : own.shape[2]])


# ---------------------------------------------------------------- rows


@mutant(EP2, "module output", "layers.0.feed_forward", at=(moe, "multiply_groups"), dims=("dp_shard",))
def rows_beyond_the_capacity_dropped(original, rows, matrices, ends):
    """An expert takes three times its fair share of the rows, and leaves out the rest, as it did when its buffers
    had a fixed size."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    place = torch.arange(len(rows)) - (ends - counts).repeat_interleave(counts)
    return original(rows, matrices, ends) * (place < 3 * len(rows) // len(ends))[:, None]


@mutant(EP2, "module output", "layers.0.feed_forward", at=(expert_parallel, "invert"), dims=("dp_shard",))
def one_run_of_results_sent_back_in_another_order(original, order):
    """The inverse permutation is wrong for one expert and one rank that its rows came from."""
    place = original(order)
    n_wrong = len(place) // 16
    return torch.cat([place[:n_wrong].roll(1), place[n_wrong:]])


@mutant(EP2, "module output", "layers.0.feed_forward", at=(moe.MoE, "forward"))
def weights_applied_before_the_experts(original, layer, x):
    """A token is multiplied by its weight before an expert computes it, instead of after."""
    weights, routes = layer.router(x)
    order = routes.flatten().argsort(stable=True)
    rows = (x[:, :, None] * weights[..., None]).flatten(0, 2)[order]
    rows = layer.experts(rows, moe.count_routes(routes, layer.router.n_experts).sum(0))
    return rows[moe.invert(order)].view(*routes.shape, -1).sum(2)


@mutant(EP2, "module output", "layers.0.feed_forward", at=(moe.Router, "route"))
def combine_weights_in_bfloat16(original, router, x, weight):
    """The weights of a token's experts are rounded to bf16."""
    weights, routes = original(router, x, weight)
    return weights.bfloat16().float(), routes


@mutant(SHARED_TP2, "module output", "layers.1.shared_experts", at=(parallelize, "apply_tensor_parallel"))
def shared_experts_counted_by_every_tp_rank(original, part, mesh, plan):
    """Shared experts are computed whole and then added up over tp, as partial sums are."""
    original(part, mesh, plan)
    part.layers["1"].shared_experts.register_forward_hook(lambda module, args, output: mesh.size() * output)


# ---------------------------------------------------------------- the choice


@mutant(EP2, "module output", "layers.0.feed_forward", at=(moe.Router, "choose"), dims=("dp_shard",))
def scores_rounded_before_the_choice(original, router, scores):
    """Experts are chosen by scores in bf16, of which many are equal."""
    return (scores + router.expert_bias).bfloat16().topk(router.args.top_k, dim=-1).indices


@mutant(EP2, "module output", "layers.0.feed_forward", at=(moe.Router, "choose"), dims=("dp_shard",))
def bias_forgotten_on_one_rank(original, router, scores):
    """One rank restores no biases, and its tokens go to the experts that all others have learned to spare."""
    return scores.topk(router.args.top_k, dim=-1).indices if dist.get_rank() == 1 else original(router, scores)


# ---------------------------------------------------------------- loads and biases


@mutant(EP2, "expert loads", "layers.0.feed_forward.router", at=(moe.Router, "route"))
def loads_counted_again_by_recompute(original, router, x, weight):
    """Loads are added up in forward, which recompute runs again."""
    routed = original(router, x, weight)
    router.load += router.last_load
    return routed


@mutant(EP2, "expert loads", "layers.0.feed_forward.router")
def loads_of_own_tokens():
    """Loads are not added up over the ranks."""
    return patch.object(expert_balance, "dist")


@mutant(
    "experts, pp2",
    "expert loads",
    "layers.0.feed_forward.router",
    at=(pipeline.Stage, "_post_metadata_inference_cleanup"),
)
def made_up_tokens_counted(original, stage):
    """torch's pipeline learns shapes by a forward and a backward over uninitialised memory, and the routes of that
    are counted."""
    super(pipeline.Stage, stage)._post_metadata_inference_cleanup()


@mutant(
    "experts, dp2, ep2, accumulation 4 ZeRO-2",
    "expert biases",
    "layers.0.feed_forward.router.expert_bias",
    at=(ExpertBalance, "update"),
)
def bias_moved_in_every_microbatch(original, balance, finite):
    """Biases move after each microbatch instead of each step."""
    for _ in range(3):
        loads = original(balance, finite)
    return loads


@mutant(EP2, "expert biases", "layers.0.feed_forward.router.expert_bias", at=(ExpertBalance, "update"))
def bias_moved_by_a_step_that_is_left_out(original, balance, finite):
    """A step with a gradient that is not finite changes no weight, but it moves the biases."""
    return original(balance, torch.ones_like(finite))
