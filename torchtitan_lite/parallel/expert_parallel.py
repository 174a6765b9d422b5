"""Expert parallel: ranks share the experts of a layer, and send each token to where its experts are (drawn for ep=2).

    experts.w1 (E, D, F)      ep rank 0           ep rank 1            placement
                              experts [:E/2]      experts [E/2:]       Shard(0) over ep, then by FSDP over efsdp
    router (E, D)             all                 all                  Replicate over ep, then by FSDP over efsdp
    tokens                    its own             its own              rows, cp pieces, tp slices: none is on two ranks

The experts live on a second mesh over the same ranks, because a token is handed to any rank of a group, whatever that
group does for the rest of the block:

    everything else    pp, dp_replicate, dp_shard, cp, tp
    experts            pp, dp_replicate, efsdp, ep          efsdp x ep = dp_shard x cp x tp; ep is innermost

Per layer and microbatch, R rows (tokens x top_k) on this rank, over ep:

    forward    all-to-all of counts      E x 8 bytes             how many rows come for each expert
               all-to-all of rows        about R*D*2(n-1)/n      each row to the rank of its expert
               all-to-all of results     the same                and back
    backward   two all-to-alls           of their gradients

The host must know how many rows arrive before it can allocate them: it waits for the counts, once a layer and
microbatch (read_splits), and once more where the layer is recomputed. So that the device does not run dry meanwhile,
FSDP is told to gather the next layer before (fsdp.py). With ep = 1 there is no exchange and nothing waits.

With uneven loads a rank receives more than R rows; none is dropped. Gradients are sums over all tokens of the global
batch: gradients of experts are summed by the all-to-alls and by FSDP's reduction over efsdp and dp_replicate. No factor
of ep appears. tp does not split experts: its ranks hold different tokens here, by sequence parallel.

Sources: GShard arXiv:2006.16668; folding ep into the other dims: arXiv:2504.14960.
Effect: expert weights are DTensors on mesh dim ep; `experts.forward` exchanges rows around the same arithmetic.
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
    """Split the experts of `part` (on meta) over `mesh` (ep, of any size), and exchange rows around them."""
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
    """Replace Router.forward: x (B, S/tp, D)."""
    weight = router.weight
    if isinstance(weight, DTensor):
        # The gradient comes from this rank's tokens only. It is a partial sum, which FSDP all-reduces over ep.
        weight = weight.to_local(grad_placements=[Partial()])
    return router.route(x, weight)


def share_sequences(part: nn.Module, groups: list[dist.ProcessGroup]) -> None:
    """Let the auxiliary loss of `part` count the routes of whole sequences, of which each rank of `groups` has a piece.

    All-reduces B x E x 8 bytes over each of the groups (cp, tp), in backward, if there is such a loss.
    """

    def sum_over_sequence(counts: Tensor) -> Tensor:
        total = counts.clone()
        for group in groups:
            dist.all_reduce(total, group=group)
        return total

    for _, moe in list_moes(part):
        moe.router.sum_over_sequence = sum_over_sequence


def compute_elsewhere(experts: Experts, ranks: Ranks, rows: Tensor, counts: Tensor) -> Tensor:
    """Replace Experts.forward: rows (R, D) sorted by expert -> (R, D), computed on the ranks of their experts."""
    # Rows arriving from each rank, per local expert: (ep, E/ep).
    theirs = all_to_all(counts, ranks).unflatten(0, (ranks.n, -1))
    sent, received = read_splits(counts.unflatten(0, (ranks.n, -1)), theirs)
    arrived = ExchangeRows.apply(rows, received, sent, ranks)  # by rank, and from each rank by expert
    order = order_by_expert(theirs, sum(received))
    place = invert(order)
    weights = [local_experts(weight) for weight in (experts.w1, experts.w2, experts.w3)]
    results = experts.compute(take_rows(arrived, order, place, 1), theirs.sum(0), *weights)
    return ExchangeRows.apply(take_rows(results, place, order, 1), sent, received, ranks)


def order_by_expert(theirs: Tensor, n_rows: int) -> Tensor:
    """Return the order (n_rows,) that sorts arrived rows by expert. `theirs` (ep, E/ep): rows of each run."""
    n_ranks, n_experts = theirs.shape
    of_runs = torch.arange(n_experts, device=theirs.device).repeat(n_ranks)
    return of_runs.repeat_interleave(theirs.flatten(), output_size=n_rows).argsort(stable=True)


def read_splits(ours: Tensor, theirs: Tensor) -> tuple[list[int], list[int]]:
    """Return the rows that go to each ep rank, and those that come from it. The host waits for the device here."""
    sent, received = torch.stack([ours.sum(1), theirs.sum(1)]).tolist()
    return sent, received


def local_experts(weight: Tensor) -> Tensor:
    """Return the experts of this rank: all of them are in its slice, gathered by FSDP."""
    return weight.to_local() if isinstance(weight, DTensor) else weight
