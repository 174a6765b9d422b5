"""Mutants of Muon: what the ranks of a round do to a matrix that no rank holds whole."""

from layouts import TP, Row
from mutant_table import mutant

from torchtitan_lite.extensions import muon

MUON = {"optimizer.name": "Muon", "optimizer.lr": 0.02}
SHARDED, TENSOR = Row(2, MUON), Row(2, {TP: 2, **MUON})


@mutant(SHARDED, "updates", "layers.1.feed_forward.w3.weight", at=(muon, "orthogonalize"))
def rows_orthogonalized_instead_of_matrices(orthogonalize, slices, matrices, axes, empty):
    """Each rank orthogonalizes its own rows. The update has the right size, and no rank waits."""
    orthogonalize(slices, matrices, [], empty)


@mutant(
    Row(4, {TP: 2, **MUON}), "updates", "layers.1.feed_forward.w3.weight", at=(muon, "plan_rounds")
)
def halves_of_tp_orthogonalized(plan_rounds, names, parameters):
    """Slices are joined over fsdp only. On each tp rank, an owner has its half of the matrix."""
    return [(axes[:1], matrices) for axes, matrices in plan_rounds(names, parameters)]


@mutant(
    TENSOR, "updates", "layers.1.feed_forward.w2.weight", at=(muon, "exchange_slices"), dims=("tp",)
)
def owner_forgets_to_send(exchange, sent, received, group, empty, calls=[]):  # noqa: B006
    """A rank sends no results: the others add their momentum as it is."""
    before = [tensor.clone() for tensor in received[0]]
    exchange(sent, received, group, empty)
    calls.append(group)
    if len(calls) % 2 == 0 and group.rank() > 0:
        for tensor, old in zip(received[0], before, strict=True):
            tensor.copy_(old)


@mutant(
    SHARDED,
    "state",
    "layers.1.feed_forward.w1.weight (momentum_buffer)",
    at=(muon.Muon, "update"),
    dims=("dp_shard",),
)
def momentum_of_another_matrix(update, optimizer, matrices, axes, group):
    """A rank keeps the momenta of a round in the order of their owners, and finds another one in the next step."""
    update(optimizer, matrices, axes, group)
    states, (first, second) = optimizer.state, [matrix.parameter for matrix in matrices]
    if muon.dist.get_rank() == 1 and first.shape == second.shape:
        states[first], states[second] = states[second], states[first]
