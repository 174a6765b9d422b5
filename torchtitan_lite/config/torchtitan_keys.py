"""Keys of torchtitan v0.1 and v0.2 that have another name here, or do not exist here. Used by reader.py.

ALIASES: old names of keys. ABSENT: switches of missing features, which are accepted if they are off, and otherwise
refused with an alternative. SETTINGS: other keys of missing features, which are accepted with any value.
"""

ALIASES = {  # old name -> new name
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
}

# Switch of a missing feature -> (value that means "off", alternative)
ABSENT = {
    "job.save_config_file": (
        "",
        "The resolved config is always saved: config.toml in job.dump_folder",
    ),
    "job.custom_config_module": (
        "torchtitan.config",
        "To add a key, add a line to config/schema.py",
    ),
    "metrics.save_for_all_ranks": (
        False,
        "Logged numbers cover the whole job, so rank 0 writes them",
    ),
    "model.norm_type": ("rmsnorm", "Llama 3 uses RMSNorm"),
    "optimizer.early_step_in_backward": (False, "It rules out clipping by the global norm"),
    "training.dtype": (
        "float32",
        "Use training.mixed_precision_param; the weights themselves stay in float32",
    ),
    "training.gc_debug": (False, "training.gc_freq = 1 collects garbage after every step"),
    "parallelism.disable_loss_parallel": (
        False,
        "Under tensor parallel the vocabulary of the loss is always sharded",
    ),
    "parallelism.enable_compiled_autograd": (
        False,
        "compile.enable compiles each block, including its backward",
    ),
    "parallelism.pipeline_parallel_schedule_csv": (
        "",
        "pipeline_parallel_schedule names a schedule",
    ),
    "parallelism.pipeline_parallel_split_points": ([], "Use pipeline_parallel_layers_per_stage"),
    "parallelism.expert_tensor_parallel_degree": (
        1,
        "expert_parallel_degree may span the ranks of tp too",
    ),
    "activation_checkpoint.debug": (False, "Use debug.deterministic to make two runs comparable"),
    "activation_checkpoint.determinism_check": ("default", "Recomputed shapes are always compared"),
    "checkpoint.interval_type": ("steps", "checkpoint.interval counts steps"),
    "checkpoint.create_seed_checkpoint": (
        False,
        "Initial weights are already the same on every layout",
    ),
    "comm.mode": ("default", "`check` checks a layout without running it"),
    "memory_estimation.enable": (False, "`python -m torchtitan_lite plan` estimates memory"),
    "fault_tolerance.enable": (
        False,
        "Use MAX_RESTARTS with checkpoint.enable to restart a failed run",
    ),
    "experimental.custom_import": ("", "To add a model, add a file to model/"),
    "experimental.custom_args_module": ("", "To add a key, add a line to config/schema.py"),
    "debug.moe_force_load_balance": (False, "training.expert_bias_rate balances the load"),
}

# Other keys of missing features. A name that ends with a dot is a whole section.
SETTINGS = (
    "job.use_for_integration_test",
    "model.print_after_conversion",
    "parallelism.context_parallel_load_balancer",
    "parallelism.expert_parallel_comm_backend",
    "activation_checkpoint.early_stop",
    "activation_checkpoint.preserve_rng_state",
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
    "checkpoint.initial_load_in_hf",  # a folder with config.json is recognized
    "validation.seq_len",  # validation batches have the shape of training batches
    "validation.local_batch_size",
    "quantize.linear.float8.force_recompute_fp8_weight_in_bwd",
    "quantize.linear.mx.",
    "quantize.grouped_mm.",
    "memory_estimation.",
    "fault_tolerance.",
)


def resolve_alias(written: str) -> str:
    """Return the current name of a key. The sections [float8] and [mx] of v0.1 are now in quantize.linear."""
    if written.startswith(("float8.", "mx.")):
        return f"quantize.linear.{written}"
    return ALIASES.get(written, written)


def explain_absent(key: str, value: object) -> str | None:
    """Return a remedy if this value enables a missing torchtitan feature, "" if not, None for an unknown key."""
    if key not in ABSENT:
        return "" if key.startswith(SETTINGS) else None
    off, instead = ABSENT[key]
    is_off = value in ("", "none") or str(value).lower() == str(off).lower()
    return "" if is_off else f"Leave it out, or set it to {off!r}. {instead}"
