"""Names what is wrong with a layout: the first thing, in the order of a step, that differs from one process.

    1. initial weights      5. the loss: all outputs were right, so their sum over the ranks is not
    2. counted tokens       6. gradients, in backward order: all outputs were right, so a backward or a reduction is not
    3. microbatches         7. gradient norm
    4. module outputs,      8. copies that are to be equal
       in forward order     9. updated weights

What comes later is a consequence of it, most likely. A rank's output of a module is a piece of the whole: its rows, the
head and tail chunk of its context-parallel rank, its tensor-parallel slice. Each rank cuts that piece out of the
oracle's output and compares; nothing travels.

A known trap is named as the cause only where a run without it passes; else the cause is "unknown".
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan_lite import step as stepping
from torchtitan_lite.components.data import rows_of_rank
from torchtitan_lite.config import Config
from torchtitan_lite.layout import Layout
from torchtitan_lite.refused import REFUSED
from torchtitan_lite.schedule_csv import read_rows
from torchtitan_lite.sizes import resolve_shape
from torchtitan_lite.tools.comparison import (
    Coordinates,
    Difference,
    Outcome,
    Prepare,
    build_small_run,
    find_disagreement,
    largest_relative,
    make_batch_of,
    own_rows,
    relative_error,
)


@dataclass(frozen=True)
class Culprit:
    """What differs first. `name` is a module, a parameter, or what is exchanged."""

    kind: str  # initial weights, counted tokens, microbatches, module output, loss, gradient, ...
    name: str
    detail: str
    mesh_dims: list[str] = field(default_factory=list)  # along which ranks disagree: where the exchange is at fault
    cause: str = "unknown"  # or the trap whose removal repairs it

    def __str__(self) -> str:
        along = f"; ranks along {', '.join(self.mesh_dims)} disagree" if self.mesh_dims else ""
        return f"{self.kind}: {self.name}, {self.detail}{along}"


# ---------------------------------------------------------------- outputs, on each rank


@dataclass(frozen=True)
class OutputShare:
    """How far from the oracle the outputs of one rank's modules are."""

    coordinates: Coordinates
    error: dict[str, float]  # FQN of a module -> the worst of its microbatches
    n_calls: dict[str, int]  # FQN of a module -> microbatches that it has seen
    n_microbatches: int  # that it should have seen


def observe_outputs(
    rank: int, world_size: int, config: Config, oracle_path: str, prepare: Prepare | None = None
) -> OutputShare:
    """Worker: one forward and backward, every module's output compared with the oracle's. Collective."""
    oracle: Outcome = torch.load(oracle_path, weights_only=False, mmap=True)
    run = build_small_run(config, world_size)
    if prepare is not None:
        prepare(run, oracle)
    batch = stepping.take_pieces(run, own_rows(run, make_batch_of(run.config, 0)))
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


# ---------------------------------------------------------------- the verdict, in the parent


def name_culprit(
    difference: Difference, faults: dict[str, str], outputs: list[OutputShare], oracle: Outcome, tolerance: float
) -> Culprit:
    """The first thing that differs; `faults` is not empty."""
    shares = difference.shares
    if "initial" in faults:
        name = next(fqn for fqn, equal in difference.initial_equal.items() if not equal)
        return Culprit("initial weights", name, faults["initial"])
    if "n_tokens" in faults:
        values = [(share.coordinates, float(share.n_tokens)) for share in shares]
        seen = ", ".join(str(n) for n in sorted({share.n_tokens for share in shares}))
        detail = f"{oracle.n_tokens} targets of the global batch count, and ranks say {seen}"
        return Culprit("counted tokens", "count_global_tokens", detail, find_disagreement(values, 0))
    if culprit := name_first_output(outputs, oracle, tolerance):
        return culprit
    # Later losses and norms are consequences of the first update.
    loss_error = max(largest_relative(share.losses[:1], oracle.losses[:1]) for share in shares)
    if loss_error > tolerance:
        values = [(share.coordinates, share.losses[0]) for share in shares]
        dims = find_disagreement(values, tolerance)
        detail = f"every module's output is right, and the loss is off by {loss_error:.1e}: it is not added up rightly"
        return Culprit("loss", "sum_losses", detail, dims)
    if "gradient" in faults:
        return name_first_gradient(difference, oracle, tolerance)
    norm_error = max(largest_relative(share.grad_norms[:1], oracle.grad_norms[:1]) for share in shares)
    if norm_error > tolerance:
        values = [(share.coordinates, share.grad_norms[0]) for share in shares]
        detail = f"every gradient is right, and their norm is off by {norm_error:.1e}"
        return Culprit("gradient norm", "clip_grad_norm", detail, find_disagreement(values, tolerance))
    if "replicas" in faults:
        order = {fqn: index for index, fqn in enumerate(oracle.initial)}
        name, dim = min(difference.unequal_replicas, key=lambda pair: order[pair[0]])
        return Culprit("replicas", name, "every gradient is right, and its copies are not bit-equal", [dim])
    name = max(difference.weight, key=difference.weight.get)
    return Culprit("updated weights", name, f"every gradient is right, and {'; '.join(faults.values())}")


