"""Check whether the value of a config key has an effect in a trial ("the key acts"). A key that is set and has no
witness is never covered.

    acted          a trial ran the key's value, and a rank saw its effect: a skipped spike, a recomputed block, ...
    did not act    a trial ran the key's value, but no rank saw an effect
    off            the value turns its feature off, or belongs to a feature that is off

A key's witness is a function that inspects the results and the profile of a step (observed.py). One step of a trial is
profiled.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from unittest.mock import patch

import torch
from torch.autograd.profiler import profile

from torchtitan_lite import build
from torchtitan_lite import step as stepping
from torchtitan_lite.config.choices import ATTENTIONS, OPTIMIZERS
from torchtitan_lite.config.learning_rate import learning_rate_factor
from torchtitan_lite.config.model import MODEL_SIZES
from torchtitan_lite.config.model_rows import MoEArgs
from torchtitan_lite.config.schema import get_value
from torchtitan_lite.extensions.parameter_groups import list_used
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.model.float8_linear import Float8Linear
from torchtitan_lite.tools.verify.degrees import DEGREES
from torchtitan_lite.tools.verify.observed import Observed, count, count_events

# ---------------------------------------------------------------- kinds of witnesses

MOE_SIZES = [size.name for size in fields(MoEArgs)]
MASKS = ("sliding_window", "layer_types", "attention_sinks")  # fields of ModelArgs
Acted = dict[str, bool | None]  # key -> whether the key had an effect, or None if it is off
Witness = Callable[[Observed], bool | None]


def in_use(step: Observed) -> bool:
    """Return True: every step uses the value (a size, a degree, a rate). If a step ignored the value, the comparison
    would fail."""
    return True


# ---------------------------------------------------------------- the facts


def happens(event: str) -> Witness:
    """Return a witness that looks in the profile for an event whose name contains `event`. For keys that are set."""
    return lambda step: count(step.forward + step.backward, event) > 0


def computes_in_dtype(step: Observed) -> bool:
    is_bfloat16 = count(step.forward, "aten::mm c10::BFloat16") > 0
    is_asked = step.config.training.mixed_precision_param == "bfloat16"
    return bool(step.forward) and is_bfloat16 == is_asked


def reads_text(step: Observed) -> bool:
    return step.runs_thread("prefetch")  # this thread exists only in the trial of train.py


def separates_documents(step: Observed) -> bool | None:
    """Return whether a row has several documents. The key is covered only if the plain loop also has a formula for this
    attention."""
    uses_documents = ATTENTIONS[step.config.model.attention].uses_documents
    return step.batch.doc_ids.any().item() if uses_documents else None


def clips(step: Observed) -> bool:
    is_above = step.result.grad_norm > step.config.training.max_norm
    return bool(step.result.applied & is_above)


def skips_a_spike(step: Observed) -> bool:
    return step.result.grad_norm.isfinite().item() and not step.result.applied


def steps_with_optimizer(step: Observed) -> bool:
    return count(step.forward, f"Optimizer.step#{step.config.optimizer.name}") > 0


def reads_option(name: str) -> Witness:
    """Return the witness of an optimizer option: the optimizer's `step` reads the option from a parameter group."""
    return lambda step: name in step.options


def stores_moments(step: Observed) -> bool | None:
    section = step.config.optimizer
    if not OPTIMIZERS[section.name].n_moments:
        return None
    asked = getattr(torch, section.moments_dtype)
    stored = [tensor for state in step.run.optimizer.state.values() for tensor in state.values()]
    return any(each.dtype == asked for each in stored)


def decays(step: Observed) -> bool | None:
    section = step.config.lr_scheduler
    if section.decay_ratio == 0:
        return None
    n_steps = step.run.lr_scheduler.last_epoch
    is_after_warmup = n_steps > section.warmup_steps
    is_lower = learning_rate_factor(section, n_steps - 1) < 1
    return is_after_warmup and is_lower


def runs_implementation(step: Observed) -> bool | None:
    """Return whether the kernels of optimizer.implementation ran. Only AdamW has several implementations.

    "fused" is checked first, because the fused optimizer uses a _foreach_ kernel too.
    """
    section = step.config.optimizer
    if not OPTIMIZERS[section.name].has_fused_kernel or section.moments_dtype == "bfloat16":
        return None
    if count(step.forward, "_fused_adam"):
        return section.implementation == "fused"
    is_foreach = count(step.forward, "_foreach_addcdiv") > 0
    is_asked = section.implementation == ("foreach" if is_foreach else "for-loop")
    return bool(step.forward) and is_asked


def updates_groups(step: Observed) -> bool:
    """Return whether every parameter group matches a parameter of the small model, and this rank uses the factors of at
    least one group."""
    section = step.config.optimizer
    asked = {
        (section.lr * group.lr, section.weight_decay * group.weight_decay)
        for group in section.groups
    }
    groups = step.run.optimizer.param_groups
    used = {(group["initial_lr"], group["weight_decay"]) for group in groups}
    has_all = list_used(section.groups, step.run.parts[0].model_args) == section.groups
    return has_all and bool(asked & used)


