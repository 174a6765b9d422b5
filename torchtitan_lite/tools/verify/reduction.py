"""Reduce a real config to laptop size, and keep the relations between sizes on which faults of layouts depend.

    degrees         exactly as in the config (degrees.py)
    kept relations  query heads per key/value head; one or several key/value heads per tp rank; which sizes tp x
                    dp_shard divides; one or several stages per rank; even or uneven stages; embedding or head alone on
                    a stage; more, fewer, or the same number of microbatches as stages, and whether it is a multiple;
                    gradient accumulation; whether FSDP shards the number of experts or their matrices; dense layers
    kept as is      optimizer and learning rates, schedule, ZeRO stage, recompute, documents, ring, tied embeddings,
                    rotary scaling, loss parallel
    replaced        sizes, and features that a CPU does not have

The certificate lists every difference from the real config, because these are not certified. No torch here.
"""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import lcm, prod

from torchtitan_lite.config.block import find_expert_dim
from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.config.layout import Layout, find_row, plan_layout, resolve_model
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.config.reader import KEYS
from torchtitan_lite.config.schedule import check_microbatches, name_modules, plan_stages
from torchtitan_lite.config.schema import Config, Parallelism, get_value, with_value
from torchtitan_lite.tools.verify.degrees import (
    AUTOMATIC,
    DEGREE_KEYS,
    OF_EXPERTS,
    choose_degrees,
    count_ranks,
    list_smaller,
    read_degrees,
)

EXPERT_SIZES = ("n_experts", "top_k", "expert_ffn_dim")  # sizes of an MoE model
N_EXPERTS = 8
UNCHOSEN = 2  # minimum number of experts that a token does not choose
ALIGNED = (
    8  # grouped_mm needs rows aligned to 16 bytes: dim and expert_ffn_dim are multiples of this
)
STAGES_BY_RULE = {  # values of the keys that define stages, with which stages follow from the schedule
    "parallelism.pipeline_parallel_layers_per_stage": None,
    "parallelism.module_fqns_per_model_part": [],
}
REPLACED = {
    "training.mixed_precision_param": "float32",  # the precision of the run has a separate trial
    "model.converters": [],  # so has float8
    "parallelism.enable_async_tensor_parallel": False,  # needs inductor and GPUs
    "compile.backend": "aot_eager",  # traces and differentiates like inductor, but generates no kernels
}


@dataclass(frozen=True)
class Reduction:
    """A real config and its reduced version."""

    real: Config  # as it was read: "auto" values are not resolved
    config: Config  # config of the wide trial
    layout: Layout  # of `config`
    changes: dict[
        str, tuple[object, object]
    ]  # key -> real and reduced value, in the order of schema.py


def reduce_config(config: Config, max_ranks: int) -> Reduction:
    """Reduce a config. Raises ConfigError if the real run cannot start or needs more ranks."""
    n_ranks, args = count_ranks(config.parallelism), resolve_model(config.model)
    real = plan_layout(config, args, n_ranks)
    if n_ranks > max_ranks:
        raise ConfigError([refuse_many_ranks(config, max_ranks)])
    degrees = choose_degrees(config.parallelism, max_ranks)
    small = override(config, {**REPLACED, DEGREE_KEYS["dp_shard"]: degrees["dp_shard"]})
    total = config.lr_scheduler.total_steps or config.training.steps
    small = override(small, {"lr_scheduler.total_steps": total})
    small = override(small, reduce_stages(config.parallelism, args.n_layers, real))
    is_known = config.parallelism.data_parallel_shard_degree != AUTOMATIC
    sizes = reduce_sizes(
        args, degrees, keeps_split=is_known and degrees["dp_shard"] * degrees["cp"] > 1
    )
    sizes |= reduce_experts(args, real.ep, degrees, sizes["dim"], N_EXPERTS)
    small = give_sizes(keep_moe_layers(small, args), sizes)
    option = config.activation_checkpoint.selective_ac_option
    if option.isdecimal() and int(option) > 2:
        small = override(small, {"activation_checkpoint.selective_ac_option": "2"})
    # a small batch needs a smaller chunk to have several; 0 means no chunks and stays
    small = override(
        small, {"training.loss_chunk_tokens": 24 if config.training.loss_chunk_tokens else 0}
    )
    small = override(small, reduce_batch(small, config, real, degrees, sizes))
    layout = plan_layout(small, resolve_model(small.model), prod(degrees.values()))
    return Reduction(config, small, layout, list_changes(config, small))


