"""Run one rank of a layout with the build_run and train_step of train.py, and compare each step with the plain loop.

    before a step     the rank loads its slices of the plain loop's weights
    in forward        its rotary angles are compared; if a result was wrong, the steps run again and the outputs of all
                      modules are compared too
    before clipping   its gradients are compared, then replaced by the gradients of the plain loop
    after a step      weights, optimizer state, expert loads, expert biases and replicas are compared

Nothing is gathered: each rank cuts its slice out of the plain loop's tensors. Because weights and gradients are
replaced, errors do not carry over into the next step, and AdamW does not amplify rounding. Therefore the run can keep
its optimizer and schedule.

Rounding a score can change the top-k choice of experts. If scores of a token are nearly tied, the rank uses the experts
that the plain loop chose for this token. The rank recognizes the token by its scores, whatever microbatch the token is
in.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_lite import build
from torchtitan_lite import step as stepping  # imported as a module, so tests can patch it
from torchtitan_lite.checkpoint.load import set_step
from torchtitan_lite.components.expert_balance import is_recomputed
from torchtitan_lite.config.checks import plan_layout, resolve_config
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.config.model import resolve_model
from torchtitan_lite.config.schema import Config, with_value
from torchtitan_lite.data.dataset import rows_of_rank
from torchtitan_lite.extensions.copies import compare_copies
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.model.loss import count_valid_tokens
from torchtitan_lite.model.moe import Router
from torchtitan_lite.model.rotary import rotary_angles
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.tools.verify.errors import Seen, cut_local, local, relative_error
from torchtitan_lite.tools.verify.plain import EMBEDDING_SCALE, PlainStep, list_used_rates
from torchtitan_lite.tools.verify.rounding import (
    compare_scales,
    compare_with_halves,
    list_scales,
    packing_checked,
    reductions_noted,
    sums_in_bfloat16,
)
from torchtitan_lite.tools.verify.witnesses import actions_noted

# Two rows of scores that differ by less than this belong to the same token, or to similar tokens with the same experts
# (see TIE).
SAME_TOKEN = 1e-6


def build_small_run(config: Config, world_size: int) -> build.Run:
    """Build the run that train.py would build, on CPUs. Collective."""
    model_args = resolve_model(config.model)
    layout = plan_layout(config, model_args, world_size)
    resolved = resolve_config(config, layout, "cpu")
    mesh = build_mesh(layout, "cpu")
    return build.build_run(resolved, model_args, layout, mesh, torch.device("cpu"))


def own_rows(run: build.Run, batch: Batch) -> Batch:
    """Return this rank's rows of a global batch."""
    return batch.take_rows(rows_of_rank(run.mesh.data_rank, run.layout.dp, len(batch.tokens)))


def compare_steps(rank: int, world_size: int, config: Config, path: str) -> Seen:
    """Worker: read the steps of the plain loop from the file `path`, and repeat them on this layout. Collective."""
    steps: list[PlainStep] = torch.load(path, weights_only=False, mmap=True)
    run = build_small_run(config, world_size)
    seen = Seen(run.mesh.coordinates())
    for fqn, parameter in run.parameters.items():
        right = cut_local(steps[0].weights[fqn], parameter)
        if fqn == "tok_embeddings.weight":
            right = right / EMBEDDING_SCALE
        is_equal = torch.equal(local(parameter), right)
        seen.note("initial weights", fqn, float(not is_equal))
    with actions_noted(seen.acted), packing_checked(seen), reductions_noted(seen):
        for seen.step, plain in enumerate(steps):
            compare_step(run, plain, seen)
    if world_size > 1:
        seen.results.clear()  # do not send shards back
    return seen


