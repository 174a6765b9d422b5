"""Plan the layout of a run from config, model and world size: degrees, stages, microbatches, ZeRO stage.

    rank = (((pp * dp_replicate + r) * dp_shard + s) * cp + c) * tp + t        outermost: pp, innermost: tp

The innermost dims communicate most: tp several times per layer, so keep it inside a node; then cp; dp_shard once per
layer; dp_replicate once per step; pp once per microbatch. A plan needs no process group: it is only numbers and names.
checks.py has the rules. Training, planner, tests and docs call the same functions.

Sources: 3-D layouts, arXiv:2104.04473; TorchTitan, arXiv:2410.06511.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import gcd, prod

from torchtitan_lite.config.checks import check_layout, check_mesh, check_model, find_refused
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.config.schedule import Stages, check_microbatches, place_stages, plan_stages
from torchtitan_lite.config.schema import (
    ActivationCheckpoint,
    Config,
    Model,
    Parallelism,
    Training,
    with_value,
)
from torchtitan_lite.models.registry import MODELS

MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # outermost first
SIZES = (
    "dim",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "ffn_dim",
    "vocab_size",
)  # keys of [model]


def resolve_model(model: Model) -> ModelArgs:
    """Return the model of the flavor, or of the loaded weights, with the sizes in [model]. Raises ConfigError."""
    given = {name: value for name in SIZES if (value := getattr(model, name)) is not None}
    model_args = replace(find_row(model), **given, name=model.name)
    if model.head_dim is None and (model.dim or model.n_heads):
        model_args = replace(model_args, head_dim=model_args.dim // model_args.n_heads)
    if problems := check_model(model, model_args):
        raise ConfigError(problems)
    return model_args


def find_row(model: Model) -> ModelArgs:
    """Return the model of the loaded weights, or of the flavor. Raises ConfigError."""
    flavors = MODELS[model.name].flavors
    if model.row is None and model.flavor not in flavors:
        why = f"model.name = {model.name!r} has no such flavor"
        raise ConfigError(
            [Problem("model.flavor", model.flavor, why, f"Use one of {', '.join(flavors)}")]
        )
    return model.row or flavors[model.flavor]


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
    n_microbatches: (
        int  # per rank and step: accumulation steps; under PP, microbatches of the schedule
    )
    zero_stage: (
        int  # 1, 2 or 3: the tensors that FSDP shards over dp_shard x cp, see parallel/fsdp.py
    )
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
    def world_size(self) -> int:
        return prod(self.degrees.values())

    @property
    def dp(self) -> int:
        """Number of ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def efsdp(self) -> int:
        """Number of ranks among which FSDP shards the experts of one ep rank."""
        return self.dp_shard * self.cp * self.tp // max(1, self.ep)

    @property
    def strides(self) -> dict[str, int]:
        """Distance in ranks between neighbors on each mesh dim, and on the dims fsdp, ep and efsdp."""
        strides, stride = {}, 1
        for dim, degree in reversed(self.degrees.items()):
            strides[dim] = stride
            stride *= degree
        of_experts = {"ep": 1, "efsdp": self.ep} if self.ep else {}
        for dim, stride in (("fsdp", strides["cp"]), ("efsdp", self.ep)):
            strides |= {f"{dim}_near": stride, f"{dim}_far": stride * getattr(self, f"{dim}_near")}
        return {**strides, "fsdp": strides["cp"], **of_experts}

    def stages_of(self, pp_rank: int) -> list[int]:
        """Return the stages of one pp rank, first to last."""
        return [stage for stage, rank in enumerate(self.stage_ranks) if rank == pp_rank]

    def __str__(self) -> str:
        used = [f"{dim}{degree}" for dim, degree in self.degrees.items() if degree > 1]
        experts = f", ep{self.ep}" if self.ep > 1 else ""
        return (" x ".join(used) or "one rank") + experts


def plan_layout(config: Config, model_args: ModelArgs, world_size: int) -> Layout:
    """Return the layout of a run on `world_size` ranks. Raises ConfigError with all problems, not only the first."""
    section = config.parallelism
    degrees = plan_degrees(section, world_size)
    zero_stage = plan_zero_stage(section, n_shards=degrees["dp_shard"] * degrees["cp"])
    batch = plan_batch(config, degrees)
    problems = check_mesh(config, degrees, world_size, batch) + check_layout(
        config, model_args, degrees, batch
    )
    problems += find_refused(config, model_args, zero_stage)
    stages, stage_problems = plan_stages(section, model_args.n_layers)
    problems += stage_problems
    if degrees["pp"] > 1 and not any("batch_size" in problem.key for problem in problems):
        n_microbatches = batch["n_microbatches"]
        problems += check_microbatches(
            section, config.training.local_batch_size, n_microbatches, len(stages)
        )
    if problems:
        raise ConfigError(problems)
    return Layout(
        **degrees,
        stages=stages,
        stage_ranks=place_stages(section, len(stages)),
        **batch,
        zero_stage=zero_stage,
        tied=model_args.tie_embeddings and degrees["pp"] > 1,
        ep=section.expert_parallel_degree if model_args.moe else 0,
        **split_by_node(section, degrees),
    )


