"""Check that a layout rounds where one rank rounds: the steps of the plain loop in bfloat16 or float8.

    one rank      runs the same microbatches one by one; gradients are rounded per microbatch and summed in float32
    the layout    dp and pp only change the order of float32 sums, so they may differ from one rank by 1e-5. tp and cp
                  add partial products in bfloat16. Their errors, measured against the plain loop in float32, may be
                  twice the errors of one rank

In both cases, rotary angles must be computed in float32, FSDP must reduce gradients in float32, and gradients must be
the sums of the gradients of their microbatches (rounding.py).
"""

from dataclasses import replace
from pathlib import Path

import torch

from torchtitan_lite.config.block import SKIP_SMALL
from torchtitan_lite.config.schema import Config, with_value
from torchtitan_lite.tools.verify.measures import Key
from torchtitan_lite.tools.verify.plain import run_plainly
from torchtitan_lite.tools.verify.rank import compare_steps
from torchtitan_lite.tools.verify.reduction import (
    Reduction,
    leave_out_compiler,
    override,
    put_on_one_rank,
)
from torchtitan_lite.tools.verify.trial import BOUNDS, SUMS, RunRanks, Trial, judge
from torchtitan_lite.tools.verify.witnesses import merge

# name -> steps; lower limit of a bound, because the errors of one rank may cancel in its loss
PRECISIONS = {"bfloat16": (1, 1e-3), "float8": (3, 1e-2)}
# With ep, experts multiply the rows of several ranks at once, and add them in another order. One rank adds the two
# gradients of a tied matrix in the compute dtype, but stages add them in float32.
ROUNDED_OFTEN = 2e-2
NOT_JUDGED = ("gradient norm", "state", "updates")  # they belong to gradients of the plain loop


def try_precision(name: str, reduction: Reduction, run_ranks: RunRanks, folder: Path) -> Trial:
    """Run the layout in the precision `name`: "bfloat16" or "float8"."""
    n_steps, least = PRECISIONS[name]
    layout = reduction.layout
    config = make_config(reduction, float8=name == "float8")
    precompute = "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"
    alone = override(put_on_one_rank(config, layout.microbatch_size), {precompute: False})
    steps = [replace(step, outputs={}) for step in run_plainly(config, n_steps)]
    path = folder / f"{name}.pt"
    torch.save(steps, path)
    (one,) = run_ranks(compare_steps, 1, alone, str(path))
    is_exact = layout.tp == layout.cp == 1
    if is_exact:
        rounded = [replace(step, **own) for step, own in zip(steps, one.results, strict=True)]
        torch.save(rounded, path)
    ranks = run_ranks(compare_steps, layout.world_size, config, str(path))

    def choose_bound(key: Key) -> float | None:
        _, measure, fqn = key
        if measure in NOT_JUDGED:
            return None
        if measure not in ("loss", "gradients"):
            return BOUNDS[measure]
        if not is_exact:
            return 2 * one.errors[key] + least
        is_tied = layout.tied and fqn == "tok_embeddings.weight"
        is_of_experts = layout.ep > 1 and ".feed_forward." in fqn
        return ROUNDED_OFTEN if is_tied or is_of_experts else SUMS

    ran = with_value(config, "training.max_norm", round(steps[0].max_norm, 3))
    return replace(
        judge(name, ranks, choose_bound), ran=((ran, merge(rank.acted for rank in ranks)),)
    )


def make_config(reduction: Reduction, *, float8: bool) -> Config:
    keys: dict[str, object] = {
        "training.mixed_precision_param": "bfloat16",
        # both halves of the microbatches would add them
        "training.expert_balance_loss": 0.0,
        "training.router_z_loss": 0.0,
    }
    if float8:
        section = reduction.real.quantize.linear.float8
        filters = [fqn for fqn in section.filter_fqns if fqn != SKIP_SMALL]
        keys["model.converters"] = reduction.real.model.converters
        keys["quantize.linear.float8"] = replace(section, emulate=True, filter_fqns=filters)
    return override(leave_out_compiler(reduction.config), keys)
