"""Expert parallel: shard the experts of a layer, and send each token to the ranks of its experts (drawn for ep=2).

    experts.w1 (E, D, F)      ep rank 0           ep rank 1            placement
                              experts [:E/2]      experts [E/2:]       Shard(0) over ep, then FSDP over efsdp
    router (E, D)             all                 all                  Replicate over ep, then FSDP over efsdp
    tokens                    its own             its own              batch rows, cp pieces, tp slices

The experts use a second mesh over the same ranks. A token can go to any rank of an ep group, regardless of that rank's
coordinates on the first mesh:

    everything else    pp, dp_replicate, dp_shard, cp, tp
    experts            pp, dp_replicate, efsdp, ep          efsdp x ep = dp_shard x cp x tp; ep is innermost

Per layer and microbatch, R rows (tokens x top_k) on this rank, over ep:

    forward    all-to-all of counts      E x 8 bytes             number of rows per expert
               all-to-all of rows        about R*D*2(n-1)/n      each row goes to the rank of its expert
               all-to-all of results     the same                results come back
    backward   two all-to-alls           the same each           gradients of results and of rows

The host must know how many rows will arrive, to allocate memory for them. So the host waits for the counts once per
layer and microbatch (read_splits), and once more if the layer is recomputed. To keep the device busy while the host
waits, FSDP prefetches the next layer before the wait (plan_prefetch). With ep = 1 there is no exchange and no wait.

With uneven loads, a rank receives more than R rows; no row is dropped. Gradients are sums over all tokens of the global
batch. For experts, the all-to-alls and FSDP's reduction over efsdp and dp_replicate compute these sums, so gradients
need no factor of ep. tp does not split experts, because tp ranks have different tokens (sequence parallel).

Sources: GShard arXiv:2006.16668; folding ep into the other dims: arXiv:2504.14960.
Effect: expert weights are DTensors on mesh dim ep; `experts.forward` exchanges rows before and after its usual
computation.
"""

from collections.abc import Callable
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from torchtitan_lite.config.experts import find_expert_dim
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.dtensor import shard_parameters
from torchtitan_lite.model.moe import Experts, PermuteRows, list_moes, sort_rows
from torchtitan_lite.parallel.exchange import ExchangeRows, Ranks, all_to_all, list_ranks


def apply_expert_parallel(part: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the experts of `part` (on meta) over `mesh` (ep). The forward of the experts then sends rows to the
    experts' ranks."""
    ranks = list_ranks(mesh)
    for _, moe in list_moes(part):
        # The router's gradient covers only this rank's tokens, so FSDP all-reduces the partial sums over ep.
        shard_parameters(moe.router, mesh, {"weight": Replicate()})
        shard_parameters(moe.experts, mesh, dict.fromkeys(("w1", "w2", "w3"), Shard(0)))
        moe.experts.forward = partial(compute_elsewhere, moe.experts, ranks)


def shard_experts(
    part: nn.Module, layout: Layout, shard: Callable[..., None], mesh: DeviceMesh
) -> None:
    """Shard each MoE layer over `mesh` (efsdp), as an FSDP group. `shard`: as in apply_fsdp (fsdp.py)."""
    # If the ranks cannot share the experts equally (64 ranks, 8 experts), every matrix is sharded instead.
    dim = find_expert_dim(part.model_args, layout.ep, layout.efsdp)
    for _, moe in list_moes(part):
        shard(
            [moe],
            mesh,
            shard_placement_fn=lambda weight: Shard(dim if weight.dim() == 3 else 0),
        )


def plan_prefetch(part: nn.Module) -> None:
    """Let each block, before it computes, prefetch its own MoE layer and the next block.

    By default, torch starts an all-gather when the host reaches the module, but the host waits in the middle of each
    MoE layer, so the all-gather would start late. Only the timing of all-gathers changes.
    """
    moes = [moe for _, moe in list_moes(part)]
    blocks = list(part.layers.values())
    before: list[nn.Module] = []
    for block, after in zip_longest(blocks, blocks[1:]):  # a pipeline stage may have no block
        moe = [block.feed_forward] if block.feed_forward in moes else []
        block.set_modules_to_forward_prefetch([*moe, after] if after else moe)
        block.set_modules_to_backward_prefetch([*moe, *before])
        before = [block, *moe]


def compute_elsewhere(experts: Experts, ranks: Ranks, rows: Tensor, counts: Tensor) -> Tensor:
    """Replacement for Experts.forward: rows (R, D) sorted by expert -> (R, D), computed on the experts' ranks."""
    # number of rows sent to each rank, for each expert of that rank: (ep, E/ep)
    by_rank = counts.unflatten(0, (ranks.n, -1))
    n_experts = by_rank.shape[1]
    splits = [n_experts] * ranks.n
    arriving = all_to_all(counts, ranks, splits, splits)
    # number of rows received from each rank, for each expert of this rank: (ep, E/ep)
    arriving = arriving.view_as(by_rank)
    sent, received = read_splits(by_rank, arriving)
    arrived = ExchangeRows.apply(rows, received, sent, ranks)  # sorted by rank, then by expert
    experts_here = torch.arange(n_experts, device=rows.device)
    expert_of_group = experts_here.repeat(ranks.n)
    expert_of_row = expert_of_group.repeat_interleave(
        arriving.flatten(),
        output_size=sum(received),
    )
    order, place = sort_rows(expert_of_row, n_experts)
    sorted_rows = PermuteRows.apply(arrived, order, place, 1)
    results = type(experts).forward(experts, sorted_rows, arriving.sum(0))
    results = PermuteRows.apply(results, place, order, 1)
    return ExchangeRows.apply(results, sent, received, ranks)


def read_splits(leaving: Tensor, arriving: Tensor) -> list[list[int]]:
    """Return the number of rows to send to and to receive from each ep rank. The host waits for the device here."""
    return torch.stack([leaving.sum(1), arriving.sum(1)]).tolist()