def compare_step(run: build.Run, plain: PlainStep, seen: Seen) -> None:
    """Run one step and compare each result with the plain loop. Collective."""
    # set the learning-rate schedule as if the run resumed at this position
    if run.lr_scheduler.last_epoch != plain.position:
        set_step(run.lr_scheduler, plain.position)
    give_weights(run, plain.weights)
    for scales in list_scales(run):
        scales()  # compute the float8 scales of the new weights
    routers = run.balance.routers if run.balance else {}
    for layer, router in routers.items():
        router.choose = partial(choose_with_ties, router, *plain.ties[layer])
    batch = own_rows(run, plain.batch)
    n_tokens = stepping.count_global_tokens(run, stepping.shard_for_cp(run, batch))
    n_right = count_valid_tokens(plain.batch.targets)
    seen.compare("counted tokens", "count_global_tokens", n_tokens.item(), n_right.item())
    config = with_value(run.config, "training.max_norm", plain.max_norm)
    if math.isfinite(plain.spoiled_by) and plain.spoiled_by:
        # A spike is large relative to earlier gradient norms, so first fill the window with normal gradient norms.
        for _ in range(config.training.spike_window):
            norm = torch.tensor(plain.norm)
            run.spikes.judge(norm)
    sum_gradient_squares = stepping.sum_gradient_squares

    def compare_and_measure(*args) -> Tensor:
        compare_gradients(run, plain, seen)
        return sum_gradient_squares(*args)

    with (
        patch.object(stepping, "sum_gradient_squares", compare_and_measure),
        outputs_compared(run, plain, seen),
    ):
        result = stepping.train_step(replace(run, config=config), batch)
    loss = result.loss.item()
    seen.results[-1]["loss"] = loss
    seen.compare("loss", "reduce_scalars", loss, plain.loss)
    is_finite = not plain.spoiled_by
    if is_finite:
        seen.compare("gradient norm", "all gradients", result.grad_norm.item(), plain.norm)
    seen.compare("finite flag", "train_step", bool(result.applied), is_finite)
    compare_updates(run, plain, seen)
    for layer, router in routers.items():
        name = f"layers.{layer}.feed_forward.router"
        load = result.expert_loads[layer, :-1]
        seen.note("expert loads", name, relative_error(load, plain.loads[layer]))
        bias = f"{name}.expert_bias"
        bias_error = (router.expert_bias - plain.updated[bias]).abs().max()
        seen.note("expert biases", bias, bias_error.item())
    seen.compare("schedule", "lr_scheduler", run.lr_scheduler.last_epoch, plain.position + 1)
    for scales in list_scales(run):
        compare_scales(scales, seen)
    if sums_in_bfloat16(run):
        give_weights(run, plain.weights)
        compare_with_halves(run, plain, batch, seen)


@torch.no_grad()
def compare_gradients(run: build.Run, plain: PlainStep, seen: Seen) -> None:
    """Compare gradients and learning rates. Record the gradients, then replace them with the plain loop's gradients.
    Collective."""
    gradients = {}
    for fqn, parameter in reversed(run.parameters.items()):
        if fqn not in plain.gradients:
            continue  # the parameter is frozen, and compare_updates reports any change
        right = plain.gradients[fqn]
        own = local(parameter.grad)
        seen.note("gradients", fqn, relative_error(parameter.grad, right))
        gradients[fqn] = own.clone()
        own.copy_(cut_local(right, parameter))
        if own.numel():
            first = own
    seen.results.append({"gradients": gradients})
    last_trained = torch.tensor(dist.get_rank() if gradients else 0)
    dist.all_reduce(last_trained, dist.ReduceOp.MAX)
    if plain.spoiled_by and dist.get_rank() == last_trained:
        first.view(-1)[0] = plain.spoiled_by
    for fqn, rate in list_used_rates(run.optimizer).items():
        seen.compare("learning rate", fqn, rate, plain.rates[fqn])


def compare_updates(run: build.Run, plain: PlainStep, seen: Seen) -> None:
    """Compare the optimizer state, the updates of the weights and the replicas after a step. Collective."""
    forgives = run.config.optimizer.moments_dtype == "bfloat16"
    for fqn, parameter in reversed(run.parameters.items()):
        own_state = run.optimizer.state[parameter]
        for name, right in plain.state[fqn].items():
            error = relative_error(own_state[name], right, forgives=forgives)
            seen.note("state", f"{fqn} ({name})", error)
        right = plain.updated[fqn]
        update = right.double() - plain.weights[fqn].double()
        error = relative_error(parameter, right, update, roundings=4, forgives=forgives)
        seen.note("updates", fqn, error)
    seen.note("copies", "weights and state", 0.0)
    try:
        compare_copies(run, dist.group.WORLD)
    except UserError as damage:
        seen.note("copies", str(damage), 1.0)


