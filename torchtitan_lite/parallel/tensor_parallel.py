"""Tensor parallel with sequence parallel: split each matmul of a block over mesh dim `tp`.

    module                   style          its weight on a rank     x behind it      collective in forward
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

Weights are DTensors at rest, so that optimizer and checkpoints see one model. Activations are ordinary tensors: each
module computes on its slice of the weight, and hands over what others need by the functions of exchange.py.

Traffic per block: 2 all-gathers and 2 reduce-scatters in forward, the same in backward; each moves P(n-1)/n per rank,
P = B*S*D*2 bytes in bf16. Recompute repeats those whose outputs it does not keep. The embedding costs one
reduce-scatter, the head one all-gather, and in backward the reverse. The gradient of a norm's weight is a sum over the
tokens of one rank: FSDP all-reduces it over tp (D*4 bytes) before it reduces it over data-parallel ranks.

The loss of a head whose vocabulary is split, for one chunk of n tokens (of all tokens with loss_chunk_tokens = 0):

                      tp rank 0                       tp rank 1
    logits (n, V/2)   of the ids below V/2            of the ids from V/2 on
    exchanged         log of its sum of exponentials, and the target's logit or 0: 2 numbers a token
    loss ()           the same on both
    grad_hidden       what its ids contribute         what its ids contribute      partial sums, added in backward
    grad_weight       top half                        bottom half

Traffic: one all-gather of tp*n*8 bytes per chunk, waited for at once. With parallelism.disable_loss_parallel the logits
themselves are gathered, N*V*2 bytes in bf16 for all chunks together, and every rank computes the whole loss.

With parallelism.enable_async_tensor_parallel inductor cuts a matmul and its collective into tp pieces: while one piece
is computed, the next is copied straight from the memory of another GPU. That path never ran here: it needs two GPUs.

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
    """A module that the plan does not name, or that its style cannot compute. The message begins with the FQN."""


def plan_tensor_parallel(part: nn.Module) -> TensorParallelPlan:
    """Return FQN -> style for every module of a part that computes differently under TP."""
    plan: TensorParallelPlan = {}
    for layer in part.layers:
        is_moe = part.model_args.is_moe(int(layer))
        rows = list_block(part.model_args, moe=is_moe)
        # An MoE layer gets this rank's slice of the sequence as it is, and has another mesh: expert_parallel.py.
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
    """Shard the parameters of `part` (on meta) by `plan`, and let its modules compute on the slices.

    Raises MissingFromPlan if a parameter would stay an ordinary tensor: its gradient would differ from rank to rank,
    and nothing would add the gradients up.
    """
    for fqn, module in part.named_modules():
        if fqn in plan and plan[fqn].computes and type(module) not in plan[fqn].computes:
            raise MissingFromPlan(
                f"{fqn} is a {type(module).__name__}, and {type(plan[fqn]).__name__} computes "
                f"{' and '.join(each.__name__ for each in plan[fqn].computes)}. "
                "Write a style for it, and name it in STYLES (parallel/tensor_parallel.py)"
            )
    tied = part.output is not None and part.tok_embeddings is not None and part.model_args.tie_embeddings
    parallelize_module(part, mesh, plan)
    if tied:  # each of the two modules got a DTensor of its own, with equal placements
        part.output.weight = part.tok_embeddings.weight
    elsewhere = {id(parameter) for _, moe in list_moes(part) for parameter in moe.parameters()}
    ordinary = [(fqn, each) for fqn, each in part.named_parameters() if not isinstance(each, DTensor)]
    missing = [fqn for fqn, parameter in ordinary if id(parameter) not in elsewhere]
    if missing:
        raise MissingFromPlan(
            f"{missing[0]} is no tensor of mesh dim tp: the tensor-parallel plan does not name its module. "
            "Give it a row in the table of its block (config/block.py)"
        )


def enable_async_tensor_parallel(mesh: DeviceMesh) -> dict[str, bool]:
    """Let the ranks of `mesh` write into one another's memory. Returns the options of torch.compile for the blocks."""
    with warnings.catch_warnings():
        # torch 2.13 calls this function superfluous; its compiler pass still looks for what it does.
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(mesh.get_group().group_name)
    return {"_micro_pipeline_tp": True}


# ---------------------------------------------------------------- how modules compute on slices


class LocalStyle(ParallelStyle):
    """A module that computes on this rank's slice of its weight, a DTensor over tp."""

    placement: Placement | None = None  # of the weight; None: the module has no weight of its own
    computes: tuple[type, ...] = ()  # classes whose forward `compute` replaces; (): it calls the old forward

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """torch's name for what `parallelize_module` calls."""
        if self.placement is not None:
            weight = distribute_tensor(module.weight, device_mesh, [self.placement], src_data_rank=None)
            module.weight = nn.Parameter(weight)
        compute, ranks = self.compute, list_ranks(device_mesh)
        module.forward = lambda *inputs: compute(module, ranks, *inputs)
        return module

    def compute(self, module: nn.Module, ranks: Ranks, x: Tensor) -> Tensor:
        """Replace `module.forward`."""
        raise NotImplementedError


