"""Compare the output of every module with one process. If a result is wrong, the first wrong module is the culprit.

    reference   output of one process: rows x sequence x width
    one rank    its rows, one microbatch at a time; with cp, an early and a late piece of the sequence; with tp, a slice
                of the sequence, the heads or the width

Each rank cuts its piece out of the reference and compares, without communication. Rotary angles are compared in the
same way: they are an input of each block.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from torchtitan_lite import build
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.model.rotary import rotary_angles
from torchtitan_lite.tools.verify.measures import Coordinates, Seen, local, relative_error
from torchtitan_lite.tools.verify.plain import PlainStep


@contextmanager
def outputs_compared(run: build.Run, plain: PlainStep, seen: Seen) -> Iterator[None]:
    """Context manager: watch the modules in the first step of a run, and compare their outputs at its end."""
    angles = rotary_angles(plain.batch.positions, run.parts[0].model_args)
    pieces: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    hooks = []
    for part in run.parts:
        for name, module in part.named_modules():
            is_inside = name.count(".") > 1  # layers.0.attention
            if name not in plain.outputs or (run.config.compile.enable and is_inside):
                continue  # a hook in a compiled block would cause a graph break

            def keep(module: nn.Module, args: tuple, output: Tensor, name: str = name) -> None:
                is_recompute = torch._C._current_graph_task_id() != -1
                if is_recompute:
                    return
                pieces["module output", name].append(local(output).clone())
                if name.count(".") == 1:
                    pieces["rotary angles", name].append(args[1].clone())

            hooks.append(module.register_forward_hook(keep))
    yield
    for hook in hooks:
        hook.remove()
    layout = run.layout
    # The first step of a schedule also calls each part once to infer shapes.
    n_extra = int(run.schedule is not None)
    for (measure, name), found in pieces.items():
        found = found[n_extra:]
        n_missing = abs(len(found) - layout.n_microbatches)
        if n_missing:
            seen.note(0, "microbatches", name, n_missing)
        right = angles if measure == "rotary angles" else plain.outputs[name]
        for number, piece in enumerate(found[: layout.n_microbatches]):
            seq_len = run.config.training.seq_len
            whole = cut_piece(right, piece, seen.coordinates, layout, number, seq_len)
            error = math.inf
            if piece.shape == whole.shape:
                error = relative_error(piece, whole)
            seen.note(0, measure, name, error)


def cut_piece(
    whole: Tensor, piece: Tensor, at: Coordinates, layout: Layout, number: int, seq_len: int
) -> Tensor:
    """Return the expected value of one rank's `piece` of microbatch `number`.

    The sequence dim is recognized by its length, which no other dim has. A dim that is still longer than in the piece
    is sharded over tp.
    """
    data_rank = at["dp_replicate"] * layout.dp_shard + at["dp_shard"]
    n_rows = layout.global_batch_size // layout.dp
    first = data_rank * n_rows + number * layout.microbatch_size
    right = whole[first : first + layout.microbatch_size]
    is_split = seq_len in right.shape[1:] and seq_len not in piece.shape[1:]
    if layout.cp > 1 and is_split:
        dim = right.shape.index(seq_len, 1)
        chunks = right.chunk(2 * layout.cp, dim)
        head = chunks[at["cp"]]
        tail = chunks[-1 - at["cp"]]
        right = torch.cat((head, tail), dim)
    if piece.dim() == 0:  # the head with its loss: a sum over the tokens of this piece
        return right.sum()
    for dim in range(min(right.dim(), piece.dim())):
        if right.shape[dim] == layout.tp * piece.shape[dim]:
            right = right.chunk(layout.tp, dim=dim)[at["tp"]]
    return right
