"""The forecast of one step by the closed form: time and where it goes, memory of each pp rank, error bar."""

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan_lite.config.block import count_flops_per_token
from torchtitan_lite.tools.plan.cluster import Cluster
from torchtitan_lite.tools.plan.memory import Memory, estimate_memory, weigh_waiting
from torchtitan_lite.tools.plan.orders import Order, list_order
from torchtitan_lite.tools.plan.step_time import StepTime
from torchtitan_lite.tools.plan.timeline import (
    Timeline,
    count_in_flight,
    extrapolate_in_flight,
    list_samples,
    simulate,
)
from torchtitan_lite.tools.plan.workload import Workload

SECONDS_PER_DAY = 86400
# Published runs whose source had no part in the fit (tests/test_published.py, assets/benchmarks/published_layouts.md):
# median of |forecast / published - 1|, and the range of forecast / published of 80 % of the rows
MEDIAN_ERROR = {"throughput": 0.08, "memory": 0.03}
RANGE_80 = {"throughput": (0.95, 1.18), "memory": (0.98, 1.12)}


@dataclass(frozen=True)
class Forecast:
    """One step of a workload."""

    workload: Workload
    cluster: Cluster
    step_time_s: float
    parts_s: Mapping[str, float]  # what -> seconds of the step, of the rank that works longest
    bubble: float  # idle fraction of the pipeline
    timeline: Timeline | None = None  # None if only short schedules were simulated

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.workload.tokens_per_step / self.step_time_s / self.workload.layout.world_size

    @property
    def mfu_full(self) -> float:
        """Model FLOP/s over the bf16 peak, attention counted in full; fp32 runs over the fp32 peak."""
        return self._mfu(count_flops_per_token(self.workload.args, self.workload.seq_len).full)

    @property
    def mfu_causal(self) -> float:
        """The same with the causal half of attention."""
        return self._mfu(count_flops_per_token(self.workload.args, self.workload.seq_len).causal)

    def _mfu(self, flops: int) -> float:
        dtype = "float32" if self.workload.compute_dtype == "float32" else "bfloat16"
        return self.tokens_per_s_per_gpu * flops / self.cluster.peak(dtype)

    def count_days(self, n_tokens: float) -> float:
        """Return the days to train on `n_tokens` without any stop."""
        return n_tokens / self.workload.tokens_per_step * self.step_time_s / SECONDS_PER_DAY


def forecast(workload: Workload, cluster: Cluster, order: Order) -> Forecast:
    """Forecast one step from the order of all its microbatches."""
    model = StepTime(workload, cluster)
    timeline = simulate(order, model.seconds_of, model.send_s)
    return describe_forecast(model, timeline.end_time, timeline)


def forecast_quickly(model: StepTime, schedule: str) -> Forecast:
    """Forecast a step. A schedule of many microbatches is extrapolated from short ones."""
    layout, end_time = model.workload.layout, 0.0
    for n_microbatches, weight in list_samples(layout.n_microbatches, layout.pp):
        order = list_order(schedule, layout.pp, n_microbatches, len(layout.stages) // layout.pp)
        end_time += weight * simulate(order, model.seconds_of, model.send_s).end_time
    return describe_forecast(model, end_time)


def describe_forecast(model: StepTime, end_time: float, timeline: Timeline | None = None) -> Forecast:
    """Return the forecast of a step whose forwards and backwards end after `end_time` seconds."""
    m, busy = model.workload.layout.n_microbatches, [sum(seconds) for seconds in model.busy]
    step_time_s = end_time + model.once_s + model.optimizer_s
    parts = {
        "recompute": m * model.max_over_ranks([phases.again for phases in model.stages]),
        "bubble": max(0.0, end_time - m * model.max_over_ranks(busy)) * (model.workload.layout.pp > 1),
        "optimizer": model.optimizer_s,
        **{f"waiting for {axis}": seconds for axis, seconds in model.exposed_s.items()},
    }
    parts = {"compute": step_time_s - sum(parts.values()), **parts}
    bubble = max(0.0, 1 - m * sum(busy) / (end_time * model.workload.layout.pp))
    return Forecast(model.workload, model.cluster, step_time_s, parts, bubble, timeline)


def list_memory(workload: Workload, order: Order) -> list[Memory]:
    """Return the peak memory of each pp rank."""
    weight = weigh_waiting(workload) if workload.splits_backward else 1.0
    return [estimate_memory(workload, rank, count_in_flight(row, weight)) for rank, row in enumerate(order)]


def estimate_peak(workload: Workload, schedule: str) -> float:
    """Return the live bytes of the rank that holds most, from short schedules.

    It is the first pp rank, the second (one layer more), or the last (the logits).
    """
    layout = workload.layout
    weight = weigh_waiting(workload) if workload.splits_backward else 1.0
    n_per_rank = len(layout.stages) // layout.pp
    in_flight = extrapolate_in_flight(schedule, layout.pp, layout.n_microbatches, n_per_rank, weight)
    ranks = {0, min(1, layout.pp - 1), layout.pp - 1}
    return max(estimate_memory(workload, rank, in_flight[rank]).live for rank in ranks)
