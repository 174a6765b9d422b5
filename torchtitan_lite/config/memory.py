"""Bytes that one rank holds at its peak: the one closed form. `check`, plan, search, the out-of-memory report and
`bench gpu` all use it; the dry run and tests/measure_memory.py are its measure. No torch.

    at rest      parameters, gradients (fp32), optimizer state: of the rank's stages, over tp and over dp_shard x cp
    gathered     whole parameters in compute dtype: of a block and the next (ZeRO 3), or of everything (ZeRO 1, 2)
    activations  what forward keeps for backward, by recompute mode, times microbatches in flight
    received     a pipeline's receive buffers: torch makes those of all microbatches of a step at once
    working      temporary tensors of the block in backward, or the logits and their gradients

These are live bytes. The allocator reserves more: Cluster.reserve_factor. Legend in workload.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from torchtitan_lite.config.flavors import ModelArgs, list_block
from torchtitan_lite.config.schema import Optimizer
from torchtitan_lite.config.workload import MASTER_BYTES, Stage, Workload, count_moment_bytes


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    received: float  # hidden states and their gradients, of all microbatches
    working: float  # of the block or the loss that is being computed

    @property
    def live(self) -> float:
        return sum(vars(self).values())


def count_state_bytes(section: Optimizer) -> int:
    """Return the bytes per parameter of weight, gradient and optimizer state: 16 for AdamW, 12 with bf16 moments."""
    return 2 * MASTER_BYTES + count_moment_bytes(section)


@lru_cache
def list_kept_bytes(shape: ModelArgs, compute_bytes: int, *, tp: int = 1) -> dict[str, float]:
    """Return the bytes that a layer keeps per token for its backward, by recompute mode.

    In numbers of the compute dtype (1/tp of all but what is marked "whole"); in KiB of 8B in bf16 on one rank:

        none       172.1  input of each norm and its gathered output (whole), outputs of colwise layers (q, k, v, w1,
                          w3), inputs of rowwise ones (attention's output, the product), output of silu, and
                          attention's output once more: kernels return (B, H, S, E), wo reads a copy (B, S, H E)
        op         100.1  input of the block, outputs of colwise layers and of attention, outputs of rowwise layers
                          (whole: partial sums), with tp also scattered
        full         8.0  input of the block
        alternate   62.1  input of the block, outputs of wq, wv, w1, attention and w2 (whole)

    and 4 bytes per head of attention's log-sum-exp, unless backward runs attention's forward again. Rotation keeps
    nothing: its backward needs the angles only. CPU kernels keep one or two more tensors per norm.
    """
    block = list_block(shape)
    colwise = [module.weight for module in block if module.tp == "colwise"]
    rowwise = [module.weight for module in block if module.tp == "rowwise"]
    norms = sum(module.weight[0] for module in block if not module.is_linear)
    heads = shape.n_heads * shape.head_dim
    hidden, of_colwise = shape.dim / tp, sum(out for out, _ in colwise) / tp
    of_rowwise = sum(out for out, _ in rowwise)  # partial sums of the whole width
    scattered = of_rowwise / tp * (tp > 1)
    elements = {
        "none": norms / tp
        + norms
        + of_colwise
        + sum(width for _, width in rowwise) / tp
        + (shape.ffn_dim + heads) / tp,
        "op": hidden + of_colwise + of_rowwise + scattered + heads / tp,
        "full": hidden,
        "alternate": hidden + (heads + shape.n_kv_heads * shape.head_dim + shape.ffn_dim + heads) / tp + shape.dim,
    }
    log_sum_exp = {"none": 4, "op": 4, "full": 0, "alternate": 4}
    return {mode: n * compute_bytes + log_sum_exp[mode] * shape.n_heads / tp for mode, n in elements.items()}


def estimate_memory(workload: Workload, pp_rank: int, in_flight: Mapping[int, float]) -> Memory:
    """Return what a rank with this index on mesh dim `pp` holds at its peak.

    `in_flight`: stage -> microbatches whose activations this pp rank holds at once (simulator.count_in_flight).
    """
    layout = workload.layout
    stages = {index: workload.stages[index] for index in layout.stages_of(pp_rank)}
    n_parameters = sum(map(workload.count_stage_parameters, stages.values()))
    at_rest = n_parameters / workload.n_shards
    summed_whole = layout.zero_stage == 1 or layout.pp > 1
    gradients = MASTER_BYTES * (n_parameters if summed_whole else at_rest)
    # DTensor forms the embedding's gradient for the whole vocabulary on each tp rank, and sums it in this form.
    has_embedding = any(stage.has_embedding for stage in stages.values())
    embedding = workload.vocabulary_parameters * layout.tp * has_embedding
    gradients += MASTER_BYTES * (embedding - embedding / layout.tp) * summed_whole
    has_layers = any(stage.n_layers for stage in stages.values())
    kept_bytes = list_kept_bytes(workload.shape, workload.compute_bytes, tp=layout.tp)
    kept_per_layer = workload.average(kept_bytes) * workload.n_tokens * has_layers
    kept = kept_per_layer * sum(stages[index].n_layers * n for index, n in in_flight.items())
    # A stage keeps its output too. A stage with layers has no extra bytes for it: its input is received and kept.
    kept += sum(
        workload.hidden_bytes / layout.tp * n
        for index, n in in_flight.items()
        if stages[index].has_embedding and not stages[index].n_layers
    )
    block = estimate_block(workload, kept_bytes) * has_layers
    loss = estimate_loss(workload) * any(stage.has_head for stage in stages.values())
    if layout.n_microbatches > 1:
        moments = [(gradients, kept, max(block, loss, embedding * workload.compute_bytes))]
    else:  # gradients come as activations go: the peak is at the logits, or at the very end
        moments = [(0, kept, max(block, loss)), (gradients, kept_per_layer, block)]
    gradients, kept, working = max(moments, key=sum)
    # Receive buffers hold hidden states for all stages but the model's first, and gradients for all but its last.
    n_received = sum((index > 0) + (index < len(layout.stages) - 1) for index in stages)
    return Memory(
        parameters=at_rest * MASTER_BYTES,
        gradients=gradients,
        optimizer=at_rest * workload.moment_bytes,
        gathered=estimate_gathered(workload, list(stages.values())),
        activations=kept,
        received=n_received * layout.n_microbatches * workload.hidden_bytes / layout.tp,
        working=working,
    )


def estimate_block(workload: Workload, kept_bytes: dict[str, float]) -> float:
    """Return what a block in backward holds besides the kept activations: recomputed ones, and temporary gradients."""
    again = max(kept_bytes["none"] - kept_bytes[mode] for mode in workload.recompute)
    temporary = (3 * workload.shape.ffn_dim / workload.layout.tp + workload.shape.dim) * workload.compute_bytes
    return (max(0, again) + temporary) * workload.n_tokens


def estimate_loss(workload: Workload) -> float:
    """Return what the loss holds at its peak.

    In chunks: the gradient of the weight in fp32, and either a chunk's logits in compute dtype and in fp32, or their
    gradient and its contribution to that of the weight.

    All at once, of the logits (T, V): three fp32 tensors in backward, log-softmax and two gradients. Over tp the peak
    is in forward: the logits, in fp32 too, less their maximum, and the exponentials of that.
    """
    tp = workload.layout.tp if workload.shards_loss else 1
    if workload.loss_chunk_tokens:
        width = workload.compute_bytes
        weight = workload.shape.vocab_size * workload.shape.dim / workload.layout.tp
        logits = min(workload.loss_chunk_tokens, workload.n_tokens) * workload.shape.vocab_size / tp
        if width == MASTER_BYTES:  # one tensor serves as both, and the contribution is added in place
            return (weight + logits) * MASTER_BYTES
        return weight * MASTER_BYTES + max(logits * (width + MASTER_BYTES), (weight + logits) * width)
    bytes_each = 12 if tp == 1 else 12 + workload.compute_bytes
    return bytes_each * workload.n_tokens * workload.shape.vocab_size / tp


def estimate_gathered(workload: Workload, stages: list[Stage]) -> float:
    """Return the bytes of gathered parameters.

    ZeRO 3: two blocks, and the head from its forward to its backward, or an embedding that is alone on its stage; and
    the gradients of a block, once in compute dtype and once as they are reduced. ZeRO 1 and 2: all parameters.
    """
    if workload.is_whole:
        return 0
    if workload.layout.zero_stage < 3:
        return sum(map(workload.count_stage_parameters, stages)) * workload.compute_bytes
    has_layers = any(stage.n_layers for stage in stages)
    has_matrix = any(stage.has_head for stage in stages) or not has_layers
    reduced = workload.layer_parameters * (workload.compute_bytes + MASTER_BYTES) * (workload.layout.pp == 1)
    gathered = 2 * workload.layer_parameters * has_layers + workload.vocabulary_parameters * has_matrix
    return gathered * workload.compute_bytes + reduced
