"""Estimate the seconds of each pipeline stage on a cluster: kernels of its layers, and the exposed part of collectives.

    matmuls       by module of the block; tp shards them, ep shards the experts
    attention     FLOPs of the causal half, 2.5 times that in backward, at the efficiency of the attention kernel
    elementwise   norms, rotary, SwiGLU, residual, casts, loss; less if compiled
    tp, ep        not overlapped; async TP hides most of tp
    cp            overlaps with attention on the local shard
    FSDP          overlaps with the block (ZeRO 3), or with forward and backward (ZeRO 1, 2)

Legend in workload.py.
"""

from collections.abc import Sequence
from functools import cached_property
from math import prod
from operator import mul
from typing import NamedTuple

from torchtitan_lite.config.block import NEWTON_SCHULZ_STEPS
from torchtitan_lite.config.model_rows import ModuleRow
from torchtitan_lite.tools.plan.actions import Action
from torchtitan_lite.tools.plan.cluster import Cluster
from torchtitan_lite.tools.plan.workload import MASTER_BYTES, LayerKind, Workload

CAUSAL_EDGE = (
    300  # tokens; attention reaches S/(S+300) of its rate, so short sequences are slow. Fit
)
UNFUSED_SCORE_BYTES = (
    13  # bytes that softmax, dropout and two matmuls read and write per fp16 score
)
KERNELS_OF_LAYER = {
    False: 28,
    True: 14,
}  # compiled -> elementwise kernels in the forward of a layer
PACKING_BYTES = {
    "qwz": 4,
    "qgz": 48,
}  # bytes per element that ZeRO++'s kernels read and write around a collective
LOSS_BYTES = {
    False: 12,
    True: 6,
}  # compiled -> bytes per logit that the loss reads and writes in each direction


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


