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

from torchtitan_lite.config.flavors import MixtureArgs
from torchtitan_lite.config.schema import Training
from torchtitan_lite.model.moe import Router, list_mixtures

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
        for layer, mixture in list_mixtures(part):
            routers[layer] = mixture.router
            mixture.router.balance_loss = section.expert_balance_loss / global_batch_size
            # Recompute calls the block's forward, not its hooks.
            part.layers[str(layer)].register_forward_hook(partial(count_load, mixture.router))
    return ExpertBalance(routers, args.n_layers, args.mixture.n_experts, section.expert_bias_rate, device)


def count_load(router: Router, *hook_args: object) -> None:
    """Add the load of the last forward pass, unless it has no gradient: validation is not counted."""
    if torch.is_grad_enabled():
        router.load += router.last_load


# ---------------------------------------------------------------- what the log says of it


@dataclass(frozen=True)
class ExpertLoad:
    """The load of the experts in one step."""

    max_over_mean: float  # of the expert that got most, in its layer
    layer: int  # the one with this expert
    dead_share: float  # of all experts: those that no token was routed to
    router_entropy: float  # of a token's scores, in nats: the mean over tokens and layers


def describe_load(loads: Tensor, top_k: int) -> ExpertLoad:
    """Describe a step's `loads`, (layers, experts + 1) as `ExpertBalance.update` returns them. Waits for the device."""
    loads = loads.cpu()
    layers = loads[:, :-1].sum(1).nonzero().flatten()
    counts, entropies = loads[layers, :-1], loads[layers, -1]
    over_mean = counts / counts.mean(1, keepdim=True)
    most = over_mean.amax(1)
    return ExpertLoad(
        max_over_mean=most.max().item(),
        layer=int(layers[most.argmax()]),
        dead_share=(counts == 0).double().mean().item(),
        router_entropy=(entropies.sum() / counts.sum() * top_k).item(),  # each token has top_k routes
    )


class CollapseWatch:
    """Describe the load of logged steps, and warn if few experts get most tokens of a layer for several steps."""

    def __init__(self, mixture: MixtureArgs):
        self.top_k = mixture.top_k
        self.limit = min(COLLAPSED, 0.75 * mixture.n_experts / mixture.top_k)
        self.n_steps = 0

    def read(self, step: int, loads: Tensor) -> ExpertLoad:
        """Describe the loads of a logged step."""
        load = describe_load(loads, self.top_k)
        self.n_steps = self.n_steps + 1 if load.max_over_mean >= self.limit else 0
        if self.n_steps == STEPS_TO_WARN:
            logger.warning(
                f"step {step}: an expert of layer {load.layer} gets {load.max_over_mean:.1f} times the mean load, and "
                f"{load.dead_share:.0%} of all experts get none, for {STEPS_TO_WARN} logged steps: raise "
                "training.expert_balance_loss, lower optimizer.lr, or, if no Hugging Face folder is to be exported, "
                "raise training.expert_bias_rate"
            )
        return load
