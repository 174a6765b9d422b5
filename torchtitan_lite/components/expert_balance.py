"""Balance the load of experts: count the tokens of each expert in a step, and adjust its bias.

    load of a layer       whole numbers, counted after every forward pass of the step and summed over all ranks
    bias of an expert     += rate if its load is below the layer's mean, -= rate if it is above

The bias is the same on every rank and on every layout, because loads are whole numbers of the global batch, without
rounding. Checkpoints contain it. A step whose gradients are not finite changes no bias.

Sources: arXiv:2408.15664; the auxiliary loss beside it: model/moe.py.
"""

import logging
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_lite.config.flavors import MoEArgs
from torchtitan_lite.config.schema import Training
from torchtitan_lite.model.moe import Router, list_moes

logger = logging.getLogger(__name__)

COLLAPSED = 4.0  # max over mean; at least, or three quarters of what top_k allows
STEPS_TO_WARN = 3  # logged steps in a row


@dataclass(frozen=True)
class ExpertBalance:
    """The routers of this rank's layers."""

    routers: dict[int, Router]  # by layer
    n_layers: int  # of the whole model
    n_experts: int
    rate: float
    device: torch.device

    @property
    def biases(self) -> dict[str, Tensor]:
        """FQN -> bias, (experts,) fp32."""
        held = self.routers.items()
        return {f"layers.{layer}.feed_forward.router.expert_bias": router.expert_bias for layer, router in held}

    def reset_loads(self) -> None:
        for router in self.routers.values():
            router.load.zero_()

    @torch.no_grad()
    def update(self, finite: Tensor) -> Tensor:
        """Adjust the biases after a step, if it was `finite`. Collective: all-reduces the result over all ranks.

        Returns (layers, experts + 1) float64: the routes of each expert in the global batch, and in the last column the
        entropy of the scores of a token in nats, summed over tokens. The row of a dense layer is zero.
        """
        loads = self.sum_loads()
        for layer, router in self.routers.items():
            load = loads[layer, :-1]
            direction = (load.sum() - self.n_experts * load).sign().float()  # whole numbers: nothing is rounded
            router.expert_bias += self.rate * direction * finite
        return loads

    def sum_loads(self) -> Tensor:
        """Return what every rank counted since `reset_loads`, summed. Collective; see `update`."""
        loads = torch.zeros(self.n_layers, self.n_experts + 1, dtype=torch.float64, device=self.device)
        for layer, router in self.routers.items():
            loads[layer] = router.load
        dist.all_reduce(loads)
        return loads


def build_balance(
    parts: list[nn.Module], section: Training, global_batch_size: int, device: torch.device
) -> ExpertBalance:
    """Set the auxiliary loss of the routers, the mean over the sequences of a step, and count loads from now on."""
    args, routers = parts[0].model_args, {}
    for part in parts:
        for layer, moe in list_moes(part):
            routers[layer] = moe.router
            moe.router.balance_loss = section.expert_balance_loss / global_batch_size
            # Recompute calls the block's forward, not its hooks.
            part.layers[str(layer)].register_forward_hook(partial(count_load, moe.router))
    return ExpertBalance(routers, args.n_layers, args.moe.n_experts, section.expert_bias_rate, device)


def count_load(router: Router, *hook_args: object) -> None:
    """Add the load of the last forward pass, unless it has no gradient: validation is not counted."""
    if torch.is_grad_enabled():
        router.load += router.last_load


# ---------------------------------------------------------------- what the log says of it


def describe_load(loads: Tensor, top_k: int) -> dict[str, float]:
    """Describe a step's `loads`, (layers, experts + 1) as `ExpertBalance.update` returns them. Waits for the device."""
    loads = loads.cpu()
    loads = loads[loads[:, :-1].sum(1) > 0]  # without dense layers
    counts, entropies = loads[:, :-1], loads[:, -1]
    return {
        "expert_max_over_mean": (counts / counts.mean(1, keepdim=True)).max().item(),  # of the busiest expert
        "expert_dead_share": (counts == 0).double().mean().item(),  # of all experts: those without a token
        # Entropy of a token's scores in nats, averaged over tokens and layers. Each token has top_k routes.
        "router_entropy": (entropies.sum() / counts.sum() * top_k).item(),
    }


def count_collapsed(step: int, load: dict[str, float], args: MoEArgs, n_before: int) -> int:
    """Return for how many logged steps in a row one expert gets most tokens of a layer; warn at STEPS_TO_WARN.

    `load` comes from `describe_load`, `n_before` is the result for the logged step before.
    """
    most = load["expert_max_over_mean"]
    if most < min(COLLAPSED, 0.75 * args.n_experts / args.top_k):
        return 0
    if n_before + 1 == STEPS_TO_WARN:
        logger.warning(
            f"step {step}: an expert gets {most:.1f} times the mean load of its layer, and "
            f"{load['expert_dead_share']:.0%} of all experts get none, for {STEPS_TO_WARN} logged steps: raise "
            "training.expert_balance_loss, lower optimizer.lr, or, if no Hugging Face folder is to be exported, "
            "raise training.expert_bias_rate"
        )
    return n_before + 1