def splits_loss(step: Observed) -> bool:
    layout = step.run.layout
    n_tokens = layout.microbatch_size * step.config.training.seq_len // layout.cp
    return n_tokens > step.config.training.loss_chunk_tokens


def count_most(step: Observed, text: str) -> int:
    """Return the count of the most frequent event whose name contains the text."""
    events = step.forward + step.backward
    return max((n for name, n in events.items() if text in name), default=0)


def gathers_as_zero_stage(step: Observed) -> bool | None:
    """Compare the all-gathers and reductions of a block with the table in parallel/fsdp.py."""
    layout = step.run.layout
    if layout.fsdp == 1:
        return None
    n_gathers = count_most(step, "FSDP::all_gather (layers.")
    if layout.zero_stage == 3:
        return n_gathers > 1
    # With a single microbatch, ZeRO stages 1 and 2 run the same collectives.
    expected = layout.n_microbatches if layout.zero_stage == 2 else 1
    return n_gathers == 1 and count_most(step, "reduce (layers.") == expected


def splits_nodes(step: Observed) -> bool | None:
    """Return whether FSDP groups are split by node. If they are not split, hpZ has no effect, and qgZ uses one
    exchange in place of two."""
    layout = step.run.layout
    uses_nodes = {"hpz", "qgz"} & set(step.config.parallelism.zero_plus_plus)
    return layout.fsdp_far > 1 or layout.efsdp_far > 1 if uses_nodes else None


def rounds_shards(step: Observed) -> bool:
    n_rounded = count(step.forward + step.backward, "aten::round_")
    rounds = n_rounded > 0 or step.config.parallelism.zero_plus_plus == ["hpz"]
    return rounds and splits_nodes(step) is not False


def runs_schedule(step: Observed) -> bool | None:
    name = step.config.parallelism.pipeline_parallel_schedule
    schedule = step.run.schedule
    return type(schedule).__name__ == f"Schedule{name}" if schedule else None


def rotates(step: Observed) -> bool | None:
    """Return whether the chosen method exchanges the keys of attention. Only the method "ring" exchanges keys by
    all-to-alls.

    Each Scatter of tp also uses one all-to-all, so the all-to-alls of Scatter are subtracted. With ep > 1, experts use
    many all-to-alls, so the result is False.
    """
    layout = step.run.layout
    if layout.cp == 1:
        return None
    is_ring = step.forward["_c10d_functional::all_to_all_single"] > step.forward["Scatter"]
    asked = step.config.parallelism.context_parallel_rotate_method
    return bool(step.forward) and layout.ep <= 1 and is_ring == (asked == "ring")


def recomputes(step: Observed) -> bool | None:
    """Return whether backward repeats norms or attention. Without recompute, the compiler repeats only operators that
    are cheaper than norms and attention."""
    if step.config.activation_checkpoint.mode == "none":
        return None
    repeated = [name for name in step.backward if "ackward" not in name]
    return any("rms_norm" in name or "attention" in name for name in repeated)


def compiles(step: Observed) -> bool | None:
    """Return whether all components in compile.components are compiled.

    A compiled block is an autograd function (CompiledFunction), unless the backend is "eager". A compiled loss is not
    an autograd function.
    """
    section = step.config.compile
    if not section.enable:
        return None
    n_regions = count(step.forward, "Torch-Compiled Region")
    n_blocks = step.forward["CompiledFunction"]
    acted = {"model": n_blocks > 0, "loss": n_regions > n_blocks}
    return all(acted[name] for name in section.components)


def filters_linears(step: Observed) -> bool | None:
    """Return whether the linear layers that are named in a filter compute without float8."""
    filters = step.config.quantize.linear.float8.filter_fqns
    for part in step.run.parts:
        for fqn, module in part.named_modules():
            if isinstance(module, Float8Linear) and any(text in fqn for text in filters):
                return False
    return None


def precomputes_scales(step: Observed) -> bool:
    """Return whether forward has fewer all-reduces than float8 matmuls. Without precomputed scales, each weight that is
    all-gathered in float8 needs an all-reduce."""
    n_matmuls = count(step.forward, FLOAT8)
    n_reductions = count(step.forward, "c10d::allreduce_")
    return 0 < n_reductions < n_matmuls


def saves_in_thread(step: Observed) -> bool | None:
    """Return whether a thread saves. False for async_with_pinned_mem, because a run on CPUs does not pin memory."""
    mode = step.config.checkpoint.async_mode
    if mode == "disabled":
        return None
    return mode == "async" and step.runs_thread("checkpoint")


# ---------------------------------------------------------------- the table

