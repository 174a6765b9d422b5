"""Known traps: each with a probe, the same run without it. A trap is named as the cause only if its probe passes."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan_lite import step as stepping
from torchtitan_lite.config.case import Case
from torchtitan_lite.config.checks import REFUSED
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.schema import Config
from torchtitan_lite.verify.comparison import Prepare
from torchtitan_lite.verify.culprit import Culprit
from torchtitan_lite.verify.reference import ReferenceRun


@dataclass(frozen=True)
class KnownIssue:
    """A known way to go wrong, and a probe: the same run without it."""

    applies: Callable[[Config, Culprit], bool]
    overrides: dict[str, object] = field(default_factory=dict)
    prepare: Prepare | None = None


def start_from_oracle(run: stepping.Run, oracle: ReferenceRun) -> None:
    """Probe: gives the run the oracle's initial weights."""
    with torch.no_grad():
        for fqn, parameter in run.parameters.items():
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                own = distribute_tensor(oracle.initial[fqn], mesh, placements, src_data_rank=None)
                parameter.to_local().copy_(own.to_local())
            else:
                parameter.copy_(oracle.initial[fqn])


def wait_for_embedding(run: stepping.Run, oracle: ReferenceRun) -> None:
    """Probe: a copy of the embedding's output goes on, so that no collective is still under way in it."""
    for part in run.parts:
        if part.tok_embeddings is not None:
            part.tok_embeddings.register_forward_hook(lambda module, args, output: output.clone())


def refusal_applies(name: str) -> Callable[[Config, Culprit], bool]:
    """Return a function: whether a refused combination of checks.py is in this run. A fork may run it all the same."""

    def applies(config: Config, culprit: Culprit) -> bool:
        zero_stage = config.parallelism.zero_stage
        reshards = zero_stage == 3 or config.parallelism.fsdp_reshard_after_forward == "always"
        case = Case(config, resolve_model(config.model), zero_stage=3 if reshards else 1)
        return bool(REFUSED[name].applies(case))

    return applies


CP_METHOD = "attention that the method of context parallel lacks"

KNOWN_ISSUES = {  # cause -> how to tell
    "the rule of the initial weights alone: with the weights of one process all is right": KnownIssue(
        lambda config, culprit: culprit.kind == "initial weights", prepare=start_from_oracle
    ),
    "the embedding's AsyncCollectiveTensor enters a compiled block": KnownIssue(
        lambda config, culprit: config.compile.enable and config.parallelism.tensor_parallel_degree > 1,
        prepare=wait_for_embedding,
    ),
    "a split backward with resharding": KnownIssue(
        refusal_applies("split backward with resharding"),
        {"parallelism.zero_stage": 1, "parallelism.fsdp_reshard_after_forward": "default"},
    ),
    "a split backward with per-op recompute": KnownIssue(
        refusal_applies("split backward with per-op recompute"), {"activation_checkpoint.mode": "none"}
    ),
    "a split backward with compile": KnownIssue(
        refusal_applies("split backward with compile"), {"compile.enable": False}
    ),
    "the ring, which has no masks, with documents": KnownIssue(
        refusal_applies(CP_METHOD),
        {"parallelism.context_parallel_rotate_method": "allgather"},
    ),
}
