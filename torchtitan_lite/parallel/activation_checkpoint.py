"""Activation checkpointing: save fewer activations in forward, and recompute the others in backward.

    mode        saved for backward, per block         recomputed
    none        every activation                      nothing
    selective   "op": outputs of matmuls, attention   norms, rotary embedding, SwiGLU product: cheap; experts, whose
                                                      outputs would be most of the memory
                "n":  every n-th block uses full      those blocks
    full        the block's input (B, S, D)           the block: a third more FLOPs
    memory_budget: the fraction of activations that a compiled block may save; the compiler recomputes the cheapest

It adds no collectives, but recompute repeats the TP collectives whose outputs are not saved. So "op" saves the outputs
of collectives that reduce. The bound `forward` of each block is replaced in place, so FQNs do not change. A pipeline
schedule that splits backward would recompute in each half and for each weight, so config/checks.py refuses it.

Selective recompute handles each operator in Python. Without compile, this costs the host more time than all collectives
of the step: debug_3d trained 1,355 tokens/s with "none" and 800 with "selective" (two x86_64 cores, gloo, November
2026). So configs/debug*.toml use "none". On a GPU, the host runs ahead of the kernels of a large model.

Sources: arXiv:1604.06174; selective: arXiv:2205.05198. Effect: less memory; gradients are the same.
"""

from collections.abc import Callable

import torch
import torch._functorch.config as partitioner_config
from torch import nn
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from torchtitan_lite.config.schema import ActivationCheckpoint
from torchtitan_lite.parallel.exchange import collectives

aten = torch.ops.aten

KEPT_OPS = [  # outputs worth saving: expensive to compute, or received from other ranks
    aten.mm.default,
    aten._scaled_mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten.amax.default,  # float8 scales: tiny, but recompute would read the full tensor
    aten.topk.default,  # routes of an MoE layer: small, and recompute must not choose different ones
    torch.ops.higher_order.flex_attention,  # inside a compiled block
    torch.ops.higher_order.inductor_compiled_code,  # separately compiled, in an eager block
    collectives.reduce_scatter_tensor.default,
    collectives.all_to_all_single.default,
]


def set_memory_budget(section: ActivationCheckpoint) -> None:
    """Set the partitioner's memory budget for the whole process, because torch has no option per compile call."""
    budget = section.memory_budget if section.mode == "memory_budget" else 1.0
    partitioner_config.activation_memory_budget = budget
    if hasattr(partitioner_config, "unsafe_treat_script_objects_as_zero_size"):
        # torch 2.13 refuses to plan for objects of unknown size. In a block, only TP's process groups are such objects,
        # and they hold no tensors.
        partitioner_config.unsafe_treat_script_objects_as_zero_size = True


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
    """Context function of `checkpoint`. It is not a partial, because torch.compile would trace the list inside it."""
    own = torch.ops.torchtitan_lite  # operators of loaded extensions; these operators communicate
    return create_selective_checkpoint_contexts(KEPT_OPS + [getattr(own, op).default for op in own])