FLOAT8 = "Float8MatmulFunction"  # event
IN_USE = """
training.local_batch_size
training.global_batch_size
training.seq_len
training.mixed_precision_reduce
training.expert_bias_rate
parallelism.pipeline_parallel_microbatch_size
parallelism.pipeline_parallel_layers_per_stage
parallelism.pipeline_parallel_first_stage_less_layers
parallelism.pipeline_parallel_last_stage_less_layers
optimizer.lr
lr_scheduler.warmup_steps
debug.seed
""".split()
SIZES = ("name", "flavor", *MODEL_SIZES, *MOE_SIZES, *MASKS)
WITNESSES: dict[str, Witness] = {
    **dict.fromkeys((*DEGREES, *IN_USE, *(f"model.{name}" for name in SIZES)), in_use),
    "model.hf_assets_path": reads_text,
    "model.attention": separates_documents,
    "model.converters": happens(FLOAT8),
    "training.data_seed": reads_text,
    "training.dataset_weights": reads_text,
    "training.max_norm": clips,
    "training.skip_spikes": skips_a_spike,
    "training.mixed_precision_param": computes_in_dtype,
    "training.loss_chunk_tokens": splits_loss,
    "training.expert_balance_loss": happens("AuxiliaryGradient"),
    "training.router_z_loss": happens("AddLoss"),
    "parallelism.fsdp_reshard_after_forward": gathers_as_zero_stage,
    "parallelism.zero_stage": gathers_as_zero_stage,
    "parallelism.zero_plus_plus": rounds_shards,
    "parallelism.zero_plus_plus_node_size": splits_nodes,
    "parallelism.pipeline_parallel_schedule": runs_schedule,
    "parallelism.context_parallel_rotate_method": rotates,
    "optimizer.name": steps_with_optimizer,
    "optimizer.beta1": reads_option("betas"),
    "optimizer.beta2": reads_option("betas"),
    "optimizer.eps": reads_option("eps"),
    "optimizer.weight_decay": reads_option("weight_decay"),
    "optimizer.groups": updates_groups,
    "optimizer.implementation": runs_implementation,
    "optimizer.moments_dtype": stores_moments,
    "lr_scheduler.total_steps": decays,
    "lr_scheduler.decay_ratio": decays,
    "lr_scheduler.decay_type": decays,
    "lr_scheduler.min_lr_factor": decays,
    "checkpoint.async_mode": saves_in_thread,
    "activation_checkpoint.mode": recomputes,
    "activation_checkpoint.selective_ac_option": recomputes,
    "activation_checkpoint.memory_budget": recomputes,
    "compile.enable": compiles,
    "compile.components": compiles,
    "compile.backend": compiles,
    "debug.deterministic": lambda step: torch.are_deterministic_algorithms_enabled(),
    "quantize.linear.float8.recipe_name": happens(FLOAT8),
    "quantize.linear.float8.filter_fqns": filters_linears,
    "quantize.linear.float8.emulate": happens(FLOAT8),
    # FSDP sends bytes, because no backend supports float8 in an all-gather.
    "quantize.linear.float8.enable_fsdp_float8_all_gather": happens(
        "_allgather_base_ unsigned char"
    ),
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": precomputes_scales,
}


# ---------------------------------------------------------------- steps of a trial


def ask(key: str, step: Observed) -> bool | None:
    """Return whether a key had an effect in a step, or None if the key is off. A key is off if its value is 0, empty or
    false, or if it is a float8 key in a run without float8."""
    witness = WITNESSES[key]
    if witness is in_use:
        return True
    is_on = step.config.model.uses_float8 or not key.startswith("quantize")
    if is_on and get_value(step.config, key):
        return witness(step)
    return None


@contextmanager
def actions_noted(acted: Acted) -> Iterator[None]:
    """Context manager: record in `acted` which keys have an effect in the steps of this rank.

    The second step is profiled: unlike the first step, it uses values that an earlier step computed. A profiled step
    takes as long as three steps that are not profiled. The deep trial, which has a single step, is not profiled.
    """
    train_step = stepping.train_step
    n_steps = 0
    options: set[str] = set()

    class Group(dict):
        def __getitem__(self, name: str) -> object:
            options.add(name)
            return super().__getitem__(name)

    def watch(run: build.Run, batch: Batch, *args) -> stepping.StepResult:
        nonlocal n_steps
        n_steps += 1
        run.optimizer.param_groups[:] = map(Group, run.optimizer.param_groups)
        options.clear()
        profiler = profile(enabled=n_steps == 2, record_shapes=True)
        with profiler:
            result = train_step(run, batch, *args)
        step = Observed(run, batch, result, options, *count_events(profiler))
        seen = {key: ask(key, step) for key in WITNESSES}
        acted.update(merge([acted, seen]))
        return result

    with patch.object(stepping, "train_step", watch):
        yield


def merge(observations: Iterable[Acted]) -> Acted:
    """Merge the observations of steps and ranks. A key acted if it had an effect in any observation. A key is off if it
    was off in all observations."""
    merged: Acted = {}
    for acted in observations:
        for key, is_acting in acted.items():
            known = merged.get(key)
            merged[key] = is_acting if known is None else known or bool(is_acting)
    return merged
