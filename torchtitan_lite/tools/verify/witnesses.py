"""Observe whether config keys act in a trial. A key that is set and has no witness is never covered.

    acted          a trial ran the key's value, and a rank saw its effect: a skipped spike, a recomputed block, ...
    did not act    a trial ran the key's value, but no rank saw an effect
    off            the value turns its feature off, or belongs to a feature that is off

A witness is a function that looks at what a step shows from outside (observed.py). One step of a trial is profiled.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from unittest.mock import patch

import torch
from torch import nn
from torch.autograd.profiler import profile

from torchtitan_lite import build
from torchtitan_lite import step as stepping
from torchtitan_lite.config.choices import ATTENTIONS, OPTIMIZERS
from torchtitan_lite.config.model import MODEL_SIZES
from torchtitan_lite.config.model_rows import MoEArgs
from torchtitan_lite.config.schema import get_value
from torchtitan_lite.extensions.parameter_groups import list_used
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.model.float8_linear import Float8Linear
from torchtitan_lite.model.own_attention import list_attentions
from torchtitan_lite.tools.verify.degrees import DEGREES
from torchtitan_lite.tools.verify.errors import local
from torchtitan_lite.tools.verify.observed import Observed, count, count_events
from torchtitan_lite.tools.verify.plain import has_formula

# ---------------------------------------------------------------- kinds of witnesses

MOE_SIZES = [size.name for size in fields(MoEArgs)]
MASKS = ("sliding_window", "layer_types", "attention_sinks")  # fields of ModelArgs
Acted = dict[str, bool | None]  # key -> whether it acted, or None if it is off
Witness = Callable[[Observed], bool | None]


def once_on(is_on: object, acted: bool) -> bool | None:
    """Return whether a key acted, or None if it is off."""
    return acted if is_on else None


def in_use(step: Observed) -> bool:
    """Return True for a size, a degree or a seed. Every step uses it; if a step did not, the comparison would fail."""
    return True


def once_set(key: str, witness: Witness) -> Witness:
    """Return the witness of a key that is off if its value is 0, empty or false."""
    return lambda step: witness(step) if get_value(step.config, key) else None


# ---------------------------------------------------------------- the witnesses


def computes_in_dtype(step: Observed) -> bool:
    is_bfloat16 = count(step.forward, "aten::mm c10::BFloat16") > 0
    is_asked = step.config.training.mixed_precision_param == "bfloat16"
    return bool(step.forward) and is_bfloat16 == is_asked


def reads_text(step: Observed) -> bool:
    return step.runs_thread("prefetch")  # only the trial of train.py has this thread


def separates_documents(step: Observed) -> bool | None:
    """Return False if the plain loop has no code of its own for this attention: both sides would have its faults."""
    name = step.config.model.attention
    inners = [inner for part in step.run.parts for inner in list_attentions(part).values()]
    is_compared = all(map(has_formula, inners))
    if is_compared and ATTENTIONS[name].uses_documents:
        is_compared = step.batch.doc_ids.any().item()
    return once_on(name != "causal" or not is_compared, is_compared)


def updates(step: Observed) -> bool:
    return bool(step.result.applied) and step.result.rates["lr"] > 0


def clips(step: Observed) -> bool:
    return updates(step) and step.result.grad_norm.item() > step.config.training.max_norm


def skips_a_spike(step: Observed) -> bool:
    return step.result.grad_norm.isfinite().item() and not step.result.applied


def steps_with_optimizer(step: Observed) -> bool:
    return count(step.forward, f"Optimizer.step#{step.config.optimizer.name}") > 0


def has_moments(step: Observed) -> bool | None:
    n_moments = OPTIMIZERS[step.config.optimizer.name].n_moments
    return once_on(n_moments, bool(step.moments))


def stores_moments(step: Observed) -> bool | None:
    asked = getattr(torch, step.config.optimizer.moments_dtype)
    is_stored = any(local(moment).dtype == asked for moment in step.moments)
    return once_on(has_moments(step) is not None, is_stored)


def warms_up(step: Observed) -> bool | None:
    n_steps = step.config.lr_scheduler.warmup_steps
    return once_on(n_steps > 1, step.position < n_steps and step.rate < 1)


def decays(step: Observed) -> bool | None:
    section = step.config.lr_scheduler
    is_after_warmup = step.position >= section.warmup_steps
    return once_on(section.decay_ratio != 0, is_after_warmup and step.rate < 1)


def ends_above_zero(step: Observed) -> bool | None:
    """Return whether the learning rate of a late step is at least this value. Otherwise it would be nearly 0."""
    factor = step.config.lr_scheduler.min_lr_factor
    return once_on(factor and decays(step) is not None, decays(step) and step.rate >= factor)


def runs_implementation(step: Observed) -> bool | None:
    """Return whether the chosen kernels ran. Only AdamW has several implementations.

    "fused" is checked first, because it uses a _foreach_ kernel too.
    """
    section = step.config.optimizer
    if not OPTIMIZERS[section.name].has_fused_kernel or section.moments_dtype == "bfloat16":
        return None
    if count(step.forward, "_fused_adam"):
        return section.implementation == "fused"
    is_foreach = count(step.forward, "_foreach_addcdiv") > 0
    is_asked = section.implementation == ("foreach" if is_foreach else "for-loop")
    return bool(step.forward) and is_asked


def moves_biases(step: Observed) -> bool | None:
    if step.run.balance is None:
        return None
    moved = [not torch.equal(step.biases[fqn], b) for fqn, b in step.run.balance.biases.items()]
    return any(moved)


def balances(step: Observed) -> bool | None:
    return once_on(step.run.balance, count(step.backward, "AuxiliaryGradient") > 0)


def adds_z_loss(step: Observed) -> bool | None:
    return once_on(step.run.balance, count(step.backward, "AddLoss") > 0)


def updates_groups(step: Observed) -> bool:
    """Return whether each group has parameters in the small model, and the rank updates some with a group's factors."""
    section = step.config.optimizer
    asked = set()
    for group in section.groups:
        asked.add((section.lr * group.lr, section.weight_decay * group.weight_decay))
    used = set()
    for group in step.run.optimizer.param_groups:
        used.add((group["initial_lr"], group["weight_decay"]))
    model_args = step.run.parts[0].model_args
    has_all = list_used(section.groups, model_args) == section.groups
    return updates(step) and has_all and bool(asked & used)


