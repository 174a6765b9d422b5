"""What torchtitan users write and we spell differently, or do not have; read by reader.py.

A TOML file of torchtitan v0.1 or v0.2 holds keys of three kinds that are not ours. An old name is taken as its new
one. A switch of a feature that we do not have is accepted where it is off and refused where it is on, with the nearest
thing that we do have. A setting of such a feature means nothing while its switch is off, so any value is accepted.
"""

from dataclasses import dataclass

ALIASES = {  # written in v0.1 -> its name now; `section.*` renames a whole section
    "job.print_args": "job.print_config",
    "model.tokenizer_path": "model.hf_assets_path",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "memory_estimation.enabled": "memory_estimation.enable",
    "validation.enabled": "validation.enable",
    "float8.*": "quantize.linear.float8.*",
    "mx.*": "quantize.linear.mx.*",
}


@dataclass(frozen=True)
class Absent:
    """A switch of a feature that we do not have."""

    off: tuple[object, ...]  # values that ask for nothing, if any
    instead: str  # the nearest thing that we have, as a sentence without its full stop
    only_if: str = ""  # a boolean key of ours: while it is false, the switch is not looked at


OFF = (False,)
_STAGES = "parallelism.pipeline_parallel_layers_per_stage and the two less_layers keys shape the stages"
_SHAPES = "Validation batches have the shape of training's, so that they pass through the same schedule and graphs"
_CUSTOM = "There are no plug-in modules: a new key goes into schema.py, a new model into model/"

ABSENT = {
    "job.save_config_file": Absent(("", "none"), "The resolved config is always saved: config.toml in job.dump_folder"),
    "job.custom_config_module": Absent(("", "none", "torchtitan.config"), _CUSTOM),
    "metrics.save_for_all_ranks": Absent(OFF, "Logged numbers are those of the whole job, so rank 0 writes them"),
    "model.norm_type": Absent(("rmsnorm",), "Llama 3 has RMSNorm"),
    "optimizer.early_step_in_backward": Absent(OFF, "It rules out clipping by the global norm, which is always on"),
    "training.dtype": Absent(("float32",), "Use training.mixed_precision_param: weights themselves stay in float32"),
    "training.gc_debug": Absent(OFF, "training.gc_freq = 1 collects garbage after every step"),
    "parallelism.enable_compiled_autograd": Absent(OFF, "compile.enable compiles each block, backward included"),
    "parallelism.pipeline_parallel_split_points": Absent(([],), _STAGES),
    "parallelism.expert_tensor_parallel_degree": Absent(
        (1,), "Experts are not split by tp: expert_parallel_degree may take the ranks of tp too"
    ),
    "activation_checkpoint.debug": Absent(OFF, "Use debug.deterministic to make two runs comparable"),
    "activation_checkpoint.determinism_check": Absent(("default", "none"), "Recomputed shapes are always compared"),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": Absent(
        ([], ["moe.router.gate"]), "Per-operator recompute keeps the result of every matmul"
    ),
    "checkpoint.interval_type": Absent(("steps",), "checkpoint.interval counts steps", only_if="checkpoint.enable"),
    "checkpoint.create_seed_checkpoint": Absent(OFF, "Initial weights are the same on every layout without one"),
    "comm.mode": Absent(("default",), "Ranks always talk; `check` says what a layout needs without running it"),
    "validation.seq_len": Absent((), _SHAPES, only_if="validation.enable"),
    "validation.local_batch_size": Absent((), _SHAPES, only_if="validation.enable"),
    "memory_estimation.enable": Absent(OFF, "`python -m torchtitan_lite check` prints a lower bound"),
    "fault_tolerance.enable": Absent(OFF, "MAX_RESTARTS with checkpoint.enable restarts a failed run"),
    "experimental.custom_import": Absent(("", "none"), _CUSTOM),
    "experimental.custom_args_module": Absent(("", "none"), _CUSTOM),
    "debug.moe_force_load_balance": Absent(OFF, "training.expert_bias_rate balances the load"),
}

# Keys that only say how a feature is to work. Any value is accepted: their switch, or the value of one of our own keys
# that would call for them, is refused above.
SETTINGS_OF_ABSENT = {
    "job.use_for_integration_test": "torchtitan's own tests",
    "model.print_after_conversion": "model.converters",
    "parallelism.context_parallel_load_balancer": "parallelism.context_parallel_degree",
    "parallelism.expert_parallel_comm_backend": "parallelism.expert_parallel_degree",
    "activation_checkpoint.early_stop": "recompute may stop early or run on: the numbers are the same",
    "activation_checkpoint.preserve_rng_state": "the model draws no random numbers",
    "quantize.linear.float8.force_recompute_fp8_weight_in_bwd": "a weight is always rounded anew in backward",
    "quantize.linear.mx.*": "model.converters",
    "quantize.grouped_mm.*": "model.converters",
    "memory_estimation.*": "memory_estimation.enable",
    "fault_tolerance.*": "fault_tolerance.enable",
}


def resolve_alias(written: str) -> str:
    """Return our name of a key, or the same name where it has no other."""
    section, _, name = written.rpartition(".")
    if f"{section}.*" in ALIASES:
        return ALIASES[f"{section}.*"].removesuffix("*") + name
    return ALIASES.get(written, written)


def is_torchtitan_key(key: str) -> bool:
    """Whether a key that is not ours is torchtitan's."""
    sections = tuple(name.removesuffix("*") for name in SETTINGS_OF_ABSENT if name.endswith(".*"))
    return key in ABSENT or key in SETTINGS_OF_ABSENT or key.startswith(sections)
