"""The forecast of one step by the closed form: time, tokens per second, MFU, bubble, waits, memory of each pp rank."""

from dataclasses import dataclass

from torchtitan_lite.config.block import count_flops_per_token
from torchtitan_lite.tools.plan.cluster import Cluster
from torchtitan_lite.tools.plan.memory import Memory, estimate_memory, weigh_waiting
from torchtitan_lite.tools.plan.simulator import (
    PipelineOrder,
    Timeline,
    count_in_flight,
    list_samples,
    pipeline_order,
    simulate,
)
from torchtitan_lite.tools.plan.step_time import StepTimeModel
from torchtitan_lite.tools.plan.workload import Workload

SECONDS_PER_DAY = 86400


@dataclass(frozen=True)
class Rate:
    """Speed of a step."""

    step_time_s: float
    tokens_per_s_per_gpu: float
    mfu_full: float  # of the bf16 peak, attention counted in full
    mfu_causal: float

    def count_days(self, n_tokens: float, world_size: int) -> float:
        """Return the days to train on `n_tokens` without any stop."""
        return n_tokens / (self.tokens_per_s_per_gpu * world_size) / SECONDS_PER_DAY


@dataclass(frozen=True)
class Forecast:
    """Speed of a step, and its waits."""

    rate: Rate
    bubble: float  # idle fraction of the pipeline
    exposed_s: dict[str, float]  # axis -> seconds in which the worst rank waits for others, without the bubble
    timeline: Timeline | None = None  # None if only short schedules were simulated


def forecast(workload: Workload, cluster: Cluster, order: PipelineOrder) -> Forecast:
    """Forecast one step from the order of all its microbatches."""
    model = StepTimeModel(workload, cluster)
    timeline = simulate(order, model.durations)
    rate = rate_step(workload, cluster, timeline.end_time + model.once_s + model.optimizer_s)
    return Forecast(rate, timeline.bubble, model.exposed_s, timeline)


def forecast_quickly(model: StepTimeModel, schedule: str) -> Forecast:
    """Forecast a step. A schedule of many microbatches is extrapolated from short ones."""
    layout, durations = model.workload.layout, model.durations
    per_rank, end_time = len(layout.stages) // layout.pp, 0.0
    for n_microbatches, weight in list_samples(layout.n_microbatches, layout.pp):
        order = pipeline_order(schedule, layout.pp, n_microbatches, per_rank)
        end_time += weight * simulate(order, durations).end_time
    rate = rate_step(model.workload, model.cluster, end_time + model.once_s + model.optimizer_s)
    bubble = max(0.0, 1 - layout.n_microbatches * sum(durations.busy) / (end_time * layout.pp))
    return Forecast(rate, bubble, model.exposed_s)


def rate_step(workload: Workload, cluster: Cluster, step_time_s: float) -> Rate:
    """Return tokens per second and MFU of a step that takes `step_time_s`."""
    tokens_per_s = workload.tokens_per_step / step_time_s / workload.layout.world_size
    flops = count_flops_per_token(workload.args, workload.seq_len)
    peak = cluster.peak("float32" if workload.compute_dtype == "float32" else "bfloat16")
    return Rate(step_time_s, tokens_per_s, tokens_per_s * flops.full / peak, tokens_per_s * flops.causal / peak)


def list_memory(workload: Workload, order: PipelineOrder) -> list[Memory]:
    """Return the peak memory of each pp rank."""
    weight = weigh_waiting(workload)
    return [estimate_memory(workload, rank, count_in_flight(row, weight)) for rank, row in enumerate(order)]
