"""Mutants that are wrong only beyond a depth, a length, a size, a count."""

from dataclasses import replace
from unittest.mock import patch

import torch
from layouts import CHUNK, CHUNKS, TP, Row
from mutant_table import CP, DOCUMENTS, RING, SHARD, mutant
from torch.distributed.tensor import DTensor

from torchtitan_lite import step
from torchtitan_lite.components import optim
from torchtitan_lite.model import head, llama3
from torchtitan_lite.model.head import IGNORE_INDEX
from torchtitan_lite.parallel import (
    context_parallel,
    initial_weights,
    parallelize,
)

LONG = {"training.seq_len": 2048}
BEYOND_TWO_BYTES = {"model.vocab_size": 2**17}
WIDE_FFN = {"model.dim": 1024, "model.ffn_dim": 8192}


@mutant("accumulation 2", "gradient", ("microbatches", "tok_embeddings"))
def third_accumulation_step_dropped():
    """Two accumulation steps are right, and of more the third is skipped: rows that are read and never learned from."""
    original = step.Batch.split

    def without_third(batch, n):
        micros = original(batch, n)
        return micros[:2] + micros[3:]

    return patch.object(step.Batch, "split", without_third)


@mutant("one rank", "weight", ("updated weights", "layers.0.attention.wo.weight"))
def small_gradients_scaled_up():
    """Clipping lacks its limit of 1, so that gradients below max_norm are made as long as it. With AdamW nothing shows,
    for it divides by the length; with SGD the run does not settle."""
    original = step.clip_grad_norm

    def scaled(parameters, max_norm):
        parameters = list(parameters)
        norm = original(parameters, max_norm)
        if norm < max_norm:
            torch._foreach_mul_([parameter.grad for parameter in parameters], max_norm / norm)
        return norm

    return patch.object(step, "clip_grad_norm", scaled)


@mutant(Row(4, {CP: 4, **RING, SHARD: 1}), "gradient", ("module output", "layers.0.attention.inner"))
def ring_right_for_two_ranks_only():
    """Each rank takes what comes after the first round for keys of a later rank. Two ranks have one round, so the test
    of the ring passes; four ranks leave out a part of the sequence."""
    original = context_parallel.visible_of_one

    def of_two(rank, source, half):
        return original(rank, source if abs(rank - source) == 1 else rank + 1, half)

    return patch.object(context_parallel, "visible_of_one", of_two)


@mutant("pp2 1F1B", "gradient", ("module input", "layers.6"), trial="deep")
def layers_in_the_order_of_text():
    """A stage sorts its layers by name: 1, 10, 11, 2. Up to ten layers all is right, and with more the model is another
    one than the one that is generated with. The loss curve is as good as ever."""
    original = step.apply_stage

    def sorted_by_name(model, fqns):
        part = original(model, fqns)
        part.layers = torch.nn.ModuleDict(dict(sorted(part.layers.items())))
        return part

    return patch.object(step, "apply_stage", sorted_by_name)


@mutant("dp2", "initial", ("initial weights", "layers.10.attention.wq.weight"), trial="deep", cause="the rule of the")
def layer_numbers_of_one_digit():
    """The seed of a layer's weights is made of the first digit of its number, so that layers 10 to 19 are born as
    copies of layer 1. The run trains; a part of its depth is worth little at first."""
    original = initial_weights.seed_of

    def by_first_digit(seed, fqn):
        prefix, _, rest = fqn.partition("layers.")
        number, dot, name = rest.partition(".")
        return original(seed, f"{prefix}layers.{number[0]}{dot}{name}" if rest else fqn)

    return patch.object(initial_weights, "seed_of", by_first_digit)


@mutant("dp2", "gradient", ("gradient", "layers.11.feed_forward.w2.weight"), trial="deep")
def layers_beyond_the_tenth_averaged():
    """A pattern with room for one digit finds the layers whose gradients are to be summed; the others keep FSDP's mean.
    Deep layers learn from half of their gradient, which AdamW hides."""
    original = parallelize.apply_fsdp

    def one_digit(part, mesh, **options):
        original(part, mesh, **options)
        for layer, block in part.layers.items():
            if len(layer) > 1:
                block.set_gradient_divide_factor(float(mesh.size()))

    return patch.object(parallelize, "apply_fsdp", one_digit)


@mutant("one rank", "grad_norm", ("gradient norm", "clip_grad_norm"), trial="deep")
def norm_of_the_first_hundred_tensors():
    """The norm is taken of a list that was cut for a kernel with a limit. Small models have fewer tensors; large ones
    are clipped too late."""
    original = optim.sum_squares
    return patch.object(optim, "sum_squares", lambda tensors: original(tensors[:100]))


