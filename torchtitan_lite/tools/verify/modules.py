"""Compare rotary angles, and, if a result is wrong, the output of every module with one process.

    reference   output of one process: rows x sequence x width
    one rank    its rows, one microbatch at a time; with cp, an early and a late piece of the sequence; with tp, a slice
                of the sequence, the heads or the width

Each rank cuts its piece out of the reference and compares, without communication. Rotary angles are compared in the
same way in every trial: they are an input of each block.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from torchtitan_lite import build
from torchtitan_lite.model.rotary import rotary_angles
from torchtitan_lite.tools.verify.measures import Note, local, relative_error
from torchtitan_lite.tools.verify.plain import PlainStep


@contextmanager
def outputs_compared(run: build.Run, plain: PlainStep, note: Note) -> Iterator[None]:
    """Context manager: watch the modules in a step, and compare their outputs at its end."""
    angles = rotary_angles(plain.batch.positions, run.parts[0].model_args)
    pieces: dict[tuple[str, str], list[Tensor]] = defaultdict(list)

    def keep(name: str, module: nn.Module, args: tuple, output: Tensor) -> None:
        is_recompute = torch._C._current_graph_task_id() != -1
        if is_recompute:
            return
        if name in plain.outputs:
            pieces["module output", name].append(local(output).clone())
        if name.rpartition(".")[0] == "layers":
            pieces["rotary angles", name].append(args[1].clone())

    hooks = []
    for part in run.parts:
        for name, module in part.named_modules():
            is_inside = name.count(".") > 1  # layers.0.attention
            if run.config.compile.enable and is_inside:
                continue  # a hook would cause a graph break
            hooks.append(module.register_forward_hook(partial(keep, name)))
    yield
    for hook in hooks:
        hook.remove()
    for (measure, name), found in pieces.items():
        # The first step of a schedule also calls each part once before, to infer shapes.
        microbatches = found[-run.layout.n_microbatches :]
        right = angles if measure == "rotary angles" else plain.outputs[name]
        if name == "output":  # the head with its loss: a sum over tokens for each microbatch
            own = torch.stack(microbatches).sum()
        else:
            own = torch.cat(microbatches)
        sequence_dim = 2 if name.endswith("inner") else 1  # (B, heads, S, E), others (B, S, ...)
        whole = cut_piece(right, own, sequence_dim, run)
        if own.shape == whole.shape:
            note(measure, name, relative_error(own, whole))
        else:
            note("module output", name, math.inf)


def cut_piece(whole: Tensor, own: Tensor, sequence_dim: int, run: build.Run) -> Tensor:
    """Return the expected value of the output `own` of one rank.

    cp splits the sequence. A dim that is still longer than in `own` is sharded over tp, into fewer pieces than ranks if
    ranks share key/value heads.
    """
    layout = run.layout
    at = run.mesh.coordinates()
    right = whole.chunk(layout.dp)[run.mesh.data_rank]
    if layout.cp > 1:
        chunks = right.chunk(2 * layout.cp, sequence_dim)
        head = chunks[at["cp"]]
        tail = chunks[-1 - at["cp"]]
        right = torch.cat((head, tail), sequence_dim)
    if own.dim() == 0:
        return right.sum()
    for dim in range(right.dim()):
        n_pieces = right.shape[dim] // max(1, own.shape[dim])
        if right.shape[dim] == n_pieces * own.shape[dim] and n_pieces in range(2, layout.tp + 1):
            right = right.chunk(n_pieces, dim=dim)[at["tp"] * n_pieces // layout.tp]
    return right
