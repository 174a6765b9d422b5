"""Rank every layout of a model on a cluster that `check` accepts, by forecast step time: `plan --search`.

    degrees x schedule x microbatch x ZeRO stage x recompute  ->  check's rules  ->  memory  ->  closed form, simulated

Layouts that fit are sorted by a lower bound of their step time. Their schedules are simulated in this order, until the
bound of the next one is above the tenth best time: the ten best are those that simulating all layouts would give.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod

from torchtitan_lite.config.checks import find_refused
from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.config.flavors import ModelArgs
from torchtitan_lite.config.hardware import Cluster
from torchtitan_lite.config.layout import Layout, plan_layout
from torchtitan_lite.config.memory import estimate_memory
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.workload import Workload, describe_workload
from torchtitan_lite.plan.ledger import Forecast, forecast_quickly
from torchtitan_lite.plan.simulator import extrapolate_in_flight
from torchtitan_lite.plan.step_time import StepTimeModel

MICROBATCHES = (1, 2, 4, 8)  # sequences
STAGES_PER_RANK = (2, 4, 8)  # of interleaved schedules
LEAST_TOKENS = 1024  # of a sequence on a cp rank
RECOMPUTE = [("none", "op"), ("selective", "op"), ("selective", "2"), ("full", "op")]  # mode, selective_ac_option


@dataclass(frozen=True)
class Candidate:
    """A layout that `check` accepts."""

    config: Config
    workload: Workload
    live_bytes: float  # of the rank that holds most
    step_time: StepTimeModel


@dataclass
class Search:
    """The result of a search."""

    n_accepted: int = 0
    fitting: list[Candidate] = field(default_factory=list)
    best: list[tuple[Candidate, Forecast]] = field(default_factory=list)
    leanest: Candidate | None = None  # with least memory
    refused: Counter = field(default_factory=Counter)  # key -> number of layouts that a rule refused
    examples: dict[str, Problem] = field(default_factory=dict)  # key -> one of these problems

    def refuse(self, problems: list[Problem]) -> None:
        for problem in problems:
            self.refused[problem.key] += 1
            self.examples.setdefault(problem.key, problem)


def search(
    config: Config,
    model_args: ModelArgs,
    world_size: int,
    cluster: Cluster,
    *,
    n_best: int = 10,
    imbalance: float = 1.0,
) -> Search:
    """Rank all layouts of `config`'s model on `world_size` GPUs with its global batch. Raises ConfigError.

    `imbalance`: of the most loaded ep rank; where ep is smaller, ep.
    """
    if world_size > cluster.node_size and world_size % cluster.node_size:
        remedy = f"Use a multiple of {cluster.node_size}, or say node_size in a --hardware file"
        why = f"nodes of this kind have {cluster.node_size} GPUs, and the last one would not be full"
        raise ConfigError([Problem("--gpus", world_size, why, remedy)])
    found = Search()
    for candidate in list_candidates(config, model_args, world_size, cluster, found, imbalance):
        found.n_accepted += 1
        if candidate.live_bytes * cluster.reserve_factor <= cluster.memory_bytes:
            found.fitting.append(candidate)
        if found.leanest is None or candidate.live_bytes < found.leanest.live_bytes:
            found.leanest = candidate
    found.fitting.sort(key=lambda candidate: (candidate.step_time.lower_bound_s, candidate.live_bytes))
    for candidate in found.fitting:
        if len(found.best) == n_best and candidate.step_time.lower_bound_s >= found.best[-1][1].rate.step_time_s:
            break
        found.best.append((candidate, forecast_candidate(candidate)))
        found.best.sort(key=lambda pair: (pair[1].rate.step_time_s, pair[0].live_bytes))
        del found.best[n_best:]
    return found


def forecast_candidate(candidate: Candidate) -> Forecast:
    return forecast_quickly(candidate.step_time, candidate.config.parallelism.pipeline_parallel_schedule)


def list_candidates(
    config: Config,
    model_args: ModelArgs,
    world_size: int,
    cluster: Cluster,
    found: Search,
    imbalance: float = 1.0,
) -> Iterator[Candidate]:
    """Yield the layouts that `check` accepts; count the others in `found`."""
    for proposal in list_proposals(config, model_args, world_size, cluster, found):
        try:
            layout = plan_layout(proposal, model_args, world_size)
        except ConfigError as error:
            found.refuse(error.problems)
            continue
        for mode, option in RECOMPUTE:
            section = replace(proposal.activation_checkpoint, mode=mode, selective_ac_option=option)
            candidate = replace(proposal, activation_checkpoint=section)
            if problems := find_refused(candidate, model_args, layout.zero_stage):
                found.refuse(problems)
                continue
            yield describe_candidate(candidate, model_args, layout, cluster, imbalance)


def describe_candidate(
    config: Config, model_args: ModelArgs, layout: Layout, cluster: Cluster, imbalance: float
) -> Candidate:
    workload = describe_workload(config, model_args, layout, imbalance=min(imbalance, max(1, layout.ep)))
    live_bytes = estimate_peak(workload, config.parallelism.pipeline_parallel_schedule)
    return Candidate(config, workload, live_bytes, StepTimeModel(workload, cluster))


def list_proposals(
    config: Config, model_args: ModelArgs, world_size: int, cluster: Cluster, found: Search
) -> Iterator[Config]:
    """Yield every layout to try, without recompute. tp stays inside a node; a shard group is all of dp, or 64 or 8."""
    seq_len, global_batch = config.training.seq_len, find_global_batch(config, world_size)
    for tp in divisors(world_size, cluster.node_size):
        for pp in divisors(world_size // tp, model_args.n_layers):
            for cp in divisors(world_size // tp // pp, max(1, seq_len // LEAST_TOKENS)):
                dp = world_size // (tp * pp * cp)
                if global_batch % dp:
                    why = f"{dp} data-parallel ranks (tp {tp}, pp {pp}, cp {cp}) cannot share it evenly"
                    remedy = "Use a batch that more numbers divide, a power of two for instance"
                    found.refuse([Problem("training.global_batch_size", global_batch, why, remedy)])
                    continue
                for dp_shard in {n for n in (dp, 64, 8) if dp % n == 0}:
                    for ep in list_expert_degrees(model_args, dp_shard * cp * tp):
                        degrees = {
                            "tensor_parallel_degree": tp,
                            "pipeline_parallel_degree": pp,
                            "context_parallel_degree": cp,
                            "data_parallel_shard_degree": dp_shard,
                            "data_parallel_replicate_degree": dp // dp_shard,
                            "expert_parallel_degree": ep,
                        }
                        yield from list_batches(config, degrees, global_batch // dp, model_args)


def list_expert_degrees(model_args: ModelArgs, n_ranks: int) -> list[int]:
    """Return the degrees of ep that `n_ranks` and the experts divide into."""
    n_experts = model_args.mixture.n_experts if model_args.mixture else 1
    return [n for n in divisors(n_experts, n_ranks) if n_ranks % n == 0]


def list_batches(config: Config, degrees: dict[str, int], n_sequences: int, model_args: ModelArgs) -> Iterator[Config]:
    """Yield microbatches, ZeRO stages and schedules for one set of degrees; a rank has `n_sequences` a step."""
    pp = degrees["pipeline_parallel_degree"]
    for microbatch in (size for size in MICROBATCHES if n_sequences % size == 0):
        local_batch_size = n_sequences if pp > 1 else microbatch
        global_batch = n_sequences * degrees["data_parallel_shard_degree"] * degrees["data_parallel_replicate_degree"]
        training = replace(config.training, local_batch_size=local_batch_size, global_batch_size=global_batch)
        for schedule in list_schedules(config, pp, model_args.n_layers):
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
    """Return the keys of every schedule; with a few numbers of stages a rank where the schedule takes any."""
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
    """Return the divisors of n up to `most`."""
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]


def find_global_batch(config: Config, world_size: int) -> int:
    """Return the sequences of a step: from the config, or from its local batch and its own degrees."""
    if config.training.global_batch_size != -1:
        return config.training.global_batch_size
    section = config.parallelism
    others = prod((section.pipeline_parallel_degree, section.context_parallel_degree, section.tensor_parallel_degree))
    return config.training.local_batch_size * max(1, world_size // others)


def estimate_peak(workload: Workload, schedule: str) -> float:
    """Return the highest peak: that of the first pp rank, the second (one layer more), or the last (the logits)."""
    ranks = {0, min(1, workload.layout.pp - 1), workload.layout.pp - 1}
    return max(estimate_live_bytes(workload, schedule, rank) for rank in ranks)


def estimate_live_bytes(workload: Workload, schedule: str, pp_rank: int) -> float:
    """Return the peak memory of a pp rank, from short schedules where that of all microbatches is long."""
    layout = workload.layout
    per_rank = len(layout.stages) // layout.pp
    in_flight = extrapolate_in_flight(schedule, layout.pp, layout.n_microbatches, per_rank)
    return estimate_memory(workload, pp_rank, in_flight[pp_rank]).live


def find_least_gpus(config: Config, model_args: ModelArgs, cluster: Cluster, world_size: int) -> int | None:
    """Return the least number of GPUs (whole nodes, above `world_size`) on which some layout fits; None above 64 times.

    Full recompute and a batch of one sequence a rank need least memory.
    """
    n_nodes = max(1, world_size // cluster.node_size)
    while n_nodes * cluster.node_size < 64 * world_size:
        n_nodes += max(1, n_nodes // 8)
        if fits_at_all(config, model_args, cluster, n_nodes * cluster.node_size):
            break
    else:
        return None
    while fits_at_all(config, model_args, cluster, (n_nodes - 1) * cluster.node_size):
        n_nodes -= 1
    return n_nodes * cluster.node_size


def fits_at_all(config: Config, model_args: ModelArgs, cluster: Cluster, world_size: int) -> bool:
    """Return whether some layout fits with ZeRO 3, full recompute and one sequence a data-parallel rank."""
    for tp in divisors(world_size, cluster.node_size):
        for cp in divisors(world_size // tp, max(1, config.training.seq_len // LEAST_TOKENS)):
            for ep in list_expert_degrees(model_args, world_size):
                parallelism = replace(
                    type(config.parallelism)(),
                    tensor_parallel_degree=tp,
                    context_parallel_degree=cp,
                    data_parallel_shard_degree=world_size // tp // cp,
                    expert_parallel_degree=ep,
                    zero_stage=3,
                )
                lean = replace(
                    config,
                    parallelism=parallelism,
                    training=replace(config.training, local_batch_size=1, global_batch_size=-1),
                    activation_checkpoint=replace(config.activation_checkpoint, mode="full"),
                )
                try:
                    layout = plan_layout(lean, model_args, world_size)
                except ConfigError:
                    continue
                live_bytes = describe_candidate(lean, model_args, layout, cluster, 1.0).live_bytes
                if live_bytes * cluster.reserve_factor <= cluster.memory_bytes:
                    return True
    return False
