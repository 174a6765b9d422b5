"""What the head and its loss take at their peak, forward and backward, beside weight and hidden states.

Counted and not measured: the loss runs on fake tensors, which have shapes and no storage, under torch's tracker of live
tensors. So it takes no time, and any size fits; an allocator needs a little more.
"""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker  # torch has no public one yet

from torchtitan_lite.model.chunked_loss import ChunkedLoss
from torchtitan_lite.model.head import Head

GIB = 2**30


def count_head_peak_bytes(
    *, n_tokens: int, dim: int, vocab_size: int, chunk_tokens: int, dtype: torch.dtype = torch.float32
) -> int:
    """Bytes at the peak of one forward and backward. chunk_tokens 0: the plain loss."""
    with FakeTensorMode():
        head = Head(dim, vocab_size)
        head.weight = nn.Parameter(torch.empty(vocab_size, dim, dtype=dtype))
        head.chunked_loss = ChunkedLoss(chunk_tokens) if chunk_tokens else None
        hidden = torch.empty(1, n_tokens, dim, dtype=dtype, requires_grad=True)
        targets = torch.zeros(1, n_tokens, dtype=torch.int64)
        with MemTracker() as tracker:
            tracker.track_external(head, hidden, targets)
            head(hidden, targets).backward()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    given = (head.weight, hidden, targets)
    return peak["Total"] - sum(tensor.numel() * tensor.element_size() for tensor in given)


def compare_head_memory(chunk_tokens: int) -> dict[str, list[float]]:
    """Figures of `bench step`: GiB of the plain and of the chunked loss, at 2,048 tokens of Llama 3's vocabulary."""
    sizes = {"n_tokens": 2048, "dim": 256, "vocab_size": 128256}
    plain, chunked = (count_head_peak_bytes(**sizes, chunk_tokens=tokens) for tokens in (0, chunk_tokens))
    return {
        "head_gib_plain_loss": [plain / GIB],
        "head_gib_chunked_loss": [chunked / GIB],
        "head_chunked_over_plain": [chunked / plain],
    }