def splits_loss(step: Observed) -> bool:
    layout = step.run.layout
    n_tokens = layout.microbatch_size * step.config.training.seq_len // layout.cp
    return n_tokens > step.config.training.loss_chunk_tokens


def gathers_as_zero_stage(step: Observed) -> bool | None:
    """Compare the gathers and reductions of a block with the table in parallel/fsdp.py."""
    layout = step.run.layout
    events = step.forward + step.backward
    n_gathers = max(
        (events[name] for name in events if "FSDP::all_gather (layers." in name), default=0
    )
    n_reduced = max((events[name] for name in events if "reduce (layers." in name), default=0)
    acted = n_gathers > 1
    if layout.zero_stage < 3:
        # With a single microbatch, ZeRO stages 1 and 2 are the same.
        expected = layout.n_microbatches if layout.zero_stage == 2 else 1
        acted = n_gathers == 1 and n_reduced == expected
    return once_on(layout.dp_shard * layout.cp > 1, acted)


def splits_nodes(step: Observed) -> bool | None:
    """Return whether FSDP groups are split by node. If not, hpZ keeps nothing, and qgZ has a single exchange."""
    layout = step.run.layout
    uses_nodes = {"hpz", "qgz"} & set(step.config.parallelism.zero_plus_plus)
    return once_on(uses_nodes, layout.fsdp_far > 1 or layout.efsdp_far > 1)


def rounds_shards(step: Observed) -> bool:
    n_rounded = count(step.forward + step.backward, "aten::round_")
    rounds = n_rounded > 0 or step.config.parallelism.zero_plus_plus == ["hpz"]
    return rounds and splits_nodes(step) is not False


