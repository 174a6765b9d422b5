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
