"""Mutants of the steps after backward: errors in clipping, optimizer, learning rate, and the check for gradients that
are not finite."""

from dataclasses import replace

import torch
import torch.distributed as dist
from mutant_table import mutant

from torchtitan_lite import build, step
from torchtitan_lite.dtensor import local_shard as local
from torchtitan_lite.extensions import parameter_groups

# Warm-up, peak and decay all differ, and the decay ends above zero.
RATES = {
    "lr_scheduler.warmup_steps": 3,
    "lr_scheduler.decay_ratio": 0.5,
    "lr_scheduler.min_lr_factor": 0.1,
    "lr_scheduler.total_steps": 30,
}
SHARDED = "2 | ADAMW RATES"


@mutant("tp2", "updates", "output.weight", at=(step, "update_weights"))
def small_gradients_are_scaled_up(update_weights, optimizer, grad_norm, max_norm, *is_spike):
    """Gradients with a norm below max_norm are scaled up to it, because the factor may exceed 1."""
    if grad_norm < max_norm:
        for group in optimizer.param_groups:
            torch._foreach_mul_(
                [local(p.grad) for p in group["params"]], max_norm / (grad_norm + 1e-6)
            )
    return update_weights(optimizer, grad_norm, max_norm, *is_spike)


@mutant(
    SHARDED,
    "state",
    "output.weight (exp_avg_sq)",
    at=(build, "build_optimizer"),
    dims=("dp_shard",),
)
def another_beta_on_one_rank(build, section, *args):
    """One rank has a different beta2, as if its host had read an older config."""
    return build(replace(section, beta2=0.9975) if dist.get_rank() == 1 else section, *args)


@mutant(
    "2 | PP=2 GROUPS ADAMW RATES",
    "learning rate",
    "output.weight",
    at=(parameter_groups, "find_group"),
)
def groups_numbered_on_each_stage(find_group, groups, fqn):
    """The last stage has no embedding, so it takes the factors of the embedding's group for the head."""
    is_last = dist.is_initialized() and dist.get_rank() == 1
    return groups[0] if is_last and fqn == "output.weight" else find_group(groups, fqn)


@mutant(
    "2 | PP=2 RATES",
    "schedule",
    "lr_scheduler",
    at=(build, "build_lr_scheduler"),
    dims=("pp",),
)
def schedule_stepped_on_the_first_stage_only(build, section, optimizer):
    """Only the first stage advances its schedule. Later stages keep the learning rate of the first step."""
    scheduler = build(section, optimizer)
    if dist.get_rank() == 1:
        scheduler.step = lambda: None
    return scheduler


@mutant("2 | PP=2", "finite flag", "train_step", at=(step, "update_weights"), dims=("pp",))
def each_stage_judges_for_itself_what_is_finite(
    update_weights, optimizer, grad_norm, max_norm, *is_spike
):
    """A stage updates its weights if its own gradients are finite, although another stage has a NaN."""
    gradients = [local(p.grad) for group in optimizer.param_groups for p in group["params"]]
    is_finite = all(gradient.isfinite().all() for gradient in gradients)
    return update_weights(
        optimizer, grad_norm.nan_to_num(1.0, 1.0) if is_finite else grad_norm, max_norm, *is_spike
    )


@mutant(SHARDED, "finite flag", "train_step", at=(step, "update_weights"))
def infinity_counts_as_finite(update_weights, optimizer, grad_norm, max_norm, *is_spike):
    """Gradients are only checked for NaN, so infinite gradients count as finite."""
    judged = torch.where(grad_norm.isinf(), 1.0, grad_norm)
    return update_weights(optimizer, judged, max_norm, *is_spike)


@mutant(SHARDED, "state", "output.weight (exp_avg)", at=(step, "update_weights"))
def all_steps_left_out_after_one(update_weights, optimizer, grad_norm, max_norm, *is_spike):
    """The flag for a gradient that is not finite is never reset, so no later step changes a weight."""
    optimizer.seen = getattr(optimizer, "seen", 0.0) + 0 * grad_norm  # NaN from then on
    update_weights(optimizer, grad_norm + optimizer.seen, max_norm, *is_spike)
    return grad_norm.isfinite()


@mutant(
    "2 | ADAMW RATES optimizer.moments_dtype=bfloat16",
    "state",
    "output.weight (exp_avg)",
    at=(torch.Tensor, "copy_"),
)
def moments_cut_instead_of_rounded(copy, target, source, *args, **options):
    """Moments are truncated to bfloat16 instead of rounded, so they drift toward zero."""
    if target.dtype == torch.bfloat16 and source.dtype == torch.float32:
        source = (source.contiguous().view(torch.int32) & -65536).view(torch.float32)
    return copy(target, source, *args, **options)
