"""List notices about a run, such as keys that have no effect because their feature is off. Needs no torch.

Loaded only if the config asks for a feature (`asks_for_features` in config/checks.py).
"""

from collections.abc import Iterator

from torchtitan_lite.config.extensions import load_extension, load_module
from torchtitan_lite.config.reader import KEYS, UserConfig, dump_config_toml, list_changed
from torchtitan_lite.config.schema import get_value
from torchtitan_lite.dump_folder import name_snapshots
from torchtitan_lite.preflight import RunSpec

WITHOUT_RESUME = "no checkpoint is resumed"
OF_SHARDS = """
parallelism.fsdp_reshard_after_forward parallelism.zero_stage
quantize.linear.float8.enable_fsdp_float8_all_gather
quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp
"""
OF_NODES = "parallelism.zero_plus_plus_node_size parallelism.zero_plus_plus=hpz"
OF_TRACES = "profiling.enable_profiling profiling.profiler_ profiling.save_traces_folder"
RECOMPUTE_OPTIONS = "activation_checkpoint.memory_budget activation_checkpoint.selective_ac_option"
OF_SAVES = """
checkpoint.async_mode checkpoint.enable_first_step_checkpoint checkpoint.export_dtype checkpoint.interval
checkpoint.keep_latest_k checkpoint.last_save
"""
# case -> keys, or prefixes of keys, that have no effect in this case. A case may join several settings with `and`
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
    "lr_scheduler.min_lr_factor = 1.0": "lr_scheduler.decay_ lr_scheduler.total_steps",
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


def list_rare_notices(given: UserConfig, spec: RunSpec, restarted: bool) -> Iterator[str]:
    """Yield notices about features and about keys without effect."""
    config = spec.config
    yield from describe_idle_keys(given, find_situations(spec))
    if config.job.description:
        yield config.job.description
    if config.model.uses_float8:
        yield from load_module("config.float8").list_float8_notices(
            config, spec.model_args, spec.layout.tp
        )
    if config.checkpoint.local_folder:
        folder = name_snapshots(config.checkpoint.local_folder, spec.dump_folder)
        yield f"snapshots are saved in {folder.absolute()} on each host"
    section = config.lr_scheduler
    n_left = section.total_steps - section.warmup_steps
    n_decayed = round((section.decay_ratio or 0) * section.total_steps)
    if 0 <= n_left < n_decayed or (section.decay_ratio and not n_decayed):
        ratio = f"lr_scheduler.decay_ratio = {section.decay_ratio}"
        lasts = f"so it lasts {min(n_left, n_decayed)} of {section.total_steps} steps"
        yield f"{ratio}: the decay begins after the warm-up and takes a whole number of steps, {lasts}"
    names = config.training.dataset
    if len(set(names)) < len(names):
        yield "training.dataset names a corpus twice, so its samples are drawn more often than if it were named once"
    if config.job.overwrite and not restarted:
        list_earlier = load_extension("overwrite").list_earlier
        earlier = ", ".join(map(str, list_earlier(spec.dump_folder, config)))
        if earlier:
            yield f"job.overwrite deletes the earlier run: {earlier}"
    if config.job.print_config:
        yield dump_config_toml(config)


def find_situations(spec: RunSpec) -> dict[str, str]:
    """Return a dict mapping each case to the keys that have no effect, for the cases that apply to this run and depend
    on more than one setting.

    Some rows of WITHOUT_EFFECT join several cases with `and`. A case that has no row of its own maps to an empty
    string.
    """
    config = spec.config
    layout = spec.layout
    training = config.training
    n_steps = training.steps
    comm = config.comm
    is_alone = layout.dp * layout.cp * layout.tp == 1 and not training.enable_cpu_offload
    situations = {}
    if not spec.resumed_step:
        situations[WITHOUT_RESUME] = ""
    if spec.machine.device_type == "cpu":
        situations["there is no GPU"] = "comm.save_traces_folder"
        if config.checkpoint.async_mode == "async_with_pinned_mem":
            situations['there is no GPU, so it acts like "async"'] = "checkpoint.async_mode"
    if is_alone and {training.dtype, training.mixed_precision_param} == {"float32"}:
        situations["a pipeline stage runs on a single rank in float32"] = OF_SHARDS
    if layout.fsdp_near == layout.efsdp_near == 1:
        situations["no FSDP group has two or more ranks on each of several nodes"] = OF_NODES
    if layout.dp_replicate == layout.tp == 1 and not (layout.tied or layout.ep):
        situations["no weight has a copy on another rank"] = "debug.compare_copies_every"
    if spec.weights and training.data_seed != config.debug.seed:
        situations["weights are loaded and training.data_seed is set"] = "debug.seed"
    # on a CPU, sends in a pipeline keep gloo's time-out of 30 minutes (process_groups.py)
    if layout.pp == 1 < layout.world_size and comm.hang_seconds > comm.train_timeout_seconds:
        situations["comm.train_timeout_seconds ends a hang first"] = "comm.hang_seconds"
    if config.profiling.profile_freq > n_steps - spec.resumed_step:
        situations["profiling.profile_freq exceeds the number of steps of this run"] = OF_TRACES
    if config.debug.compare_copies_every > n_steps:
        situations["it exceeds the number of steps of the run"] = "debug.compare_copies_every"
    if config.checkpoint.local_interval >= n_steps:
        situations["no snapshot is due before the last step"] = "checkpoint.local_"
    if training.spike_window > 2 * n_steps:
        situations["the run is shorter than half of training.spike_window"] = (
            "training.skip_spikes training.spike_window"
        )
    return situations


def describe_idle_keys(given: UserConfig, situations: dict[str, str]) -> list[str]:
    """Return a notice for each case that applies, with the keys that the user set to a value other than the default.

    `situations`: the result of `find_situations`. This function adds the case of a single corpus. Each key is named
    once.
    """
    if len(given.config.training.dataset) == 1:
        situations["training.dataset names one corpus"] = "training.dataset_weights"
    settings = {*situations, *(f"{key} = {get_value(given.config, key)!r}" for key in KEYS)}
    changed = [key for key in list_changed(given.config) if key in given.chosen]
    if "hpz" in given.config.parallelism.zero_plus_plus:
        changed.append("parallelism.zero_plus_plus=hpz")
    notices = []
    for case, starts in (WITHOUT_EFFECT | situations).items():
        idle = [key for key in changed if key.startswith(tuple(starts.split()))]
        if idle and (case in situations or settings.issuperset(case.split(" and "))):
            notices.append(f"{', '.join(idle)} has no effect while {case}")
            changed = [key for key in changed if key not in idle]
    return notices
