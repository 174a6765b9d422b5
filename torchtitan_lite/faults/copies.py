"""Find silent damage: compare tensors that must be bit-equal on several ranks. debug.compare_copies_every says when.

    tensor in a checkpoint                 copied along
    DTensor: weights, moments              mesh dims with placement Replicate: dp_replicate; tp for norms
    other: expert biases, step counters    every mesh dim except pp

    each rank           one int64 checksum per tensor: the sum of its bits, read as integers
    each such dim       all-gather of the checksums; a copy that differs from most others is the odd one
    all ranks           all-gather of the findings

A sum of integers changes with every single flipped bit. Two copies have no majority, so both ranks are suspects. The
most frequent suspect is named; if ranks tie, all are named. Bytes per rank and dim: 8 per tensor.
"""

from collections import Counter, defaultdict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from torchtitan_lite.config.messages import UserError
from torchtitan_lite.parallel.mesh import Mesh

INTEGERS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}  # by bytes of an element


def compare_copies(tensors: dict[str, Tensor], mesh: Mesh, group: dist.ProcessGroup) -> None:
    """Raise UserError on every rank if copies differ. `group` has all ranks. Collective."""
    groups = defaultdict(list)
    for name, tensor in tensors.items():
        for of_copies in list_groups(tensor, mesh.world):
            groups[of_copies].append(name)
    # On the device of the groups: torch keeps some step counters on the host.
    sums = {
        name: compute_checksum(tensor).to(mesh.world.device_type)
        for name, tensor in tensors.items()
    }
    own = [found for one, names in groups.items() for found in find_differing(one, names, sums)]
    findings: list[list] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(findings, own, group=group)
    if found := [finding for of_rank in findings for finding in of_rank]:
        counts = Counter(rank for rank, _ in found)
        odd = sorted(rank for rank, n in counts.items() if n == max(counts.values()))
        name = min(name for rank, name in found if rank in odd)
        no_majority = f"no majority tells which of the ranks {odd} has a wrong"
        who = f"rank {odd[0]} has another" if len(odd) == 1 else no_majority
        raise UserError(
            f"silent damage: {who} copy of {name}. Weights and optimizer state should be bit-equal there"
        )


def list_groups(tensor: Tensor, world: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return the process groups whose ranks hold copies of a tensor."""
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        dims = [
            dim
            for dim, placement in enumerate(tensor.placements)
            if isinstance(placement, Replicate)
        ]
    else:
        mesh = world
        dims = [dim for dim, name in enumerate(mesh.mesh_dim_names) if name != "pp"]
    return [mesh.get_group(dim) for dim in dims if mesh.size(dim) > 1]


def compute_checksum(tensor: Tensor) -> Tensor:
    """Return the sum of the bits of a tensor, of a DTensor's local shard, () int64 on its device."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().contiguous()
    return local.view(INTEGERS[local.element_size()]).sum(dtype=torch.int64)


def find_differing(
    group: dist.ProcessGroup, names: list[str], sums: dict[str, Tensor]
) -> list[tuple[int, str]]:
    """Return (rank, tensor) for each copy in `group` that differs from most copies; without a majority, all ranks."""
    own = torch.stack([sums[name] for name in names])
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    ranks, found = dist.get_process_group_ranks(group), []
    for name, copies in zip(names, torch.stack(gathered, dim=1).tolist(), strict=True):
        (usual, n), *others = Counter(copies).most_common()
        if others:
            is_clear = n > len(copies) / 2
            found += [
                (rank, name)
                for rank, copy in zip(ranks, copies, strict=True)
                if copy != usual or not is_clear
            ]
    return found
