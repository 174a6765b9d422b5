"""Make FSDP move fewer bytes, especially between nodes: ZeRO++ (drawn for 2 nodes of 2 ranks, one weight of four rows).

                                    rank 0      rank 1      rank 2      rank 3
                                    ------- node 0 -------  ------- node 1 -------
    sharded, as in fsdp.py          row 0       row 1       row 2       row 3       fp32
    unsharded, in its block         all rows    all rows    all rows    all rows    rounded by qwZ, freed after a block
    hpZ: from forward to backward   rows 0, 1   rows 2, 3   rows 0, 1   rows 2, 3   as all-gathered; a node has all rows
    qgZ: gradient in the node       rows 0, 2   rows 1, 3   rows 0, 2   rows 1, 3   sums over the ranks of the node
         gradient between nodes     row 0       row 1       row 2       row 3       sums over all ranks, fp32

    hpZ   backward all-gathers the rows that the ranks of the node have saved, so no bytes move between nodes
    qwZ   the all-gather sends int8 blocks. A rank rounds its own rows too, so that all ranks use identical weights
    qgZ   two all-to-alls of int8 blocks replace the reduce-scatter. Received blocks are unpacked, then summed in fp32

A block is 256 consecutive elements of one rank's shard of one parameter, and is sent as 256 integers of one byte and an
fp32 scale. The last block of a shard is padded with zeros. A block never mixes two parameters: a norm's weights are
near 1, and a scale for values near 1 would round the small weights of a matrix to 0.

Bytes that a rank sends for a group of P elements of w bytes, over n = f nodes x m ranks, with q = 260/256:

    all-gather, forward     wP(n-1)/n    with qwZ qP(n-1)/n
    all-gather, backward    the same     with hpZ the same with (m-1)/m instead of (n-1)/n, all inside the node
    reduce-scatter          4P(n-1)/n    with qgZ qP(m-1)/m inside the node, then (qP/m)(f-1)/f between nodes
    memory                  hpZ saves wP/m (with qwZ qP/m) bytes of every block; qwZ needs 5P bytes to all-gather a
                            group, and qgZ (6 + 4/m)P bytes to reduce-scatter a group

Rounding error. If a is the largest magnitude in a block, its scale is s = a/127. An element x is sent as the integer
nearest to x/s, which is at most 127, so the product of this integer and s differs from x by at most s/2.

    qwZ   a weight has an error of at most s/2, the same on all ranks, so they train the same rounded model
    qgZ   a sum of gradients g_r has an error of at most s_r/2 for each rank r, plus s_v/2 for each node v. The sum of a
          node has an error before it is rounded, so s_v <= (max |sum of its g_r| + max sum of its s_r/2) / 127

Nothing else is rounded. `verify` checks that every element of a packed block has an error of at most s/2. After this
check, `verify` sends the numbers without rounding through the same collectives, so all other comparisons keep their
usual bounds. In a block with NaN or infinity, all elements become NaN, and the step is skipped as usual.

An FSDP group is split by node only if it has several ranks in each of several nodes. If an FSDP group is not split, hpZ
has no effect, and qgZ has a single all-to-all. Replicas (HSDP) all-reduce without rounding. Packing, collective and
unpacking run on FSDP's streams, in place of FSDP's own collective, and the host does not wait.

Source: ZeRO++ arXiv:2306.10209. If reshard_after_forward is an integer, FSDP2 also keeps secondary shards, but does not
support TP or experts, and adds two process groups per block. Effect: FSDP calls the collectives in this file.
Parameters, FQNs and checkpoints do not change.
"""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from torchtitan_lite.config.features import INT8_BLOCK
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.model.moe import MoE
from torchtitan_lite.parallel.fsdp import list_fsdp_groups
from torchtitan_lite.parallel.mesh import Mesh


class Nodes(NamedTuple):
    """The two process groups of a rank whose FSDP group is split by node."""

    # the ranks of this node, or the whole FSDP group if it is not split by node
    near: dist.ProcessGroup
    # one rank of every node: the ranks with the same index within their node; None if the group is not split by node
    far: dist.ProcessGroup | None


