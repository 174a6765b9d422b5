"""Mutants that are wrong only above a certain depth, length, size or number."""

from dataclasses import replace

import torch
from mutant_table import mutant

from torchtitan_lite import build, step
from torchtitan_lite.components import optim
from torchtitan_lite.extensions import ring_attention
from torchtitan_lite.model import document_attention, head, moe
from torchtitan_lite.parallel import initial_weights


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
    "dp2",
    "initial weights",
    "layers.10.attention.wq.weight",
    at=(initial_weights, "seed_of"),
    trial="deep",
)
def layer_numbers_of_one_digit(original, seed, fqn):
    """The seed of a layer's weights uses only the first digit of the layer's number, so layers 10 to 19 start as copies
    of layer 1."""
    prefix, _, rest = fqn.partition("layers.")
    number, dot, name = rest.partition(".")
    return original(seed, f"{prefix}layers.{number[0]}{dot}{name}" if rest else fqn)


@mutant("one rank", "gradient norm", "all gradients", at=(optim, "sum_squares"), trial="deep")
def norm_of_the_first_hundred_tensors(original, tensors):
    """The gradient norm covers only the first 100 tensors, as if a kernel had a limit."""
    return original(tensors[:100])


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
    """Rows are cut to an even length even with one cp rank, so odd rows lose a token."""
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


@mutant(
    "1 | CHUNK=512 training.seq_len=2048",
    "module output",
    "output",
    at=(head.Head, "differentiate_cross_entropy"),
    trial="deep",
)
def loss_of_the_first_eight_chunks(original, loss, logits, targets):
    """Chunks of the loss are counted in three bits, so only the first eight contribute."""
    loss.n_seen = getattr(loss, "n_seen", 0) + 1
    result, gradient = original(loss, logits, targets)
    return (result, gradient) if loss.n_seen <= 8 else (result * 0, gradient * 0)


@mutant("pp2 1F1B", "loss", "reduce_scalars", trial="deep", at=(step, "run_schedule"))
def losses_of_ten_microbatches_added(original, *args):
    """The buffer for the losses of microbatches has ten places, so the losses of later microbatches are lost."""
    return original(*args)[:10]


@mutant(
    "2 | MOE EP=2 flavor.n_experts=24",
    "module output",
    "layers.0.feed_forward",
    trial="deep",
    at=(moe.Router, "choose"),
)
def expert_twenty_gets_no_token(original, router, scores):
    """Numbers of experts are kept in four bits, so no token is routed to expert 16 or later."""
    has_number = torch.arange(router.n_experts) < 16
    return original(router, scores.where(has_number, -torch.inf))
