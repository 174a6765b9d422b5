"""Expert parallel: shard the experts of a layer, and send each token to the ranks of its experts (drawn for ep=2).

    experts.w1 (E, D, F)      ep rank 0           ep rank 1            placement
                              experts [:E/2]      experts [E/2:]       Shard(0) over ep, then FSDP over efsdp
    router (E, D)             all                 all                  Replicate over ep, then FSDP over efsdp
    tokens                    its own             its own              batch rows, cp pieces, tp slices

The experts use a second mesh over the same ranks. A token can go to any rank of an ep group. The role of
this rank in the rest of the block does not matter:

    everything else    pp, dp_replicate, dp_shard, cp, tp
    experts            pp, dp_replicate, efsdp, ep          efsdp x ep = dp_shard x cp x tp; ep is innermost

Per layer and microbatch, R rows (tokens x top_k) on this rank, over ep:

    forward    all-to-all of counts      E x 8 bytes             number of rows for each expert
               all-to-all of rows        about R*D*2(n-1)/n      each row goes to the rank of its expert
               all-to-all of results     the same                results come back
    backward   two all-to-alls           the same each           gradients of results and of rows

The host must know the number of arriving rows before it can allocate them. So it waits for the counts once per layer
and microbatch (read_splits), and once more if the layer is recomputed. To keep the device busy meanwhile, FSDP
prefetches the next layer before this wait (fsdp.py). With ep = 1 there is no exchange and no wait.

With uneven loads a rank receives more than R rows; no row is dropped. Gradients are sums over all tokens of the global
batch. For experts, the all-to-alls and FSDP's reduction over efsdp and dp_replicate compute these sums, so no factor of
ep appears. tp does not split experts, because its ranks have different tokens here (sequence parallel).

Sources: GShard arXiv:2006.16668; folding ep into the other dims: arXiv:2504.14960.
Effect: expert weights are DTensors on mesh dim ep; `experts.forward` exchanges rows before and after the same compute.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from torchtitan_lite.model.moe import Experts, Router, invert, list_moes, take_rows
from torchtitan_lite.parallel.exchange import ExchangeRows, Ranks, all_to_all, list_ranks


def apply_expert_parallel(part: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the experts of `part` (on meta) over `mesh` (ep, of any size), and exchange rows around them."""
    for _, moe in list_moes(part):
        router, experts = moe.router, moe.experts
        if mesh.size() > 1:
            for module, placement in ((router, Replicate()), (experts, Shard(0))):
                for name, weight in list(module.named_parameters()):
                    own = distribute_tensor(weight, mesh, [placement], src_data_rank=None)
                    module.register_parameter(name, nn.Parameter(own))
            experts.forward = partial(compute_elsewhere, experts, list_ranks(mesh))
        router.forward = partial(route_own_tokens, router)


def route_own_tokens(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    """Replacement for Router.forward: x (B, S/tp, D)."""
    weight = router.weight
    if isinstance(weight, DTensor):
        # The gradient covers only this rank's tokens. It is a partial sum, which FSDP all-reduces over ep.
        weight = weight.to_local(grad_placements=[Partial()])
    return router.route(x, weight)


def share_sequences(part: nn.Module, groups: list[dist.ProcessGroup]) -> None:
    """Make the auxiliary loss of `part` count the routes of full sequences, which `groups` (cp, tp) split.

    If this loss is enabled, backward all-reduces B x E x 8 bytes over each group.
    """

    def sum_over_sequence(counts: Tensor) -> Tensor:
        total = counts.clone()
        for group in groups:
            dist.all_reduce(total, group=group)
        return total

    for _, moe in list_moes(part):
        moe.router.sum_over_sequence = sum_over_sequence


def compute_elsewhere(experts: Experts, ranks: Ranks, rows: Tensor, counts: Tensor) -> Tensor:
    """Replacement for Experts.forward: rows (R, D) sorted by expert -> (R, D), computed on the experts' ranks."""
    # Rows arriving from each rank, per local expert: (ep, E/ep).
    theirs = all_to_all(counts, ranks).unflatten(0, (ranks.n, -1))
    sent, received = read_splits(counts.unflatten(0, (ranks.n, -1)), theirs)
    arrived = ExchangeRows.apply(
        rows, received, sent, ranks
    )  # by rank, and from each rank by expert
    order = order_by_expert(theirs, sum(received))
    place = invert(order)
    weights = [local_experts(weight) for weight in (experts.w1, experts.w2, experts.w3)]
    results = experts.compute(take_rows(arrived, order, place, 1), theirs.sum(0), *weights)
    return ExchangeRows.apply(take_rows(results, place, order, 1), sent, received, ranks)


def order_by_expert(theirs: Tensor, n_rows: int) -> Tensor:
    """Return the order (n_rows,) that sorts received rows by expert. `theirs` (ep, E/ep): rows by source, expert."""
    n_ranks, n_experts = theirs.shape
    of_runs = torch.arange(n_experts, device=theirs.device).repeat(n_ranks)
    return of_runs.repeat_interleave(theirs.flatten(), output_size=n_rows).argsort(stable=True)


def read_splits(ours: Tensor, theirs: Tensor) -> tuple[list[int], list[int]]:
    """Return the number of rows to send to and to receive from each ep rank. The host waits for the device here."""
    sent, received = torch.stack([ours.sum(1), theirs.sum(1)]).tolist()
    return sent, received


def local_experts(weight: Tensor) -> Tensor:
    """Return all experts of this ep rank. FSDP has gathered them."""
    return weight.to_local() if isinstance(weight, DTensor) else weight
