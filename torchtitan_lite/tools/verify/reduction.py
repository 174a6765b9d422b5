"""Makes a real config small enough for a laptop and keeps what layouts go wrong over.

    degrees         those asked for where they fit the ranks, else smaller ones: degrees.py has the rule
    kept relations  query heads per key/value head; one or several key/value heads per tp rank; which sizes tp x
                    dp_shard divides; one or several stages per rank; even or uneven stages; embedding or head alone on
                    a stage; more, as many, or fewer microbatches than stages, and whether the stages divide them;
                    accumulation or none; whether FSDP shares experts or matrices of them, layers without experts
    kept as is      schedule, ZeRO stage, recompute, documents, ring, tied embeddings, rotary scaling, loss parallel
    replaced        what would hide a fault or cannot be had on a CPU: AdamW, bf16, float8, inductor, async TP

Whatever differs from the real config is listed, because it is not certified. No torch here: numbers only.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import gcd, lcm, prod

from torchtitan_lite.config.block import find_expert_dim
from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.config.flavors import FLAVORS, ModelArgs
from torchtitan_lite.config.layout import Layout, plan_degrees, plan_layout, resolve_model
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.reader import KEYS
from torchtitan_lite.config.schedule import check_microbatches, name_modules, plan_stages
from torchtitan_lite.config.schema import Config, Parallelism, get_value, with_value
from torchtitan_lite.tools.verify.degrees import AUTOMATIC, DEGREE_KEYS, EP_KEY, OF_EXPERTS, Degrees, choose_degrees

SIZES = ("dim", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size")  # of a model
EXPERT_SIZES = ("n_experts", "top_k", "expert_ffn_dim")  # of one with experts
LEAST_EXPERTS = 8
UNCHOSEN = 2  # experts at least that a token does not go to
# grouped_mm reads rows of 16 bytes each: dim and expert_ffn_dim are multiples of so many numbers.
ALIGNED = 8
STAGES_BY_RULE = {  # keys that name stages, at the values with which a rule cuts them
    "parallelism.pipeline_parallel_schedule_csv": "",
    "parallelism.pipeline_parallel_layers_per_stage": None,
    "parallelism.module_fqns_per_model_part": [],
}
REPLACED = {  # values under which a fault shows, and the CPU can follow
    "optimizer.name": "SGD",  # AdamW's first steps amplify rounding, and it hides gradients of the wrong scale
    "optimizer.implementation": "for-loop",  # computes the same; with tp, DTensor plans lists of parameters for seconds
    "optimizer.moments_dtype": "float32",  # SGD has none
    "optimizer.lr": 0.5,
    "optimizer.weight_decay": 0.0,  # with tp, DTensor plans each of its sums for 30 ms
    "lr_scheduler.warmup_steps": 0,  # a rate of nearly zero would show nothing
    "lr_scheduler.decay_ratio": 0.0,
    "training.max_norm": 0.1,  # so that gradients are clipped
    "training.mixed_precision_param": "float32",
    "model.converters": [],  # float8 rounds a thousand times coarser than what a fault must stand out from
    "parallelism.enable_async_tensor_parallel": False,  # inductor's, between GPUs
    "compile.backend": "aot_eager",  # traces, partitions and differentiates as inductor does, without its kernels
}


@dataclass(frozen=True)
class Change:
    """One value that verification replaces."""

    key: str
    real: object
    reduced: object

    def __str__(self) -> str:
        return f"{self.key:52} {self.real} -> {self.reduced}"


@dataclass(frozen=True)
class Reduction:
    """A real config made small."""

    real: Config  # as it was read: automatic values are not resolved
    degrees: Degrees
    config: Config  # of the wide trial, every size given
    args: ModelArgs  # of `config`, as `layout`
    layout: Layout
    changes: list[Change]  # in the order of schema.py


def reduce_config(config: Config, max_ranks: int) -> Reduction:
    """Return the small run that stands for a real one. Raises ConfigError where the real one could not start."""
    args = resolve_model(config.model)
    real = plan_real_layout(config, args)
    chosen = choose_degrees(config.parallelism, max_ranks)
    degrees = chosen.tried
    if prod(degrees.values()) > max_ranks:
        path = config.parallelism.pipeline_parallel_schedule_csv
        why = f"a schedule file cannot be made smaller: its {real.pp} pp ranks are more than the {max_ranks} there are"
        remedy = "Give verify a larger --ranks, or a file for fewer ranks"
        raise ConfigError([Problem("parallelism.pipeline_parallel_schedule_csv", path, why, remedy)])

    of_mesh = {DEGREE_KEYS[dim]: degree for dim, degree in degrees.items()}
    small = override(config, {**REPLACED, **of_mesh, EP_KEY: chosen.ep})
    small = override(small, reduce_stages(config.parallelism, args.n_layers, real, degrees["pp"]))
    sizes = reduce_sizes(args, real, degrees, n_shards_known=chosen.asked["dp_shard"] != AUTOMATIC)
    sizes |= reduce_experts(args, real, degrees, chosen.ep, sizes["dim"])
    small = keep_moe_layers(small, args)
    small = override(small, {name_size(name): size for name, size in sizes.items()})
    option = config.activation_checkpoint.selective_ac_option
    if option.isdecimal() and int(option) > 2:
        small = override(small, {"activation_checkpoint.selective_ac_option": "2"})
    # small batches are to have several chunks too; 0, no chunks, stays
    small = override(small, {"training.loss_chunk_tokens": 24 if config.training.loss_chunk_tokens else 0})
    small = override(small, reduce_batch(small, config, real, degrees, sizes))
    small_args = resolve_model(small.model)
    layout = plan_layout(small, small_args, prod(degrees.values()))
    return Reduction(config, chosen, small, small_args, layout, list_changes(config, small))


def plan_real_layout(config: Config, args: ModelArgs) -> Layout:
    """Return the layout that was asked for; an automatic dp_shard has as many ranks as ep needs. Raises ConfigError."""
    degrees = plan_degrees(config.parallelism, 1)
    ep = config.parallelism.expert_parallel_degree
    is_automatic = config.parallelism.data_parallel_shard_degree == AUTOMATIC
    n_more = ep // gcd(ep, degrees["cp"] * degrees["tp"]) if args.moe and is_automatic else 1
    return plan_layout(config, args, prod(degrees.values()) * n_more)


def override(config: Config, overrides: dict[str, object]) -> Config:
    """Return the config with some keys ("section.key") set. "flavor.NUMBER" replaces a number of the flavor's row."""
    for key, value in overrides.items():
        if key.startswith("flavor."):
            row = change_row(config.model.row or FLAVORS[config.model.flavor], key.removeprefix("flavor."), value)
            key, value = "model.row", row
        config = with_value(config, key, value)
    return config


