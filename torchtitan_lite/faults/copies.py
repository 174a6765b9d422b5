"""Find silent damage: compare tensors that must be bit-equal on several ranks. debug.compare_copies_every says when.

    tensor in a checkpoint                 copied along
    DTensor: weights, moments              mesh dims with placement Replicate: dp_replicate; tp for norms
    other: expert biases, step counters    every mesh dim except pp
    tied embedding in a pipeline           first and last stage; sent again here, because the update came after it

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
from torch.distributed.tensor import DTensor

from torchtitan_lite.build import Run
from torchtitan_lite.checkpoint.save import name_tensors
from torchtitan_lite.components.adamw_bfloat16 import local_tensor
from torchtitan_lite.config.messages import UserError

# Bytes of an element -> the integer of that size
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
TIED = "model.tok_embeddings.weight"


def compare_copies(run: Run, group: dist.ProcessGroup) -> None:
    """Raise UserError on every rank if copies differ. `group` has all ranks. Collective."""
    tensors = name_tensors(run.saved, run.optimizer)
    if run.tied:
        run.tied.send_weights()  # broadcasts this rank's shard of the matrix
        tensors[TIED] = run.tied.pick()
    groups = defaultdict(list)
    for name, tensor in tensors.items():
        for of_copies in list_groups(tensor, run.mesh.world):
            groups[of_copies].append(name)
    if run.tied and run.tied.group:
        groups[run.tied.group].append(TIED)
    suspects = []
    for of_copies, names in groups.items():
        # On the device of the groups: torch keeps some step counters on the host.
        sums = [compute_checksum(tensors[name]).to(run.device) for name in names]
        suspects += find_differing(of_copies, names, torch.stack(sums))
    of_ranks: list[list] = [[] for _ in range(group.size())]
    dist.all_gather_object(of_ranks, suspects, group=group)
    found = sum(of_ranks, [])
    if not found:
        return
    counts = Counter(rank for rank, _ in found)
    most = max(counts.values())
    odd = sorted(rank for rank, n in counts.items() if n == most)
    name = min(name for rank, name in found if rank in odd)
    who = f"rank {odd[0]} has another"
    if len(odd) > 1:
        who = f"no majority tells which of the ranks {odd} has a wrong"
    equal = "Weights and optimizer state should be bit-equal there"
    raise UserError(f"silent damage: {who} copy of {name}. {equal}")


def list_groups(tensor: Tensor, world: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return the process groups whose ranks hold copies of a tensor."""
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        is_copied = [placement.is_replicate() for placement in tensor.placements]
    else:
        mesh = world
        is_copied = [name != "pp" for name in mesh.mesh_dim_names]
    groups = []
    for dim, copied in enumerate(is_copied):
        if copied and mesh.size(dim) > 1:
            groups.append(mesh.get_group(dim))
    return groups


def compute_checksum(tensor: Tensor) -> Tensor:
    """Return the sum of the bits of a tensor, of a DTensor's local shard, () int64 on its device."""
    local = local_tensor(tensor).detach().contiguous()
    return local.view(INTEGERS[local.element_size()]).sum(dtype=torch.int64)


def find_differing(
    group: dist.ProcessGroup, names: list[str], sums: Tensor
) -> list[tuple[int, str]]:
    """Return (rank, tensor) for each copy in `group` that differs from most copies; without a majority, all ranks.

    `sums`: the checksums on this rank, (names,).
    """
    gathered = [torch.empty_like(sums) for _ in range(group.size())]
    dist.all_gather(gathered, sums, group=group)
    ranks = dist.get_process_group_ranks(group)
    found = []
    for name, copies in zip(names, torch.stack(gathered, dim=1).tolist(), strict=True):
        usual, n_usual = Counter(copies).most_common(1)[0]
        is_clear = 2 * n_usual > len(copies)
        for rank, copy in zip(ranks, copies, strict=True):
            if copy != usual or not is_clear:
                found.append((rank, name))
    return found
