"""Tensor parallel with sequence parallel: split each matmul of a block over mesh dim `tp`.

    module                style               weight on each rank     output          collective in forward
    tok_embeddings        SplitEmbedding      (V/tp, D)    Shard(0)   (B, S/tp, D)    reduce-scatter
    attention_norm        SequenceParallel    (D,)         Replicate  (B, S/tp, D)
    attention             PrepareModuleInput                          (B, S, D)       all-gather, before its modules
    attention.wq          ColwiseParallel     (H*E/tp, D)  Shard(0)   (B, S, H*E/tp)
    attention.wk, wv      ColwiseParallel     (K*E/tp, D)  Shard(0)   (B, S, K*E/tp)  K < tp: shared_heads.py
    attention.wo          RowwiseParallel     (D, H*E/tp)  Shard(1)   (B, S/tp, D)    reduce-scatter of partial sums
    ffn_norm              SequenceParallel    (D,)         Replicate  (B, S/tp, D)
    feed_forward          PrepareModuleInput                          (B, S, D)       all-gather, before its modules
    feed_forward.w1, w3   ColwiseParallel     (F/tp, D)    Shard(0)   (B, S, F/tp)
    feed_forward.w2       RowwiseParallel     (D, F/tp)    Shard(1)   (B, S/tp, D)    reduce-scatter of partial sums
    norm                  SequenceParallel    (D,)         Replicate  (B, S/tp, D)
    output                SplitHead           (V/tp, D)    Shard(0)   loss ()         all-gather of the sequence

torch has classes with the same names: SequenceParallel, PrepareModuleInput, ColwiseParallel and RowwiseParallel.
torch's classes compute with DTensors, which take time on the host (dtensor.py). The classes in this file compute with
plain tensors. "Colwise" splits *output features*; nn.Linear stores (out, in), so that is `Shard(0)`. Rowwise splits
input features.

Weights are DTensors, so the optimizer and checkpoints see the full model. Activations are plain tensors. A module runs
its own forward on its shards over tp, which FSDP has unsharded to plain tensors. A style only adds the exchange between
ranks (exchange.py).

Traffic per block: 2 all-gathers and 2 reduce-scatters in forward, and the same in backward. Each collective moves
P(n-1)/n per rank, where P = B*S*D*2 bytes in bf16. Recompute repeats the collectives whose outputs are not saved. In
forward, the embedding adds one reduce-scatter, and the head adds one all-gather. Backward mirrors them. The weight
gradient of a norm covers only the tokens of one rank, so FSDP all-reduces it over tp before the reduction over
data-parallel ranks. The D values of this gradient have the compute dtype, or fp32 if they are sums over microbatches. A
bias of a colwise layer is split with its output; a rowwise layer adds its bias once, after the reduce-scatter.

The loss with a sharded vocabulary, for one chunk of n tokens (all tokens if loss_chunk_tokens = 0):

                      tp rank 0                       tp rank 1
    logits (n, V/2)   for ids below V/2               for ids from V/2 on
    exchanged         log-sum-exp of the local logits, and the target's logit or 0: 2 values per token
    loss ()           the same on both
    grad_hidden       contribution of its ids         contribution of its ids      partial sums, added in backward
    grad_weight       top half                        bottom half

Traffic: one all-gather of tp*n*8 bytes per chunk, without overlap.

With parallelism.enable_async_tensor_parallel, inductor splits a matmul and its collective into tp pieces. While a GPU
computes one piece, it copies the next piece directly from the memory of another GPU. This option has never been run,
because it needs two GPUs.

Sources: Megatron-LM arXiv:1909.08053, section 3 for the loss; sequence parallel arXiv:2205.05198.
Effect: parameters become DTensors; FQNs and the shapes seen by optimizer and checkpoint do not change.
"""

from dataclasses import replace

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from torchtitan_lite.config.block import list_gathered, list_modules
from torchtitan_lite.config.extensions import load_extension, load_module
from torchtitan_lite.dtensor import shard_parameters
from torchtitan_lite.model.head import share_embedding
from torchtitan_lite.model.loss import Vocabulary
from torchtitan_lite.parallel.exchange import (
    Gather,
    GatherEqually,
    Ranks,
    Scatter,
    list_ranks,
)


def plan_tensor_parallel(part: nn.Module, tp: int) -> dict[str, "LocalStyle"]:
    """Return a dict mapping FQNs to styles, for every module of `part` to which TP over `tp` ranks applies.

    An MoE layer needs no style, because it processes only this rank's slice of the sequence. Its experts are sharded
    over a different mesh (expert_parallel.py).
    """
    modules = dict(part.named_modules())
    plan: dict[str, LocalStyle] = {}
    rows = []
    for prefix, row in list_modules(part.model_args):
        fqn = prefix + row.name
        if fqn not in modules or row.kind == "router":
            continue  # the module is not on this pipeline stage, or it is in an MoE layer
        rows.append(replace(row, name=fqn))
        if row.kind == "embedding":
            plan[fqn] = SplitEmbedding()
        elif 0 < row.kv_heads < tp:
            plan[fqn] = load_module("parallel.shared_heads").SharedHeads(row.kv_heads)
        else:
            plan[fqn] = STYLES[row.tp_style]()
    return plan | {fqn: PrepareModuleInput() for fqn in list_gathered(rows)}


