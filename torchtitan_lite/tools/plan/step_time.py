"""Estimate the seconds of each pipeline stage on a cluster: kernels of its layers, and the exposed part of collectives.

    matmuls       by module of the block; tp shards them, ep shards the experts
    attention     FLOPs of the causal half, 2.5 times that in backward, at the efficiency of the attention kernel
    elementwise   norms, rotary, SwiGLU, residual, casts, loss; less if compiled
    tp, ep        not overlapped; async TP hides most of tp
    cp            overlaps with attention on the local shard
    FSDP          overlaps with the block (ZeRO 3), or with forward and backward (ZeRO 1, 2)

Legend in workload.py.
"""

from collections import Counter
from functools import cached_property
from math import prod
from operator import mul
from typing import NamedTuple

from torchtitan_lite.config.block import NEWTON_SCHULZ_STEPS
from torchtitan_lite.config.model_rows import ModuleRow
from torchtitan_lite.tools.plan.cluster import Cluster
from torchtitan_lite.tools.plan.orders import Action
from torchtitan_lite.tools.plan.workload import (
    MASTER_BYTES,
    SHARD_DIMS,
    Groups,
    LayerKind,
    Workload,
)

CAUSAL_EDGE = (
    300  # tokens; attention reaches S/(S+300) of its rate, so short sequences are slow. Fit
)
# Bytes that softmax, dropout and two matmuls read and write per fp16 score of unfused attention
SCORE_BYTES = 13
KERNELS_OF_LAYER = {False: 28, True: 14}  # compiled -> elementwise kernels in forward
# Bytes per element that ZeRO++'s kernels read and write around a gather, and around a reduction
QWZ_BYTES = 4
QGZ_BYTES = 48
LOSS_BYTES = {
    False: 12,
    True: 6,
}  # compiled -> bytes per logit that the loss moves in each direction
Times = tuple[
    float, float, float
]  # seconds of a linear layer: forward, gradients of inputs and of weights


