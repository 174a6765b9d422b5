"""After a step whose gradient norm was not finite: where did it begin?

The norm is one number for the whole model, so every rank knows *that* something went wrong, at the same step. Who was
first, each rank looks up in what it still holds (the weights were not updated, the gradients not scaled), and tells
the others: one object of some bytes from each rank.
"""

import re
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Finding:
    """What one rank found."""

    rank: int
    coordinates: dict[str, int]  # on the mesh
    loss_is_finite: bool  # the loss of its own tokens
    bad_gradient: str | None  # FQN of the first parameter whose gradient, as far as this rank holds it, is not finite


def find_non_finite(local_loss: Tensor, parameters: dict[str, Tensor], coordinates: dict[str, int]) -> str:
    """One sentence: the rank whose own loss was not finite, else the first such gradient. Collective."""
    bad = [fqn for fqn, parameter in parameters.items() if not is_finite(parameter.grad)]
    own = Finding(
        dist.get_rank(), coordinates, bool(local_loss.isfinite()), min(bad, key=natural_order) if bad else None
    )
    findings: list = [None] * dist.get_world_size()
    dist.all_gather_object(findings, own)
    return name_culprit(findings)


def name_culprit(findings: list[Finding]) -> str:
    """The sentence, from what all ranks found."""
    losses = [finding for finding in findings if not finding.loss_is_finite]
    if losses:
        return f"the loss of {describe_place(losses[0])} is not finite" + name_others(losses)
    gradients = [finding for finding in findings if finding.bad_gradient]
    if gradients:
        first = min(gradients, key=lambda finding: (natural_order(finding.bad_gradient), finding.rank))
        return f"every loss is finite; the gradient of {first.bad_gradient} on {describe_place(first)} is not"
    return "every loss and every gradient is finite: their squares add up to more than fp32 holds"


def name_others(findings: list[Finding]) -> str:
    others = ", ".join(str(finding.rank) for finding in findings[1:])
    return f" (nor those of ranks {others})" if others else ""


def describe_place(finding: Finding) -> str:
    place = ", ".join(f"{dim} {coordinate}" for dim, coordinate in finding.coordinates.items())
    return f"rank {finding.rank} ({place})"


def is_finite(gradient: Tensor | None) -> bool:
    if gradient is None:
        return True
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return bool(local.isfinite().all())


def natural_order(fqn: str) -> list:
    """layers.2 before layers.10."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in re.split(r"\.", fqn)]