def runs_schedule(step: Observed) -> bool | None:
    name = step.config.parallelism.pipeline_parallel_schedule
    return once_on(step.run.schedule, type(step.run.schedule).__name__ == f"Schedule{name}")


def rotates(step: Observed) -> bool | None:
    """Return whether keys are exchanged by the chosen method. Only the ring uses all-to-alls for them.

    A Scatter of tp also uses one all-to-all, so these are subtracted. With ep > 1, experts use many all-to-alls, so
    this returns False.
    """
    layout = step.run.layout
    is_ring = step.forward["_c10d_functional::all_to_all_single"] > step.forward["Scatter"]
    asked = step.config.parallelism.context_parallel_rotate_method
    return once_on(
        layout.cp > 1, bool(step.forward) and layout.ep <= 1 and is_ring == (asked == "ring")
    )


def recomputes(step: Observed) -> bool | None:
    """Return whether backward repeats norms or attention. Without recompute, the compiler repeats only cheaper ones."""
    is_on = step.config.activation_checkpoint.mode != "none"
    repeated = [name for name in step.backward if "ackward" not in name]
    return once_on(is_on, any("rms_norm" in name or "attention" in name for name in repeated))


def compiles(step: Observed) -> bool | None:
    """Return whether the chosen components are compiled.

    A compiled block is an autograd function (CompiledFunction), unless the backend is "eager". A compiled loss is not.
    """
    section = step.config.compile
    n_regions = count(step.forward, "Torch-Compiled Region")
    n_blocks = step.forward["CompiledFunction"]
    acted = {"model": n_blocks > 0, "loss": n_regions > n_blocks}
    return once_on(section.enable, all(acted[name] for name in section.components))


def multiplies_in_float8(step: Observed) -> bool | None:
    n_matmuls = count(step.forward, "Float8MatmulFunction")
    return once_on(step.config.model.uses_float8, n_matmuls > 0)


def gathers_in_float8(step: Observed) -> bool | None:
    """Return whether FSDP gathers bytes. Backends cannot gather float8, so it is sent as bytes."""
    section = step.config.quantize.linear.float8
    is_on = step.config.model.uses_float8 and section.enable_fsdp_float8_all_gather
    return once_on(is_on, count(step.forward, "_allgather_base_ unsigned char") > 0)


def filters_linears(step: Observed) -> bool | None:
    """Return whether no linear layer that a filter names multiplies in float8."""
    filters = step.config.quantize.linear.float8.filter_fqns
    named = []
    for part in step.run.parts:
        for fqn, module in part.named_modules():
            if isinstance(module, nn.Linear) and any(text in fqn for text in filters):
                named.append(module)
    is_filtered = not any(isinstance(module, Float8Linear) for module in named)
    return once_on(step.config.model.uses_float8 and named, is_filtered)


def precomputes_scales(step: Observed) -> bool | None:
    """Return whether forward has few all-reduces. Without precomputed scales, each weight would need one."""
    section = step.config.quantize.linear.float8
    is_on = step.config.model.uses_float8 and section.precompute_float8_dynamic_scale_for_fsdp
    n_matmuls = count(step.forward, "Float8MatmulFunction")
    return once_on(is_on, 0 < count(step.forward, "c10d::allreduce_") < n_matmuls)


def saves_in_thread(step: Observed) -> bool | None:
    """Return whether a thread saves. The mode with pinned memory cannot act, because a CPU pins no memory."""
    mode = step.config.checkpoint.async_mode
    return once_on(mode != "disabled", mode == "async" and step.runs_thread("checkpoint"))


# ---------------------------------------------------------------- the table

