"""Tensor parallel with sequence parallel: split each matmul of a block over mesh dim `tp`.

    module                   style          weight on each rank      output           collective in forward
    tok_embeddings           SplitEmbedding (V/tp, D)    Shard(0)    (B, S/tp, D)     reduce-scatter
    attention_norm           CopiedModule   (D,)         Replicate   (B, S/tp, D)
    attention                GatheredInput                           (B, S, D)        all-gather, before its modules
    attention.wq, wk, wv     ColwiseLinear  (H*E/tp, D)  Shard(0)    (B, S, H*E/tp)
    attention.wo             RowwiseLinear  (D, H*E/tp)  Shard(1)    (B, S/tp, D)     reduce-scatter of partial sums
    ffn_norm                 CopiedModule   (D,)         Replicate   (B, S/tp, D)
    feed_forward             GatheredInput                           (B, S, D)        all-gather, before its modules
    feed_forward.w1, w3      ColwiseLinear  (F/tp, D)    Shard(0)    (B, S, F/tp)
    feed_forward.w2          RowwiseLinear  (D, F/tp)    Shard(1)    (B, S/tp, D)     reduce-scatter of partial sums
    norm                     CopiedModule   (D,)         Replicate   (B, S/tp, D)
    output                   SplitHead      (V/tp, D)    Shard(0)    logits or loss   all-gather of the sequence

"Colwise" splits *output features*; nn.Linear stores (out, in), so that is `Shard(0)`. Rowwise splits input features.

Weights are DTensors, so the optimizer and checkpoints see one model. Activations are plain tensors: each module
computes with its local shard of the weight, and communicates through the functions in exchange.py.

Traffic per block: 2 all-gathers and 2 reduce-scatters in forward, the same in backward; each moves P(n-1)/n per rank,
P = B*S*D*2 bytes in bf16. Recompute repeats the collectives whose outputs it does not save. The embedding adds one
reduce-scatter and the head one all-gather, and the reverse in backward. The weight gradient of a norm covers only the
tokens of one rank, so FSDP all-reduces it over tp (D*4 bytes) before the reduction over data-parallel ranks. A bias
of a colwise layer is split with its output; a rowwise layer adds its bias once, after the reduce-scatter.

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
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from torchtitan_lite.config.block import list_block, list_ends, list_gathered
from torchtitan_lite.model.head import ChunkedLoss, Head
from torchtitan_lite.model.moe import list_moes
from torchtitan_lite.parallel.exchange import (
    Gather,
    GatherVocabulary,
    Ranks,
    Scatter,
    all_gather,
    list_ranks,
)
from torchtitan_lite.parallel.float8 import ParallelFloat8Linear
from torchtitan_lite.parallel.pipeline import is_tied_inside

TensorParallelPlan = dict[str, "LocalStyle"]


class MissingFromPlan(ValueError):
    """Raised for a module that is not in the plan, or whose class its style does not support. Starts with the FQN."""


def plan_tensor_parallel(part: nn.Module) -> TensorParallelPlan:
    """Return FQN -> style for every module of a part that TP changes."""
    plan: TensorParallelPlan = {}
    for layer in part.layers:
        rows = list_block(part.model_args, moe=part.model_args.is_moe(int(layer)))
        # An MoE layer uses this rank's slice of the sequence without gathering, and another mesh (expert_parallel.py).
        rows = [row for row in rows if row.kind not in ("router", "experts")]
        gathered = list_gathered(rows)
        block = {name: GatheredInput() for name in gathered} | {
            row.name: STYLES[row.kind, row.split]() for row in rows
        }
        plan |= {f"layers.{layer}.{name}": style for name, style in block.items()}
    ends = {row.name: STYLES[row.kind, row.split]() for row in list_ends(part.model_args)}
    return plan | {name: style for name, style in ends.items() if getattr(part, name) is not None}


def apply_tensor_parallel(part: nn.Module, mesh: DeviceMesh, plan: TensorParallelPlan) -> None:
    """Shard the parameters of `part` (on meta) by `plan`, and make its modules compute with the shards.

    Raises MissingFromPlan if a parameter would stay a plain tensor: its gradients would differ between ranks, but
    nothing would sum them.
    """
    for fqn, module in part.named_modules():
        if fqn in plan and not plan[fqn].serves(module):
            raise MissingFromPlan(
                f"{fqn} is a {type(module).__name__}, but {type(plan[fqn]).__name__} only supports "
                f"{' and '.join(each.__name__ for each in plan[fqn].computes)}. "
                "Write a style for this class, and add it to STYLES (parallel/tensor_parallel.py)"
            )
    tied = is_tied_inside(part)
    parallelize_module(part, mesh, plan)
    if tied:  # parallelize_module made a separate DTensor for each module, with equal placements
        part.output.weight = part.tok_embeddings.weight
    elsewhere = {id(parameter) for _, moe in list_moes(part) for parameter in moe.parameters()}
    ordinary = [
        (fqn, each) for fqn, each in part.named_parameters() if not isinstance(each, DTensor)
    ]
    missing = [fqn for fqn, parameter in ordinary if id(parameter) not in elsewhere]
    if missing:
        raise MissingFromPlan(
            f"{missing[0]} is not a DTensor over tp, because its module is not in the tensor-parallel plan. "
            f"Add a row to the table of the model (models/{part.model_args.name}/table.py)"
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

    placements: dict[str, Placement] = {}  # of weight and bias
    computes: tuple[
        type, ...
    ] = ()  # classes whose forward `compute` replaces; (): it calls the original forward

    def serves(self, module: nn.Module) -> bool:
        return not self.computes or any(
            type(module).forward is each.forward for each in self.computes
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Shard the parameters and replace `forward`. `parallelize_module` calls this method by this name."""
        self.shard(module, device_mesh)
        compute, ranks = self.compute, list_ranks(device_mesh)
        module.forward = lambda *inputs: compute(module, ranks, *inputs)
        return module

    def shard(self, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, placement in self.placements.items():
            if (whole := getattr(module, name, None)) is not None:
                own = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(own))

    def compute(self, module: nn.Module, ranks: Ranks, x: Tensor) -> Tensor:
        """Replacement for `module.forward`."""
        raise NotImplementedError