class Phases(NamedTuple):
    """Seconds of one microbatch on a rank. These include the waits for each mesh axis and the recompute (`again`)."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    dp: float = 0.0
    again: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward_input + self.backward_weight


class StepTime:
    """Estimates the seconds of one step of a workload on a cluster."""

    def __init__(self, workload: Workload, cluster: Cluster):
        self.workload = workload
        self.cluster = cluster

    def place(self, dims: tuple[str, ...]) -> tuple[int, int]:
        """Return the distance between the ranks of a group over the mesh dims `dims`, and their number."""
        return self.workload.layout.strides[dims[-1]], self.workload.count_ranks(dims)

    def collective_time(self, dims: tuple[str, ...], whole_bytes: float) -> float:
        """Return the seconds to all-gather or reduce-scatter a tensor over the mesh dims `dims`."""
        return self.cluster.collective_time(*self.place(dims), whole_bytes)

    def expose(self, dims: tuple[str, ...], seconds: float, work: float) -> float:
        """Return the seconds that collectives over `dims` add to `work` seconds of kernels."""
        return self.cluster.expose(seconds, work, self.cluster.find_share(*self.place(dims)))

    # ------------------------------------------------------------ a layer

    def linear_times(
        self, rows: float, out: float, into: float, dtype: str, n_experts: int = 1
    ) -> Times:
        """Return the seconds of a linear layer, or of a grouped matmul over the local experts."""
        recipe = self.workload.float8_recipe
        forward = self.cluster.matmul_time(rows, out, into, dtype, recipe)
        of_inputs = self.cluster.matmul_time(rows, into, out, dtype, recipe)
        each = rows / n_experts
        of_weights = self.cluster.matmul_time(n_experts * out, into, each, dtype, recipe)
        if dtype == "float8" and n_experts == 1:
            # Transformer Engine fuses casts into other kernels, and casts weights once per step.
            n_bytes = rows * into if recipe == "te" else 3 * into * (rows + out)
            cast = self.cluster.memory_time(n_bytes)
            forward += cast
            of_inputs += cast
        return forward, of_inputs, of_weights

    def module_times(self, module: ModuleRow) -> Times:
        """Return the seconds of a module's matmuls on one rank, assuming that experts are equally loaded."""
        w = self.workload
        tp = w.layout.tp
        dtype = "float8" if module.name in w.float8 else w.compute_dtype
        if module.kind == "experts":
            n_experts, into, out = module.weight
            n_experts //= max(1, w.layout.ep)
            return self.linear_times(max(w.n_rows, n_experts), out, into, dtype, n_experts)
        out, into = module.weight
        if module.kind == "router":
            return self.linear_times(w.n_tokens / tp, out, into, "float32")
        if module.split == "colwise":
            return self.linear_times(w.n_tokens, out // tp, into, dtype)
        return self.linear_times(w.n_tokens, out, into // tp, dtype)

    @cached_property
    def attention_times(self) -> tuple[float, float]:
        """Seconds of a layer's attention, forward and backward. The causal half has 2*T*S*H*E FLOPs in forward."""
        w = self.workload
        cluster = self.cluster
        n_scores = w.n_tokens * w.seq_len * w.args.n_heads / w.layout.tp
        head_dim = w.args.head_dim
        flops = 2 * n_scores * head_dim
        peak = cluster.peak(w.compute_dtype) * cluster.clock
        if w.attention == "unfused":  # computes both halves
            rate = cluster.unfused_efficiency * peak
            if head_dim % 8:  # tensor cores cannot compute it
                rate = cluster.matmul_efficiency * cluster.peak_float32
            forward = 2 * flops / rate + cluster.memory_time(SCORE_BYTES * n_scores)
            return forward, 2 * forward
        peak *= w.seq_len / (w.seq_len + CAUSAL_EDGE) * min(1.0, 0.5 + head_dim / 256)
        forward = flops / (peak * getattr(cluster, f"{w.attention}_forward"))
        backward = 2.5 * flops / (peak * getattr(cluster, f"{w.attention}_backward"))
        return forward + cluster.kernel_s, backward + cluster.kernel_s

    def elementwise_time(self, kind: LayerKind) -> float:
        """Return the seconds of a layer's elementwise kernels in forward. An eager kernel reads and writes its tensors.

        c: bytes per element. MoE rows are copied when sorted, twice more in the all-to-alls, and summed in fp32.
        """
        w = self.workload
        args = w.args
        c = w.compute_bytes
        per_norm = (4 if w.compiled else 5) * c  # with one residual addition
        per_product = (3 if w.compiled else 5) * c
        per_head = (2 * c if w.compiled else 2 * c + 16) + per_norm * args.qk_norm
        n_heads = args.n_heads + args.n_kv_heads
        if not kind.is_gated:  # GPT has no rotary embedding
            per_product = (2 if w.compiled else 3) * c
            n_heads = 0
        n_products = sum(module.weight[1] for module in kind.rowwise[1:])
        token_bytes = (per_head * n_heads * args.head_dim + per_product * n_products) / w.layout.tp
        hidden = per_norm * len(kind.norms) * args.dim
        token_bytes += hidden / w.layout.tp if w.sequence_parallel else hidden
        n_bytes = w.n_tokens * token_bytes
        if kind.is_moe:
            n_copies = 9 if w.layout.ep > 1 else 5
            per_row = args.dim * (n_copies * c + 16) + 5 * c * args.moe.expert_ffn_dim
            n_bytes += w.n_rows * per_row
        return (
            self.cluster.memory_time(n_bytes) + KERNELS_OF_LAYER[w.compiled] * self.cluster.kernel_s
        )

    def tensor_parallel_time(self, kind: LayerKind) -> Times:
        """Return the seconds of tp's collectives in the forward, the backward and the recompute of a layer.

        Without sequence parallel, an all-reduce replaces each pair of calls. Recompute repeats either all or none.
        """
        w = self.workload
        seconds = self.collective_time(("tp",), w.hidden_bytes)
        if w.copies_gathered and w.layout.tp > 1:
            seconds += self.cluster.memory_time(2 * w.hidden_bytes)
        if w.async_tp:
            seconds *= 1 - self.cluster.async_tp_hidden
        n_calls = kind.n_gathers + len(kind.rowwise)
        n_again = kind.average(full=n_calls)
        if w.sequence_parallel:
            gathers = kind.n_gathers
            full = n_calls - kind.ends_in_rowwise
            n_again = kind.average(op=gathers, alternate=gathers, full=full)
        return seconds * n_calls, seconds * n_calls, seconds * n_again

    def linear_times_of(self, kind: LayerKind) -> tuple[float, float, float, float]:
        """Return the seconds of a layer's matmuls: forward, gradients of inputs and of weights, recompute.

        Full recompute stops before the last matmul: backward does not need its output.
        """
        times = [self.module_times(module) for module in kind.block if module.kind != "norm"]
        forward, of_inputs, of_weights = map(sum, zip(*times, strict=True))
        full = forward
        if kind.ends_in_rowwise and self.workload.sequence_parallel:
            full -= self.module_times(kind.rowwise[-1])[0]
        return forward, of_inputs, of_weights, kind.average(full=full, alternate=forward / 3)

    def describe_layer(self, kind: LayerKind) -> Phases:
        """Return the phases of a layer, averaged over its recompute modes."""
        w = self.workload
        is_full = kind.average(full=1)
        linear, of_inputs, of_weights, linear_again = self.linear_times_of(kind)
        attend, attend_back = self.attention_times
        elementwise = self.elementwise_time(kind)
        elementwise_again = elementwise * kind.average(op=0.5, full=1, alternate=1)
        again = linear_again + attend * is_full + elementwise_again
        tp, tp_back, tp_again = self.tensor_parallel_time(kind)
        cp, cp_back = self.expose_context()
        ep = 0.0
        ep_back = 0.0
        if kind.is_moe:
            ep_back = 2 * self.exchange_time(w.n_rows)
            ep = ep_back + self.exchange_time(0)  # the counts
        forward = linear + attend + elementwise + tp + cp + ep
        backward = of_inputs + attend_back + 2 * elementwise + tp_back + cp_back + ep_back
        backward += again + tp_again + (cp + ep) * is_full
        dp, dp_back = self.expose_shards(kind, forward, backward + of_weights)
        return Phases(
            forward + dp,
            backward + dp_back,
            of_weights,
            tp=tp + tp_back + tp_again,
            cp=cp + cp_back + cp * is_full,
            ep=ep + ep_back + ep * is_full,
            dp=dp + dp_back,
            again=again,
        )

    def exchange_time(self, n_rows: float) -> float:
        """Return the seconds of an all-to-all over ep in which a rank sends `n_rows` rows, including those to itself.

        Rows for other nodes use the network card of the rank, in parallel with rows inside the node.
        """
        w = self.workload
        n = w.layout.ep
        if n == 1:
            return 0.0
        n_near = min(n, self.cluster.node_size)
        n_bytes = n_rows * w.args.dim * w.compute_bytes / n
        near = (n_near - 1) * n_bytes / self.cluster.links
        far = (n - n_near) * n_bytes / self.cluster.network
        return max(near, far) + self.cluster.find_latency(1, n)

    def expose_context(self) -> tuple[float, float]:
        """Return the seconds that a layer waits for keys and values, in forward and in backward.

        An all-gather overlaps with attention on the local shard, 1/cp of the work; a ring overlaps with all of it. The
        reduction of fp32 gradients overlaps with attention's backward in a ring, and otherwise with nothing.
        """
        w = self.workload
        n = w.layout.cp
        expose = self.cluster.expose
        fetch = self.collective_time(("cp",), w.keys_values_bytes)
        reduce = self.collective_time(("cp",), w.keys_values_bytes / w.compute_bytes * MASTER_BYTES)
        attend, attend_back = self.attention_times
        if w.ring:
            return expose(fetch, attend), expose(fetch + reduce, attend_back)
        return expose(fetch, attend / n), expose(fetch, attend_back / n) + reduce

    def expose_shards(
        self, kind: LayerKind, forward: float, backward: float
    ) -> tuple[float, float]:
        """Return the seconds that a layer waits for FSDP, in forward (all-gather) and backward (and reduce-scatter)."""
        w = self.workload
        gather = 0.0
        again = 0.0
        if w.layout.zero_stage == 3:
            gather = self.shard_time(kind.groups)
            again = self.shard_time(kind.groups, near="hpz" in w.zero_plus_plus)
        if w.layout.pp == 1 and w.n_reductions == w.layout.n_microbatches:
            again += self.shard_time(kind.groups, reduces=True)
        dims = SHARD_DIMS["fsdp"]
        return self.expose(dims, gather, forward), self.expose(dims, again, backward)

    def shard_time(self, groups: Groups, *, reduces: bool = False, near: bool = False) -> float:
        """Return the seconds of an all-gather (`near`: inside nodes) or a reduction of FSDP groups."""
        w = self.workload
        is_packed = ("qgz" if reduces else "qwz") in w.zero_plus_plus
        sizes: Counter[str] = Counter()
        for group, n in groups:
            sizes[group.axis] += n * group.n_parameters
        seconds = 0.0
        if is_packed:
            packing_bytes = QGZ_BYTES if reduces else QWZ_BYTES
            seconds = self.cluster.memory_time(sizes.total() * packing_bytes)
        for axis, n_parameters in (+sizes).items():
            width = w.reduce_bytes if reduces else w.compute_bytes
            if is_packed or (w.gathers_float8 and axis == "fsdp" and not reduces):
                width = 1
            of_node = (f"{axis}_near",)
            dims = of_node if near and w.count_ranks(of_node) > 1 else SHARD_DIMS[axis]
            seconds += self.collective_time(dims, n_parameters * width)
            if reduces and is_packed:
                seconds += self.collective_time(of_node, n_parameters * width)
        return seconds

    def describe_head(self) -> Phases:
        """Return the seconds of the head and its loss."""
        w = self.workload
        width = w.args.vocab_size // w.layout.tp
        times = self.linear_times(w.n_tokens, width, w.args.dim, w.compute_dtype)
        n_logits = w.n_tokens * (width if w.shards_loss else w.args.vocab_size)
        loss = self.cluster.memory_time(LOSS_BYTES[w.compiles_loss] * n_logits)
        loss += 10 * self.cluster.kernel_s
        tp_s = self.collective_time(("tp",), w.hidden_bytes)
        forward, of_inputs, of_weights = times
        return Phases(forward + loss + tp_s, of_inputs + loss + tp_s, of_weights, tp=2 * tp_s)

    # ------------------------------------------------------------ a stage

    @cached_property
    def stages(self) -> list[Phases]:
        """The phases of each stage: its layers and head. The time of the embedding is negligible."""
        kinds = self.workload.kinds
        phases = [*map(self.describe_layer, kinds), self.describe_head()]
        found = {}
        for stage in set(self.workload.stages):  # most stages are equal
            counts = [*(kind.count(stage) for kind in kinds), stage.has_head]
            sums = [sum(map(mul, counts, seconds)) for seconds in zip(*phases, strict=True)]
            found[stage] = Phases(*sums)
        return [found[stage] for stage in self.workload.stages]

    @cached_property
    def send_s(self) -> float:
        """Seconds to send hidden states, or their gradient, from one pp rank to the next."""
        w = self.workload
        is_near = self.cluster.count_nodes(*self.place(("pp",))) == 1
        bandwidth = self.cluster.links if is_near else self.cluster.network
        return w.hidden_bytes / w.layout.tp / bandwidth + self.cluster.network_latency_s

    def seconds_of(self, action: Action) -> float:
        """Return the duration of an action. B, a backward that is not split, takes I + W."""
        forward, of_input, of_weight, *_ = self.stages[action.stage]
        return {"F": forward, "B": of_input + of_weight, "I": of_input, "W": of_weight}[action.kind]

    # ------------------------------------------------------------ the step

    @cached_property
    def once_s(self) -> float:
        """Seconds of FSDP's collectives that are exposed once per step, on the worst rank."""
        return max(map(self.wait_once, range(self.workload.layout.pp)))

    def wait_once(self, pp_rank: int) -> float:
        """Return the seconds of FSDP's collectives that one pp rank exposes once per step.

        The first all-gather and the last reduction overlap with nothing. In a pipeline, torch reduces the gradients
        of a stage after its last backward. Gradients of replicas are reduced per block, in the last backward.
        """
        w = self.workload
        groups = []
        at_rest = 0.0
        forward = 0.0
        backward = 0.0
        for index in w.layout.stages_of(pp_rank):
            groups += w.groups_of(w.stages[index])
            at_rest += w.count_at_rest(w.stages[index])
            forward += self.stages[index].forward
            backward += self.stages[index].backward_input + self.stages[index].backward_weight
        layers = [kind.groups for kind in w.kinds]
        first = max(map(self.shard_time, layers))
        gather = self.shard_time(groups)
        reduce = self.shard_time(groups, reduces=True)
        replicas = 2 * self.collective_time(("dp_replicate",), at_rest * w.reduce_bytes)
        is_freed = w.layout.zero_stage == 3
        if w.layout.pp > 1 and not w.overlaps_reduction:
            return (first if is_freed else gather) + reduce + replicas
        wait = max(self.shard_time(layer, reduces=True) for layer in layers)
        if not is_freed or w.layout.pp > 1:
            wait = max(wait, self.expose(SHARD_DIMS["fsdp"], reduce, backward))
        if not is_freed:
            first = max(first, self.expose(SHARD_DIMS["fsdp"], gather, forward))
        beside = max(0.0, backward - reduce)
        return first + wait + self.expose(("dp_replicate",), replicas, beside)

    @cached_property
    def optimizer_s(self) -> float:
        """Seconds of the optimizer on the rank with the most parameters.

        The norm reads the gradient; the update reads gradient, weight and moments, and writes weight and moments.
        """
        w = self.workload
        seconds = []
        per_parameter = MASTER_BYTES * 4 + 2 * w.moment_bytes
        for rank in range(w.layout.pp):
            n = sum(w.count_at_rest(w.stages[index]) for index in w.layout.stages_of(rank))
            seconds.append(self.cluster.memory_time(n * per_parameter) + self.matrices_time(rank))
        return max(seconds)

    def matrices_time(self, pp_rank: int) -> float:
        """Return the seconds of Muon's rounds: Newton-Schulz of the largest matrix, and all-to-alls. No overlap."""
        w = self.workload
        seconds = 0.0
        for (*batch, rows, columns), elements in w.deal_rounds(pp_rank):
            m, n = sorted((rows, columns))
            for sizes in ((m, m, n), (m, m, m), (m, n, m)):
                product = self.cluster.matmul_time(*sizes, w.compute_dtype)
                seconds += NEWTON_SCHULZ_STEPS * prod(batch) * product
            for dims, n_elements in elements.items():
                seconds += 2 * self.collective_time(dims, n_elements * w.compute_bytes)
        return seconds

    @cached_property
    def lower_bound_s(self) -> float:
        """Lower bound on the step time of any schedule: a rank waits for its first microbatch, then is never idle."""
        layout = self.workload.layout
        bounds = []
        for rank in range(layout.pp):
            indices = layout.stages_of(rank)
            before = self.stages[: indices[0]]
            fill = sum(phases.forward + phases.backward_input for phases in before)
            busy = sum(self.stages[index].total for index in indices)
            bounds.append(fill + layout.n_microbatches * busy)
        return max(bounds) + self.once_s + self.optimizer_s