class StepTime:
    """Estimates the seconds of one step of a workload on a cluster."""

    def __init__(self, workload: Workload, cluster: Cluster):
        self.workload, self.cluster = workload, cluster
        self.memory_time, self.expose = cluster.memory_time, cluster.expose

    def collective_time(self, dims: tuple[str, ...], whole_bytes: float) -> float:
        """Return the seconds to all-gather or reduce-scatter a tensor over the mesh dims `dims`."""
        layout, n = self.workload.layout, prod(getattr(self.workload.layout, dim) for dim in dims)
        return self.cluster.collective_time(layout.strides[dims[-1]], n, whole_bytes)

    def find_share(self, dims: tuple[str, ...]) -> float:
        """Return the bandwidth of collectives over the mesh dims `dims`, relative to the links inside a node."""
        layout, n = self.workload.layout, prod(getattr(self.workload.layout, dim) for dim in dims)
        return self.cluster.find_share(layout.strides[dims[-1]], n)

    # ------------------------------------------------------------ a layer

    def linear_times(self, rows: float, out: float, into: float, dtype: str) -> list[float]:
        """Return the seconds of a linear layer: forward, gradient of the input, gradient of the weight."""
        recipe = self.workload.float8_recipe
        sizes = (rows, out, into), (rows, into, out), (out, into, rows)
        times = [self.cluster.matmul_time(*each, dtype, recipe) for each in sizes]
        if (
            dtype == "float8"
        ):  # Transformer Engine fuses casts into other kernels, and casts weights once per step
            cast = self.memory_time(rows * into if recipe == "te" else 3 * into * (rows + out))
            times = [times[0] + cast, times[1] + cast, times[2]]
        return times

    def module_times(self, module: ModuleRow) -> list[float]:
        """Return the seconds of a module's matmuls on one rank, assuming that experts are equally loaded."""
        w, tp = self.workload, self.workload.layout.tp
        if module.kind == "experts":
            return self.grouped_times(module)
        out, into = module.weight
        if module.kind == "router":
            return self.linear_times(w.n_tokens / tp, out, into, "float32")
        sizes = (out // tp, into) if module.split == "colwise" else (out, into // tp)
        return self.linear_times(
            w.n_tokens, *sizes, "float8" if module.name in w.float8 else w.compute_dtype
        )

    def grouped_times(self, module: ModuleRow) -> list[float]:
        """Return the seconds of a grouped matmul over the local experts: forward, gradients of input and weights."""
        w = self.workload
        n_experts, into, out = module.weight[0] // max(1, w.layout.ep), *module.weight[1:]
        rows = max(w.n_rows, n_experts)
        dtype = "float8" if module.name in w.float8 else w.compute_dtype
        sizes = (rows, out, into), (rows, into, out), (n_experts * out, into, rows / n_experts)
        return [self.cluster.matmul_time(*each, dtype, w.float8_recipe) for each in sizes]

    @cached_property
    def attention_times(self) -> tuple[float, float]:
        """Seconds of a layer's attention, forward and backward. The causal half has 2*T*S*H*E FLOPs in forward."""
        w, cluster, args = self.workload, self.cluster, self.workload.args
        flops = 2 * w.n_tokens * w.seq_len * args.n_heads * args.head_dim / w.layout.tp
        peak = cluster.peak(w.compute_dtype) * cluster.clock
        if (
            w.attention == "unfused"
        ):  # computes both halves; head dims that 8 does not divide cannot use tensor cores
            rate = cluster.unfused_efficiency * peak
            if args.head_dim % 8:
                rate = cluster.matmul_efficiency * cluster.peak_float32
            scores = w.n_tokens * w.seq_len * args.n_heads / w.layout.tp
            forward = 2 * flops / rate + self.memory_time(UNFUSED_SCORE_BYTES * scores)
            return forward, 2 * forward
        peak *= w.seq_len / (w.seq_len + CAUSAL_EDGE) * min(1.0, 0.5 + args.head_dim / 256)
        forward, backward = (
            getattr(cluster, f"{w.attention}_{way}") for way in ("forward", "backward")
        )
        return flops / (peak * forward) + cluster.kernel_s, 2.5 * flops / (
            peak * backward
        ) + cluster.kernel_s

    def elementwise_time(self, kind: LayerKind) -> float:
        """Return the seconds of a layer's elementwise kernels in forward. An eager kernel reads and writes its tensors.

        c: bytes per element. MoE rows are copied when sorted, twice more in the all-to-alls, and summed in fp32.
        """
        w, c, args, tp = (
            self.workload,
            self.workload.compute_bytes,
            self.workload.args,
            self.workload.layout.tp,
        )
        per_norm, per_product = (4 if w.compiled else 5) * c, (3 if w.compiled else 5) * c
        if not kind.is_gated:
            per_product = (2 if w.compiled else 3) * c
        n_norms = sum(norm.split == "sequence" for norm in kind.norms)
        hidden = (
            n_norms * per_norm * args.dim / (tp if w.sequence_parallel else 1)
        )  # one residual addition per norm
        turned = (
            (args.n_heads + args.n_kv_heads) * args.head_dim * kind.is_gated
        )  # GPT has no rotary embedding
        rotary = ((2 * c if w.compiled else 2 * c + 16) + per_norm * args.qk_norm) * turned / tp
        products = per_product * sum(module.weight[1] for module in kind.rowwise[1:]) / tp
        n_bytes = w.n_tokens * (hidden + rotary + products)
        if kind.is_moe:
            copied = (5 + 4 * (w.layout.ep > 1)) * c + 16
            n_bytes += w.n_rows * (args.dim * copied + 5 * c * args.moe.expert_ffn_dim)
        return self.memory_time(n_bytes) + KERNELS_OF_LAYER[w.compiled] * self.cluster.kernel_s

    def describe_layer(self, kind: LayerKind) -> Phases:
        """Return the phases of a layer, averaged over its recompute modes."""
        w, if_full = self.workload, kind.average(full=1)
        times = [self.module_times(module) for module in kind.block if module.kind != "norm"]
        linear, of_inputs, of_weights = map(sum, zip(*times, strict=True))
        elementwise, (attend, attend_back) = self.elementwise_time(kind), self.attention_times
        n_calls, gathers = kind.n_gathers + len(kind.rowwise), kind.n_gathers
        # Full recompute stops before the last matmul: backward does not need its output. Without sequence parallel, an
        # all-reduce replaces each pair of calls, and recompute repeats either all of them or none.
        stops_early = kind.ends_in_rowwise and w.sequence_parallel
        calls_again = {"op": gathers, "alternate": gathers} if w.sequence_parallel else {}
        tp_again = kind.average(**calls_again, full=n_calls - stops_early)
        call_s = self.collective_time(("tp",), w.hidden_bytes)
        call_s += self.memory_time(2 * w.hidden_bytes) * (w.copies_gathered and w.layout.tp > 1)
        call_s *= 1 - self.cluster.async_tp_hidden * w.async_tp
        left_out = self.module_times(kind.rowwise[-1])[0] if stops_early else 0.0
        cp_forward, cp_backward = self.expose_context()
        rows_s, counts_s = (
            (2 * self.exchange_time(w.n_rows), self.exchange_time(0)) if kind.is_moe else (0.0, 0.0)
        )
        is_fused = w.attention != "unfused"
        norms_again = kind.average(op=0.5 if is_fused else 0.3, full=1, alternate=1)
        parts = {  # seconds of forward, of backward, of recompute
            "linear": (
                linear,
                of_inputs,
                kind.average(full=linear - left_out, alternate=linear / 3),
            ),
            "attention": (
                attend,
                attend_back,
                kind.average(op=0 if is_fused else attend, full=attend),
            ),
            "elementwise": (elementwise, 2 * elementwise, elementwise * norms_again),
            "tp": (call_s * n_calls, call_s * n_calls, call_s * tp_again),
            "cp": (cp_forward, cp_backward, cp_forward * if_full),
            "ep": (rows_s + counts_s, rows_s, (rows_s + counts_s) * if_full),
        }
        forward, backward, repeated = map(sum, zip(*parts.values(), strict=True))
        late = self.expose_shards(kind, forward, backward + repeated + of_weights)
        waits = {axis: sum(parts[axis]) for axis in ("tp", "cp", "ep")}
        again = sum(parts[what][2] for what in ("linear", "attention", "elementwise"))
        return Phases(
            forward + late[0],
            backward + repeated + late[1],
            of_weights,
            **waits,
            dp=sum(late),
            again=again,
        )

    def exchange_time(self, n_rows: float) -> float:
        """Return the seconds of an all-to-all over ep in which a rank sends `n_rows` rows, including those to itself.

        Rows for other nodes use the network card of the rank, in parallel with rows inside the node.
        """
        w, n, cluster = self.workload, max(1, self.workload.layout.ep), self.cluster
        n_bytes, n_near = n_rows * w.args.dim * w.compute_bytes / n, min(n, cluster.node_size)
        near = (n_near - 1) * n_bytes / (cluster.link_bandwidth * cluster.link_efficiency)
        far = (n - n_near) * n_bytes / (cluster.network_bandwidth * cluster.network_efficiency)
        return (max(near, far) + cluster.find_latency(1, n)) * (n > 1)

    def expose_context(self) -> tuple[float, float]:
        """Return the seconds that a layer waits for keys and values, in forward and in backward.

        An all-gather overlaps with attention on the local shard, 1/cp of the work; a ring overlaps with all of it. The
        reduction of fp32 gradients overlaps with attention's backward in a ring, and otherwise with nothing.
        """
        w, n = self.workload, self.workload.layout.cp
        if n == 1:
            return 0.0, 0.0
        fetch = self.collective_time(("cp",), w.keys_values_bytes)
        reduce = self.collective_time(("cp",), w.keys_values_bytes / w.compute_bytes * MASTER_BYTES)
        attend, attend_back = self.attention_times
        if w.ring:
            return self.expose(fetch, attend), self.expose(fetch + reduce, attend_back)
        return self.expose(fetch, attend / n), self.expose(fetch, attend_back / n) + reduce

    def expose_shards(
        self, kind: LayerKind, forward: float, backward: float
    ) -> tuple[float, float]:
        """Return the seconds that a layer waits for FSDP, in forward (all-gather) and backward (and reduce-scatter)."""
        w, parameters = self.workload, kind.parameters
        if w.is_whole:
            return 0.0, 0.0
        gather = self.shard_time(parameters) if w.layout.zero_stage == 3 else 0.0
        again = self.shard_time(parameters, near=True) if "hpz" in w.zero_plus_plus else gather
        reduces = w.layout.pp == 1 and w.n_reductions == w.layout.n_microbatches
        reduce = self.shard_time(parameters, reduces=True) if reduces else 0.0
        share = self.find_share(("dp_shard", "cp"))
        return self.expose(gather, forward, share), self.expose(again + reduce, backward, share)

    def shard_time(
        self, n_parameters: tuple[float, float], *, reduces: bool = False, near: bool = False
    ) -> float:
        """Return the seconds of an all-gather (`near`: inside nodes) or reduction of parameters (dense, in MoEs)."""
        w, seconds, name = self.workload, 0.0, "qgz" if reduces else "qwz"
        width = w.reduce_bytes if reduces else 1 if w.gathers_float8 else w.compute_bytes
        widths = [width, w.reduce_bytes if reduces else w.compute_bytes]
        if name in w.zero_plus_plus:
            widths, seconds = [1, 1], self.memory_time(sum(n_parameters) * PACKING_BYTES[name])
        axes = (("dp_shard", "cp"), "fsdp_near"), (("efsdp",), "efsdp_near")
        for n, width, (dims, of_node) in zip(n_parameters, widths, axes, strict=True):
            is_near = near and getattr(w.layout, of_node) > 1
            seconds += (
                self.collective_time((of_node,) if is_near else dims, n * width) if n else 0.0
            )
            if reduces and name in w.zero_plus_plus:
                seconds += self.collective_time((of_node,), n * width)
        return seconds

    def describe_head(self) -> Phases:
        """Return the seconds of the head and its loss."""
        w, width = self.workload, self.workload.args.vocab_size // self.workload.layout.tp
        forward, of_input, of_weight = self.linear_times(
            w.n_tokens, width, w.args.dim, w.compute_dtype
        )
        logits = w.n_tokens * w.args.vocab_size / (w.layout.tp if w.shards_loss else 1)
        loss = self.memory_time(LOSS_BYTES[w.compiles_loss] * logits) + 10 * self.cluster.kernel_s
        tp_s = self.collective_time(("tp",), w.hidden_bytes)
        return Phases(forward + loss + tp_s, of_input + loss + tp_s, of_weight, tp=2 * tp_s)

    # ------------------------------------------------------------ a stage

    @cached_property
    def stages(self) -> list[Phases]:
        """The phases of each stage: its layers and head. The time of the embedding is negligible."""
        kinds, found = self.workload.kinds, {}
        phases = [*map(self.describe_layer, kinds), self.describe_head()]
        for stage in set(self.workload.stages):  # most stages are equal
            counts = [*(kind.count(stage) for kind in kinds), stage.has_head]
            found[stage] = Phases(
                *(sum(map(mul, counts, seconds)) for seconds in zip(*phases, strict=True))
            )
        return [found[stage] for stage in self.workload.stages]

    def max_over_ranks(self, of_stages: Sequence[float]) -> float:
        """Sum the values over the stages of each pp rank, and return the largest sum."""
        layout = self.workload.layout
        return max(
            sum(of_stages[index] for index in layout.stages_of(rank)) for rank in range(layout.pp)
        )

    @cached_property
    def send_s(self) -> float:
        """Seconds to send hidden states, or their gradient, from one pp rank to the next."""
        w, cluster = self.workload, self.cluster
        n_bytes = w.hidden_bytes / w.layout.tp * (w.layout.pp > 1)
        if cluster.count_nodes(w.layout.strides["pp"], w.layout.pp) == 1:
            return (
                n_bytes / (cluster.link_bandwidth * cluster.link_efficiency)
                + cluster.network_latency_s
            )
        return (
            n_bytes / (cluster.network_bandwidth * cluster.network_efficiency)
            + cluster.network_latency_s
        )

    def seconds_of(self, action: Action) -> float:
        """Return the duration of an action. B, a backward that is not split, takes I + W."""
        forward, of_input, of_weight, *_ = self.stages[action.stage]
        return {"F": forward, "B": of_input + of_weight, "I": of_input, "W": of_weight}[action.kind]

    @property
    def busy(self) -> list[float]:
        """Seconds of one microbatch on each stage, forward plus backward."""
        return [sum(phases[:3]) for phases in self.stages]

    # ------------------------------------------------------------ the step

    @cached_property
    def once_s(self) -> float:
        """Seconds of FSDP's collectives that are exposed once per step, on the worst rank.

        The first all-gather and the last reduction overlap with nothing. In a pipeline, torch reduces all gradients
        after the last backward.
        """
        w, waits, share = self.workload, [], self.find_share(("dp_shard", "cp"))
        if w.is_whole:
            return 0.0
        is_kept = w.layout.zero_stage < 3
        largest = max((kind.parameters for kind in w.kinds), key=sum)
        first, last = self.shard_time(largest), self.shard_time(largest, reduces=True)
        for rank in range(w.layout.pp):
            indices = w.layout.stages_of(rank)
            stages = [w.stages[index] for index in indices]
            n = tuple(map(sum, zip(*(w.parameters[stage] for stage in stages), strict=True)))
            gather, reduce = self.shard_time(n), self.shard_time(n, reduces=True)
            if w.layout.pp > 1 and not w.overlaps_reduction:
                wait = (gather if is_kept else first) + reduce
            else:
                wait = max(
                    first,
                    self.expose(gather, sum(self.stages[i].forward for i in indices), share)
                    * is_kept,
                )
                beside = sum(sum(self.stages[i][1:3]) for i in indices)
                wait += max(last, self.expose(reduce, beside, share) * (is_kept or w.layout.pp > 1))
            replicas = 2 * self.collective_time(
                ("dp_replicate",), sum(map(w.count_at_rest, stages)) * w.reduce_bytes
            )
            if w.layout.pp == 1 or w.overlaps_reduction:  # per block, in the last backward
                beside = sum(sum(self.stages[i][1:3]) for i in indices)
                replicas = self.expose(
                    replicas, max(0.0, beside - reduce), self.find_share(("dp_replicate",))
                )
            wait += replicas
            waits.append(wait)
        return max(waits)

    @cached_property
    def optimizer_s(self) -> float:
        """Seconds of the optimizer on the rank with the most parameters.

        The norm reads the gradient; the update reads gradient, weight and moments, and writes weight and moments.
        """
        w = self.workload
        most = self.max_over_ranks(list(map(w.count_at_rest, w.stages)))
        of_matrices = max(map(self.matrices_time, range(w.layout.pp)))
        return of_matrices + self.memory_time(
            most * MASTER_BYTES * (4 + 2 * w.moment_bytes // MASTER_BYTES)
        )

    def matrices_time(self, pp_rank: int) -> float:
        """Return the seconds of Muon's rounds: Newton-Schulz of the largest matrix, and all-to-alls. No overlap."""
        seconds, dtype, width = 0.0, self.workload.compute_dtype, self.workload.compute_bytes
        for sizes, elements in self.workload.deal_rounds(pp_rank):
            *batch, m, n = *sizes[:-2], *sorted(sizes[-2:])
            products = (m, m, n), (m, m, m), (m, n, m)
            seconds += (
                NEWTON_SCHULZ_STEPS
                * prod(batch)
                * sum(self.cluster.matmul_time(*s, dtype) for s in products)
            )
            seconds += sum(
                2 * self.collective_time(dims, n * width) for dims, n in elements.items()
            )
        return seconds

    @cached_property
    def lower_bound_s(self) -> float:
        """Lower bound on the step time of any schedule: a rank waits for its first microbatch, then is never idle."""
        layout, busy, bounds = self.workload.layout, self.busy, []
        for rank in range(layout.pp):
            indices = layout.stages_of(rank)
            fill = sum(sum(self.stages[i][:2]) for i in range(indices[0]))
            bounds.append(fill + layout.n_microbatches * sum(busy[i] for i in indices))
        return max(bounds) + self.once_s + self.optimizer_s
