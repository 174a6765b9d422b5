"""Closed form = dry run = real step = ledger: memory, traffic and FLOPs of the same layouts, four ways."""

from collections import Counter

import compare
import pytest
import torch
import torch.distributed as dist
from layouts import (
    ACCUMULATION_4,
    COMPILED,
    CP,
    DOCUMENTS,
    MODE,
    OPTION,
    PP,
    REPLICATE,
    RING,
    SCHEDULE,
    TP,
    TWO_LAYERS,
    ZERO,
)
from measure_memory import BATCH, MODEL, measure_on_gloo, measure_peak, plan
from torch._dynamo.utils import counters

from torchtitan_lite import step as stepping
from torchtitan_lite.config.hardware import Machine
from torchtitan_lite.config.memory import bound_memory
from torchtitan_lite.config.workload import describe_workload
from torchtitan_lite.plan.collectives import Moved, count_traffic, find_most_moved
from torchtitan_lite.plan.dry_run import DryRun, dry_run
from torchtitan_lite.plan.forecast import count_rank_flops, list_all_traffic, list_memory
from torchtitan_lite.plan.ledger import open_ledger, sum_by_axis
from torchtitan_lite.plan.planned import plan_run
from torchtitan_lite.plan.simulator import plan_order

CPU = Machine("cpu", 1, 2**34, "x86_64 CPU")
EVERY_SECOND = {MODE: "selective", OPTION: "2"}
DTYPE = "training.mixed_precision_param"

# name -> world size, keys. Every axis, ZeRO stage, recompute mode and attention, and three schedules.
LAYOUTS = {
    "one rank": (1, {BATCH: 8, MODE: "full"}),
    "dp2 x tp2": (4, {TP: 2, BATCH: 4, MODE: "none"}),
    "replicas, ZeRO 2": (4, {REPLICATE: 2, ZERO: 2, MODE: "selective", **ACCUMULATION_4}),
    "cp2, documents": (2, {CP: 2, BATCH: 4, **DOCUMENTS}),
    "cp2, ring": (2, {CP: 2, BATCH: 4, MODE: "full", **RING}),
    "tied": (2, {BATCH: 4, "model.tie_embeddings": True, ZERO: 1, MODE: "none"}),
    "pp2 x dp2 x tp2": (8, {PP: 2, TP: 2, BATCH: 4, **EVERY_SECOND, "model.n_layers": 4}),
    "pp2, ZeRO 3": (4, {PP: 2, BATCH: 4, ZERO: 3, MODE: "full"}),
    "pp2, V": (2, {PP: 2, BATCH: 4, SCHEDULE: "ZBVZeroBubble", MODE: "none", "model.n_layers": 4}),
    "norm and head alone": (12, {PP: 6, TP: 2, BATCH: 4, SCHEDULE: "GPipe", "model.n_layers": 4, MODE: "none"}),
}


def read(name: str, **extra: object) -> tuple:
    """Config, shape and layout of a row of the table."""
    world_size, keys = LAYOUTS[name]
    return plan(world_size, {**MODEL, **TWO_LAYERS, **keys, **extra})


def count_moved(run: DryRun) -> dict[tuple[str, str], tuple[int, float]]:
    """(axis, operation) -> calls and bytes."""
    calls, n_bytes = Counter(), Counter()
    for collective, times in run.collectives:
        calls[collective.axis, collective.operation] += times
        n_bytes[collective.axis, collective.operation] += times * collective.n_bytes
    return {key: (calls[key], n_bytes[key]) for key in calls}


# ---------------------------------------------------------------- closed form = dry run = ledger


@pytest.mark.parametrize("name", LAYOUTS)
def test_traffic_flops_and_memory_of_the_closed_form_are_those_of_a_dry_run(name):
    """Traffic (calls and bytes of each operation over each axis) and FLOPs exactly; memory of this tiny model in 25 %.

    In bf16, as on a GPU, of the first and the last pp rank. The ledger holds the traffic of the rank that moves most.
    """
    config, shape, layout = read(name, **{DTYPE: "bfloat16"})
    workload, order = describe_workload(config, shape, layout), plan_order(config.parallelism, layout)
    traffic, memory = list_all_traffic(workload, order), list_memory(workload, order)
    predicted = open_ledger(config, shape, layout, CPU, order).predicted
    assert predicted.memory_bytes == max(each.live for each in memory)
    assert predicted.traffic == sum_by_axis(traffic)
    for pp_rank in {0, layout.pp - 1}:
        run = dry_run(config, shape, layout, pp_rank=pp_rank, device_type="cuda")
        closed = {(each.axis, each.operation): (each.count, each.n_bytes) for each in traffic[pp_rank]}
        moved = count_moved(run)
        assert {key: closed[key][0] for key in closed} == {key: moved[key][0] for key in moved}
        for key, (_, n_bytes) in closed.items():
            assert n_bytes == pytest.approx(moved[key][1], rel=1e-9), key
        assert count_rank_flops(workload, pp_rank) == run.n_flops
        batch = 4 * 8 * layout.global_batch_size // layout.dp * config.training.seq_len  # a rank's tokens, targets ...
        assert memory[pp_rank].live + batch == pytest.approx(run.peak_bytes, rel=0.25), memory[pp_rank]


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        (["--activation_checkpoint.mode=none"], 0.02),
        ([f"--{PP}=4", "--training.local_batch_size=8"], 0.02),
        pytest.param([], 0.03, marks=pytest.mark.slow),
        pytest.param(["--activation_checkpoint.mode=full"], 0.07, marks=pytest.mark.slow),
    ],
)
def test_memory_of_the_closed_form_is_that_of_a_dry_run_of_the_8b(keys, error):
    planned = plan_run(["--config", "llama3_8b", *keys], 8, "cuda")
    workload = describe_workload(planned.config, planned.shape, planned.layout)
    memory = list_memory(workload, plan_order(planned.config.parallelism, planned.layout))
    assert memory[0].live == pytest.approx(planned.dry_run(0).peak_bytes, rel=error)


