"""Three more small runs beside the wide one, for what is wrong only beyond a depth, a length or a size.

                layers        sequence                     sizes                           schedule and stages
    wide        1 to 3 each   about 40                     dim about 64                    as asked
    deep        12 or more    about 24                     dim 16                          as asked, several: uneven
    long        1 or 2        the real one, 512 to 2,048   dim about 50                    as asked
    real width  1             about 16                     real, if memory and time allow  1F1B, one stage a rank

A pipeline with more stages needs more layers. Each run has the wide one's degrees and options, but that only the deep
one compiles, because a compiler needs as long as all the rest. No torch here: numbers only.
"""

from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from torchtitan_lite.config.block import FLOAT8_BLOCK, SKIP_SMALL, count_parameters
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import plan_layout, resolve_model
from torchtitan_lite.config.machine import measure_cpu_memory
from torchtitan_lite.config.schedule import check_microbatches, name_modules, plan_stages
from torchtitan_lite.config.schema import Config, Parallelism
from torchtitan_lite.tools.verify.reduction import (
    EXPERT_SIZES,
    SIZES,
    STAGES_BY_RULE,
    Reduction,
    count_layers,
    count_pieces,
    give_batch,
    keep_moe_layers,
    list_widths,
    name_size,
    override,
    plan_real_layout,
    reduce_experts,
    reduce_sequence,
    reduce_size,
    round_up,
)

LEAST_LAYERS = 12  # so that some numbers have two digits: as text, 10 comes before 2
LEAST_TOKENS, MOST_TOKENS = 512, 2048  # of a sequence of the long run
FAR_POSITION = 8192  # the first position of the long run, unless seq_len or original_length is larger
N_CHUNKS = 12  # of each row's loss in the long run
MOST_PARAMETERS = 48 * 10**6  # of the run of real width: about five seconds on two cores
# Of it: halved in this order, to these at least.
LEAST_SIZES = {"vocab_size": 2000, "ffn_dim": 1000, "expert_ffn_dim": 500, "dim": 500}


@dataclass(frozen=True)
class Method:
    """How a small run is compared with one process. Both sides get the same one."""

    updates: bool = True  # two steps, of which the first is clipped and the second is not; else one without an update
    farthest_position: int = 0  # of the first token of row 0; of further rows it is nearer to 0, in equal distances
    tokens_per_document: int = 8  # on average, of document attention
    levels_weights: bool = True  # initial weights of experts are larger, of the embedding smaller: all count alike
    repeats_weights: bool = False  # large weights are a block of random numbers over and over, which is drawn faster

    @property
    def n_steps(self) -> int:
        return 2 if self.updates else 1


WIDE = Method()
AS_TRAINED = Method(levels_weights=False)


@dataclass(frozen=True)
class SmallRun:
    """One small run."""

    config: Config  # every size given
    method: Method
    subject: str  # what was run, and what of it is real


# ---------------------------------------------------------------- the three


def deepen(reduction: Reduction) -> SmallRun:
    """Return a run of many narrow layers. Several stages of a rank are unequally long."""
    degrees, args = reduction.layout.degrees, resolve_model(reduction.real.model)
    sizes = choose_sizes(args, degrees["tp"], head_dim=4, dim=16, ffn_dim=24, vocab_size=64)
    sizes |= choose_expert_sizes(reduction, sizes["dim"])
    small = plan_own_stages(reduction.config)
    small = override(small, {"model.n_layers": choose_depth(small.parallelism)})
    small = resize(small, degrees, sizes, n_rows=2, n_microbatches=1, seq_len=reduce_sequence(degrees, sizes, 24))
    counts = count_layers(plan_stages(small.parallelism, small.model.n_layers)[0])
    stages = f", {', '.join(map(str, counts))} a stage" if len(counts) > 1 else ""
    return describe_run(reduction, small, Method(updates=False), f"{sum(counts)} layers of dim {sizes['dim']}{stages}")


