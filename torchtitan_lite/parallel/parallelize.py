"""All parallelisms applied to one model part, in the one right order, with the reason for each place.

    on meta   0. float8                 other classes of linear layers: before anything looks at those that are there
              1. tensor parallel,       look modules up by FQN and replace their parameters; of the experts the second
                 expert parallel
              2. context parallel,      replace attention.inner and output.chunked_loss, which have no parameters: 1 and
                 chunked loss           2 could change places, but what follows must see them
              3. per-op recompute       inside compile: the partitioner honours the policy
              4. compile                each block's forward, all of which share one graph; of a block with experts
                                        the attention and the shared experts; the loss of given logits
              5. full recompute         outside compile: inside, it fails under TP ("tensors_saved ... DeviceMesh")
              6. FSDP2                  last: its hooks gather parameters outside the compiled graph
    then      7. allocate, initialize or load, optimizer: parameters are final now   (step.py)
              8. PipelineStage, schedule: they take the parts as they are            (step.py)

Before all of it the model is cut into parts (pipeline.py), so that no stage ever allocates what it does not hold.
3 to 5 replace the bound `forward` of a block in place. That was right in every combination that was tried (recompute x
compile x TP x FSDP x PP), keeps FQNs clean and recompiles nothing.
"""

import torch
from torch import nn

from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.schema import Config
from torchtitan_lite.model.moe import MoE
from torchtitan_lite.parallel.activation_checkpoint import (
    apply_recompute,
    plan_recompute,
    set_memory_budget,
)
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
    if config.model.uses_float8:
        apply_float8(part, config.quantize.linear.float8, layout.tp)
    shard_loss = not config.parallelism.disable_loss_parallel
    if layout.tp > 1:
        apply_tensor_parallel(part, mesh.tp, plan_tensor_parallel(part))
    if layout.cp > 1:
        method = config.parallelism.context_parallel_rotate_method
        apply_context_parallel(part, mesh.cp, attention=config.model.attention, method=method)
    if part.output is not None and (config.training.loss_chunk_tokens or layout.tp > 1):
        part.output.chunked_loss = build_chunked_loss(config.training.loss_chunk_tokens, mesh.tp, shard_loss=shard_loss)

    if layout.ep:
        apply_expert_parallel(part, mesh.ep, mesh.tp)
        share_sequences(part, [dim.get_group() for dim in (mesh.cp, mesh.tp) if dim.size() > 1])

    recompute = plan_recompute(config.activation_checkpoint, [int(layer) for layer in part.layers])
    set_memory_budget(config.activation_checkpoint)
    options = enable_async_tensor_parallel(mesh.tp) if config.parallelism.enable_async_tensor_parallel else None
    compiles = config.compile.enable and "model" in config.compile.components
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
        for module, method in compiled if compiles else []:
            # Without graph breaks. Blocks are alike, so the first compilation serves all.
            function = getattr(module, method)
            function = torch.compile(function, backend=config.compile.backend, fullgraph=True, options=options)
            setattr(module, method, function)
        if recompute[int(layer)] == "full":
            apply_recompute(block, keep_expensive_ops=False)
    if part.output is not None and config.compile.enable and "loss" in config.compile.components:
        compile_loss(part.output, config.compile.backend)

    whole_on_one_rank = layout.dp * layout.cp * layout.tp == 1
    offload = config.training.enable_cpu_offload
    if whole_on_one_rank and config.training.mixed_precision_param == "float32" and not offload:
        return  # nothing to shard, gather, cast or reduce; the hooks alone would cost 5 % on a CPU
    apply_fsdp(
        part,
        mesh.fsdp_mesh,
        param_dtype=getattr(torch, config.training.mixed_precision_param),
        reduce_dtype=getattr(torch, config.training.mixed_precision_reduce),
        zero_stage=layout.zero_stage,
        offload=offload,
        expert_mesh=mesh.expert_fsdp_mesh,
        ep=layout.ep,
    )


def compile_loss(head: nn.Module, backend: str) -> None:
    """Compile the loss of given logits, of one chunk of tokens or of all; the head's matmuls stay outside."""
    if head.chunked_loss is not None:
        loss = head.chunked_loss
        loss.differentiate = torch.compile(loss.differentiate, backend=backend, fullgraph=True)
    else:
        loss = head.token_loss
        loss.forward = torch.compile(loss.forward, backend=backend, fullgraph=True)
