"""Mutants of Muon: errors in the update of a matrix that is split over the ranks."""

from mutant_table import mutant

from torchtitan_lite.extensions import muon


@mutant(
    "2 | TP=2 MUON",
    "updates",
    "layers.1.feed_forward.w2.weight",
    at=(muon, "exchange_slices"),
    dims=("tp",),
)
def owner_forgets_to_send(exchange, sent, received, group, empty, calls=[]):  # noqa: B006
    """One rank does not send its results, so the other ranks add their momentum without orthogonalizing it."""
    before = [tensor.clone() for tensor in received[0]]
    exchange(sent, received, group, empty)
    calls.append(group)
    if len(calls) % 2 == 0 and group.rank() > 0:
        for tensor, old in zip(received[0], before, strict=True):
            tensor.copy_(old)


@mutant(
    "2 | MUON",
    "state",
    "layers.1.feed_forward.w1.weight (momentum_buffer)",
    at=(muon.Muon, "update"),
    dims=("dp_shard",),
)
def momentum_of_another_matrix(update, optimizer, matrices, axes, group):
    """A rank stores momenta in the order of their owners, so the next step reads the momentum of a different matrix."""
    update(optimizer, matrices, axes, group)
    states, (first, second) = optimizer.state, [matrix.parameter for matrix in matrices]
    if muon.dist.get_rank() == 1 and first.shape == second.shape:
        states[first], states[second] = states[second], states[first]