def lengthen(reduction: Reduction) -> SmallRun:
    """Return a run of the real sequence length, within LEAST_TOKENS and MOST_TOKENS, in one layer or two."""
    degrees, real = reduction.layout.degrees, reduction.real
    sizes = choose_sizes(resolve_model(real.model), degrees["tp"], head_dim=12, vocab_size=100)
    sizes |= choose_expert_sizes(reduction, sizes["dim"])
    pieces, widths = count_pieces(degrees), list_widths(sizes)
    real_length = real.training.seq_len
    wanted = max(LEAST_TOKENS, min(real_length, MOST_TOKENS))
    seq_len = next(length for length in count(-(-wanted // pieces) * pieces, pieces) if length not in widths)
    small = override(plan_own_stages(reduction.config), {"compile.enable": False})
    n_layers = count_least_layers(small.parallelism, at_least=min(2, degrees["pp"]))
    chunk = -(-seq_len // degrees["cp"] // N_CHUNKS) if real.training.loss_chunk_tokens else 0
    small = override(small, {"model.n_layers": n_layers, "training.loss_chunk_tokens": chunk})
    small = resize(small, degrees, sizes, n_rows=1, n_microbatches=3, seq_len=seq_len)
    # Beyond the wide run's rows, where the stretching of rotary wavelengths ends.
    scaling = resolve_model(real.model).rope_scaling
    farthest = max(FAR_POSITION, real_length, scaling.original_length if scaling else 0)
    method = Method(updates=False, farthest_position=farthest, tokens_per_document=4)
    tokens = f"{seq_len:,} tokens" if seq_len >= real_length else f"{seq_len:,} of {real_length:,} tokens"
    layers = f"{n_layers} layer{'s' * (n_layers > 1)} of dim {sizes['dim']}"
    subject = f"{tokens}, at positions below {farthest + seq_len:,}, {layers}"
    return describe_run(reduction, small, method, subject)


def keep_width(reduction: Reduction, memory_bytes: int | None = None) -> SmallRun:
    """Return a run of the real sizes in few layers, under 1F1B. What does not fit is halved: LEAST_SIZES.

    `memory_bytes`: what the run and its reference may take of this machine's memory; by default, half of what is free.
    """
    degrees, real = reduction.layout.degrees, resolve_model(reduction.real.model)
    small = override(plan_own_stages(reduction.config), {"compile.enable": False})
    if degrees["pp"] > 1:
        small = override(small, {**STAGES_BY_RULE, "parallelism.pipeline_parallel_schedule": "1F1B"})
    n_layers = count_least_layers(small.parallelism, at_least=1)
    memory_bytes = memory_bytes or measure_available_memory() // 2
    # The reference: weights and gradients in memory, and in its file. Each data-parallel and cp rank: both, gathered.
    bytes_each = 16 + 16 * degrees["dp_replicate"] * degrees["dp_shard"] * degrees["cp"]
    most = min(memory_bytes // bytes_each, MOST_PARAMETERS)
    args, unit = replace(real, n_layers=n_layers), degrees["tp"]
    if real.moe:
        unit *= reduction.layout.efsdp
        experts = {**choose_expert_sizes(reduction, real.dim), "expert_ffn_dim": real.moe.expert_ffn_dim}
        args = replace(args, moe=replace(real.moe, n_first_dense_layers=0, moe_every=1, **experts))
    args = fit_sizes(args, unit, most)
    sizes = {name: find_size(args, name) for name in (*SIZES, *(EXPERT_SIZES if real.moe else ()))}
    small = override(small, {"model.n_layers": n_layers})
    small = resize(small, degrees, sizes, n_rows=1, n_microbatches=1, seq_len=reduce_sequence(degrees, sizes, 16))
    subject = [f"{n_layers} layer{'s' * (n_layers > 1)}, {count_parameters(args):,} parameters"]
    words = {"dim": "dim", "ffn_dim": "ffn_dim", "vocab_size": "vocabulary"}
    words |= {"n_experts": "experts", "expert_ffn_dim": "expert_ffn_dim"} if real.moe else {}
    for name, word in words.items():
        size, real_size = find_size(args, name), find_size(real, name)
        subject.append(f"{word} {size:,} real" if size == real_size else f"{word} {size:,} of {real_size:,}")
    subject += ["1F1B, one stage a rank"] * (degrees["pp"] > 1)
    return describe_run(reduction, small, Method(updates=False, repeats_weights=True), ", ".join(subject))


def describe_run(reduction: Reduction, small: Config, method: Method, subject: str) -> SmallRun:
    small = keep_moe_layers(small, resolve_model(reduction.real.model))
    plan_layout(small, resolve_model(small.model), reduction.layout.world_size)  # so that no rank raises ConfigError
    if small.compile.enable != reduction.real.compile.enable:
        subject += ", not compiled"
    return SmallRun(small, method, subject)


# ---------------------------------------------------------------- fewer layers, and sizes for float8


def shrink_stages(reduction: Reduction) -> dict[str, object]:
    """Return keys of a smaller run: one layer a stage, or two layers without stages, and few microbatches."""
    config, layout = reduction.config, reduction.layout
    if layout.pp == 1:
        return {"model.n_layers": min(2, reduction.args.n_layers)}
    n = len(layout.stages)
    stages = [list(name_modules(range(i, i + 1), first=i == 0, last=i == n - 1)) for i in range(n)]
    keys = {"model.n_layers": n, "parallelism.module_fqns_per_model_part": stages}
    keys["parallelism.pipeline_parallel_layers_per_stage"] = None
    if layout.n_microbatches > n and not check_microbatches(config.parallelism, n, n, n):
        keys["training.local_batch_size"] = n * layout.microbatch_size
        keys["training.global_batch_size"] = n * layout.microbatch_size * layout.dp
    return keys


def choose_float8_sizes(reduction: Reduction) -> dict[str, object]:
    """Return sizes like those of the wide trial, in blocks that every tp rank can compute in float8."""
    args, layout = reduction.args, reduction.layout
    width = FLOAT8_BLOCK * layout.tp
    tokens = FLOAT8_BLOCK * layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
    filters = reduction.config.quantize.linear.float8.filter_fqns
    return {
        "quantize.linear.float8.filter_fqns": [fqn for fqn in filters if fqn != SKIP_SMALL],
        "model.head_dim": FLOAT8_BLOCK,
        "model.dim": round_up(args.dim * FLOAT8_BLOCK // args.head_dim, width),
        "model.ffn_dim": round_up(args.ffn_dim, width),
        "training.seq_len": round_up(reduction.config.training.seq_len, tokens),
    }


# ---------------------------------------------------------------- sizes


def choose_sizes(
    args: ModelArgs, tp: int, *, head_dim: int, vocab_size: int, dim: int | None = None, ffn_dim: int | None = None
) -> dict[str, int]:
    """Return about these sizes, so that tp divides them; `dim` is that of all heads unless given, `ffn_dim` 3/2 of it.

    There is one key/value head for each tp rank, with two query heads where the real one has more.
    """
    n_heads = tp * min(2, args.n_heads // args.n_kv_heads)
    head_dim = min(head_dim, args.head_dim)
    dim = dim or n_heads * head_dim
    return {
        "dim": dim,
        "n_heads": n_heads,
        "n_kv_heads": tp,
        "head_dim": head_dim,
        "ffn_dim": reduce_size(args.ffn_dim, ffn_dim or dim * 3 // 2, tp, (1, 1)),
        "vocab_size": reduce_size(args.vocab_size, vocab_size, tp, (1, 1)),
    }


def choose_expert_sizes(reduction: Reduction, dim: int) -> dict[str, int]:
    """Return the sizes of an MoE layer in a model of this width; none without experts."""
    args, layout = resolve_model(reduction.real.model), reduction.layout
    real = plan_real_layout(reduction.real, args)
    return reduce_experts(args, real, layout.degrees, layout.ep, dim)


def find_size(args: ModelArgs, name: str) -> int:
    return getattr(args.moe if name in EXPERT_SIZES else args, name)


def fit_sizes(args: ModelArgs, unit: int, most_parameters: int) -> ModelArgs:
    """Return the model itself, or a smaller one of `most_parameters`, or of LEAST_SIZES. `unit` divides each size."""
    for name, least in LEAST_SIZES.items():
        while count_parameters(args) > most_parameters and (args.moe or name not in EXPERT_SIZES):
            half, rest = divmod(find_size(args, name), 2)
            if rest or half % unit or half < least:
                break
            size = {name: half}
            args = replace(args, **({"moe": replace(args.moe, **size)} if name in EXPERT_SIZES else size))
    return args


def measure_available_memory(file: Path = Path("/proc/meminfo")) -> int:
    """Return the bytes that Linux says are free or can be freed; elsewhere all of the machine's memory."""
    limit = measure_cpu_memory()
    try:
        lines = dict(line.split(":", 1) for line in file.read_text().splitlines())
        return min(limit, 1024 * int(lines["MemAvailable"].split()[0]))
    except (OSError, KeyError, ValueError):
        return limit


# ---------------------------------------------------------------- stages and batch


def plan_own_stages(config: Config) -> Config:
    """Return the config with stages by rule; their number per rank stays."""
    section = config.parallelism
    first, last = section.pipeline_parallel_first_stage_less_layers, section.pipeline_parallel_last_stage_less_layers
    overrides = {
        **STAGES_BY_RULE,
        "parallelism.pipeline_parallel_schedule_csv": section.pipeline_parallel_schedule_csv,
        "parallelism.pipeline_parallel_first_stage_less_layers": min(1, first),
        "parallelism.pipeline_parallel_last_stage_less_layers": min(1, last),
    }
    return override(config, overrides)


def choose_depth(section: Parallelism) -> int:
    """Return LEAST_LAYERS or more: layers 9 and 10 share a stage, and several stages of a rank are uneven."""
    n_stages = len(plan_stages(section, 2**14)[0])
    several = n_stages > section.pipeline_parallel_degree
    depths = range(max(LEAST_LAYERS, n_stages), LEAST_LAYERS + 4 * n_stages)
    for n_layers in depths:
        stages, _ = plan_stages(section, n_layers)
        is_uneven = len(set(count_layers(stages))) > 1
        if any({"layers.9", "layers.10"} <= set(stage) for stage in stages) and (is_uneven or not several):
            return n_layers
    return depths[-1]


def count_least_layers(section: Parallelism, at_least: int) -> int:
    """Return the fewest layers. The first and the last stage need none."""
    return max(at_least, len(plan_stages(section, 2**14)[0]) - 2)


def resize(
    small: Config, degrees: dict[str, int], sizes: dict[str, int], *, n_rows: int, n_microbatches: int, seq_len: int
) -> Config:
    """Return the config with these sizes; `n_rows` to a microbatch, and under pp `n_microbatches` or a few more."""
    small = override(small, {name_size(name): size for name, size in sizes.items()})
    section = small.parallelism
    if degrees["pp"] == 1:
        n_microbatches = 1
    elif section.pipeline_parallel_schedule_csv:  # the file is for one number of microbatches, that of `small`
        dp = degrees["dp_replicate"] * degrees["dp_shard"]
        n_microbatches = small.training.global_batch_size // dp // section.pipeline_parallel_microbatch_size
    else:
        n_stages = len(plan_stages(section, small.model.n_layers)[0])
        possible = (n for n in range(n_microbatches, 2**16) if not check_microbatches(section, n, n, n_stages))
        n_microbatches = next(possible)
    return override(small, give_batch(degrees, n_rows, n_microbatches, seq_len))
