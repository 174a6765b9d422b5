"""Keep weights in bfloat16: 8 bytes of training state per parameter, or 10 if gradients are summed in fp32.

    between steps     weight bf16 2   gradient bf16 2   moments bf16 2 + 2
    ZeRO 1 also needs a gradient in fp32, 4 bytes per parameter, while it sums the microbatches of a step

An update of 0.1 % of a weight is smaller than half of the distance between two neighboring bf16 values. Rounding to the
nearest value would undo such an update. Stochastic rounding adds a random number, which is smaller than the distance
between two neighboring values, and cuts off the lower bits. Therefore the rounding is unbiased: on average, a weight
changes by exactly its updates.

The random number is a hash of the step and of the element's index in its shard, not the state of a generator. Therefore
a resumed run rounds as if it had not stopped, and copies of a weight on several ranks stay bitwise identical.

There is no communication. This code has never run on a GPU. Source: arXiv:2010.06192 (rounding of weights in bfloat16).
"""

import torch
from torch import Tensor


def round_stochastically(x: Tensor, step: Tensor, salt: int) -> Tensor:
    """Round x (n,) fp32 up or down to bfloat16, so that the expected value of the result is x.

    The random numbers depend on `step` () fp32 and on `salt`, which is a distinct number for each tensor.
    """
    bits = torch.arange(x.numel(), dtype=torch.int32, device=x.device)
    bits = scramble(bits ^ scramble(step.int() * 9973 + salt))
    return ((x.view(torch.int32) + (bits & 0xFFFF)) & -0x10000).view(torch.float32).bfloat16()


def scramble(bits: Tensor) -> Tensor:
    """Hash int32 values by two rounds of multiply and shift. Neighboring values get unrelated hashes."""
    for _ in range(2):
        bits = (bits ^ (bits >> 16 & 0xFFFF)) * 0x45D9F3B
    return bits ^ (bits >> 16 & 0xFFFF)
