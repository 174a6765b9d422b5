"""Check layouts and machines by rules that need only numbers: no files, no torch.

plan_layout applies the rules of a layout. The rules of model sizes are in config/model.py. preflight.py calls the other
checks, and adds checks that read files. Each function checks all of its rules, so a user sees every problem at once.
"""

from dataclasses import replace
from math import ceil, lcm

from torchtitan_lite.config.block import list_block_modules, list_end_modules
from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.config.extensions import load_module
from torchtitan_lite.config.layout import (
    Layout,
    Stages,
    count_stages,
    name_stages,
    place_stages,
    plan_batch,
    plan_degrees,
    plan_stages,
    plan_zero_stage,
)
from torchtitan_lite.config.messages import ConfigError, Problems, Refused
from torchtitan_lite.config.model_rows import AUTO, TP_STYLES, ModelArgs, ModuleRow
from torchtitan_lite.config.reader import list_changed
from torchtitan_lite.config.schema import (
    Config,
    Parallelism,
    get_value,
    with_value,
)

AUTOMATIC = (None, -1, AUTO)  # the values that resolve_config replaces
TP = "parallelism.tensor_parallel_degree"
SPLIT_DIMS = {"colwise": 0, "rowwise": -1}  # tp_style -> dim of the weight that tp splits
# The rules of settings.py and the notices of notices.py do not read these keys, except in the two cases that
# asks_for_features tests. If all other keys have their default values, settings.py and notices.py are not loaded.
PLAIN_KEYS = set(
    """
    job.config_file job.dump_folder model.hf_assets_path optimizer.lr lr_scheduler.warmup_steps
    training.local_batch_size training.global_batch_size training.seq_len training.steps
    parallelism.data_parallel_shard_degree parallelism.tensor_parallel_degree
    parallelism.pipeline_parallel_degree activation_checkpoint.mode checkpoint.enable metrics.log_freq
    validation.enable validation.freq validation.steps
    """.split()
)


# ---------------------------------------------------------------- layout


def plan_layout(config: Config, model_args: ModelArgs, world_size: int) -> Layout:
    """Return the layout of a run on `world_size` ranks. Raises ConfigError with all problems, not only the first."""
    section = config.parallelism
    degrees = plan_degrees(section, world_size)
    problems = Problems(config, model_args, check_stages(section, model_args.n_layers))
    stages: Stages = ()
    if not problems:
        n_layers = plan_stages(section, model_args.n_layers)
        stages = name_stages(tuple(n_layers), model_args)
    layout = Layout(
        **degrees,
        **plan_batch(config, degrees),
        stages=stages,
        stage_ranks=place_stages(section, len(stages)),
        zero_stage=0,
        tied=model_args.tie_embeddings and section.pipeline_parallel_degree > 1,
        ep=section.expert_parallel_degree if model_args.moe else 0,
    )
    layout = replace(layout, zero_stage=plan_zero_stage(config, layout))
    if section.zero_plus_plus:
        layout = load_module("config.features").split_nodes(layout, section)
    problems += Problems(config, model_args, check_layout(config, model_args, layout, world_size))
    if problems:
        raise ConfigError(*problems)
    return layout


def asks_for_features(config: Config) -> bool:
    """Return whether a rule of settings.py or a notice of notices.py may apply to this config."""
    has_rare_key = any(key not in PLAIN_KEYS for key in list_changed(config))
    is_idle = not config.validation.enable and config.validation != Config().validation
    return has_rare_key or is_idle or config.activation_checkpoint.mode == "memory_budget"


