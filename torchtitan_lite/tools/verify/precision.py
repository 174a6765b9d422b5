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

from torchtitan_lite.config.layout import plan_layout, resolve_model
from torchtitan_lite.config.schema import Config
from torchtitan_lite.tools.verify.measures import Key
from torchtitan_lite.tools.verify.plain import Inputs, run_plainly
from torchtitan_lite.tools.verify.rank import compare_steps
from torchtitan_lite.tools.verify.reduction import (
    Reduction,
    choose_float8_sizes,
    leave_out_compiler,
    override,
    put_on_one_rank,
)
from torchtitan_lite.tools.verify.trial import BOUNDS, SUMS, RunRanks, Trial, judge

# name -> steps; lower limit of a bound, because the errors of one rank may cancel in its loss
PRECISIONS = {"bfloat16": (1, 1e-3), "float8": (5, 1e-2)}
# With ep, experts multiply the rows of several ranks at once, and add them in another order. One rank adds the two
# gradients of a tied matrix in the compute dtype, but stages add them in float32.
ROUNDED_OFTEN = 2e-2
NOT_JUDGED = ("gradient norm", "state", "updates")  # they belong to gradients of the plain loop
FAR = 8192  # bfloat16 does not represent all integers above 256


def try_precision(name: str, reduction: Reduction, run_ranks: RunRanks, folder: Path) -> Trial:
    """Run the layout in the precision `name`: "bfloat16" or "float8"."""
    n_steps, least = PRECISIONS[name]
    config = make_config(reduction, float8=name == "float8")
    layout = plan_layout(config, resolve_model(config.model), reduction.layout.world_size)
    precompute = "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"
    alone = override(put_on_one_rank(config, layout.microbatch_size), {precompute: False})
    inputs = Inputs(n_steps=n_steps, first_position=FAR, biases_decide=True)
    steps = run_plainly(override(config, {"model.converters": []}), inputs)
    steps[0] = replace(steps[0], outputs={})
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
            return BOUNDS.get(measure)
        if not is_exact:
            return 2 * one.errors[key] + least
        is_tied = layout.tied and fqn == "tok_embeddings.weight"
        is_of_experts = layout.ep > 1 and ".feed_forward." in fqn
        return ROUNDED_OFTEN if is_tied or is_of_experts else SUMS

    return replace(judge(name, ranks, steps, choose_bound), ran=(config,))


def make_config(reduction: Reduction, *, float8: bool) -> Config:
    real = reduction.real
    keys: dict[str, object] = {"training.mixed_precision_param": "bfloat16"}
    if float8:
        keys["model.converters"] = real.model.converters
        keys["quantize.linear.float8"] = replace(real.quantize.linear.float8, emulate=True)
        keys |= choose_float8_sizes(reduction)
    return override(leave_out_compiler(reduction.config), keys)
