"""Name the keys that a user set although their feature is off. Loaded only if the user set a key. No torch."""

from torchtitan_lite.config.reader import KEYS, UserConfig
from torchtitan_lite.config.schema import Config, get_value

FEATURES = {  # a feature is off if this key has its default value -> first letters of the keys that then have no effect
    "checkpoint.enable": (
        "checkpoint.async_mode",
        "checkpoint.enable_first",
        "checkpoint.export_dtype",
        "checkpoint.interval",
        "checkpoint.keep_latest_k",
        "checkpoint.last_save",
    ),
    "checkpoint.local_folder": ("checkpoint.local_interval",),
    "compile.enable": ("compile.",),
    "debug.deterministic": ("debug.deterministic_warn_only",),
    "model.converters": ("quantize.",),
    "parallelism.context_parallel_degree": ("parallelism.context_parallel_",),
    "parallelism.pipeline_parallel_degree": ("parallelism.pipeline_parallel_",),
    "parallelism.zero_plus_plus": ("parallelism.zero_plus_plus_",),
    "profiling.enable_profiling": ("profiling.profile", "profiling.save_traces_folder"),
    "training.skip_spikes": ("training.spike_window",),
    "validation.enable": ("validation.",),
}


def describe_idle_keys(given: UserConfig) -> list[str]:
    """Return a notice for each feature that is off, with the keys of the feature that the user set."""
    notices = []
    for switch, prefixes in FEATURES.items():
        value = get_value(given.config, switch)
        if value != get_value(Config(), switch):
            continue
        idle = []
        for key in KEYS:
            is_set = get_value(given.config, key) != get_value(Config(), key)
            if key in given.chosen and key.startswith(prefixes) and is_set:
                idle.append(key)
        if idle:
            notices.append(f"{', '.join(idle)} has no effect while {switch} = {value!r}")
    return notices
