"""Muon: orthogonalize the momentum of every hidden matrix; AdamW for all other parameters (drawn for fsdp 2 x tp 2).

Hidden matrices are the weights of attention and feed-forward, and each expert's three. Newton-Schulz needs the whole
matrix, so in every round each rank of fsdp x tp owns one matrix, of about the same work (deal_matrices in block.py).
A matrix whose owner is rank (1, 0):

    rank (fsdp, tp)                 (0, 0)        (0, 1)        (1, 0)        (1, 1)
    momentum and Nesterov, fp32     its slice     its slice     its slice     its slice
    all-to-all over fsdp            sends slice   sends slice   left half     right half      compute dtype
    all-to-all over tp                                          whole         sends half
    Newton-Schulz                                               whole
    all-to-all over tp, over fsdp   its slice     its slice     its slice     its slice       the same way back
    weight decay and update, fp32   its slice     its slice     its slice     its slice

(Drawn for wo. tp splits the columns of wo and w2, and the rows of the others.) cp ranks belong to fsdp. Every replica
of HSDP and every pipeline stage does this by itself. Experts are dealt over efsdp, in batches of the E/ep experts of a
rank; if FSDP shards them by expert, each rank has whole matrices, and nothing travels.

    state       4 bytes per parameter of a hidden matrix (momentum), 8 per other parameter (AdamW)
    traffic     per rank and step, P = bytes of its slices of hidden matrices in compute dtype (8B on 8 ranks: 1.6 GiB):
                about 2P(n-1)/n over fsdp of n ranks, and 2P(t-1)/t over tp of t ranks
    work        per m x n matrix, m <= n: 5 iterations of 4m^2n + 2m^3 FLOPs, once on its owner (8B: 0.66 PFLOP in all,
                as much as 14,000 tokens)
    memory      in a round, a few copies of the largest matrix; not counted by plan, because activations are freed

Nothing overlaps: a round ends before the next begins. Newton-Schulz computes in training.mixed_precision_param: in
bfloat16 it equals torch.optim.Muon, which knows no other dtype, and a float32 run keeps its promise of equal updates on
every layout, which rounding to 8 bits would break. Updates are scaled to the RMS of AdamW's ("match_rms_adamw"), so
learning rate and weight decay of AdamW carry over. beta1, beta2 and eps are for AdamW.

Sources: Muon, kellerjordan.github.io/posts/muon; scaling: Moonlight arXiv:2502.16982.
"""

from itertools import product
from math import sqrt
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from torchtitan_lite.components.adamw_bfloat16 import local_tensor
from torchtitan_lite.config.block import NEWTON_SCHULZ_STEPS, deal_matrices, is_hidden_matrix

MOMENTUM, EPS, COEFFICIENTS = 0.95, 1e-7, (3.4445, -4.7750, 2.0315)  # as in torch.optim.Muon
UPDATE_RMS = 0.2  # of AdamW's updates


class Matrix(NamedTuple):
    """A hidden parameter: a matrix, or one matrix of each of this rank's experts. The lists have an item per axis."""

    parameter: Tensor
    owner: tuple[int, ...]  # rank of the owner on the axis
    dims: list[int]  # the dim that the axis cuts, -2 or -1
    shapes: list[tuple[int, ...]]  # before the axis cuts it; the last axis cuts the whole matrix


