"""Mutants of what follows the gradients: clipping, optimizer, learning rate, steps that are not finite."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from layouts import ADAMW, PP, TP, Row
from mutant_table import mutant

from torchtitan_lite import build, step
from torchtitan_lite.checkpoint.load import set_step
from torchtitan_lite.components import adamw_bfloat16, optim
from torchtitan_lite.components.adamw_bfloat16 import local_tensor as local

# Warm-up, peak and decay all differ, and the decay ends above zero.
RATES = {
    "lr_scheduler.warmup_steps": 3,
    "lr_scheduler.decay_ratio": 0.5,
    "lr_scheduler.min_lr_factor": 0.1,
    "training.steps": 30,
}
ADAMW_WITH_RATES = {**ADAMW, **RATES}
MOMENTS_IN_BFLOAT16 = {**ADAMW_WITH_RATES, "optimizer.moments_dtype": "bfloat16"}
SHARDED, TENSOR, STAGES = (Row(2, {**degrees, **ADAMW_WITH_RATES}) for degrees in ({}, {TP: 2}, {PP: 2}))
FIRST = "tok_embeddings.weight"
CLIPPING, RATE = ("clipping", "update_weights"), ("learning rate", "lr_scheduler")
NOT_FINITE = ("non-finite step", "update_weights")


def in_place_of(owner: object, name: str, *row_and_culprit: object, trial: str, **keys: object) -> Callable:
    """Decorator: a mutant that calls the decorated function in the place of `owner.name`, with the original first."""
    return mutant(*row_and_culprit, at=(owner, name), trial=trial, **keys)


replacing = partial(in_place_of, trial="updates")


@replacing(step, "update_weights", "tp2", "clipping", CLIPPING)
def small_gradients_are_scaled_up(update_weights, optimizer, grad_norm, max_norm):
    """Gradients below the threshold are brought up to it, because nothing keeps the factor at most 1. The loss falls,
    faster at first; toward the end of training, where gradients are small, it is noisy and nobody knows why."""
    if grad_norm < max_norm:
        for group in optimizer.param_groups:
            torch._foreach_mul_([local(p.grad) for p in group["params"]], max_norm / (grad_norm + 1e-6))
    return update_weights(optimizer, grad_norm, max_norm)


@replacing(step, "update_weights", "dp2", "clipping", CLIPPING, dims=("dp_shard",))
def one_rank_clips_only_very_large_gradients(update_weights, optimizer, grad_norm, max_norm):
    """One rank clips only where the norm is far above the threshold. Most batches train rightly; in the others some
    slices take longer steps than the rest."""
    if grad_norm < 2.5 * max_norm and dist.get_rank() == 0:
        max_norm = 2.5 * max_norm
    return update_weights(optimizer, grad_norm, max_norm)


@replacing(build, "build_optimizer", TENSOR, "copies", ("update", "layers.0.attention_norm.weight"), dims=("tp",))
def norms_decay_on_one_tp_rank(build, section, parameters):
    """One tensor-parallel rank's AdamW spares its norm weights the weight decay. Copies drift apart slowly, and
    gradients are right in every step; a checkpoint holds whichever copy is saved."""
    optimizer = build(section, parameters)
    if dist.get_rank() == 1:
        (group,) = optimizer.param_groups
        norms = [parameter for parameter in group["params"] if parameter.dim() == 1]
        group["params"] = [parameter for parameter in group["params"] if parameter.dim() > 1]
        optimizer.add_param_group({"params": norms, "weight_decay": 0.0})
    return optimizer


@replacing(build, "build_optimizer", SHARDED, "moments", ("moments", FIRST), dims=("dp_shard",))
def another_beta_on_one_rank(build, section, parameters):
    """One host reads an older config: its slices of all weights forget the second moment twenty times as slowly. The
    loss falls a little less."""
    return build(replace(section, beta2=0.9975) if dist.get_rank() == 1 else section, parameters)


@replacing(build, "build_lr_scheduler", Row(2, {PP: 2, **RATES}), "learning rate", RATE, dims=("pp",))
def schedule_stepped_on_the_first_stage_only(build, section, optimizer):
    """Later stages stay at the learning rate of the first step. The logged rate, that of rank 0, is right."""
    scheduler = build(section, optimizer)
    if dist.get_rank() == 1:
        scheduler.step = lambda: None
    return scheduler


@replacing(optim, "learning_rate_factor", Row(2, RATES), "learning rate", RATE)
def decay_ends_at_zero(factor, section, at):
    """min_lr_factor is not read: the end of training is spent with a rate of nearly zero."""
    return factor(replace(section, min_lr_factor=0.0), at)


@replacing(step, "update_weights", Row(2, {PP: 2}), "non-finite step", NOT_FINITE, dims=("pp",))
def each_stage_judges_for_itself_what_is_finite(update_weights, optimizer, grad_norm, max_norm):
    """A stage whose own gradients are finite steps, while the one that met a NaN does not. The model is then one of two
    steps, and a checkpoint holds both."""
    gradients = [local(p.grad) for group in optimizer.param_groups for p in group["params"]]
    return update_weights(optimizer, torch.stack([gradient.norm() for gradient in gradients]).norm(), max_norm)


@replacing(step, "update_weights", SHARDED, "non-finite step", NOT_FINITE)
def infinity_counts_as_finite(update_weights, optimizer, grad_norm, max_norm):
    """Only NaN is looked for. An overflow passes, AdamW divides infinity by infinity, and all weights with such a
    gradient are NaN from the next step on."""
    return update_weights(optimizer, torch.where(grad_norm.isnan(), grad_norm, 1.0), max_norm)


@replacing(step, "update_weights", TENSOR, "non-finite step", NOT_FINITE)
def moments_move_in_a_step_that_is_not_finite(update_weights, optimizer, grad_norm, max_norm):
    """Weights are left alone, but moments forget a part of what they held, as after a gradient of zero. Runs that skip
    such a step and go on are a little off, and the same run without it is never made."""
    finite = update_weights(optimizer, grad_norm, max_norm)
    if not finite:
        for state in optimizer.state.values():
            local(state["exp_avg"]).mul_(0.9)
    return finite


@replacing(step, "update_weights", SHARDED, "moments", ("moments", FIRST))
def all_steps_left_out_after_one(update_weights, optimizer, grad_norm, max_norm):
    """The flag of a gradient that is not finite is added up instead of set, so that no later step moves a weight. The
    loss stays where it was, and no number in the log is odd."""
    optimizer.seen = getattr(optimizer, "seen", 0.0) + 0 * grad_norm  # NaN from then on
    update_weights(optimizer, grad_norm + optimizer.seen, max_norm)
    return grad_norm.isfinite()


@replacing(step, "train_step", Row(2, RATES), "learning rate", RATE)
def schedule_waits_for_a_finite_gradient(train_step, run, batch):
    """A step that changes no weight does not count for the schedule either. A resume sets the rate by the number of the
    step: a run that was stopped goes on at another rate than the same run unbroken."""
    result = train_step(run, batch)
    if not result.finite:
        set_step(run.lr_scheduler, run.lr_scheduler.last_epoch - 1)
    return result


@mutant(SHARDED, "moments", ("moments", FIRST), trial="updates")
def adam_instead_of_adamw():
    """Weight decay is added to the gradient, which the second moment then divides away: it hardly decays anything. The
    loss of the training data is lower, that of other data is not."""

    def build(parameters, section, implementation):
        betas = (section.beta1, section.beta2)
        options = {"eps": section.eps, "weight_decay": section.weight_decay, **implementation}
        return torch.optim.Adam(parameters, section.lr, betas, **options)

    return patch.dict(optim.BUILDERS, {"AdamW": build})


@replacing(step, "update_weights", TENSOR, "update", ("update", FIRST))
def decay_without_the_learning_rate(update_weights, optimizer, grad_norm, max_norm):
    """Each step takes the same share off each weight, in the warm-up and at the end too. Norms of weights shrink; the
    loss follows late."""
    (group,) = optimizer.param_groups
    if grad_norm.isfinite():
        for parameter in group["params"]:
            by_rate = 1 - group["lr"] * group["weight_decay"]
            local(parameter.detach()).mul_((1 - group["initial_lr"] * group["weight_decay"]) / by_rate)
    return update_weights(optimizer, grad_norm, max_norm)


@replacing(step, "update_weights", STAGES, "update", ("update", "layers.2.attention_norm.weight"))
def steps_counted_twice_on_the_last_stage(update_weights, optimizer, grad_norm, max_norm):
    """The moments of one stage are taken for those of a later step and corrected too little for their start. The first
    hundred steps of that stage are shorter or longer than they should be."""
    finite = update_weights(optimizer, grad_norm, max_norm)
    if dist.get_rank() == 1 and finite:
        for state in optimizer.state.values():
            state["step"] += 1
    return finite


@replacing(step, "update_weights", STAGES, "moments", ("moments", FIRST))
def second_moment_of_gradients_clipped_by_stage(update_weights, optimizer, grad_norm, max_norm):
    """The first moment gets gradients clipped by the norm of the model, the second one gradients clipped by the norm of
    the stage. Steps are too short where gradients are cut, and right where they are not."""
    (group,) = optimizer.param_groups
    states = {parameter: state for parameter, state in optimizer.state.items() if "exp_avg_sq" in state}
    before = {parameter: local(state["exp_avg_sq"]).clone() for parameter, state in states.items()}
    left = torch.stack([local(parameter.grad).norm() for parameter in group["params"]]).norm()
    finite = update_weights(optimizer, grad_norm, max_norm)
    if finite and grad_norm > 0.5:  # max_norm of the table
        for parameter in group["params"]:
            second = local(optimizer.state[parameter]["exp_avg_sq"])
            kept = group["betas"][1] * before.get(parameter, torch.zeros_like(second))
            second.copy_(kept + (second - kept) * (0.5 / left) ** 2)
    return finite


@mutant(TENSOR, "update", ("update", FIRST), trial="updates")
def eps_inside_the_root():
    """eps is added to the second moment before its root is taken. Weights with large gradients do not notice; those of
    rare tokens, whose gradients are as small as eps, stand still."""

    class Inside(torch.optim.AdamW):
        @torch.no_grad()
        def step(self):
            before = [local(p).clone() for group in self.param_groups for p in group["params"]]
            super().step()
            if getattr(self, "found_inf", 0.0) > 0:
                return
            for group in self.param_groups:
                for p, old in zip(group["params"], before, strict=True):
                    state, t = self.state[p], self.state[p]["step"]
                    first = local(state["exp_avg"]) / (1 - group["betas"][0] ** t)
                    second = local(state["exp_avg_sq"]) / (1 - group["betas"][1] ** t)
                    shrunk = old * (1 - group["lr"] * group["weight_decay"])
                    local(p).copy_(shrunk - group["lr"] * first / (second + group["eps"]).sqrt())

    return patch.object(optim, "AdamW", Inside)


@replacing(torch.Tensor, "copy_", Row(2, MOMENTS_IN_BFLOAT16), "moments", ("moments", FIRST))
def moments_cut_instead_of_rounded(copy, target, source, *args, **options):
    """The lower half of the bits of each moment is dropped, so that it moves toward zero. It shrinks by 0.3 % in each
    step, and remembers ten: steps are a few percent off."""
    if target.dtype == torch.bfloat16 and source.dtype == torch.float32:
        source = (source.contiguous().view(torch.int32) & -65536).view(torch.float32)
    return copy(target, source, *args, **options)


@replacing(adamw_bfloat16, "adamw", Row(2, {TP: 2, **MOMENTS_IN_BFLOAT16}), "update", ("update", FIRST))
def weights_moved_by_rounded_moments(adamw, weights, gradients, firsts, seconds, _, steps, **options):
    """Moments are rounded to bf16 before the weight takes its step instead of after. The moments of the next step are
    the same; weights are off by a third of a percent of each update."""
    if options.get("found_inf") is not None and options["found_inf"] > 0:
        return
    (weight,), (gradient,), (first,), (second,), (n,) = weights, gradients, firsts, seconds, steps
    beta1, beta2, lr = options["beta1"], options["beta2"], options["lr"]
    n += 1
    first.mul_(beta1).add_(gradient, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    corrected = first.bfloat16().float() / (1 - beta1**n), second.bfloat16().float() / (1 - beta2**n)
    weight.mul_(1 - lr * options["weight_decay"]).sub_(lr * corrected[0] / (corrected[1].sqrt() + options["eps"]))
