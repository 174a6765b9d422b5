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
from torchtitan_lite.config.layout import Layout, plan_layout
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.schema import Config, Parallelism
from torchtitan_lite.tools.plan.cluster import Cluster
from torchtitan_lite.tools.plan.forecast import Forecast, forecast_quickly
from torchtitan_lite.tools.plan.memory import estimate_memory, weigh_waiting
from torchtitan_lite.tools.plan.simulator import extrapolate_in_flight
from torchtitan_lite.tools.plan.step_time import StepTimeModel
from torchtitan_lite.tools.plan.workload import Workload, describe_workload

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

    def forecast(self) -> Forecast:
        return forecast_quickly(self.step_time, self.config.parallelism.pipeline_parallel_schedule)


@dataclass
class Search:
    """Layouts of `config`'s model on `world_size` GPUs with its global batch; after `rank`, the result of the search.

    `imbalance`: of the most loaded ep rank; where ep is smaller, ep.
    """

    config: Config
    model_args: ModelArgs
    world_size: int
    cluster: Cluster
    imbalance: float = 1.0
    n_accepted: int = 0
    fitting: list[Candidate] = field(default_factory=list)
    best: list[tuple[Candidate, Forecast]] = field(default_factory=list)
    leanest: Candidate | None = None  # with least memory
    refused: Counter = field(default_factory=Counter)  # key -> number of layouts that a rule refused
    examples: dict[str, Problem] = field(default_factory=dict)  # key -> one of these problems

    def rank(self, n_best: int = 10) -> None:
        """Find the best layouts. Raises ConfigError."""
        node_size = self.cluster.node_size
        if self.world_size > node_size and self.world_size % node_size:
            why = f"nodes of this kind have {node_size} GPUs, and the last one would not be full"
            remedy = f"Use a multiple of {node_size}, or say node_size in a --hardware file"
            raise ConfigError([Problem("--gpus", self.world_size, why, remedy)])
        for candidate in self.list_candidates():
            self.n_accepted += 1
            if self.fits(candidate):
                self.fitting.append(candidate)
            if self.leanest is None or candidate.live_bytes < self.leanest.live_bytes:
                self.leanest = candidate
        self.fitting.sort(key=lambda candidate: (candidate.step_time.lower_bound_s, candidate.live_bytes))
        for candidate in self.fitting:
            if len(self.best) == n_best and candidate.step_time.lower_bound_s >= self.best[-1][1].rate.step_time_s:
                break
            self.best.append((candidate, candidate.forecast()))
            self.best.sort(key=lambda pair: (pair[1].rate.step_time_s, pair[0].live_bytes))
            del self.best[n_best:]

    def fits(self, candidate: Candidate) -> bool:
        return candidate.live_bytes * self.cluster.reserve_factor <= self.cluster.memory_bytes

    def list_candidates(self) -> Iterator[Candidate]:
        """Yield the layouts that `check` accepts; count the others."""
        for proposal in self.list_proposals():
            try:
                layout = plan_layout(proposal, self.model_args, self.world_size)
            except ConfigError as error:
                self.refuse(error.problems)
                continue
            for mode, option in RECOMPUTE:
                section = replace(proposal.activation_checkpoint, mode=mode, selective_ac_option=option)
                candidate = replace(proposal, activation_checkpoint=section)
                if problems := find_refused(candidate, self.model_args, layout.zero_stage):
                    self.refuse(problems)
                    continue
                yield self.describe(candidate, layout, self.imbalance)

    def refuse(self, problems: list[Problem]) -> None:
        for problem in problems:
            self.refused[problem.key] += 1
            self.examples.setdefault(problem.key, problem)

    def describe(self, config: Config, layout: Layout, imbalance: float) -> Candidate:
        workload = describe_workload(config, self.model_args, layout, imbalance=min(imbalance, max(1, layout.ep)))
        live_bytes = estimate_peak(workload, config.parallelism.pipeline_parallel_schedule)
        return Candidate(config, workload, live_bytes, StepTimeModel(workload, self.cluster))

    # ------------------------------------------------------------ what is tried

    def list_proposals(self) -> Iterator[Config]:
        """Yield every layout to try, without recompute.

        tp stays inside a node; a shard group is all of dp, or 64 or 8.
        """
        world_size, seq_len, global_batch = self.world_size, self.config.training.seq_len, self.find_global_batch()
        for tp in divisors(world_size, self.cluster.node_size):
            for pp in divisors(world_size // tp, self.model_args.n_layers):
                for cp in divisors(world_size // tp // pp, max(1, seq_len // LEAST_TOKENS)):
                    dp = world_size // (tp * pp * cp)
                    if global_batch % dp:
                        why = f"{dp} data-parallel ranks (tp {tp}, pp {pp}, cp {cp}) cannot share it evenly"
                        remedy = "Use a batch that more numbers divide, a power of two for instance"
                        self.refuse([Problem("training.global_batch_size", global_batch, why, remedy)])
                        continue
                    for dp_shard in {n for n in (dp, 64, 8) if dp % n == 0}:
                        for ep in self.list_expert_degrees(dp_shard * cp * tp):
                            degrees = {
                                "tensor_parallel_degree": tp,
                                "pipeline_parallel_degree": pp,
                                "context_parallel_degree": cp,
                                "data_parallel_shard_degree": dp_shard,
                                "data_parallel_replicate_degree": dp // dp_shard,
                                "expert_parallel_degree": ep,
                            }
                            yield from self.list_batches(degrees, global_batch // dp)

    def list_expert_degrees(self, n_ranks: int) -> list[int]:
        """Return the degrees of ep that `n_ranks` and the experts divide into."""
        moe = self.model_args.moe
        return [n for n in divisors(moe.n_experts if moe else 1, n_ranks) if n_ranks % n == 0]

    def list_batches(self, degrees: dict[str, int], n_sequences: int) -> Iterator[Config]:
        """Yield microbatches, ZeRO stages and schedules for one set of degrees; a rank has `n_sequences` a step."""
        config, pp = self.config, degrees["pipeline_parallel_degree"]
        global_batch = n_sequences * degrees["data_parallel_shard_degree"] * degrees["data_parallel_replicate_degree"]
        for microbatch in (size for size in MICROBATCHES if n_sequences % size == 0):
            local_batch_size = n_sequences if pp > 1 else microbatch
            training = replace(config.training, local_batch_size=local_batch_size, global_batch_size=global_batch)
            for schedule in list_schedules(config.parallelism, pp, self.model_args.n_layers):
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

    def find_global_batch(self) -> int:
        """Return the sequences of a step: from the config, or from its local batch and its own degrees."""
        training, section = self.config.training, self.config.parallelism
        if training.global_batch_size != -1:
            return training.global_batch_size
        degrees = section.pipeline_parallel_degree, section.context_parallel_degree, section.tensor_parallel_degree
        return training.local_batch_size * max(1, self.world_size // prod(degrees))

    # ------------------------------------------------------------ where nothing fits

    def find_least_gpus(self) -> int | None:
        """Return the least number of GPUs (whole nodes, above `world_size`) on which some layout fits.

        None above 64 times as many. Full recompute and a batch of one sequence a rank need least memory.
        """
        node_size = self.cluster.node_size
        n_nodes = max(1, self.world_size // node_size)
        while n_nodes * node_size < 64 * self.world_size:
            n_nodes += max(1, n_nodes // 8)
            if self.fits_at_all(n_nodes * node_size):
                break
        else:
            return None
        # Another layout than those that were tried may fit on the GPUs that there are: those are no answer.
        while (n_nodes - 1) * node_size > self.world_size and self.fits_at_all((n_nodes - 1) * node_size):
            n_nodes -= 1
        return n_nodes * node_size

    def fits_at_all(self, world_size: int) -> bool:
        """Return whether some layout fits with ZeRO 3, full recompute and one sequence a data-parallel rank."""
        training = replace(self.config.training, local_batch_size=1, global_batch_size=-1)
        section = replace(self.config.activation_checkpoint, mode="full")
        for tp in divisors(world_size, self.cluster.node_size):
            for cp in divisors(world_size // tp, max(1, training.seq_len // LEAST_TOKENS)):
                for ep in self.list_expert_degrees(world_size):
                    parallelism = Parallelism(
                        tensor_parallel_degree=tp,
                        context_parallel_degree=cp,
                        data_parallel_shard_degree=world_size // tp // cp,
                        expert_parallel_degree=ep,
                        zero_stage=3,
                    )
                    lean = replace(
                        self.config, parallelism=parallelism, training=training, activation_checkpoint=section
                    )
                    try:
                        layout = plan_layout(lean, self.model_args, world_size)
                    except ConfigError:
                        continue
                    if self.fits(self.describe(lean, layout, self.imbalance)):
                        return True
        return False


def list_schedules(section: Parallelism, pp: int, n_layers: int) -> list[dict[str, object]]:
    """Return the keys of every schedule; with a few numbers of stages a rank where the schedule takes any."""
    if pp == 1:
        return [{"pipeline_parallel_layers_per_stage": None}]
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


def estimate_peak(workload: Workload, schedule: str) -> float:
    """Return the highest peak: that of the first pp rank, the second (one layer more), or the last (the logits)."""
    ranks = {0, min(1, workload.layout.pp - 1), workload.layout.pp - 1}
    return max(estimate_live_bytes(workload, schedule, rank) for rank in ranks)


def estimate_live_bytes(workload: Workload, schedule: str, pp_rank: int) -> float:
    """Return the peak memory of a pp rank, from short schedules where that of all microbatches is long."""
    layout = workload.layout
    per_rank = len(layout.stages) // layout.pp
    weight = weigh_waiting(workload) if workload.splits_backward else 1
    in_flight = extrapolate_in_flight(schedule, layout.pp, layout.n_microbatches, per_rank, weight)
    return estimate_memory(workload, pp_rank, in_flight[pp_rank]).live
