"""The degrees of a layout: how many ranks each mesh dim has, and what follows from these numbers.

    rank = (((pp * dp_replicate + r) * dp_shard + s) * cp + c) * tp + t        outermost: pp, innermost: tp

The innermost dims communicate most: tp several times per layer, so keep it inside a node; then cp; dp_shard once per
layer; dp_replicate once per step; pp once per microbatch.

Sources: 3-D layouts, arXiv:2104.04473; TorchTitan, arXiv:2410.06511.
"""

from dataclasses import dataclass
from math import prod

from torchtitan_lite.config.schedule import Stages
from torchtitan_lite.config.schema import Parallelism

MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # outermost first


@dataclass(frozen=True)
class Layout:
    """How the work is divided among ranks, with every automatic value resolved."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    stages: Stages  # FQNs of the modules of each pipeline stage, first to last
    stage_ranks: tuple[int, ...]  # the pp rank of each stage
    global_batch_size: int  # sequences per optimizer step
    microbatch_size: int  # sequences per rank and forward pass
    # per rank and step: accumulation steps; under PP, microbatches of the schedule
    n_microbatches: int
    # 1, 2 or 3: the tensors that FSDP shards over dp_shard x cp, see parallel/fsdp.py
    zero_stage: int
    tied: bool = False  # in a pipeline, the first and the last stage hold the same matrix
    ep: int = 0  # ranks of dp_shard x cp x tp that share the experts of a layer; 0: the model has no experts
    # Ranks of an FSDP group in a node (near), and its nodes (far). 1: ZeRO++ is off, or nodes do not split the group
    fsdp_near: int = 1
    fsdp_far: int = 1
    efsdp_near: int = 1
    efsdp_far: int = 1

    @property
    def degrees(self) -> dict[str, int]:
        """Size of each mesh dim, outermost first."""
        return {dim: getattr(self, dim) for dim in MESH_DIMS}

    @property
    def used_dims(self) -> list[str]:
        """Mesh dims with more than one rank, outermost first."""
        return [dim for dim, degree in self.degrees.items() if degree > 1]

    @property
    def world_size(self) -> int:
        return prod(self.degrees.values())

    @property
    def dp(self) -> int:
        """Number of ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Number of ranks among which FSDP shards a parameter."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Number of ranks among which FSDP shards the experts of one ep rank."""
        return self.fsdp * self.tp // max(1, self.ep)

    @property
    def strides(self) -> dict[str, int]:
        """Distance in ranks between neighbors on each mesh dim, and on the dims fsdp, ep and efsdp."""
        strides = {}
        stride = 1
        for dim, degree in reversed(self.degrees.items()):
            strides[dim] = stride
            stride *= degree
        strides |= {"fsdp": strides["cp"], "ep": 1, "efsdp": self.ep}
        for dim in ("fsdp", "efsdp"):
            strides[f"{dim}_near"] = strides[dim]
            strides[f"{dim}_far"] = strides[dim] * getattr(self, f"{dim}_near")
        return strides

    def stages_of(self, pp_rank: int) -> list[int]:
        """Return the stages of one pp rank, first to last."""
        return [stage for stage, rank in enumerate(self.stage_ranks) if rank == pp_rank]

    def __str__(self) -> str:
        used = [f"{dim}{self.degrees[dim]}" for dim in self.used_dims]
        text = " x ".join(used) or "one rank"
        return f"{text}, ep{self.ep}" if self.ep > 1 else text


def plan_degrees(parallelism: Parallelism, world_size: int) -> dict[str, int]:
    """Return the size of each mesh dim. dp_shard = -1 becomes all remaining ranks."""
    degrees = {
        "pp": parallelism.pipeline_parallel_degree,
        "dp_replicate": parallelism.data_parallel_replicate_degree,
        "dp_shard": max(1, parallelism.data_parallel_shard_degree),
        "cp": parallelism.context_parallel_degree,
        "tp": parallelism.tensor_parallel_degree,
    }
    if parallelism.data_parallel_shard_degree == -1:
        degrees["dp_shard"] = max(1, world_size // prod(degrees.values()))
    return degrees