def resolve_config(config: Config, layout: Layout, device_type: str) -> Config:
    """Replace every automatic value of a config with the resolved value. A run logs and saves the resolved config."""
    on_gpu = device_type == "cuda"
    resolved = {
        "training.data_seed": config.debug.seed,
        "training.global_batch_size": layout.global_batch_size,
        "training.mixed_precision_param": "bfloat16" if on_gpu else "float32",
        # on a GPU, large matmuls are more efficient than small ones; on a CPU, small matmuls fit the caches
        "training.loss_chunk_tokens": 4096 if on_gpu else 1024,
        "parallelism.data_parallel_shard_degree": layout.dp_shard,
        "parallelism.zero_stage": layout.zero_stage,
        "lr_scheduler.total_steps": config.training.steps,
    }
    for key, value in resolved.items():
        if get_value(config, key) in AUTOMATIC:
            config = with_value(config, key, value)
    # zero_stage is resolved now: reset this older key, so that it does not contradict zero_stage
    return with_value(config, "parallelism.fsdp_reshard_after_forward", "default")


def check_layout(config: Config, model_args: ModelArgs, layout: Layout, world_size: int) -> Refused:
    """Check the number of ranks, and that the degrees and the schedule divide the sizes of model and batch."""
    if layout.world_size != world_size:
        others = layout.world_size // layout.dp_shard
        why = f"the degrees ({layout}) make {layout.world_size} ranks, but the run has {world_size}"
        remedy = "Set this key to -1"
        if others > 1:
            remedy += f", and use a multiple of {others} ranks"
        if config.parallelism.data_parallel_shard_degree == -1:
            remedy = f"Use a multiple of {others} ranks, or lower the other degrees"
        yield "parallelism.data_parallel_shard_degree", why, remedy
    pieces = count_pieces(config.parallelism)
    seq_len = config.training.seq_len
    if seq_len % pieces:
        why = (
            f"it does not divide into {pieces} equal pieces "
            f"(tp {layout.tp}; cp {layout.cp} needs 2 x cp pieces)"
        )
        yield "training.seq_len", why, f"Use {list_multiples(seq_len, pieces)}"
    yield from check_batch(config, layout)
    yield from check_table(model_args)
    yield from check_tp(config, model_args, world_size)
    if model_args.moe:
        yield from load_module("config.experts").check_experts(model_args, layout)
    if asks_for_features(config):
        yield from load_module("config.settings").find_refused(config, model_args, layout)


def check_batch(config: Config, layout: Layout) -> Refused:
    """Check that each data-parallel rank gets the same number of full microbatches, and that the schedule can run
    them."""
    n_local = config.training.local_batch_size
    n_sequences = layout.global_batch_size
    unit = n_local * layout.dp
    if layout.pp == 1 and n_sequences < unit:  # a smaller share is one microbatch
        unit = layout.dp
    if n_sequences % unit:
        why = (
            f"{layout.dp} data-parallel ranks cannot have equal shares of {n_sequences} sequences "
            f"if each share is a multiple of training.local_batch_size = {n_local}"
        )
        if layout.pp > 1:  # microbatches in rounds of pp, which most schedules can run
            unit = lcm(unit, layout.pp * layout.microbatch_size * layout.dp)
        yield "training.global_batch_size", why, f"Use {list_multiples(n_sequences, unit)}"
    if layout.pp == 1:
        return
    if n_local % layout.microbatch_size:
        key = "parallelism.pipeline_parallel_microbatch_size"
        why = f"it does not divide training.local_batch_size = {n_local}"
        yield key, why, f"Use a divisor of {n_local}, such as 1"
    elif n_sequences % unit == 0:
        yield from check_microbatches(config, layout)


