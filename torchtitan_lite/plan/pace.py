"""Seconds that each stage takes on a cluster, by a roofline, and what of the collectives cannot hide behind them.

    matmuls       FLOPs / (peak x efficiency)            tp shares them
    attention     FLOPs of the causal half, at its own efficiency; kernels skip the other half
    elementwise   bytes / memory bandwidth               norms, rotary, SwiGLU, residual, loss; less where compiled
    tp            bytes / link bandwidth                 nothing overlaps it
    cp            as far as longer than the attention that runs beside it
    dp            as far as longer than the block (ZeRO 3) or the pass (ZeRO 1, 2) that runs beside it

Every constant is in cluster.py, and there is one for all models and layouts of a GPU. Legend in workload.py.
"""

from functools import cached_property
from math import prod
from typing import NamedTuple

from torchtitan_lite.config.cluster import Cluster, find_strides
from torchtitan_lite.config.flavors import count_layer_parameters
from torchtitan_lite.plan.simulator import Durations
from torchtitan_lite.plan.workload import MASTER_BYTES, STATE_BYTES, Stage, Workload

# Scores written and read by softmax, dropout and two matmuls where attention is not fused, bytes each (fp16).
UNFUSED_SCORE_BYTES = 13


class Phases(NamedTuple):
    """Seconds that one microbatch takes of a rank. The exposed part of them is spent waiting for other ranks."""

    forward: float = 0.0
    backward_input: float = 0.0  # with what is computed again
    backward_weight: float = 0.0
    exposed_tp: float = 0.0
    exposed_cp: float = 0.0

    @property
    def backward(self) -> float:
        return self.backward_input + self.backward_weight