def change_row(row: ModelArgs, name: str, value: object) -> ModelArgs:
    """Return the model with another value of a number that has no key; `name` may be a field of MoEArgs."""
    if hasattr(row, name):
        return replace(row, **{name: value})
    return replace(row, moe=replace(row.moe, **{name: value}))


def name_size(name: str) -> str:
    """Return the key of a size for `override`."""
    return f"flavor.{name}" if name in EXPERT_SIZES else f"model.{name}"


def list_changes(config: Config, small: Config) -> list[Change]:
    """Return every key whose value differs; for sizes that a flavor gives, that size."""
    args, small_args = (resolve_model(each.model) for each in (config, small))
    args, small_args = (vars(each) | (vars(each.moe) if each.moe else {}) for each in (args, small_args))
    pairs = {key: (get_value(config, key), get_value(small, key)) for key in KEYS}
    for name in args.keys() - {"name", "moe"}:
        pairs[f"model.{name}" if f"model.{name}" in KEYS else f"flavor.{name}"] = (args[name], small_args[name])
    if config.training.mixed_precision_param == "auto":
        pairs["training.mixed_precision_param"] = ("auto (bfloat16 on CUDA)", "float32")
    if not config.compile.enable:
        del pairs["compile.backend"]
    return [Change(key, *values) for key, values in pairs.items() if values[0] != values[1]]


# ---------------------------------------------------------------- sizes


