"""Update every hidden matrix with Muon, and all other parameters with AdamW (drawn for fsdp 2 x tp 2).

Muon orthogonalizes the momentum of a matrix. Hidden matrices are the weights of attention, feed-forward and each
expert. Newton-Schulz needs a full matrix. Therefore a step is divided into rounds: in each round, every rank of fsdp x
tp owns one matrix, and all matrices have about the same size. The picture shows the weight wo of a layer, which rank
(1, 0) owns:

    rank (fsdp, tp)                 (0, 0)        (0, 1)        (1, 0)        (1, 1)
    momentum and Nesterov, fp32     its slice     its slice     its slice     its slice
    all-to-all over fsdp            sends slice   sends slice   left half     right half     in compute dtype
    all-to-all over tp                                          full matrix   sends half
    Newton-Schulz                                               full matrix
    two all-to-alls back            its slice     its slice     its slice     its slice
    decay and update, fp32          its slice     its slice     its slice     its slice

The dim fsdp includes cp. Each HSDP replica and pipeline stage has its own rounds. The E/ep experts of a rank are a
batch of matrices, distributed over efsdp. If FSDP shards by expert, each rank has full matrices and does not
communicate.

    state      4 bytes per parameter of a hidden matrix (momentum), 8 per other parameter (two moments of AdamW)
    traffic    2P(n-1)/n per rank over fsdp (n ranks) and 2P(t-1)/t over tp (t ranks), without overlap. P is the
               size of a rank's slices in the compute dtype: 1.6 GiB for 8B on 8 ranks
    work       5 x (4m^2n + 2m^3) FLOPs per m x n matrix, m <= n, on its owner. For 8B, a step needs as many FLOPs as
               training on 12,000 tokens

Newton-Schulz computes in training.mixed_precision_param. In bfloat16, the result matches torch.optim.Muon, but results
on two layouts differ by rounding. In float32, updates are equal on all layouts. Updates have the same RMS as AdamW's
updates ("match_rms_adamw"), so AdamW's learning rate and weight decay are suitable for Muon too. beta1, beta2 and eps
are used only for the parameters that AdamW updates.

Sources: Muon, kellerjordan.github.io/posts/muon; scaling: Moonlight arXiv:2502.16982.
"""

from itertools import chain, product
from math import sqrt
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.optim import AdamW

from torchtitan_lite.dtensor import local_shard
from torchtitan_lite.extensions.muon_rounds import NEWTON_SCHULZ_STEPS, deal_matrices

# the same value as in torch.optim.Muon
MOMENTUM = 0.95
EPS = 1e-7
UPDATE_RMS = 0.2
A = 3.4445  # coefficients of Newton-Schulz
B = -4.7750
C = 2.0315


class HiddenMatrix(NamedTuple):
    """A parameter of a hidden layer: a matrix, or the stacked matrices of this rank's experts. An axis is a mesh dim
    that shards matrices."""

    parameter: Tensor
    owner: tuple  # coordinate of the owner on each axis
    dims: list[int]  # for each axis, the dim that it shards: -2 or -1
    shapes: list[list[int]]  # for each axis, the shape of the matrix before this axis shards it


class Muon(AdamW):
    """Muon and AdamW. The constructor takes (FQN, parameter) pairs. Newton-Schulz runs in the `compute_dtype` of the
    parameter group."""

    def __init__(self, groups: list[dict], **options):
        super().__init__(groups, **options)
        self.rounds = tuple(
            plan_rounds(group["param_names"], group["params"]) for group in self.param_groups
        )

    @torch.no_grad()
    def step(self, closure=None):
        gradients = {}
        for group, rounds in zip(self.param_groups, self.rounds, strict=True):
            for axes, matrices in rounds:
                self.update(matrices, axes, group)
                for matrix in matrices:
                    parameter = matrix.parameter
                    gradients[parameter] = parameter.grad
                    parameter.grad = None  # without a gradient, AdamW skips this parameter
        super().step()
        for parameter, gradient in gradients.items():
            parameter.grad = gradient

    def update(self, matrices: list[HiddenMatrix], axes: list[DeviceMesh], group: dict) -> None:
        """Update the matrices of a round. Collective over the axes."""
        weights = []
        gradients = []
        momenta = []
        for matrix in matrices:
            parameter = matrix.parameter
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            weights.append(local_shard(parameter))
            gradients.append(local_shard(parameter.grad))
            momenta.append(local_shard(state["momentum_buffer"]))
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        nesterov = torch._foreach_lerp(gradients, momenta, MOMENTUM)
        updates = [each.to(group["compute_dtype"]) for each in nesterov]
        orthogonalize(updates, matrices, axes, updates[0].new_empty(0))
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        for matrix, weight, update in zip(matrices, weights, updates, strict=True):
            longer_side = max(matrix.parameter.shape[-2:])
            weight.add_(update, alpha=-group["lr"] * UPDATE_RMS * sqrt(longer_side))


