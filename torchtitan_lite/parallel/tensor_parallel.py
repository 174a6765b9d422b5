"""Tensor parallel with sequence parallel: split each matmul of a block over mesh dim `tp`.

    module                   style          weight on each rank      output           collective in forward
    tok_embeddings           SplitEmbedding (V/tp, D)    Shard(0)    (B, S/tp, D)     reduce-scatter
    attention_norm           CopiedNorm     (D,)         Replicate   (B, S/tp, D)
    attention                GatheredInput                           (B, S, D)        all-gather, before its modules
    attention.wq, wk, wv     ColwiseLinear  (H*E/tp, D)  Shard(0)    (B, S, H*E/tp)
    attention.wo             RowwiseLinear  (D, H*E/tp)  Shard(1)    (B, S/tp, D)     reduce-scatter of partial sums
    ffn_norm                 CopiedNorm     (D,)         Replicate   (B, S/tp, D)
    feed_forward             GatheredInput                           (B, S, D)        all-gather, before its modules
    feed_forward.w1, w3      ColwiseLinear  (F/tp, D)    Shard(0)    (B, S, F/tp)
    feed_forward.w2          RowwiseLinear  (D, F/tp)    Shard(1)    (B, S/tp, D)     reduce-scatter of partial sums
    norm                     CopiedNorm     (D,)         Replicate   (B, S/tp, D)
    output                   SplitHead      (V/tp, D)    Shard(0)    logits or loss   all-gather of the sequence

"Colwise" splits *output features*; nn.Linear stores (out, in), so that is `Shard(0)`. Rowwise splits input features.

Weights are DTensors, so the optimizer and checkpoints see one model. Activations are plain tensors: each module
computes with its local shard of the weight, and communicates through the functions in exchange.py.

Traffic per block: 2 all-gathers and 2 reduce-scatters in forward, the same in backward; each moves P(n-1)/n per rank,
P = B*S*D*2 bytes in bf16. Recompute repeats the collectives whose outputs it does not save. The embedding adds one
reduce-scatter and the head one all-gather, and the reverse in backward. The weight gradient of a norm covers only the
tokens of one rank, so FSDP all-reduces it over tp (D*4 bytes) before the reduction over data-parallel ranks.

The loss with a sharded vocabulary, for one chunk of n tokens (all tokens if loss_chunk_tokens = 0):

                      tp rank 0                       tp rank 1
    logits (n, V/2)   for ids below V/2               for ids from V/2 on
    exchanged         log-sum-exp of the local logits, and the target's logit or 0: 2 values per token
    loss ()           the same on both
    grad_hidden       contribution of its ids         contribution of its ids      partial sums, added in backward
    grad_weight       top half                        bottom half

Traffic: one all-gather of tp*n*8 bytes per chunk, without overlap. With parallelism.disable_loss_parallel the logits
are gathered instead, N*V*2 bytes in bf16 for all chunks together, and every rank computes the full loss.

With parallelism.enable_async_tensor_parallel, inductor splits a matmul and its collective into tp pieces. While one
piece computes, the next is copied directly from another GPU's memory. This was never run, because it needs two GPUs.

Sources: Megatron-LM arXiv:1909.08053, section 3 for the loss; sequence parallel arXiv:2205.05198.
Effect: parameters become DTensors; FQNs and the shapes seen by optimizer and checkpoint do not change.
"""

import warnings
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from torchtitan_lite.config.block import list_block
from torchtitan_lite.model.head import ChunkedLoss, Head
from torchtitan_lite.model.moe import list_moes
from torchtitan_lite.parallel.exchange import Gather, GatherVocabulary, Ranks, Scatter, all_gather, list_ranks
from torchtitan_lite.parallel.float8 import ParallelFloat8Linear

TensorParallelPlan = dict[str, "LocalStyle"]


class MissingFromPlan(ValueError):
    """Raised for a module that is not in the plan, or whose class its style does not support. Starts with the FQN."""


def plan_tensor_parallel(part: nn.Module) -> TensorParallelPlan:
    """Return FQN -> style for every module of a part that TP changes."""
    plan: TensorParallelPlan = {}
    for layer in part.layers:
        is_moe = part.model_args.is_moe(int(layer))
        rows = list_block(part.model_args, moe=is_moe)
        # An MoE layer uses this rank's slice of the sequence without gathering, and another mesh (expert_parallel.py).
        rows = [row for row in rows if row.split not in ("router", "experts")]
        gathered = sorted({row.name.rpartition(".")[0] for row in rows if row.split == "colwise"})
        block = {name: GatheredInput() for name in gathered} | {row.name: STYLES[row.split]() for row in rows}
        plan |= {f"layers.{layer}.{name}": style for name, style in block.items()}
    if part.tok_embeddings is not None:
        plan["tok_embeddings"] = SplitEmbedding()
    if part.output is not None:
        plan |= {"norm": CopiedNorm(), "output": SplitHead()}
    return plan


