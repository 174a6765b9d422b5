"""Compares the output of each module, on each rank, with the reference's output of the same module.

    reference      rows x sequence x width
    one rank    its rows, microbatch by microbatch; of each its context-parallel head and tail; of these, or of the
                heads, or of the width, its tensor-parallel slice

Each rank cuts that piece out of the reference's output and compares. Nothing travels.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchtitan_lite import step as stepping
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.pipeline_plan import read_rows
from torchtitan_lite.config.schema import Config
from torchtitan_lite.verify.one_rank import Coordinates, build_small_run, own_rows, own_slice, start_experts
from torchtitan_lite.verify.reference import find_tensor, load_reference, make_batch_of, name_inputs, relative_error


@dataclass(frozen=True)
class ModuleErrors:
    """Errors of one rank's modules: of their inputs and of their outputs.

    All errors are relative, and those of the worst microbatch.
    """

    coordinates: Coordinates
    pieces: dict[str, float]  # field of Batch -> error of what `shard_for_cp` leaves of this rank's rows
    stage_pieces: dict[str, dict[str, float]]  # first FQN of a stage -> field of Batch -> error of what it is given
    inputs: dict[str, dict[str, float]]  # FQN of a module -> argument -> error
    error: dict[str, float]  # FQN of a module -> error of its output
    n_calls: dict[str, int]  # FQN of a module -> microbatches that it has seen
    n_microbatches: int  # that it should have seen


def observe_outputs(rank: int, world_size: int, config: Config, reference_path: str) -> ModuleErrors:
    """Worker: run forward and backward; compare every module's inputs and outputs. Collective."""
    reference = load_reference(reference_path)
    run = build_small_run(config, world_size, reference.method)
    start_experts(run, reference)
    whole = reference.pin_routes(make_batch_of(run.config, 0, reference.method), 0)
    batch = stepping.shard_for_cp(run, own_rows(run, whole))
    n_tokens = stepping.count_global_tokens(run, batch)
    if run.schedule is not None:  # in its first step it also calls each part once to learn the shapes
        stepping.forward_backward(run, batch, n_tokens)
    coordinates, layout = run.mesh.coordinates(), run.layout
    given_stages, given = (defaultdict(lambda: defaultdict(list)) for _ in range(2))  # FQN -> argument -> pieces
    put_out: dict[str, list[Tensor]] = defaultdict(list)
    stages = [layout.stages[index] for index in layout.stages_of(coordinates["pp"])]
    for part, fqns in zip(run.parts, stages, strict=True):
        part.register_forward_pre_hook(note_inputs_into(given_stages[fqns[0]]), with_kwargs=True)
        for name in list_visible_modules(part, config):
            if name in reference.outputs:
                part.get_submodule(name).register_forward_pre_hook(note_inputs_into(given[name]), with_kwargs=True)
                part.get_submodule(name).register_forward_hook(note_output_into(put_out[name]))
    stepping.forward_backward(run, batch, n_tokens)

    order = list_forward_order(config, layout)

    def measure(name: str, expected: Tensor, pieces: list[Tensor]) -> float:
        errors = [0.0]
        for microbatch, piece in zip(order[find_stage(layout, name)], pieces, strict=False):  # too few: told apart
            rows = list_rows(coordinates, layout, microbatch)
            errors.append(compare_piece(expected, piece, coordinates, layout, rows, config))
        return max(errors)

    def measure_all(name: str, expected: dict[str, Tensor], seen: dict[str, list[Tensor]]) -> dict[str, float]:
        return {key: measure(name, expected[key], pieces) for key, pieces in seen.items() if key in expected}

    rows = list_rows(coordinates, layout)
    fields = {key: value for key, value in vars(whole).items() if value is not None}
    return ModuleErrors(
        coordinates,
        pieces={
            key: compare_piece(expected, getattr(batch, key), coordinates, layout, rows, config)
            for key, expected in fields.items()
        },
        stage_pieces={
            # A stage calls tokens and hidden states alike `x`; the others it calls as Batch does.
            name: measure_all(name, {**fields, "x": whole.tokens} if name == "tok_embeddings" else fields, seen)
            for name, seen in given_stages.items()
        },
        inputs={name: measure_all(name, reference.inputs[name], seen) for name, seen in given.items()},
        error={name: measure(name, reference.outputs[name], pieces) for name, pieces in put_out.items()},
        n_calls={name: len(pieces) for name, pieces in put_out.items()},
        n_microbatches=layout.n_microbatches,
    )