class GatheredInput(LocalStyle):
    """All-gathers the input of a module whose linear layers need all tokens: x (B, S/tp, D) -> (B, S, D) inside."""

    def compute(self, module: nn.Module, ranks: Ranks, x: Tensor, *rest) -> Tensor:
        return type(module).forward(module, Gather.apply(x, ranks, 1), *rest)


class ColwiseLinear(LocalStyle):
    """x (B, S, in) -> (B, S, out/tp): computes this rank's output features."""

    placements = {"weight": Shard(0), "bias": Shard(0)}
    computes = (nn.Linear, ParallelFloat8Linear)

    def compute(self, module: nn.Module, ranks: Ranks, x: Tensor) -> Tensor:
        return multiply(module, x, None if module.bias is None else local_tensor(module.bias))


class RowwiseLinear(LocalStyle):
    """x (B, S, in/tp) -> (B, S/tp, out): reduce-scatters the partial sums over input features, then adds the bias."""

    placements = {"weight": Shard(1), "bias": Replicate()}
    computes = (nn.Linear, ParallelFloat8Linear)

    def compute(self, module: nn.Module, ranks: Ranks, x: Tensor) -> Tensor:
        own = Scatter.apply(multiply(module, x), ranks, 1)
        return own if module.bias is None else own + local_tensor(module.bias)


class CopiedModule(LocalStyle):
    """Any module that works on each token or head by itself: its own forward, with replicated parameters."""

    placements = {"weight": Replicate(), "bias": Replicate()}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Shard the parameters, and let `forward` read this rank's tensors under their names."""
        self.shard(module, device_mesh)
        names = [name for name, _ in module.named_parameters(recurse=False)]
        cls = type(module)
        module.__class__ = type(
            f"Local{cls.__name__}", (cls,), {name: read_locally(name) for name in names}
        )
        return module


class SplitElementwise(CopiedModule):
    """Any module that works on each of this rank's features by itself, such as a scale inside a feed-forward."""

    placements = {"weight": Shard(0), "bias": Shard(0)}


class SplitEmbedding(LocalStyle):
    """tokens (B, S) -> (B, S/tp, D). Each rank looks up ids in its shard and computes the gradient of these rows."""

    placements = {"weight": Shard(0)}
    computes = (nn.Embedding,)

    def compute(self, module: nn.Module, ranks: Ranks, x: Tensor) -> Tensor:
        weight = local_tensor(module.weight)
        row = x - ranks.own * len(weight)
        is_here = (row >= 0) & (row < len(weight))
        found = F.embedding(row.where(is_here, 0), weight) * is_here[:, :, None]
        return Scatter.apply(found, ranks, 1)  # one rank finds each token; the other ranks add zero


class SplitHead(LocalStyle):
    """hidden (B, S/tp, D) -> logits (B, S, V), or with targets the loss, () fp32. The same on every rank."""

    placements = {"weight": Shard(0)}
    computes = (Head,)

    def compute(
        self, module: nn.Module, ranks: Ranks, x: Tensor, targets: Tensor | None = None
    ) -> Tensor:
        hidden, weight = Gather.apply(x, ranks, 1), local_tensor(module.weight)
        if targets is None:
            return GatherVocabulary.apply(F.linear(hidden, weight), ranks)
        return module.chunked_loss(hidden, weight, targets)