SWITCHES: dict[str, Witness] = {  # keys that are off if they are 0, empty or false
    "training.dataset_weights": reads_text,
    "training.max_norm": clips,
    "training.skip_spikes": skips_a_spike,
    "training.loss_chunk_tokens": splits_loss,
    "training.expert_bias_rate": moves_biases,
    "training.expert_balance_loss": balances,
    "training.router_z_loss": adds_z_loss,
    "parallelism.zero_plus_plus": rounds_shards,
    "optimizer.lr": updates,
    "optimizer.weight_decay": updates,
    "optimizer.groups": updates_groups,
    "debug.deterministic": lambda step: torch.are_deterministic_algorithms_enabled(),
}
IN_USE = """
training.local_batch_size
training.global_batch_size
training.seq_len
training.mixed_precision_reduce
parallelism.pipeline_parallel_microbatch_size
parallelism.pipeline_parallel_layers_per_stage
parallelism.pipeline_parallel_first_stage_less_layers
parallelism.pipeline_parallel_last_stage_less_layers
debug.seed
""".split()
WITNESSES: dict[str, Witness] = {
    **{f"model.{name}": in_use for name in ("name", "flavor", *MODEL_SIZES, *MOE_SIZES, *MASKS)},
    **dict.fromkeys((*DEGREES, *IN_USE), in_use),
    **{key: once_set(key, witness) for key, witness in SWITCHES.items()},
    "model.hf_assets_path": reads_text,
    "model.attention": separates_documents,
    "model.converters": multiplies_in_float8,
    "training.data_seed": reads_text,
    "training.mixed_precision_param": computes_in_dtype,
    "parallelism.fsdp_reshard_after_forward": gathers_as_zero_stage,
    "parallelism.zero_stage": gathers_as_zero_stage,
    "parallelism.zero_plus_plus_node_size": splits_nodes,
    "parallelism.pipeline_parallel_schedule": runs_schedule,
    "parallelism.context_parallel_rotate_method": rotates,
    "optimizer.name": steps_with_optimizer,
    "optimizer.beta1": has_moments,
    "optimizer.beta2": has_moments,
    "optimizer.eps": has_moments,
    "optimizer.implementation": runs_implementation,
    "optimizer.moments_dtype": stores_moments,
    "lr_scheduler.warmup_steps": warms_up,
    "lr_scheduler.total_steps": decays,
    "lr_scheduler.decay_ratio": decays,
    "lr_scheduler.decay_type": decays,
    "lr_scheduler.min_lr_factor": ends_above_zero,
    "checkpoint.async_mode": saves_in_thread,
    "activation_checkpoint.mode": recomputes,
    "activation_checkpoint.selective_ac_option": recomputes,
    "activation_checkpoint.memory_budget": recomputes,
    "compile.enable": compiles,
    "compile.components": compiles,
    "compile.backend": compiles,
    "quantize.linear.float8.recipe_name": multiplies_in_float8,
    "quantize.linear.float8.filter_fqns": filters_linears,
    "quantize.linear.float8.emulate": multiplies_in_float8,
    "quantize.linear.float8.enable_fsdp_float8_all_gather": gathers_in_float8,
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": precomputes_scales,
}


# ---------------------------------------------------------------- steps of a trial


@contextmanager
def actions_noted(acted: Acted, profiled: int | None) -> Iterator[None]:
    """Context manager: note in `acted` which keys act in the steps of this rank.

    `profiled` is the number of the step whose operators are profiled. A profiled step takes as long as three others.
    """
    train_step = stepping.train_step
    n_steps = 0

    def watch(run: build.Run, batch: Batch, *args) -> stepping.StepResult:
        nonlocal n_steps
        biases = {}
        if run.balance:
            biases = {fqn: bias.clone() for fqn, bias in run.balance.biases.items()}
        profiler = profile(enabled=n_steps == profiled, record_shapes=True)
        n_steps += 1
        with profiler:
            result = train_step(run, batch, *args)
        step = Observed(run, batch, result, biases, *count_events(profiler))
        seen = {key: witness(step) for key, witness in WITNESSES.items()}
        acted.update(merge([acted, seen]))
        return result

    with patch.object(stepping, "train_step", watch):
        yield


def merge(observations: Iterable[Acted]) -> Acted:
    """Merge the observations of steps and ranks. A key acted if it acted in any, and is off if it was off in all."""
    merged: Acted = {}
    for acted in observations:
        for key, is_acting in acted.items():
            known = merged.get(key)
            merged[key] = is_acting if known is None else known or bool(is_acting)
    return merged