@pytest.mark.parametrize("name", ["one rank", "dp2 x tp2", "pp2 x dp2 x tp2"])
def test_the_bound_by_which_check_refuses_is_below_what_some_rank_holds(name):
    config, shape, layout = read(name)
    (bound,) = bound_memory(config, shape, layout.degrees, Machine("cuda", 8, 2**40, "a GPU"), n_hosts=1)
    most = max(dry_run(config, shape, layout, pp_rank=rank, device_type="cuda").peak_bytes for rank in range(layout.pp))
    assert bound.needed_bytes < most < 3 * bound.needed_bytes


# ---------------------------------------------------------------- dry run = real tensors


@pytest.mark.parametrize(
    ("name", "pp_rank"),
    [
        ("one rank", 0),
        pytest.param("dp2 x tp2", 0, marks=pytest.mark.slow),
        pytest.param("pp2 x dp2 x tp2", 0, marks=pytest.mark.slow),
        ("pp2 x dp2 x tp2", 1),
    ],
)
def test_memory_of_a_dry_run_is_what_the_allocator_gives_out(name, pp_rank):
    run = read(name)
    assert dry_run(*run, pp_rank=pp_rank).peak_bytes == pytest.approx(measure_peak(*run, pp_rank), rel=0.001)


@pytest.mark.parametrize("mode", ["full", pytest.param("none", marks=pytest.mark.slow)])
def test_memory_of_a_dry_run_is_that_of_real_ranks_over_gloo(pool, mode):
    run = read("dp2 x tp2", **{MODE: mode})
    least = min(min(steps) for steps in pool.run(measure_on_gloo, 4, *run))
    assert dry_run(*run, pp_rank=0).peak_bytes == pytest.approx(least, rel=0.02)


# ---------------------------------------------------------------- ledger = real step


def count_steps(rank: int, world_size: int, all_keys: list[dict]) -> list[tuple[dict, dict, int]]:
    """Worker: for each layout the forecast traffic of a step, the counted one, and what was compiled meanwhile."""
    elsewhere = dist.new_group(list(range(world_size)), backend="gloo")
    results = []
    for keys in all_keys:
        torch._dynamo.reset()
        run = compare.build_table_run(world_size, keys)
        shape = compare.resolve_model(run.config.model)
        batch = compare.own_rows(run, compare.make_batch(0, shape.vocab_size))
        stepping.train_step(run, batch)
        if run.schedule is not None or run.config.compile.enable:  # sets itself up, or compiles, once more
            stepping.train_step(run, batch)
        n_graphs = counters["stats"]["unique_graphs"]
        with count_traffic(run.layout, besides=elsewhere) as count:
            stepping.train_step(run, batch)
            dist.all_reduce(torch.ones(1000), group=elsewhere)
        counted = dict(count.moved)
        stepping.train_step(run, batch)
        assert count.moved == counted, "later steps are not counted"
        forecast = open_ledger(run.config, shape, run.layout, CPU, plan_order(run.config.parallelism, run.layout))
        most = find_most_moved(counted, elsewhere)
        results.append((forecast.predicted.traffic, most, counters["stats"]["unique_graphs"] - n_graphs))
    dist.destroy_process_group(elsewhere)
    return results


@pytest.mark.parametrize(
    ("world_size", "all_keys"),
    [
        (8, [{PP: 2, TP: 2}]),
        (4, [{TP: 2, MODE: "full"}, {CP: 2, **DOCUMENTS}, {REPLICATE: 2}, {PP: 2, **ACCUMULATION_4}]),
        pytest.param(2, [{CP: 2, **RING}, {TP: 2, **COMPILED}, {CP: 2, **COMPILED}], marks=pytest.mark.slow),
    ],
)
def test_a_real_step_moves_what_was_forecast(pool, world_size, all_keys):
    """Bytes and calls over each axis, from the operators that gloo is called through."""
    for of_rank in pool.run(count_steps, world_size, [{**keys, **TWO_LAYERS} for keys in all_keys]):
        for (forecast, counted, n_compiled), keys in zip(of_rank, all_keys, strict=True):
            assert forecast.keys() == counted.keys(), keys
            for axis, moved in forecast.items():
                assert counted[axis].n_bytes == pytest.approx(moved.n_bytes, rel=1e-9), (keys, axis)
                assert counted[axis].n_calls == moved.n_calls, (keys, axis)
            assert n_compiled == 0, "counting leaves compiled code as it is"


def gather_by_inductor(rank: int, world_size: int) -> tuple[dict, int]:
    """Worker: what a function moves that inductor has compiled before; and how often it was compiled while counted."""

    @torch.compile
    def gather(x: torch.Tensor) -> torch.Tensor:  # needs no kernel of its own, and so no C++ compiler
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(x, world_size, dist.group.WORLD.group_name)
        return torch.ops._c10d_functional.wait_tensor(gathered)

    x = torch.full((10, 8), float(rank))
    gather(x)
    n_graphs = counters["stats"]["unique_graphs"]
    with count_traffic(plan(world_size, {TP: 2})[2], besides=dist.new_group(backend="gloo")) as count:
        assert gather(x)[:, 0].tolist() == [0.0] * 10 + [1.0] * 10
    return count.moved, counters["stats"]["unique_graphs"] - n_graphs


def test_collectives_of_compiled_code_are_counted_too(pool):
    assert pool.run(gather_by_inductor, 2) == [({"tp": Moved(1, 320.0)}, 0)] * 2  # 320 bytes from the other rank
