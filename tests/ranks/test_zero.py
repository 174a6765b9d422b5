"""The number of collectives under each ZeRO stage is as in the table of parallel/fsdp.py."""

import compare
import pytest
from layouts import ACCUMULATION_4, EP, MODE, MOE, PP, REPLICATE, TP, TWO_LAYERS, ZERO
from watching import Collectives

from torchtitan_lite import step as stepping
from torchtitan_lite.config.checks import plan_layout
from torchtitan_lite.config.model import resolve_model
from torchtitan_lite.config.reader import read_config

M = 4  # microbatches
RESHARD = "--parallelism.fsdp_reshard_after_forward"
N_GROUPS = compare.TABLE_CONFIG.model.n_layers + 2  # blocks, embedding, head
GATHERS_PER_MICROBATCH = (
    2 * (N_GROUPS - 2) + 2
)  # under stage 3: blocks twice, embedding and head once


class GroupCalls(Collectives):
    """Counts the calls of process groups, which FSDP makes, by the name of the operation."""

    def note(self, func, args, outputs):
        if func.namespace == "c10d":
            self.n_calls[func._opname.strip("_")] += 1


def count_calls(rank: int, world_size: int, overrides: dict[str, object]) -> dict[str, int]:
    """Worker: count the collectives of FSDP in the second forward_backward."""
    run = compare.build_table_run(world_size, {MODE: "none", **overrides})
    batch = compare.read_rows(run)
    n_tokens = stepping.count_global_tokens(run, batch)
    stepping.forward_backward(run, batch, n_tokens)
    with GroupCalls() as counter:
        stepping.forward_backward(run, batch, n_tokens)
    return counter.result()


@pytest.mark.parametrize(
    "world_size, overrides, gathers, scatters, all_reduces",
    [
        (2, {ZERO: 1, **ACCUMULATION_4}, N_GROUPS, N_GROUPS, 0),
        (2, {ZERO: 2, **ACCUMULATION_4}, N_GROUPS, M * N_GROUPS, 0),
        (2, {ZERO: 3, **ACCUMULATION_4}, M * GATHERS_PER_MICROBATCH, M * N_GROUPS, 0),
        (
            4,
            {REPLICATE: 2, **ACCUMULATION_4},
            2 * GATHERS_PER_MICROBATCH,
            2 * N_GROUPS,
            N_GROUPS,
        ),  # 8 rows on 4 ranks
    ],
)
def test_collectives_per_step_are_those_of_the_table(
    pool, world_size, overrides, gathers, scatters, all_reduces
):
    expected = {
        "allgather_base": gathers,
        "reduce_scatter_base": scatters,
        "allreduce": all_reduces,
    }
    for n_calls in pool.run(count_calls, world_size, overrides):
        assert n_calls == {name: n for name, n in expected.items() if n}


@pytest.mark.parametrize(
    "stage, gathers, scatters",
    # 8 rows on 4 ranks are 2 microbatches. Each of 2 layers has one more group, for experts, gathered like the blocks.
    [(1, 2, 2), (2, 2, 2 * 2), (3, 2 * 2 * 2, 2 * 2)],
)
def test_experts_are_one_more_group_a_layer_and_are_gathered_as_often_as_blocks(
    pool, stage, gathers, scatters
):
    keys = {ZERO: stage, **ACCUMULATION_4, **TWO_LAYERS}
    dense = pool.run(count_calls, 4, keys)[0]
    # The experts are sharded over efsdp = 2 ranks. The exchanges of tokens do not call process groups.
    experts = pool.run(count_calls, 4, {**keys, **MOE, EP: 2})[0]
    assert experts["allgather_base"] - dense["allgather_base"] == gathers
    assert experts["reduce_scatter_base"] - dense["reduce_scatter_base"] == scatters


@pytest.mark.parametrize("stage", [1, 3])
def test_under_pp_gradients_are_reduced_once_per_step(pool, stage):
    counts = pool.run(count_calls, 4, {PP: 2, ZERO: stage, "training.local_batch_size": M})
    gathers, scatters = (  # by stage 0 and stage 1 of the first dp rank
        counts[0][name] + counts[2][name] for name in ("allgather_base", "reduce_scatter_base")
    )
    # Under ZeRO 1 in fp32, each of the two pipeline stages is a single group.
    assert scatters == {1: 2, 3: N_GROUPS}[stage]
    # Under ZeRO 3 a parameter stays whole from a backward to the next forward. Stage 0 (F F B F B F B B) gathers its
    # two blocks for F, F, B, B, B, and its embedding for each F. Stage 1 (F B F B F B F B) gathers 3 groups for the
    # first F, then 2 for each B, because the head stays.
    assert gathers == {1: 2, 3: 5 * 2 + 4 + 3 + 4 * 2}[stage]


@pytest.mark.parametrize(
    "name, n_ranks, keys, stage",
    [
        ("llama3_1b", 1, [], 1),
        # ZeRO 1 would keep gradients on the GPU.
        ("llama3_1b", 1, ["--training.enable_cpu_offload"], 2),
        ("llama3_1b", 4, ["--parallelism.data_parallel_replicate_degree=4"], 1),
        ("llama3_1b", 4, [], 3),
        (
            "debug_moe",
            4,
            [f"--{TP}=4", "--parallelism.expert_parallel_degree=1"],
            2,
        ),  # experts: 4 shards
        ("debug_moe", 4, [f"--{TP}=4", "--parallelism.expert_parallel_degree=4"], 1),
        ("debug", 2, [], 3),
        ("debug", 1, [f"{RESHARD}=never"], 1),
        ("debug", 2, [f"{RESHARD}=never"], 2),
        ("debug", 2, [f"{RESHARD}=never", f"--{ZERO}=3"], 3),
        ("debug", 4, [f"--{PP}=2"], 1),
        ("debug", 4, [f"--{PP}=2", f"{RESHARD}=never"], 1),
        ("debug", 4, [f"--{PP}=2", f"{RESHARD}=always"], 3),
    ],
)
def test_zero_stage_follows_from_either_key_and_copies_no_gradients_without_a_shard(
    name, n_ranks, keys, stage
):
    config = read_config(["--config", name, *keys]).config
    assert plan_layout(config, resolve_model(config.model), n_ranks).zero_stage == stage
