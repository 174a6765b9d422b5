"""Balance of experts: how many tokens each one got in a step, and the bias that evens this out.

    load of a layer       whole numbers, counted in every backward pass of the step and summed over all ranks
    bias of an expert     += rate where its load is below the layer's mean, -= rate where it is above

The bias is the same on every rank and on every layout, because loads are whole numbers of the global batch: nothing is
rounded. It is saved in checkpoints. A step whose gradients are not finite moves no bias.

Sources: arXiv:2408.15664; the auxiliary loss beside it: model/moe.py.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_lite.config.schema import Training
from torchtitan_lite.model.moe import Router, list_mixtures


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
        return {f"layers.{layer}.feed_forward.router.expert_bias": r.expert_bias for layer, r in self.routers.items()}

    def reset_loads(self) -> None:
        for router in self.routers.values():
            router.load.zero_()

    @torch.no_grad()
    def update(self, finite: Tensor) -> Tensor:
        """Move the biases after a step, if it was `finite`. Collective: all-reduces the result over all ranks.

        Returns, (layers, experts + 1) float64, the routes of each expert in the global batch, and in the last column
        the sum over its tokens of the entropy of their scores, in nats. A dense layer has zeros.
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
    """Set the auxiliary loss of the routers, the mean over the sequences of a step, and collect them."""
    args = parts[0].model_args
    routers = {layer: mixture.router for part in parts for layer, mixture in list_mixtures(part)}
    for router in routers.values():
        router.balance_loss = section.expert_balance_loss / global_batch_size
    return ExpertBalance(routers, args.n_layers, args.mixture.n_experts, section.expert_bias_rate, device)
