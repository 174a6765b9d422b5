"""Check that a layout rounds where one rank rounds: run train_step once in bfloat16, or three times in float8.

    one rank      runs the same microbatches one by one; gradients are rounded per microbatch and summed in float32
    the layout    dp and pp only change the order of float32 sums, so they may differ from one rank by 1e-5. tp and cp
                  add partial products in bfloat16. Their errors, measured against the plain loop in float32, may be
                  twice the errors of one rank

In both cases, rotary angles must be computed in float32, and FSDP must reduce gradients in float32. In bfloat16, the
gradients of a step must also be the sums of the gradients of its microbatches, in float32: a layout runs the step again
with the even microbatches alone, and with the odd ones. This finds a sum that is rounded to bfloat16 on any layout,
because the halves round differently.
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lite import build
from torchtitan_lite import step as stepping
from torchtitan_lite.config.layout import plan_layout, resolve_model
from torchtitan_lite.config.schema import Config
from torchtitan_lite.model.float8_linear import E4M3, choose_scale
from torchtitan_lite.model.head import IGNORE_INDEX
from torchtitan_lite.model.rotary import rotary_angles
from torchtitan_lite.parallel.float8 import find_amax
from torchtitan_lite.tools.verify.modules import cut_piece
from torchtitan_lite.tools.verify.plain import Inputs, PlainStep, run_plainly
from torchtitan_lite.tools.verify.rank import (
    Seen,
    build_small_run,
    called_before_clipping,
    give_weights,
    own_rows,
    packing_checked,
    relative_error,
)
from torchtitan_lite.tools.verify.reduction import Reduction, override
from torchtitan_lite.tools.verify.shapes import (
    choose_float8_sizes,
    leave_out_compiler,
    put_on_one_rank,
)
from torchtitan_lite.tools.verify.trial import BOUNDS, EXACT, SUMS, RunRanks, Trial, find_worst

TWICE, ANGLES = 2.0, 1e-6
LEAST = {
    "bfloat16": 1e-3,
    "float8": 1e-2,
}  # lower limit of a bound: the errors of one rank may cancel in its loss
# With ep, experts multiply the rows of several ranks at once, and add them in another order. One rank adds the two
# gradients of a tied matrix in the compute dtype, but stages add them in float32.
ROUNDED_OFTEN = 2e-2
FAR = 8192  # bfloat16 does not represent all integers above 256
GROWTH = 1.5  # growth of the weights after each step of float8: a stale scale would be too small
SUMMED = "sum of microbatches"
SCALES = "scales"
MEASURES = ("rotary angles", "loss", "reduced in float32", "gradients")  # in the order of a step


def try_precision(name: str, reduction: Reduction, run_ranks: RunRanks, folder: Path) -> Trial:
    """Run the layout in the precision `name`: "bfloat16" or "float8"."""
    config = make_config(reduction, float8=name == "float8")
    layout = plan_layout(config, resolve_model(config.model), reduction.layout.world_size)
    precompute = "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"
    alone = override(put_on_one_rank(config, layout.microbatch_size), {precompute: False})
    n_steps, growth = (3, GROWTH) if name == "float8" else (1, 1.0)
    inputs = Inputs(n_steps=n_steps, growth=growth, first_position=FAR, biases_decide=True)
    steps = run_plainly(override(config, {"model.converters": []}), inputs)
    path = folder / f"{name}.pt"
    torch.save(steps, path)
    ((one, of_one),) = run_ranks(measure, 1, alone, str(path), keeps=True)
    exact = layout.tp == layout.cp == 1
    if exact:
        torch.save([replace(step, **own) for step, own in zip(steps, of_one, strict=True)], path)
    ranks = run_ranks(measure, layout.world_size, config, str(path))

    def choose_bound(measure: str, fqn: str, error_of_one: float) -> float:
        if measure in ("rotary angles", "reduced in float32"):
            return ANGLES if measure == "rotary angles" else EXACT
        if not exact:
            return TWICE * error_of_one + LEAST[name]
        is_tied = layout.tied and fqn == "tok_embeddings.weight"
        of_experts = layout.ep > 1 and ".feed_forward." in fqn
        return ROUNDED_OFTEN if is_tied or of_experts else SUMS

    keys = [key for measure in MEASURES for key in one.errors if key[1] == measure]
    bounds = {
        key: BOUNDS["packing"] for seen, _ in ranks for key in seen.errors if key[1] == "packing"
    }
    bounds |= {key: EXACT for seen, _ in ranks for key in seen.errors if key[1] == SCALES}
    bounds |= {key: choose_bound(key[1], key[2], one.errors[key]) for key in keys}
    bounds |= {key: SUMS for seen, _ in ranks for key in seen.errors if key[1] == SUMMED}
    return replace(find_worst(name, [seen for seen, _ in ranks], bounds), ran=(config,))


def make_config(reduction: Reduction, *, float8: bool) -> Config:
    real, config = reduction.real, leave_out_compiler(reduction.config)
    config = override(config, {"training.mixed_precision_param": "bfloat16"})
    if float8:
        emulated = replace(real.quantize.linear.float8, emulate=True)
        keys = {
            "model.converters": real.model.converters,
            "quantize.linear.float8": emulated,
            "optimizer.lr": 0.0,
        }
        config = override(config, keys | choose_float8_sizes(reduction))
    return config


# ---------------------------------------------------------------- one rank


def measure(
    rank: int, world_size: int, config: Config, path: str, *, keeps: bool = False
) -> tuple[Seen, list]:
    """Worker: measure the errors of this layout against the steps in the file `path`. Collective.

    If `keeps` is set, also returns the loss and the whole gradients of each step.
    """
    steps: list[PlainStep] = torch.load(path, weights_only=False, mmap=True)
    run = build_small_run(config, world_size)
    seen, kept = Seen(run.mesh.coordinates()), []
    if (
        run.float8_weights
    ):  # scales are computed after the optimizer step, so weights change inside it
        following = iter([*steps[1:], steps[-1]])
        run.optimizer.register_step_post_hook(lambda *_: give_weights(run, next(following).weights))
    angles: dict[str, list[Tensor]] = {}
    for part in run.parts:
        for layer, block in part.layers.items():
            to = angles[f"layers.{layer}"] = []
            block.register_forward_hook(
                partial(lambda to, _, args, out: to.append(args[1].detach().clone()), to)
            )
    for number, plain in enumerate(steps):
        if not (number and run.float8_weights):
            give_weights(run, plain.weights)
        full: dict[str, Tensor] = {}

        def compare(number: int = number, plain: PlainStep = plain, full: dict = full) -> None:
            for fqn, parameter in run.parameters.items():
                grad = parameter.grad
                seen.note(number, "gradients", fqn, relative_error(grad, plain.gradients[fqn]))
                if keeps:
                    full[fqn] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()

        with (
            called_before_clipping(compare),
            reductions_noted(seen, number),
            packing_checked(seen, number),
        ):
            loss = stepping.train_step(run, own_rows(run, plain.batch)).loss.item()
        seen.note(number, "loss", "sum_losses", abs(loss - plain.loss) / plain.loss)
        compare_angles(run, plain, angles, number, seen)
        if run.float8_weights:
            compare_scales(run, number, seen)
        is_rounded = run.config.model.uses_float8 or "qgz" in run.config.parallelism.zero_plus_plus
        if (
            run.layout.n_microbatches > 1 and not keeps and not is_rounded
        ):  # rounded halves have another sum
            compare_with_halves(run, plain, number, seen)
        kept.append({"loss": loss, "gradients": full} if keeps else {})
    return seen, kept


def compare_scales(run: build.Run, number: int, seen: Seen) -> None:
    """Compare the scales for the next step with those of the weights that it will use. Collective."""
    weights = run.float8_weights
    mesh = run.mesh.fsdp_mesh
    amax = torch.stack([find_amax(weight.shard) for weight in weights])
    dist.all_reduce(amax, dist.ReduceOp.MAX, group=mesh.get_group(mesh.ndim - 1))
    scales = torch.stack([weight.scale for weight in weights])
    error = (scales / choose_scale(amax, E4M3) - 1).abs().max()
    seen.note(number, SCALES, "precompute_scales", error.item())


def compare_with_halves(run: build.Run, plain: PlainStep, number: int, seen: Seen) -> None:
    """Compare the gradients of all microbatches with the sum of the gradients of two halves. Collective."""
    give_weights(run, plain.weights)
    batch = own_rows(run, plain.batch)
    n_rows = len(batch.tokens)
    is_even = torch.arange(n_rows) // run.layout.microbatch_size % 2 == 0
    n_tokens = torch.tensor(plain.n_tokens)
    sums = {}
    for router in run.balance.routers.values() if run.balance else ():
        router.balance_loss = 0.0  # both halves would add it for every row
    # The loss of a half is divided by the tokens of the whole batch.
    with patch.object(stepping, "count_global_tokens", lambda *_: n_tokens):
        for sign, is_counted in (
            (1, torch.ones(n_rows, dtype=torch.bool)),
            (-1, is_even),
            (-1, ~is_even),
        ):
            targets = batch.targets.masked_fill(~is_counted[:, None], IGNORE_INDEX)
            stepping.compute_gradients(run, replace(batch, targets=targets))
            for fqn, parameter in run.parameters.items():
                sums[fqn] = sign * parameter.grad + sums.get(fqn, 0)
    for fqn, difference in sums.items():
        right = plain.gradients[fqn]
        seen.note(number, SUMMED, fqn, relative_error(difference, torch.zeros_like(right), right))


def reductions_noted(seen: Seen, number: int) -> AbstractContextManager:
    """Context manager: record whether FSDP reduces gradients in float32."""
    name = (
        "reduce_scatter_single"
        if hasattr(dist, "reduce_scatter_single")
        else "reduce_scatter_tensor"
    )  # torch 2.13
    original = getattr(dist, name)
    seen.note(number, "reduced in float32", "FSDP", 0.0)

    def note(output: Tensor, input: Tensor, *args, **options):
        seen.note(number, "reduced in float32", "FSDP", float(input.dtype != torch.float32))
        return original(output, input, *args, **options)

    return patch.object(dist, name, note)


def compare_angles(
    run: build.Run, plain: PlainStep, angles: dict[str, list[Tensor]], number: int, seen: Seen
) -> None:
    """Compare the rotary angles that enter each block with float32 angles of the same positions."""
    right = rotary_angles(plain.batch.positions, resolve_model(run.config.model))
    for name, noted in angles.items():
        last_step = noted[-run.layout.n_microbatches :]
        for at, own in enumerate(last_step):
            whole = cut_piece(
                right, own, seen.coordinates, run.layout, at, run.config.training.seq_len
            )
            error = (own - whole).abs().max().item() if own.shape == whole.shape else float("inf")
            seen.note(number, "rotary angles", name, error)