def apply_tensor_parallel(part: nn.Module, mesh: DeviceMesh, plan: TensorParallelPlan) -> None:
    """Shard the parameters of `part` (on meta) by `plan`, and make its modules compute with the shards.

    Raises MissingFromPlan if a parameter would stay a plain tensor: its gradients would differ between ranks, but
    nothing would sum them.
    """
    for fqn, module in part.named_modules():
        if fqn in plan and plan[fqn].computes and type(module) not in plan[fqn].computes:
            raise MissingFromPlan(
                f"{fqn} is a {type(module).__name__}, but {type(plan[fqn]).__name__} only supports "
                f"{' and '.join(each.__name__ for each in plan[fqn].computes)}. "
                "Write a style for this class, and add it to STYLES (parallel/tensor_parallel.py)"
            )
    tied = part.output is not None and part.tok_embeddings is not None and part.model_args.tie_embeddings
    parallelize_module(part, mesh, plan)
    if tied:  # parallelize_module made a separate DTensor for each module, with equal placements
        part.output.weight = part.tok_embeddings.weight
    elsewhere = {id(parameter) for _, moe in list_moes(part) for parameter in moe.parameters()}
    ordinary = [(fqn, each) for fqn, each in part.named_parameters() if not isinstance(each, DTensor)]
    missing = [fqn for fqn, parameter in ordinary if id(parameter) not in elsewhere]
    if missing:
        raise MissingFromPlan(
            f"{missing[0]} is not a DTensor over tp, because its module is not in the tensor-parallel plan. "
            "Add a row to the table of its block (config/block.py)"
        )


def enable_async_tensor_parallel(mesh: DeviceMesh) -> dict[str, bool]:
    """Enable symmetric memory between the ranks of `mesh`. Returns the torch.compile options for the blocks."""
    with warnings.catch_warnings():
        # torch 2.13 deprecates this function, but its compiler pass still depends on it.
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(mesh.get_group().group_name)
    return {"_micro_pipeline_tp": True}


# ---------------------------------------------------------------- styles: how modules compute with shards


class LocalStyle(ParallelStyle):
    """Base of the styles. A module computes with its local shard of the weight, which is a DTensor over tp."""

    placement: Placement | None = None  # placement of the weight; None: the module has no weight
    computes: tuple[type, ...] = ()  # classes whose forward `compute` replaces; (): it calls the original forward

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Shard the weight and replace `forward`. `parallelize_module` calls this method by this name."""
        if self.placement is not None:
            weight = distribute_tensor(module.weight, device_mesh, [self.placement], src_data_rank=None)
            module.weight = nn.Parameter(weight)
        compute, ranks = self.compute, list_ranks(device_mesh)
        module.forward = lambda *inputs: compute(module, ranks, *inputs)
        return module

    def compute(self, module: nn.Module, ranks: Ranks, x: Tensor) -> Tensor:
        """Replacement for `module.forward`."""
        raise NotImplementedError


class GatheredInput(LocalStyle):
    """All-gathers the input of a module whose linear layers need all tokens: x (B, S/tp, D) -> (B, S, D) inside."""

    def compute(self, module: nn.Module, ranks: Ranks, x: Tensor, *rest) -> Tensor:
        return type(module).forward(module, Gather.apply(x, ranks, 1), *rest)


class ColwiseLinear(LocalStyle):
    """x (B, S, in) -> (B, S, out/tp): computes this rank's output features."""

    placement = Shard(0)
    computes = (nn.Linear, ParallelFloat8Linear)

    def compute(self, module: nn.Module, ranks: Ranks, x: Tensor) -> Tensor:
        return multiply(module, x)


class RowwiseLinear(LocalStyle):
    """x (B, S, in/tp) -> (B, S/tp, out): reduce-scatters the partial sums over input features."""

    placement = Shard(1)
    computes = (nn.Linear, ParallelFloat8Linear)

    def compute(self, module: nn.Module, ranks: Ranks, x: Tensor) -> Tensor:
        return Scatter.apply(multiply(module, x), ranks, 1)


class CopiedNorm(LocalStyle):
    """Norm over this rank's tokens or heads, with a replicated weight."""

    placement = Replicate()
    computes = (nn.RMSNorm,)

    def compute(self, module: nn.Module, ranks: Ranks, x: Tensor) -> Tensor:
        # The gradient covers only this rank's tokens. As a Partial, FSDP all-reduces it over tp.
        return F.rms_norm(x, module.normalized_shape, local_weight(module, Partial()), module.eps)


