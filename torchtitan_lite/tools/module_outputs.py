"""What each module puts out, compared on each rank with the oracle's output of the same module.

    oracle      rows x sequence x width
    one rank    its rows, microbatch by microbatch; of each its context-parallel head and tail; of these, or of the
                heads, or of the width, its tensor-parallel slice

Each rank cuts that piece out of the oracle's output and compares. Nothing travels.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_lite import step as stepping
from torchtitan_lite.components.data import rows_of_rank
from torchtitan_lite.config import Config
from torchtitan_lite.layout import Layout
from torchtitan_lite.schedule_csv import read_rows
from torchtitan_lite.tools.comparison import Coordinates, build_small_run, own_rows, relative_error
from torchtitan_lite.tools.oracle import Outcome, make_batch_of


@dataclass(frozen=True)
class OutputShare:
    """How far from the oracle the outputs of one rank's modules are."""

    coordinates: Coordinates
    error: dict[str, float]  # FQN of a module -> the worst of its microbatches
    n_calls: dict[str, int]  # FQN of a module -> microbatches that it has seen
    n_microbatches: int  # that it should have seen


def observe_outputs(rank: int, world_size: int, config: Config, oracle_path: str) -> OutputShare:
    """Worker: one forward and backward, every module's output compared with the oracle's. Collective."""
    oracle: Outcome = torch.load(oracle_path, weights_only=False, mmap=True)
    run = build_small_run(config, world_size, oracle.method)
    batch = stepping.take_pieces(run, own_rows(run, make_batch_of(run.config, 0, oracle.method)))
    n_tokens = stepping.count_global_tokens(run, batch)
    if run.schedule is not None:  # in its first step it also calls each part once to learn the shapes
        stepping.forward_backward(run, batch, n_tokens)
    seen: dict[str, list[Tensor]] = defaultdict(list)
    for part in run.parts:
        for name in list_visible_modules(part, config):
            if name in oracle.outputs:
                part.get_submodule(name).register_forward_hook(note_into(seen[name]))
    stepping.forward_backward(run, batch, n_tokens)
    coordinates, layout = run.mesh.coordinates(), run.layout
    order = list_forward_order(config, layout)
    error = {}
    for name, pieces in seen.items():
        errors = [0.0]
        for microbatch, piece in zip(order[find_stage(layout, name)], pieces, strict=False):  # too few: told apart
            expected = cut_piece(oracle.outputs[name], piece, coordinates, layout, microbatch, config)
            errors.append(relative_error(piece, expected) if piece.shape == expected.shape else math.inf)
        error[name] = max(errors)
    n_calls = {name: len(pieces) for name, pieces in seen.items()}
    return OutputShare(coordinates, error, n_calls, layout.n_microbatches)


def list_visible_modules(part: nn.Module, config: Config) -> list[str]:
    """Modules whose hooks run. Inside a compiled block a hook would break the graph: there, the block as a whole."""
    names = [name for name, _ in part.named_modules() if name]
    blocks = [f"layers.{layer}" for layer in part.layers]
    if not config.compile.enable:
        return names
    return [name for name in names if not any(name.startswith(f"{block}.") for block in blocks)]


def note_into(pieces: list[Tensor]) -> Callable:
    """A forward hook that keeps a copy of each output."""

    def note(module: nn.Module, args: tuple, output: object) -> None:
        # Recompute calls modules again in backward, which torch tells by the id of the running backward, or -1.
        if isinstance(output, Tensor) and torch._C._current_graph_task_id() == -1:
            local = output.to_local() if isinstance(output, DTensor) else output
            pieces.append(local.detach().clone())

    return note


def list_forward_order(config: Config, layout: Layout) -> list[list[int]]:
    """Microbatches of each stage in the order of its forwards: a CSV schedule may choose another one."""
    if layout.pp == 1 or not config.parallelism.pipeline_parallel_schedule_csv:
        return [list(range(layout.n_microbatches)) for _ in layout.stages]
    actions = [action for row in read_rows(config.parallelism.pipeline_parallel_schedule_csv) for action in row]
    return [[a.microbatch for a in actions if a.stage == s and a.kind == "F"] for s in range(len(layout.stages))]


def find_stage(layout: Layout, name: str) -> int:
    """The stage that holds a module; the only one, for modules of a fork that no plan of stages knows."""
    holders = (
        index
        for index, fqns in enumerate(layout.stages)
        if any(name == fqn or name.startswith(f"{fqn}.") for fqn in fqns)
    )
    return next(holders, 0)


def cut_piece(
    whole: Tensor, piece: Tensor, coordinates: Coordinates, layout: Layout, microbatch: int, config: Config
) -> Tensor:
    """What `piece`, one rank's output of a module for one microbatch, has to be. `whole` (rows, ...) is the oracle's.

    A dim that is shorter than the oracle's is split over tp. The sequence dim is known by its length, which
    reduction.py makes unlike all other sizes.
    """
    data_rank = coordinates["dp_replicate"] * layout.dp_shard + coordinates["dp_shard"]
    first = rows_of_rank(data_rank, layout.dp, layout.global_batch_size).start + microbatch * layout.microbatch_size
    expected = whole[first : first + layout.microbatch_size]
    seq_len = config.training.seq_len
    seq_dim = next((dim for dim in range(1, expected.dim()) if expected.shape[dim] == seq_len), None)
    if seq_dim is not None and layout.cp > 1:
        chunks = expected.chunk(2 * layout.cp, dim=seq_dim)
        head = coordinates["cp"]
        expected = torch.cat((chunks[head], chunks[2 * layout.cp - 1 - head]), dim=seq_dim)
    if piece.dim() == 0:  # the head under a loss: the sum over the tokens of this piece
        return expected.sum()
    for dim in range(min(expected.dim(), piece.dim())):
        if expected.shape[dim] == layout.tp * piece.shape[dim]:
            expected = expected.chunk(layout.tp, dim=dim)[coordinates["tp"]]
    return expected
