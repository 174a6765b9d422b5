"""Tensor parallel with sequence parallel: split each matmul of a block over mesh dim `tp` (drawn for tp=2).

    full tensor                 tp rank 0      tp rank 1       placement
    wq, wk, wv   (H*E, D)       top half       bottom half     Shard(0)    colwise: half of the heads
    wo           (D, H*E)       left half      right half      Shard(1)    rowwise: outputs are partial sums
    w1, w3       (F, D)         top half       bottom half     Shard(0)    colwise
    w2           (D, F)         left half      right half      Shard(1)    rowwise
    embedding, output (V, D)    top half       bottom half     Shard(0)    half of the vocabulary
    norm weights (D,)           all            all             Replicate
    x            (B, S, D)      S[:S/2]        S[S/2:]         Shard(1)    between the matmuls: sequence parallel

"Colwise" splits *output features*; nn.Linear stores (out, in), so that is `Shard(0)`. Rowwise splits input features.

Traffic per block, forward: 2 all-gathers (before attention, before feed-forward) and 2 reduce-scatters (after them) of
P = B*S*D*2 bytes in bf16; each moves P(n-1)/n per rank. Backward mirrors them and gathers the two inputs again.
Embedding: one reduce-scatter; head: one all-gather of P, and with loss parallel only (B, S) numbers beside it.

The chunked loss (model/head.py) of a head whose vocabulary is split, for one chunk of n tokens:

                      tp rank 0                       tp rank 1
    logits (n, V/2)   of the ids below V/2            of the ids from V/2 on
    exchanged         log of its sum of exponentials, and the target's logit or 0: 2 numbers a token
    loss ()           the same on both
    grad_hidden       what its ids contribute         what its ids contribute      partial sums, added in backward
    grad_weight       top half                        bottom half

Traffic: one all-gather of tp*n*8 bytes per chunk, waited for at once; in backward the reduce-scatter of grad_hidden,
which the plain head has too. With parallelism.disable_loss_parallel the logits themselves are gathered, N*V*2 bytes in
bf16 for all chunks together, and every rank computes the whole loss.

With parallelism.enable_async_tensor_parallel inductor cuts a matmul and its collective into tp pieces: while one piece
is computed, the next is copied straight from the memory of another GPU. That path never ran here: it needs two GPUs.

Sources: Megatron-LM arXiv:1909.08053, section 3 for the loss; sequence parallel arXiv:2205.05198.
Effect: parameters become DTensors; FQNs and the shapes seen by optimizer and checkpoint do not change.
"""

import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from torchtitan_lite.config.flavors import list_block
from torchtitan_lite.model.head import ChunkedLoss, Head

collectives = torch.ops._c10d_functional  # compile takes them as they are

Plan = dict[str, ParallelStyle]


class MissingFromPlan(ValueError):
    """A parameter whose module the tensor-parallel plan does not name. The message starts with its FQN."""


def plan_tensor_parallel(part: nn.Module, *, shard_loss: bool) -> Plan:
    """Return FQN -> style for every module of a part that computes differently under TP."""
    sequence, whole = Shard(1), Replicate()  # of activations (B, S, D)
    block: Plan = {
        "attention": PrepareModuleInput(  # all-gathers x (B, S/tp, D) -> (B, S, D); rotation and doc_ids are whole
            input_layouts=(sequence, None, None), desired_input_layouts=(whole, None, None)
        ),
        "feed_forward": PrepareModuleInput(input_layouts=sequence, desired_input_layouts=whole),
    }
    styles = {
        "sequence": SequenceParallel,
        "heads": partial(SequenceParallel, use_local_output=True),  # the second dim of its input is heads, not tokens
        "colwise": ColwiseParallel,
        "rowwise": partial(RowwiseParallel, output_layouts=sequence),  # reduce-scatters the partial sums
    }
    block |= {module.name: styles[module.tp]() for module in list_block(part.model_args)}
    plan: Plan = {f"layers.{layer}.{name}": style for layer in part.layers for name, style in block.items()}
    if part.tok_embeddings is not None:
        plan["tok_embeddings"] = RowwiseParallel(input_layouts=whole, output_layouts=sequence)
    if part.output is not None:
        plan["norm"] = SequenceParallel()
        plan["output"] = VocabularyParallelHead()
        if not shard_loss:  # all-gathers the logits: B*S*V*2 bytes, which is what loss parallel saves
            plan["output.token_loss"] = PrepareModuleInput(
                input_layouts=(Shard(-1), None), desired_input_layouts=(whole, None), use_local_output=True
            )
    return plan


