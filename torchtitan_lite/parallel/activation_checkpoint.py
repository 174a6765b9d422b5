"""Apply activation checkpointing (save some activations in forward, recompute the others in backward) and
torch.compile.

    mode        saved for backward, per block         recomputed
    none        every activation                      nothing
    selective   "op": outputs of matmuls, attention   cheap ops: norms, rotary embedding, SwiGLU product. Also
                                                      experts, whose outputs would use most of the memory
                "n":  every n-th block uses full      those blocks
    full        the block's input (B, S, D)           the block, which adds a third to the FLOPs
    memory_budget: a compiled block saves at most this fraction of its activations; the compiler chooses which

Activation checkpointing adds no collectives of its own, but recompute repeats TP collectives whose outputs are not
saved. Therefore "op" saves the outputs of reduce-scatters and all-to-alls. The bound `forward` of each block is
replaced in-place, so FQNs do not change. A pipeline schedule that splits backward would recompute in both halves. torch
does not support this, so config/settings.py reports an error.

Selective recompute intercepts each operator in Python. Without compile, "selective" costs the host more time than all
collectives of the step: debug_3d trained 1,355 tokens/s with "none" and 800 with "selective" (two x86_64 cores, gloo,
November 2026). Therefore configs/debug*.toml use "none". With a large model on a GPU, the host time does not matter,
because the host runs ahead of the kernels.

Sources: arXiv:1604.06174; selective: arXiv:2205.05198. Effect: a step needs less memory; gradients do not change.
"""

from collections.abc import Callable

import torch
import torch._functorch.config as partitioner_config
from torch import nn
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from torchtitan_lite.config.recompute import plan_recompute
from torchtitan_lite.config.schema import Config
from torchtitan_lite.model.moe import list_moes
from torchtitan_lite.parallel.exchange import collectives
from torchtitan_lite.parallel.mesh import Mesh

aten = torch.ops.aten

KEPT_OPS = [  # outputs worth saving: expensive to compute, or received from other ranks
    aten.mm.default,
    aten.addmm.default,  # a matmul with a bias
    aten._scaled_mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten.amax.default,  # for float8 scales: its output is one number, but recompute would read the full tensor
    # topk chooses the routes of an MoE layer. Routes are small, and recomputed routes could differ from the original
    # routes
    aten.topk.default,
    torch.ops.higher_order.flex_attention,  # inside a compiled block
    torch.ops.higher_order.inductor_compiled_code,  # flex attention in an eager block
    collectives.reduce_scatter_tensor.default,
    collectives.all_to_all_single.default,
]


def recompute_and_compile(part: nn.Module, config: Config, mesh: Mesh) -> None:
    """Apply recompute and torch.compile to the methods of each block, and compile the loss."""
    section = config.activation_checkpoint
    recompute = plan_recompute(section, [int(layer) for layer in part.layers])
    # The budget applies to the whole process, because torch has no option for a single compile call.
    budget = section.memory_budget if section.mode == "memory_budget" else 1.0
    partitioner_config.activation_memory_budget = budget
    if hasattr(partitioner_config, "unsafe_treat_script_objects_as_zero_size"):
        # torch 2.13 raises an error if it must plan memory for objects of unknown size. The only such objects in a
        # block are TP's process groups, which contain no tensors.
        partitioner_config.unsafe_treat_script_objects_as_zero_size = True
    options = None
    if config.parallelism.enable_async_tensor_parallel:
        # torch warns that this function is deprecated, but the compiler pass of torch 2.13 still depends on the call.
        enable_symm_mem_for_group(mesh.tp.get_group().group_name)
        options = {"_micro_pipeline_tp": True}
    components = config.compile.components if config.compile.enable else []
    backend = config.compile.backend
    moes = dict(list_moes(part))
    for layer, block in part.layers.items():
        recomputed = [(block, "forward")]
        compiled = recomputed
        moe = moes.get(int(layer))
        if moe is not None:
            # An MoE block is recomputed and compiled in pieces: FSDP's hooks for the experts run in the middle of the
            # block, where the number of rows per expert becomes known.
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
        # Compile only the computation of the loss from logits, not the head's matmuls.
        compile_method(part.output, "differentiate_cross_entropy", backend)
        compile_method(part.output, "token_losses", backend)


def compile_method(
    module: nn.Module, method: str, backend: str, options: dict[str, bool] | None = None
) -> None:
    """Compile a method without graph breaks. All blocks are alike, so they share one compilation."""
    eager = getattr(module, method)
    compiled = torch.compile(eager, backend=backend, fullgraph=True, options=options)
    setattr(module, method, compiled)


def apply_recompute(module: nn.Module, method: str, context_fn: Callable = noop_context_fn) -> None:
    """Make backward recompute a method of a block or of one of its modules.

    Pass save_expensive_outputs as `context_fn` to recompute only the cheap ops of the method.
    """
    forward = getattr(module, method)

    def run(*args, **kwargs):
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,  # there is no dropout
            context_fn=context_fn,
            **kwargs,
        )

    setattr(module, method, run)


def save_expensive_outputs():
    """Return contexts for `checkpoint` that save the outputs of KEPT_OPS. This function is not a functools.partial,
    because torch.compile would trace the list inside the partial."""
    # save the outputs of the extensions' operators, because these operators communicate
    own = torch.ops.torchtitan_lite
    return create_selective_checkpoint_contexts(KEPT_OPS + [getattr(own, op).default for op in own])
