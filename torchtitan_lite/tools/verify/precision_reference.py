"""One process that rounds where the ranks of a layout round: no FSDP, no DTensor, no pipeline, no process group.

    data-parallel ranks    one after another, each microbatch by itself; its gradients are rounded to the compute dtype,
                           as autograd gives them, and summed in fp32
    context parallel       ranks are further rows: (cp * B, S/cp), each with weights, and so gradients, of its own;
                           attention to each part of the keys is rounded, and parts are merged in fp32
    tensor parallel        each rank's slice of a matmul by itself; partial products, and partial gradients of what
                           several ranks read, are rounded and then added in the order of the ranks, rounding each time
    pipeline               nothing: hidden states are sent as they are
    experts                each rank's tokens by themselves, with weights, and so gradients, of its own. On the ranks of
                           one ep the gradient of an expert is that of all their tokens together, rounded once, and
                           that of the router a rounded sum: precision_trial.py has a wider bound for these
    float8                 each rank rounds its slice with its own scale; a weight that is gathered as float8 has one
                           scale for its whole tp slice, and is rounded from fp32

It has in common with the run the model file, the rule of the initial weights, the plan of which weight is sharded how,
torch's kernels, and float8's arithmetic (model/float8_linear.py). Its sums over ranks are its own: precision_parts.py.

Legend: B batch, S sequence, D model dim.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.config.block import list_block, plan_float8
from torchtitan_lite.config.layout import Layout, resolve_model
from torchtitan_lite.config.schema import Config
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.model.float8_linear import E4M3, Float8MatmulFunction, cast, choose_scale
from torchtitan_lite.model.head import IGNORE_INDEX, Head
from torchtitan_lite.model.moe import MoE, count_routes, list_moes
from torchtitan_lite.parallel.initial_weights import initialize_weights
from torchtitan_lite.parallel.tensor_parallel import (
    ColwiseLinear,
    CopiedNorm,
    GatheredInput,
    RowwiseLinear,
    plan_tensor_parallel,
)
from torchtitan_lite.tools.verify.precision_parts import (
    RoundedContext,
    RoundedDocumentContext,
    RoundedLoss,
    fan_out,
    sum_partials,
)
from torchtitan_lite.tools.verify.reference import PlainDocumentAttention, choose_model
from torchtitan_lite.tools.verify.slices import cut_zigzag
from torchtitan_lite.tools.verify.small_runs import WIDE

UNDER_CP: dict[str, Callable[[int, str], nn.Module]] = {  # model.attention -> attention of cp ranks, rotate method
    "causal": RoundedContext,
    "document": RoundedDocumentContext,
}
Calls = dict[str, list[tuple[Tensor, Tensor]]]  # FQN of a block -> of each call its output, and the rotary angles


@dataclass
class RoundedOutcome:
    """Numbers that one process computed in the arithmetic of the run."""

    initial: dict[str, Tensor]  # the weights of this step
    loss: float
    gradients: dict[str, Tensor]  # fp32, in backward order
    calls: Calls  # microbatches of data-parallel rank 0, of rank 1, ...; outputs (cp * B, S/cp, D), angles in fp32


@contextmanager
def blocks_noted(models: Iterable[nn.Module]) -> Iterator[Calls]:
    """Context manager: yields outputs and rotary angles of all blocks in the calls inside."""
    calls: Calls = {}
    hooks = []
    for model in models:
        for layer, block in model.layers.items():
            calls[f"layers.{layer}"] = []

            def note(block, args, output, *, to=calls[f"layers.{layer}"]):
                to.append((output.detach().clone(), args[1].detach().clone()))

            hooks.append(block.register_forward_hook(note))
    yield calls
    for hook in hooks:
        hook.remove()


class RoundedProcess:
    """The model of `config` (resolved, for its dtype), rounding as the ranks of `layout` do."""

    def __init__(self, config: Config, layout: Layout):
        model_class, init_parameter = choose_model(config, WIDE)
        self.config, self.layout = config, layout
        self.dtype = getattr(torch, config.training.mixed_precision_param)
        self.model = model_class(resolve_model(config.model), attention=config.model.attention)
        initialize_weights(self.model, init_parameter, config.debug.seed)
        self.weights = {fqn: p.detach().clone().requires_grad_() for fqn, p in self.model.named_parameters()}
        self.tp_rank = 0  # the one that is being computed
        self.casts: dict[tuple, Tensor] = {}  # weights in the compute dtype, as the ranks hold them in one microbatch
        self._replace_modules()

    def compute_gradients(self, batch: Batch) -> RoundedOutcome:
        """Compute all ranks and microbatches of a global batch. Earlier gradients are dropped."""
        n_tokens = (batch.targets != IGNORE_INDEX).sum()
        initial = {fqn: weight.detach().clone() for fqn, weight in self.weights.items()}
        order: dict[str, None] = {}  # FQNs as their gradients are completed
        hooks = []
        for fqn, weight in self.weights.items():
            weight.grad = None
            hooks.append(weight.register_post_accumulate_grad_hook(lambda _, fqn=fqn: order.setdefault(fqn)))
        loss = torch.zeros(())
        with blocks_noted([self.model]) as calls:
            for rows in batch.split(self.layout.dp):
                for micro in rows.split(self.layout.n_microbatches):
                    self.casts.clear()
                    tokens, targets, positions = map(self._cut_for_cp, (micro.tokens, micro.targets, micro.positions))
                    given = {} if micro.routes is None else {"routes": self._cut_for_cp(micro.routes)}
                    given |= {"positions": positions, "doc_ids": micro.doc_ids, "targets": targets}
                    loss_sum = self.model(tokens, **given)
                    (loss_sum / n_tokens).backward()
                    loss += (loss_sum / n_tokens).detach()
        for hook in hooks:
            hook.remove()
        return RoundedOutcome(initial, loss.item(), {fqn: self.weights[fqn].grad.clone() for fqn in order}, calls)

    @torch.no_grad()
    def scale_rows(self, first: float, last: float) -> None:
        """Multiply the rows of each weight by factors from `first` to `last`."""
        for weight in self.weights.values():
            weight.mul_(torch.linspace(first, last, len(weight)).view(-1, *[1] * (weight.dim() - 1)))

    def _cut_for_cp(self, whole: Tensor) -> Tensor:
        """(B, S) -> (cp * B, S/cp)"""
        return torch.cat(cut_zigzag(whole, self.layout.cp, 1)) if self.layout.cp > 1 else whole

    # ---------------------------------------------------------------- modules

    def _replace_modules(self) -> None:
        """Replace the forward of each module that holds weights, is an input of several tp ranks, or mixes tokens."""
        section, layout = self.config.quantize.linear.float8, self.layout
        fqns = {id(parameter): fqn for fqn, parameter in self.model.named_parameters()}
        styles = plan_tensor_parallel(self.model) if layout.tp > 1 else {}
        by_head = {row.name for row in list_block(self.model.model_args) if row.split == "heads"}
        modules = dict(self.model.named_modules())
        linears = {
            name: tuple(m.weight.shape) for name, m in modules.items() if type(m) is nn.Linear and m.bias is None
        }
        chosen = plan_float8(linears, section.filter_fqns, layout.tp, section.recipe_name)
        self.in_float8 = set(chosen) if self.config.model.uses_float8 else set()
        for layer, moe in list_moes(self.model):
            sequences = self.config.training.global_batch_size
            moe.router.balance_loss = self.config.training.expert_balance_loss / sequences
            moe.forward = partial(self._mix, f"layers.{layer}.feed_forward", moe, moe.forward)
            for module in (moe.router, moe.experts):
                for key in list(module._parameters):  # what is a parameter cannot be set to a cast of it
                    del module._parameters[key]
        for name, module in modules.items():
            own = {key: fqns[id(parameter)] for key, parameter in module.named_parameters(recurse=False)}
            style = styles.get(name)
            if name in self.in_float8:
                module.forward = partial(self._multiply_in_float8, own["weight"], style)
            elif isinstance(module, Head):
                module.forward = partial(self._compute_loss, own["weight"])
            elif own:
                for key in own:  # what is a parameter cannot be set to a cast of it
                    del module._parameters[key]
                is_of_heads = name.partition(".")[2].partition(".")[2] in by_head  # behind layers.3.
                module.forward = partial(self._call_with_casts, module, own, style, is_of_heads, module.forward)
            elif isinstance(style, GatheredInput):
                module.forward = partial(self._call_on_tp_ranks, module.forward)
        attention, method = self.config.model.attention, self.config.parallelism.context_parallel_rotate_method
        for block in self.model.layers.values():
            if layout.cp > 1:
                block.attention.inner = UNDER_CP[attention](layout.cp, method)
            elif attention == "document":
                block.attention.inner = PlainDocumentAttention()

    def _cast(self, fqn: str, cp_rank: int, part: int = 0) -> Tensor:
        """Return a weight in the compute dtype. Gradients of one cast are added in it, those of several in fp32."""
        key = fqn, cp_rank, part
        if key not in self.casts:
            self.casts[key] = self.weights[fqn].to(self.dtype)
        return self.casts[key]

    def _copy(self, fqn: str, cp_rank: int) -> Sequence[Tensor]:
        """Return for each tp rank the weight of a norm. Each has a gradient of its own tokens, or heads, only.

        FSDP adds them over tp when it reduces: as they are, or in fp32 if it has added microbatches before.
        """
        layout = self.layout
        if layout.pp > 1 or (layout.zero_stage == 1 and layout.n_microbatches > 1):
            return [self._cast(fqn, cp_rank, part) for part in range(layout.tp)]
        key = fqn, cp_rank, "of all tp ranks"
        if key not in self.casts:
            self.casts[key] = fan_out(self._cast(fqn, cp_rank), layout.tp, None)
        return self.casts[key]

    def _slice(self, weight: Tensor, style: object) -> Tensor:
        """Return what the current tp rank holds of the weight of a linear layer."""
        if not isinstance(style, ColwiseLinear | RowwiseLinear):
            return weight
        return weight.chunk(self.layout.tp, style.placement.dim)[self.tp_rank].contiguous()

    def _call_with_casts(
        self, module: nn.Module, own: dict[str, str], style: object, by_head: bool, forward: Callable, x: Tensor
    ) -> Tensor:
        """Call a module with the weights of each cp rank for its rows; under sequence parallel tp by tp.

        `by_head`: it is inside attention, which is called tp rank by tp rank.
        """
        is_copied = isinstance(style, CopiedNorm)
        done = []
        for rank, rows in enumerate(x.chunk(self.layout.cp)):
            pieces = rows.chunk(self.layout.tp, dim=1) if is_copied and not by_head else (rows,)
            weights = {key: self._copy(fqn, rank) if is_copied else [self._cast(fqn, rank)] for key, fqn in own.items()}
            results = []
            for part, piece in enumerate(pieces):
                for key, copies in weights.items():
                    weight = copies[self.tp_rank if by_head else part]
                    setattr(module, key, self._slice(weight, style) if isinstance(module, nn.Linear) else weight)
                results.append(forward(piece))
            done.append(torch.cat(results, dim=1))
        return torch.cat(done)

    def _call_on_tp_ranks(self, forward: Callable, x: Tensor, *rest: object) -> Tensor:
        """Call a module on every tp rank with the whole of x: each returns a part of the sum."""
        parts = []
        for rank, copy in enumerate(fan_out(x, self.layout.tp, 1)):
            self.tp_rank = rank
            parts.append(forward(copy, *rest))
        return sum_partials(parts, 1)

    def _mix(self, name: str, moe: MoE, forward: Callable, x: Tensor, routes: Tensor) -> Tensor:
        """Call an MoE layer with the tokens of each rank: pieces of a sequence over cp, and of these over tp."""
        cp, tp = self.layout.cp, self.layout.tp
        of_pieces = count_routes(routes, moe.router.n_experts)
        of_sequences = of_pieces.unflatten(0, (cp, -1)).sum(0)
        moe.router.sum_over_sequence = lambda counts: of_sequences
        done = []
        for rank, (rows, theirs) in enumerate(zip(x.chunk(cp), routes.chunk(cp), strict=True)):
            results = []
            for part, own in enumerate(zip(rows.chunk(tp, dim=1), theirs.chunk(tp, dim=1), strict=True)):
                moe.router.weight = self._cast(f"{name}.router.weight", rank, part)
                for key in ("w1", "w2", "w3"):
                    setattr(moe.experts, key, self._cast(f"{name}.experts.{key}", rank, part))
                results.append(forward(*own))
            done.append(torch.cat(results, dim=1))
        return torch.cat(done)

    def _multiply_in_float8(self, fqn: str, style: object, x: Tensor) -> Tensor:
        section = self.config.quantize.linear.float8
        held = (None, None)
        if section.enable_fsdp_float8_all_gather:
            own = self._slice(self.weights[fqn].detach(), style)
            scale = choose_scale(own.abs().amax(), E4M3)
            held = cast(own, scale, E4M3), scale
        rows = x.chunk(self.layout.cp)
        weights = (self._slice(self._cast(fqn, rank), style) for rank in range(self.layout.cp))
        return torch.cat(
            [
                Float8MatmulFunction.apply(some, weight, *held, section.recipe_name, section.emulate)
                for some, weight in zip(rows, weights, strict=True)
            ]
        )

    def _compute_loss(self, fqn: str, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, () fp32, of head and targets: each tp rank has a part of the vocabulary."""
        cp, tp = self.layout.cp, self.layout.tp
        by_part = not self.config.parallelism.disable_loss_parallel
        losses = []
        for rank, (some, theirs) in enumerate(zip(hidden.chunk(cp), targets.chunk(cp), strict=True)):
            weights = self._cast(fqn, rank).chunk(tp)
            copies = fan_out(some, tp, 1)
            chunk = self.config.training.loss_chunk_tokens
            if chunk or tp > 1:
                flat = (copy.flatten(0, 1) for copy in copies)
                losses.append(RoundedLoss.apply(theirs.flatten(), chunk or theirs.numel(), by_part, *flat, *weights))
            else:
                logits = F.linear(some, *weights).flatten(0, 1).float()
                losses.append(F.cross_entropy(logits, theirs.flatten(), reduction="sum", ignore_index=IGNORE_INDEX))
        return sum(losses)