def refuse_many_ranks(config: Config, max_ranks: int) -> Problem:
    """Return the problem of a config that needs more ranks, with the command for the largest layout that can run."""
    asked, remedy = read_degrees(config.parallelism), "Give a larger --ranks"
    dims = {dim: str(n) if n > 1 else " (automatic)" for dim, n in asked.items() if n != 1}
    layout = " x ".join(f"{dim}{degree}" for dim, degree in dims.items())
    why = f"{layout} needs {count_ranks(config.parallelism)} ranks, but verify has {max_ranks}"
    for smaller in list_smaller(config, max_ranks):
        try:
            reduce_config(smaller, max_ranks)
        except ConfigError:
            continue
        changed = {
            DEGREE_KEYS[dim]: n
            for dim, n in read_degrees(smaller.parallelism).items()
            if n != asked[dim]
        }
        keys = shlex.join(f"--{key}={n}" for key, n in changed.items())
        command = (
            f"verify --config={shlex.quote(config.job.config_file)} --ranks={max_ranks} {keys}"
        )
        remedy = f"Verify the largest layout that fits: python -m torchtitan_lite {command}"
        break
    return Problem("--ranks", max_ranks, why, remedy)


def override(config: Config, overrides: dict[str, object]) -> Config:
    """Return the config with some keys ("section.key") set. "flavor.NAME" is a field of its row, or of its `moe`."""
    for key, value in overrides.items():
        if key.startswith("flavor."):
            row, name = find_row(config.model), key.removeprefix("flavor.")
            new = (
                {name: value} if hasattr(row, name) else {"moe": replace(row.moe, **{name: value})}
            )
            key, value = "model.row", replace(row, **new)
        config = with_value(config, key, value)
    return config


def give_sizes(config: Config, sizes: dict[str, int]) -> Config:
    """Return the config with these sizes of the model and its experts."""
    return override(
        config,
        {f"flavor.{n}" if n in EXPERT_SIZES else f"model.{n}": size for n, size in sizes.items()},
    )


def list_changes(config: Config, small: Config) -> dict[str, tuple[object, object]]:
    """Return every key whose value differs, with both values. Sizes that a flavor sets are resolved."""
    args, small_args = (resolve_model(each.model) for each in (config, small))
    args, small_args = (
        vars(each) | (vars(each.moe) if each.moe else {}) for each in (args, small_args)
    )
    pairs = {key: (get_value(config, key), get_value(small, key)) for key in KEYS}
    for name in args.keys() - {"name", "moe"}:
        pairs[f"model.{name}" if f"model.{name}" in KEYS else name] = (args[name], small_args[name])
    if not config.compile.enable:
        del pairs["compile.backend"]
    open_keys = (
        "parallelism.data_parallel_shard_degree",
        "lr_scheduler.total_steps",
    )  # resolved, not replaced
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1] and key not in open_keys}


# ---------------------------------------------------------------- sizes


