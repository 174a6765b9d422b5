"""Balance the load of experts: count the tokens of each expert in a step, and adjust its bias.

    load of a layer       tokens per expert, counted after every forward pass of the step and summed over all ranks
    bias of an expert     += rate if its load is below the layer's mean, -= rate if it is above

The bias is the same on every rank and on every layout, because loads are integers that count the global batch, without
rounding. Checkpoints contain the bias. A step with gradients that are not finite does not change it.

Source: arXiv:2408.15664. The auxiliary loss is in model/moe.py.
"""

import logging
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_lite.config.model_rows import MoEArgs
from torchtitan_lite.config.schema import Training
from torchtitan_lite.model.moe import Router, list_moes

logger = logging.getLogger(__name__)

COLLAPSED = 4.0  # ratio of the largest to the mean load of a layer, or three quarters of the largest possible ratio
STEPS_TO_WARN = 3  # consecutive logged steps


@dataclass(frozen=True)
class ExpertBalance:
    """Load balancing of the routers in this rank's layers."""

    routers: dict[int, Router]  # layer number -> router
    n_layers: int  # in the full model
    n_experts: int
    rate: float
    device: torch.device

    @property
    def biases(self) -> dict[str, Tensor]:
        """FQN -> bias, (experts,) fp32."""
        biases = {}
        for layer, router in self.routers.items():
            biases[f"layers.{layer}.feed_forward.router.expert_bias"] = router.expert_bias
        return biases

    def reset_loads(self) -> None:
        for router in self.routers.values():
            router.load.zero_()

    @torch.no_grad()
    def update(self, finite: Tensor) -> Tensor:
        """Adjust the biases after a step, if it was `finite`. Collective: all-reduces the loads over all ranks.

        Returns (layers, experts + 1) float64: the number of routes to each expert in the global batch. The last column
        is the entropy of the router scores in nats, summed over tokens. Rows of dense layers are zero.
        """
        loads = self.sum_loads()
        for layer, router in self.routers.items():
            load = loads[layer, :-1]
            missing = load.sum() - self.n_experts * load  # exact, because loads are integers
            direction = missing.sign().float()
            router.expert_bias += self.rate * direction * finite
        return loads

    def sum_loads(self) -> Tensor:
        """Sum the loads of all ranks since `reset_loads`. Collective; for the result see `update`."""
        loads = torch.zeros(
            self.n_layers,
            self.n_experts + 1,
            dtype=torch.float64,
            device=self.device,
        )
        for layer, router in self.routers.items():
            loads[layer] = router.load
        dist.all_reduce(loads)
        return loads


def build_balance(
    parts: list[nn.Module],
    section: Training,
    global_batch_size: int,
    device: torch.device,
) -> ExpertBalance:
    """Enable the auxiliary loss of the routers (a mean over the sequences of a step), and start counting loads."""
    routers = {}
    for part in parts:
        for layer, moe in list_moes(part):
            router = moe.router
            router.balance_loss = section.expert_balance_loss / global_batch_size
            routers[layer] = router
            # Recompute calls only the block's forward, not its hooks, so each load is counted once.
            block = part.layers[str(layer)]
            block.register_forward_hook(partial(count_load, router))
    model_args = parts[0].model_args
    return ExpertBalance(
        routers,
        model_args.n_layers,
        model_args.moe.n_experts,
        section.expert_bias_rate,
        device,
    )


def count_load(router: Router, *hook_args: object) -> None:
    """Add the load of the last forward pass. Validation runs without gradients and is not counted."""
    if torch.is_grad_enabled():
        router.load += router.last_load


# ---------------------------------------------------------------- logging


def describe_load(loads: Tensor, top_k: int) -> dict[str, float]:
    """Summarize the result of `ExpertBalance.update`, (layers, experts + 1), for the log. Waits for the device."""
    loads = loads.cpu()
    loads = loads[loads[:, :-1].sum(1) > 0]  # drop dense layers
    counts = loads[:, :-1]
    entropies = loads[:, -1]
    relative_load = counts / counts.mean(1, keepdim=True)
    is_dead = counts == 0
    entropy = entropies.sum() / counts.sum() * top_k  # each token has top_k routes
    return {
        "expert_max_over_mean": relative_load.max().item(),  # for the busiest expert
        "expert_dead_share": is_dead.double()
        .mean()
        .item(),  # fraction of experts that got no token
        "router_entropy": entropy.item(),  # of the router scores, in nats, averaged over tokens and layers
    }


def count_collapsed(step: int, load: dict[str, float], moe: MoEArgs, n_before: int) -> int:
    """Count consecutive logged steps in which one expert gets most tokens of a layer. Warn at STEPS_TO_WARN.

    `load` is the result of `describe_load`; `n_before` is the count at the previous logged step.
    """
    ratio = load["expert_max_over_mean"]
    if ratio < min(COLLAPSED, 0.75 * moe.n_experts / moe.top_k):
        return 0
    if n_before + 1 == STEPS_TO_WARN:
        dead = f"{load['expert_dead_share']:.0%} of all experts get none"
        remedy = (
            "Raise training.expert_balance_loss or training.expert_bias_rate, or lower optimizer.lr"
        )
        logger.warning(
            f"step {step}: an expert gets {ratio:.1f} times the mean load of its layer; {dead}. {remedy}"
        )
    return n_before + 1
