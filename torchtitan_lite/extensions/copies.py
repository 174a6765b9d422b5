"""Find silent data corruption: every debug.compare_copies_every steps, compare tensors that have copies on several
ranks.

    tensor in a checkpoint                          where it has copies
    DTensors: weights, moments                      on the ranks of dp_replicate; norm weights, moments also on tp
    other tensors: expert biases, step counters     on every rank of a pipeline stage
    tied embedding in a pipeline                    on the first and last stage; sent again before the comparison

    each rank    computes a checksum per shard: the sum of its bytes
    rank 0       gathers all checksums, about 100 bytes per shard, and compares shards with the same name and offsets
    all ranks    receive the result

All copies of a shard must be bitwise identical. A single flipped bit always changes the sum of the bytes. If only two
ranks have a copy, either copy could be wrong, so both ranks are suspects. The report names the shard with the fewest
suspects.
"""

from collections import Counter, defaultdict

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lite.build import Run
from torchtitan_lite.checkpoint.save import do_on_rank_0
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.dtensor import find_shard
from torchtitan_lite.extensions.tied_embeddings import TiedSchedule

EMBEDDING = "model.tok_embeddings.weight"
Checksums = dict[tuple[str, tuple[int, ...]], int]  # name and offsets of a shard -> its checksum


def compare_copies(run: Run, group: dist.ProcessGroup) -> None:
    """Raise UserError on every rank if copies differ. `group` contains all ranks. Collective."""
    tensors = run.name_tensors()
    if isinstance(run.schedule, TiedSchedule):
        run.schedule.send_weights()  # broadcasts this rank's shard of the matrix
        tensors[EMBEDDING] = run.schedule.pick()
    sums: Checksums = {}
    for name, tensor in tensors.items():
        shard, offsets = find_shard(tensor)
        if shard.numel():
            sums[name, tuple(offsets)] = compute_checksum(shard).item()
    of_ranks = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(sums, of_ranks, group=group, group_dst=0)
    damage = do_on_rank_0(group, lambda: find_odd_copy(of_ranks))
    if damage:
        raise UserError(damage)


def compute_checksum(shard: Tensor) -> Tensor:
    """Return the sum of the bytes of a tensor, () int64 on its device."""
    values = shard.detach().contiguous().flatten()
    return values.view(torch.uint8).sum(dtype=torch.int64)


def find_odd_copy(of_ranks: list[Checksums]) -> str | None:
    """Compare the checksums of all ranks. Return one sentence about copies that differ, or None if all are equal."""
    copies = defaultdict(dict)
    for rank, sums in enumerate(of_ranks):
        for shard, checksum in sums.items():
            copies[shard][rank] = checksum
    found = []
    for (name, _), of_shard in copies.items():
        usual, n_usual = Counter(of_shard.values()).most_common(1)[0]
        odd = [rank for rank, checksum in of_shard.items() if checksum != usual]
        if 2 * n_usual <= len(of_shard):
            odd = list(of_shard)
        if odd:
            found.append((len(odd), odd, name))
    if not found:
        return None
    _, odd, name = min(found)
    who = f"rank {odd[0]} has a different"
    if len(odd) > 1:
        who = f"there is no majority to decide which of the ranks {odd} has a wrong"
    remedy = "Copies must be bitwise identical: test the device with `pulse`, and resume from an undamaged step"
    return f"silent data corruption: {who} copy of {name}. {remedy}"
