"""Check settings that few configs use: combinations that crash or give wrong results, and keys that need a GPU.

This file is loaded if the model has windows, or if a key outside PLAIN_KEYS (checks.py) differs from its default.
Otherwise, no rule in this file is checked, so a rule that applies to other configs too belongs in checks.py. Rules for
extensions belong in features.py.
"""

import re

from torchtitan_lite.config.block import has_masks, list_windows
from torchtitan_lite.config.choices import ATTENTIONS, LOSSES, SCHEDULES
from torchtitan_lite.config.extensions import load_extension, load_module
from torchtitan_lite.config.features import EXTENSIONS
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.messages import Refused
from torchtitan_lite.config.model_rows import LAYER_TYPES, SLIDING, ModelArgs
from torchtitan_lite.config.schema import Config, get_value
from torchtitan_lite.models.registry import MODELS

ASYNC_TP = "parallelism.enable_async_tensor_parallel"
OF_EXPERTS = (  # keys that need a model with experts
    "training.router_z_loss",
    "training.expert_balance_loss",
    "training.expert_bias_rate",
)
FOLDERS = """
checkpoint.folder metrics.save_tb_folder profiling.save_traces_folder profiling.save_memory_snapshot_folder
comm.save_traces_folder
""".split()
GPU_KEYS = (  # keys that need a GPU
    ASYNC_TP,
    "parallelism.fsdp_symmetric_memory",
    "training.enable_cpu_offload",
    "profiling.enable_memory_snapshot",
)


def check_settings(config: Config, machine: Machine) -> Refused:
    """Find settings that contradict each other on every layout, and settings that these devices or this host do not
    support."""
    recompute = config.activation_checkpoint
    compiles = config.compile.compiles_blocks
    if not re.fullmatch("op|0*[1-9][0-9]*", recompute.selective_ac_option):
        why = 'it is neither "op" nor a number'
        remedy = 'Use "op", or a number n to recompute every n-th layer, such as "2"'
        yield "activation_checkpoint.selective_ac_option", why, remedy
    if recompute.mode == "memory_budget" and (not compiles or config.compile.backend == "eager"):
        why = "the compiler chooses what to recompute, but no block is compiled"
        remedy = 'Compile "model" with a backend other than "eager" ([compile]), or use "selective"'
        yield "activation_checkpoint.mode", why, remedy
    n_steps = config.profiling.profiler_warmup + config.profiling.profiler_active
    if config.profiling.enable_profiling and config.profiling.profile_freq < n_steps:
        why = f"profiler_warmup + profiler_active take {n_steps} steps"
        yield "profiling.profile_freq", why, f"Use {n_steps} or more"
    is_rewritten = compiles and config.compile.backend == "inductor"
    if config.parallelism.enable_async_tensor_parallel and not is_rewritten:
        why = "inductor must compile the blocks to rewrite their matmuls (compile.enable, components, backend)"
        yield ASYNC_TP, why, "Leave this key out"
    for key in GPU_KEYS:
        if machine.device_type != "cuda" and get_value(config, key):
            yield key, "it needs a GPU, and there is none", "Leave this key out"
    taken = "config.toml hang lock log.txt metrics.jsonl wandb wandb_id".split()
    for key in FOLDERS:
        name = get_value(config, key)
        if name in taken:
            why = "the run uses this name for other files in job.dump_folder"
            yield key, why, "Use a different name"
        taken.append(name)
    if config.model.uses_float8:
        yield from load_module("config.float8").check_matmul(config, machine)
    uses_kernels = machine.device_type == "cuda" and config.model.attention == "causal"
    in_float32 = config.training.mixed_precision_param == "float32"
    if config.parallelism.context_parallel_degree > 1 and uses_kernels and in_float32:
        why = "the GPU kernels for context parallel compute in 16 bits"
        yield "training.mixed_precision_param", why, 'Use "bfloat16"'
    needs_packages = config.compile.enable or config.metrics.enable_wandb
    schedule = SCHEDULES[config.parallelism.pipeline_parallel_schedule]
    if machine.is_here and (needs_packages or schedule.splits_backward):
        yield from load_extension("software").check_software(config, machine)