STYLES = {  # (kind, split) of a row in the table of a model; check_table (config/checks.py) knows the same pairs
    ("linear", "colwise"): ColwiseLinear,
    ("linear", "rowwise"): RowwiseLinear,
    ("linear", "sequence"): CopiedModule,
    ("linear", "vocabulary"): SplitHead,
    ("norm", "sequence"): CopiedModule,
    ("norm", "heads"): CopiedModule,
    ("norm", "colwise"): SplitElementwise,
    ("embedding", "vocabulary"): SplitEmbedding,
}


def multiply(linear: nn.Linear, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x by this rank's shard of the weight, and add `bias`."""
    weight = local_tensor(linear.weight)
    if isinstance(linear, ParallelFloat8Linear):
        return linear.multiply(x, weight, bias)
    return F.linear(x, weight, bias)


def read_locally(name: str) -> property:
    """Return a property that reads this rank's tp shard of a parameter of that name.

    FSDP reads its own shards by name too, outside of forward. These are on a mesh with its dims.
    """

    def read(module: nn.Module) -> Tensor:
        parameter = module._parameters[name]
        return local_tensor(parameter) if parameter.device_mesh.ndim == 1 else parameter

    return property(read)


def local_tensor(parameter: DTensor) -> Tensor:
    """Return this rank's shard of a parameter."""
    if torch.compiler.is_compiling():
        return parameter.to_local(grad_placements=find_gradient_placements(parameter))
    return LocalTensor.apply(parameter)


def find_gradient_placements(parameter: DTensor) -> tuple[Placement, ...]:
    """Return the placement of a gradient over tp, which covers only this rank's tokens if all ranks have the parameter.

    FSDP all-reduces a Partial over tp.
    """
    return tuple(Partial() if each.is_replicate() else each for each in parameter.placements)


class LocalTensor(torch.autograd.Function):
    """Local shard of a parameter. DTensor.to_local does the same, but takes three times as long in backward."""

    @staticmethod
    def forward(ctx, parameter: DTensor) -> Tensor:
        ctx.spec = replace(parameter._spec, placements=find_gradient_placements(parameter))
        return parameter._local_tensor.detach()

    @staticmethod
    def backward(ctx, grad: Tensor) -> DTensor:
        return DTensor(grad, ctx.spec, requires_grad=False)


# ---------------------------------------------------------------- loss with a sharded vocabulary


def build_chunked_loss(
    head: Head, chunk_tokens: int, mesh: DeviceMesh, *, shard_loss: bool
) -> ChunkedLoss:
    """Build the chunked loss for this rank of `mesh` (tp, of any size). `chunk_tokens` 0: one chunk of all tokens."""
    if mesh.size() == 1:
        return ChunkedLoss(chunk_tokens, head.weigh_total)
    kind = ShardedLoss if shard_loss else GatheredLoss
    return kind(chunk_tokens, head.weigh_total, list_ranks(mesh))


class LossOfShard(ChunkedLoss):
    """Base of both losses: uses this rank's rows of the weight, so the gradient of `hidden` is a partial sum."""

    def __init__(self, chunk_tokens: int, weigh_total: Callable, ranks: Ranks):
        super().__init__(chunk_tokens, weigh_total)
        self.ranks = ranks


class ShardedLoss(LossOfShard):
    """Loss parallel: logits stay sharded."""

    def differentiate(
        self, logits: Tensor, targets: Tensor, *, with_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        first_id = self.ranks.own * logits.shape[1]  # vocabulary shards have equal sizes
        return super().differentiate(
            logits, targets, with_gradient=with_gradient, first_id=first_id
        )

    def combine(self, log_total: Tensor, of_target: Tensor) -> tuple[Tensor, Tensor]:
        both = all_gather(
            torch.stack((log_total, of_target))[None], self.ranks, dim=0
        )  # (tp, 2, n, 1)
        log_totals, of_targets = both.unbind(1)
        return log_totals.logsumexp(0), of_targets.sum(0)


class GatheredLoss(LossOfShard):
    """No loss parallel: gathers all logits of a chunk, and keeps the gradient of the local shard."""

    def differentiate(
        self, logits: Tensor, targets: Tensor, *, with_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        whole = all_gather(logits, self.ranks, dim=1)  # (n, V)
        loss, gradient = super().differentiate(whole, targets, with_gradient=with_gradient)
        return loss, gradient.chunk(self.ranks.n, dim=1)[self.ranks.own] if with_gradient else None