def resolve_config(config: Config, layout: Layout, device_type: str) -> Config:
    """Replace every automatic value of a config with the resolved value. A run logs and saves the result."""
    param = config.training.mixed_precision_param
    if param == "auto":
        param = "bfloat16" if device_type == "cuda" else "float32"
    for key, value in {
        "parallelism.data_parallel_shard_degree": layout.dp_shard,
        "parallelism.fsdp_reshard_after_forward": "default",  # zero_stage replaces it
        "parallelism.zero_stage": layout.zero_stage,
        "training.global_batch_size": layout.global_batch_size,
        "training.mixed_precision_param": param,
        "training.loss_chunk_tokens": choose_chunk_tokens(config.training, device_type),
        "lr_scheduler.total_steps": config.lr_scheduler.total_steps or config.training.steps,
    }.items():
        config = with_value(config, key, value)
    return config


def choose_chunk_tokens(section: Training, device_type: str) -> int:
    """Resolve loss_chunk_tokens. Large matmuls are faster on a GPU; small ones fit the caches of a CPU."""
    automatic = 4096 if device_type == "cuda" else 1024
    return automatic if section.loss_chunk_tokens == -1 else section.loss_chunk_tokens


def plan_degrees(parallelism: Parallelism, world_size: int) -> dict[str, int]:
    """Return the size of each mesh dim. dp_shard = -1 becomes all remaining ranks."""
    degrees = {
        "pp": parallelism.pipeline_parallel_degree,
        "dp_replicate": parallelism.data_parallel_replicate_degree,
        "dp_shard": parallelism.data_parallel_shard_degree,
        "cp": parallelism.context_parallel_degree,
        "tp": parallelism.tensor_parallel_degree,
    }
    if degrees["dp_shard"] == -1:
        others = prod(degree for dim, degree in degrees.items() if dim != "dp_shard")
        degrees["dp_shard"] = max(1, world_size // others)
    return degrees


def plan_zero_stage(parallelism: Parallelism, *, n_shards: int) -> int:
    """Return ZeRO stage 1, 2 or 3 from zero_stage, else from torchtitan's fsdp_reshard_after_forward.

    Under PP, torch's runtime gathers parameters once per step (stage 1) or for every microbatch (stage 3), and always
    reduces gradients once. So stage 2 does not exist, and stage 3 shards parameters but not gradients. With one shard,
    stage 3 would only cast the parameters again in each backward.
    """
    if parallelism.zero_stage != "auto":
        return parallelism.zero_stage
    never = 1 if parallelism.pipeline_parallel_degree > 1 else 2
    default = 3 if never == 2 and n_shards > 1 else never
    return {"always": 3, "never": never, "default": default}[parallelism.fsdp_reshard_after_forward]


def split_by_node(section: Parallelism, degrees: dict[str, int]) -> dict[str, int]:
    """Return the sizes of FSDP groups inside nodes and between nodes, as in Layout."""
    n, tp, ep, sizes = (
        degrees["dp_shard"] * degrees["cp"],
        degrees["tp"],
        section.expert_parallel_degree,
        {},
    )
    for dim, n_ranks, stride in (
        (("fsdp", n, tp), ("efsdp", n * tp // ep, ep)) if section.zero_plus_plus else ()
    ):
        near = gcd(n_ranks, max(1, section.zero_plus_plus_node_size // stride))
        if 1 < near < n_ranks:
            sizes |= {f"{dim}_near": near, f"{dim}_far": n_ranks // near}
    return sizes


def plan_batch(config: Config, degrees: dict[str, int]) -> dict[str, int]:
    """Return global_batch_size, microbatch_size and n_microbatches, as in Layout.

    Without PP, a microbatch is an accumulation step of local_batch_size sequences, or fewer if a rank has fewer. With
    PP, all sequences of a step are microbatches of a single schedule, so each step has a single bubble.
    """
    training, section = config.training, config.parallelism
    dp = degrees["dp_replicate"] * degrees["dp_shard"]
    global_batch_size = training.global_batch_size
    if global_batch_size == -1:
        global_batch_size = training.local_batch_size * dp
    microbatch_size = min(training.local_batch_size, max(1, global_batch_size // dp))
    if degrees["pp"] > 1:
        microbatch_size = section.pipeline_parallel_microbatch_size
    sizes = {"global_batch_size": global_batch_size, "microbatch_size": microbatch_size}
    return sizes | {"n_microbatches": global_batch_size // dp // microbatch_size}


def plan_recompute(section: ActivationCheckpoint, layers: Iterable[int]) -> dict[int, str]:
    """Return layer number -> "none", "op" or "full". Layer numbers are global, so pipeline stages do not change it."""
    if section.mode == "memory_budget":  # handled by set_memory_budget and the compiler
        return dict.fromkeys(layers, "none")
    if section.mode != "selective":
        return dict.fromkeys(layers, section.mode)
    if section.selective_ac_option == "op":
        return dict.fromkeys(layers, "op")
    every = int(section.selective_ac_option)
    return {layer: "full" if layer % every == 0 else "none" for layer in layers}