@torch.no_grad()
def give_weights(run: build.Run, weights: dict[str, Tensor]) -> None:
    """Load this rank's slices of the weights, and the expert biases of its layers."""
    for fqn, tensor in run.saved.items():
        local(tensor).copy_(cut_local(weights[fqn], tensor))


def choose_with_ties(router: Router, of_ties: Tensor, routes: Tensor, scores: Tensor) -> Tensor:
    """Replace Router.choose: tokens with tied scores get the experts that the plain loop chose.

    scores (B, S, E) -> routes (B, S, K). The plain loop had N tokens with tied scores. `of_ties` (N, E) has the scores
    of these tokens, and `routes` (N, K) has their experts.
    """
    chosen = Router.choose(router, scores)
    if len(routes) == 0:
        return chosen
    distance = (scores[..., None, :] - of_ties).abs().amax(-1)  # (B, S, N)
    nearest = distance.min(-1)
    is_tie = nearest.values < SAME_TOKEN
    return torch.where(is_tie[..., None], routes[nearest.indices], chosen)


# ---------------------------------------------------------------- outputs of modules


@contextmanager
def outputs_compared(run: build.Run, plain: PlainStep, seen: Seen) -> Iterator[None]:
    """Context manager: watch the modules in a step, and compare their outputs at its end."""
    pieces: dict[tuple[str, str], list[Tensor]] = defaultdict(list)

    def keep(name: str, module: nn.Module, args: tuple, output: Tensor) -> None:
        if is_recomputed():
            return
        if name in plain.outputs:
            pieces["module output", name].append(local(output).clone())
        # the blocks of a fork may have inputs that Llama's blocks do not have
        if name.rpartition(".")[0] == "layers" and run.config.model.name == "llama3":
            pieces["rotary angles", name].append(args[1].clone())

    hooks = []
    for part in run.parts:
        for name, module in part.named_modules():
            is_inside = name.count(".") > 1  # layers.0.attention
            if run.config.compile.enable and is_inside:
                continue  # a hook inside a compiled block would break the graph
            hooks.append(module.register_forward_hook(partial(keep, name)))
    yield
    for hook in hooks:
        hook.remove()
    angles = rotary_angles(plain.batch.positions, run.parts[0].model_args)
    n_rows = len(plain.batch.tokens) // (run.layout.dp * run.layout.n_microbatches)
    for (measure, name), found in pieces.items():
        # Before its first step, a schedule also calls each model part once, to infer shapes.
        microbatches = found[-run.layout.n_microbatches :]
        right = angles if measure == "rotary angles" else plain.outputs[name]
        if name == "output":  # the head returns the sum of token losses of a microbatch
            own = torch.stack(microbatches).sum()
        elif microbatches[0].dim() > 1 and len(microbatches[0]) == n_rows:
            own = torch.cat(microbatches)
        else:  # the output does not have the shape (B, S, ...): for example, a fork's module returns a parameter
            continue
        # `inner` returns (B, heads, S, E), all other modules return (B, S, ...)
        sequence_dim = 2 if name.endswith("inner") else 1
        whole = cut_piece(right, own, sequence_dim, run)
        if own.shape == whole.shape:
            seen.note(measure, name, relative_error(own, whole))
        else:
            seen.note("module output", name, math.inf)


def cut_piece(whole: Tensor, own: Tensor, sequence_dim: int, run: build.Run) -> Tensor:
    """Return the expected value of the output `own` of one rank.

    cp splits the sequence. If a dim of this slice is still longer than in `own`, tp splits this dim. If several ranks
    share a key/value head, the dim is split into fewer pieces than tp has ranks.
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