def apply_tensor_parallel(part: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the parameters of `part` (on meta), and make its modules compute with the shards.

    Every parameter outside of MoE layers has a style, because `check_table` (config/checks.py) refuses all other rows.
    """
    parallelize_module(part, mesh, plan_tensor_parallel(part, mesh.size()))
    share_embedding(part)


# ---------------------------------------------------------------- styles: what ranks exchange around a module


class LocalStyle(ParallelStyle):
    """Base class of the styles. Parameters are sharded over tp, and `forward` reads the local shards by name."""

    placements: dict[str, Placement] = {}  # of weight and bias

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Shard the parameters and replace `forward`. `parallelize_module` calls this.

        `forward` is a closure. If it were a functools.partial, torch.compile would compile every block separately, and
        would fail at the ninth block of a rank.
        """
        shard_parameters(module, device_mesh, self.placements)
        ranks = list_ranks(device_mesh)

        def forward(*inputs, **options) -> Tensor:
            return self.compute(module, ranks, *inputs, **options)

        module.forward = forward
        return module

    def compute(self, module: nn.Module, ranks: Ranks, *inputs, **options) -> Tensor:
        """Replacement for `module.forward`."""
        return type(module).forward(module, *inputs, **options)


class PrepareModuleInput(LocalStyle):
    """All-gathers the input of a module that needs all tokens: x (B, S/tp, D) becomes (B, S, D)."""

    def compute(self, module: nn.Module, ranks: Ranks, x: Tensor, *rest, **options) -> Tensor:
        return super().compute(module, ranks, Gather.apply(x, ranks, 1), *rest, **options)


class ColwiseParallel(LocalStyle):
    """Computes this rank's output features, x (B, S, in) -> (B, S, out/tp). Also for elementwise modules."""

    placements = {"weight": Shard(0), "bias": Shard(0)}


class RowwiseParallel(LocalStyle):
    """Reduce-scatters partial sums over input features, then adds the bias: x (B, S, in/tp) -> (B, S/tp, out)."""

    placements = {"weight": Shard(1), "bias": Replicate()}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if module.bias is not None:
            hide_bias = load_extension("rowwise_bias").hide_bias
            module.__class__ = hide_bias(type(module))
        return super()._apply(module, device_mesh)

    def compute(self, module: nn.Module, ranks: Ranks, x: Tensor) -> Tensor:
        out = Scatter.apply(super().compute(module, ranks, x), ranks)
        bias = module.bias
        return out if bias is None else out + bias


class SequenceParallel(LocalStyle):
    """Style of modules that process each token or each head separately. Their parameters are replicated."""

    placements = {"weight": Replicate(), "bias": Replicate()}


class GatheredOutput(SequenceParallel):
    """All-gathers the output, for a loss that compares it with targets or fields: x (B, S/tp, D) -> (B, S, out)."""

    def compute(self, module: nn.Module, ranks: Ranks, x: Tensor) -> Tensor:
        own = super().compute(module, ranks, x)
        return GatherEqually.apply(own, ranks).transpose(0, 1).flatten(1, 2)


class SplitEmbedding(LocalStyle):
    """Looks up only the ids in this rank's shard, tokens (B, S) -> (B, S/tp, D). Backward computes the gradient of the
    shard."""

    placements = ColwiseParallel.placements

    def compute(self, module: nn.Module, ranks: Ranks, x: Tensor) -> Tensor:
        n_rows = module.num_embeddings // ranks.n
        row = x - ranks.own * n_rows
        is_here = (row >= 0) & (row < n_rows)
        found = super().compute(module, ranks, row.where(is_here, 0))
        # Only one rank has the embedding of a token; the other ranks contribute zeros.
        return Scatter.apply(found * is_here[:, :, None], ranks)


class SplitHead(PrepareModuleInput):
    """Computes the sum of token losses from hidden (B, S/tp, D) and targets (B, S). The sum, () fp32, is equal on every
    rank.

    Each rank uses only its rows of the weight, so the gradient of hidden is a partial sum on each rank.
    """

    placements = {"weight": Shard(0)}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.vocabulary = SplitVocabulary(list_ranks(device_mesh))
        return super()._apply(module, device_mesh)


class SplitVocabulary(Vocabulary):
    """A vocabulary split over tp: each rank has the logits of its shard of the output weight. To compute the loss, the
    ranks exchange a few numbers per token."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.shard = ranks.own

    def gather(self, own: Tensor) -> Tensor:
        """All-gathers `own`: two numbers per token for the cross entropy."""
        return GatherEqually.apply(own, self.ranks)


STYLES = {  # tp_style of a ModuleRow -> class; config/model_rows.py says which kinds allow it
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "sequence": SequenceParallel,
    "heads": SequenceParallel,
    "whole": SequenceParallel,
    "gathered": GatheredOutput,
    "vocabulary": SplitHead,
}
