"""Rules for layouts and machines that need only numbers: no files, no torch.

plan_layout applies the rules of a layout. The rules of model sizes are in config/model.py. preflight.py calls the other
checks, and adds checks that read files. Each function checks all of its rules, so a user sees every problem at once.
"""

import re

from torchtitan_lite.config.block import list_block_modules, list_end_modules
from torchtitan_lite.config.choices import SCHEDULES, has_masks, list_cp_methods
from torchtitan_lite.config.extensions import check_extensions, load_extension, load_module
from torchtitan_lite.config.layout import (
    Layout,
    Stages,
    choose_chunk_tokens,
    count_stages,
    name_stages,
    place_stages,
    plan_batch,
    plan_degrees,
    plan_nodes,
    plan_stages,
    plan_zero_stage,
)
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.messages import ConfigError, Problem, Problems
from torchtitan_lite.config.model_rows import (
    TP_STYLES,
    ModelArgs,
    ModuleRow,
)
from torchtitan_lite.config.schema import (
    Config,
    Parallelism,
    get_value,
    with_value,
)

ASYNC_TP = "parallelism.enable_async_tensor_parallel"
TP = "parallelism.tensor_parallel_degree"
ON_GPU = (  # keys that need a GPU
    ASYNC_TP,
    "parallelism.fsdp_symmetric_memory",
    "training.enable_cpu_offload",
    "profiling.enable_memory_snapshot",
)
SIZES_OF_TP = ("n_heads", "n_kv_heads", "ffn_dim", "vocab_size")


# ---------------------------------------------------------------- layout


