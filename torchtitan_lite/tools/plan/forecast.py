"""Forecast one step by the closed form: its time and the parts of that time, memory of each pp rank, error bar."""

from dataclasses import dataclass

from torchtitan_lite.config.block import count_flops_per_token
from torchtitan_lite.tools.plan.cluster import Cluster
from torchtitan_lite.tools.plan.memory import Memory, estimate_memory
from torchtitan_lite.tools.plan.orders import Order
from torchtitan_lite.tools.plan.step_time import StepTime
from torchtitan_lite.tools.plan.timeline import (
    Timeline,
    count_in_flight,
    extrapolate_in_flight,
    simulate,
)
from torchtitan_lite.tools.plan.workload import Workload

PARTS = {
    "recompute": "again",
    **{f"waiting for {axis}": axis for axis in ("tp", "cp", "ep", "dp")},
}  # fields of Phases


@dataclass(frozen=True)
class Forecast:
    """The forecast of one step of a workload."""

    workload: Workload
    cluster: Cluster
    step_time_s: float
    parts_s: dict[
        str, float
    ]  # "compute", "recompute", "bubble", ... -> seconds, averaged over pp ranks
    bubble: float  # idle fraction of a step, averaged over pp ranks
    timeline: Timeline  # of the whole step, or of the first sample of list_samples
    tokens_per_s_per_gpu: float
    # Model FLOP/s over the bf16 peak (fp32 runs: the fp32 peak), with full attention and with its causal half
    mfu_full: float
    mfu_causal: float


def forecast(model: StepTime, orders: list[tuple[Order, int]]) -> Forecast:
    """Forecast one step from weighted orders: the whole step with weight 1, or the samples of list_samples."""
    timelines = [
        (simulate(order, model.seconds_of, model.send_s), weight) for order, weight in orders
    ]
    end_time = sum(weight * timeline.end_time for timeline, weight in timelines)
    w, layout, busy = model.workload, model.workload.layout, model.busy
    m, flops = layout.n_microbatches, count_flops_per_token(w.args, w.seq_len)
    step_time_s = end_time + model.once_s + model.optimizer_s
    parts = {}
    for what, name in PARTS.items():
        parts[what] = m * sum(getattr(phases, name) for phases in model.stages) / layout.pp
    parts["waiting for dp"] += model.once_s
    parts["bubble"] = max(0.0, end_time - m * sum(busy) / layout.pp) * (layout.pp > 1)
    parts["optimizer"] = model.optimizer_s
    parts = {"compute": step_time_s - sum(parts.values()), **parts}
    bubble = parts["bubble"] / step_time_s
    speed = w.tokens_per_step / step_time_s / layout.world_size
    mfu = (
        speed * each / model.cluster.peak(w.compute_dtype) for each in (flops.full, flops.causal)
    )
    return Forecast(w, model.cluster, step_time_s, parts, bubble, timelines[0][0], speed, *mfu)


def list_memory(workload: Workload, order: Order) -> list[Memory]:
    """Return the peak memory of each pp rank."""
    return estimate_memory(workload, {rank: count_in_flight(row) for rank, row in enumerate(order)})


def estimate_peak(workload: Workload, schedule: str) -> float:
    """Return the peak live bytes of the fullest rank, extrapolated from short orders.

    Only the first pp rank, the second (it may have one layer more) and the last (the logits) can be the fullest.
    """
    layout = workload.layout
    in_flight = extrapolate_in_flight(
        schedule, layout.pp, layout.n_microbatches, len(layout.stages) // layout.pp
    )
    ranks = {0, min(1, layout.pp - 1), layout.pp - 1}
    return max(
        memory.live
        for memory in estimate_memory(workload, {rank: in_flight[rank] for rank in ranks})
    )