def name_first_output(outputs: list[OutputShare], oracle: Outcome, tolerance: float) -> Culprit | None:
    """The first module in forward order with a microbatch too few, or with another output."""
    for name in oracle.outputs:
        holders = [share for share in outputs if name in share.error]
        for share in holders:
            if share.n_calls[name] != share.n_microbatches:
                detail = f"it has seen {share.n_calls[name]} microbatches of {share.n_microbatches}"
                return Culprit("microbatches", name, detail)
        worst = max((share.error[name] for share in holders), default=0.0)
        if worst > tolerance:
            wrong = [share.coordinates for share in holders if share.error[name] > tolerance]
            how = "has another shape or is not finite" if math.isinf(worst) else f"is off by {worst:.1e}"
            return Culprit("module output", name, f"its output {how}{describe_place(wrong, len(holders))}")
    return None


def describe_place(wrong: list[Coordinates], n_holders: int) -> str:
    """Where, if not everywhere: the coordinates that all wrong ranks have in common."""
    if len(wrong) == n_holders:
        return " on every rank that holds it"
    common = [f"{dim} {at}" for dim, at in wrong[0].items() if all(other[dim] == at for other in wrong)]
    return f" on {len(wrong)} of {n_holders} ranks that hold it, all at {', '.join(common) or 'no common place'}"


def name_first_gradient(difference: Difference, oracle: Outcome, tolerance: float) -> Culprit:
    """The first one in backward order, whether it is only too large, and which ranks disagree about it."""
    wrong = [fqn for fqn in oracle.gradients if difference.gradient[fqn] > tolerance]
    name = wrong[0]
    values = [(s.coordinates, s.gradient_scale[name]) for s in difference.shares if name in s.gradient_scale]
    dims = find_disagreement(values, tolerance)
    detail = f"every module's output is right, and this gradient is off by {difference.gradient[name]:.1e}"
    detail += f", {len(wrong)} of {len(oracle.gradients)} gradients are wrong"
    scales = [s.gradient_scale[fqn] for s in difference.shares for fqn in wrong if fqn in s.gradient_scale]
    only_scaled = all(
        math.isclose(abs(scale - 1), s.gradient[fqn], rel_tol=1e-2, abs_tol=tolerance)
        for s in difference.shares
        for fqn in wrong
        if (scale := s.gradient_scale.get(fqn)) is not None
    )
    if only_scaled and max(scales) - min(scales) <= 1e-3 * abs(scales[0]):
        detail += f", all of it {scales[0]:.4g} times what it should be"
    return Culprit("gradient", name, detail, dims)


def name_crash(text: str) -> Culprit:
    """A rank that raised or hung. The last line of its traceback says what."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return Culprit("crash", lines[0].split(":")[0], lines[-1].strip())


# ---------------------------------------------------------------- causes


@dataclass(frozen=True)
class Trap:
    """A known way to go wrong, and a probe: the same run without it."""

    applies: Callable[[Config, Culprit], bool]
    overrides: dict[str, object] = field(default_factory=dict)
    prepare: Prepare | None = None


def start_from_oracle(run: stepping.Run, oracle: Outcome) -> None:
    """Probe: gives the run the oracle's initial weights."""
    with torch.no_grad():
        for fqn, parameter in run.parameters.items():
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                own = distribute_tensor(oracle.initial[fqn], mesh, placements, src_data_rank=None)
                parameter.to_local().copy_(own.to_local())
            else:
                parameter.copy_(oracle.initial[fqn])


def wait_for_embedding(run: stepping.Run, oracle: Outcome) -> None:
    """Probe: a copy of the embedding's output goes on, so that no collective is still under way in it."""
    for part in run.parts:
        if part.tok_embeddings is not None:
            part.tok_embeddings.register_forward_hook(lambda module, args, output: output.clone())


def refusal_applies(name: str) -> Callable[[Config, Culprit], bool]:
    """Whether a row of refused.py is about this run: a fork may have taken the row out."""

    def applies(config: Config, culprit: Culprit) -> bool:
        zero_stage = config.parallelism.zero_stage
        reshards = zero_stage == 3 or config.parallelism.fsdp_reshard_after_forward == "always"
        return REFUSED[name].applies(config, resolve_shape(config.model), 3 if reshards else 1)

    return applies


TRAPS = {  # cause -> how to tell
    "the rule of the initial weights alone: with the weights of one process all is right": Trap(
        lambda config, culprit: culprit.kind == "initial weights", prepare=start_from_oracle
    ),
    "the embedding's AsyncCollectiveTensor enters a compiled block": Trap(
        lambda config, culprit: config.compile.enable and config.parallelism.tensor_parallel_degree > 1,
        prepare=wait_for_embedding,
    ),
    "a split backward with resharding": Trap(
        refusal_applies("split backward with resharding"),
        {"parallelism.zero_stage": 1, "parallelism.fsdp_reshard_after_forward": "default"},
    ),
    "a split backward with per-op recompute": Trap(
        refusal_applies("split backward with per-op recompute"), {"activation_checkpoint.mode": "none"}
    ),
    "a split backward with compile": Trap(refusal_applies("split backward with compile"), {"compile.enable": False}),
    "the ring, which has no masks, with documents": Trap(
        refusal_applies("ring with documents"), {"parallelism.context_parallel_rotate_method": "allgather"}
    ),
}
