"""A hand-written step on pp x dp x tp ranks in Megatron's style: what the machine can do with the trainer's work.

Short on purpose: 120 lines without imports and docstrings.

    tp    sequence parallel: all-gathers before attention, feed-forward and head, reduce-scatters after them
    pp    1F1B, one stage a rank, plain sends and receives
    dp    gradients reduce-scattered and weights all-gathered once per step, as one flat buffer; AdamW on the own slice

Llama's arithmetic out of torch's functions: no module, no DTensor, no FSDP, no torch.distributed.pipelining.
Activations are (S, B, D), so that gathering a sequence copies nothing. Ranks are ordered as in the trainer's mesh.
Sources: arXiv:1909.08053, 2205.05198, 2104.04473.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from torchtitan_lite.config.flavors import ModelArgs, list_block
from torchtitan_lite.config.schema import Config
from torchtitan_lite.model.llama3 import rotary_frequencies

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
SPLIT = {"colwise": 0, "rowwise": 1}  # tp of a row of config/flavors.py -> dim of the weight that is cut


def gather(own: Tensor, group) -> Tensor:
    """(S/tp, B, D) -> (S, B, D)."""
    all_gather(whole := own.new_empty(len(own) * group.size(), *own.shape[1:]), own.contiguous(), group=group)
    return whole


def scatter(partial: Tensor, group) -> Tensor:
    """Partial sums (S, B, D) -> (S/tp, B, D)."""
    size = len(partial) // group.size()
    reduce_scatter(own := partial.new_empty(size, *partial.shape[1:]), partial.contiguous(), group=group)
    return own


class Exchange(Function):
    """`forth` is one of the two functions above, and `back`, of the gradients, the other."""

    @staticmethod
    def forward(ctx, x: Tensor, group, forth: Callable, back: Callable) -> Tensor:
        ctx.group, ctx.back = group, back
        return forth(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        return ctx.back(grad, ctx.group), None, None, None


class Bare3D:
    """One rank. `full`: the initial weights of the whole model. Every stage has as many layers as any other."""

    def __init__(self, args: ModelArgs, full: dict[str, Tensor], degrees: tuple[int, int, int], config: Config):
        ranks = torch.arange(dist.get_world_size()).view(degrees)
        lists = [ranks.movedim(dim, -1).reshape(-1, size).tolist() for dim, size in enumerate(degrees)]
        self.pp, self.dp, self.tp = (dist.new_subgroups_by_enumeration(each)[0] for each in lists)
        self.gather = lambda x: Exchange.apply(x, self.tp, gather, scatter)
        self.scatter = lambda x: Exchange.apply(x, self.tp, scatter, gather)
        self.args, self.config, n_layers = args, config, args.n_layers // self.pp.size()
        self.is_first, self.is_last = self.pp.rank() == 0, self.pp.rank() == self.pp.size() - 1
        self.blocks = [f"layers.{self.pp.rank() * n_layers + layer}." for layer in range(n_layers)]

        dims = {block + row.name: SPLIT.get(row.split) for block in self.blocks for row in list_block(args)}
        dims |= {"tok_embeddings": 0} if self.is_first else {}
        dims |= {"norm": None, "output": 0} if self.is_last else {}
        own = {}
        for name in sorted(dims, key=lambda name: dims[name] is not None):  # norms, which all tp ranks have, come first
            weight, dim = full[f"{name}.weight"].detach(), dims[name]
            own[name] = weight if dim is None else weight.chunk(self.tp.size(), dim)[self.tp.rank()]
        n_numbers = -(-sum(weight.numel() for weight in own.values()) // self.dp.size()) * self.dp.size()
        self.flat, self.grads, self.w, start = torch.zeros(n_numbers), torch.zeros(n_numbers), {}, 0
        for name, weight in own.items():
            place = slice(start, start := start + weight.numel())
            self.flat[place] = weight.flatten()
            self.w[name] = self.flat[place].view(weight.shape).requires_grad_()
            self.w[name].grad = self.grads[place].view(weight.shape)  # autograd adds to it in place
        self.of_norms = self.grads[: sum(weight.numel() for weight in own.values() if weight.dim() == 1)]
        copies = torch.ones(n_numbers)
        copies[: len(self.of_norms)] = self.tp.size()
        self.copies, mine = (each.chunk(self.dp.size())[self.dp.rank()] for each in (copies, self.flat))
        self.own = torch.nn.Parameter(mine.clone())
        self.own.grad, section = torch.empty_like(mine), config.optimizer
        options = {"betas": (section.beta1, section.beta2), "eps": section.eps, "weight_decay": section.weight_decay}
        self.optimizer = torch.optim.AdamW([self.own], lr=section.lr, fused=True, **options)

    def train_step(self, tokens: Tensor, targets: Tensor, n_microbatches: int) -> Tensor:
        """Make a step on this rank's rows, (B, S) each. Returns the loss of the global batch, () fp32."""
        self.grads.zero_()
        dist.all_reduce(n_tokens := torch.tensor(targets.numel()), group=self.dp)
        dist.all_reduce(loss := self.run_1f1b(tokens.chunk(n_microbatches), targets.chunk(n_microbatches), n_tokens))
        dist.all_reduce(self.of_norms, group=self.tp)
        reduce_scatter(self.own.grad, self.grads, group=self.dp)
        dist.all_reduce(squares := (self.own.grad.square() / self.copies).sum())
        self.own.grad.mul_((self.config.training.max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0))
        self.optimizer.step()
        all_gather(self.flat, self.own.detach(), group=self.dp)
        return loss

    def run_1f1b(self, tokens: Sequence[Tensor], targets: Sequence[Tensor], n_tokens: Tensor) -> Tensor:
        """Run forward and backward of all microbatches. Returns what this rank adds to the loss."""
        stage, (rows, seq_len) = self.pp.rank(), tokens[0].shape
        total, held, sent = torch.zeros(()), [], []

        def send(tensor: Tensor, to: int) -> None:
            sent.append((tensor, dist.isend(tensor, group=self.pp, group_dst=to)))

        def receive(source: int) -> Tensor:
            dist.recv(x := torch.empty(seq_len // self.tp.size(), rows, self.args.dim), group=self.pp, group_src=source)
            return x

        def backward() -> None:
            x, out = held.pop(0)
            out.backward(None if self.is_last else receive(stage + 1))
            if not self.is_first:
                send(x.grad, stage - 1)

        for index in range(len(tokens)):
            x = tokens[index] if self.is_first else receive(stage - 1).requires_grad_()
            held.append((x, out := self.compute(x, targets[index], n_tokens)))
            if self.is_last:
                total += out.detach()
            else:
                send(out.detach(), stage + 1)
            if index >= self.pp.size() - stage - 1:
                backward()
        while held:
            backward()
        for _, sending in sent:
            sending.wait()
        return total

    def compute(self, x: Tensor, targets: Tensor, n_tokens: Tensor) -> Tensor:
        """Tokens (B, S) or hidden states (S/tp, B, D) -> hidden states, or this rank's part of the loss, ()."""
        if self.is_first:
            table = self.w["tok_embeddings"]
            row = x.t() - self.tp.rank() * len(table)
            here = (row >= 0) & (row < len(table))
            x = self.scatter(F.embedding(row.where(here, 0), table) * here[..., None])
        angles = torch.arange(targets.shape[1])[:, None] * rotary_frequencies(self.args, x.device)
        rotation = torch.polar(torch.ones_like(angles), angles)[:, None, None]  # (S, 1, 1, E/2)
        for block in self.blocks:
            x = x + self.attend(self.normalize(x, block + "attention_norm"), rotation, block + "attention.")
            h, name = self.gather(self.normalize(x, block + "ffn_norm")), block + "feed_forward."
            h = F.silu(F.linear(h, self.w[name + "w1"])) * F.linear(h, self.w[name + "w3"])
            x = x + self.scatter(F.linear(h, self.w[name + "w2"]))
        if not self.is_last:
            return x
        logits = F.linear(self.gather(self.normalize(x, "norm")), self.w["output"]).flatten(0, 1)
        column = targets.t().flatten() - self.tp.rank() * logits.shape[1]
        here = (column >= 0) & (column < logits.shape[1])
        of_target = logits.gather(1, column.where(here, 0)[:, None])[:, 0] * here
        both = self.gather(torch.stack((logits.logsumexp(1), of_target)))  # (2 tp, T): of each rank's ids
        loss = (both[0::2].logsumexp(0) - both[1::2].sum(0)).sum() / n_tokens
        return loss / self.tp.size()  # all tp ranks have the same loss, and what they minimise is the sum over ranks

    def attend(self, x: Tensor, rotation: Tensor, name: str) -> Tensor:
        x = self.gather(x)
        heads = [F.linear(x, self.w[name + w]).unflatten(-1, (-1, self.args.head_dim)) for w in ("wq", "wk", "wv")]
        for i in (0, 1):  # queries and keys (S, B, H, E) are rotated
            heads[i] = torch.view_as_real(torch.view_as_complex(heads[i].unflatten(-1, (-1, 2))) * rotation).flatten(-2)
        query, key, value = (each.permute(1, 2, 0, 3) for each in heads)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)  # (B, H, S, E)
        return self.scatter(F.linear(out.permute(2, 0, 1, 3).flatten(2), self.w[name + "wo"]))

    def normalize(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.w[name], self.args.norm_eps)
