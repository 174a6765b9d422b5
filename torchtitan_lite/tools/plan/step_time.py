"""Forecast the time of one step on a cluster: pipeline stages, waits for FSDP, optimizer."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from operator import mul

from torchtitan_lite.config.block import count_flops_per_token
from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.extensions.muon_rounds import NEWTON_SCHULZ_STEPS
from torchtitan_lite.models.registry import MODELS
from torchtitan_lite.tools.plan.layer_time import LayerTime, Phases
from torchtitan_lite.tools.plan.orders import Action, list_order, shorten
from torchtitan_lite.tools.plan.timeline import simulate

# ZeRO stage -> two numbers of bytes that FSDP reads and writes per parameter if there is only one shard. The first is
# per step, the second per microbatch. FSDP casts and copies weights, and concatenates, copies and adds gradients. The
# numbers were recorded with float32 weights (assets/benchmarks/2026-11-29-no-gpu.md). With bfloat16 weights, ZeRO 3
# moves 6 bytes less per parameter and microbatch than in this table.
COPIED_BYTES = {1: (22, 10), 2: (-2, 26), 3: (-12, 46)}


@dataclass(frozen=True)
class Forecast:
    """The forecast time of one step."""

    step_time_s: float
    parts_s: dict[str, float]  # "compute", "bubble", ... -> seconds, averaged over pp ranks
    bubble: float  # idle fraction of a step, averaged over pp ranks
    tokens_per_s_per_gpu: float
    # Model FLOP/s, counted with full and with causal attention, divided by the peak of the compute dtype
    mfu_full: float
    mfu_causal: float


class StepTime(LayerTime):
    """Estimates the time of one step of a workload on a cluster. All times are in seconds."""

    @cached_property
    def stages(self) -> list[Phases]:
        """The phases of each stage, summed over its layers and its head. The time of the embedding is negligible."""
        kinds = self.workload.kinds
        phases = [*map(self.describe_layer, kinds), self.describe_head()]
        found = {}
        for stage in set(self.workload.stages):  # compute equal stages once
            n_heads = stage.has_head * MODELS[self.workload.args.name].head_calls
            counts = [*(kind.count(stage) for kind in kinds), n_heads]
            sums = [sum(map(mul, counts, seconds)) for seconds in zip(*phases, strict=True)]
            found[stage] = Phases(*sums)
        return [found[stage] for stage in self.workload.stages]

    @cached_property
    def send_s(self) -> float:
        """Time to send hidden states, or their gradient, from one pp rank to the next."""
        w = self.workload
        is_near = self.cluster.count_nodes(*self.place("pp")) == 1
        bandwidth = self.cluster.links if is_near else self.cluster.network
        return w.hidden_bytes / w.layout.tp / bandwidth + self.cluster.network_latency_s

    def seconds_of(self, action: Action) -> float:
        """Return the duration of an action. B, a backward that is not split, takes as long as I and W together."""
        forward, of_input, of_weight, *_ = self.stages[action.stage]
        return {"F": forward, "B": of_input + of_weight, "I": of_input, "W": of_weight}[action.kind]

    # ------------------------------------------------------------ the step

    @cached_property
    def once_s(self) -> float:
        """Exposed time of FSDP's collectives that run once per step, on the slowest rank."""
        return max(self.wait_once(rank) for rank, *_ in self.workload.alike)

    def wait_once(self, pp_rank: int) -> float:
        """Return how many seconds one pp rank waits for those collectives of FSDP that run once per step.

        The first all-gather and the last reduction overlap with nothing. In a pipeline, torch reduces the gradients
        of a stage after the last backward of the stage. Without a pipeline, the last backward all-reduces the gradients
        of each block over dp_replicate.
        """
        w = self.workload
        is_freed = w.layout.zero_stage == 3
        first = max(self.gather_time(kind.gathered) for kind in w.kinds)
        gather = self.gather_time(w.sum_stages(w.gathered, pp_rank))
        reduce = self.reduce_time(w.sum_stages(w.sizes, pp_rank))
        gradients_bytes = w.at_rest[pp_rank] * w.reduce_bytes
        replicas = 2 * self.collective_time("dp_replicate", gradients_bytes)
        if w.layout.pp > 1:
            return (first if is_freed else gather) + reduce + replicas
        (phases,) = self.stages
        backward = phases.total - phases.forward
        last = max(self.reduce_time(kind.sizes) for kind in w.kinds)
        if not is_freed:
            first = max(first, self.expose("fsdp", gather, phases.forward))
            last = max(last, self.expose("fsdp", reduce, backward))
        return first + last + self.expose("dp_replicate", replicas, max(0.0, backward - reduce))

    @cached_property
    def copies_s(self) -> float:
        """Seconds per step of FSDP's copies if there is only one shard, on the pp rank with the most parameters.

        With several shards, the result is 0. The copies do not overlap with compute.
        """
        w = self.workload
        if w.layout.fsdp > 1 or w.is_whole:
            return 0.0
        n = w.layout.n_microbatches
        stage = w.layout.zero_stage
        once, each = COPIED_BYTES[stage if n > 1 else max(stage, 2)]
        return self.copy_time(max(w.at_rest) * (once + each * n))

    @cached_property
    def optimizer_s(self) -> float:
        """Time of the optimizer on the slowest rank."""
        return max(self.update_time(rank) for rank, *_ in self.workload.alike)

    def update_time(self, pp_rank: int) -> float:
        """Return the time of the optimizer on one pp rank.

        Computing the gradient norm reads the gradient. The update reads gradient, weight and moments, and writes weight
        and moments. In each round of Muon, the all-to-alls and the Newton-Schulz of the largest matrix do not overlap.
        """
        w = self.workload
        per_parameter = w.weight_bytes * 4 + 2 * w.moment_bytes
        seconds = self.cluster.memory_time(w.at_rest[pp_rank] * per_parameter)
        for (*batch, rows, columns), elements in w.deal_rounds(pp_rank):
            m, n = sorted((rows, columns))
            for sizes in ((m, m, n), (m, m, m), (m, n, m)):
                product = self.cluster.matmul_time(*sizes, w.compute_dtype)
                seconds += NEWTON_SCHULZ_STEPS * prod(batch) * product
            for axis, n_elements in elements.items():
                n_bytes = n_elements * w.compute_bytes
                seconds += 2 * self.collective_time(axis, n_bytes)
        return seconds

    @cached_property
    def lower_bound_s(self) -> float:
        """Lower bound on the step time: a rank waits for its first microbatch, and is never idle after that.

        Unless the backward is split, the bound includes the time in which the last backward runs through the earlier
        stages. With a split backward, the rank can compute its last weight gradients during this time.
        """
        layout = self.workload.layout
        splits_backward = SCHEDULES[self.workload.schedule].splits_backward
        passes = []  # seconds of the first microbatch on each stage
        for phases in self.stages:
            after = 0.0 if splits_backward else phases.backward_input
            passes.append(phases.forward + after)
        fills = [0.0, *accumulate(passes)]
        bounds = []
        for *_, rank in self.workload.alike:  # the last pp rank of a group starts latest
            indices = layout.stages_of(rank)
            busy = sum(self.stages[index].total for index in indices)
            bounds.append(fills[indices[0]] + layout.n_microbatches * busy)
        return max(bounds) + self.once_s + self.copies_s + self.optimizer_s

    @cached_property
    def pipeline_s(self) -> float:
        """Time of all forwards and backwards of a step. Simulates shorter steps (orders.shorten)."""
        end_time = 0.0
        for short, weight in shorten(self.workload.pipeline):
            order = list_order(short)
            end_time += weight * simulate(order, self.seconds_of, self.send_s).end_time
        return end_time

    def forecast(self) -> Forecast:
        """Forecast one step."""
        w = self.workload
        layout = w.layout
        step_time_s = self.pipeline_s + self.once_s + self.copies_s + self.optimizer_s
        n_times = layout.n_microbatches / layout.pp
        # time of all microbatches of a step
        average = Phases(*(n_times * sum(seconds) for seconds in zip(*self.stages, strict=True)))
        bubble = 0.0
        if layout.pp > 1:
            bubble = max(0.0, self.pipeline_s - average.total)
        parts = {
            "recompute": average.again,
            "waiting for tp": average.tp,
            "waiting for cp": average.cp,
            "waiting for ep": average.ep,
            "waiting for dp": average.dp + self.once_s,
            "bubble": bubble,
            "copies of FSDP": self.copies_s,
            "optimizer": self.optimizer_s,
        }
        speed = w.tokens_per_step / step_time_s / layout.world_size
        flops = count_flops_per_token(w.args, w.seq_len, w.attention_row)
        mfu_of_one_flop = speed / self.cluster.peak(w.compute_dtype)
        return Forecast(
            step_time_s=step_time_s,
            parts_s={"compute": step_time_s - sum(parts.values()), **parts},
            bubble=bubble / step_time_s,
            tokens_per_s_per_gpu=speed,
            mfu_full=flops.full * mfu_of_one_flop,
            mfu_causal=flops.causal * mfu_of_one_flop,
        )