def apply_tensor_parallel(part: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    """Shard the parameters of `part` (on meta) by `plan` and hook the collectives in.

    Raises MissingFromPlan if a parameter would stay an ordinary tensor: its gradient would differ from rank to rank,
    and nothing would add the gradients up.
    """
    tied = part.output is not None and part.tok_embeddings is not None and part.model_args.tie_embeddings
    parallelize_module(part, mesh, plan)
    if tied:  # each of the two modules got a DTensor of its own, with equal placements
        part.output.weight = part.tok_embeddings.weight
    missing = [fqn for fqn, parameter in part.named_parameters() if not isinstance(parameter, DTensor)]
    if missing:
        others = f", like {len(missing) - 1} others" if len(missing) > 1 else ""
        raise MissingFromPlan(
            f"{missing[0]} is no tensor of mesh dim tp{others}: the tensor-parallel plan does not name its module. "
            "Give it a row in the table of its block (config/flavors.py)"
        )
    if part.tok_embeddings is not None:
        part.tok_embeddings.register_forward_hook(wait_for_collective)


def wait_for_collective(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
    """Turn the embedding's output into an ordinary tensor.

    It is an AsyncCollectiveTensor, which waits when first used. If that first use is inside a compiled block, gradients
    are wrong without an error (of tok_embeddings by 100 %, torch 2.13). A copy is a use.
    """
    return output.clone()


def loss_context(mesh: DeviceMesh, *, shard_loss: bool) -> AbstractContextManager:
    """Context manager of forward and backward: cross entropy of logits that are sharded by vocabulary.

    Three all-reduces of (B, S) numbers over tp (maximum, sum of exponentials, the target's logit) replace an
    all-gather of the logits (B, S, V).
    """
    return loss_parallel() if shard_loss and mesh.size() > 1 else nullcontext()


def enable_async_tensor_parallel(mesh: DeviceMesh) -> dict[str, bool]:
    """Let the ranks of `mesh` write into one another's memory. Returns the options of torch.compile for the blocks."""
    with warnings.catch_warnings():
        # torch 2.13 calls this function superfluous; its compiler pass still looks for what it does.
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(mesh.get_group().group_name)
    return {"_micro_pipeline_tp": True}


class VocabularyParallelHead(ParallelStyle):
    """Split the head's weight by vocabulary: each rank computes logits (B, S, V/tp) of its ids.

    A style of its own, because torch's ColwiseParallel lays out what a linear layer returns, and ours returns a loss.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self.shard_weight, self.gather_sequence, self.make_whole)

    @staticmethod
    def shard_weight(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        if isinstance(module, Head):
            module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)]))

    @staticmethod
    def gather_sequence(module: nn.Module, inputs: tuple, mesh: DeviceMesh) -> tuple:
        """All-gather the hidden states over tp: (B, S/tp, D) -> (B, S, D)."""
        hidden, *targets = inputs
        return hidden.redistribute(mesh, [Replicate()]), *targets

    @staticmethod
    def make_whole(module: nn.Module, output: Tensor, mesh: DeviceMesh) -> Tensor:
        """Return an ordinary tensor: the loss, the same on every rank, or the gathered logits."""
        return output.full_tensor().clone() if isinstance(output, DTensor) else output  # FSDP wants no view


# ---------------------------------------------------------------- chunked loss of a split vocabulary


def build_chunked_loss(chunk_tokens: int, mesh: DeviceMesh, *, shard_loss: bool) -> ChunkedLoss:
    """Build the chunked loss of this rank of `mesh` (tp, of any size)."""
    if mesh.size() == 1:
        return ChunkedLoss(chunk_tokens)
    return (ShardedLoss if shard_loss else GatheredLoss)(chunk_tokens, mesh)


class LossOfShard(ChunkedLoss):
    """Base of both losses: this rank's rows of the weight, and partial sums as the gradient of `hidden`."""

    def __init__(self, chunk_tokens: int, mesh: DeviceMesh):
        super().__init__(chunk_tokens)
        self.rank, self.n_ranks, self.group_name = mesh.get_local_rank(), mesh.size(), mesh.get_group().group_name

    def forward(self, hidden: DTensor, weight: DTensor, targets: Tensor) -> Tensor:
        """hidden (B, S, D) replicated, weight (V, D) sharded by rows, targets (B, S) -> () fp32. Collective."""
        return super().forward(hidden.to_local(grad_placements=[Partial()]), weight.to_local(), targets)

    def gather(self, own: Tensor) -> Tensor:
        """All-gather along a new first dim, (...) -> (tp, ...)."""
        gathered = collectives.all_gather_into_tensor(own.contiguous(), self.n_ranks, self.group_name)
        return collectives.wait_tensor(gathered).view(self.n_ranks, *own.shape)


class ShardedLoss(LossOfShard):
    """Loss parallel: logits stay on the rank that computes them."""

    def __init__(self, chunk_tokens: int, mesh: DeviceMesh):
        super().__init__(chunk_tokens, mesh)
        self.shard = self.rank

    def combine(self, log_total: Tensor, of_target: Tensor) -> tuple[Tensor, Tensor]:
        log_totals, of_targets = self.gather(torch.stack((log_total, of_target))).unbind(1)  # (tp, n, 1) each
        return log_totals.logsumexp(0), of_targets.sum(0)


class GatheredLoss(LossOfShard):
    """Without loss parallel: gathers all logits of a chunk, and keeps the gradient of its own."""

    def differentiate(self, logits: Tensor, targets: Tensor, *, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
        whole = self.gather(logits).transpose(0, 1).flatten(1)  # (n, V): ranks hold neighbouring ids
        loss, gradient = super().differentiate(whole, targets, with_gradient=with_gradient)
        return loss, gradient.chunk(self.n_ranks, dim=1)[self.rank] if with_gradient else None
