"""Plan the layout of a run from config, model and world size: degrees, stages, microbatches, ZeRO stage.

A plan needs no process group: it is only numbers and names. checks.py has the rules. Training, planner, tests and docs
call the same functions.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import gcd

from torchtitan_lite.config.checks import check_layout, check_model, find_refused
from torchtitan_lite.config.degrees import Layout, plan_degrees
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.model_rows import AUTO, ModelArgs
from torchtitan_lite.config.schedule import check_microbatches, place_stages, plan_stages
from torchtitan_lite.config.schema import (
    ActivationCheckpoint,
    Config,
    Model,
    Parallelism,
    Training,
    with_value,
)
from torchtitan_lite.models.registry import MODELS

# keys of [model]
MODEL_SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size")


def resolve_model(model: Model) -> ModelArgs:
    """Return the model of the flavor, or of the loaded weights, with the sizes in [model]. Raises ConfigError."""
    row = find_row(model)
    sizes = {name: getattr(model, name) or getattr(row, name) for name in MODEL_SIZES}
    if model.head_dim is None and (model.dim or model.n_heads):
        sizes["head_dim"] = sizes["dim"] // sizes["n_heads"]
    model_args = replace(row, **sizes, name=model.name)
    problems = check_model(model, model_args)
    if problems:
        raise ConfigError(problems)
    return model_args


def find_row(model: Model) -> ModelArgs:
    """Return the model of the loaded weights, or of the flavor. Raises ConfigError."""
    flavors = MODELS[model.name].flavors
    flavor = "debug" if model.flavor == AUTO else model.flavor
    row = model.row or flavors.get(flavor)
    if row is None:
        why = f"model.name = {model.name!r} has no such flavor"
        remedy = f"Use one of {', '.join([*flavors, AUTO])}"
        raise ConfigError([Problem("model.flavor", model.flavor, why, remedy)])
    return row


def plan_layout(config: Config, model_args: ModelArgs, world_size: int) -> Layout:
    """Return the layout of a run on `world_size` ranks. Raises ConfigError with all problems, not only the first."""
    section = config.parallelism
    degrees = plan_degrees(section, world_size)
    stages, problems = plan_stages(section, model_args.n_layers)
    layout = Layout(
        **degrees,
        **plan_batch(config, degrees),
        **plan_nodes(section, degrees),
        stages=stages,
        stage_ranks=place_stages(section, len(stages)),
        zero_stage=plan_zero_stage(section, n_shards=degrees["dp_shard"] * degrees["cp"]),
        tied=model_args.tie_embeddings and section.pipeline_parallel_degree > 1,
        ep=section.expert_parallel_degree if model_args.moe else 0,
    )
    problems = check_layout(config, model_args, layout, world_size) + problems
    problems += find_refused(config, model_args, layout)
    if layout.pp > 1 and not any("batch_size" in problem.key for problem in problems):
        local_batch_size = config.training.local_batch_size
        problems += check_microbatches(
            section, local_batch_size, layout.n_microbatches, len(stages)
        )
    if problems:
        raise ConfigError(problems)
    return layout


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


def plan_nodes(section: Parallelism, degrees: dict[str, int]) -> dict[str, int]:
    """Return the sizes of FSDP groups inside nodes and between nodes, as in Layout."""
    if not section.zero_plus_plus:
        return {}
    tp, ep = degrees["tp"], section.expert_parallel_degree
    n_shards = degrees["dp_shard"] * degrees["cp"]
    sizes = {}
    for dim, n_ranks, stride in (("fsdp", n_shards, tp), ("efsdp", n_shards * tp // ep, ep)):
        near = gcd(n_ranks, max(1, section.zero_plus_plus_node_size // stride))
        if 1 < near < n_ranks:
            sizes[f"{dim}_near"] = near
            sizes[f"{dim}_far"] = n_ranks // near
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
