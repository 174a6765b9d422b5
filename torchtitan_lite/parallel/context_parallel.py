"""Context parallel: split each sequence over mesh dim `cp` (drawn for cp=2, a sequence of 2*cp = 4 pieces).

    of a sequence of S tokens            cp rank 0      cp rank 1
    tokens, targets, positions (B, S)    piece 0 and 3  piece 1 and 2    "zig-zag": an early and a late one
    hidden states (B, S/cp, D)           of those       of those         with tp below, split again over tp
    query, key, value                    of those       of those
    keys that the queries see            0..3 of 4      0..2 of 4        fetched in attention, layer by layer
    doc_ids (B, S)                       all            all              who sees whom is asked across pieces
    parameters                           as dp_shard: FSDP shards them over dp_shard x cp

A token sees all before it, so late pieces are dear and early ones cheap; one of each makes all ranks equal. Everything
but attention works on tokens alone and needs no change: a loss is a sum over tokens, and gradients are summed by FSDP.

Traffic per layer: keys and values, forward and backward, and their gradients; context_attention.py counts the bytes.
With documents, n = cp: one all-gather of P(n-1)/n, P = 2*B*K*S*E*2 bytes in bf16, and a reduce-scatter of as many in
backward. The gathered keys and values are kept for backward, unless recompute (any mode but "none") fetches them again.

Sources: Llama 3, arXiv:2407.21783; ring attention arXiv:2310.01889.
Effect: `attention.inner` of each block is another module, without parameters; FQNs do not change.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lite.model.attention import attend_within_documents
from torchtitan_lite.parallel.context_attention import context_attention

collectives = torch.ops._c10d_functional


def plan_query_positions(rank: int, n_ranks: int, seq_len: int, device: torch.device | None = None) -> Tensor:
    """Return the positions in the sequence of the tokens of a cp rank, (S/cp,), ascending."""
    pieces = torch.arange(seq_len, device=device).unflatten(0, (2 * n_ranks, -1))
    return torch.cat((pieces[rank], pieces[2 * n_ranks - 1 - rank]))


def shard_sequence(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Keep this rank's pieces: (B, S) -> (B, S/cp). No communication: every rank has read the whole sequence."""
    return whole[:, plan_query_positions(mesh.get_local_rank(), mesh.size(), whole.shape[1], whole.device)]


def apply_context_parallel(part: nn.Module, mesh: DeviceMesh, *, attention: str, method: str) -> None:
    """Replace the attention of each block by one that fetches keys and values over cp.

    `attention` is model.attention, `method` context_parallel_rotate_method. Raises KeyError for a pair without a row of
    CONTEXT_ATTENTIONS; config/checks.py refuses it before launch, by `under_cp` of the row in config/choices.py.
    """
    build = CONTEXT_ATTENTIONS[attention, method]
    for block in part.layers.values():
        block.attention.inner = build(mesh)


class CausalContext(nn.Module):
    """Every token sees all tokens before it, on every rank."""

    def __init__(self, mesh: DeviceMesh, method: str):
        super().__init__()
        self.where = (method, mesh.get_group().group_name, mesh.get_local_rank(), mesh.size())

    def forward(self, query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        """query (B, H, S/cp, E), key and value (B, K, S/cp, E) -> (B, H, S/cp, E). Collective."""
        out, _ = context_attention(query, key, value, *self.where)
        return out


class DocumentContext(nn.Module):
    """Every token sees its document up to itself, on every rank."""

    def __init__(self, mesh: DeviceMesh):
        super().__init__()
        self.group_name, self.rank, self.n_ranks = mesh.get_group().group_name, mesh.get_local_rank(), mesh.size()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        """query (B, H, S/cp, E), key and value (B, K, S/cp, E), doc_ids (B, S) -> (B, H, S/cp, E). Collective."""
        gathered = Gather.apply(torch.stack((key, value)), self.n_ranks, self.group_name)
        # Keys stay in the order of the ranks: who sees whom goes by their places, not by their order.
        keys, values = gathered.unflatten(0, (self.n_ranks, 2)).movedim(0, 3).flatten(3, 4)
        seq_len = keys.shape[2]
        positions = [plan_query_positions(rank, self.n_ranks, seq_len, query.device) for rank in range(self.n_ranks)]
        return attend_within_documents(
            query, keys, values, doc_ids, query_positions=positions[self.rank], key_positions=torch.cat(positions)
        )


class Gather(torch.autograd.Function):
    """All-gathers along dim 0, (2, ...) -> (cp * 2, ...); in backward, reduce-scatters the gradients."""

    @staticmethod
    def forward(ctx, own: Tensor, n_ranks: int, group_name: str) -> Tensor:
        ctx.where = n_ranks, group_name
        return collectives.wait_tensor(collectives.all_gather_into_tensor(own, *ctx.where))

    @staticmethod
    def backward(ctx, grads: Tensor) -> tuple[Tensor, None, None]:
        own_grads = collectives.reduce_scatter_tensor(grads.contiguous(), "sum", *ctx.where)
        return collectives.wait_tensor(own_grads), None, None


# (model.attention, context_parallel_rotate_method) -> the module that computes it, built from the cp mesh
CONTEXT_ATTENTIONS: dict[tuple[str, str], Callable[[DeviceMesh], nn.Module]] = {
    ("causal", "allgather"): partial(CausalContext, method="allgather"),
    ("causal", "ring"): partial(CausalContext, method="ring"),
    ("document", "allgather"): DocumentContext,
}
