"""Forecast a step: closed forms (config/memory.py, traffic.py, step_time.py) and the simulated schedule."""

from collections.abc import Callable
from dataclasses import dataclass

from torchtitan_lite.config.cluster import Cluster
from torchtitan_lite.config.flavors import count_flops_per_token
from torchtitan_lite.config.memory import Memory, estimate_memory
from torchtitan_lite.config.workload import Workload
from torchtitan_lite.plan.simulator import (
    PipelineOrder,
    Timeline,
    count_in_flight,
    extrapolate,
    list_samples,
    simulate,
)
from torchtitan_lite.plan.step_time import StepTimeModel
from torchtitan_lite.plan.traffic import Traffic, list_traffic

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
class QuickForecast:
    """What is needed to compare layouts."""

    rate: Rate
    bubble: float  # idle share of the pipeline
    memory: list[Memory]  # by pp rank

    @property
    def live_bytes(self) -> float:
        """Peak memory of the rank with the highest peak."""
        return max(memory.live for memory in self.memory)


@dataclass(frozen=True)
class Forecast(QuickForecast):
    """The whole forecast. Seconds are of one step and of the worst rank."""

    timeline: Timeline
    exposed_s: dict[str, float]  # axis -> seconds in which a rank waits for others, without the bubble
    optimizer_s: float
    traffic: list[list[Traffic]]  # by pp rank


def forecast(workload: Workload, cluster: Cluster, order: PipelineOrder) -> Forecast:
    """Forecast one step from the order of all its microbatches."""
    model = StepTimeModel(workload, cluster)
    timeline = simulate(order, model.durations)
    return Forecast(
        rate=rate_step(workload, cluster, timeline.end_time + model.once_s + model.optimizer_s),
        bubble=timeline.bubble,
        memory=list_memory(workload, order),
        timeline=timeline,
        exposed_s=model.exposed_s,
        optimizer_s=model.optimizer_s,
        traffic=list_all_traffic(workload, order),
    )


def list_memory(workload: Workload, order: PipelineOrder) -> list[Memory]:
    """Return the memory of each pp rank."""
    return [estimate_memory(workload, rank, count_in_flight(row)) for rank, row in enumerate(order)]


def list_all_traffic(workload: Workload, order: PipelineOrder) -> list[list[Traffic]]:
    """Return the traffic of each pp rank."""
    return [list_traffic(workload, rank, order) for rank in range(workload.layout.pp)]


def forecast_quickly(model: StepTimeModel, order: Callable[[int], PipelineOrder]) -> QuickForecast:
    """Forecast a step whose schedule is long from short ones. `order`: number of microbatches -> order of work."""
    workload, layout = model.workload, model.workload.layout
    n = layout.n_microbatches
    end_time = extrapolate(lambda length: simulate(order(length), model.durations).end_time, n, layout.pp)
    samples = [(list(map(count_in_flight, order(length))), weight) for length, weight in list_samples(n, layout.pp)]
    return QuickForecast(
        rate=rate_step(workload, model.cluster, end_time + model.once_s + model.optimizer_s),
        bubble=max(0.0, 1 - n * sum(model.durations.busy) / (end_time * layout.pp)),
        memory=[
            estimate_memory(
                workload,
                rank,
                {i: sum(held[rank][i] * weight for held, weight in samples) for i in layout.stages_of(rank)},
            )
            for rank in range(layout.pp)
        ],
    )


def rate_step(workload: Workload, cluster: Cluster, step_time_s: float) -> Rate:
    """Return tokens per second and MFU of a step that takes `step_time_s`, forecast or measured."""
    tokens_per_s = workload.tokens_per_step / step_time_s / workload.layout.world_size
    flops = count_flops_per_token(workload.shape, workload.seq_len)
    peak = cluster.peak("float32" if workload.compute_dtype == "float32" else "bfloat16")
    return Rate(step_time_s, tokens_per_s, tokens_per_s * flops.full / peak, tokens_per_s * flops.causal / peak)


def count_rank_flops(workload: Workload, pp_rank: int) -> int:
    """Return the FLOPs of one rank's matmuls and attention kernels in a step, as torch's FLOP counter counts them.

    Attention counts in full, and its backward has five matmuls for the forward's two; under cp, pieces that no query
    sees are left out (context_parallel.py). Full recompute stops before the last matmul.
    """
    shape, layout, tokens = workload.shape, workload.layout, workload.n_tokens
    linear = 2 * tokens * workload.linear_parameters // layout.tp
    attention = 4 * tokens * workload.seq_len * shape.n_heads * shape.head_dim // layout.tp
    if layout.cp > 1 and not workload.documents:
        attention = attention * (layout.cp + 1) // (2 * layout.cp)
    last = 2 * tokens * workload.last_linear_parameters // layout.tp
    again = workload.average({"none": 0, "op": 0, "full": linear + attention - last})
    head = 2 * tokens * shape.dim * shape.vocab_size // layout.tp
    total = 0.0
    for index in layout.stages_of(pp_rank):
        stage = workload.stages[index]
        total += stage.n_layers * (3 * linear + 3.5 * attention + again) + 3 * head * stage.has_head
    return round(total * layout.n_microbatches)