def reduce_sizes(args: ModelArgs, degrees: dict[str, int], *, keeps_split: bool) -> dict[str, int]:
    """Return model sizes, with a dim of about 64 to 128. `keeps_split`: tp x dp_shard x cp divides the same sizes."""
    tp = degrees["tp"]
    n_kv_heads = tp * min(2, args.n_kv_heads // tp)
    n_heads = n_kv_heads * (args.n_heads // args.n_kv_heads)
    head_dim = min(8 if n_heads <= 32 else 4, args.head_dim)
    dim = n_heads * head_dim
    if args.dim != args.n_heads * args.head_dim:
        dim += 16  # keep them different, so that code that confuses the two fails
    split = tp * degrees["dp_shard"] * degrees["cp"] if keeps_split else 1
    return {
        "dim": dim,
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "head_dim": head_dim,
        "ffn_dim": reduce_size(args.ffn_dim, dim * 3 // 2, tp, split),
        "vocab_size": reduce_size(args.vocab_size, 256, tp, split),
    }


def reduce_size(real: int, wanted: int, tp: int, split: int) -> int:
    """Return a size of about `wanted` that is a multiple of tp, and a multiple of `split` only if `real` is."""
    sizes = (size for size in range(min(real, wanted), wanted + 2 * tp * split) if size % tp == 0)
    return next(size for size in sizes if split <= tp or (real % split == 0) == (size % split == 0))


def reduce_experts(
    args: ModelArgs, ep: int, degrees: dict[str, int], dim: int, n_wanted: int
) -> dict[str, int]:
    """Return the sizes of an MoE: about `n_wanted` experts, and top_k of the real model, at most N_EXPERTS.

    FSDP shards whole experts if it does so in the real run, and otherwise matrices. Empty for a dense model.
    """
    moe = args.moe
    if moe is None:
        return {}
    n_ranks = prod(degrees[dim] for dim in OF_EXPERTS)
    efsdp = n_ranks // ep
    top_k = min(moe.top_k, N_EXPERTS)
    wanted = min(moe.n_experts, max(n_wanted, top_k + UNCHOSEN))
    shares_experts = find_expert_dim(args, ep, efsdp) == 0 or efsdp == 1 or dim % efsdp > 0
    candidates = range(round_up(wanted, ep), wanted + 2 * n_ranks + 1, ep)
    return {
        "n_experts": next(n for n in candidates if (n // ep % efsdp == 0) == shares_experts),
        "top_k": top_k,
        "expert_ffn_dim": round_up(
            min(moe.expert_ffn_dim, dim // 2), lcm(ALIGNED, efsdp, degrees["tp"])
        ),
    }


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def keep_moe_layers(small: Config, args: ModelArgs) -> Config:
    """Return the config with both MoE and dense layers (if it has two or more layers) if the real model has both."""
    if args.moe is None:
        return small
    several = small.model.n_layers > 1
    dense = {
        "flavor.n_first_dense_layers": min(args.moe.n_first_dense_layers, 1) * several,
        "flavor.moe_every": min(args.moe.moe_every, 2) if several else 1,
    }
    return override(small, dense)


# ---------------------------------------------------------------- stages and batch


def reduce_stages(section: Parallelism, n_layers: int, real: Layout) -> dict[str, object]:
    """Return layers and stages: the same number of stages per rank, at most two if possible, even or uneven.

    Keeps the first stages and the last. Each has one layer, or two if it has more than the smallest in the real run.
    """
    if real.pp == 1:
        return {"model.n_layers": min(2, n_layers), **STAGES_BY_RULE}
    counts = count_layers(real.stages)
    least = SCHEDULES[section.pipeline_parallel_schedule].least_stages_per_rank
    n_stages = real.pp * max(least, min(2, len(counts) // real.pp))
    kept = [*counts[: n_stages - 1], counts[-1]]
    fewest = min(filter(None, counts))
    sizes = [min(count, 1 if count == fewest else 2) for count in kept]
    stages, start = [], 0
    for index, size in enumerate(sizes):
        layers = range(start, start + size)
        stages.append(list(name_modules(layers, first=index == 0, last=index == n_stages - 1)))
        start += size
    return {
        "model.n_layers": start,
        **STAGES_BY_RULE,
        "parallelism.module_fqns_per_model_part": stages,
    }


def count_layers(stages: Iterable[Iterable[str]]) -> list[int]:
    """Return the number of layers of each stage."""
    return [sum(fqn.startswith("layers.") for fqn in stage) for stage in stages]


def reduce_batch(
    small: Config, config: Config, real: Layout, degrees: dict[str, int], sizes: dict[str, int]
) -> dict[str, object]:
    """Return a small batch: microbatches keep their relation to the stages, and cp and tp divide the sequence."""
    accumulates = real.global_batch_size > config.training.local_batch_size * real.dp
    if degrees["pp"] == 1:
        n_rows, n_microbatches = 2, 3 if accumulates else 1
    else:
        n_rows = min(2, config.parallelism.pipeline_parallel_microbatch_size)
        stages, _ = plan_stages(small.parallelism, small.model.n_layers)
        n_microbatches = reduce_microbatches(small.parallelism, real, len(stages))
    batch = give_batch(degrees, n_rows, n_microbatches, reduce_sequence(degrees, sizes, 40))
    return batch | ({"training.local_batch_size": n_rows} if accumulates else {})


def give_batch(
    degrees: dict[str, int], n_rows: int, n_microbatches: int, seq_len: int
) -> dict[str, object]:
    """Return the keys of a batch with `n_rows` per microbatch."""
    return {
        "training.local_batch_size": n_rows * n_microbatches,
        "training.global_batch_size": n_rows
        * n_microbatches
        * degrees["dp_replicate"]
        * degrees["dp_shard"],
        "training.seq_len": seq_len,
        "parallelism.pipeline_parallel_microbatch_size": n_rows if degrees["pp"] > 1 else 1,
    }


def reduce_microbatches(section: Parallelism, real: Layout, n_stages: int) -> int:
    """Return a number of microbatches that has the same relation to the number of stages as in the real run."""
    n_real_stages = len(real.stages)
    if real.n_microbatches < n_real_stages:
        wanted = n_stages - 1
    elif real.n_microbatches == n_real_stages:
        wanted = n_stages
    else:
        wanted = 2 * n_stages if real.n_microbatches % n_real_stages == 0 else n_stages + 1
    candidates = [wanted, n_stages, 2 * n_stages]
    return next(n for n in candidates if not check_microbatches(section, n, n, n_stages))


def reduce_sequence(degrees: dict[str, int], sizes: dict[str, int], least: int) -> int:
    """Return a sequence length that differs from all model sizes: it identifies the sequence dim of a tensor."""
    pieces = (2 * degrees["cp"] if degrees["cp"] > 1 else 1) * degrees[
        "tp"
    ]  # equal pieces of the sequence
    widths = [
        *sizes.values(),
        sizes["n_heads"] * sizes["head_dim"],
        sizes["n_kv_heads"] * sizes["head_dim"],
    ]
    return next(
        n for n in range(round_up(least, pieces), least + 100 * pieces, pieces) if n not in widths
    )