class GatheredInput(LocalStyle):
    """A module whose linear layers need all tokens: x is (B, S/tp, D) outside and (B, S, D) inside."""

    def compute(self, module: nn.Module, ranks: Ranks, x: Tensor, *rest) -> Tensor:
        return type(module).forward(module, Gather.apply(x, ranks, 1), *rest)


class ColwiseLinear(LocalStyle):
    """x (B, S, in) -> (B, S, out/tp): this rank's output features."""

    placement = Shard(0)
    computes = (nn.Linear, ParallelFloat8Linear)

    def compute(self, module: nn.Module, ranks: Ranks, x: Tensor) -> Tensor:
        return multiply(module, x)


class RowwiseLinear(LocalStyle):
    """x (B, S, in/tp) -> (B, S/tp, out): sums the products of all ranks' input features."""

    placement = Shard(1)
    computes = (nn.Linear, ParallelFloat8Linear)

    def compute(self, module: nn.Module, ranks: Ranks, x: Tensor) -> Tensor:
        return Scatter.apply(multiply(module, x), ranks, 1)


class CopiedNorm(LocalStyle):
    """A norm of this rank's tokens, or heads, with a weight that all ranks have."""

    placement = Replicate()
    computes = (nn.RMSNorm,)

    def compute(self, module: nn.Module, ranks: Ranks, x: Tensor) -> Tensor:
        # The gradient is that of this rank's tokens. Marked as a partial sum: FSDP all-reduces it over tp.
        return F.rms_norm(x, module.normalized_shape, local_weight(module, Partial()), module.eps)


class SplitEmbedding(LocalStyle):
    """tokens (B, S) -> (B, S/tp, D). Each rank looks its own ids up; its gradient is of these rows only."""

    placement = Shard(0)
    computes = (nn.Embedding,)

    def compute(self, module: nn.Module, ranks: Ranks, x: Tensor) -> Tensor:
        weight = local_weight(module)
        row = x - ranks.own * len(weight)
        is_here = (row >= 0) & (row < len(weight))
        found = F.embedding(row.where(is_here, 0), weight) * is_here[:, :, None]
        return Scatter.apply(found, ranks, 1)  # each token has been found by one rank, the others add zero


class SplitHead(LocalStyle):
    """hidden (B, S/tp, D) -> logits (B, S, V), or the loss of the targets, () fp32, the same on every rank."""

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
    """Multiply x by this rank's slice of the weight."""
    weight = local_weight(linear)
    return linear.multiply(x, weight) if isinstance(linear, ParallelFloat8Linear) else F.linear(x, weight)


def local_weight(module: nn.Module, gradient: Placement | None = None) -> Tensor:
    """Return this rank's slice of the weight. `gradient`: placement of the gradient, if not that of the weight."""
    if torch.compiler.is_compiling():
        return module.weight.to_local(grad_placements=[gradient] if gradient else None)
    return LocalWeight.apply(module.weight, gradient)


class LocalWeight(torch.autograd.Function):
    """This rank's slice of a weight. DTensor.to_local does the same, and takes three times as long in backward."""

    @staticmethod
    def forward(ctx, weight: DTensor, gradient: Placement | None) -> Tensor:
        ctx.spec = replace(weight._spec, placements=(gradient,)) if gradient else weight._spec
        return weight._local_tensor.detach()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[DTensor, None]:
        return DTensor(grad, ctx.spec, requires_grad=False), None


# ---------------------------------------------------------------- the loss of a split vocabulary


def build_chunked_loss(chunk_tokens: int, mesh: DeviceMesh, *, shard_loss: bool) -> ChunkedLoss:
    """Build the chunked loss of this rank of `mesh` (tp, of any size). `chunk_tokens` 0: one chunk of all tokens."""
    if mesh.size() == 1:
        return ChunkedLoss(chunk_tokens)
    return (ShardedLoss if shard_loss else GatheredLoss)(chunk_tokens, list_ranks(mesh))


class LossOfShard(ChunkedLoss):
    """Base of both losses. It holds this rank's rows of the weight; the gradient of `hidden` is a partial sum."""

    def __init__(self, chunk_tokens: int, ranks: Ranks):
        super().__init__(chunk_tokens)
        self.ranks = ranks


class ShardedLoss(LossOfShard):
    """Loss parallel: logits stay on the rank that computes them."""

    def differentiate(self, logits: Tensor, targets: Tensor, *, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
        first_id = self.ranks.own * logits.shape[1]  # shards of the vocabulary are equal
        return super().differentiate(logits, targets, with_gradient=with_gradient, first_id=first_id)

    def combine(self, log_total: Tensor, of_target: Tensor) -> tuple[Tensor, Tensor]:
        both = all_gather(torch.stack((log_total, of_target))[None], self.ranks, dim=0)  # (tp, 2, n, 1)
        log_totals, of_targets = both.unbind(1)
        return log_totals.logsumexp(0), of_targets.sum(0)


class GatheredLoss(LossOfShard):
    """Without loss parallel: gathers all logits of a chunk, and keeps the gradient of its local shard."""

    def differentiate(self, logits: Tensor, targets: Tensor, *, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
        whole = all_gather(logits, self.ranks, dim=1)  # (n, V): ranks hold neighboring ids
        loss, gradient = super().differentiate(whole, targets, with_gradient=with_gradient)
        return loss, gradient.chunk(self.ranks.n, dim=1)[self.ranks.own] if with_gradient else None