def list_multiples(value: int, unit: int) -> str:
    """Return the nearest multiples of `unit` below and above `value`, as in "4 or 8"."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def check_stages(section: Parallelism, n_layers: int) -> Refused:
    """Check that the schedule can run the pipeline stages, and that the model has enough layers for all stages.

    The first stage may have only the embedding, and the last stage only norm and head. Each of the remaining stages
    needs a layer.
    """
    pp = section.pipeline_parallel_degree
    if pp == 1:
        return
    n_stages = count_stages(section, n_layers)
    name = section.pipeline_parallel_schedule
    schedule = SCHEDULES[name]
    least = schedule.least_stages_per_rank
    per_rank, rest = divmod(n_stages, pp)
    most = schedule.most_stages_per_rank or per_rank
    if rest or not least <= per_rank <= most:
        why = f"it makes {n_stages} stages for {pp} pp ranks, but {name} needs {least} per rank"
        remedy = f"Remove the key to get {pp * least} stages, or choose a different schedule"
        yield "parallelism.pipeline_parallel_layers_per_stage", why, remedy
    elif n_layers < n_stages - 2:
        why = f"each of the {n_stages} pipeline stages ({pp} pp ranks, {name}) needs a layer, except the first and last"
        remedy = f"Use {n_stages - 2} layers or more, or fewer pp ranks"
        if section.pipeline_parallel_layers_per_stage:
            remedy = "Raise pipeline_parallel_layers_per_stage, or lower the two keys that end in stage_less_layers"
        yield "model.n_layers", why, remedy


def check_microbatches(config: Config, layout: Layout) -> Refused:
    """Check that the schedule can run the microbatches of a step."""
    training = config.training
    n_stages = len(layout.stages)
    why = explain_microbatches(config.parallelism, layout.n_microbatches, n_stages)
    if not why:
        return
    key = "training.local_batch_size"
    unit = 1
    n_rows = layout.microbatch_size
    if training.global_batch_size != -1:
        key = "training.global_batch_size"
        unit = training.local_batch_size // layout.microbatch_size
        n_rows *= layout.dp
    n_needed = find_n_microbatches(config.parallelism, layout.n_microbatches, n_stages, unit)
    why = f"it makes {layout.n_microbatches} microbatches, but {why}"
    remedy = f"Use {n_needed * n_rows}, or lower pipeline_parallel_microbatch_size, or use GPipe"
    yield key, why, remedy


def explain_microbatches(parallelism: Parallelism, n_microbatches: int, n_stages: int) -> str:
    """Return why the schedule cannot run this number of microbatches, or "" if the schedule can."""
    name = parallelism.pipeline_parallel_schedule
    n_rounds = max(1, n_microbatches // parallelism.pipeline_parallel_degree)
    if SCHEDULES[name].fills_pipeline and n_microbatches < n_stages:
        return f"{name} needs at least one microbatch per stage ({n_stages})"
    if SCHEDULES[name].in_rounds and n_microbatches % n_rounds:
        return f"{name} runs microbatches in {n_rounds} equal rounds"
    return ""


def find_n_microbatches(parallelism: Parallelism, least: int, n_stages: int, unit: int = 1) -> int:
    """Return the first of `least`, `least + unit`, `least + 2 * unit`, ... microbatches that the schedule can run."""
    number = least
    while explain_microbatches(parallelism, number, n_stages):
        number += unit
    return number


def count_pieces(parallelism: Parallelism) -> int:
    """Return the number of equal pieces that tp and cp split a sequence into."""
    pieces = parallelism.tensor_parallel_degree
    if parallelism.context_parallel_degree > 1:
        pieces *= 2 * parallelism.context_parallel_degree
    return pieces


def check_tp(config: Config, model_args: ModelArgs, world_size: int) -> Refused:
    """Check that tp divides the sizes of [model], and if so, that tp can split every module of the model."""
    tp = config.parallelism.tensor_parallel_degree
    sizes, rows = find_misfits(model_args, tp)
    if not (sizes or rows):
        return
    degrees = range(1, model_args.n_heads + 1)
    fitting = [n for n in degrees if world_size % n == 0 and not any(find_misfits(model_args, n))]
    allowed = " or ".join(map(str, fitting))
    if not sizes:
        row = rows[0]
        why = f"tp does not support the weight {row.weight} of {row.name} with tp_style {row.tp_style!r}"
        if row.tp_style not in SPLIT_DIMS:
            why += ". This weight must have one element, or one for each feature of a token or head"
        yield TP, why, f"Use {allowed}"
    for name in sizes:
        why = f"{TP} = {tp} does not divide it, but tp ranks need equal shards"
        if name == "n_kv_heads":
            why = f"{TP} = {tp} neither divides it nor is a multiple of it, but tp ranks need whole heads"
        remedy = f"Use {TP} = {allowed}"
        is_free = config.model.row is None  # loaded weights have a fixed number of embedding rows
        if name == "vocab_size" and is_free:
            n_rows = tp * ceil(model_args.vocab_size / tp)
            remedy += f", or set this key to {n_rows}: no token uses the added embedding rows"
        yield f"model.{name}", why, remedy


def find_misfits(model_args: ModelArgs, tp: int) -> tuple[list[str], list[ModuleRow]]:
    """Return the sizes of [model] and the modules that cannot be split over tp."""
    sizes = []
    rows = []
    for name in ("n_heads", "n_kv_heads", "ffn_dim", "vocab_size"):
        size = getattr(model_args, name)
        is_shared = name == "n_kv_heads" and tp % size == 0  # several ranks have the same head
        if size % tp and not is_shared:
            sizes.append(name)
    for row in list_different_rows(model_args):
        if row.tp_style in SPLIT_DIMS:
            fits = row.weight[SPLIT_DIMS[row.tp_style]] % tp == 0
        else:
            width = {"sequence": model_args.dim, "heads": model_args.head_dim}.get(row.tp_style)
            # A rank computes a norm over all `width` features, so the weight must have 1 or `width` elements.
            is_wider = row.kind == "norm" and width and row.weight not in ((1,), (width,))
            fits = tp == 1 or not is_wider
        if not fits:
            rows.append(row)
    return sizes, rows


def list_different_rows(model_args: ModelArgs) -> list[ModuleRow]:
    """List the distinct rows in the table of a model."""
    rows = list_end_modules(model_args) + list_block_modules(model_args)
    rows += list_block_modules(model_args, moe=True)
    return list(dict.fromkeys(rows))


def check_table(model_args: ModelArgs) -> Refused:
    """Find unsupported rows in the table of a model."""
    place = f"in models/{model_args.name}/table.py"
    ends = list_end_modules(model_args)
    for row in ends:  # all modules inside one child of the model are on the same pipeline stage
        stages = {other.end for other in ends if other.child == row.child}
        if stages not in ({"first"}, {"last"}):
            why = f'has end = {row.end!r}, but all modules of {row.child!r} must have the same end, "first" or "last"'
            remedy = f"Set the same end for all these modules {place}"
            yield "model.name", f"{row.name}, outside the blocks, {why}", remedy
    dense = ends + list_block_modules(model_args)
    for row in list_different_rows(model_args):
        is_outside = row in dense or row.child != "feed_forward"
        if row.kind in ("router", "experts") and is_outside:
            why = f"{row.name} is a {row.kind} outside the module feed_forward of a layer with experts"
            yield "model.name", why, f"Move it into feed_forward, or change its kind {place}"
        if row.tp_style not in TP_STYLES.get(row.kind, ()):
            why = f"{row.name} is a {row.kind} module with tp_style {row.tp_style!r}"
            yield "model.name", why, f"Use one of these: {TP_STYLES}, {place}"
        elif row.tp_style in ("colwise", "rowwise", "whole") and row.child == row.name:
            why = "is not inside another module, so tp would all-gather the input of its parent, the block or model"
            remedy = 'Use tp_style "sequence" (outside the blocks also "gathered"), or put the layer into a new module'
            yield "model.name", f"{row.name} {why}", f"{remedy} {place}"
        elif row.bias and (row.name == "output" or row.kind == "experts"):
            why = f"{row.name} has a bias, but the head and experts can have only a weight"
            yield "model.name", why, f"Leave out its bias {place}"
