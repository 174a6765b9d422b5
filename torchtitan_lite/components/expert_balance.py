"""Balance the load of experts by a bias and an auxiliary loss, because idle experts learn nothing. Add the router's
z-loss.

    load of a layer   routes per expert: counted after every forward pass of the step, then summed over all ranks
    bias              after each step, += rate if an expert's load is below the layer's mean, -= rate if it is above
    auxiliary loss    sum over experts of f x P, for each sequence separately. f is the expert's fraction of the routes
                      (times n_experts, so 1 means balanced); P is the mean of the expert's normalized scores
    z-loss            logsumexp(router logits)^2, averaged over all tokens of the global batch

A hook on each router counts the router's routes. In backward, the hook adds the gradients of both losses of the layer
to the gradients of scores and logits, so the model still returns a single tensor. The loads and both losses include all
tokens, even tokens whose target is ignored.

The bias is the same on every rank and on every layout, because the loads are integers, counted without rounding over
the global batch. Checkpoints contain the bias. If the gradients of a step are not finite, the bias does not change.

Sources: bias arXiv:2408.15664; z-loss: ST-MoE arXiv:2202.08906, eq. 5; auxiliary loss: DeepSeek-V3 arXiv:2412.19437,
eq. 17 to 20. Here, f counts the routes actually taken, but DeepSeek-V3 computes f without the bias.
"""

import logging
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_lite.config.schema import Training
from torchtitan_lite.model.moe import Router, Routing, list_moes

logger = logging.getLogger(__name__)

# The experts of a layer count as collapsed if the largest load divided by the mean load reaches this number, or 3/4 of
# n_experts / top_k (the largest possible ratio) if that is smaller.
COLLAPSED = 4.0
STEPS_TO_WARN = 3  # warn after this many consecutive logged steps with collapsed experts


class ExpertBalance:
    """Load balancing of the routers in this rank's layers. The auxiliary loss is a mean over sequences, and the z-loss
    is a mean over tokens."""

    def __init__(
        self,
        parts: list[nn.Module],
        section: Training,
        global_batch_size: int,
        groups: list[dist.ProcessGroup],
        device: torch.device,
    ):
        """Reset the biases of the routers of `parts`, and register hooks on the routers.

        `groups`: the process groups of cp and tp, if these dims split sequences.
        """
        model_args = parts[0].model_args
        self.moe = model_args.moe
        self.groups = groups
        self.rate = section.expert_bias_rate
        # weight of the auxiliary loss, per sequence
        self.loss_weight = section.expert_balance_loss / global_batch_size
        # weight of the z-loss, per token
        self.z_loss_weight = section.router_z_loss / (global_batch_size * section.seq_len)
        # (layers of the full model, experts + 1), summed over the microbatches of a step on this rank. The columns
        # are the routes to each expert, and the entropy of the scores in nats. float64 is exact for integers up to
        # 2**53.
        shape = (model_args.n_layers, self.moe.n_experts + 1)
        self.loads = torch.zeros(shape, dtype=torch.float64, device=device)
        self.n_collapsed = 0  # consecutive logged steps with collapsed experts
        self.routers: dict[int, Router] = {}  # layer number -> router
        for part in parts:
            for layer, moe in list_moes(part):
                moe.router.expert_bias = torch.zeros(self.moe.n_experts, device=device)
                self.routers[layer] = moe.router
                moe.router.register_forward_hook(partial(self.observe, layer))

    @property
    def biases(self) -> dict[str, Tensor]:
        """FQN -> bias, (experts,) fp32."""
        biases = {}
        for layer, router in self.routers.items():
            biases[f"layers.{layer}.feed_forward.router.expert_bias"] = router.expert_bias
        return biases

    def observe(self, layer: int, router: Router, inputs: tuple, routing: Routing) -> Routing:
        """Forward hook of a router: count its routes, and add the gradients of its losses in backward.

        Validation runs without gradients and is not counted.
        """
        weights, _, counts, probabilities, logits = routing
        if torch.is_grad_enabled() and not is_recomputed():
            load, entropy = self.loads[layer].tensor_split([-1])
            load += counts.sum(0)
            detached = probabilities.detach()
            entropy -= torch.xlogy(detached, detached).sum()
        if self.loss_weight:
            weights = AuxiliaryGradient.apply(weights, probabilities, counts, self)
        if self.z_loss_weight:
            z_loss = self.z_loss_weight * logits.logsumexp(-1).square().sum()
            weights = AddLoss.apply(weights, z_loss)
        return routing._replace(weights=weights)

    @torch.no_grad()
    def update(self, applied: Tensor) -> Tensor:
        """Adjust the biases, unless the step was skipped (`applied` is False). Collective over all ranks.

        All-reduces the loads. Returns (layers, experts + 1) float64: the number of routes to each expert in the global
        batch. The last column is the entropy of the router scores in nats, summed over tokens. Rows of dense layers are
        zero.
        """
        loads = self.loads.clone()
        dist.all_reduce(loads)
        for layer, router in self.routers.items():
            load = loads[layer, :-1]
            missing = load.sum() - len(load) * load  # exact, because loads are integers
            direction = missing.sign().float()
            router.expert_bias += self.rate * direction * applied
        return loads

    def describe(self, step: int, loads: Tensor) -> dict[str, Any]:
        """Return the fields of a metrics record that describe `loads`, the result of `update`. Waits for the device.

        Warn after STEPS_TO_WARN consecutive logged steps with collapsed experts.
        """
        load = describe_load(loads, self.moe.top_k)
        ratio = load["expert_max_over_mean"]
        is_collapsed = ratio >= min(COLLAPSED, 0.75 * self.moe.n_experts / self.moe.top_k)
        self.n_collapsed = self.n_collapsed + 1 if is_collapsed else 0
        if self.n_collapsed == STEPS_TO_WARN:
            dead = f"{load['expert_dead_share']:.0%} of all experts get no tokens"
            logger.warning(
                f"step {step}: an expert gets {ratio:.1f} times the mean load of its layer; {dead}. "
                "Raise training.expert_balance_loss or training.expert_bias_rate, or lower optimizer.lr"
            )
        return {**load, "expert_loads": loads[:, :-1].int().tolist()}


