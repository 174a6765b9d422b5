"""The kinds of attention (model.attention), at one place of a block: the submodule `attention.inner`.

    causal      a token sees itself and all tokens before it
    document    a token sees itself and all tokens before it in its own document

    doc_ids     0 0 0 1 1 2 2 2       keys that query 4 sees: 3, 4
    positions   0 1 2 0 1 0 1 2       restart with each document (data/dataset.py)

On a CPU document attention uses an explicit mask (B, 1, queries, keys), readable and slow. On CUDA it is compiled flex
attention, which reads only the blocks of keys that a document reaches; no mask of queries x keys exists:

    doc_ids 0 0 | 0 1 | 1 1 | 1 1      key blocks        blocks of 2 here, of 128 in the code
    query blocks      0 0              m
                      0 1              m   m             m   masked: the mask decides for each pair
                      1 1              .   m   m         f   full: all pairs are visible, so there is nothing to mask
                      1 1              .   m   f   m     .   not read

The model plans the blocks once per batch, before the first block of layers.

Queries and keys may be any part of the sequence in any order: a context-parallel rank asks for its own queries. The
CUDA path was not run on a GPU; tests check its blocks, and on a CPU its forward numbers and that it compiles without a
graph break.

To add a kind, write a module here with a row in ATTENTION_MODULES, and a row in config/choices.py. That row says where
else it can be computed: under context parallel, in the cache of `generate`.

Legend: B batch, S sequence, Q and K queries and keys of one call, E head dim.
Sources: documents in a batch: Llama 3, arXiv:2407.21783; FlexAttention arXiv:2412.05496.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128  # tokens
LEAST_HEAD_DIM = 16  # of flex attention on CUDA


class CausalAttention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        """query (B, heads, S, E), key and value (B, kv heads, S, E) -> (B, heads, S, E)."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


class DocumentAttention(nn.Module):
    def plan(self, doc_ids: Tensor) -> Tensor | BlockMask:
        """Prepare doc_ids (B, S) for `forward`, once for all layers."""
        return plan_documents(doc_ids)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor | BlockMask | None = None) -> Tensor:
        """query (B, heads, S, E), key and value (B, kv heads, S, E), doc_ids (B, S) or a plan -> (B, heads, S, E)."""
        if isinstance(doc_ids, BlockMask):
            return attend_in_blocks(query, key, value, doc_ids)
        positions = torch.arange(query.shape[2], device=query.device)
        return attend_within_documents(query, key, value, doc_ids, query_positions=positions, key_positions=positions)


ATTENTION_MODULES = {  # model.attention, rows of config/choices.py
    "causal": CausalAttention,
    "document": DocumentAttention,
}


def attend_within_documents(
    query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor | None, *, query_positions: Tensor, key_positions: Tensor
) -> Tensor:
    """Attend with an explicit mask. query (B, heads, Q, E), key and value (B, kv heads, K, E) -> (B, heads, Q, E).

    doc_ids (B, S) of the whole sequence; query_positions (Q,) and key_positions (K,) index into it. Raises ValueError
    without doc_ids.
    """
    if doc_ids is None:
        raise ValueError('model.attention = "document" needs doc_ids (B, S): the model was called without')
    same = doc_ids[:, query_positions, None] == doc_ids[:, None, key_positions]
    mask = same & (query_positions[:, None] >= key_positions)  # (B, Q, K)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None], enable_gqa=True)


# ---------------------------------------------------------------- flex attention


def attend_in_blocks(query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask) -> Tensor:
    """query (B, heads, Q, E), key and value (B, kv heads, K, E) -> (B, heads, Q, E)."""
    # A compiled block compiles it too. Not compiled, it makes all the scores.
    attend = flex_attention if torch.compiler.is_compiling() else compile_flex_attention()
    head_dim = query.shape[-1]
    missing = max(0, LEAST_HEAD_DIM - head_dim)  # zeros change no score
    query, key, value = (F.pad(each, (0, missing)) if missing else each for each in (query, key, value))
    return attend(query, key, value, block_mask=blocks, enable_gqa=True, scale=head_dim**-0.5)[..., :head_dim]


@cache
def compile_flex_attention() -> Callable[..., Tensor]:
    """Return the compiled operator: at its first use, because torch.compile loads inductor (1 s and 50 MB)."""
    # The option shows the compiled region to per-op recompute, which keeps its output (activation_checkpoint.py).
    is_visible = hasattr(torch.ops.higher_order, "inductor_compiled_code")
    options = {"wrap_inductor_compiled_regions": True} if is_visible else None
    return torch.compile(flex_attention, dynamic=False, options=options)


def plan_documents(doc_ids: Tensor, *positions: Tensor) -> Tensor | BlockMask:
    """Return the blocks that flex attention reads, as `plan_blocks`; on a CPU return doc_ids (B, S)."""
    return doc_ids if doc_ids.device.type == "cpu" else plan_blocks(doc_ids, *positions)


def plan_blocks(
    doc_ids: Tensor, query_positions: Tensor | None = None, key_positions: Tensor | None = None
) -> BlockMask:
    """Plan which blocks of queries x keys flex attention reads, from the minimum and maximum of each block.

    Without positions, queries and keys are the whole sequence. A block is read if some query of it could see some key;
    a superfluous block costs time only, because the mask decides for each pair. A block is full if all its queries see
    all its keys; the last, shorter block never is. No tensor of size Q x K is made.
    """
    whole = torch.arange(doc_ids.shape[1], device=doc_ids.device)
    queries, keys = (whole if places is None else places for places in (query_positions, key_positions))
    query_docs, key_docs = (
        doc_ids if places is None else doc_ids[:, places] for places in (query_positions, key_positions)
    )

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        rises = query >= key if query_positions is None else query_positions[query] >= key_positions[key]
        return rises & (query_docs[row, query] == key_docs[row, key])

    first_query, last_query, low_query, high_query = (
        bound[:, :, None]
        for values in (queries.expand_as(query_docs), query_docs)
        for bound in bounds_of_blocks(values)
    )  # (B, query blocks, 1)
    first_key, last_key, low_key, high_key = (
        bound[:, None] for values in (keys.expand_as(key_docs), key_docs) for bound in bounds_of_blocks(values)
    )  # (B, 1, key blocks)
    read = (
        (last_query >= first_key) & (high_query >= low_key) & (low_query <= high_key)
    )  # (B, query blocks, key blocks)
    full = (first_query >= last_key) & (low_query == high_key) & (high_query == low_key)
    full[:, len(queries) // BLOCK :] = False
    full[:, :, len(keys) // BLOCK :] = False
    return BlockMask.from_kv_blocks(
        *list_blocks(read & ~full),
        *list_blocks(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(len(queries), len(keys)),
    )


def list_blocks(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each block of queries how many key blocks are chosen, (B, 1, q), and all key blocks, those first."""
    order = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[:, None], order[:, None].to(torch.int32)


def bounds_of_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return minimum and maximum of each block, (B, n) -> twice (B, blocks). The last block may be shorter."""
    n = values.shape[1]
    n_blocks = -(-n // BLOCK)
    inside = torch.arange(n_blocks * BLOCK, device=values.device).clamp(max=n - 1)
    return values[:, inside].unflatten(1, (n_blocks, BLOCK)).aminmax(dim=2)
