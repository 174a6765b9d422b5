"""Compares what each module puts out, and what each router chooses, on each rank, with the same of the reference.

    reference   rows x sequence x width
    one rank    its rows, microbatch by microbatch; of each its context-parallel head and tail; of these, or of the
                heads, or of the width, its tensor-parallel slice

Each rank cuts that piece out of the reference's output and compares. Nothing travels.

    routes      the same batch, with the initial weights and without given routes
    a flip      an expert of the reference's choice that the layout replaces by another one
    its margin  by how much the reference scored the first above the second, bias included

Scores are between 0 and 1, and right layouts are off by up to 1e-7 in them. A tie is decided by that: a margin below
MOST_MARGIN is no fault. One flip changes all that later layers see of its sequence, so only the flips of the first
layer in which a sequence has any are judged; the others are counted.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from torchtitan_lite import step as stepping  # through the module: a test may break one of its functions
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.schedule import read_rows
from torchtitan_lite.config.schema import Config
from torchtitan_lite.model.moe import list_moes
from torchtitan_lite.tools.verify.one_rank import own_rows, start_beside_reference
from torchtitan_lite.tools.verify.reference import find_tensor, make_batch, name_inputs, relative_error
from torchtitan_lite.tools.verify.slices import Coordinates, cut_zigzag, own_slice
from torchtitan_lite.tools.verify.trial import Measure, Trial, blame

MOST_MARGIN = 1e-5

Place = tuple[int, int]  # layer, row of the global batch


@dataclass(frozen=True)
class ModuleErrors:
    """Errors of one rank's modules: of their inputs and of their outputs.

    All errors are relative, and those of the worst microbatch.
    """

    coordinates: Coordinates
    pieces: dict[str, dict[str, float]]  # "shard_for_cp", or first FQN of a stage -> field of Batch -> error
    inputs: dict[str, dict[str, float]]  # FQN of a module -> argument -> error
    error: dict[str, float]  # FQN of a module -> error of its output
    n_calls: dict[str, int]  # FQN of a module -> microbatches that it has seen
    n_microbatches: int  # that it should have seen


def observe_outputs(rank: int, world_size: int, config: Config, reference_path: str) -> ModuleErrors:
    """Worker: run forward and backward; compare every module's inputs and outputs. Collective."""
    run, reference = start_beside_reference(config, world_size, reference_path)
    whole = reference.make_batch(run.config, 0)
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

    def measure(name: str, expected: Tensor, pieces: list[Tensor]) -> float:
        errors = [0.0]
        for microbatch, piece in zip(list_microbatches(config, layout, name), pieces, strict=False):  # or too few
            errors.append(compare_piece(expected, piece, coordinates, layout, config, microbatch))
        return max(errors)

    def measure_all(name: str, expected: dict[str, Tensor], seen: dict[str, list[Tensor]]) -> dict[str, float]:
        return {key: measure(name, expected[key], pieces) for key, pieces in seen.items() if key in expected}

    fields = {key: value for key, value in vars(whole).items() if value is not None}
    return ModuleErrors(
        coordinates,
        pieces={
            "shard_for_cp": {
                key: compare_piece(expected, getattr(batch, key), coordinates, layout, config)
                for key, expected in fields.items()
            },
            # A stage calls tokens and hidden states alike `x`; the others it calls as Batch does.
            **{
                name: measure_all(name, {**fields, "x": whole.tokens} if name == "tok_embeddings" else fields, seen)
                for name, seen in given_stages.items()
            },
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


def list_microbatches(config: Config, layout: Layout, name: str) -> Sequence[int]:
    """Return the microbatches in the order in which a module's stage calls it, which a CSV schedule may choose."""
    path = config.parallelism.pipeline_parallel_schedule_csv
    if layout.pp == 1 or not path:
        return range(layout.n_microbatches)
    # A fork's module that no plan of stages knows is in the first one.
    holds = [any(name == fqn or name.startswith(f"{fqn}.") for fqn in fqns) for fqns in layout.stages]
    stage = holds.index(True) if any(holds) else 0
    return [a.microbatch for row in read_rows(path) for a in row if a.stage == stage and a.kind == "F"]


def find_rows_at(coordinates: Coordinates, layout: Layout, microbatch: int | None = None) -> range:
    """Return the rows of the global batch that a rank works on: of one microbatch, or of the step."""
    data_rank = coordinates["dp_replicate"] * layout.dp_shard + coordinates["dp_shard"]
    n_own = layout.global_batch_size // layout.dp
    if microbatch is None:
        return range(data_rank * n_own, (data_rank + 1) * n_own)
    first = data_rank * n_own + microbatch * layout.microbatch_size
    return range(first, first + layout.microbatch_size)


def compare_piece(
    whole: Tensor, piece: Tensor, at: Coordinates, layout: Layout, config: Config, microbatch: int | None = None
) -> float:
    """Return the relative error of one rank's `piece`, of a microbatch or a step; infinite if its shape is another."""
    if whole.dim() and len(whole) == layout.global_batch_size:
        rows = find_rows_at(at, layout, microbatch)
        expected = cut_piece(whole[rows.start : rows.stop], piece, at, layout, config)
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
        expected = cut_zigzag(expected, layout.cp, seq_dim)[coordinates["cp"]]
    if piece.dim() == 0:  # the head under a loss: the sum over the tokens of this piece
        return expected.sum()
    for dim in range(min(expected.dim(), piece.dim())):
        if expected.shape[dim] == layout.tp * piece.shape[dim]:
            expected = expected.chunk(layout.tp, dim=dim)[coordinates["tp"]]
    return expected


# ---------------------------------------------------------------- routes


@dataclass(frozen=True)
class RankRoutes:
    """What the routers of one rank chose."""

    coordinates: Coordinates
    n_routes: int
    flips: dict[Place, tuple[int, float]]  # how many, and the widest margin


def measure_routes(rank: int, world_size: int, config: Config, reference_path: str) -> RankRoutes:
    """Worker: let the routers of this layout choose, and compare with the reference. Collective."""
    run, reference = start_beside_reference(config, world_size, reference_path)
    experts = reference.experts
    whole = make_batch(run.config, 0, reference.method)
    numbers = torch.arange(whole.tokens.numel()).view_as(whole.tokens)  # of the tokens of the global batch
    batch = stepping.shard_for_cp(run, own_rows(run, whole))
    chosen: dict[int, list[Tensor]] = defaultdict(list)
    for part in run.parts:
        for layer, moe in list_moes(part):
            note = chosen[layer].append
            moe.router.register_forward_hook(lambda router, args, output, note=note: note(output[1]))
    stepping.forward_only(run, batch, stepping.count_global_tokens(run, batch))

    own_numbers = stepping.shard_for_cp(run, own_rows(run, replace(whole, tokens=numbers))).tokens
    at = own_numbers.chunk(run.layout.n_microbatches)
    tp, n_routes, flips = run.mesh.tp, 0, {}
    for layer, calls in chosen.items():
        scores, routes = (x[:, :, layer].flatten(0, 1) for x in (experts.scores, experts.routes[0]))
        microbatches = list_microbatches(config, run.layout, f"layers.{layer}")
        # A pipeline's first step calls each stage once more, before all others, to learn shapes.
        for microbatch, own in zip(microbatches, calls[-len(microbatches) :], strict=True):
            tokens = at[microbatch].chunk(tp.size(), dim=1)[tp.get_local_rank()].flatten()
            n_routes += own.numel()
            n_flips, margins = find_flips(own.flatten(0, 1), routes[tokens], scores[tokens])
            for token in n_flips.nonzero().flatten().tolist():
                place = layer, tokens[token].item() // whole.tokens.shape[1]
                n_before, widest = flips.get(place, (0, 0.0))
                flips[place] = n_before + n_flips[token].item(), max(widest, margins[token].item())
    return RankRoutes(run.mesh.coordinates(), n_routes, flips)


def find_flips(own: Tensor, right: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each token its flips (T,) int64, and their widest margin (T,).

    own, right (T, K): experts; scores (T, E), those of `right`.
    """
    chosen, wanted = (torch.zeros_like(scores, dtype=torch.bool).scatter(1, x, True) for x in (own, right))
    lost = scores.masked_fill(~(wanted & ~chosen), -torch.inf).amax(1)
    gained = scores.masked_fill(~(chosen & ~wanted), torch.inf).amin(1)
    return (wanted & ~chosen).sum(1), lost - gained


def judge_routes(ranks: list[RankRoutes]) -> Trial:
    """Join what the ranks found."""
    first: dict[int, int] = {}  # row -> the first layer with a flip
    for layer, row in sorted(place for rank in ranks for place in rank.flips):
        first.setdefault(row, layer)
    judged = [
        (layer, margin, rank.coordinates)
        for rank in ranks
        for (layer, row), (_, margin) in rank.flips.items()
        if first[row] == layer
    ]
    n_routes, n_flips = sum(rank.n_routes for rank in ranks), sum(n for rank in ranks for n, _ in rank.flips.values())
    widest = max((margin for _, margin, _ in judged), default=0.0)
    of = f"widest margin; of {n_routes:,} routes that routers choose themselves, {n_flips} are others"
    trial = Trial(measures=[Measure("route flips", widest, MOST_MARGIN, of)])
    wide = [(layer, coordinates) for layer, margin, coordinates in judged if margin > MOST_MARGIN]
    if not wide:
        return trial
    wrong = [coordinates for _, coordinates in wide]
    detail = f"{n_flips} of {n_routes:,} routes are others, and scores that differ by {widest:.1e} are no tie"
    is_right = [(rank.coordinates, rank.coordinates not in wrong) for rank in ranks]
    name = f"layers.{min(layer for layer, _ in wide)}.feed_forward.router"
    return replace(trial, faults={"routes": detail}, culprit=blame("routes", name, detail, is_right))
