"""Mutants that are wrong only beyond a depth, a length, a size, a count."""

from dataclasses import replace

import torch
from layouts import CHUNK, CHUNKS, CP, DOCUMENTS, RING, TP, Row
from mutant_table import HEAD, INNER, NORM, SHARD, mutant
from torch.distributed.tensor import DTensor

from torchtitan_lite import build, step
from torchtitan_lite.components import optim
from torchtitan_lite.config.flavors import RopeScaling
from torchtitan_lite.model import head, llama3
from torchtitan_lite.parallel import (
    context_parallel,
    initial_weights,
    parallelize,
    ring_attention,
)

LONG = {"training.seq_len": 2048}
BEYOND_TWO_BYTES = {"model.vocab_size": 2**17}
WIDE_FFN = {"model.dim": 1024, "model.ffn_dim": 8192}


@mutant("accumulation 2", "gradient", ("microbatches", "tok_embeddings"), at=(step.Batch, "split"))
def third_accumulation_step_dropped(original, batch, n):
    """Two accumulation steps are right, and of more the third is skipped: rows that are read and never learned from."""
    micros = original(batch, n)
    return micros[:2] + micros[3:]


@mutant("one rank", "weight", ("updated weights", "layers.3.attention.wo.weight"), at=(step, "update_weights"))
def small_gradients_scaled_up(original, optimizer, grad_norm, max_norm):
    """Clipping lacks its limit of 1, so that gradients below max_norm are made as long as it. With AdamW nothing shows,
    for it divides by the length; with SGD the run does not settle."""
    if grad_norm < max_norm:
        for group in optimizer.param_groups:
            torch._foreach_mul_([parameter.grad for parameter in group["params"]], max_norm / grad_norm)
    return original(optimizer, grad_norm, max_norm)


@mutant(Row(4, {CP: 4, **RING, SHARD: 1}), "gradient", INNER, at=(ring_attention, "visible_of_one"))
def ring_right_for_two_ranks_only(original, rank, source, half):
    """Each rank takes what comes after the first round for keys of a later rank. Two ranks have one round, so the test
    of the ring passes; four ranks leave out a part of the sequence."""
    return original(rank, source if abs(rank - source) == 1 else rank + 1, half)


@mutant("pp2 1F1B", "gradient", ("module input", "layers.6"), trial="deep", at=(build, "apply_stage"))
def layers_in_the_order_of_text(original, model, fqns):
    """A stage sorts its layers by name: 1, 10, 11, 2. Up to ten layers all is right, and with more the model is another
    one than the one that is generated with. The loss curve is as good as ever."""
    part = original(model, fqns)
    part.layers = torch.nn.ModuleDict(dict(sorted(part.layers.items())))
    return part


@mutant(
    "dp2",
    "initial",
    ("initial weights", "layers.10.attention.wq.weight"),
    trial="deep",
    cause="the rule of the",
    at=(initial_weights, "seed_of"),
)
def layer_numbers_of_one_digit(original, seed, fqn):
    """The seed of a layer's weights is made of the first digit of its number, so that layers 10 to 19 are born as
    copies of layer 1. The run trains; a part of its depth is worth little at first."""
    prefix, _, rest = fqn.partition("layers.")
    number, dot, name = rest.partition(".")
    return original(seed, f"{prefix}layers.{number[0]}{dot}{name}" if rest else fqn)


@mutant(
    "dp2", "gradient", ("gradient", "layers.11.feed_forward.w2.weight"), trial="deep", at=(parallelize, "apply_fsdp")
)
def layers_beyond_the_tenth_averaged(original, part, mesh, **options):
    """A pattern with room for one digit finds the layers whose gradients are to be summed; the others keep FSDP's mean.
    Deep layers learn from half of their gradient, which AdamW hides."""
    original(part, mesh, **options)
    for layer, block in part.layers.items():
        if len(layer) > 1:
            block.set_gradient_divide_factor(float(mesh.size()))


@mutant("one rank", "grad_norm", NORM, trial="deep", at=(optim, "sum_squares"))
def norm_of_the_first_hundred_tensors(original, tensors):
    """The norm is taken of a list that was cut for a kernel with a limit. Small models have fewer tensors; large ones
    are clipped too late."""
    return original(tensors[:100])


