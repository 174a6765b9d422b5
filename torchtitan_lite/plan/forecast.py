"""What a step costs, before it is run: the closed form (memory.py, traffic.py, pace.py) and the simulated schedule."""

from collections.abc import Callable
from dataclasses import dataclass

from torchtitan_lite.config.cluster import Cluster
from torchtitan_lite.config.flavors import count_flops_per_token, count_layer_parameters
from torchtitan_lite.plan.memory import Memory, estimate_memory
from torchtitan_lite.plan.pace import StepTimeModel
from torchtitan_lite.plan.simulator import Rows, Timeline, count_in_flight, extrapolate, list_samples, simulate
from torchtitan_lite.plan.traffic import Traffic, list_traffic
from torchtitan_lite.plan.workload import Workload

SECONDS_PER_DAY = 86400


@dataclass(frozen=True)
class Rate:
    """How fast a step of so many seconds is."""

    step_time_s: float
    tokens_per_s_per_gpu: float
    mfu_full: float  # of the bf16 peak, attention counted in full
    mfu_causal: float

    def count_days(self, n_tokens: float, world_size: int) -> float:
        """To train on that many tokens, without any stop."""
        return n_tokens / (self.tokens_per_s_per_gpu * world_size) / SECONDS_PER_DAY


@dataclass(frozen=True)
class Sketch:
    """What is needed to compare layouts. Memory is by pp rank."""

    rate: Rate
    bubble: float  # idle share of the pipeline
    memory: list[Memory]

    @property
    def live_bytes(self) -> float:
        """Of the rank that holds most."""
        return max(memory.live for memory in self.memory)


@dataclass(frozen=True)
class Forecast(Sketch):
    """All of it. Seconds are of one step and of the worst rank."""

    timeline: Timeline
    exposed_s: dict[str, float]  # axis -> seconds in which a rank waits for others, the bubble aside
    optimizer_s: float
    traffic: list[list[Traffic]]  # by pp rank


def forecast(workload: Workload, cluster: Cluster, rows: Rows) -> Forecast:
    """`rows` is the order of work of each pp rank in a step (schedule_order.py)."""
    pace = StepTimeModel(workload, cluster)
    timeline = simulate(rows, pace.durations)
    return Forecast(
        rate=rate_step(workload, cluster, timeline.end_time + pace.once_s + pace.optimizer_s),
        bubble=timeline.bubble,
        memory=list_memory(workload, rows),
        timeline=timeline,
        exposed_s=pace.exposed_s,
        optimizer_s=pace.optimizer_s,
        traffic=list_all_traffic(workload, rows),
    )


def list_memory(workload: Workload, rows: Rows) -> list[Memory]:
    """Of each pp rank. It depends on no cluster."""
    return [estimate_memory(workload, rank, count_in_flight(row)) for rank, row in enumerate(rows)]


def list_all_traffic(workload: Workload, rows: Rows) -> list[list[Traffic]]:
    """Of each pp rank. It depends on no cluster."""
    return [list_traffic(workload, rank, rows) for rank in range(workload.layout.pp)]


def sketch(pace: StepTimeModel, order: Callable[[int], Rows]) -> Sketch:
    """The same in less time for long schedules. `order`: number of microbatches -> rows."""
    workload, n = pace.workload, pace.workload.layout.n_microbatches

    def measure(n_microbatches: int) -> float:
        return simulate(order(n_microbatches), pace.durations).end_time

    end_time = extrapolate(measure, n, workload.layout.pp)
    return Sketch(
        rate=rate_step(workload, pace.cluster, end_time + pace.once_s + pace.optimizer_s),
        bubble=max(0.0, 1 - n * sum(pace.durations.busy) / (end_time * workload.layout.pp)),
        memory=sketch_memory(workload, order),
    )


def sketch_memory(workload: Workload, order: Callable[[int], Rows]) -> list[Memory]:
    """Memory of each pp rank, with the microbatches in flight of a short schedule."""
    layout = workload.layout
    samples = [
        ([count_in_flight(row) for row in order(n)], weight)
        for n, weight in list_samples(layout.n_microbatches, layout.pp)
    ]
    return [
        estimate_memory(
            workload, rank, {i: sum(held[rank][i] * weight for held, weight in samples) for i in layout.stages_of(rank)}
        )
        for rank in range(layout.pp)
    ]


def rate_step(workload: Workload, cluster: Cluster, step_time_s: float) -> Rate:
    """Tokens per second and MFU of a step that takes so long, whether forecast or measured."""
    tokens_per_s = workload.tokens_per_step / step_time_s / workload.layout.world_size
    flops = count_flops_per_token(workload.shape, workload.seq_len)
    peak = cluster.peak("float32" if workload.compute_dtype == "float32" else "bfloat16")
    return Rate(step_time_s, tokens_per_s, tokens_per_s * flops.full / peak, tokens_per_s * flops.causal / peak)


def count_rank_flops(workload: Workload, pp_rank: int) -> int:
    """FLOPs of all matmuls and attention kernels of one rank in a step, as torch's FLOP counter counts them.

    Attention counts in full, and its backward five matmuls for the forward's two; with cp, whole pieces that nobody
    sees are left out (context_attention.py). Recompute ends early, before w2.
    """
    shape, layout, tokens = workload.shape, workload.layout, workload.n_tokens
    linear = 2 * tokens * (count_layer_parameters(shape) - 2 * shape.dim) // layout.tp
    attention = 4 * tokens * workload.seq_len * shape.n_heads * shape.head_dim // layout.tp
    if layout.cp > 1 and not workload.documents:
        attention = attention * (layout.cp + 1) // (2 * layout.cp)
    last = 2 * tokens * shape.dim * shape.ffn_dim // layout.tp
    again = workload.average({"none": 0, "op": 0, "full": linear + attention - last})
    head = 2 * tokens * shape.dim * shape.vocab_size // layout.tp
    total = 0.0
    for index in layout.stages_of(pp_rank):
        stage = workload.stages[index]
        total += stage.n_layers * (3 * linear + 3.5 * attention + again) + 3 * head * stage.has_head
    return round(total * layout.n_microbatches)
