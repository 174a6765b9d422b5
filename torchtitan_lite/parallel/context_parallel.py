"""Context parallel: split each sequence over mesh dim `cp` (drawn for cp=2, a sequence of 2*cp = 4 pieces).

    sequence of S tokens                 cp rank 0      cp rank 1
    tokens, targets, positions (B, S)    piece 0 and 3  piece 1 and 2    "zig-zag": an early and a late piece
    hidden states (B, S/cp, D)           0 and 3        1 and 2          with tp, split again over tp
    query, key, value                    0 and 3        1 and 2
    keys that the queries attend to      0..3           0..2             fetched in attention, layer by layer
    doc_ids (B, S)                       all            all              a document may span pieces
    parameters                           FSDP shards them over dp_shard x cp, as if cp were data parallel

A token attends to all earlier tokens, so late pieces cost more than early pieces. With one early and one late piece per
rank, all ranks have equal work. Only attention changes: all other modules process each token separately, the loss is a
sum over tokens, and FSDP sums the gradients.

Causal attention (ring_attention.py) exchanges keys and values by an all-gather or around a ring. The memory that causal
attention needs per rank is proportional to 1/n. Causal attention has its own operator for speed: on a CPU, torch turns
`causal_lower_right` into an explicit mask, so torch's attention on all-gathered keys would also compute the masked
half.

Attention with documents, windows or sinks all-gathers keys and values, and applies a mask. The all-gathers move
P(n-1)/n bytes, where P = 2*B*K*S*E*2 bytes in bf16. The reduce-scatters of backward move as many bytes as these
all-gathers. Without recompute (mode "none"), the all-gathered keys and values are saved for backward. With recompute
(any other mode), backward all-gathers the keys and values again.

Legend: B batch, S full sequence over n ranks, D model dim, H query heads, K key/value heads, E head dim.
Sources: ring arXiv:2310.01889; zig-zag: Llama 3 arXiv:2407.21783; striped order, also with equal work:
arXiv:2311.09431.
Effect: replaces `attention.inner` of each block if it is causal. Any other attention becomes a subclass that first
all-gathers keys and values, and computes its mask from `positions`. To allow this for the attention of a fork, set
`under_cp` in the row that the fork adds to ATTENTIONS. FQNs do not change.
"""

from functools import cache

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lite.config.extensions import load_extension, load_module
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.model.attention import (
    CausalAttention,
    InnerAttention,
    build_attention,
    stack_heads,
)
from torchtitan_lite.parallel.exchange import Gather, Ranks, list_ranks


def plan_query_positions(
    rank: int | Tensor,
    n_ranks: int,
    seq_len: int,
    device: torch.device | None = None,
) -> Tensor:
    """Return the positions of a cp rank's tokens in the full sequence, (S/cp,), ascending.

    If `rank` is a column of ranks (R, 1), returns (R, S/cp).
    """
    piece_len = seq_len // (2 * n_ranks)
    index = torch.arange(2 * piece_len, device=device)
    late_rank = 2 * n_ranks - 2 - rank
    offset = torch.where(index < piece_len, rank, late_rank)
    return index + offset * piece_len


def shard_sequence(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Keep this rank's pieces: (B, S) -> (B, S/cp). No communication, because every rank reads the full sequence."""
    positions = plan_query_positions(
        mesh.get_local_rank(),
        mesh.size(),
        whole.shape[1],
        whole.device,
    )
    return whole[:, positions]


def apply_context_parallel(
    part: nn.Module, mesh: DeviceMesh, *, attention: str, method: str
) -> None:
    """Let the attention of each block fetch keys and values over cp.

    `attention` is model.attention; `method` is context_parallel_rotate_method. Before launch, `check_context_parallel`
    in config/settings.py reports combinations of these two that are not supported. Raises UserError if the model has
    custom attention, which this function cannot change.
    """
    with torch.device("meta"):
        expected = type(build_attention(attention, part.model_args, layer=0))
    own_attention = load_module("model.own_attention")
    if why := own_attention.explain_own_attention(part, expected):
        raise UserError(
            f"Context parallel cannot fetch keys for this attention: {why}. Add a row to ATTENTIONS "
            "(config/choices.py) for it, or use parallelism.context_parallel_degree = 1."
        )
    ranks = list_ranks(mesh)
    for fqn, inner in own_attention.list_attentions(part).items():
        if expected is CausalAttention:
            part.set_submodule(fqn, CausalContext(ranks, method))
        else:
            assert method == "allgather", "the ring has no masks"
            inner.__class__ = make_gathering(type(inner))
            inner.ranks = ranks


class CausalContext(InnerAttention):
    """Causal attention: every token attends to all earlier tokens, on every rank."""

    def __init__(self, ranks: Ranks, method: str):
        super().__init__()
        self.method = method
        self.ranks = ranks
        self.attend = load_extension("ring_attention").context_attention

    def forward(self, query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor | None) -> Tensor:
        """Compute attention across the ranks of cp. query and result: (B, H, S/cp, E). key and value: (B, K, S/cp, E).
        Collective."""
        out, _ = self.attend(query, key, value, self.method, *self.ranks[:3])
        return out


@cache  # create one subclass per class: only modules of the same class share compiled code
def make_gathering(cls: type[InnerAttention]) -> type[InnerAttention]:
    """Return a subclass of `cls` that all-gathers keys and values before its forward."""
    return type(f"Gathering{cls.__name__}", (GatheringAttention, cls), {})


class GatheringAttention(InnerAttention):
    """Mixin that all-gathers keys and values before `forward`. Overrides `positions`."""

    ranks: Ranks

    def forward(self, query: Tensor, key: Tensor, value: Tensor, doc_ids: object) -> Tensor:
        """Attend with the result of `plan`. query and result: (B, H, S/cp, E). key, value: (B, K, S/cp, E).
        Collective."""
        local = stack_heads(key, value)
        keys, values = Gather.apply(local, self.ranks, 3)  # (2, B, K, S, E)
        return super().forward(query, keys, values, doc_ids)

    def positions(self, n_keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the positions of this rank's queries, (S/cp,), and of all keys, (S,), in rank order."""
        all_ranks = torch.arange(self.ranks.n, device=device)[:, None]
        queries = plan_query_positions(self.ranks.own, self.ranks.n, n_keys, device)
        keys = plan_query_positions(all_ranks, self.ranks.n, n_keys, device)
        return queries, keys.flatten()
