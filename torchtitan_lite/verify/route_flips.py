"""Which routes does a layout choose by itself, and by how much are they other than those of the reference?

    the layout       a forward pass over the first batch, with the initial weights and without given routes
    a flip           an expert of the reference's choice that the layout replaces by another one
    its margin       by how much the reference scored the first above the second, bias included

Scores are between 0 and 1, and right layouts are off by up to 1e-7 in them. A tie is decided by that: a margin below
MOST_MARGIN is no fault. One flip changes all that later layers see of its sequence, so only the flips of the first
layer in which a sequence has any are judged; the others are counted.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from torchtitan_lite import step as stepping  # through the module: a test may break one of its functions
from torchtitan_lite.config.schema import Config
from torchtitan_lite.model.moe import list_mixtures
from torchtitan_lite.verify.certificate import Measure
from torchtitan_lite.verify.culprit import Culprit
from torchtitan_lite.verify.module_outputs import find_stage, list_forward_order
from torchtitan_lite.verify.one_rank import Coordinates, build_small_run, own_rows, start_experts
from torchtitan_lite.verify.reference import load_reference, make_batch_of
from torchtitan_lite.verify.trial_checks import blame

MOST_MARGIN = 1e-5

Place = tuple[int, int]  # layer, row of the global batch


@dataclass(frozen=True)
class RankRoutes:
    """What the routers of one rank chose."""

    coordinates: Coordinates
    n_routes: int
    flips: dict[Place, tuple[int, float]]  # how many, and the widest margin


@dataclass(frozen=True)
class RouteFlips:
    """What all of them chose."""

    measure: Measure
    fault: str  # empty: there is none
    culprit: Culprit


def measure_routes(rank: int, world_size: int, config: Config, reference_path: str) -> RankRoutes:
    """Worker: let the routers of this layout choose, and compare with the reference. Collective."""
    reference = load_reference(reference_path)
    experts = reference.experts
    run = build_small_run(config, world_size, reference.method)
    start_experts(run, reference)
    whole = make_batch_of(run.config, 0, reference.method)
    numbers = torch.arange(whole.tokens.numel()).view_as(whole.tokens)  # of the tokens of the global batch
    batch = stepping.shard_for_cp(run, own_rows(run, whole))
    chosen: dict[int, list[Tensor]] = defaultdict(list)
    for part in run.parts:
        for layer, mixture in list_mixtures(part):
            mixture.router.register_forward_hook(partial(note_routes, chosen[layer]))
    stepping.forward_only(run, batch, stepping.count_global_tokens(run, batch))

    own_numbers = stepping.shard_for_cp(run, own_rows(run, replace(whole, tokens=numbers))).tokens
    at = own_numbers.chunk(run.layout.n_microbatches)
    order, seq_len = list_forward_order(config, run.layout), whole.tokens.shape[1]
    tp, n_routes, flips = run.mesh.tp, 0, {}
    for layer, calls in chosen.items():
        scores, routes = (x[:, :, layer].flatten(0, 1) for x in (experts.scores, experts.routes[0]))
        microbatches = order[find_stage(run.layout, f"layers.{layer}")]
        # A pipeline's first step calls each stage once more, before all others, to learn shapes.
        for microbatch, own in zip(microbatches, calls[-len(microbatches) :], strict=True):
            tokens = at[microbatch].chunk(tp.size(), dim=1)[tp.get_local_rank()].flatten()
            n_routes += own.numel()
            n_flips, margins = find_flips(own.flatten(0, 1), routes[tokens], scores[tokens])
            for token in n_flips.nonzero().flatten().tolist():
                place = layer, tokens[token].item() // seq_len
                n_before, widest = flips.get(place, (0, 0.0))
                flips[place] = n_before + n_flips[token].item(), max(widest, margins[token].item())
    return RankRoutes(run.mesh.coordinates(), n_routes, flips)


def note_routes(chosen: list[Tensor], router, args: tuple, output: tuple[Tensor, Tensor]) -> None:
    """Forward hook of a router."""
    chosen.append(output[1])


def find_flips(own: Tensor, right: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each token its flips (T,) int64, and their widest margin (T,).

    own, right (T, K): experts; scores (T, E), those of `right`.
    """
    chosen, wanted = (torch.zeros_like(scores, dtype=torch.bool).scatter(1, x, True) for x in (own, right))
    lost = scores.masked_fill(~(wanted & ~chosen), -torch.inf).amax(1)
    gained = scores.masked_fill(~(chosen & ~wanted), torch.inf).amin(1)
    return (wanted & ~chosen).sum(1), lost - gained


def judge_routes(ranks: list[RankRoutes]) -> RouteFlips:
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
    wide = [(layer, coordinates) for layer, margin, coordinates in judged if margin > MOST_MARGIN]
    layer = min((layer for layer, _ in wide), default=0)
    wrong = [coordinates for _, coordinates in wide]
    detail = f"{n_flips} of {n_routes:,} routes are others, and scores that differ by {widest:.1e} are no tie"
    is_right = [(rank.coordinates, rank.coordinates not in wrong) for rank in ranks]
    culprit = blame("routes", f"layers.{layer}.feed_forward.router", detail, is_right)
    return RouteFlips(Measure("route flips", widest, MOST_MARGIN, of), detail if wide else "", culprit)
