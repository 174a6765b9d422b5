"""All parallelisms applied to one model part, in the one right order, with the reason for each place.

    on meta   0. float8                other classes of linear layers: before anything looks at those that are there
              1. tensor parallel       looks modules up by FQN and replaces their parameters
              2. context parallel      replaces attention.inner, which has no parameters
              3. chunked loss          replaces output.chunked_loss, which has none either; 1 to 4 could change places
              4. expert parallel       keeps the experts of this rank; 5 and 6 must see what 1 to 4 have replaced
              5. recompute, compile    by op: recompute inside compile, where the partitioner honors its policy; full:
                                       outside, because inside it fails under TP ("tensors_saved ... DeviceMesh")
              6. FSDP2                 last: its hooks gather parameters outside the compiled graph
    then      allocate, initialize or load, optimizer: parameters are final now   (build.py)
              PipelineStage, schedule: they take the parts as they are            (build.py)

Before all of it the model is cut into parts (pipeline.py), so that no stage ever allocates what it does not hold.
5 replaces the bound `forward` of a block in place. That was right in every combination that was tried (recompute x
compile x TP x FSDP x PP), keeps FQNs clean and recompiles nothing.
"""

import torch
from torch import nn

from torchtitan_lite.config.layout import Layout, plan_recompute
from torchtitan_lite.config.schema import Config
from torchtitan_lite.model.moe import MoE
from torchtitan_lite.parallel.activation_checkpoint import apply_recompute, set_memory_budget
from torchtitan_lite.parallel.context_parallel import apply_context_parallel
from torchtitan_lite.parallel.expert_parallel import apply_expert_parallel, share_sequences
from torchtitan_lite.parallel.float8 import apply_float8
from torchtitan_lite.parallel.fsdp import apply_fsdp
from torchtitan_lite.parallel.mesh import Mesh
from torchtitan_lite.parallel.tensor_parallel import (
    apply_tensor_parallel,
    build_chunked_loss,
    enable_async_tensor_parallel,
    plan_tensor_parallel,
)


def parallelize(part: nn.Module, config: Config, layout: Layout, mesh: Mesh) -> None:
    """Apply the layout's parallelisms to `part` (on meta), in place."""
    if config.model.uses_float8:  # 0
        apply_float8(part, config.quantize.linear.float8, layout.tp)
    if layout.tp > 1:  # 1
        apply_tensor_parallel(part, mesh.tp, plan_tensor_parallel(part))
    if layout.cp > 1:  # 2
        method = config.parallelism.context_parallel_rotate_method
        apply_context_parallel(part, mesh.cp, attention=config.model.attention, method=method)
    if part.output is not None and (config.training.loss_chunk_tokens or layout.tp > 1):  # 3
        shard_loss = not config.parallelism.disable_loss_parallel
        part.output.chunked_loss = build_chunked_loss(config.training.loss_chunk_tokens, mesh.tp, shard_loss=shard_loss)
    if layout.ep:  # 4
        apply_expert_parallel(part, mesh.ep)
        share_sequences(part, [dim.get_group() for dim in (mesh.cp, mesh.tp) if dim.size() > 1])
    recompute_and_compile(part, config, mesh)  # 5
    casts = config.training.mixed_precision_param != "float32"
    if layout.dp * layout.cp * layout.tp > 1 or casts or config.training.enable_cpu_offload:  # 6
        # Otherwise nothing is sharded, gathered, cast or reduced; the hooks alone would cost 5 % on a CPU.
        apply_fsdp(
            part,
            mesh.fsdp_mesh,
            param_dtype=getattr(torch, config.training.mixed_precision_param),
            reduce_dtype=getattr(torch, config.training.mixed_precision_reduce),
            zero_stage=layout.zero_stage,
            offload=config.training.enable_cpu_offload,
            expert_mesh=mesh.expert_fsdp_mesh,
            ep=layout.ep,
        )


def recompute_and_compile(part: nn.Module, config: Config, mesh: Mesh) -> None:
    """Replace the methods of each block by ones that recompute, or are compiled, and compile the loss."""
    recompute = plan_recompute(config.activation_checkpoint, [int(layer) for layer in part.layers])
    set_memory_budget(config.activation_checkpoint)
    options = enable_async_tensor_parallel(mesh.tp) if config.parallelism.enable_async_tensor_parallel else None
    components = config.compile.components if config.compile.enable else []
    for layer, block in part.layers.items():
        recomputed = compiled = [(block, "forward")]
        if isinstance(block.feed_forward, MoE):
            # Recomputed and compiled in pieces: FSDP's hooks for the experts are between them, and how many rows an
            # expert gets is only known in the midst of its layer.
            dense = [(block, "attend")] + [(block.shared_experts, "forward")] * (block.shared_experts is not None)
            recomputed = [*dense, (block.feed_forward, "forward")]
            compiled = [*dense, (block.feed_forward, "combine"), (block.feed_forward.experts, "activate")]
        for module, method in recomputed if recompute[int(layer)] == "op" else []:
            apply_recompute(module, method=method, keep_expensive_ops=True)
        for module, method in compiled if "model" in components else []:
            compile_method(module, method, config.compile.backend, options)
        if recompute[int(layer)] == "full":
            apply_recompute(block, keep_expensive_ops=False)
    if part.output is not None and "loss" in components:  # of given logits; the head's matmuls stay outside
        if part.output.chunked_loss is not None:
            compile_method(part.output.chunked_loss, "differentiate", config.compile.backend)
        else:
            compile_method(part.output, "sum_token_losses", config.compile.backend)


def compile_method(module: nn.Module, method: str, backend: str, options: dict[str, bool] | None = None) -> None:
    """Compile a method without graph breaks. Blocks are alike, so the first compilation serves all."""
    compiled = torch.compile(getattr(module, method), backend=backend, fullgraph=True, options=options)
    setattr(module, method, compiled)
