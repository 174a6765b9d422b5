"""Name the first module whose output differs. Runs when a loss, a count or a gradient is wrong.

    reference   output of one process: rows x sequence x width
    one rank    its rows, one microbatch at a time; with cp, an early and a late piece of the sequence; with tp, a slice
                of the sequence, the heads or the width

Each rank cuts its piece out of the reference and compares, without communication.
"""

from collections import defaultdict

import torch
from torch import Tensor, nn

from torchtitan_lite import step as stepping
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.schema import Config
from torchtitan_lite.tools.verify.plain import PlainModel, PlainStep
from torchtitan_lite.tools.verify.rank import (
    Coordinates,
    Seen,
    build_small_run,
    give_weights,
    local,
    own_rows,
    packing_checked,
    relative_error,
    settle_ties,
)


def watch_plainly(config: Config, plain: PlainStep) -> dict[str, Tensor]:
    """Run one process, and return the output of each module in forward order. For the head, return token losses."""
    model, outputs = PlainModel(config), {}

    def note(name: str):
        return lambda module, args, output: outputs.setdefault(name, output.detach())

    for name, module in model.model.named_modules():
        if name:
            module.register_forward_hook(note(name))
    with torch.no_grad():
        logits = model.logits(plain.batch)
    flat = logits.flatten(0, 1), plain.batch.targets.flatten()
    token_losses = nn.functional.cross_entropy(*flat, reduction="none").view_as(plain.batch.targets)
    return {
        name: token_losses if output.shape == logits.shape else output
        for name, output in outputs.items()
    }


def compare_outputs(rank: int, world_size: int, config: Config, path: str) -> Seen:
    """Worker: run forward and backward of the first step, and compare the output of every module. Collective."""
    plain, right = torch.load(path, weights_only=False, mmap=True)
    run = build_small_run(config, world_size)
    give_weights(run, plain.weights)
    settle_ties(run, plain)
    batch = stepping.shard_for_cp(run, own_rows(run, plain.batch))
    n_tokens = stepping.count_global_tokens(run, batch)
    if (
        run.schedule is not None
    ):  # the first step of a schedule also calls each part once to infer shapes
        stepping.forward_backward(run, batch, n_tokens)
    seen, outputs = Seen(run.mesh.coordinates()), defaultdict(list)

    def note(name: str):
        def keep(module, args, output) -> None:
            if torch._C._current_graph_task_id() == -1:  # skip the recompute in backward
                outputs[name].append(local(output).clone())

        return keep

    for part in run.parts:
        for name, module in part.named_modules():
            inside = any(name.startswith(f"layers.{layer}.") for layer in part.layers)
            if name in right and not (
                config.compile.enable and inside
            ):  # a hook would cause a graph break
                module.register_forward_hook(note(name))
    with packing_checked(seen, 0):
        stepping.forward_backward(run, batch, n_tokens)
    for name in sorted(outputs, key=list(right).index):
        pieces = outputs[name]
        n_microbatches = run.layout.n_microbatches
        if len(pieces) != n_microbatches:
            seen.note(0, "microbatches", name, abs(len(pieces) - n_microbatches))
        for number, piece in enumerate(pieces[:n_microbatches]):
            whole = cut_piece(
                right[name], piece, seen.coordinates, run.layout, number, config.training.seq_len
            )
            error = relative_error(piece, whole) if piece.shape == whole.shape else float("inf")
            seen.note(0, "module output", name, error)
    return seen


def cut_piece(
    whole: Tensor, piece: Tensor, at: Coordinates, layout: Layout, number: int, seq_len: int
) -> Tensor:
    """Return the expected value of one rank's `piece` of microbatch `number`.

    The sequence dim is recognized by its length, which no other dim has. A dim that is still longer than in the piece
    is sharded over tp.
    """
    data_rank = at["dp_replicate"] * layout.dp_shard + at["dp_shard"]
    first = data_rank * layout.global_batch_size // layout.dp + number * layout.microbatch_size
    right = whole[first : first + layout.microbatch_size]
    dim = next((dim for dim in range(1, right.dim()) if right.shape[dim] == seq_len), None)
    if (
        layout.cp > 1
        and dim is not None
        and not (dim < piece.dim() and piece.shape[dim] == seq_len)
    ):
        pieces = right.chunk(2 * layout.cp, dim)
        right = torch.cat((pieces[at["cp"]], pieces[-1 - at["cp"]]), dim)
    if piece.dim() == 0:  # the head with its loss: a sum over the tokens of this piece
        return right.sum()
    for dim in range(min(right.dim(), piece.dim())):
        if right.shape[dim] == layout.tp * piece.shape[dim]:
            right = right.chunk(layout.tp, dim=dim)[at["tp"]]
    return right
