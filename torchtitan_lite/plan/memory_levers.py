"""What takes memory on a rank, by arithmetic alone, and which keys give some of it back.

    bytes per parameter       AdamW    AdamW, bf16 moments    SGD
    weight and gradient       4 + 4    4 + 4                  4 + 4
    moments                   4 + 4    2 + 2                  -
    together                  16       12                     8          8B on one rank: 119.7, 89.8, 59.8 GiB

    bytes per token and block, b per number of the compute dtype; 8B in bf16
    full recompute            b D                                         its input                           8 KiB
    selective, "op"           b (3D + 2HE + 2KE + 2F) + 4H                and what matmuls, attention gave  100 KiB
    none                      b (4D + 2HE + 2KE + 4F) + 4HE + 4KE + 4H    and what norms and SwiGLU read    184 KiB

Activations were counted from the code and agree with what a CPU process grows by: full and "op" exactly, "none" within
a fifth, since kernels differ in what they keep. Legend: D model dim, H heads, K kv heads, E head dim, F ffn dim.
"""

from dataclasses import dataclass, replace

from torchtitan_lite.config.case import Case
from torchtitan_lite.config.checks import MOMENTS, find_problems, find_refused
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.memory_bound import count_activation_bytes, count_state_bytes
from torchtitan_lite.config.schema import Config, Training
from torchtitan_lite.plan.memory import estimate_loss
from torchtitan_lite.plan.workload import describe_workload


@dataclass(frozen=True)
class MemoryOption:
    """A key that would save memory."""

    key: str
    value: object
    saved_bytes: float  # on one rank
    price: str
    takes_gpus: bool = False  # twice as many


def find_memory_options(config: Config, shape: ModelArgs, layout: Layout, n_parameters: int) -> list[MemoryOption]:
    """Keys that would help a rank which holds `n_parameters` (its own slices): first those that take no more GPUs, the
    strongest first. Each alone; `config` is resolved.
    """
    training, parallelism = config.training, config.parallelism
    itemsize = {"bfloat16": 2, "float32": 4}[training.mixed_precision_param]
    # Under PP several microbatches are under way, at most as many as there are stages ahead of the loss.
    tokens = layout.microbatch_size * training.seq_len / (layout.cp * layout.tp) * min(layout.pp, layout.n_microbatches)
    n_layers = shape.n_layers / layout.pp
    kept_bytes = tokens * n_layers * count_activation_bytes(config.activation_checkpoint, shape, itemsize)
    full_bytes = tokens * n_layers * itemsize * shape.dim
    on_gpu = 0 if training.enable_cpu_offload else n_parameters
    state_bytes = on_gpu * count_state_bytes(config.optimizer)
    bfloat16 = replace(config.optimizer, moments_dtype="bfloat16")
    # What stays gathered between microbatches: parameters, and without PP with stage 1 gradients too.
    gathered_bytes = n_parameters * (layout.dp_shard * layout.cp - 1) * itemsize
    n_gathered = {1: 1 if layout.pp > 1 else 2, 2: 1, 3: 0}[layout.zero_stage]

    levers = [MemoryOption("activation_checkpoint.mode", "full", kept_bytes - full_bytes, "a third more FLOPs")]
    if not find_refused(config, shape, zero_stage=3):
        levers.append(
            MemoryOption("parallelism.zero_stage", 3, n_gathered * gathered_bytes, "parameters travel more often")
        )
    if not find_problems("run", Case(replace(config, optimizer=bfloat16)), key=MOMENTS):
        saved = state_bytes - on_gpu * count_state_bytes(bfloat16)
        levers.append(MemoryOption("optimizer.moments_dtype", "bfloat16", saved, "moments keep 8 bits"))
    if layout.microbatch_size > 1:
        key = "parallelism.pipeline_parallel_microbatch_size" if layout.pp > 1 else "training.local_batch_size"
        levers.append(MemoryOption(key, layout.microbatch_size // 2, kept_bytes / 2, "smaller matmuls"))
    workload, chunk = describe_workload(config, shape, layout), Training.loss_chunk_tokens
    logits_bytes = estimate_loss(workload) - estimate_loss(replace(workload, loss_chunk_tokens=chunk))
    levers.append(MemoryOption("training.loss_chunk_tokens", chunk, logits_bytes, "the loss is computed in chunks"))
    levers.append(
        MemoryOption("training.enable_cpu_offload", "true", state_bytes, "the optimizer runs on the host, slowly")
    )

    key, degree = "parallelism.data_parallel_shard_degree", 2 * parallelism.data_parallel_shard_degree
    levers.append(MemoryOption(key, degree, state_bytes / 2, "twice the GPUs", takes_gpus=True))
    more_tp = Case(
        config, shape, {**layout.degrees, "tp": 2 * layout.tp}, batch={"microbatch_size": layout.microbatch_size}
    )
    if not find_problems("layout", more_tp):
        key, saved = "parallelism.tensor_parallel_degree", (state_bytes + kept_bytes) / 2
        levers.append(MemoryOption(key, 2 * layout.tp, saved, "twice the GPUs", takes_gpus=True))
    helpful = [lever for lever in levers if lever.saved_bytes > 0]
    return sorted(helpful, key=lambda lever: (lever.takes_gpus, -lever.saved_bytes))