def is_recomputed() -> bool:
    """Return whether this forward pass is a recompute in backward. A recompute repeats routes that the original forward
    has already counted."""
    return torch._C._current_graph_task_id() != -1


class AuxiliaryGradient(torch.autograd.Function):
    """Return the weights unchanged. Backward adds the gradient of the auxiliary loss to the probabilities' gradient.

    For a sequence of S tokens: d loss / d probability = weight of the loss x f / S, for every token.
    """

    @staticmethod
    def forward(
        ctx, weights: Tensor, probabilities: Tensor, counts: Tensor, balance: ExpertBalance
    ) -> Tensor:
        ctx.save_for_backward(counts)
        ctx.balance = balance
        ctx.shape = probabilities.shape  # (B, S, E)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        (counts,) = ctx.saved_tensors
        counts = counts.clone()  # (B, E), over full sequences
        for group in ctx.balance.groups:
            dist.all_reduce(counts, group=group)  # B x E x 8 bytes
        n_routes = counts.sum(-1, keepdim=True).float()
        moe = ctx.balance.moe
        fraction = moe.n_experts * moe.top_k * counts.float()
        per_token = fraction / n_routes.square()  # f / S, with S = routes of a sequence / top_k
        per_token = per_token[:, None].expand(ctx.shape)
        return grad, ctx.balance.loss_weight * per_token, None, None


class AddLoss(torch.autograd.Function):
    """Return the weights unchanged. Backward treats `loss`, () fp32, as a term of the step's loss."""

    @staticmethod
    def forward(ctx, weights: Tensor, loss: Tensor) -> Tensor:
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones(())


# ---------------------------------------------------------------- logging


def describe_load(loads: Tensor, top_k: int) -> dict[str, float]:
    """Summarize the result of `ExpertBalance.update`, (layers, experts + 1), for the log. Waits for the device."""
    loads = loads.cpu()
    loads = loads[loads[:, :-1].sum(1) > 0]  # leave out dense layers, whose rows are zero
    counts = loads[:, :-1]
    entropies = loads[:, -1]
    relative_load = counts / counts.mean(1, keepdim=True)
    is_dead = counts == 0
    entropy = entropies.sum() / counts.sum() * top_k  # each token has top_k routes
    return {
        "expert_max_over_mean": relative_load.max().item(),  # the maximum over the experts of all layers
        "expert_dead_share": is_dead.double().mean().item(),  # fraction of experts without tokens
        # entropy of the router scores in nats, averaged over tokens and layers
        "router_entropy": entropy.item(),
    }
