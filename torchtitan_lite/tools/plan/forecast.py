"""Forecast one step by the closed form: its time and the parts of that time, memory of each pp rank, error bar."""

from dataclasses import dataclass

from torchtitan_lite.config.block import count_flops_per_token
from torchtitan_lite.tools.plan.cluster import Cluster
from torchtitan_lite.tools.plan.in_flight import count_in_flight, extrapolate_in_flight
from torchtitan_lite.tools.plan.layer_time import Phases
from torchtitan_lite.tools.plan.memory import Memory, estimate_memory
from torchtitan_lite.tools.plan.orders import Order
from torchtitan_lite.tools.plan.step_time import StepTime
from torchtitan_lite.tools.plan.timeline import Timeline, simulate
from torchtitan_lite.tools.plan.workload import Workload


@dataclass(frozen=True)
class Forecast:
    """The forecast of one step of a workload."""

    workload: Workload
    cluster: Cluster
    step_time_s: float
    parts_s: dict[str, float]  # "compute", "bubble", ... -> seconds, averaged over pp ranks
    bubble: float  # idle fraction of a step, averaged over pp ranks
    timeline: Timeline  # of the whole step, or of the first sample of list_samples
    tokens_per_s_per_gpu: float
    # Model FLOP/s over the bf16 peak (fp32 runs: the fp32 peak), with full attention and with its causal half
    mfu_full: float
    mfu_causal: float


def forecast(model: StepTime, orders: list[tuple[Order, int]]) -> Forecast:
    """Forecast one step from weighted orders: the whole step with weight 1, or the samples of list_samples."""
    w = model.workload
    layout = w.layout
    timelines = []
    end_time = 0.0
    for order, weight in orders:
        timelines.append(simulate(order, model.seconds_of, model.send_s))
        end_time += weight * timelines[-1].end_time
    step_time_s = end_time + model.once_s + model.optimizer_s
    n_times = layout.n_microbatches / layout.pp
    averages = [n_times * sum(seconds) for seconds in zip(*model.stages, strict=True)]
    average = Phases(*averages)  # of a step
    bubble = 0.0
    if layout.pp > 1:
        bubble = max(0.0, end_time - average.total)
    parts = {
        "recompute": average.again,
        "waiting for tp": average.tp,
        "waiting for cp": average.cp,
        "waiting for ep": average.ep,
        "waiting for dp": average.dp + model.once_s,
        "bubble": bubble,
        "optimizer": model.optimizer_s,
    }
    speed = w.tokens_per_step / step_time_s / layout.world_size
    flops = count_flops_per_token(w.args, w.seq_len)
    mfu_of_one_flop = speed / model.cluster.peak(w.compute_dtype)
    return Forecast(
        workload=w,
        cluster=model.cluster,
        step_time_s=step_time_s,
        parts_s={"compute": step_time_s - sum(parts.values()), **parts},
        bubble=bubble / step_time_s,
        timeline=timelines[0],
        tokens_per_s_per_gpu=speed,
        mfu_full=flops.full * mfu_of_one_flop,
        mfu_causal=flops.causal * mfu_of_one_flop,
    )


def list_memory(workload: Workload, order: Order) -> list[Memory]:
    """Return the peak memory of each pp rank."""
    return estimate_memory(workload, {rank: count_in_flight(row) for rank, row in enumerate(order)})


def estimate_peak(workload: Workload, schedule: str) -> float:
    """Return the peak live bytes of the fullest rank, extrapolated from short orders.

    Only the first pp rank, the second (it may have one layer more) and the last (the logits) can be the fullest.
    """
    layout = workload.layout
    per_rank = len(layout.stages) // layout.pp
    in_flight = extrapolate_in_flight(schedule, layout.pp, layout.n_microbatches, per_rank)
    fullest = {rank: in_flight[rank] for rank in {0, min(1, layout.pp - 1), layout.pp - 1}}
    return max(memory.live for memory in estimate_memory(workload, fullest))