def list_visible_modules(part: nn.Module, config: Config) -> list[str]:
    """Return the modules whose hooks run. A hook inside a compiled block would break the graph."""
    names = [name for name, _ in part.named_modules() if name]
    if not config.compile.enable:
        return names
    return [name for name in names if not any(name.startswith(f"layers.{layer}.") for layer in part.layers)]


def note_inputs_into(seen: dict[str, list[Tensor]]) -> Callable:
    """Return a forward pre-hook that copies each tensor that a module is given."""

    def note(module: nn.Module, args: tuple, kwargs: dict[str, object]) -> None:
        if is_first_forward():
            for name, value in name_inputs(module, args, kwargs).items():
                seen[name].append(own_slice(value).clone())

    return note


def note_output_into(pieces: list[Tensor]) -> Callable:
    """Return a forward hook that copies each output."""

    def note(module: nn.Module, args: tuple, output: object) -> None:
        if (tensor := find_tensor(output)) is not None and is_first_forward():
            pieces.append(own_slice(tensor).clone())

    return note


def is_first_forward() -> bool:
    """Return whether this is no recompute in backward: then torch's id of the running backward is -1."""
    return torch._C._current_graph_task_id() == -1


def list_forward_order(config: Config, layout: Layout) -> list[list[int]]:
    """Return the microbatches of each stage in the order of its forwards, which a CSV schedule may choose."""
    if layout.pp == 1 or not config.parallelism.pipeline_parallel_schedule_csv:
        return [list(range(layout.n_microbatches)) for _ in layout.stages]
    actions = [action for row in read_rows(config.parallelism.pipeline_parallel_schedule_csv) for action in row]
    return [[a.microbatch for a in actions if a.stage == s and a.kind == "F"] for s in range(len(layout.stages))]


def find_stage(layout: Layout, name: str) -> int:
    """Return the stage that holds a module; 0 for modules of a fork that no plan of stages knows."""
    for index, fqns in enumerate(layout.stages):
        if any(name == fqn or name.startswith(f"{fqn}.") for fqn in fqns):
            return index
    return 0


def list_rows(coordinates: Coordinates, layout: Layout, microbatch: int | None = None) -> range:
    """Return the rows of the global batch that a rank works on: of one microbatch, or of the step."""
    data_rank = coordinates["dp_replicate"] * layout.dp_shard + coordinates["dp_shard"]
    n_own = layout.global_batch_size // layout.dp
    if microbatch is None:
        return range(data_rank * n_own, (data_rank + 1) * n_own)
    first = data_rank * n_own + microbatch * layout.microbatch_size
    return range(first, first + layout.microbatch_size)


def compare_piece(
    whole: Tensor, piece: Tensor, coordinates: Coordinates, layout: Layout, rows: range, config: Config
) -> float:
    """Return the relative error of one rank's `piece` for `rows`; infinite where its shape is another one."""
    if whole.dim() and len(whole) == layout.global_batch_size:
        expected = cut_piece(whole[rows.start : rows.stop], piece, coordinates, layout, config)
        if piece.shape == expected.shape:
            return relative_error(piece, expected)
    return math.inf


def cut_piece(whole: Tensor, piece: Tensor, coordinates: Coordinates, layout: Layout, config: Config) -> Tensor:
    """Return the right value of `piece`, one rank's. `whole` is the reference's for the same rows.

    The sequence dim is known by its length, which reduction.py makes unlike all other sizes. It is split over cp,
    but of documents, which every rank is given whole. A dim that is still longer than the piece's is split over tp.
    """
    expected, seq_len = whole, config.training.seq_len
    seq_dim = next((dim for dim in range(1, expected.dim()) if expected.shape[dim] == seq_len), None)
    is_whole = seq_dim is not None and seq_dim < piece.dim() and piece.shape[seq_dim] == seq_len
    if seq_dim is not None and layout.cp > 1 and not is_whole:
        chunks = expected.chunk(2 * layout.cp, dim=seq_dim)
        head = coordinates["cp"]
        expected = torch.cat((chunks[head], chunks[2 * layout.cp - 1 - head]), dim=seq_dim)
    if piece.dim() == 0:  # the head under a loss: the sum over the tokens of this piece
        return expected.sum()
    for dim in range(min(expected.dim(), piece.dim())):
        if expected.shape[dim] == layout.tp * piece.shape[dim]:
            expected = expected.chunk(layout.tp, dim=dim)[coordinates["tp"]]
    return expected