def plan_layout(config: Config, model_args: ModelArgs, world_size: int) -> Layout:
    """Return the layout of a run on `world_size` ranks. Raises ConfigError with all problems, not only the first."""
    section = config.parallelism
    degrees = plan_degrees(section, world_size)
    of_stages = Problems(config, model_args)
    stages: Stages = ()
    if section.pipeline_parallel_degree > 1:
        check_stages(of_stages, count_stages(section, model_args.n_layers))
    if not of_stages:
        n_layers = plan_stages(section, model_args.n_layers)
        stages = name_stages(tuple(n_layers), tuple(list_end_modules(model_args)))
    n_shards = degrees["dp_shard"] * degrees["cp"]
    n_most = n_shards
    if model_args.moe:
        n_most = max(n_shards, n_shards * degrees["tp"] // section.expert_parallel_degree)
    is_local = n_most == 1 and not config.training.enable_cpu_offload
    layout = Layout(
        **degrees,
        **plan_batch(config, degrees),
        **plan_nodes(section, degrees),
        stages=stages,
        stage_ranks=place_stages(section, len(stages)),
        zero_stage=plan_zero_stage(section, n_shards=n_shards, is_local=is_local),
        tied=model_args.tie_embeddings and section.pipeline_parallel_degree > 1,
        ep=section.expert_parallel_degree if model_args.moe else 0,
    )
    problems = check_layout(config, model_args, layout, world_size) + of_stages
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
    data_seed = config.training.data_seed
    if data_seed is None:
        data_seed = config.debug.seed
    for key, value in {
        "training.data_seed": data_seed,
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


def check_layout(
    config: Config, model_args: ModelArgs, layout: Layout, world_size: int
) -> list[Problem]:
    """Say why the number of ranks does not fit the layout, and which sizes of the model its degrees do not divide."""
    problems = Problems(config, model_args)
    section = config.parallelism
    if layout.world_size != world_size:
        others = layout.world_size // layout.dp_shard
        why = f"the degrees ({layout}) make {layout.world_size} ranks, but the run has {world_size}"
        remedy = f"Use a multiple of {others} ranks, and -1 here for the remaining factor"
        problems.refuse("parallelism.data_parallel_shard_degree", why, remedy)
    check_batch(problems, layout)
    check_sizes(problems, layout, world_size)
    check_table(problems, layout.tp, world_size)
    if model_args.moe:
        load_module("config.experts").check_experts(problems, layout)
    elif section.expert_parallel_degree > 1:
        remedy = "Leave it out, or choose a flavor with experts"
        key = "parallelism.expert_parallel_degree"
        problems.refuse(key, "the model has no experts", remedy)
    if layout.pp > 1 and section.zero_stage == 2:
        why = "torch's pipeline runtime reduces gradients once per step, so they cannot be sharded earlier"
        problems.refuse("parallelism.zero_stage", why, "Use 1, or 3 to shard the parameters too")
    if config.model.uses_float8:
        load_module("config.float8").check_float8(problems, layout)
    return problems


def check_batch(problems: Problems, layout: Layout) -> None:
    """Check that data-parallel ranks have equal numbers of full microbatches."""
    n_local = problems.config.training.local_batch_size
    n_sequences = layout.global_batch_size
    unit = n_local * layout.dp
    if layout.pp == 1 and n_sequences < unit:  # one microbatch per rank
        unit = layout.dp
    if n_sequences % unit:
        ranks = f"{layout.dp} data-parallel ranks cannot have"
        full = f"in full microbatches of training.local_batch_size = {n_local}"
        why = f"{ranks} equal shares of {n_sequences} sequences, {full}"
        remedy = f"Use {list_multiples(n_sequences, unit)}"
        problems.refuse("training.global_batch_size", why, remedy)
    if layout.pp > 1 and n_local % layout.microbatch_size:
        key = "parallelism.pipeline_parallel_microbatch_size"
        why = f"it does not divide training.local_batch_size = {n_local}"
        problems.refuse(key, why, "Use a divisor of it, such as 1")


def list_multiples(value: int, unit: int) -> str:
    """Return the nearest multiples of `unit` below and above `value`, as in "4 or 8"."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def check_stages(problems: Problems, n_stages: int) -> None:
    """Check that the schedule can run this number of stages, and that the model has enough layers for them.

    The first stage may have only the embedding, and the last stage only norm and head. Other stages need a layer.
    """
    section = problems.config.parallelism
    pp = section.pipeline_parallel_degree
    name = section.pipeline_parallel_schedule
    schedule = SCHEDULES[name]
    least = schedule.least_stages_per_rank
    per_rank, rest = divmod(n_stages, pp)
    most = schedule.most_stages_per_rank or per_rank
    if rest or not least <= per_rank <= most:
        why = f"it makes {n_stages} stages for {pp} pp ranks, but {name} needs {least} per rank"
        remedy = f"Remove the key to get {pp * least} stages, or choose another schedule"
        problems.refuse("parallelism.pipeline_parallel_layers_per_stage", why, remedy)
    elif problems.model_args.n_layers < n_stages - 2:
        why = f"each of the {n_stages} pipeline stages ({pp} pp ranks, {name}) needs a layer, except the first and last"
        remedy = f"Use {n_stages - 2} layers or more, or fewer pp ranks"
        problems.refuse("model.n_layers", why, remedy)


def check_microbatches(
    parallelism: Parallelism, local_batch_size: int, n_microbatches: int, n_stages: int
) -> list[Problem]:
    """Return a problem if the schedule cannot run this number of microbatches."""
    pp = parallelism.pipeline_parallel_degree
    name = parallelism.pipeline_parallel_schedule
    n_rounds = max(1, n_microbatches // pp)
    why = ""
    if SCHEDULES[name].fills_pipeline and n_microbatches < n_stages:
        why = f"{name} needs at least one for each of the {n_stages} stages"
        remedy = (
            "Raise it (or global_batch_size), lower pipeline_parallel_microbatch_size, or use GPipe"
        )
    elif SCHEDULES[name].in_rounds and n_microbatches % n_rounds:
        why = f"{name} runs them in {n_rounds} equal rounds"
        remedy = f"Use a multiple of {pp} microbatches"
    if not why:
        return []
    why = f"it makes {n_microbatches} microbatches, but {why}"
    return [Problem("training.local_batch_size", local_batch_size, why, remedy)]


def count_pieces(parallelism: Parallelism) -> int:
    """Return the number of equal pieces that tp and cp need of a sequence."""
    pieces = parallelism.tensor_parallel_degree
    if parallelism.context_parallel_degree > 1:
        pieces *= 2 * parallelism.context_parallel_degree
    return pieces


def check_sizes(problems: Problems, layout: Layout, world_size: int) -> None:
    """Find sizes that tp or cp does not divide."""
    config = problems.config
    for name in SIZES_OF_TP:
        size = getattr(problems.model_args, name)
        rest = size % layout.tp
        if not fits_tp(name, size, layout.tp):
            why = f"{TP} = {layout.tp} does not divide it, but tp ranks need equal shards"
            if name == "n_kv_heads":
                why = f"{TP} = {layout.tp} neither divides it nor is a multiple of it, but tp ranks need whole heads"
            remedy = f"Use {TP} = {list_tp(problems.model_args, world_size)}"
            is_free = config.model.row is None  # loaded weights have a fixed number of rows
            if name == "vocab_size" and is_free:
                remedy += f", or {size - rest + layout.tp} here; no token uses the added rows"
            problems.refuse(f"model.{name}", why, remedy)
    pieces = count_pieces(config.parallelism)
    seq_len = config.training.seq_len
    if seq_len % pieces:
        cut = f"tp {layout.tp}; cp {layout.cp} needs 2 x cp pieces"
        why = f"it does not divide into {pieces} equal pieces ({cut})"
        problems.refuse("training.seq_len", why, f"Use {list_multiples(seq_len, pieces)}")


def fits_tp(name: str, size: int, tp: int) -> bool:
    """Return whether tp divides a size of [model]. With fewer key/value heads than tp ranks, ranks share heads."""
    return size % tp == 0 or (name == "n_kv_heads" and tp % size == 0)


def list_tp(model_args: ModelArgs, world_size: int) -> str:
    """Return the degrees of tp that this many ranks and the sizes of a model allow, as in "1, 2 or 4"."""
    degrees = []
    rows = list_rows(model_args)
    for tp in range(1, model_args.n_heads + 1):
        if world_size % tp:
            continue
        fits = [fits_tp(name, getattr(model_args, name), tp) for name in SIZES_OF_TP]
        fits += [can_split(row, model_args, tp) for row in rows]
        if all(fits):
            degrees.append(str(tp))
    *others, last = degrees
    return f"{', '.join(others)} or {last}" if others else last


def list_rows(model_args: ModelArgs) -> list[ModuleRow]:
    """List the different rows in the table of a model."""
    rows = list_end_modules(model_args) + list_block_modules(model_args)
    if model_args.moe:
        rows += list_block_modules(model_args, moe=True)
    return list(dict.fromkeys(rows))


def can_split(row: ModuleRow, model_args: ModelArgs, tp: int) -> bool:
    """Return whether tp ranks can share the features of a module."""
    n_features = row.weight[-1] if row.tp_style == "rowwise" else row.weight[0]
    n_together = {"sequence": model_args.dim, "heads": model_args.head_dim}.get(row.tp_style)
    # A weight with one element applies to all features.
    if tp > 1 and row.kind == "norm" and n_features > 1 and n_together not in (None, n_features):
        return False  # the norm would span ranks
    return row.tp_style not in ("colwise", "rowwise") or n_features % tp == 0


def check_table(problems: Problems, tp: int, world_size: int) -> None:
    """Find rows in the table of the model that are not supported, or that tp cannot split."""
    model_args = problems.model_args
    check_ends(problems, list_end_modules(model_args))
    for row in list_rows(model_args):
        if row.tp_style not in TP_STYLES.get(row.kind, ()):
            why = f"its table says that {row.name} is a {row.kind} module with tp_style {row.tp_style!r}"
            remedy = f"Use one of these in models/{model_args.name}/table.py: {TP_STYLES}"
            problems.refuse("model.name", why, remedy)
            continue
        # check_sizes has refused the sizes of [model] by their names
        if not can_split(row, model_args, tp) and not problems:
            n_features = row.weight[-1] if row.tp_style == "rowwise" else row.weight[0]
            why = f"tp ranks cannot share the {n_features} features of {row.name}, whose tp_style is {row.tp_style!r}"
            problems.refuse(TP, why, f"Use {list_tp(model_args, world_size)}")


def check_ends(problems: Problems, ends: list[ModuleRow]) -> None:
    """Find modules outside the blocks that no pipeline stage can have, or whose kind is not supported there."""
    for row in ends:
        place = f"in models/{problems.model_args.name}/table.py"
        outside = f"{row.name} is outside the blocks,"
        stages = {other.end for other in ends if other.child == row.child}
        if stages not in ({"first"}, {"last"}):
            why = (
                f"its end = {row.end!r} names no stage of a pipeline, or another than {row.child!r}"
            )
            remedy = f'Set end = "first" or "last" for all modules of a child {place}'
            problems.refuse("model.name", f"{outside} {why}", remedy)
        if row.kind in ("router", "experts"):
            remedy = f"Use modules of other kinds {place}"
            problems.refuse("model.name", f"{outside} where no code serves experts", remedy)
        if row.tp_style in ("colwise", "rowwise", "whole") and row.child == row.name:
            why = "and tp would gather the input of the whole model for it"
            remedy = (
                f'Use tp_style "sequence" or "gathered", or put it into a module of its own {place}'
            )
            problems.refuse("model.name", f"{outside} {why}", remedy)


def find_refused(config: Config, model_args: ModelArgs, layout: Layout) -> list[Problem]:
    """Find combinations known to give wrong numbers or to crash (torch 2.13).

    tests/ranks/test_layouts.py runs each of them and expects a failure, so the test reports when torch fixes one.
    """
    problems = Problems(config, model_args)
    section = config.parallelism
    check_extensions(problems, layout)
    schedule = SCHEDULES[section.pipeline_parallel_schedule]
    if schedule.splits_backward and section.pipeline_parallel_degree > 1:
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
    methods = list_cp_methods(config.model.attention, model_args)
    method = section.context_parallel_rotate_method
    if section.context_parallel_degree > 1 and method not in methods:
        why = f"this method does not support model.attention = {config.model.attention!r} (under_cp in choices.py)"
        if has_masks(config.model.attention, model_args):
            why = "this method has no masks, but layers of the model have windows or sinks"
        remedy = f"Use {' or '.join(map(repr, methods)) or 'context_parallel_degree = 1'}"
        problems.refuse("parallelism.context_parallel_rotate_method", why, remedy)
    return problems


# ---------------------------------------------------------------- on every layout


def check_run(config: Config) -> list[Problem]:
    """Find settings that contradict each other on every layout."""
    problems = Problems(config)
    recompute = config.activation_checkpoint
    compiles = config.compile.compiles_blocks
    if not re.fullmatch("op|0*[1-9][0-9]*", recompute.selective_ac_option):
        why = 'it is neither "op" nor a number'
        remedy = 'Use "op", or a number n to recompute every n-th layer, such as "2"'
        problems.refuse("activation_checkpoint.selective_ac_option", why, remedy)
    if recompute.mode == "memory_budget" and (not compiles or config.compile.backend == "eager"):
        why = "the compiler chooses what to recompute, but no block is compiled"
        remedy = 'Set compile.enable = true, or use "selective"'
        problems.refuse("activation_checkpoint.mode", why, remedy)
    n_steps = config.profiling.profiler_warmup + config.profiling.profiler_active
    if config.profiling.enable_profiling and config.profiling.profile_freq < n_steps:
        why = f"profiler_warmup + profiler_active take {n_steps} steps"
        problems.refuse("profiling.profile_freq", why, f"Use {n_steps} or more")
    is_rewritten = compiles and config.compile.backend == "inductor"
    if config.parallelism.enable_async_tensor_parallel and not is_rewritten:
        why = "inductor must rewrite the matmuls, but it compiles no block (compile.enable, components, backend)"
        problems.refuse(ASYNC_TP, why, "Leave this key out")
    return problems


def check_machine(config: Config, machine: Machine) -> list[Problem]:
    """Find features that these devices, or the software of this host, lack."""
    problems = Problems(config)
    for key in ON_GPU:
        if machine.device_type != "cuda" and get_value(config, key):
            problems.refuse(key, "it needs a GPU, and there is none", "Leave this key out")
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