def reduce_sizes(args: ModelArgs, real: Layout, degrees: dict[str, int], *, n_shards_known: bool) -> dict[str, int]:
    """Return sizes of a model of about dim 64 to 128."""
    tp = degrees["tp"]
    n_kv_heads = tp * min(2, args.n_kv_heads // real.tp)
    n_heads = n_kv_heads * (args.n_heads // args.n_kv_heads)
    head_dim = min(8 if n_heads <= 32 else 4, args.head_dim)
    dim = n_heads * head_dim
    if args.dim != args.n_heads * args.head_dim:
        dim += 16  # so that what mistakes one for the other fails here too
    n_shards = degrees["dp_shard"] * degrees["cp"]
    split = (real.tp * real.dp_shard * real.cp, tp * n_shards) if n_shards_known and n_shards > 1 else (1, 1)
    return {
        "dim": dim,
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "head_dim": head_dim,
        "ffn_dim": reduce_size(args.ffn_dim, dim * 3 // 2, tp, split),
        "vocab_size": reduce_size(args.vocab_size, 256, tp, split),
    }


def reduce_experts(args: ModelArgs, real: Layout, degrees: dict[str, int], ep: int, dim: int) -> dict[str, int]:
    """Return the sizes of an MoE layer: about LEAST_EXPERTS experts, and as many for each token as before, if not all.

    FSDP shares whole experts exactly where the real run does, else a part of each matrix. Nothing without experts.
    """
    moe = args.moe
    if moe is None:
        return {}
    n_ranks = prod(degrees[dim] for dim in OF_EXPERTS)
    efsdp = n_ranks // ep
    top_k = min(moe.top_k, LEAST_EXPERTS)
    wanted = min(moe.n_experts, max(LEAST_EXPERTS, top_k + UNCHOSEN))
    shares_experts = find_expert_dim(args, real.ep, real.efsdp) == 0 or efsdp == 1 or dim % efsdp > 0
    candidates = range(round_up(wanted, ep), wanted + 2 * n_ranks + 1, ep)
    fitting = (n for n in candidates if (n // ep % efsdp == 0) == shares_experts)
    return {
        "n_experts": next(fitting),
        "top_k": top_k,
        "expert_ffn_dim": round_up(min(moe.expert_ffn_dim, dim // 2), lcm(ALIGNED, efsdp, degrees["tp"])),
    }


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def keep_moe_layers(small: Config, args: ModelArgs) -> Config:
    """Return the config with at least one layer of experts, and of two or more one without, if the real model has."""
    if args.moe is None:
        return small
    several = small.model.n_layers > 1
    return override(
        small,
        {
            "flavor.n_first_dense_layers": min(args.moe.n_first_dense_layers, 1) * several,
            "flavor.moe_every": min(args.moe.moe_every, 2) if several else 1,
        },
    )


def reduce_size(real: int, wanted: int, tp: int, split: tuple[int, int]) -> int:
    """Return about `wanted`: a multiple of tp, and of the second of `split` exactly where `real` is of the first."""
    real_split, small_split = split
    for size in range(min(real, wanted), wanted + 2 * tp * small_split):
        same_relation = (real % real_split == 0) == (size % small_split == 0)
        if size % tp == 0 and (same_relation or small_split == tp):
            return size
    raise AssertionError("a multiple of tp lies within one tp, with either relation within two splits")


# ---------------------------------------------------------------- stages and batch


def reduce_stages(section: Parallelism, n_layers: int, real: Layout, pp: int) -> dict[str, object]:
    """Return layers and stages: as many stages per rank as before, two at most if possible, even or uneven."""
    if pp == 1:
        return {"model.n_layers": min(4, n_layers), **STAGES_BY_RULE}
    n_real_stages = len(real.stages)
    if section.pipeline_parallel_schedule_csv:
        n_stages = n_real_stages
    else:
        least = SCHEDULES[section.pipeline_parallel_schedule].least_stages_per_rank
        n_stages = pp * max(least, min(2, n_real_stages // real.pp))
    counts = count_layers(real.stages)
    if section.module_fqns_per_model_part or 0 in counts:
        return list_reduced_stages(counts, n_stages)

    per_stage = 2 if n_stages > 2 else 3  # what is left of the fewest is a layer for each stage
    first = min(1, section.pipeline_parallel_first_stage_less_layers)
    last = min(1, section.pipeline_parallel_last_stage_less_layers)
    weights = section.pipeline_parallel_first_stage_less_layers + section.pipeline_parallel_last_stage_less_layers
    is_uneven = (n_layers + weights) % n_real_stages != 0
    reduced = {
        "model.n_layers": per_stage * n_stages - first - last - is_uneven,
        "parallelism.pipeline_parallel_first_stage_less_layers": first,
        "parallelism.pipeline_parallel_last_stage_less_layers": last,
    }
    if section.pipeline_parallel_layers_per_stage is not None:
        reduced["parallelism.pipeline_parallel_layers_per_stage"] = per_stage
    return reduced


def count_layers(stages: Iterable[Iterable[str]]) -> list[int]:
    """Return the number of layers of each stage."""
    return [sum(fqn.startswith("layers.") for fqn in stage) for stage in stages]


def list_reduced_stages(counts: list[int], n_stages: int) -> dict[str, object]:
    """Return explicit lists: the first stages and the last one, with one layer each, or two if it has more.

    `counts`: layers of each real stage. A stage without a layer stays so; of two such stages alone, the first one does.
    """
    kept = [*counts[: n_stages - 1], counts[-1]]
    fewest = min(filter(None, counts))
    sizes = [min(count, 1 if count == fewest else 2) for count in kept]
    if not any(sizes):
        sizes[-1] = 1
    stages, start = [], 0
    for index, size in enumerate(sizes):
        layers = range(start, start + size)
        stages.append(list(name_modules(layers, first=index == 0, last=index == n_stages - 1)))
        start += size
    return {"model.n_layers": start, "parallelism.module_fqns_per_model_part": stages}


def reduce_batch(
    small: Config, config: Config, real: Layout, degrees: dict[str, int], sizes: dict[str, int]
) -> dict[str, object]:
    """Return rows and microbatches in the same relation to the stages, and a short sequence that still divides."""
    accumulates = real.global_batch_size > config.training.local_batch_size * real.dp
    if degrees["pp"] == 1:
        n_rows, n_microbatches = 2, 3 if accumulates else 1
    else:
        n_rows = min(2, config.parallelism.pipeline_parallel_microbatch_size)
        stages, _ = plan_stages(small.parallelism, small.model.n_layers)
        n_microbatches = reduce_microbatches(small.parallelism, real, len(stages))
    batch = give_batch(degrees, n_rows, n_microbatches, reduce_sequence(degrees, sizes))
    return batch | ({"training.local_batch_size": n_rows} if accumulates else {})


def give_batch(degrees: dict[str, int], n_rows: int, n_microbatches: int, seq_len: int) -> dict[str, object]:
    """Return the keys of a batch with `n_rows` to a microbatch."""
    return {
        "training.local_batch_size": n_rows * n_microbatches,
        "training.global_batch_size": n_rows * n_microbatches * degrees["dp_replicate"] * degrees["dp_shard"],
        "training.seq_len": seq_len,
        "parallelism.pipeline_parallel_microbatch_size": n_rows if degrees["pp"] > 1 else 1,
    }


def reduce_microbatches(section: Parallelism, real: Layout, n_stages: int) -> int:
    """Return as many as there are stages, more, fewer, or a number that they do not divide: as in the real run."""
    if section.pipeline_parallel_schedule_csv:
        return real.n_microbatches
    n_real_stages = len(real.stages)
    if real.n_microbatches < n_real_stages:
        wanted = n_stages - 1
    elif real.n_microbatches == n_real_stages:
        wanted = n_stages
    else:
        wanted = 2 * n_stages if real.n_microbatches % n_real_stages == 0 else n_stages + 1
    candidates = [wanted, n_stages, 2 * n_stages]
    return next(n for n in candidates if not check_microbatches(section, n, n, n_stages))


def reduce_sequence(degrees: dict[str, int], sizes: dict[str, int], least: int = 40) -> int:
    """Return a length that no other size of the model has, so that a sequence dim is known by it."""
    pieces = count_pieces(degrees)
    return next(n for n in range(pieces, (100 + least) * pieces, pieces) if n >= least and n not in list_widths(sizes))


def count_pieces(degrees: dict[str, int]) -> int:
    """Return into how many equal pieces cp and tp cut a sequence."""
    return (2 * degrees["cp"] if degrees["cp"] > 1 else 1) * degrees["tp"]


def list_widths(sizes: dict[str, int]) -> list[int]:
    """Return the sizes that a dim of some module's output has."""
    return [*sizes.values(), sizes["n_heads"] * sizes["head_dim"], sizes["n_kv_heads"] * sizes["head_dim"]]
