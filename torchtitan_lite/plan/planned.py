"""Read and check the config of a run elsewhere, on any number of ranks, for `plan` and `explain`.

    --config NAME  --gpus 16384  --gpu h100   ->   config, shape, layout   ->   dry runs of the ranks that differ

Files, memory and GPUs of this machine are not checked: the run will be on another one.
"""

from dataclasses import dataclass
from typing import Literal

from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.hardware import Machine
from torchtitan_lite.config.layout import Layout, plan_layout, resolve_config, resolve_model
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.config.schema import Config
from torchtitan_lite.plan.dry_run import DryRun, dry_run
from torchtitan_lite.plan.simulator import count_in_flight, plan_order
from torchtitan_lite.preflight import choose_n_ranks

ANY_CPU = Machine("cpu", 1, 0, "CPU")


@dataclass(frozen=True)
class Planned:
    """A run whose config is sound."""

    config_name: str
    config: Config  # resolved
    shape: ModelArgs
    layout: Layout
    device_type: Literal["cuda", "cpu"]

    def dry_run(self, pp_rank: int = 0, *, whole: bool = False) -> DryRun:
        """Run one step of the first rank of a pipeline stage."""
        return dry_run(self.config, self.shape, self.layout, pp_rank=pp_rank, device_type=self.device_type, whole=whole)


def plan_run(args: list[str], n_gpus: int | None, device_type: Literal["cuda", "cpu"]) -> Planned:
    """Return the run of these arguments of a config. Raises ConfigError with every problem.

    Without n_gpus: the product of the degrees, or two where one of them is automatic.
    """
    reading = read_config(args)
    if reading.problems:
        raise ConfigError(reading.problems)
    shape = resolve_model(reading.config.model)
    layout = plan_layout(reading.config, shape, n_gpus or choose_n_ranks(reading.config.parallelism, ANY_CPU, 1))
    return Planned(reading.config_name, resolve_config(reading.config, layout, device_type), shape, layout, device_type)


def group_pp_ranks(planned: Planned) -> dict[int, list[int]]:
    """Return pp rank -> pp ranks with equal stages, itself included.

    They differ in their microbatches in flight; the key is the one with most.
    """
    layout = planned.layout
    order = plan_order(planned.config.parallelism, layout)
    alike: dict[tuple, list[int]] = {}
    for rank in range(layout.pp):
        stages = [layout.stages[index] for index in layout.stages_of(rank)]
        alike.setdefault(tuple(map(describe_stage, stages)), []).append(rank)
    in_flight = [sum(count_in_flight(row).values()) for row in order]
    return {max(ranks, key=in_flight.__getitem__): ranks for ranks in alike.values()}


def describe_stage(fqns: tuple[str, ...]) -> tuple:
    """Return what determines the costs of a stage: number of layers, and other modules."""
    layers = [fqn for fqn in fqns if fqn.startswith("layers.")]
    return len(layers), *(fqn for fqn in fqns if fqn not in layers)