@mutant("tp2", "clipping", ("clipping", "update_weights"), trial="deep", at=(optim.torch, "_foreach_div_"))
def first_forty_tensors_clipped(original, tensors, scale):
    """Gradients are scaled in one call that takes so many tensors at most. The norm in the log is right, and the layers
    at the end are never clipped."""
    return original(tensors[:40], scale)


@mutant(
    "dp2", "parameters", ("parameters", "layers.11.attention_norm.weight"), trial="deep", at=(build, "build_optimizer")
)
def first_hundred_tensors_updated(original, section, parameters):
    """The optimizer's kernel takes so many tensors, and gets the first ones. In deep models the last layers, the norm
    and the head stay as they were drawn. The loss falls, to a worse end."""
    return original(section, list(parameters)[:100])


@mutant(Row(2, {CP: 2, **LONG}), "gradient", ("positions", "shard_for_cp"), trial="long", at=(step, "shard_for_cp"))
def positions_of_cp_pieces_rounded(original, run, batch):
    """Positions go through bf16 on their way to a context-parallel rank: right up to 256, then every second one, then
    every fourth. The loss is a little higher, and long texts are read as if words stood on each other."""
    pieces = original(run, batch)
    return replace(pieces, positions=pieces.positions.bfloat16().long())


@mutant(
    Row(1, {"flavor.rope_scaling": RopeScaling(factor=8.0), **LONG}),
    "gradient",
    ("rotary angles", "layers.0"),
    trial="long",
    at=(llama3, "rotary_angles"),
)
def positions_end_at_original_length(original, positions, shape):
    """A table of rotary angles has original_length rows, and what lies behind takes the last one. Everything is right
    until the context is extended, which is what the stretched wavelengths are for."""
    return original(positions.clamp(max=8191), shape)


@mutant(
    Row(2, {CP: 2, **DOCUMENTS, **LONG}),
    "gradient",
    INNER,
    trial="long",
    at=(context_parallel, "attend_within_documents"),
)
def documents_numbered_in_a_byte(original, query, key, value, doc_ids, **places):
    """Document numbers are kept in eight bits to save memory, so that document 256 sees document 0. In rows with many
    short documents answers leak from one into another."""
    return original(query, key, value, doc_ids % 256, **places)


@mutant(Row(1, {**LONG, CHUNK: 512}), "loss", HEAD, trial="long", at=(head.ChunkedLoss, "differentiate"))
def loss_of_the_first_eight_chunks(original, loss, logits, targets, *, with_gradient):
    """Chunks of the loss are counted in three bits. Short rows have fewer; of long ones the end is never learned from,
    and since easy tokens are missing too, the loss looks right."""
    loss.n_seen = getattr(loss, "n_seen", 0) + 1
    result, gradient = original(loss, logits, targets, with_gradient=with_gradient)
    return (result, gradient) if loss.n_seen <= 8 else (result * 0, gradient * 0)


@mutant(Row(2, WIDE_FFN), "grad_norm", NORM, trial="real width", at=(optim, "sum_squares"))
def norm_added_up_in_fp32(original, tensors):
    """torch's vector norm on a CPU adds fp32 numbers one after another: the larger a slice, the more is lost of what
    comes late. The norm depends on the layout, and with it the clipping."""
    return torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors]).double().square().sum()


@mutant(
    Row(2, {TP: 2, **CHUNKS, **BEYOND_TWO_BYTES}),
    "loss",
    HEAD,
    trial="real width",
    at=(head.ChunkedLoss, "differentiate"),
)
def vocabulary_offset_in_two_bytes(original, loss, logits, targets, *, with_gradient, first_id):
    """The first token id of a rank's share of the vocabulary is computed in 16 bits and wraps. Each rank takes targets
    for its own that are not: small vocabularies are right."""
    wrong = (first_id + 2**15) % 2**16 - 2**15
    return original(loss, logits, targets, with_gradient=with_gradient, first_id=wrong)


@mutant(
    Row(2, BEYOND_TWO_BYTES),
    "initial",
    ("initial weights", "tok_embeddings.weight"),
    trial="real width",
    cause="the rule",
    at=(initial_weights, "copy_local_shard"),
)
def first_two_million_numbers_copied(original, parameter, full):
    """Initial weights are copied in one call with a limit on its size. The rest of a large matrix stays as it was
    allocated: zeros, mostly."""
    original(parameter, full)
    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    own.flatten()[2**21 :].zero_()