def split_by_node(mesh: DeviceMesh, dim: str, near: int) -> Nodes:
    """Split the ranks of the last dim of an FSDP mesh into nodes of `near` consecutive ranks. Collective.

    If `near` is 1, the group is not split.
    """
    shard = mesh
    if mesh.ndim > 1:
        shard = mesh[mesh.mesh_dim_names[-1]]
    if near == 1:
        return Nodes(shard.get_group(), None)
    split = shard._unflatten(0, (shard.size() // near, near), (f"{dim}_far", f"{dim}_near"))
    return Nodes(split.get_group(f"{dim}_near"), split.get_group(f"{dim}_far"))


def apply_zero_plus_plus(
    parts: list[nn.Module], uses: Sequence[str], layout: Layout, mesh: Mesh
) -> None:
    """Replace the collectives of all FSDP groups in `parts`. `uses` has some of "hpz", "qwz" and "qgz".

    Collective over all ranks, because it creates process groups for the nodes.
    """
    nodes = split_by_node(mesh.fsdp_mesh, "fsdp", layout.fsdp_near)
    expert_nodes = None
    if mesh.expert_fsdp_mesh is not None:
        expert_nodes = split_by_node(mesh.expert_fsdp_mesh, "efsdp", layout.efsdp_near)
    for part in parts:
        replace_collectives(part, uses, nodes, expert_nodes)


def replace_collectives(
    part: nn.Module, uses: Sequence[str], nodes: Nodes, expert_nodes: Nodes | None
) -> None:
    """Replace the collectives of the FSDP groups in one part.

    Secondary shards are saved only for the groups that backward all-gathers again: blocks and their experts.
    """
    blocks = list(part.layers.values())
    for module, group in list_fsdp_groups(part):
        sizes = [parameter.padded_sharded_param_size.numel() for parameter in group.fsdp_params]
        packing = Packing(sizes)
        is_moe = isinstance(module, MoE)
        own_nodes = expert_nodes if is_moe else nodes
        is_gathered_again = is_moe or module in blocks
        near = None
        if "hpz" in uses and own_nodes.far is not None and is_gathered_again:
            near = own_nodes.near
        module.set_custom_all_gather(AllGather(packing if "qwz" in uses else None, near))
        if "qgz" in uses:
            module.set_custom_reduce_scatter(ReduceScatter(packing, own_nodes))


class Packing:
    """Packs rows into bytes: first the integers of all blocks, then the scales. A row contains the shards of one rank
    for all parameters of an FSDP group."""

    def __init__(self, sizes: list[int]):
        """`sizes` has the number of elements in a rank's shard of each parameter, including FSDP's padding."""
        self.sizes = sizes
        self.padded = [ceil(size / INT8_BLOCK) * INT8_BLOCK for size in sizes]

    def pack(self, rows: Tensor) -> Tensor:
        """Round rows (..., elements of a shard) to packed blocks (..., bytes)."""
        size = (*rows.shape[:-1], sum(self.padded))
        padded = rows.new_zeros(size, dtype=torch.float32)
        shards = rows.split(self.sizes, -1)
        parts = padded.split(self.padded, -1)
        for shard, part in zip(shards, parts, strict=True):
            part[..., : shard.shape[-1]] = shard
        blocks = padded.unflatten(-1, (-1, INT8_BLOCK))
        largest = torch.linalg.vector_norm(blocks, torch.inf, -1, keepdim=True)
        scales = largest / 127
        divisors = scales.masked_fill(scales == 0, 1.0)
        blocks.div_(divisors)
        blocks.round_()
        integers = blocks.to(torch.int8)
        integers = integers.flatten(-2)
        bytes_of_scales = scales.flatten(-2).view(torch.int8)
        return torch.cat([integers, bytes_of_scales], -1)

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the numbers in `packed` (..., bytes) in fp32, including the padding."""
        n_bytes = sum(self.padded)
        integers = packed[..., :n_bytes].unflatten(-1, (-1, INT8_BLOCK))
        scales = packed[..., n_bytes:].view(torch.float32)
        blocks = integers * scales[..., None]
        return blocks.flatten(-2)

    def remove_padding(self, padded: Tensor, rows: Tensor) -> None:
        """Copy the numbers to `rows` (..., elements of a shard), of any dtype, and leave out the padding."""
        shards = rows.split(self.sizes, -1)
        parts = padded.split(self.padded, -1)
        for shard, part in zip(shards, parts, strict=True):
            shard.copy_(part[..., : shard.shape[-1]])


class AllGather(DefaultAllGather):
    """The all-gather of an FSDP group, called by FSDP."""

    def __init__(self, packing: Packing | None, near: dist.ProcessGroup | None):
        """`packing` rounds the weights (qwZ). The ranks of `near` keep secondary shards (hpZ). None turns a feature
        off."""
        self.packing = packing
        self.near = near
        # This rank's secondary shard: its slice of the weights, which are sharded inside the node. Packed if weights
        # are rounded.
        self.secondary: Tensor | None = None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ):
        """Fill `output_tensor` with the shards of all ranks. Returns no Work, because FSDP's stream runs all kernels in
        order.

        Weights change between a backward and the next forward, so every forward creates a new secondary shard, even if
        the previous shard was never used. Only backward reads secondary shards.
        """
        own = input_tensor
        ranks = group
        is_backward = torch._C._current_graph_task_id() != -1
        uses_secondary = is_backward and self.secondary is not None
        if uses_secondary:
            own = self.secondary
            ranks = self.near
            self.secondary = None
        elif self.packing is not None:
            own = self.packing.pack(input_tensor)
        gathered = output_tensor
        if self.packing is not None:
            gathered = own.new_empty(ranks.size() * own.numel())
        super().__call__(gathered, own, ranks)
        if self.near is not None and not uses_secondary:
            chunks = gathered.chunk(self.near.size())
            self.secondary = chunks[self.near.rank()].clone()
        if self.packing is not None:
            numbers = self.packing.unpack(gathered.view(group.size(), -1))
            self.packing.remove_padding(numbers, output_tensor.view(group.size(), -1))


class ReduceScatter(DefaultReduceScatter):
    """The reduce-scatter of an FSDP group, implemented with all-to-alls (qgZ). FSDP calls this object."""

    def __init__(self, packing: Packing, nodes: Nodes):
        self.packing = packing
        self.nodes = nodes

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ):
        """Write the sum of all ranks' gradients of this shard to `output_tensor`. `op` is always a sum (fsdp.py)."""
        shape = (-1, self.nodes.near.size(), output_tensor.numel())  # node, rank in node, shard
        rows = input_tensor.view(shape).transpose(0, 1)
        rows = self.exchange(rows, self.nodes.near)
        if self.nodes.far is not None:
            rows = self.exchange(rows, self.nodes.far)[None]
        output_tensor.copy_(rows[0])

    def exchange(self, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Send rows[i] to rank i of the group, and return the sum of the rows that arrive."""
        sent = self.packing.pack(rows)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        summed = self.packing.unpack(received).sum(0)
        result = rows.new_empty(rows.shape[1:])
        self.packing.remove_padding(summed, result)
        return result
