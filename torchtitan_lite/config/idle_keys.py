"""Name the keys that a user set although their feature is off. Loaded only if the user set a key. No torch."""

from torchtitan_lite.config.reader import KEYS, UserConfig
from torchtitan_lite.config.schema import Config, get_value

# a switch, its values that turn a feature off, and prefixes of the keys that then have no effect
FEATURES = (
    (
        "checkpoint.enable",
        (False,),
        (
            "checkpoint.async_mode",
            "checkpoint.enable_first",
            "checkpoint.export_dtype",
            "checkpoint.interval",
            "checkpoint.keep_latest_k",
            "checkpoint.last_save",
        ),
    ),
    ("checkpoint.local_folder", ("",), ("checkpoint.local_interval",)),
    ("compile.enable", (False,), ("compile.",)),
    ("debug.deterministic", (False,), ("debug.deterministic_warn_only",)),
    ("model.converters", ([],), ("quantize.",)),
    ("parallelism.context_parallel_degree", (1,), ("parallelism.context_parallel_",)),
    ("parallelism.pipeline_parallel_degree", (1,), ("parallelism.pipeline_parallel_",)),
    ("parallelism.zero_plus_plus", ([],), ("parallelism.zero_plus_plus_",)),
    ("parallelism.zero_stage", (1, 2, 3), ("parallelism.fsdp_reshard_after_forward",)),
    (
        "profiling.enable_profiling",
        (False,),
        ("profiling.profile", "profiling.save_traces_folder"),
    ),
    ("training.skip_spikes", (0.0,), ("training.spike_window",)),
    ("validation.enable", (False,), ("validation.",)),
    (
        "activation_checkpoint.mode",
        ("none", "full", "selective"),
        ("activation_checkpoint.memory_budget",),
    ),
    (
        "activation_checkpoint.mode",
        ("none", "full", "memory_budget"),
        ("activation_checkpoint.selective_ac_option",),
    ),
    ("optimizer.name", ("SGD",), ("optimizer.beta", "optimizer.eps")),
    ("lr_scheduler.decay_ratio", (0.0,), ("lr_scheduler.decay_type",)),
)


def describe_idle_keys(given: UserConfig) -> list[str]:
    """Return a notice for each feature that is off, with the keys of the feature that the user set."""
    notices = []
    for switch, off_values, prefixes in FEATURES:
        value = get_value(given.config, switch)
        if value not in off_values:
            continue
        idle = []
        for key in KEYS:
            is_set = get_value(given.config, key) != get_value(Config(), key)
            if key in given.chosen and key.startswith(prefixes) and is_set:
                idle.append(key)
        if idle:
            notices.append(f"{', '.join(idle)} has no effect while {switch} = {value!r}")
    return notices