class StepTimeModel:
    """The seconds of a workload on a cluster."""

    def __init__(self, workload: Workload, cluster: Cluster):
        self.workload, self.cluster = workload, cluster
        self.strides = find_strides(workload.layout)

    # ------------------------------------------------------------ the three kinds of work

    def move(self, dims: tuple[str, ...], whole_bytes: float) -> float:
        """Seconds of one all-gather or reduce-scatter of a tensor over the group along `dims`."""
        n = prod(getattr(self.workload.layout, dim) for dim in dims)
        if n == 1:
            return 0.0
        bandwidth = self.cluster.find_bandwidth(self.strides[dims[-1]], n)
        return whole_bytes * (n - 1) / n / bandwidth + self.cluster.latency_s

    def multiply(self, flops: float, dtype: str) -> float:
        cluster = self.cluster
        efficiency = cluster.float8_efficiency if dtype == "float8" else cluster.matmul_efficiency
        return flops / (cluster.peak(dtype) * efficiency)

    def touch(self, n_bytes: float) -> float:
        """Seconds in which elementwise kernels read and write so many bytes."""
        return n_bytes / (self.cluster.memory_bandwidth * self.cluster.memory_efficiency)

    # ------------------------------------------------------------ a layer, a stage

    @cached_property
    def linear_s(self) -> float:
        """Forward of a layer's seven matmuls."""
        w = self.workload
        weights = count_layer_parameters(w.shape) - 2 * w.shape.dim
        return self.multiply(2 * w.n_tokens * weights / w.layout.tp, w.matmul_dtype)

    @cached_property
    def attention_s(self) -> float:
        """Forward of a layer's scores and values, the causal half: 2*T*S*H*E FLOPs."""
        w = self.workload
        flops = 2 * w.n_tokens * w.seq_len * w.shape.n_heads * w.shape.head_dim / w.layout.tp
        return flops / (self.cluster.peak(w.compute_dtype) * self.cluster.attention_efficiency)

    @cached_property
    def elementwise_s(self) -> float:
        """Forward of all the rest of a layer; c bytes an element. Eager kernels read and write each on their own."""
        w, c = self.workload, self.workload.compute_bytes
        tp, turned = w.layout.tp, (w.shape.n_heads + w.shape.n_kv_heads) * w.shape.head_dim
        hidden = (8 if w.compiled else 10) * c * w.shape.dim / tp  # two norms, two residual additions
        rotary = (2 * c if w.compiled else 2 * c + 16) * turned / tp  # eager: to fp32, product, and back
        swiglu = (3 if w.compiled else 5) * c * w.shape.ffn_dim / tp
        scores = 0 if w.fused_attention else UNFUSED_SCORE_BYTES * w.seq_len * w.shape.n_heads / tp
        return self.touch(w.n_tokens * (hidden + rotary + swiglu + scores))

    @cached_property
    def layer(self) -> Phases:
        """A layer, the mean over recompute modes. Backward computes twice what forward does, attention 2.5 times."""
        w = self.workload
        tp_s = self.move(("tp",), w.hidden_bytes)
        tp_again = tp_s * w.average({"none": 0, "op": 2, "full": 3, "alternate": 2})
        cp_forward, cp_backward = self.expose_context()
        cp_again = cp_forward * w.average({"none": 0, "op": 0, "full": 1, "alternate": 0})
        backward = self.linear_s + 2.5 * self.attention_s + 2 * self.elementwise_s + 4 * tp_s + cp_backward
        return Phases(
            forward=self.linear_s + self.attention_s + self.elementwise_s + 4 * tp_s + cp_forward,
            backward_input=backward + self.again_s + tp_again + cp_again,
            backward_weight=self.linear_s,
            exposed_tp=8 * tp_s + tp_again,
            exposed_cp=cp_forward + cp_backward + cp_again,
        )

    @cached_property
    def again_s(self) -> float:
        """What a layer computes again in backward. Of the matmuls, "full" leaves out w2, whose output nobody needs."""
        shape = self.workload.shape
        last = shape.dim * shape.ffn_dim / (count_layer_parameters(shape) - 2 * shape.dim)
        return self.workload.average(
            {
                "none": 0.0,
                "op": self.elementwise_s,
                "full": self.linear_s * (1 - last) + self.attention_s + self.elementwise_s,
                "alternate": self.elementwise_s + self.linear_s / 3,
            }
        )

    def expose_context(self) -> tuple[float, float]:
        """Forward and backward waits of a layer for keys and values. The part of attention that is the rank's own runs
        beside an all-gather, 1/cp of it; a ring hides behind all of it; gradients in fp32 are waited for."""
        w, n = self.workload, self.workload.layout.cp
        if n == 1:
            return 0.0, 0.0
        fetch = self.move(("cp",), w.keys_values_bytes) + self.cluster.latency_s * (n - 2) * w.ring
        reduce = self.move(("cp",), w.keys_values_bytes / w.compute_bytes * 4)
        beside = self.attention_s if w.ring else self.attention_s / n
        if w.ring:
            return max(0.0, fetch - beside), max(0.0, fetch + reduce - 2.5 * beside)
        return max(0.0, fetch - beside), max(0.0, fetch - 2.5 * beside) + reduce

    @cached_property
    def head(self) -> Phases:
        """The head and its loss: logits in compute dtype, and six passes over them in fp32."""
        w = self.workload
        linear = self.multiply(2 * w.n_tokens * w.shape.dim * w.shape.vocab_size / w.layout.tp, w.compute_dtype)
        logits = w.n_tokens * w.shape.vocab_size / (w.layout.tp if w.shards_loss else 1)
        loss, tp_s = self.touch(12 * logits), self.move(("tp",), w.hidden_bytes)
        return Phases(linear + loss + tp_s, linear + loss + tp_s, linear, exposed_tp=2 * tp_s)

    @cached_property
    def embedding(self) -> Phases:
        tp_s = self.move(("tp",), self.workload.hidden_bytes)
        lookup = self.touch(2 * self.workload.hidden_bytes)
        return Phases(lookup + tp_s, tp_s, lookup, exposed_tp=2 * tp_s)

    def time_stage(self, stage: Stage) -> Phases:
        n, e, h = stage.n_layers, stage.has_embedding, stage.has_head
        phases = zip(self.layer, self.embedding, self.head, strict=True)
        return Phases(*(n * layer + e * embedding + h * head for layer, embedding, head in phases))

    @cached_property
    def stages(self) -> list[Phases]:
        of = {stage: self.time_stage(stage) for stage in set(self.workload.stages)}  # most are alike
        return [of[stage] for stage in self.workload.stages]

    @cached_property
    def durations(self) -> Durations:
        """Of the stages, for the simulator. What FSDP fetches for each microbatch delays that microbatch."""
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
        return self.move(("dp_shard", "cp"), n_parameters * self.workload.compute_bytes)

    def reduce(self, n_parameters: float) -> float:
        return self.move(("dp_shard", "cp"), n_parameters * MASTER_BYTES)

    def expose_gathers(self, stage: Stage) -> tuple[float, float]:
        """Waits of one microbatch, forward and backward, for parameters and for the reduction of gradients."""
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
        """What FSDP makes a step wait for, once: the worst rank's. The first fetch has nothing to hide behind, nor has
        the last reduction; in a pipeline torch reduces all gradients after the last backward."""
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
            wait += 2 * self.move(("dp_replicate",), n / w.n_shards * MASTER_BYTES)
            waits.append(wait)
        return max(waits)

    @cached_property
    def optimizer_s(self) -> float:
        """Weights, gradients and moments read, all but the gradients written, and gradients read for their norm and
        scaled: 7 numbers and 3 for AdamW. Of the rank with most parameters."""
        w = self.workload
        most = max(
            sum(w.count_stage_parameters(w.stages[index]) for index in w.layout.stages_of(rank))
            for rank in range(w.layout.pp)
        )
        numbers = 3 + 3 + 2 * STATE_BYTES[w.optimizer] // MASTER_BYTES
        return self.touch(most / w.n_shards * MASTER_BYTES * numbers)

    # ------------------------------------------------------------ the step

    @cached_property
    def exposed_s(self) -> dict[str, float]:
        """Mesh axis -> seconds of a step in which the worst rank waits for others."""
        w, m = self.workload, self.workload.layout.n_microbatches
        ranks = [w.layout.stages_of(rank) for rank in range(w.layout.pp)]
        late = [sum(self.expose_gathers(stage)) for stage in w.stages]
        return {
            "tp": max(m * sum(self.stages[index].exposed_tp for index in indices) for indices in ranks),
            "cp": max(m * sum(self.stages[index].exposed_cp for index in indices) for indices in ranks),
            "dp": self.once_s + max(m * sum(late[index] for index in indices) for indices in ranks),
        }

    @cached_property
    def least_s(self) -> float:
        """What no schedule undercuts: a rank waits for its first microbatch, works, and the stages before it end."""
        durations, layout = self.durations, self.workload.layout
        bounds = []
        for rank in range(layout.pp):
            indices = layout.stages_of(rank)
            fill = sum(durations.forward[i] + durations.backward_input[i] for i in range(indices[0]))
            bounds.append(fill + layout.n_microbatches * sum(durations.busy[i] for i in indices))
        return max(bounds) + self.once_s + self.optimizer_s
