"""Document attention on CUDA: flex attention, compiled, which skips the blocks that no document reaches into.

    doc_ids 0 0 | 0 1 | 1 1        key blocks       blocks of 2 here, of 128 in truth
    query blocks      0 0          x
                      0 1          x   x
                      1 1          .   x   x        . would be looked into without doc_ids

No mask of queries x keys exists. The CUDA path was not run by the authors of this file; tests check its blocks, and on
a CPU its forward numbers and that it compiles unbroken. It is a file of its own because importing flex attention takes
longer than importing all the rest of the model: attention.py imports it where there is CUDA.

Legend: B batch, S sequence, Q and K queries and keys at hand. Source: FlexAttention arXiv:2412.05496.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128

compiled_flex_attention = torch.compile(flex_attention, dynamic=False)  # not compiled, it makes all the scores


def attend_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    doc_ids: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    sees: Callable[..., Tensor],
) -> Tensor:
    """Run compiled flex attention. Shapes as in attend_within_documents; `sees` is its mask."""
    block_mask = plan_blocks(doc_ids, query_positions, key_positions, sees)
    return compiled_flex_attention(query, key, value, block_mask=block_mask, enable_gqa=True)


def plan_blocks(
    doc_ids: Tensor, query_positions: Tensor, key_positions: Tensor, sees: Callable[..., Tensor]
) -> BlockMask:
    """Plan which blocks of queries x keys flex attention reads, from the minimum and maximum of each block.

    A block is read if some query of it could see some key. One block too many costs time only, because `sees` masks
    each pair inside a block. No tensor of size Q x K is made.
    """
    n_rows = len(doc_ids)
    first_query, last_query = bounds_of_blocks(query_positions.expand(n_rows, -1))  # (B, blocks)
    first_key, last_key = bounds_of_blocks(key_positions.expand(n_rows, -1))
    low_query, high_query = bounds_of_blocks(doc_ids[:, query_positions])
    low_key, high_key = bounds_of_blocks(doc_ids[:, key_positions])
    visible = (
        (last_query[:, :, None] >= first_key[:, None])
        & (high_query[:, :, None] >= low_key[:, None])
        & (low_query[:, :, None] <= high_key[:, None])
    )  # (B, query blocks, key blocks)
    # For each block of queries the numbers of the key blocks, those that count first, and how many count.
    order = visible.int().argsort(dim=-1, descending=True, stable=True)
    return BlockMask.from_kv_blocks(
        visible.sum(-1, dtype=torch.int32)[:, None],
        order[:, None].to(torch.int32),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(len(query_positions), len(key_positions)),
    )


def bounds_of_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return minimum and maximum of each block, (B, n) -> twice (B, blocks). The last block may be shorter."""
    n = values.shape[1]
    n_blocks = -(-n // BLOCK)
    inside = torch.arange(n_blocks * BLOCK, device=values.device).clamp(max=n - 1)
    return values[:, inside].unflatten(1, (n_blocks, BLOCK)).aminmax(dim=2)
