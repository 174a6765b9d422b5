"""Apply all parallelisms to one model part, in the required order, with the reason for each position.

    on meta   0. float8                swaps classes of linear layers, so it comes before code that checks classes
              1. context parallel      replaces attention.inner, if it is the one that the model calls
              2. tensor parallel       finds modules by FQN and replaces their parameters
              3. loss                  sets its formula and chunks; 2 to 4 can be reordered
              4. expert parallel       keeps this rank's experts; 5 and 6 must see the modules that 1 to 4 replaced
              5. recompute, compile    per op: recompute inside compile, where the partitioner follows its policy; full:
                                       outside, because inside it fails under TP ("tensors_saved ... DeviceMesh")
              6. FSDP2                 last: its hooks gather parameters outside the compiled graph
    then      allocate, initialize or load, optimizer: parameters are final       (build.py)
              PipelineStage, schedule: they use the finished parts                (build.py)

Before step 0, the model is cut into parts (pipeline.py), so a stage never allocates modules of other stages.
Step 5 replaces the bound `forward` of a block in place. This gave correct results in every combination that was tested
(recompute x compile x TP x FSDP x PP), keeps FQNs clean, and causes no recompilation.
"""

import torch
from torch import nn

from torchtitan_lite.config.extensions import load_module
from torchtitan_lite.config.layout import Layout, plan_recompute
from torchtitan_lite.config.schema import Config
from torchtitan_lite.model.loss import find_formula
from torchtitan_lite.model.part import list_moes
from torchtitan_lite.parallel.activation_checkpoint import (
    apply_recompute,
    save_expensive_outputs,
    set_memory_budget,
)
from torchtitan_lite.parallel.context_parallel import apply_context_parallel
from torchtitan_lite.parallel.fsdp import apply_fsdp
from torchtitan_lite.parallel.mesh import Mesh
from torchtitan_lite.parallel.tensor_parallel import (
    apply_tensor_parallel,
    enable_async_tensor_parallel,
)


def parallelize(part: nn.Module, config: Config, layout: Layout, mesh: Mesh) -> None:
    """Apply the parallelisms of the layout to `part` (on meta), in place."""
    if config.model.uses_float8:  # 0
        float8 = config.quantize.linear.float8
        load_module("model.float8_linear").apply_float8(part, float8, layout.tp)
    if layout.cp > 1:  # 1
        method = config.parallelism.context_parallel_rotate_method
        apply_context_parallel(part, mesh.cp, attention=config.model.attention, method=method)
    if layout.tp > 1:  # 2
        apply_tensor_parallel(part, mesh.tp)
    if part.output is not None:  # 3
        part.output.chunk_tokens = config.training.loss_chunk_tokens
        part.output.formula = find_formula(config.training.loss)
    if layout.ep > 1:  # 4
        load_module("parallel.expert_parallel").apply_expert_parallel(part, mesh.ep)
    recompute_and_compile(part, config, mesh)  # 5
    training = config.training
    casts = {training.dtype, training.mixed_precision_param} != {"float32"}
    # On a single rank in fp32 FSDP has nothing to do.
    if layout.dp * layout.cp * layout.tp > 1 or casts or training.enable_cpu_offload:  # 6
        apply_fsdp(part, mesh.fsdp_mesh, mesh.expert_fsdp_mesh, training, layout)


def recompute_and_compile(part: nn.Module, config: Config, mesh: Mesh) -> None:
    """Apply recompute and torch.compile to the methods of each block, and compile the loss."""
    recompute = plan_recompute(config.activation_checkpoint, [int(layer) for layer in part.layers])
    set_memory_budget(config.activation_checkpoint)
    options = None
    if config.parallelism.enable_async_tensor_parallel:
        options = enable_async_tensor_parallel(mesh.tp)
    components = config.compile.components if config.compile.enable else []
    backend = config.compile.backend
    moes = dict(list_moes(part))
    for layer, block in part.layers.items():
        recomputed = [(block, "forward")]
        compiled = recomputed
        moe = moes.get(int(layer))
        if moe is not None:
            # An MoE block is recomputed and compiled in pieces: FSDP's hooks for the experts run in the middle of it,
            # and the number of rows per expert is only known there.
            dense = [(block, "attend")]
            if block.shared_experts is not None:
                dense.append((block.shared_experts, "forward"))
            recomputed = [*dense, (moe, "forward")]
            compiled = [*dense, (moe, "combine"), (moe.experts, "activate")]
        if recompute[int(layer)] == "op":
            for module, method in recomputed:
                apply_recompute(module, method, save_expensive_outputs)
        if "model" in components:
            for module, method in compiled:
                compile_method(module, method, backend, options)
        if recompute[int(layer)] == "full":
            apply_recompute(block, "forward")
    if part.output is not None and "loss" in components:
        # Only the loss of given logits, not the head's matmuls.
        compile_method(part.output, "differentiate_cross_entropy", backend)
        compile_method(part.output, "token_losses", backend)


def compile_method(
    module: nn.Module, method: str, backend: str, options: dict[str, bool] | None = None
) -> None:
    """Compile a method without graph breaks. All blocks are alike, so they share one compilation."""
    eager = getattr(module, method)
    compiled = torch.compile(eager, backend=backend, fullgraph=True, options=options)
    setattr(module, method, compiled)
