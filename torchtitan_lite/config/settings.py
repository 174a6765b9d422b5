"""Check settings that few configs use: combinations that crash or give wrong numbers, and keys that need a GPU.

This file is loaded if the model has windows, or if a key outside PLAIN_KEYS (checks.py) differs from its default. For
all other configs, no rule in this file is checked, so rules for those configs belong in checks.py. The rules of an
extension belong in features.py.
"""

import re

from torchtitan_lite.config.block import has_masks, list_windows
from torchtitan_lite.config.choices import ATTENTIONS, SCHEDULES
from torchtitan_lite.config.extensions import load_extension, load_module
from torchtitan_lite.config.features import EXTENSIONS
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.messages import Problem, Problems
from torchtitan_lite.config.model_rows import LAYER_TYPES, SLIDING, ModelArgs
from torchtitan_lite.config.schema import Config, get_value

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


def check_settings(config: Config, machine: Machine) -> list[Problem]:
    """Find settings that contradict each other on every layout, or that these devices or this host cannot run."""
    problems = Problems(config)
    recompute = config.activation_checkpoint
    compiles = config.compile.compiles_blocks
    if not re.fullmatch("op|0*[1-9][0-9]*", recompute.selective_ac_option):
        why = 'it is neither "op" nor a number'
        remedy = 'Use "op", or a number n to recompute every n-th layer, such as "2"'
        problems.refuse("activation_checkpoint.selective_ac_option", why, remedy)
    if recompute.mode == "memory_budget" and (not compiles or config.compile.backend == "eager"):
        why = "the compiler chooses what to recompute, but no block is compiled"
        remedy = 'Compile "model" with another backend than "eager" ([compile]), or use "selective"'
        problems.refuse("activation_checkpoint.mode", why, remedy)
    n_steps = config.profiling.profiler_warmup + config.profiling.profiler_active
    if config.profiling.enable_profiling and config.profiling.profile_freq < n_steps:
        why = f"profiler_warmup + profiler_active take {n_steps} steps"
        problems.refuse("profiling.profile_freq", why, f"Use {n_steps} or more")
    is_rewritten = compiles and config.compile.backend == "inductor"
    if config.parallelism.enable_async_tensor_parallel and not is_rewritten:
        why = "inductor must compile the blocks to rewrite their matmuls (compile.enable, components, backend)"
        problems.refuse(ASYNC_TP, why, "Leave this key out")
    for key in GPU_KEYS:
        if machine.device_type != "cuda" and get_value(config, key):
            problems.refuse(key, "it needs a GPU, and there is none", "Leave this key out")
    taken = "config.toml hang lock log.txt metrics.jsonl wandb wandb_id".split()
    for key in FOLDERS:
        name = get_value(config, key)
        if name in taken:
            why = "the run uses this name for other files in job.dump_folder"
            problems.refuse(key, why, "Use a different name")
        taken.append(name)
    if config.model.uses_float8:
        load_module("config.float8").check_matmul(problems, machine)
    uses_kernels = machine.device_type == "cuda" and config.model.attention == "causal"
    in_float32 = config.training.mixed_precision_param == "float32"
    if config.parallelism.context_parallel_degree > 1 and uses_kernels and in_float32:
        why = "the GPU kernels for context parallel compute in 16 bits"
        problems.refuse("training.mixed_precision_param", why, 'Use "bfloat16"')
    needs_packages = config.compile.enable or config.metrics.enable_wandb
    schedule = SCHEDULES[config.parallelism.pipeline_parallel_schedule]
    if machine.is_here and (needs_packages or schedule.splits_backward):
        problems += load_extension("software").check_software(config, machine)
    return problems


