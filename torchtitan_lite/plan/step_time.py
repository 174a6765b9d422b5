"""Seconds that each stage takes on a cluster, by a roofline, and the part of the collectives that is exposed.

    matmuls       FLOPs / (peak x efficiency)            tp shares them
    attention     FLOPs of the causal half, at its own efficiency; kernels skip the other half
    elementwise   bytes / memory bandwidth               norms, rotary, SwiGLU, residual, loss; less where compiled
    tp            bytes / link bandwidth                 exposed: nothing overlaps it
    cp            the same, less the attention that overlaps it
    dp            the same, less the block (ZeRO 3) or the pass (ZeRO 1, 2) that overlaps it

All constants are in config/hardware.py: one set for each GPU. Legend in config/workload.py.
"""

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

from torchtitan_lite.config.hardware import Cluster
from torchtitan_lite.config.workload import MASTER_BYTES, Stage, Workload
from torchtitan_lite.plan.simulator import Durations

# Unfused attention: bytes per score (fp16) that softmax, dropout and two matmuls read and write.
UNFUSED_SCORE_BYTES = 13


class Phases(NamedTuple):
    """Seconds of one microbatch on a rank. In the exposed part of them it waits for other ranks."""

    forward: float = 0.0
    backward_input: float = 0.0  # with recompute
    backward_weight: float = 0.0
    exposed_tp: float = 0.0
    exposed_cp: float = 0.0

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

    @cached_property
    def linear_s(self) -> float:
        """Forward of a layer's matmuls."""
        w = self.workload
        return self.matmul_time(2 * w.n_tokens * w.linear_parameters / w.layout.tp, w.matmul_dtype)

    @cached_property
    def attention_s(self) -> float:
        """Forward of a layer's scores and values, the causal half: 2*T*S*H*E FLOPs."""
        w = self.workload
        flops = 2 * w.n_tokens * w.seq_len * w.args.n_heads * w.args.head_dim / w.layout.tp
        return flops / (self.cluster.peak(w.compute_dtype) * self.cluster.attention_efficiency)

    @cached_property
    def elementwise_s(self) -> float:
        """Forward of the rest of a layer; c bytes an element. Each eager kernel reads and writes its tensors."""
        w, c = self.workload, self.workload.compute_bytes
        tp, turned = w.layout.tp, (w.args.n_heads + w.args.n_kv_heads) * w.args.head_dim
        hidden = w.n_norms * (4 if w.compiled else 5) * c * w.args.dim / tp  # norms, and as many residual additions
        rotary = (2 * c if w.compiled else 2 * c + 16) * turned / tp  # eager: to fp32, product, and back
        swiglu = (3 if w.compiled else 5) * c * w.args.ffn_dim / tp
        scores = 0 if w.fused_attention else UNFUSED_SCORE_BYTES * w.seq_len * w.args.n_heads / tp
        return self.memory_time(w.n_tokens * (hidden + rotary + swiglu + scores))

    @cached_property
    def layer(self) -> Phases:
        """A layer, the mean over recompute modes. Backward computes twice what forward does, attention 2.5 times."""
        w = self.workload
        call_s, n_calls = self.collective_time(("tp",), w.hidden_bytes), w.n_norms + w.n_rowwise  # as in traffic.py
        again = {"none": 0, "op": w.n_norms, "full": n_calls - 1, "alternate": w.n_norms}
        tp_s, tp_again = call_s * n_calls, call_s * w.average(again)
        cp_forward, cp_backward = self.expose_context()
        cp_again = cp_forward * w.average({"none": 0, "op": 0, "full": 1, "alternate": 0})
        backward = self.linear_s + 2.5 * self.attention_s + 2 * self.elementwise_s + tp_s + cp_backward
        return Phases(
            forward=self.linear_s + self.attention_s + self.elementwise_s + tp_s + cp_forward,
            backward_input=backward + self.again_s + tp_again + cp_again,
            backward_weight=self.linear_s,
            exposed_tp=2 * tp_s + tp_again,
            exposed_cp=cp_forward + cp_backward + cp_again,
        )

    @cached_property
    def again_s(self) -> float:
        """Recompute of a layer. "full" leaves out the last matmul, whose output backward does not need."""
        last = self.workload.last_linear_parameters / self.workload.linear_parameters
        return self.workload.average(
            {
                "none": 0.0,
                "op": self.elementwise_s,
                "full": self.linear_s * (1 - last) + self.attention_s + self.elementwise_s,
                "alternate": self.elementwise_s + self.linear_s / 3,
            }
        )

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
        parts = list(zip(self.layer, self.embedding, self.head, strict=True))

        def add_up(stage: Stage) -> Phases:
            n, e, h = stage.n_layers, stage.has_embedding, stage.has_head
            return Phases(*(n * layer + e * embedding + h * head for layer, embedding, head in parts))

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

    def gather(self, n_parameters: float) -> float:
        return self.collective_time(("dp_shard", "cp"), n_parameters * self.workload.compute_bytes)

    def reduce(self, n_parameters: float) -> float:
        return self.collective_time(("dp_shard", "cp"), n_parameters * MASTER_BYTES)

    def expose_gathers(self, stage: Stage) -> tuple[float, float]:
        """Return one microbatch's waits, forward and backward, for parameters and for the reduction of gradients."""
        w = self.workload
        if w.is_whole:
            return 0.0, 0.0
        n = w.layer_parameters
        gather = self.gather(n) if w.layout.zero_stage == 3 else 0.0
        reduce = self.reduce(n) if w.n_reductions == w.layout.n_microbatches else 0.0
        forward = stage.n_layers * max(0.0, gather - self.layer.forward)
        return forward, stage.n_layers * max(0.0, gather + reduce - self.layer.backward)

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
        for rank in range(w.layout.pp):
            indices = w.layout.stages_of(rank)
            n = sum(w.count_stage_parameters(w.stages[index]) for index in indices)
            forward = sum(self.stages[index].forward for index in indices)
            backward = sum(self.stages[index].backward for index in indices)
            whole = w.layout.zero_stage < 3
            wait = max(self.gather(w.layer_parameters), self.gather(n) - forward if whole else 0.0)
            if w.layout.pp > 1:
                wait += self.reduce(n)
            else:
                wait += max(self.reduce(w.layer_parameters), self.reduce(n) - backward if whole else 0.0)
            wait += 2 * self.collective_time(("dp_replicate",), n / w.n_shards * MASTER_BYTES)
            waits.append(wait)
        return max(waits)

    @cached_property
    def optimizer_s(self) -> float:
        """Seconds of the optimizer on the rank with most parameters, by numbers read and written per parameter.

        Norm and clipping read the gradient twice and write it; the update reads weight and gradient and writes the
        weight, and reads and writes each moment.
        """
        w = self.workload
        most = self.max_over_ranks([w.count_stage_parameters(stage) for stage in w.stages])
        numbers = 3 + 3 + 2 * w.moment_bytes // MASTER_BYTES
        return self.memory_time(most / w.n_shards * MASTER_BYTES * numbers)

    # ------------------------------------------------------------ the step

    @cached_property
    def exposed_s(self) -> dict[str, float]:
        """Mesh axis -> exposed seconds of a step, of the worst rank."""
        m = self.workload.layout.n_microbatches
        late = [sum(self.expose_gathers(stage)) for stage in self.workload.stages]
        return {
            "tp": m * self.max_over_ranks([phases.exposed_tp for phases in self.stages]),
            "cp": m * self.max_over_ranks([phases.exposed_cp for phases in self.stages]),
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
