"""Mutants that the wide trial of `verify` finds: errors in the gradient norm, loss, gradients, hidden states,
context-parallel pieces and document masks."""

import torch
from mutant_table import mutant

from torchtitan_lite import step
from torchtitan_lite.models.llama3 import modules as llama3
from torchtitan_lite.parallel import (
    context_parallel,
    exchange,
    fsdp,
    parallelize,
)


@mutant("pp2 1F1B", "gradient norm", "all gradients", at=(step, "reduce_scalars"))
def clip_norm_forgets_pp(original, squares, loss, stop_signal):
    """Each stage clips by the norm of its own gradients."""
    return squares.sqrt().float(), *original(squares, loss, stop_signal)[1:]


@mutant("pp2 1F1B", "loss", "reduce_scalars", at=(step, "reduce_scalars"), dims=("pp",))
def loss_not_summed_over_pp(original, squares, loss, stop_signal):
    """The loss of the last stage does not reach the other stages, so rank 0, which has no head, logs zero."""
    norm, _, stops = original(squares, loss, stop_signal)
    return norm, loss.float(), stops


@mutant(
    "2 | TP=2 COMPILED TWO_LAYERS",
    "module output",
    "tok_embeddings",
    at=(exchange, "reduce_scatter"),
)
def partial_sums_averaged(original, whole, ranks, dim):
    """Partial sums over tp ranks are averaged instead of added."""
    return original(whole, ranks, dim) / ranks.n


@mutant("tp2", "gradients", "norm.weight", at=(fsdp, "add_tokens"))
def norm_gradients_not_added_over_tp(original, ranks, gradient):
    """The gradient of a norm covers only the tokens of one tp rank. README.md shows what `verify` prints."""
    return gradient


@mutant("ddp2", "gradients", "output.weight", at=(parallelize, "apply_fsdp"))
def replicas_not_reduced(original, part, mesh, *rest):
    """Gradients are not all-reduced over dp_replicate."""
    original(part, mesh[mesh.mesh_dim_names[-1]], *rest)


@mutant(
    "2 | PP=2 DOCUMENTS",
    "module output",
    "layers.1.attention.inner",
    at=(llama3.Llama3, "forward"),
)
def documents_lost_after_the_first_stage(
    original, part, x, *, positions, doc_ids=None, targets=None
):
    """Later stages do not get the borders of documents, so half of the layers attend across borders."""
    if part.tok_embeddings is None:
        doc_ids = torch.zeros_like(doc_ids)
    return original(part, x, positions=positions, doc_ids=doc_ids, targets=targets)


@mutant("pp2 1F1B", "module output", "layers.1.attention_norm", at=(llama3.Llama3, "forward"))
def hidden_states_rounded_between_stages(original, part, x, **inputs):
    """Hidden states are sent between stages in bf16, while the model computes in fp32."""
    hidden = original(part, x, **inputs)
    return hidden if part.output is not None else hidden.bfloat16().float()


@mutant("1 | CHUNKS", "gradients", "output.weight", at=(torch.Tensor, "addmm_"))
def gradients_of_the_last_chunk_kept(original, total, one, other, *, beta):
    """The head's gradient is overwritten by every chunk instead of added up."""
    return total.copy_(one @ other)


@mutant("2 | CP=2", "rotary angles", "layers.0", at=(context_parallel, "shard_sequence"))
def wrong_zig_zag_pieces(original, whole, mesh):
    """Each context-parallel rank takes one contiguous half of a sequence, but attention expects the two pieces of a
    zigzag."""
    return whole.chunk(mesh.size(), dim=1)[mesh.get_local_rank()]


@mutant(
    "tp2",
    "module output",
    "layers.0.feed_forward.w1",
    at=(parallelize, "apply_tensor_parallel"),
    dims=("tp",),
)
def small_error_from_layer_0(original, part, mesh):
    """On one tensor-parallel rank, one matrix of the first layer is 0.1 % too large."""
    original(part, mesh)
    if mesh.get_local_rank() == 1:
        part.layers["0"].feed_forward.w1.register_forward_hook(
            lambda module, args, output: output * 1.001
        )
