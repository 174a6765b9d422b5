"""Explain unknown names in a config: keys of torchtitan v0.1 and v0.2, or misspelled keys. reader.py loads this file.

ALIASES lists old names of keys. MISSING_FEATURES lists the switches of features that this package lacks; turning one on
is an error. SETTINGS lists the other keys of the missing features. These keys are accepted with any value, and a notice
names them.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from torchtitan_lite.config.messages import Problem, name_command
from torchtitan_lite.config.reader import KEYS, find_key

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

# switch of a missing feature -> the value that means "off"
MISSING_FEATURES = {
    "job.save_config_file": "",
    "job.custom_config_module": "torchtitan.config",
    "metrics.save_for_all_ranks": False,
    "model.norm_type": "rmsnorm",
    "optimizer.early_step_in_backward": False,
    "training.gc_debug": False,
    "parallelism.disable_loss_parallel": False,
    "parallelism.enable_compiled_autograd": False,
    "parallelism.pipeline_parallel_schedule_csv": "",
    "parallelism.pipeline_parallel_split_points": [],
    "parallelism.module_fqns_per_model_part": [],
    "parallelism.expert_tensor_parallel_degree": 1,
    "activation_checkpoint.debug": False,
    "activation_checkpoint.determinism_check": "default",
    "checkpoint.interval_type": "steps",
    "checkpoint.create_seed_checkpoint": False,
    "comm.mode": "default",
    "memory_estimation.enable": False,
    "fault_tolerance.enable": False,
    "experimental.custom_import": "",
    "experimental.custom_args_module": "",
    "debug.moe_force_load_balance": False,
}

# Other keys of missing features. A name that ends with a dot is a whole section.
SETTINGS = (
    "job.use_for_integration_test",
    "metrics.disable_color_printing",  # the log has no colors
    "model.print_after_conversion",
    "parallelism.context_parallel_load_balancer",
    "parallelism.expert_parallel_comm_backend",
    "activation_checkpoint.early_stop",
    "activation_checkpoint.preserve_rng_state",
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
    "checkpoint.initial_load_in_hf",  # not needed: a folder with config.json is recognized
    "quantize.linear.float8.force_recompute_fp8_weight_in_bwd",
    "quantize.linear.mx.",
    "quantize.grouped_mm.",
    "memory_estimation.",
    "fault_tolerance.",
)

# key without effect -> the reason that a notice gives
UNUSED = dict.fromkeys(
    ("validation.seq_len", "validation.local_batch_size"),
    "validation batches have the shape of training batches",
)


def resolve_alias(written: str) -> str:
    """Return the current name of a key. The sections [float8] and [mx] of v0.1 are now in quantize.linear."""
    if written.startswith(("float8.", "mx.")):
        return f"quantize.linear.{written}"
    return ALIASES.get(written, written)


def explain_absent(key: str, value: object) -> str | None:
    """Return a remedy if this value turns on a missing torchtitan feature, "" for any other value of a torchtitan key,
    and None for an unknown key."""
    if key not in MISSING_FEATURES:
        sections = tuple(name for name in SETTINGS if name.endswith("."))
        return "" if key in (*SETTINGS, *UNUSED) or key.startswith(sections) else None
    off = MISSING_FEATURES[key]
    if value in ("", "none") or str(value).lower() == str(off).lower():
        return ""
    remedy = f"Leave it out, or set it to {off!r}"
    if key == "parallelism.module_fqns_per_model_part":
        remedy += ". parallelism.pipeline_parallel_layers_per_stage serves instead"
    return remedy


def translate_keys(
    table: dict[str, Any], texts: dict[str, Any], problems: list[Problem], notices: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two dicts, key -> value, with the keys that exist in this package: one for the file, one for the command
    line.

    Adds problems and notices for keys that do not exist in this package.
    """
    table = rename_keys(table, notices)
    texts = rename_keys(texts, notices)
    idle = []
    for key, value in (table | texts).items():
        if key in KEYS:
            continue
        table.pop(key, None)
        texts.pop(key, None)
        if value == {} and is_section(f"{key}."):
            continue
        absent = explain_absent(key, value)
        if absent is None:
            problems.append(Problem(key, value, "there is no such key", suggest_key(key)))
        elif absent:
            problems.append(
                Problem(key, value, "torchtitan_lite does not have this feature", absent)
            )
        elif key in UNUSED:
            notices.append(f"{key} = {value} has no effect: {UNUSED[key]}")
        elif key not in MISSING_FEATURES and value:
            idle.append(f"{key} = {value}")
    if idle:
        notices.append(f"{', '.join(idle)} has no effect: torchtitan_lite has no such feature")
    return table, texts


def rename_keys(source: Mapping[str, Any], notices: list[str]) -> dict[str, Any]:
    """Replace old names of keys in a file or on the command line. Return name -> value, and add a notice for each old
    name."""
    renamed = {}
    names: dict[str, str] = {}
    for name, value in source.items():
        key = find_key(name)
        renamed[key] = value
        if key != name:
            notices.append(f"{name} is now {key}")
        if key in names:
            notices.append(f"{names[key]} and {name} are the same key: {value} is used")
        names[key] = name
    return renamed


def is_switch(name: str) -> bool:
    """Return whether a name is a key, an old name of a key, or a key that turns on a missing torchtitan feature."""
    return resolve_alias(name) in {*KEYS, *MISSING_FEATURES}


def is_section(start: str) -> bool:
    """Return whether any key of torchtitan_lite or torchtitan starts with `start`, such as "training."."""
    names = (*KEYS, *MISSING_FEATURES, *SETTINGS, *ALIASES, "float8.", "mx.")
    return any(name.startswith(start) for name in names)


def suggest_key(key: str) -> str:
    """Return a remedy for an unknown key. The remedy names a key of another section that has the same last part, or a
    key with a similar name."""
    key = key.lower()
    if "." not in key:
        return (
            "A key starts with its section, as in --training.steps. A tool lists its own options with --help; "
            "NGPU=8 before a command sets the number of ranks"
        )
    name = key.rpartition(".")[2]
    same_name = [known for known in (*KEYS, *MISSING_FEATURES) if known.endswith(f".{name}")]
    near = get_close_matches(key, same_name, n=1, cutoff=0) + get_close_matches(key, KEYS, n=1)
    return (
        f"The nearest key is {near[0]}"
        if near
        else f"`{name_command('check --keys')}` prints all keys"
    )
