"""Muon: orthogonalize the momentum of every hidden matrix; AdamW for all other parameters (drawn for fsdp 2 x tp 2).

Hidden matrices are the weights of attention and feed-forward, and of each expert. Newton-Schulz needs a whole matrix.
So a step has rounds: in each, a rank of fsdp x tp owns a matrix, all of about the same size. Rank (1, 0) owns this wo:

    rank (fsdp, tp)                 (0, 0)        (0, 1)        (1, 0)        (1, 1)
    momentum and Nesterov, fp32     its slice     its slice     its slice     its slice
    all-to-all over fsdp            sends slice   sends slice   left half     right half     in compute dtype
    all-to-all over tp                                          whole         sends half
    Newton-Schulz                                               whole
    two all-to-alls back            its slice     its slice     its slice     its slice
    decay and update, fp32          its slice     its slice     its slice     its slice

cp ranks are part of fsdp. Each HSDP replica and pipeline stage has rounds of its own. The E/ep experts of a rank are a
batch, dealt over efsdp. If FSDP shards by expert, each rank has whole matrices, and no communication is needed.

    state      4 bytes per parameter of a hidden matrix (momentum), 8 per other parameter (two moments of AdamW)
    traffic    2P(n-1)/n per rank over fsdp (n ranks) and 2P(t-1)/t over tp (t ranks), without overlap. P: bytes of its
               slices in compute dtype, 1.6 GiB for 8B on 8 ranks
    work       5 x (4m^2n + 2m^3) FLOPs per m x n matrix, m <= n, on its owner. 8B: the FLOPs of 12,000 tokens

Newton-Schulz computes in training.mixed_precision_param. bfloat16 matches torch.optim.Muon; float32 makes updates equal
on all layouts, which bfloat16 rounds differently. Updates have the RMS of AdamW's ("match_rms_adamw"), so its learning
rate and weight decay carry over. beta1, beta2 and eps are for AdamW.
Sources: Muon, kellerjordan.github.io/posts/muon; scaling: Moonlight arXiv:2502.16982.
"""

from itertools import product
from math import sqrt
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW

from torchtitan_lite.components.adamw_bfloat16 import local_tensor
from torchtitan_lite.config.block import NEWTON_SCHULZ_STEPS, deal_matrices

MOMENTUM, EPS, UPDATE_RMS = 0.95, 1e-7, 0.2  # as in torch.optim.Muon
A, B, C = 3.4445, -4.7750, 2.0315  # coefficients of Newton-Schulz


class Matrix(NamedTuple):
    """A hidden parameter: a matrix, or a batch of this rank's experts. An axis is a mesh dim that cuts matrices."""

    parameter: Tensor
    owner: tuple[int, ...]  # rank on each axis
    dims: list[int]  # the dim that each axis cuts: -2 or -1
    shapes: list[list[int]]  # before each axis cuts


class Muon(AdamW):
    """Construct it with named parameters, (FQN, parameter). A group's `compute_dtype` is for Newton-Schulz."""

    def __init__(self, groups: list[dict], **options):
        super().__init__(groups, **options)
        self.rounds = [plan_rounds(group["param_names"], group["params"]) for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group, rounds in zip(self.param_groups, self.rounds, strict=True):
            for axes, matrices in rounds:
                self.update(matrices, axes, group)
        hidden = [(m.parameter, m.parameter.grad) for rounds in self.rounds for _, matrices in rounds for m in matrices]
        for parameter, _ in hidden:
            parameter.grad = None  # so AdamW skips it
        super().step()
        for parameter, gradient in hidden:
            parameter.grad = gradient

    def update(self, matrices: list[Matrix], axes: list[DeviceMesh], group: dict) -> None:
        """Update the matrices of a round. Collective over the axes."""
        parameters = [matrix.parameter for matrix in matrices]
        for parameter in parameters:
            self.state[parameter] = self.state[parameter] or {"momentum_buffer": torch.zeros_like(parameter)}
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
    """Return the rounds of a step for parameters on one mesh: the axes, and a matrix for each owner."""
    by_axes: dict[tuple[int, ...], list[Tensor]] = {}
    for name, parameter in zip(names, parameters, strict=True):
        if name.startswith("layers.") and parameter.dim() > 1 and "router" not in name:
            placed = enumerate(getattr(parameter, "placements", ()))  # a mesh dim may leave each expert's matrix whole
            cuts = [at for at, each in placed if not each.is_replicate() and each.dim >= parameter.dim() - 2]
            by_axes.setdefault(tuple(at for at in cuts if parameter.device_mesh.size(at) > 1), []).append(parameter)
    rounds = []
    for mesh_dims, hidden in by_axes.items():
        axes = [hidden[0].device_mesh[hidden[0].device_mesh.mesh_dim_names[at]] for at in mesh_dims]
        owners = list(product(*(range(axis.size()) for axis in axes)))
        shapes = [(*local_tensor(each).shape[:-2], *each.shape[-2:]) for each in hidden]
        for indices in deal_matrices(shapes, len(owners)):
            dealt = zip(indices, owners, strict=False)  # the last round may have fewer matrices than ranks
            rounds.append((axes, [describe(hidden[at], shapes[at], owner, mesh_dims, axes) for at, owner in dealt]))
    return rounds


def describe(parameter: Tensor, whole: tuple, owner: tuple, mesh_dims: tuple, axes: list[DeviceMesh]) -> Matrix:
    """Return a matrix of the shape `whole`, with its shapes on this rank. The last axis, tp, cuts first."""
    dims, shapes = [parameter.placements[at].dim - parameter.dim() for at in mesh_dims], [[*whole]]
    for dim, axis in reversed([*zip(dims, axes, strict=True)]):
        length, shape = shapes[0][dim], [*shapes[0]]
        size = -(-length // axis.size())  # as torch.chunk: the last slices can be smaller, or empty
        shape[dim] = max(0, min(size, length - axis.get_local_rank() * size))
        shapes.insert(0, shape)
    return Matrix(parameter, owner, dims, shapes[1:])


def orthogonalize(slices: list, matrices: list[Matrix], axes: list[DeviceMesh], empty: Tensor, at: int = 0) -> None:
    """Replace this rank's slices of matrices by its slices of the orthogonalized matrices. Collective.

    Axis `at` joins slices on the owners' ranks for the next axis, and cuts its results again. `empty` has the dtype and
    the device of all slices.
    """
    if at == len(axes):
        for whole in slices:
            whole.copy_(newton_schulz(whole))
        return
    ranks, group = range(axes[at].size()), axes[at].get_group()
    own = [matrix for matrix in matrices if matrix.owner[at] == axes[at].get_local_rank()]
    joined = [empty.new_empty(matrix.shapes[at]) for matrix in own]
    cut = [whole.chunk(len(ranks), matrix.dims[at]) for whole, matrix in zip(joined, own, strict=True)]
    by_rank = [[chunks[rank] for chunks in cut if rank < len(chunks)] for rank in ranks]
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
    """Return (..., rows, columns) with all singular values moved to about 1. The smallest grow 3.4445^5 = 485 times."""
    if matrix.shape[-2] > matrix.shape[-1]:
        return newton_schulz(matrix.mT).mT
    x = matrix.reshape(-1, *matrix.shape[-2:])
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.reshape(matrix.shape)
