"""Check where a rank rounds: integers of ZeRO++, dtype of FSDP's reductions, float8 scales, sums in bfloat16."""

import math
from contextlib import AbstractContextManager
from dataclasses import replace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lite import build
from torchtitan_lite import step as stepping  # a module, so tests can patch its functions
from torchtitan_lite.config.features import INT8_BLOCK
from torchtitan_lite.extensions.float8_all_gather import PrecomputedScales, find_amax
from torchtitan_lite.extensions.zero_plus_plus import Packing
from torchtitan_lite.model.batch import Batch, find_fields
from torchtitan_lite.model.float8_linear import E4M3, choose_scale
from torchtitan_lite.model.loss import IGNORE_INDEX, count_valid_tokens
from torchtitan_lite.tools.verify.errors import Seen, local, relative_error
from torchtitan_lite.tools.verify.plain import PlainStep


def packing_checked(seen: Seen) -> AbstractContextManager:
    """Context manager: check the rounding errors of the numbers that ZeRO++ packs, but send the numbers without
    rounding, because rounding would hide other errors."""
    pack = Packing.pack
    unpack = Packing.unpack
    remove_padding = Packing.remove_padding

    def check_and_send(self: Packing, rows: Tensor) -> Tensor:
        rounded = torch.empty(rows.shape)
        remove_padding(self, unpack(self, pack(self, rows)), rounded)
        pair = torch.stack([rows.float(), rounded - rows]).abs()
        for tensors in pair.split(self.sizes, -1):
            for blocks in tensors.split(INT8_BLOCK, -1):
                block, error = blocks
                largest = block.amax(-1, keepdim=True)
                half_scale = largest / 253.9  # half of the distance between integers, plus a margin
                worst = error / (half_scale + 1e-30)
                seen.note("packing", "zero_plus_plus", worst.max().item())
        sent = rows.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        sent = sent.view(torch.int8)
        # In a real run, the other ranks receive rounded numbers. `rows` is filled with NaN, to detect whether this rank
        # uses its unrounded numbers afterwards.
        rows.fill_(math.nan)
        return sent

    def receive(self: Packing, sent: Tensor) -> Tensor:
        return sent.view(torch.float32)

    def write(self: Packing, numbers: Tensor, rows: Tensor) -> None:
        rows.copy_(numbers)

    return patch.multiple(
        Packing,
        pack=check_and_send,
        unpack=receive,
        remove_padding=write,
    )


def reductions_noted(seen: Seen) -> AbstractContextManager:
    """Context manager: record whether FSDP reduces gradients in float32."""
    name = "reduce_scatter_tensor"
    if hasattr(dist, "reduce_scatter_single"):  # since torch 2.13
        name = "reduce_scatter_single"
    reduce_scatter = getattr(dist, name)

    def reduce(output: Tensor, input: Tensor, *args, **options) -> object:
        is_rounded = input.dtype != torch.float32
        seen.note("reduced in float32", "FSDP", float(is_rounded))
        return reduce_scatter(output, input, *args, **options)

    return patch.object(dist, name, reduce)


def list_scales(run: build.Run) -> list[PrecomputedScales]:
    """Return the float8 scales that the run computes after each update."""
    return [each for each in run.after_update if isinstance(each, PrecomputedScales)]


def compare_scales(precomputed: PrecomputedScales, seen: Seen) -> None:
    """Compare the scales for the next step with scales computed from the updated weights. Collective."""
    group = precomputed.mesh.get_group(precomputed.mesh.ndim - 1)
    for hook in precomputed.hooks:
        amax = find_amax(hook.shard)
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
        right = choose_scale(amax, E4M3)
        seen.compare("scales", "precompute_scales", hook.scale.item(), right.item())


def sums_in_bfloat16(run: build.Run) -> bool:
    """Return whether a step adds the bfloat16 gradients of several microbatches, and uses no feature that rounds them
    further."""
    config = run.config
    is_rounded = config.model.uses_float8 or "qgz" in config.parallelism.zero_plus_plus
    is_bfloat16 = config.training.mixed_precision_param == "bfloat16"
    return is_bfloat16 and run.layout.n_microbatches > 1 and not is_rounded


def compare_with_halves(run: build.Run, plain: PlainStep, batch: Batch, seen: Seen) -> None:
    """Compare the gradients of all microbatches with the sum of the gradients of two halves. Collective.

    If the sum over microbatches is rounded to bfloat16, the two results differ, because the sums of the halves are
    rounded differently.
    """
    differences = dict(seen.results[-1]["gradients"])
    rows = torch.arange(len(batch.tokens))
    microbatches = rows // run.layout.microbatch_size
    is_even = microbatches % 2 == 0
    fields = find_fields(run.config.training.loss, run.config.model.name)
    # The loss of each half must be divided by the number of tokens in the whole batch.
    n_tokens = count_valid_tokens(plain.batch.targets)
    with patch.object(stepping, "count_global_tokens", lambda *_: n_tokens):
        for is_left_out in (is_even, ~is_even):
            targets = batch.targets.masked_fill(is_left_out[:, None], IGNORE_INDEX)
            half = replace(batch, targets=targets).with_fields(fields)
            stepping.compute_gradients(run, half)
            for fqn, difference in differences.items():
                differences[fqn] = difference - local(run.parameters[fqn].grad)
    for fqn, difference in differences.items():
        gradient = run.parameters[fqn].grad
        local(gradient).copy_(difference)
        right = plain.gradients[fqn]
        nothing = torch.zeros_like(right)
        seen.note("sum of microbatches", fqn, relative_error(gradient, nothing, right))
