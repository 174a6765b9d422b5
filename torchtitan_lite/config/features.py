"""List the keys that load files of torchtitan_lite/extensions/, and the rules for these keys.

A row names a key, the values of this key that load the file, and the rule that `check` then applies. The rules are in
this file, because they need no torch. All other code of the core names an extension only in a call of `load_extension`,
at the point where the feature is used. To add an extension, write its file. If a key loads the file, also add a row to
EXTENSIONS. The row of an optimizer, a loss or an attention in choices.py can also name the file. extensions/README.md
lists the key or the feature that loads each file.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path

from torchtitan_lite.config.extensions import load_extension
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.messages import Refused
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.config.schema import Config, Parallelism

FLOAT8 = "quantize.linear.float8"
ZERO_PLUS_PLUS = "parallelism.zero_plus_plus"
INT8_BLOCK = 256  # number of elements that share a scale in ZeRO++

# ---------------------------------------------------------------- rules of extensions


def check_muon(config: Config, model_args: ModelArgs, layout: Layout) -> Refused:
    if config.training.enable_cpu_offload:
        why = "Muon would multiply whole matrices on the host, which takes minutes"
        yield "training.enable_cpu_offload", why, "Leave this key out, or use AdamW"


def check_bfloat16_moments(config: Config, model_args: ModelArgs, layout: Layout) -> Refused:
    optimizer = config.optimizer
    if optimizer.name != "AdamW" or optimizer.implementation != "fused":
        why = f"{optimizer.name} with implementation {optimizer.implementation!r} does not support bfloat16 moments"
        remedy = 'Use AdamW with implementation = "fused"'
        yield "optimizer.moments_dtype", why, remedy
    elif optimizer.beta2 > 0.99:
        why = f"with optimizer.beta2 = {optimizer.beta2}, bfloat16 rounds away the decay of the second moment"
        remedy = "Use a beta2 of at most 0.99, or moments in float32"
        yield "optimizer.moments_dtype", why, remedy


def check_bfloat16_weights(config: Config, model_args: ModelArgs, layout: Layout) -> Refused:
    # whether gradients of microbatches are summed in bfloat16
    is_summed = layout.pp == 1 and layout.zero_stage > 1 and layout.n_microbatches > 1
    if config.optimizer.moments_dtype != "bfloat16" or is_summed:
        why = "bfloat16 weights need bfloat16 moments, and gradients that are summed over microbatches in float32"
        remedy = 'Set optimizer.moments_dtype = "bfloat16" and parallelism.zero_stage = 1'
        yield "training.dtype", why, remedy


def check_zero_plus_plus(config: Config, model_args: ModelArgs, layout: Layout) -> Refused:
    section = config.parallelism
    if layout.fsdp == 1:
        why = "FSDP has a single shard, so no weight is gathered"
        yield ZERO_PLUS_PLUS, why, "Leave this key out"
    if "hpz" not in section.zero_plus_plus:
        return
    n_ranks = layout.fsdp * layout.tp  # ranks of one pipeline stage and one replica
    is_split = layout.fsdp_near > 1 or (layout.ep and layout.efsdp_near > 1)
    if n_ranks > section.zero_plus_plus_node_size and not is_split:
        why = "hpZ needs at least two ranks of an FSDP group on every node, but nodes of this size have fewer"
        yield f"{ZERO_PLUS_PLUS}_node_size", why, f'Leave "hpz" out of {ZERO_PLUS_PLUS}'
    if layout.zero_stage < 3 or layout.pp > 1:
        why = "hpz keeps the weights that backward gathers, so it needs zero_stage = 3, and cannot be used with PP"
        yield ZERO_PLUS_PLUS, why, 'Leave out "hpz"'


def check_symmetric_memory(config: Config, model_args: ModelArgs, layout: Layout) -> Refused:
    key = "parallelism.fsdp_symmetric_memory"
    if layout.fsdp == 1:
        yield key, "FSDP has a single shard, so no weight is gathered", "Leave it out"
    elif config.parallelism.zero_plus_plus:
        yield key, "ZeRO++ gathers weights with its own collectives", "Turn off one of the two"


def check_float8_all_gather(config: Config, model_args: ModelArgs, layout: Layout) -> Refused:
    if not config.model.uses_float8:
        return
    remedy = f"Set {FLOAT8}.enable_fsdp_float8_all_gather = false"
    if config.quantize.linear.float8.recipe_name != "tensorwise":
        why = "a weight gathered in float8 has a single scale, but this recipe needs a scale for each row"
        yield f"{FLOAT8}.recipe_name", why, f'{remedy}, or use "tensorwise"'
    if config.training.enable_cpu_offload:
        why = "with offload, FSDP all-gathers GPU copies of the shards, and does not round these copies to float8"
        yield "training.enable_cpu_offload", why, remedy
    if "qwz" in config.parallelism.zero_plus_plus:
        why = "qwz gathers weights in int8, but this run gathers them in float8"
        yield ZERO_PLUS_PLUS, why, f'{remedy}, or leave out "qwz"'


def check_spikes(config: Config, model_args: ModelArgs, layout: Layout) -> Refused:
    if config.training.skip_spikes <= 1:
        why = "about half of all gradient norms are above the median, so a factor up to 1 would skip ordinary steps"
        remedy = "Use a number above 1, such as 3, or 0 to skip no steps"
        yield "training.skip_spikes", why, remedy


def check_overwrite(config: Config, model_args: ModelArgs, layout: Layout) -> Refused:
    path = config.checkpoint.initial_load_path
    if path and Path(path).resolve().is_relative_to(Path(config.job.dump_folder).resolve()):
        key = "checkpoint.initial_load_path"
        yield (
            key,
            "job.overwrite would delete it first",
            "Copy the weights to a folder outside job.dump_folder",
        )


# ---------------------------------------------------------------- extensions


@dataclass(frozen=True)
class Extension:
    """Defines when a run loads a file of extensions/."""

    key: str  # the key that loads the file
    # values of the key that load the file; (): all values except 0, "" and []
    values: tuple[object, ...]
    about: str  # one sentence for `check --keys`
    check: Callable[[Config, ModelArgs, Layout], Refused] | None = None


EXTENSIONS = {  # name of a file in extensions/, without .py -> its row
    "muon": Extension(
        "optimizer.name",
        ("Muon",),
        "orthogonalizes the updates of hidden matrices, and uses AdamW for all other parameters",
        check_muon,
    ),
    "adamw_bfloat16": Extension(
        "optimizer.moments_dtype",
        ("bfloat16",),
        "AdamW with both moments in bfloat16: 12 bytes of training state per parameter instead of 16",
        check_bfloat16_moments,
    ),
    "stochastic_rounding": Extension(
        "training.dtype",
        ("bfloat16",),
        "stores weights in bfloat16, and rounds each update up or down at random",
        check_bfloat16_weights,
    ),
    "parameter_groups": Extension(
        "optimizer.groups",
        (),
        "multiplies learning rate and weight decay for parameters whose names match a pattern",
        lambda *facts: load_extension("parameter_groups").check_groups(*facts),
    ),
    "zero_plus_plus": Extension(
        ZERO_PLUS_PLUS,
        (),
        "FSDP sends weights and gradients as int8 blocks, and all-gathers within a node for backward",
        check_zero_plus_plus,
    ),
    "symmetric_memory": Extension(
        "parallelism.fsdp_symmetric_memory",
        (True,),
        "FSDP gathers from NCCL's symmetric memory",
        check_symmetric_memory,
    ),
    "float8_all_gather": Extension(
        f"{FLOAT8}.enable_fsdp_float8_all_gather",
        (True,),
        "FSDP gathers the weights of float8 layers in float8",
        check_float8_all_gather,
    ),
    "float8_rowwise": Extension(
        f"{FLOAT8}.recipe_name",
        ("rowwise", "rowwise_with_gw_hp"),
        "float8 with one scale for each row and column that a dot product sums over",
    ),
    "ring_attention": Extension(
        "parallelism.context_parallel_degree",
        (),
        "causal attention under context parallel: an all-gather or a ring exchanges keys and values",
    ),
    "asynchronous_saves": Extension(
        "checkpoint.async_mode",
        ("async", "async_with_pinned_mem"),
        "saves while the run trains",
    ),
    "snapshots": Extension(
        "checkpoint.local_folder",
        (),
        "saves frequent checkpoints into a folder on each host",
    ),
    "spike_filter": Extension(
        "training.skip_spikes",
        (),
        "skips steps whose gradient norm is far above the median of the last norms",
        check_spikes,
    ),
    "wandb_sink": Extension(
        "metrics.enable_wandb",
        (),
        "writes metrics to Weights & Biases",
    ),
    "overwrite": Extension(
        "job.overwrite",
        (),
        "deletes the files of an earlier run in job.dump_folder first",
        check_overwrite,
    ),
    "read_only": Extension(
        "checkpoint.load_only",
        (),
        "the run writes no file",
    ),
    "copies": Extension(
        "debug.compare_copies_every",
        (),
        "compares tensors that must be bitwise identical on several ranks",
    ),
    "hugging_face_export": Extension(
        "checkpoint.last_save_in_hf",
        (True,),
        "checks whether the model has a Hugging Face format, and writes config.json",
        lambda *facts: load_extension("hugging_face_export").check_export(*facts),
    ),
}


# ---------------------------------------------------------------- ZeRO++


def split_nodes(layout: Layout, section: Parallelism) -> Layout:
    """Split the FSDP groups of a layout into groups within nodes and across nodes."""
    tp, ep = layout.tp, section.expert_parallel_degree
    n_shards = layout.fsdp
    sizes = {}
    for dim, n_ranks, stride in (("fsdp", n_shards, tp), ("efsdp", n_shards * tp // ep, ep)):
        near = gcd(n_ranks, max(1, section.zero_plus_plus_node_size // stride))
        if 1 < near < n_ranks:
            sizes[f"{dim}_near"] = near
            sizes[f"{dim}_far"] = n_ranks // near
    return replace(layout, **sizes)
