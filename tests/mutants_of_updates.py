"""Mutants of what follows the gradients: clipping, optimizer, learning rate, steps that are not finite."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from unittest.mock import patch

import torch
import torch.distributed as dist
from layouts import ADAMW, PP, TP, Row
from mutant_table import mutant
from torch.distributed.tensor import DTensor

from torchtitan_lite import step
from torchtitan_lite.components import adamw_bfloat16, optim

# Warm-up, peak and decay all differ, and the decay ends above zero.
RATES = {
    "lr_scheduler.warmup_steps": 3,
    "lr_scheduler.decay_ratio": 0.5,
    "lr_scheduler.min_lr_factor": 0.1,
    "training.steps": 30,
}
ADAMW_WITH_RATES = {**ADAMW, **RATES}
MOMENTS_IN_BFLOAT16 = {**ADAMW_WITH_RATES, "optimizer.moments_dtype": "bfloat16"}
FIRST = "tok_embeddings.weight"


def change_optimizer(change: Callable) -> AbstractContextManager:
    """`change(optimizer)` right after a run has built it."""
    original = step.build_optimizer

    def build(section, parameters):
        optimizer = original(section, parameters)
        change(optimizer)
        return optimizer

    return patch.object(step, "build_optimizer", build)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@mutant("tp2", "clipping", ("clipping", "clip_grad_norm"), trial="updates")
def small_gradients_are_scaled_up():
    """Gradients below the threshold are brought up to it, because nothing keeps the factor at most 1. The loss falls,
    faster at first; toward the end of training, where gradients are small, it is noisy and nobody knows why."""
    original = step.clip_grad_norm

    def unclamped(parameters, max_norm):
        parameters = list(parameters)
        norm = original(parameters, max_norm)
        if norm < max_norm:
            for parameter in parameters:
                local_of(parameter.grad).mul_(max_norm / (norm + 1e-6))
        return norm

    return patch.object(step, "clip_grad_norm", unclamped)


@mutant("dp2", "clipping", ("clipping", "clip_grad_norm"), dims=("dp_shard",), trial="updates")
def one_rank_clips_only_very_large_gradients():
    """To save a pass over its slices, one rank clips them only where the norm is far above the threshold. Most batches
    train rightly; in the others some slices take longer steps than the rest."""
    original = step.clip_grad_norm

    def only_far_above(parameters, max_norm):
        parameters = list(parameters)
        before = [local_of(parameter.grad).clone() for parameter in parameters]
        norm = original(parameters, max_norm)
        if norm < 2.5 * max_norm and dist.get_rank() == 0:
            for parameter, old in zip(parameters, before, strict=True):
                local_of(parameter.grad).copy_(old)
        return norm

    return patch.object(step, "clip_grad_norm", only_far_above)


@mutant(
    Row(2, {TP: 2, **ADAMW_WITH_RATES}),
    "replicas",
    ("update", "layers.0.attention_norm.weight"),
    dims=("tp",),
    trial="updates",
)
def norms_decay_on_one_tp_rank():
    """One tensor-parallel rank's AdamW spares its norm weights the weight decay. Copies drift apart slowly, and
    gradients are right in every step; a checkpoint holds whichever copy is saved."""

    def exempt_norms(optimizer):
        if dist.get_rank() == 1 and isinstance(optimizer, torch.optim.AdamW):
            (group,) = optimizer.param_groups
            norms = [parameter for parameter in group["params"] if parameter.dim() == 1]
            group["params"] = [parameter for parameter in group["params"] if parameter.dim() > 1]
            optimizer.add_param_group({"params": norms, "weight_decay": 0.0})

    return change_optimizer(exempt_norms)


@mutant(Row(2, ADAMW_WITH_RATES), "moments", ("moments", FIRST), dims=("dp_shard",), trial="updates")
def another_beta_on_one_rank():
    """One host reads an older config: its slices of all weights forget the second moment twenty times as slowly. The
    loss falls a little less."""

    def remember_longer(optimizer):
        if dist.get_rank() == 1:
            optimizer.param_groups[0]["betas"] = (0.9, 0.9975)

    return change_optimizer(remember_longer)


@mutant(Row(2, {PP: 2, **RATES}), "learning_rate", ("learning rate", "lr_scheduler"), dims=("pp",), trial="updates")
def schedule_stepped_on_the_first_stage_only():
    """Later stages stay at the learning rate of the first step. The logged rate, that of rank 0, is right."""
    original = step.build_lr_scheduler

    def build(section, optimizer):
        scheduler = original(section, optimizer)
        if dist.get_rank() == 1:
            scheduler.step = lambda: None
        return scheduler

    return patch.object(step, "build_lr_scheduler", build)


@mutant(Row(2, RATES), "learning_rate", ("learning rate", "lr_scheduler"), trial="updates")
def decay_ends_at_zero():
    """min_lr_factor is not read: the end of training is spent with a rate of nearly zero."""
    original = optim.learning_rate_factor
    return patch.object(
        optim, "learning_rate_factor", lambda section, at: original(replace(section, min_lr_factor=0.0), at)
    )


@mutant(Row(2, {PP: 2}), "non_finite", ("non-finite step", "step_if_finite"), dims=("pp",), trial="updates")
def each_stage_judges_for_itself_what_is_finite():
    """A stage whose own gradients are finite steps, while the one that met a NaN does not. The model is then one of two
    steps, and a checkpoint holds both."""
    original = step.step_if_finite

    def judge_own(optimizer, grad_norm):
        gradients = [local_of(p.grad) for group in optimizer.param_groups for p in group["params"]]
        return original(optimizer, torch.stack([gradient.norm() for gradient in gradients]).norm())

    return patch.object(step, "step_if_finite", judge_own)


@mutant(Row(2, ADAMW_WITH_RATES), "non_finite", ("non-finite step", "step_if_finite"), trial="updates")
def infinity_counts_as_finite():
    """Only NaN is looked for. An overflow passes, AdamW divides infinity by infinity, and all weights with such a
    gradient are NaN from the next step on."""

    def unless_nan(optimizer, grad_norm):
        return original(optimizer, torch.where(grad_norm.isnan(), grad_norm, 1.0))

    original = step.step_if_finite
    return patch.object(step, "step_if_finite", unless_nan)


@mutant(Row(2, {TP: 2, **ADAMW_WITH_RATES}), "non_finite", ("non-finite step", "step_if_finite"), trial="updates")
def moments_move_in_a_step_that_is_not_finite():
    """Weights are left alone, but moments forget a part of what they held, as after a gradient of zero. Runs that skip
    such a step and go on are a little off, and the same run without it is never made."""
    original = step.step_if_finite

    def forgetful(optimizer, grad_norm):
        finite = original(optimizer, grad_norm)
        if not finite:
            for state in optimizer.state.values():
                local_of(state["exp_avg"]).mul_(0.9)
        return finite

    return patch.object(step, "step_if_finite", forgetful)


@mutant(Row(2, ADAMW_WITH_RATES), "moments", ("moments", FIRST), trial="updates")
def adam_instead_of_adamw():
    """Weight decay is added to the gradient, which the second moment then divides away: it hardly decays anything. The
    loss of the training data is lower, that of other data is not."""

    def build(parameters, section, implementation):
        betas = (section.beta1, section.beta2)
        options = {"eps": section.eps, "weight_decay": section.weight_decay, **implementation}
        return torch.optim.Adam(parameters, section.lr, betas, **options)

    return patch.dict(optim.BUILDERS, {"AdamW": build})


@mutant(Row(2, {TP: 2, **ADAMW_WITH_RATES}), "update", ("update", FIRST), trial="updates")
def decay_without_the_learning_rate():
    """Each step takes the same share off each weight, in the warm-up and at the end too. Norms of weights shrink; the
    loss follows late."""
    original = step.step_if_finite

    def decay_fully(optimizer, grad_norm):
        (group,) = optimizer.param_groups
        if grad_norm.isfinite():
            for parameter in group["params"]:
                by_rate = 1 - group["lr"] * group["weight_decay"]
                local_of(parameter.detach()).mul_((1 - group["initial_lr"] * group["weight_decay"]) / by_rate)
        return original(optimizer, grad_norm)

    return patch.object(step, "step_if_finite", decay_fully)


@mutant(Row(2, {PP: 2, **ADAMW_WITH_RATES}), "update", ("update", "layers.2.attention_norm.weight"), trial="updates")
def steps_counted_twice_on_the_last_stage():
    """The moments of one stage are taken for those of a later step and corrected too little for their start. The first
    hundred steps of that stage are shorter or longer than they should be."""
    original = step.step_if_finite

    def count_on(optimizer, grad_norm):
        finite = original(optimizer, grad_norm)
        if dist.get_rank() == 1 and finite:
            for state in optimizer.state.values():
                state["step"] += 1
        return finite

    return patch.object(step, "step_if_finite", count_on)


@mutant(Row(2, {PP: 2, **ADAMW_WITH_RATES}), "moments", ("moments", FIRST), trial="updates")
def second_moment_of_gradients_clipped_by_stage():
    """The first moment gets gradients clipped by the norm of the model, the second one gradients clipped by the norm of
    the stage. Steps are too short where gradients are cut, and right where they are not."""
    original = step.step_if_finite

    def clip_again(optimizer, grad_norm):
        (group,) = optimizer.param_groups
        states = {parameter: state for parameter, state in optimizer.state.items() if "exp_avg_sq" in state}
        before = {parameter: local_of(state["exp_avg_sq"]).clone() for parameter, state in states.items()}
        left = torch.stack([local_of(parameter.grad).norm() for parameter in group["params"]]).norm()
        finite = original(optimizer, grad_norm)
        if finite and grad_norm > 0.5 and "betas" in group:  # max_norm of the table
            for parameter in group["params"]:
                second = local_of(optimizer.state[parameter]["exp_avg_sq"])
                kept = group["betas"][1] * before.get(parameter, torch.zeros_like(second))
                second.copy_(kept + (second - kept) * (0.5 / left) ** 2)
        return finite

    return patch.object(step, "step_if_finite", clip_again)


@mutant(Row(2, {TP: 2, **ADAMW_WITH_RATES}), "update", ("update", FIRST), trial="updates")
def eps_inside_the_root():
    """eps is added to the second moment before its root is taken. Weights with large gradients do not notice; those of
    rare tokens, whose gradients are as small as eps, stand still."""

    class Inside(torch.optim.AdamW):
        @torch.no_grad()
        def step(self):
            before = [local_of(p).clone() for group in self.param_groups for p in group["params"]]
            super().step()
            if getattr(self, "found_inf", 0.0) > 0:
                return
            for group in self.param_groups:
                for p, old in zip(group["params"], before, strict=True):
                    state, t = self.state[p], self.state[p]["step"]
                    first = local_of(state["exp_avg"]) / (1 - group["betas"][0] ** t)
                    second = local_of(state["exp_avg_sq"]) / (1 - group["betas"][1] ** t)
                    shrunk = old * (1 - group["lr"] * group["weight_decay"])
                    local_of(p).copy_(shrunk - group["lr"] * first / (second + group["eps"]).sqrt())

    return patch.object(optim, "AdamW", Inside)


@mutant(Row(2, MOMENTS_IN_BFLOAT16), "moments", ("moments", FIRST), trial="updates")
def moments_cut_instead_of_rounded():
    """The lower half of the bits of each moment is dropped, so that it moves toward zero. It shrinks by 0.3 % in each
    step, and remembers ten: steps are a few percent off."""
    original = torch.Tensor.copy_

    def cut(target, source, *args, **options):
        if target.dtype == torch.bfloat16 and source.dtype == torch.float32:
            source = (source.contiguous().view(torch.int32) & -65536).view(torch.float32)
        return original(target, source, *args, **options)

    return patch.object(torch.Tensor, "copy_", cut)


@mutant(Row(2, {TP: 2, **MOMENTS_IN_BFLOAT16}), "update", ("update", FIRST), trial="updates")
def weights_moved_by_rounded_moments():
    """Moments are rounded to bf16 before the weight takes its step instead of after. The moments of the next step are
    the same; weights are off by a third of a percent of each update."""

    def move(lists: list, moments: list, step_list: list, *, weight_decay, eps, lr, beta1, beta2, found_inf=None, **_):
        (weight,), (gradient,) = lists
        if found_inf is not None and found_inf > 0:
            return
        (first,), (second,), (n,) = *moments, step_list
        n += 1
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        corrected = first.bfloat16().float() / (1 - beta1**n), second.bfloat16().float() / (1 - beta2**n)
        weight.mul_(1 - lr * weight_decay).sub_(lr * corrected[0] / (corrected[1].sqrt() + eps))

    def adamw(weights, gradients, firsts, seconds, _, steps, **options):
        move([weights, gradients], [firsts, seconds], steps, **options)

    return patch.object(adamw_bfloat16, "adamw", adamw)
