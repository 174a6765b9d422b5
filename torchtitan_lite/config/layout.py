"""Plan the layout of a run: the degree of each mesh dim, and the stages and microbatches of each rank. Needs only
numbers and names.

    rank = (((pp * dp_replicate + r) * dp_shard + s) * cp + c) * tp + t        outermost: pp, innermost: tp

The innermost dims communicate most. tp exchanges activations four times per layer in forward and again in backward, so
keep tp inside a node, and cp too if the node has enough GPUs. dp_shard all-gathers parameters and reduces gradients
layer by layer. dp_replicate reduces the gradients of each layer once per step, and pp sends hidden states once per
microbatch.

    placement "loop", pp=2, 4 stages     rank 0: stages 0, 2      rank 1: stages 1, 3
    placement "v",    pp=2, 4 stages     rank 0: stages 0, 3      rank 1: stages 1, 2

checks.py contains the rules and `plan_layout`, which calls the functions in this file. Training, planner, tests and
docs all call `plan_layout`. Sources: 3-D layouts, arXiv:2104.04473; TorchTitan, arXiv:2410.06511.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heapreplace
from itertools import accumulate, cycle, islice, pairwise
from math import ceil, prod

from torchtitan_lite.config.block import list_modules
from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.config.schema import Config, Parallelism

Stages = tuple[tuple[str, ...], ...]  # FQNs of the modules of each stage, first to last
MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # outermost first
# dims of a second mesh over the same ranks; it shards experts and routers
EXPERT_DIMS = ("pp", "dp_replicate", "efsdp", "ep")


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
    # per rank and step: gradient accumulation steps, or microbatches of the pipeline schedule
    n_microbatches: int
    # 1, 2 or 3: which tensors FSDP shards over dp_shard x cp (parallel/fsdp.py)
    zero_stage: int
    tied: bool = False  # the first and the last pipeline stage share the embedding matrix
    # ranks of dp_shard x cp x tp that share the experts of a layer; 0 if the model has no experts
    ep: int = 0
    # For ZeRO++: an FSDP group spans `far` nodes and has `near` ranks on each of them. Both are 1 if the group is not
    # split by node.
    fsdp_near: int = 1
    fsdp_far: int = 1
    efsdp_near: int = 1
    efsdp_far: int = 1

    @cached_property
    def degrees(self) -> dict[str, int]:
        """Size of each mesh dim, outermost first."""
        return {dim: getattr(self, dim) for dim in MESH_DIMS}

    @cached_property
    def all_degrees(self) -> dict[str, int]:
        """Size of each dim of the main mesh and of the expert mesh."""
        return {**self.degrees, "efsdp": self.efsdp, "ep": max(1, self.ep)}

    @cached_property
    def used_dims(self) -> list[str]:
        """Mesh dims with more than one rank, outermost first."""
        return [dim for dim, degree in self.degrees.items() if degree > 1]

    @cached_property
    def world_size(self) -> int:
        return prod(self.degrees.values())

    @cached_property
    def dp(self) -> int:
        """Number of data-parallel ranks: each of them reads its own sequences."""
        return self.dp_replicate * self.dp_shard

    @cached_property
    def fsdp(self) -> int:
        """Number of ranks among which FSDP shards a parameter."""
        return self.dp_shard * self.cp

    @cached_property
    def efsdp(self) -> int:
        """Number of ranks among which FSDP shards the experts of one ep rank."""
        return self.fsdp * self.tp // max(1, self.ep)

    def stages_of(self, pp_rank: int) -> list[int]:
        """Return the stages of one pp rank, first to last."""
        return [stage for stage, rank in enumerate(self.stage_ranks) if rank == pp_rank]

    def __str__(self) -> str:
        used = [f"{dim}{self.degrees[dim]}" for dim in self.used_dims]
        text = " x ".join(used) or "one rank"
        return f"{text}, ep{self.ep}" if self.ep > 1 else text


def plan_degrees(parallelism: Parallelism, world_size: int) -> dict[str, int]:
    """Return the size of each mesh dim. dp_shard = -1 becomes the number of remaining ranks."""
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


# ---------------------------------------------------------------- pipeline stages


def count_stages(parallelism: Parallelism, n_layers: int) -> int:
    """Return the number of pipeline stages, which follows from the schedule and layers_per_stage."""
    if parallelism.pipeline_parallel_degree == 1:
        return 1
    layers_per_stage = parallelism.pipeline_parallel_layers_per_stage
    if layers_per_stage is None:
        schedule = SCHEDULES[parallelism.pipeline_parallel_schedule]
        return parallelism.pipeline_parallel_degree * schedule.least_stages_per_rank
    load = n_layers + parallelism.pipeline_parallel_first_stage_less_layers
    load += parallelism.pipeline_parallel_last_stage_less_layers
    return ceil(load / layers_per_stage)


def plan_stages(parallelism: Parallelism, n_layers: int) -> list[int]:
    """Return the number of layers of each stage, first to last. `check_stages` must have accepted the number of stages.

    Every stage except the first and the last gets one layer. Each remaining layer goes to the stage with the least
    load. If loads are equal, stages without layers come first, then earlier stages. The two `less_layers` keys give the
    load of the embedding and the load of the head as numbers of layers. With the default keys, the stages of Llama 3 8B
    on pp4 have 8, 9, 8 and 7 layers, and 128 stages of Llama 3 405B have 0, 1, 1, ..., 1, 0 layers.
    """
    n_stages = count_stages(parallelism, n_layers)
    if n_stages == 1:
        return [n_layers]
    middle = [1] * (n_stages - 2)
    sizes = [0, *middle, 0]  # number of layers in each stage
    loads = [
        parallelism.pipeline_parallel_first_stage_less_layers,
        *middle,
        parallelism.pipeline_parallel_last_stage_less_layers,
    ]
    # (load, whether the stage has layers, stage): the stage with the smallest tuple gets the next layer. A sorted list
    # is a heap
    queue = sorted(zip(loads, map(bool, sizes), range(n_stages), strict=True))
    for _ in range(n_layers - sum(sizes)):
        load, _, stage = queue[0]
        sizes[stage] += 1
        heapreplace(queue, (load + 1, True, stage))
    return sizes


@lru_cache
def name_stages(n_layers: tuple[int, ...], model_args: ModelArgs) -> Stages:
    """Return the module FQNs of each stage, given its number of layers. Stages begin and end between layers."""
    names = [(prefix or row.child).rstrip(".") for prefix, row in list_modules(model_args)]
    children = list(dict.fromkeys(names))
    n_before = children.index("layers.0")
    cuts = [n_before + n for n in accumulate(n_layers[:-1])]
    return tuple(tuple(children[start:end]) for start, end in pairwise([0, *cuts, None]))


def place_stages(parallelism: Parallelism, n_stages: int) -> tuple[int, ...]:
    """Return the pp rank of each stage."""
    ranks = list(range(parallelism.pipeline_parallel_degree))
    if SCHEDULES[parallelism.pipeline_parallel_schedule].placement == "v":
        ranks += reversed(ranks)
    return tuple(islice(cycle(ranks), n_stages))


# ---------------------------------------------------------------- batch, ZeRO, recompute


def plan_batch(config: Config, degrees: dict[str, int]) -> dict[str, int]:
    """Return global_batch_size, microbatch_size and n_microbatches, as in Layout.

    Without PP, a microbatch is an accumulation step of local_batch_size sequences, or of all sequences of a rank if
    there are fewer than local_batch_size. With PP, all sequences of a step are microbatches of a single schedule, so
    each step has a single bubble.
    """
    training = config.training
    dp = degrees["dp_replicate"] * degrees["dp_shard"]
    global_batch_size = training.global_batch_size
    if global_batch_size == -1:
        global_batch_size = training.local_batch_size * dp
    microbatch_size = min(training.local_batch_size, max(1, global_batch_size // dp))
    if degrees["pp"] > 1:
        microbatch_size = config.parallelism.pipeline_parallel_microbatch_size
    return {
        "global_batch_size": global_batch_size,
        "microbatch_size": microbatch_size,
        "n_microbatches": global_batch_size // dp // microbatch_size,
    }


def plan_zero_stage(config: Config, layout: Layout) -> int:
    """Return the ZeRO stage (1, 2 or 3) from zero_stage, or from fsdp_reshard_after_forward if zero_stage is "auto".

    Under PP, torch's pipeline runtime all-gathers parameters once per step (ZeRO stage 1) or for every microbatch (ZeRO
    stage 3), and always reduces gradients once. PP therefore has no ZeRO stage 2, and ZeRO stage 3 shards parameters
    but not gradients.

    Without PP, the default is ZeRO stage 3 if there is more than one shard. With a single shard, ZeRO stage 3 would
    only cast the parameters again in each backward pass. ZeRO stage 2 is used only if gradients are sharded or
    offloaded; otherwise, it would only copy the gradients of each microbatch.
    """
    section = config.parallelism
    if section.zero_stage != "auto":
        return section.zero_stage
    when = section.fsdp_reshard_after_forward
    if when == "always" or (when == "default" and layout.pp == 1 and layout.fsdp > 1):
        return 3
    if layout.pp > 1:
        return 1
    is_sharded = layout.fsdp > 1 or (layout.ep > 0 and layout.efsdp > 1)
    return 2 if is_sharded or config.training.enable_cpu_offload else 1


def gathers_whole_parts(layout: Layout, compute_dtype: str) -> bool:
    """Return whether FSDP all-gathers a whole model part at once, instead of block by block.

    In a pipeline with ZeRO stage 1, a part is all-gathered and reduce-scattered once per step, and stays unsharded in
    between. In fp32, as on CPUs, all-gathers do not overlap with compute, so more FSDP groups would only cost the host
    more time.
    """
    return layout.pp > 1 and layout.zero_stage == 1 and not layout.ep and compute_dtype == "float32"