def plan_rounds(names: list[str], parameters: list[Tensor]) -> list[tuple[list, list]]:
    """Return the rounds of a step for parameters on one mesh. A round is a list of axes and one matrix per owner."""
    by_axes = {}
    for name, parameter in zip(names, parameters, strict=True):
        is_hidden = name.startswith("layers.") and parameter.dim() > 1 and "router" not in name
        if is_hidden and parameter.requires_grad:
            mesh_dims = find_axes(parameter)
            by_axes.setdefault(mesh_dims, []).append(parameter)
    rounds = []
    for mesh_dims, hidden in by_axes.items():
        mesh = getattr(hidden[0], "device_mesh", None)
        axes = [mesh[mesh.mesh_dim_names[mesh_dim]] for mesh_dim in mesh_dims]
        owners = list(product(*(range(axis.size()) for axis in axes)))
        shapes = []
        for parameter in hidden:
            batch_shape = local_shard(parameter).shape[:-2]  # this rank's experts
            shapes.append((*batch_shape, *parameter.shape[-2:]))
        for indices in deal_matrices(shapes, len(owners)):
            matrices = []
            # The last round may have fewer matrices than ranks.
            for index, owner in zip(indices, owners, strict=False):
                matrix = place_matrix(hidden[index], shapes[index], owner, mesh_dims, axes)
                matrices.append(matrix)
            rounds.append((axes, matrices))
    return rounds


def find_axes(parameter: Tensor) -> tuple[int, ...]:
    """Return the mesh dims that shard matrices. A mesh dim that shards only the number of experts is left out."""
    axes = []
    for mesh_dim, placement in enumerate(getattr(parameter, "placements", ())):
        shards = not placement.is_replicate() and placement.dim >= parameter.dim() - 2
        if shards and parameter.device_mesh.size(mesh_dim) > 1:
            axes.append(mesh_dim)
    return tuple(axes)


def place_matrix(
    parameter: Tensor, shape: tuple, owner: tuple, mesh_dims: tuple, axes: list[DeviceMesh]
) -> HiddenMatrix:
    """Describe a matrix of the full `shape`, and its slices on this rank.

    The last axis is tp, which splits the matrix before the other axes do. `mesh_dims` are the mesh dims that belong to
    `axes`.
    """
    dims = [parameter.placements[mesh_dim].dim - parameter.dim() for mesh_dim in mesh_dims]
    shapes = []
    for dim, axis in zip(reversed(dims), reversed(axes), strict=True):
        shapes.insert(0, shape)
        rank = axis.get_local_rank()
        size, _ = Shard.local_shard_size_and_offset(shape[dim], axis.size(), rank)
        shape = [*shape]
        shape[dim] = size
    return HiddenMatrix(parameter, owner, dims, shapes)


def orthogonalize(
    slices: list[Tensor],
    matrices: list[HiddenMatrix],
    axes: list[DeviceMesh],
    empty: Tensor,
    at: int = 0,
) -> None:
    """Orthogonalize matrices of which each rank has a slice, and overwrite the slices with the results. Collective.

    Each call joins slices over axis `at` on the ranks of the owners, calls itself for the next axis, and sends the
    slices of the results back. `empty` is a tensor with the dtype and the device of the slices.
    """
    if at == len(axes):
        for matrix in slices:
            matrix.copy_(newton_schulz(matrix))
        return
    axis = axes[at]
    own = []
    joined = []
    # this rank's slices, grouped by the owner of the matrix
    by_owner = [[] for _ in range(axis.size())]
    by_rank = [[] for _ in range(axis.size())]  # slices of this rank's own matrices
    for local_slice, matrix in zip(slices, matrices, strict=True):
        owner = matrix.owner[at]
        by_owner[owner].append(local_slice)
        if owner == axis.get_local_rank():
            whole = empty.new_empty(matrix.shapes[at])
            own.append(matrix)
            joined.append(whole)
            chunks = whole.chunk(axis.size(), matrix.dims[at])
            for rank, chunk in enumerate(chunks):
                by_rank[rank].append(chunk)
    exchange_slices(by_owner, by_rank, axis.get_group(), empty)
    orthogonalize(joined, own, axes, empty, at + 1)
    exchange_slices(by_rank, by_owner, axis.get_group(), empty)


def exchange_slices(
    sent: list[list], received: list[list], group: dist.ProcessGroup, empty: Tensor
) -> None:
    """Send the tensors sent[i] to rank i, and fill received[i] with the tensors from rank i, in one all-to-all."""
    n_sent = count_elements(sent)
    n_received = count_elements(received)
    arrived = empty.new_empty(sum(n_received))
    leaving = torch.cat([empty, *map(Tensor.flatten, chain(*sent))])
    dist.all_to_all_single(arrived, leaving, n_received, n_sent, group=group)
    targets = list(chain(*received))
    sizes = list(map(Tensor.numel, targets))
    for target, values in zip(targets, arrived.split(sizes), strict=True):
        target.copy_(values.view_as(target))


def count_elements(by_rank: list[list]) -> list[int]:
    return [sum(map(Tensor.numel, tensors)) for tensors in by_rank]


def newton_schulz(matrix: Tensor) -> Tensor:
    """Return (..., rows, columns) with all singular values close to 1. Small values grow by up to 3.4445^5 = 485."""
    rows, columns = matrix.shape[-2:]
    if rows > columns:
        return newton_schulz(matrix.mT).mT
    x = matrix.reshape(-1, rows, columns)
    norm = x.norm(dim=(1, 2), keepdim=True)
    x = x / norm.clamp(min=EPS)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
        x = torch.baddbmm(x, polynomial, x, beta=A)
    return x.reshape(matrix.shape)