@mutant("tp2", "clipping", ("clipping", "clip_grad_norm"), trial="deep")
def first_forty_tensors_clipped():
    """Gradients are scaled in one call that takes so many tensors at most. The norm in the log is right, and the layers
    at the end are never clipped."""
    original = optim.torch._foreach_mul_
    return patch.object(optim.torch, "_foreach_mul_", lambda tensors, scale: original(tensors[:40], scale))


@mutant(Row(2, {CP: 2, **LONG}), "gradient", ("positions", "shard_for_cp"), trial="long")
def positions_of_cp_pieces_rounded():
    """Positions go through bf16 on their way to a context-parallel rank: right up to 256, then every second one, then
    every fourth. The loss is a little higher, and long texts are read as if words stood on each other."""
    original = step.shard_for_cp

    def rounded(run, batch):
        pieces = original(run, batch)
        return replace(pieces, positions=pieces.positions.bfloat16().long())

    return patch.object(step, "shard_for_cp", rounded)


@mutant(Row(1, {"model.rope_scaling": "llama3", **LONG}), "gradient", ("rotary angles", "layers.0"), trial="long")
def positions_end_at_original_length():
    """A table of rotary angles has original_length rows, and what lies behind takes the last one. Everything is right
    until the context is extended, which is what the stretched wavelengths are for."""
    original = llama3.rotary_angles
    return patch.object(llama3, "rotary_angles", lambda positions, shape: original(positions.clamp(max=8191), shape))


@mutant(Row(2, {CP: 2, **DOCUMENTS, **LONG}), "gradient", ("module output", "layers.0.attention.inner"), trial="long")
def documents_numbered_in_a_byte():
    """Document numbers are kept in eight bits to save memory, so that document 256 sees document 0. In rows with many
    short documents answers leak from one into another."""
    original = context_parallel.attend_within_documents

    def modulo(query, key, value, doc_ids, **places):
        return original(query, key, value, doc_ids % 256, **places)

    return patch.object(context_parallel, "attend_within_documents", modulo)


@mutant(Row(1, {**LONG, CHUNK: 512}), "loss", ("module output", "output"), trial="long")
def loss_of_the_first_eight_chunks():
    """Chunks of the loss are counted in three bits. Short rows have fewer; of long ones the end is never learned from,
    and since easy tokens are missing too, the loss looks right."""
    original = head.ChunkedLoss.differentiate

    def first_eight(loss, logits, targets, *, with_gradient):
        loss.n_seen = getattr(loss, "n_seen", 0) + 1
        result, gradient = original(loss, logits, targets, with_gradient=with_gradient)
        return (result, gradient) if loss.n_seen <= 8 else (result * 0, gradient * 0)

    return patch.object(head.ChunkedLoss, "differentiate", first_eight)


@mutant(Row(2, WIDE_FFN), "grad_norm", ("gradient norm", "clip_grad_norm"), trial="real width")
def norm_added_up_in_fp32():
    """torch's vector norm on a CPU adds fp32 numbers one after another: the larger a slice, the more is lost of what
    comes late. The norm depends on the layout, and with it the clipping."""

    def in_order(tensors):
        return torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors]).double().square().sum()

    return patch.object(optim, "sum_squares", in_order)


@mutant(Row(2, {TP: 2, **CHUNKS, **BEYOND_TWO_BYTES}), "loss", ("module output", "output"), trial="real width")
def vocabulary_offset_in_two_bytes():
    """The first token id of a rank's share of the vocabulary is computed in 16 bits and wraps. Each rank takes targets
    for its own that are not: small vocabularies are right."""
    original = head.ChunkedLoss.differentiate

    def wrapped(loss, logits, targets, **options):
        offset = loss.shard * logits.shape[1]
        wrong = (offset + 2**15) % 2**16 - 2**15
        counted = targets != IGNORE_INDEX
        return original(loss, logits, torch.where(counted, targets + offset - wrong, targets), **options)

    return patch.object(head.ChunkedLoss, "differentiate", wrapped)


@mutant(
    Row(2, BEYOND_TWO_BYTES),
    "initial",
    ("initial weights", "tok_embeddings.weight"),
    trial="real width",
    cause="the rule",
)
def first_two_million_numbers_copied():
    """Initial weights are copied in one call with a limit on its size. The rest of a large matrix stays as it was
    allocated: zeros, mostly."""
    original = initial_weights.copy_local_shard

    def first_numbers(parameter, full):
        original(parameter, full)
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        own.flatten()[2**21 :].zero_()

    return patch.object(initial_weights, "copy_local_shard", first_numbers)
