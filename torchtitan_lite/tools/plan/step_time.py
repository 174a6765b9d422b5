"""Estimate the seconds of each pipeline stage on a cluster, and of what a step does once: waits for FSDP, optimizer."""

from functools import cached_property
from math import prod
from operator import mul

from torchtitan_lite.config.block import NEWTON_SCHULZ_STEPS
from torchtitan_lite.tools.plan.layer_time import LayerTime, Phases
from torchtitan_lite.tools.plan.orders import Action
from torchtitan_lite.tools.plan.workload import MASTER_BYTES


class StepTime(LayerTime):
    """Estimates the seconds of one step of a workload on a cluster."""

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
        is_near = self.cluster.count_nodes(*self.place("pp")) == 1
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
        stages = w.stages_of(pp_rank)
        sizes = w.count_by_axis(stages)
        forward = 0.0
        backward = 0.0
        for index in w.layout.stages_of(pp_rank):
            forward += self.stages[index].forward
            backward += self.stages[index].backward_input + self.stages[index].backward_weight
        first = max(self.gather_time(kind.sizes) for kind in w.kinds)
        last = max(self.reduce_time(kind.sizes) for kind in w.kinds)
        gather = self.gather_time(sizes)
        reduce = self.reduce_time(sizes)
        gradients_bytes = w.count_at_rest(stages) * w.reduce_bytes
        replicas = 2 * self.collective_time("dp_replicate", gradients_bytes)
        is_freed = w.layout.zero_stage == 3
        if w.layout.pp > 1 and not w.overlaps_reduction:
            return (first if is_freed else gather) + reduce + replicas
        if not is_freed or w.layout.pp > 1:
            last = max(last, self.expose("fsdp", reduce, backward))
        if not is_freed:
            first = max(first, self.expose("fsdp", gather, forward))
        beside = max(0.0, backward - reduce)
        return first + last + self.expose("dp_replicate", replicas, beside)

    @cached_property
    def optimizer_s(self) -> float:
        """Seconds of the optimizer on the slowest rank."""
        return max(map(self.update_time, range(self.workload.layout.pp)))

    def update_time(self, pp_rank: int) -> float:
        """Return the seconds of the optimizer on one pp rank.

        The norm reads the gradient; the update reads gradient, weight and moments, and writes weight and moments. In
        each round of Muon, Newton-Schulz of the largest matrix and the all-to-alls overlap with nothing.
        """
        w = self.workload
        n_parameters = w.count_at_rest(w.stages_of(pp_rank))
        per_parameter = MASTER_BYTES * 4 + 2 * w.moment_bytes
        seconds = self.cluster.memory_time(n_parameters * per_parameter)
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