class Muon(AdamW):
    """Construct it with named parameters, (FQN, parameter). A group's `compute_dtype` is for Newton-Schulz."""

    def __init__(self, groups: list[dict], **options):
        super().__init__(groups, **options)
        self.rounds = [plan_rounds(group["param_names"], group["params"]) for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        hidden = []
        for group, rounds in zip(self.param_groups, self.rounds, strict=True):
            for axes, matrices in rounds:
                self.update(matrices, axes, group)
                hidden += [(matrix.parameter, matrix.parameter.grad) for matrix in matrices]
        for parameter, _ in hidden:
            parameter.grad = None  # AdamW skips parameters without a gradient
        super().step()
        for parameter, gradient in hidden:
            parameter.grad = gradient

    def update(self, matrices: list[Matrix], axes: list[DeviceMesh], group: dict) -> None:
        """Update the matrices of a round. Collective over the axes."""
        parameters = [matrix.parameter for matrix in matrices]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        weights = [local_tensor(parameter) for parameter in parameters]
        gradients = [local_tensor(parameter.grad) for parameter in parameters]
        momenta = [local_tensor(self.state[parameter]["momentum_buffer"]) for parameter in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        slices = [each.to(group["compute_dtype"]) for each in torch._foreach_lerp(gradients, momenta, MOMENTUM)]
        orthogonalize(slices, matrices, axes, slices[0].new_empty(0))
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        for parameter, weight, update in zip(parameters, weights, slices, strict=True):
            weight.add_(update, alpha=-group["lr"] * UPDATE_RMS * sqrt(max(parameter.shape[-2:])))


def plan_rounds(names: list[str], parameters: list[Tensor]) -> list[tuple[list[DeviceMesh], list[Matrix]]]:
    """Return the rounds of a step: the axes, which are the mesh dims that cut matrices, and a matrix for each owner."""
    by_cuts: dict[tuple[int, ...], list[Tensor]] = {}
    for name, parameter in zip(names, parameters, strict=True):
        if is_hidden_matrix(name, parameter.dim()):
            by_cuts.setdefault(find_cuts(parameter), []).append(parameter)
    rounds = []
    for cuts, hidden in by_cuts.items():
        axes = [hidden[0].device_mesh[hidden[0].device_mesh.mesh_dim_names[at]] for at in cuts]
        owners = list(product(*(range(axis.size()) for axis in axes)))
        shapes = [(*local_tensor(each).shape[:-2], *each.shape[-2:]) for each in hidden]
        for indices in deal_matrices(shapes, len(owners)):
            dealt = zip(indices, owners, strict=False)  # the last round may have fewer matrices than ranks
            rounds.append((axes, [describe(hidden[at], owner, cuts, axes, [*shapes[at]]) for at, owner in dealt]))
    return rounds


def find_cuts(parameter: Tensor) -> tuple[int, ...]:
    """Return the mesh dims that cut a matrix. A mesh dim that shards the experts leaves each matrix whole."""
    if not isinstance(parameter, DTensor):
        return ()
    placed = enumerate(zip(parameter.device_mesh.shape, parameter.placements, strict=True))
    return tuple(at for at, (n, p) in placed if n > 1 and not p.is_replicate() and p.dim >= parameter.dim() - 2)


def describe(parameter: Tensor, owner: tuple, cuts: tuple[int, ...], axes: list[DeviceMesh], shape: list) -> Matrix:
    """Return the matrix with its shapes, from whole to slice: tp, the last axis, cuts first."""
    dims, shapes = [parameter.placements[at].dim - parameter.dim() for at in cuts], []
    for dim, axis in reversed([*zip(dims, axes, strict=True)]):
        shapes.insert(0, tuple(shape))
        shape[dim] = list_sizes(shape[dim], axis.size())[axis.get_local_rank()]
    return Matrix(parameter, owner, dims, shapes)


def list_sizes(length: int, n: int) -> list[int]:
    """Return the sizes of n slices as torch.chunk makes them: the last ones can be smaller, or empty."""
    size = -(-length // n)
    return [max(0, min(size, length - rank * size)) for rank in range(n)]


def orthogonalize(slices: list, matrices: list[Matrix], axes: list[DeviceMesh], empty: Tensor, at: int = 0) -> None:
    """Orthogonalize matrices of which this rank has `slices`, in place. Collective.

    Axis `at` joins slices on the ranks of their owners, and cuts the results again. The next axes are in between; after
    the last one, slices are whole matrices. `empty` has the dtype and the device of all slices.
    """
    if at == len(axes):
        for whole in slices:
            whole.copy_(newton_schulz(whole))
        return
    ranks, group = range(axes[at].size()), axes[at].get_group()
    own = [matrix for matrix in matrices if matrix.owner[at] == axes[at].get_local_rank()]
    joined = [empty.new_empty(matrix.shapes[at]) for matrix in own]
    sizes = [list_sizes(matrix.shapes[at][matrix.dims[at]], len(ranks)) for matrix in own]
    views = [whole.split(each, matrix.dims[at]) for whole, each, matrix in zip(joined, sizes, own, strict=True)]
    by_rank = [[each[rank] for each in views] for rank in ranks]
    by_owner = [[s for s, matrix in zip(slices, matrices, strict=True) if matrix.owner[at] == rank] for rank in ranks]
    exchange(by_owner, by_rank, group, empty)
    orthogonalize(joined, own, axes, empty, at + 1)
    exchange(by_rank, by_owner, group, empty)


def exchange(sent: list[list[Tensor]], received: list[list[Tensor]], group: dist.ProcessGroup, empty: Tensor) -> None:
    """Send the tensors sent[i] to rank i, and fill received[i] with the tensors of rank i. One all-to-all."""
    n_received, n_sent = ([sum(map(Tensor.numel, row)) for row in side] for side in (received, sent))
    arrived = empty.new_empty(sum(n_received))
    flat = torch.cat([empty, *(tensor.flatten() for row in sent for tensor in row)])
    dist.all_to_all_single(arrived, flat, n_received, n_sent, group=group)
    targets = [tensor for row in received for tensor in row]
    for target, piece in zip(targets, arrived.split([*map(Tensor.numel, targets)]), strict=True):
        target.copy_(piece.view_as(target))


def newton_schulz(matrix: Tensor) -> Tensor:
    """Return (..., rows, columns) with all singular values moved close to 1 (0.7 to 1.2)."""
    x = matrix.reshape(-1, *matrix.shape[-2:])
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    a, b, c = COEFFICIENTS
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).reshape(matrix.shape)