class SplitEmbedding(LocalStyle):
    """tokens (B, S) -> (B, S/tp, D). Each rank looks up ids in its shard and computes the gradient of these rows."""

    placement = Shard(0)
    computes = (nn.Embedding,)

    def compute(self, module: nn.Module, ranks: Ranks, x: Tensor) -> Tensor:
        weight = local_weight(module)
        row = x - ranks.own * len(weight)
        is_here = (row >= 0) & (row < len(weight))
        found = F.embedding(row.where(is_here, 0), weight) * is_here[:, :, None]
        return Scatter.apply(found, ranks, 1)  # one rank finds each token; the other ranks add zero


class SplitHead(LocalStyle):
    """hidden (B, S/tp, D) -> logits (B, S, V), or with targets the loss, () fp32. The same on every rank."""

    placement = Shard(0)
    computes = (Head,)

    def compute(self, module: nn.Module, ranks: Ranks, x: Tensor, targets: Tensor | None = None) -> Tensor:
        hidden, weight = Gather.apply(x, ranks, 1), local_weight(module)
        if targets is None:
            return GatherVocabulary.apply(F.linear(hidden, weight), ranks)
        return module.chunked_loss(hidden, weight, targets)


STYLES = {  # `split` of a row of config/block.py
    "sequence": CopiedNorm,
    "heads": CopiedNorm,
    "colwise": ColwiseLinear,
    "rowwise": RowwiseLinear,
}


def multiply(linear: nn.Linear, x: Tensor) -> Tensor:
    """Multiply x by this rank's shard of the weight."""
    weight = local_weight(linear)
    return linear.multiply(x, weight) if isinstance(linear, ParallelFloat8Linear) else F.linear(x, weight)


def local_weight(module: nn.Module, gradient: Placement | None = None) -> Tensor:
    """Return this rank's shard of the weight. `gradient`: placement of the gradient if not the weight's."""
    if torch.compiler.is_compiling():
        return module.weight.to_local(grad_placements=[gradient] if gradient else None)
    return LocalWeight.apply(module.weight, gradient)


class LocalWeight(torch.autograd.Function):
    """Local shard of a weight. DTensor.to_local does the same, but takes three times as long in backward."""

    @staticmethod
    def forward(ctx, weight: DTensor, gradient: Placement | None) -> Tensor:
        ctx.spec = replace(weight._spec, placements=(gradient,)) if gradient else weight._spec
        return weight._local_tensor.detach()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[DTensor, None]:
        return DTensor(grad, ctx.spec, requires_grad=False), None


# ---------------------------------------------------------------- loss with a sharded vocabulary


def build_chunked_loss(chunk_tokens: int, mesh: DeviceMesh, *, shard_loss: bool) -> ChunkedLoss:
    """Build the chunked loss for this rank of `mesh` (tp, of any size). `chunk_tokens` 0: one chunk of all tokens."""
    if mesh.size() == 1:
        return ChunkedLoss(chunk_tokens)
    return (ShardedLoss if shard_loss else GatheredLoss)(chunk_tokens, list_ranks(mesh))


class LossOfShard(ChunkedLoss):
    """Base of both losses: uses this rank's rows of the weight, so the gradient of `hidden` is a partial sum."""

    def __init__(self, chunk_tokens: int, ranks: Ranks):
        super().__init__(chunk_tokens)
        self.ranks = ranks


class ShardedLoss(LossOfShard):
    """Loss parallel: logits stay sharded."""

    def differentiate(self, logits: Tensor, targets: Tensor, *, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
        first_id = self.ranks.own * logits.shape[1]  # vocabulary shards have equal sizes
        return super().differentiate(logits, targets, with_gradient=with_gradient, first_id=first_id)

    def combine(self, log_total: Tensor, of_target: Tensor) -> tuple[Tensor, Tensor]:
        both = all_gather(torch.stack((log_total, of_target))[None], self.ranks, dim=0)  # (tp, 2, n, 1)
        log_totals, of_targets = both.unbind(1)
        return log_totals.logsumexp(0), of_targets.sum(0)


class GatheredLoss(LossOfShard):
    """No loss parallel: gathers all logits of a chunk, and keeps the gradient of the local shard."""

    def differentiate(self, logits: Tensor, targets: Tensor, *, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
        whole = all_gather(logits, self.ranks, dim=1)  # (n, V)
        loss, gradient = super().differentiate(whole, targets, with_gradient=with_gradient)
        return loss, gradient.chunk(self.ranks.n, dim=1)[self.ranks.own] if with_gradient else None
