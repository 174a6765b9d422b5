"""`plan --search`: every layout of a model on a cluster that `check` accepts, by predicted throughput.

    degrees x schedule x microbatch x ZeRO stage x recompute  ->  check's rules  ->  memory  ->  closed form, simulated

The closed form ranks what fits by the time that no schedule undercuts; schedules are then simulated from the top until
no other layout can come among the best. So the ten best are those that simulating all of them would give.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import prod

from torchtitan_lite.config.checks import find_refused
from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.config.cluster import Cluster
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.layout import Layout, plan_layout
from torchtitan_lite.config.schema import Config, ConfigError, Problem
from torchtitan_lite.plan.forecast import Sketch, sketch
from torchtitan_lite.plan.memory import estimate_memory
from torchtitan_lite.plan.pace import StepTimeModel
from torchtitan_lite.plan.schedule_order import pipeline_order
from torchtitan_lite.plan.simulator import count_in_flight, list_samples
from torchtitan_lite.plan.workload import Workload, describe_workload

MICROBATCHES = (1, 2, 4, 8)  # sequences
STAGES_PER_RANK = (2, 4, 8)  # of interleaved schedules
SHORTEST_SHARE = 1024  # tokens of a sequence that a cp rank gets at least
RECOMPUTE = {"none": ("none", "op"), "op": ("selective", "op"), "every 2nd": ("selective", "2"), "full": ("full", "op")}


@dataclass(frozen=True)
class Candidate:
    """A layout that `check` accepts."""

    config: Config
    workload: Workload
    live_bytes: float  # of the rank that holds most
    pace: StepTimeModel


@dataclass
class Search:
    """What was found."""

    n_accepted: int = 0
    fitting: list[Candidate] = field(default_factory=list)
    best: list[tuple[Candidate, Sketch]] = field(default_factory=list)
    refused: Counter = field(default_factory=Counter)  # key -> layouts that it ruled out
    examples: dict[str, Problem] = field(default_factory=dict)
    leanest: Candidate | None = None  # that needs least memory

    def list_obstacles(self) -> list[Problem]:
        """For each rule that ruled layouts out, one of them as an example; those that ruled out most come first."""
        return [self.examples[key] for key, _ in self.refused.most_common()]


def search(config: Config, shape: ModelArgs, world_size: int, cluster: Cluster, *, n_best: int = 10) -> Search:
    """All layouts of the model of `config` on so many GPUs; its global batch stays. The best first."""
    if world_size > cluster.node_size and world_size % cluster.node_size:
        remedy = f"Use a multiple of {cluster.node_size}, or say node_size in a --hardware file"
        why = f"nodes of this kind have {cluster.node_size} GPUs, and the last one would not be full"
        raise ConfigError([Problem("--gpus", world_size, why, remedy)])
    found = Search()
    for candidate in list_candidates(config, shape, world_size, cluster, found):
        found.n_accepted += 1
        if candidate.live_bytes * cluster.reserve_factor <= cluster.memory_bytes:
            found.fitting.append(candidate)
        if found.leanest is None or candidate.live_bytes < found.leanest.live_bytes:
            found.leanest = candidate
    found.fitting.sort(key=lambda candidate: (candidate.pace.least_s, candidate.live_bytes))
    for candidate in found.fitting:
        if len(found.best) == n_best and candidate.pace.least_s >= found.best[-1][1].rate.step_time_s:
            break
        found.best.append((candidate, sketch_candidate(candidate)))
        found.best.sort(key=lambda pair: (pair[1].rate.step_time_s, pair[0].live_bytes))
        del found.best[n_best:]
    return found


def sketch_candidate(candidate: Candidate) -> Sketch:
    section, layout = candidate.config.parallelism, candidate.workload.layout
    per_rank = len(layout.stages) // layout.pp
    order = partial(pipeline_order, section.pipeline_parallel_schedule, layout.pp, n_stages_per_rank=per_rank)
    return sketch(candidate.pace, order)


def list_candidates(
    config: Config, shape: ModelArgs, world_size: int, cluster: Cluster, found: Search
) -> Iterator[Candidate]:
    """Those that `check` accepts; the others are noted in `found`."""
    for proposal in list_proposals(config, shape, world_size, cluster, found):
        try:
            layout = plan_layout(proposal, shape, world_size)
        except ConfigError as error:
            note_refusal(found, error.problems)
            continue
        for mode, option in RECOMPUTE.values():
            section = replace(proposal.activation_checkpoint, mode=mode, selective_ac_option=option)
            candidate = replace(proposal, activation_checkpoint=section)
            if problems := find_refused(candidate, shape, layout.zero_stage):
                note_refusal(found, problems)
                continue
            yield describe_candidate(candidate, shape, layout, cluster)


def describe_candidate(config: Config, shape: ModelArgs, layout: Layout, cluster: Cluster) -> Candidate:
    workload = describe_workload(config, shape, layout)
    return Candidate(config, workload, find_live_bytes(config, workload), StepTimeModel(workload, cluster))


def list_proposals(
    config: Config, shape: ModelArgs, world_size: int, cluster: Cluster, found: Search
) -> Iterator[Config]:
    """Every layout worth a look, without recompute. tp stays inside a node; a shard group is all of dp, or 64 or 8."""
    seq_len, global_batch = config.training.seq_len, find_global_batch(config, world_size)
    for tp in divisors(world_size, cluster.node_size):
        for pp in divisors(world_size // tp, shape.n_layers):
            for cp in divisors(world_size // tp // pp, max(1, seq_len // SHORTEST_SHARE)):
                dp = world_size // (tp * pp * cp)
                if global_batch % dp:
                    why = f"{dp} data-parallel ranks (tp {tp}, pp {pp}, cp {cp}) cannot share it evenly"
                    remedy = "Use a batch that more numbers divide, a power of two for instance"
                    note_refusal(found, [Problem("training.global_batch_size", global_batch, why, remedy)])
                    continue
                for dp_shard in {n for n in (dp, 64, 8) if dp % n == 0}:
                    degrees = {
                        "tensor_parallel_degree": tp,
                        "pipeline_parallel_degree": pp,
                        "context_parallel_degree": cp,
                        "data_parallel_shard_degree": dp_shard,
                        "data_parallel_replicate_degree": dp // dp_shard,
                    }
                    yield from list_batches(config, degrees, global_batch // dp, shape)


def list_batches(config: Config, degrees: dict[str, int], n_sequences: int, shape: ModelArgs) -> Iterator[Config]:
    """Microbatches, ZeRO stages and schedules for one set of degrees; each rank works on `n_sequences` a step."""
    pp = degrees["pipeline_parallel_degree"]
    for microbatch in (size for size in MICROBATCHES if n_sequences % size == 0):
        local_batch_size = n_sequences if pp > 1 else microbatch
        global_batch = n_sequences * degrees["data_parallel_shard_degree"] * degrees["data_parallel_replicate_degree"]
        training = replace(config.training, local_batch_size=local_batch_size, global_batch_size=global_batch)
        for schedule in list_schedules(config, pp, shape.n_layers):
            for zero_stage in (1, 3) if pp > 1 else (1, 2, 3):
                parallelism = replace(
                    config.parallelism,
                    **degrees,
                    **schedule,
                    zero_stage=zero_stage,
                    fsdp_reshard_after_forward="default",
                    pipeline_parallel_microbatch_size=microbatch if pp > 1 else 1,
                    pipeline_parallel_schedule_csv="",
                    module_fqns_per_model_part=[],
                )
                section = replace(config.activation_checkpoint, mode="none")
                yield replace(config, training=training, parallelism=parallelism, activation_checkpoint=section)


def list_schedules(config: Config, pp: int, n_layers: int) -> list[dict[str, object]]:
    """Keys of every schedule. Those that take any number of stages a rank are tried with a few."""
    if pp == 1:
        return [{"pipeline_parallel_layers_per_stage": None}]
    section = config.parallelism
    weight = n_layers + section.pipeline_parallel_first_stage_less_layers
    weight += section.pipeline_parallel_last_stage_less_layers
    keys = []
    for name, schedule in SCHEDULES.items():
        for per_rank in STAGES_PER_RANK if schedule.most_stages_per_rank is None else (None,):
            layers = None if per_rank is None else -(-weight // (pp * per_rank))
            if per_rank and -(-weight // layers) != pp * per_rank:
                continue  # no length of a stage makes this number of them
            keys.append({"pipeline_parallel_schedule": name, "pipeline_parallel_layers_per_stage": layers})
    return keys


def divisors(n: int, most: int) -> list[int]:
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]


def find_global_batch(config: Config, world_size: int) -> int:
    """Sequences of a step: what the config says, or what its own layout makes of its local batch."""
    if config.training.global_batch_size != -1:
        return config.training.global_batch_size
    section = config.parallelism
    others = prod((section.pipeline_parallel_degree, section.context_parallel_degree, section.tensor_parallel_degree))
    return config.training.local_batch_size * max(1, world_size // others)


@lru_cache(maxsize=4096)
def count_held(schedule: str, pp: int, n_microbatches: int, per_rank: int) -> list[dict[int, float]]:
    """Stage -> microbatches in flight, of each pp rank."""
    total: list[dict[int, float]] = [Counter() for _ in range(pp)]
    for length, weight in list_samples(n_microbatches, pp):
        for held, row in zip(total, pipeline_order(schedule, pp, length, per_rank), strict=True):
            for stage, count in count_in_flight(row).items():
                held[stage] += count * weight
    return total


def find_live_bytes(config: Config, workload: Workload) -> float:
    """Of the rank that holds most: the first, the next (which holds a layer more), or the last (the logits)."""
    layout = workload.layout
    per_rank = len(layout.stages) // layout.pp
    held = count_held(config.parallelism.pipeline_parallel_schedule, layout.pp, layout.n_microbatches, per_rank)
    return max(estimate_memory(workload, rank, held[rank]).live for rank in {0, min(1, layout.pp - 1), layout.pp - 1})


def note_refusal(found: Search, problems: list[Problem]) -> None:
    for problem in problems:
        found.refused[problem.key] += 1
        found.examples.setdefault(problem.key, problem)


def find_least_gpus(config: Config, shape: ModelArgs, cluster: Cluster, world_size: int) -> int | None:
    """The least number of whole nodes above `world_size` on which some layout fits, in GPUs; None up to 64 times it.

    A batch for which one sequence a rank suffices, and full recompute: the leanest that there is.
    """
    n_nodes = max(1, world_size // cluster.node_size)
    while n_nodes * cluster.node_size < 64 * world_size:
        n_nodes += max(1, n_nodes // 8)
        if fits_anyhow(config, shape, cluster, n_nodes * cluster.node_size):
            break
    else:
        return None
    while fits_anyhow(config, shape, cluster, (n_nodes - 1) * cluster.node_size):
        n_nodes -= 1
    return n_nodes * cluster.node_size


def fits_anyhow(config: Config, shape: ModelArgs, cluster: Cluster, world_size: int) -> bool:
    """Whether a lean layout fits: ZeRO 3 with full recompute over all degrees, one sequence a data-parallel rank."""
    for tp in divisors(world_size, cluster.node_size):
        for cp in divisors(world_size // tp, max(1, config.training.seq_len // SHORTEST_SHARE)):
            parallelism = replace(
                type(config.parallelism)(),
                tensor_parallel_degree=tp,
                context_parallel_degree=cp,
                data_parallel_shard_degree=world_size // tp // cp,
                zero_stage=3,
            )
            lean = replace(
                config,
                parallelism=parallelism,
                training=replace(config.training, local_batch_size=1, global_batch_size=-1),
                activation_checkpoint=replace(config.activation_checkpoint, mode="full"),
            )
            try:
                layout = plan_layout(lean, shape, world_size)
            except ConfigError:
                continue
            live = find_live_bytes(lean, describe_workload(lean, shape, layout))
            if live * cluster.reserve_factor <= cluster.memory_bytes:
                return True
    return False
