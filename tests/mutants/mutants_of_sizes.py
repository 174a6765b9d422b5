"""Mutants that are wrong only above a certain depth, length, size or number."""

from dataclasses import replace

import torch
from mutant_table import mutant

from torchtitan_lite import build, step
from torchtitan_lite.extensions import ring_attention
from torchtitan_lite.model import document_attention


@mutant(
    "4 | CP=4 RING SHARD=1",
    "module output",
    "layers.0.attention.inner",
    at=(ring_attention, "find_visible"),
    dims=("cp",),
)
def ring_right_for_two_ranks_only(original, rank, source, half):
    """After the first round of the ring, each rank treats all keys as keys of a later rank."""
    return original(rank, source if abs(rank - source) <= 1 else rank + 1, half)


@mutant(
    "pp2 1F1B", "module output", "layers.6.attention_norm", at=(build, "apply_stage"), trial="deep"
)
def layers_in_the_order_of_text(original, model, fqns):
    """A stage sorts its layers by name, so layer 10 comes before layer 2."""
    part = original(model, fqns)
    part.layers = torch.nn.ModuleDict(dict(sorted(part.layers.items())))
    return part


@mutant(
    "2 | CP=2 training.seq_len=65536",
    "rotary angles",
    "layers.0",
    at=(step, "shard_for_cp"),
    trial="deep",
)
def positions_wrap_at_32768(original, run, batch):
    """Positions are sent to a context-parallel rank in 15 bits."""
    pieces = original(run, batch)
    return replace(pieces, positions=pieces.positions % 32_768)


@mutant("dp2", "counted tokens", "count_global_tokens", at=(step, "shard_for_cp"))
def odd_rows_lose_a_token(original, run, batch):
    """Sequences of odd length lose a token, because they are cut to an even length although cp is 1."""
    n_kept = batch.tokens.shape[1] // 2 * 2
    return batch.map(lambda field: field[:, :n_kept])


@mutant(
    "2 | CP=2 DOCUMENTS training.seq_len=2048",
    "module output",
    "layers.0.attention.inner",
    at=(document_attention, "plan_mask"),
    dims=("cp",),
    trial="deep",
)
def documents_numbered_in_a_byte(original, doc_ids, *positions):
    """Document numbers have eight bits to save memory, so document 256 attends to document 0."""
    return original(doc_ids % 256, *positions)