def find_refused(config: Config, model_args: ModelArgs, layout: Layout) -> Refused:
    """Find combinations of features that are known to crash or to give wrong numbers (torch 2.13).

    tests/ranks/test_layouts.py runs these combinations. A test fails if a new version of torch makes one of the
    combinations work.
    """
    for extension in EXTENSIONS.values():
        value = get_value(config, extension.key)
        is_asked = value in extension.values if extension.values else bool(value)
        if extension.check and is_asked:
            yield from extension.check(config, model_args, layout)
    if not model_args.moe:
        why = "the model has no experts"
        if config.parallelism.expert_parallel_degree > 1:
            remedy = "Leave it out, or choose a flavor with experts"
            yield "parallelism.expert_parallel_degree", why, remedy
        for key in OF_EXPERTS:
            if get_value(config, key) not in (0, get_value(Config(), key)):
                yield key, why, "Leave this key out"
    shared = MODELS[model_args.name].fields.keys() & LOSSES[config.training.loss].fields
    if shared:
        why = f"the model {model_args.name} also has a field {min(shared)}"
        yield "training.loss", why, "Rename the field of the loss or of the model"
    if config.model.uses_float8:
        yield from load_module("config.float8").check_float8(config, model_args, layout)
    if layout.pp > 1:
        yield from check_pipeline(config, layout)
    if layout.cp > 1:
        yield from check_context_parallel(config, model_args)


def check_pipeline(config: Config, layout: Layout) -> Refused:
    """Find settings that torch's pipeline schedules do not support."""
    section = config.parallelism
    if section.zero_stage == 2:
        why = "torch's pipeline runtime reduces gradients once per step, so they cannot be sharded earlier"
        yield "parallelism.zero_stage", why, "Use 1, or use 3, which also shards the parameters"
    if SCHEDULES[section.pipeline_parallel_schedule].splits_backward:
        otherwise = "or use Interleaved1F1B"
        if layout.zero_stage == 3:
            why = "it computes weight gradients after FSDP has freed the parameters, so gradients are missing or wrong"
            remedy = f"Set parallelism.zero_stage = 1, {otherwise}"
            yield "parallelism.pipeline_parallel_schedule", why, remedy
        if config.activation_checkpoint.mode != "none":
            why = "both halves of a split backward would recompute, so torch raises an error in the first step"
            yield "activation_checkpoint.mode", why, f'Set it to "none", {otherwise}'
        if config.compile.enable:
            why = "the backward of a compiled block cannot be split: torch fails in the first step"
            yield "compile.enable", why, f"Set it to false, {otherwise}"


def check_context_parallel(config: Config, model_args: ModelArgs) -> Refused:
    """Find attention that context parallel does not support."""
    section = config.parallelism
    attention = config.model.attention
    row = ATTENTIONS[attention]
    is_masked = row.extension or row.uses_documents or has_masks(attention, model_args)
    if not row.under_cp:
        why = f"model.attention = {attention!r} does not support it (see under_cp in config/choices.py)"
        yield "parallelism.context_parallel_degree", why, "Use 1"
    elif section.context_parallel_rotate_method == "ring" and is_masked:
        why = "the ring has no masks, so it does not support documents, windows, sinks or attention from extensions/"
        yield "parallelism.context_parallel_rotate_method", why, 'Use "allgather"'


def check_windows(attention: str, model_args: ModelArgs) -> Refused:
    """Find windows and sinks that no layer uses, or that the attention does not support."""
    row = ATTENTIONS[attention]
    window = model_args.sliding_window
    types = model_args.layer_types
    windows = {*list_windows(attention, model_args)} - {None}
    why = ""
    if not set(types) <= set(LAYER_TYPES):
        why = f"its layer_types are {types}, but the supported types are {LAYER_TYPES}"
    elif types and (SLIDING in types) != (window is not None):
        why = f"its layer_types are {types}, but sliding_window = {window}"
    if why:
        remedy = f"Correct the flavor in models/{model_args.name}/table.py"
        yield "model.flavor", why, remedy
    elif wrong := [each for each in windows if type(each) is not int or each < 1]:
        why = f"layers have windows of {wrong[0]!r} tokens, but a token sees at least itself"
        remedy = "Use whole numbers above 0, or None for no window, in the flavor or the attention (config/choices.py)"
        yield "model.attention", why, remedy
    elif row.window is None and (window or model_args.attention_sinks or not row.extension):
        why = "its row in config/choices.py needs `window`, as it names no extension, or the model has windows or sinks"
        remedy = 'Use "causal", or add `window` to the row, such as ModelArgs.find_window'
        yield "model.attention", why, remedy