def find_refused(config: Config, model_args: ModelArgs, layout: Layout) -> list[Problem]:
    """Find combinations of features that are known to crash or to give wrong numbers (torch 2.13).

    tests/ranks/test_layouts.py runs these combinations. A test fails when a version of torch makes one of them work.
    """
    problems = Problems(config, model_args)
    for extension in EXTENSIONS.values():
        if extension.check and extension.is_asked(config):
            extension.check(problems, layout)
    if not model_args.moe:
        why = "the model has no experts"
        if config.parallelism.expert_parallel_degree > 1:
            remedy = "Leave it out, or choose a flavor with experts"
            problems.refuse("parallelism.expert_parallel_degree", why, remedy)
        for key in OF_EXPERTS:
            if get_value(config, key) not in (0, get_value(Config(), key)):
                problems.refuse(key, why, "Leave this key out")
    if config.model.uses_float8:
        load_module("config.float8").check_float8(problems, layout)
    if layout.pp > 1:
        check_pipeline(problems, layout)
    if layout.cp > 1:
        check_context_parallel(problems)
    return problems


def check_pipeline(problems: Problems, layout: Layout) -> None:
    """Find what torch's pipeline schedules cannot run."""
    config = problems.config
    section = config.parallelism
    n_local = config.training.local_batch_size
    if n_local % layout.microbatch_size:
        key = "parallelism.pipeline_parallel_microbatch_size"
        why = f"it does not divide training.local_batch_size = {n_local}"
        problems.refuse(key, why, f"Use a divisor of {n_local}, such as 1")
    if section.zero_stage == 2:
        why = "torch's pipeline runtime reduces gradients once per step, so they cannot be sharded earlier"
        problems.refuse("parallelism.zero_stage", why, "Use 1, or 3 to shard the parameters too")
    if SCHEDULES[section.pipeline_parallel_schedule].splits_backward:
        otherwise = "or use Interleaved1F1B"
        if layout.zero_stage == 3:
            why = "it computes weight gradients after FSDP freed the parameters, so gradients are missing or wrong"
            remedy = f"Set parallelism.zero_stage = 1, {otherwise}"
            problems.refuse("parallelism.pipeline_parallel_schedule", why, remedy)
        if config.activation_checkpoint.mode != "none":
            why = "both halves of a split backward would recompute, which torch refuses in the first step"
            problems.refuse("activation_checkpoint.mode", why, f'Set it to "none", {otherwise}')
        if config.compile.enable:
            why = "the backward of a compiled block cannot be split: torch fails in the first step"
            problems.refuse("compile.enable", why, f"Set it to false, {otherwise}")


def check_context_parallel(problems: Problems) -> None:
    """Find attention that context parallel does not support."""
    section = problems.config.parallelism
    attention = problems.config.model.attention
    row = ATTENTIONS[attention]
    is_masked = row.extension or row.uses_documents or has_masks(attention, problems.model_args)
    if not row.under_cp:
        why = f"model.attention = {attention!r} does not support it (see under_cp in config/choices.py)"
        problems.refuse("parallelism.context_parallel_degree", why, "Use 1")
    elif section.context_parallel_rotate_method == "ring" and is_masked:
        problems.refuse(
            "parallelism.context_parallel_rotate_method",
            "the ring has no masks, so it supports no documents, windows, sinks or code of a fork",
            'Use "allgather"',
        )


def check_windows(problems: Problems) -> None:
    """Find windows and sinks that no layer uses, or that the attention does not support."""
    attention = problems.config.model.attention
    row = ATTENTIONS[attention]
    model_args = problems.model_args
    window = model_args.sliding_window
    types = model_args.layer_types
    windows = [each for each in list_windows(attention, model_args) if each is not None]
    why = ""
    if not set(types) <= set(LAYER_TYPES):
        why = f"its layer_types are {types}, but layers have the types {LAYER_TYPES}"
    elif types and (SLIDING in types) != (window is not None):
        why = f"its layer_types are {types}, but sliding_window = {window}"
    if why:
        remedy = f"Correct the flavor in models/{model_args.name}/table.py"
        problems.refuse("model.flavor", why, remedy)
    elif windows and min(windows) < 1:
        why = f"layers have windows of {min(windows)}, but a token sees at least itself"
        remedy = (
            "Use 1 or more, or None for no window, in the flavor or in its row (config/choices.py)"
        )
        problems.refuse("model.attention", why, remedy)
    elif row.window is None and (window or model_args.attention_sinks or not row.extension):
        why = "its row in config/choices.py has no `window`, but needs one if it has no code, or for windows and sinks"
        remedy = 'Use "causal", or add `window` to the row, such as ModelArgs.find_window'
        problems.refuse("model.attention", why, remedy)
