"""Name the keys that a user set although their feature is off. Loaded only if the user set a key. No torch."""

from torchtitan_lite.config.reader import KEYS, UserConfig
from torchtitan_lite.config.schema import Config, get_value

WITHOUT_RESUME = "no checkpoint is resumed"
RECOMPUTE_OPTIONS = "activation_checkpoint.memory_budget activation_checkpoint.selective_ac_option"
OF_SAVES = """
checkpoint.async_mode checkpoint.enable_first_step_checkpoint checkpoint.export_dtype checkpoint.interval
checkpoint.keep_latest_k checkpoint.last_save
"""
# case -> keys, or beginnings of keys, that have no effect in this case. `and` joins several settings
WITHOUT_EFFECT = {
    "activation_checkpoint.mode = 'full'": RECOMPUTE_OPTIONS,
    "activation_checkpoint.mode = 'memory_budget'": "activation_checkpoint.selective_ac_option",
    "activation_checkpoint.mode = 'none'": RECOMPUTE_OPTIONS,
    "activation_checkpoint.mode = 'selective'": "activation_checkpoint.memory_budget",
    "checkpoint.enable = False": f"{OF_SAVES} checkpoint.load_step",
    "checkpoint.enable = False and checkpoint.local_folder = ''": "checkpoint.folder",
    "checkpoint.initial_load_path = ''": "checkpoint.initial_load_model_only",
    "checkpoint.last_save_in_hf = False and checkpoint.last_save_model_only = False": "checkpoint.export_dtype",
    "checkpoint.load_only = True": OF_SAVES,
    "checkpoint.local_folder = ''": "checkpoint.local_interval",
    f"{WITHOUT_RESUME} and checkpoint.initial_load_path = ''": "checkpoint.exclude_from_loading",
    f"{WITHOUT_RESUME} and checkpoint.initial_load_model_only = True": "checkpoint.exclude_from_loading",
    "comm.trace_buf_size = 0": "comm.save_traces_folder",
    "compile.components = []": "compile.enable compile.backend",
    "compile.enable = False": "compile.",
    "debug.deterministic = False": "debug.deterministic_warn_only",
    "lr_scheduler.decay_ratio = 0.0": "lr_scheduler.decay_type",
    "lr_scheduler.decay_ratio = 0.0 and lr_scheduler.total_steps = None": "lr_scheduler.min_lr_factor",
    "metrics.enable_tensorboard = False": "metrics.save_tb_folder",
    "model.converters = []": "quantize.",
    "optimizer.name = 'SGD'": "optimizer.beta optimizer.eps",
    "parallelism.context_parallel_degree = 1": "parallelism.context_parallel_",
    "parallelism.pipeline_parallel_degree = 1": "parallelism.pipeline_parallel_",
    "parallelism.tensor_parallel_degree = 1": "parallelism.enable_async_tensor_parallel",
    "parallelism.zero_plus_plus = []": "parallelism.zero_plus_plus_",
    "parallelism.zero_plus_plus = ['qwz']": "parallelism.zero_plus_plus_",
    "parallelism.zero_stage = 1": "parallelism.fsdp_reshard_after_forward",
    "parallelism.zero_stage = 2": "parallelism.fsdp_reshard_after_forward",
    "parallelism.zero_stage = 3": "parallelism.fsdp_reshard_after_forward",
    "profiling.enable_memory_snapshot = False": "profiling.save_memory_snapshot_folder",
    "profiling.enable_profiling = False": "profiling.profiler_ profiling.save_traces_folder",
    "profiling.enable_profiling = False and profiling.enable_memory_snapshot = False": "profiling.profile_freq",
    "quantize.linear.float8.enable_fsdp_float8_all_gather = False": "quantize.linear.float8.precompute",
    "training.skip_spikes = 0.0": "training.spike_window",
    "validation.enable = False": "validation.",
}


def describe_idle_keys(given: UserConfig, *, is_resumed: bool = False) -> list[str]:
    """Return a notice for each case that applies, with the keys that the user set to another value than the default.

    `is_resumed`: whether the run resumes from its own checkpoint. Each key is named once.
    """
    settings = set() if is_resumed else {WITHOUT_RESUME}
    changed = []
    for key in KEYS:
        value = get_value(given.config, key)
        settings.add(f"{key} = {value!r}")
        if key in given.chosen and value != get_value(Config(), key):
            changed.append(key)
    notices = []
    for case, starts in WITHOUT_EFFECT.items():
        idle = [key for key in changed if key.startswith(tuple(starts.split()))]
        if idle and settings.issuperset(case.split(" and ")):
            notices.append(f"{', '.join(idle)} has no effect while {case}")
            changed = [key for key in changed if key not in idle]
    return notices
