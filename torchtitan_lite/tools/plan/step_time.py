"""Seconds that each stage takes on a cluster, by a roofline, and the part of the collectives that is exposed.

    matmuls       FLOPs / (peak x efficiency)            tp shares them
    attention     FLOPs of the causal half, at its own efficiency; kernels skip the other half
    elementwise   bytes / memory bandwidth               norms, rotary, SwiGLU, residual, loss; less where compiled
    tp            bytes / link bandwidth                 exposed: nothing overlaps it
    cp            the same, less the attention that overlaps it
    ep            the same, exposed, of the most loaded rank: the others wait for it
    dp            the same, less the block (ZeRO 3) or the pass (ZeRO 1, 2) that overlaps it

All constants are in cluster.py: one set for each GPU. Legend in workload.py.
"""

from collections.abc import Sequence
from functools import cached_property
from math import prod
from operator import mul
from typing import NamedTuple

from torchtitan_lite.config.block import count_expert_parameters
from torchtitan_lite.tools.plan.cluster import Cluster
from torchtitan_lite.tools.plan.simulator import Durations
from torchtitan_lite.tools.plan.workload import MASTER_BYTES, LayerKind, Stage, Workload, count_layers

# Unfused attention: bytes per score (fp16) that softmax, dropout and two matmuls read and write.
UNFUSED_SCORE_BYTES = 13


class Phases(NamedTuple):
    """Seconds of one microbatch on a rank. In the exposed part of them it waits for other ranks."""

    forward: float = 0.0
    backward_input: float = 0.0  # with recompute
    backward_weight: float = 0.0
    exposed_tp: float = 0.0
    exposed_cp: float = 0.0
    exposed_ep: float = 0.0
    again: float = 0.0  # recompute, in backward_input

    @property
    def backward(self) -> float:
        return self.backward_input + self.backward_weight


