"""Let FSDP all-gather from symmetric memory (parallelism.fsdp_symmetric_memory). This has never run on a GPU.

    all-gather    normally            every rank copies its shard to a buffer, and NCCL's kernels move it
                  symmetric memory    NCCL allocates the buffer at the same address on all ranks, so that fewer SMs, or
                                      only the copy engines (NCCL_CTA_POLICY=2), move it

FSDP's calls and the number of bytes do not change. Source: torch's FSDPModule.set_symm_mem_for_comm.
"""

from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchtitan_lite.config.messages import UserError
from torchtitan_lite.parallel.fsdp import list_fsdp_modules


def share_buffers(parts: list[nn.Module]) -> None:
    """Let FSDP allocate its buffers in symmetric memory. Raises UserError if torch is too old."""
    if not hasattr(FSDPModule, "set_symm_mem_for_comm"):
        why = "this torch has no FSDPModule.set_symm_mem_for_comm, which parallelism.fsdp_symmetric_memory needs"
        raise UserError(f"{why}: install torch 2.12 or newer, or set the key to false")
    for part in parts:
        for module in list_fsdp_modules(part):
            module.set_symm_mem_for_comm()
