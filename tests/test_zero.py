"""How often ranks talk under each ZeRO stage: the table of parallel/fsdp.py, counted."""

from collections import Counter

import compare
import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_lite import step as stepping
from torchtitan_lite.config.case import Case
from torchtitan_lite.config.checks import find_problems
from torchtitan_lite.config.layout import plan_zero_stage
from torchtitan_lite.config.schema import Config, Parallelism

N_LAYERS, M = 4, 4  # blocks of the table model, microbatches
N_GROUPS = N_LAYERS + 2  # with embedding and head
PP, REPLICATE = "parallelism.pipeline_parallel_degree", "parallelism.data_parallel_replicate_degree"

# The head is gathered once per microbatch under stage 3, all others twice.
GATHERS = {3: M * (2 * (N_GROUPS - 1) + 1), 2: N_GROUPS, 1: N_GROUPS}
SCATTERS = {3: M * N_GROUPS, 2: M * N_GROUPS, 1: N_GROUPS}


class CountCollectives(TorchDispatchMode):
    """Counts the calls of process groups by the name of their operation."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func._opname.strip("_")] += 1
        return func(*args, **(kwargs or {}))


def count_collectives(rank: int, world_size: int, overrides: dict[str, object]) -> dict[str, int]:
    """Worker: collectives of FSDP in one forward_backward, after one that is not counted."""
    run = compare.build_table_run(world_size, overrides)
    batch = compare.own_rows(run, compare.make_batch(0, run.config.model.vocab_size))
    n_tokens = stepping.count_global_tokens(run, batch)
    stepping.forward_backward(run, batch, n_tokens)
    with CountCollectives() as counter:
        stepping.forward_backward(run, batch, n_tokens)
    return dict(counter.counts)


def sum_counts(counts: list[dict[str, int]]) -> dict[str, int]:
    return {name: sum(count.get(name, 0) for count in counts) for name in {name for count in counts for name in count}}


ACCUMULATED = {"training.local_batch_size": 1, "training.global_batch_size": 8, "activation_checkpoint.mode": "none"}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_collectives_per_step_are_those_of_the_table(pool, stage):
    counts, _ = pool.run(count_collectives, 2, {**ACCUMULATED, "parallelism.zero_stage": stage})
    assert counts == {"allgather_base": GATHERS[stage], "reduce_scatter_base": SCATTERS[stage]}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_without_accumulation_stage_3_gathers_twice_and_each_stage_scatters_once(pool, stage):
    overrides = {"training.local_batch_size": 4, "activation_checkpoint.mode": "none"}
    counts, _ = pool.run(count_collectives, 2, {**overrides, "parallelism.zero_stage": stage})
    gathers = {3: 2 * (N_GROUPS - 1) + 1, 2: N_GROUPS, 1: N_GROUPS}[stage]
    assert counts == {"allgather_base": gathers, "reduce_scatter_base": N_GROUPS}


def test_hsdp_adds_one_all_reduce_per_group_and_step(pool):
    overrides = {**ACCUMULATED, REPLICATE: 2, "training.global_batch_size": 8}
    counts, *_ = pool.run(count_collectives, 4, overrides)
    m = 2  # 8 sequences on 4 ranks
    gathers, scatters = m * (2 * (N_GROUPS - 1) + 1), m * N_GROUPS
    assert counts == {"allgather_base": gathers, "reduce_scatter_base": scatters, "allreduce": N_GROUPS}


@pytest.mark.parametrize("stage", [1, 3])
def test_under_pp_gradients_are_reduced_once_per_step(pool, stage):
    overrides = {PP: 2, "activation_checkpoint.mode": "none", "parallelism.zero_stage": stage}
    counts = pool.run(count_collectives, 4, {**overrides, "training.local_batch_size": M})
    one_replica = sum_counts([counts[0], counts[2]])  # stage 0 and stage 1 of the first dp rank
    assert one_replica["reduce_scatter_base"] == N_GROUPS
    # Under 3 a parameter stays whole from a backward to the next forward. Stage 0 (F F B F B F B B) gathers its three
    # groups for F, F, B, B, B; stage 1 (F B F B F B F B) gathers 3 for the first F, then 2 for each B: the head stays.
    assert one_replica["allgather_base"] == {1: N_GROUPS, 3: 5 * 3 + 3 + 4 * 2}[stage]


def test_zero_stage_follows_from_either_key():
    assert plan_zero_stage(Parallelism()) == 3
    assert plan_zero_stage(Parallelism(fsdp_reshard_after_forward="never")) == 2
    assert plan_zero_stage(Parallelism(pipeline_parallel_degree=2)) == 1
    assert plan_zero_stage(Parallelism(pipeline_parallel_degree=2, fsdp_reshard_after_forward="never")) == 1
    assert plan_zero_stage(Parallelism(pipeline_parallel_degree=2, fsdp_reshard_after_forward="always")) == 3
    assert plan_zero_stage(Parallelism(zero_stage=2, fsdp_reshard_after_forward="never")) == 2


@pytest.mark.parametrize(
    "parallelism",
    [
        Parallelism(zero_stage=1, fsdp_reshard_after_forward="always"),
        Parallelism(zero_stage=3, fsdp_reshard_after_forward="never"),
        Parallelism(zero_stage=2, pipeline_parallel_degree=2),
    ],
)
def test_keys_in_conflict_and_stage_2_under_pp_are_refused(parallelism):
    assert find_problems("mesh", Case(Config(parallelism=parallelism)), key="parallelism.zero_stage")