class StepTimeModel:
    """The seconds of a workload's step on a cluster."""

    def __init__(self, workload: Workload, cluster: Cluster):
        self.workload, self.cluster = workload, cluster
        self.strides = workload.layout.strides

    # ------------------------------------------------------------ the three kinds of work

    def collective_time(self, dims: tuple[str, ...], whole_bytes: float) -> float:
        """Return the seconds of one all-gather or reduce-scatter of a tensor over the group along `dims`."""
        n = prod(getattr(self.workload.layout, dim) for dim in dims)
        if n == 1:
            return 0.0
        bandwidth = self.cluster.find_bandwidth(self.strides[dims[-1]], n)
        return whole_bytes * (n - 1) / n / bandwidth + self.cluster.latency_s

    def matmul_time(self, flops: float, dtype: str) -> float:
        """Return the seconds of matmuls in `dtype`."""
        cluster = self.cluster
        efficiency = cluster.float8_efficiency if dtype == "float8" else cluster.matmul_efficiency
        return flops / (cluster.peak(dtype) * efficiency)

    def memory_time(self, n_bytes: float) -> float:
        """Return the seconds in which elementwise kernels read and write `n_bytes`."""
        return n_bytes / (self.cluster.memory_bandwidth * self.cluster.memory_efficiency)

    # ------------------------------------------------------------ a layer, a stage

    def exchange_time(self, n_rows: float) -> float:
        """Return the seconds of an all-to-all over ep in which a rank sends or receives `n_rows` rows, its own too.

        Rows for other nodes leave by the rank's own network card, beside those for its node.
        """
        w, n, cluster = self.workload, max(1, self.workload.layout.ep), self.cluster
        if n == 1:
            return 0.0
        n_bytes, n_near = n_rows * w.args.dim * w.compute_bytes / n, min(n, cluster.node_size)
        near, far = (n_near - 1) * n_bytes / cluster.link_bandwidth, (n - n_near) * n_bytes / cluster.network_bandwidth
        return max(near, far) / cluster.link_efficiency + cluster.latency_s

    def linear_time(self, kind: LayerKind) -> float:
        """Return the seconds of forward's matmuls in a layer; with experts those of the most loaded rank."""
        w = self.workload
        seconds = self.matmul_time(2 * w.n_tokens * kind.linear_parameters / w.layout.tp, w.matmul_dtype)
        if kind.is_moe:
            seconds += self.matmul_time(2 * w.n_tokens * kind.router_parameters / w.layout.tp, "float32")
            seconds += self.matmul_time(2 * w.n_rows_received * count_expert_parameters(w.args), w.compute_dtype)
        return seconds

    @cached_property
    def attention_s(self) -> float:
        """Forward of a layer's scores and values, the causal half: 2*T*S*H*E FLOPs."""
        w = self.workload
        flops = 2 * w.n_tokens * w.seq_len * w.args.n_heads * w.args.head_dim / w.layout.tp
        return flops / (self.cluster.peak(w.compute_dtype) * self.cluster.attention_efficiency)

    def elementwise_time(self, kind: LayerKind) -> float:
        """Return the seconds of the rest of a layer's forward. Each eager kernel reads and writes its tensors.

        c bytes an element. Rows are copied where they are sorted, twice more where they travel, and added up in fp32.
        """
        w, c = self.workload, self.workload.compute_bytes
        tp, turned = w.layout.tp, (w.args.n_heads + w.args.n_kv_heads) * w.args.head_dim
        per_norm, per_product = (4 if w.compiled else 5) * c, (3 if w.compiled else 5) * c
        n_norms = sum(norm.split == "sequence" for norm in kind.norms)
        hidden = n_norms * per_norm * w.args.dim / tp  # and as many residual additions
        rotary = ((2 * c if w.compiled else 2 * c + 16) + per_norm * w.args.qk_norm) * turned / tp
        swiglu = per_product * sum(kind.product_widths) / tp
        scores = 0 if w.fused_attention else UNFUSED_SCORE_BYTES * w.seq_len * w.args.n_heads / tp
        n_bytes = w.n_tokens * (hidden + rotary + swiglu + scores)
        if kind.is_moe:
            n_bytes += w.n_rows * w.args.dim * (5 * c + 16)
            n_bytes += w.n_rows_received * (5 * c * w.args.moe.expert_ffn_dim)
            n_bytes += w.n_rows_received * w.args.dim * 4 * c * (w.layout.ep > 1)
        return self.memory_time(n_bytes)

    def describe_layer(self, kind: LayerKind) -> Phases:
        """Return the mean over the recompute modes of a layer. Backward computes twice what forward does, attention
        2.5 times.
        """
        w = self.workload
        linear, elementwise = self.linear_time(kind), self.elementwise_time(kind)
        call_s, n_calls = self.collective_time(("tp",), w.hidden_bytes), kind.n_gathers + kind.n_rowwise  # traffic.py
        again = {"none": 0, "op": kind.n_gathers, "full": n_calls - kind.ends_in_rowwise, "alternate": kind.n_gathers}
        tp_s, tp_again = call_s * n_calls, call_s * kind.average(again)
        cp_forward, cp_backward = self.expose_context()
        if_full = kind.average({"none": 0, "op": 0, "full": 1, "alternate": 0})
        rows_s = 2 * self.exchange_time(w.n_rows_received) if kind.is_moe else 0.0
        ep_forward = rows_s + self.cluster.latency_s * (rows_s > 0)  # the counts
        left_out = self.matmul_time(2 * w.n_tokens * kind.left_out_parameters / w.layout.tp, w.matmul_dtype)
        again_s = kind.average(
            {
                "none": 0.0,
                "op": elementwise,
                "full": linear - left_out + self.attention_s + elementwise,
                "alternate": elementwise + linear / 3,
            }
        )
        backward = linear + 2.5 * self.attention_s + 2 * elementwise + tp_s + cp_backward + rows_s
        waits_again = tp_again + (cp_forward + ep_forward) * if_full
        return Phases(
            forward=linear + self.attention_s + elementwise + tp_s + cp_forward + ep_forward,
            backward_input=backward + again_s + waits_again,
            backward_weight=linear,
            exposed_tp=2 * tp_s + tp_again,
            exposed_cp=cp_forward + cp_backward + cp_forward * if_full,
            exposed_ep=ep_forward + rows_s + ep_forward * if_full,
            again=again_s,
        )

    @cached_property
    def layers(self) -> list[tuple[LayerKind, Phases]]:
        return [(kind, self.describe_layer(kind)) for kind in self.workload.kinds]

    def expose_context(self) -> tuple[float, float]:
        """Return a layer's waits for keys and values, forward and backward.

        An all-gather overlaps with the rank's own part of attention, 1/cp of it; a ring overlaps with all of it. The
        reduction of fp32 gradients overlaps with nothing.
        """
        w, n = self.workload, self.workload.layout.cp
        if n == 1:
            return 0.0, 0.0
        fetch = self.collective_time(("cp",), w.keys_values_bytes) + self.cluster.latency_s * (n - 2) * w.ring
        reduce = self.collective_time(("cp",), w.keys_values_bytes / w.compute_bytes * 4)
        beside = self.attention_s if w.ring else self.attention_s / n
        if w.ring:
            return max(0.0, fetch - beside), max(0.0, fetch + reduce - 2.5 * beside)
        return max(0.0, fetch - beside), max(0.0, fetch - 2.5 * beside) + reduce

    @cached_property
    def head(self) -> Phases:
        """The head and its loss: logits in compute dtype, and three fp32 tensors of them written and read."""
        w = self.workload
        linear = self.matmul_time(2 * w.n_tokens * w.args.dim * w.args.vocab_size / w.layout.tp, w.compute_dtype)
        logits = w.n_tokens * w.args.vocab_size / (w.layout.tp if w.shards_loss else 1)
        loss, tp_s = self.memory_time(12 * logits), self.collective_time(("tp",), w.hidden_bytes)
        return Phases(linear + loss + tp_s, linear + loss + tp_s, linear, exposed_tp=2 * tp_s)

    @cached_property
    def embedding(self) -> Phases:
        tp_s = self.collective_time(("tp",), self.workload.hidden_bytes)
        lookup = self.memory_time(2 * self.workload.hidden_bytes)
        return Phases(lookup + tp_s, tp_s, lookup, exposed_tp=2 * tp_s)

    @cached_property
    def stages(self) -> list[Phases]:
        """The layers, the embedding and the head of each stage."""
        kinds, layers = zip(*self.layers, strict=True)

        def add_up(stage: Stage) -> Phases:
            counts = [*(count_layers(stage, kind) for kind in kinds), stage.has_embedding, stage.has_head]
            phases = [*layers, self.embedding, self.head]
            return Phases(*(sum(map(mul, counts, seconds)) for seconds in zip(*phases, strict=True)))

        of_kinds = {stage: add_up(stage) for stage in set(self.workload.stages)}  # most are alike
        return [of_kinds[stage] for stage in self.workload.stages]

    def max_over_ranks(self, of_stages: Sequence[float]) -> float:
        """Return the largest sum over the stages of one pp rank."""
        layout = self.workload.layout
        return max(sum(of_stages[index] for index in layout.stages_of(rank)) for rank in range(layout.pp))

    @cached_property
    def durations(self) -> Durations:
        """Durations of the stages, for the simulator. FSDP's exposed gathers of a microbatch delay that microbatch."""
        layout, w = self.workload.layout, self.workload
        send = 0.0
        if layout.pp > 1:
            tier = self.cluster.find_bandwidth(self.strides["pp"], layout.pp)
            send = w.hidden_bytes / layout.tp / tier + self.cluster.latency_s
        late = [self.expose_gathers(stage) for stage in w.stages]
        return Durations(
            tuple(phases.forward + forward for phases, (forward, _) in zip(self.stages, late, strict=True)),
            tuple(phases.backward_input + backward for phases, (_, backward) in zip(self.stages, late, strict=True)),
            tuple(phases.backward_weight for phases in self.stages),
            send,
        )

    # ------------------------------------------------------------ sharded data parallel

    def gather(self, *n_parameters: float) -> float:
        return self.shard_time(*n_parameters, self.workload.compute_bytes)

    def reduce(self, *n_parameters: float) -> float:
        return self.shard_time(*n_parameters, MASTER_BYTES)

    def shard_time(self, n_parameters: float, n_of_experts: float, width: int) -> float:
        """Return the seconds of a collective over all shards of parameters, those of experts over their own ranks."""
        seconds = self.collective_time(("dp_shard", "cp"), n_parameters * width)
        return seconds + (self.collective_time(("efsdp",), n_of_experts * width) if n_of_experts else 0.0)

    def expose_gathers(self, stage: Stage) -> tuple[float, float]:
        """Return one microbatch's waits, forward and backward, for parameters and for the reduction of gradients."""
        w, forward, backward = self.workload, 0.0, 0.0
        if w.is_whole:
            return 0.0, 0.0
        for kind, layer in self.layers:
            of_layer, n = (kind.parameters, kind.moe_parameters), count_layers(stage, kind)
            gather = self.gather(*of_layer) if w.layout.zero_stage == 3 else 0.0
            reduce = self.reduce(*of_layer) if w.n_reductions == w.layout.n_microbatches else 0.0
            forward += n * max(0.0, gather - layer.forward)
            backward += n * max(0.0, gather + reduce - layer.backward)
        return forward, backward

    @cached_property
    def once_s(self) -> float:
        """Seconds that FSDP exposes once a step, on the worst rank.

        Nothing overlaps with the first gather and the last reduction. In a pipeline torch reduces all gradients after
        the last backward.
        """
        w = self.workload
        if w.is_whole:
            return 0.0
        waits = []
        largest = max(((kind.parameters, kind.moe_parameters) for kind in w.kinds), key=sum)
        for rank in range(w.layout.pp):
            stages = [w.stages[index] for index in w.layout.stages_of(rank)]
            n = sum(map(w.count_stage_parameters, stages)), sum(map(w.count_stage_moes, stages))
            forward = sum(self.stages[index].forward for index in w.layout.stages_of(rank))
            backward = sum(self.stages[index].backward for index in w.layout.stages_of(rank))
            whole = w.layout.zero_stage < 3
            wait = max(self.gather(*largest), self.gather(*n) - forward if whole else 0.0)
            if w.layout.pp > 1:
                wait += self.reduce(*n)
            else:
                wait += max(self.reduce(*largest), self.reduce(*n) - backward if whole else 0.0)
            wait += 2 * self.collective_time(("dp_replicate",), sum(map(w.count_at_rest, stages)) * MASTER_BYTES)
            waits.append(wait)
        return max(waits)

    @cached_property
    def optimizer_s(self) -> float:
        """Seconds of the optimizer on the rank with most parameters, by numbers read and written per parameter.

        Norm and clipping read the gradient twice and write it; the update reads weight and gradient and writes the
        weight, and reads and writes each moment.
        """
        w = self.workload
        most = self.max_over_ranks(list(map(w.count_at_rest, w.stages)))
        numbers = 3 + 3 + 2 * w.moment_bytes // MASTER_BYTES
        return self.memory_time(most * MASTER_BYTES * numbers)

    # ------------------------------------------------------------ the step

    @cached_property
    def exposed_s(self) -> dict[str, float]:
        """Mesh axis -> exposed seconds of a step, of the worst rank."""
        layout, m = self.workload.layout, self.workload.layout.n_microbatches
        late = [sum(self.expose_gathers(stage)) for stage in self.workload.stages]
        return {
            "tp": m * self.max_over_ranks([phases.exposed_tp for phases in self.stages]),
            "cp": m * self.max_over_ranks([phases.exposed_cp for phases in self.stages]),
            **({"ep": m * self.max_over_ranks([phases.exposed_ep for phases in self.stages])} if layout.ep else {}),
            "dp": self.once_s + m * self.max_over_ranks(late),
        }

    @cached_property
    def lower_bound_s(self) -> float:
        """A lower bound for any schedule: a rank waits for its first microbatch, works, and earlier stages end."""
        durations, layout = self.durations, self.workload.layout
        bounds = []
        for rank in range(layout.pp):
            indices = layout.stages_of(rank)
            fill = sum(durations.forward[i] + durations.backward_input[i] for i in range(indices[0]))
            bounds.append(fill + layout.n_microbatches * sum(durations.busy[i] for i in indices))
        return max(bounds) + self.once_s + self.optimizer_s
