"""The dry run tells what a run does: memory as the allocator counts it, FLOPs and bytes as formulas do."""

from collections import Counter
from unittest.mock import patch

import pytest
import torch.distributed as dist
from layouts import CP, DOCUMENTS, MODE, PP, SCHEDULE, TP, TWO_LAYERS, ZERO
from measure_memory import BATCH, GLOBAL_BATCH, LAYOUTS, MODEL, RECOMPUTE, measure_on_gloo, measure_peak, plan

from torchtitan_lite import step
from torchtitan_lite.config.flavors import count_layer_parameters
from torchtitan_lite.config.hardware import Machine
from torchtitan_lite.config.memory_bound import bound_memory
from torchtitan_lite.plan.dry_run import DryRun, dry_run
from torchtitan_lite.plan.schedule_order import list_rows
from torchtitan_lite.plan.traffic import list_traffic
from torchtitan_lite.plan.workload import describe_workload

DTYPE = "training.mixed_precision_param"


def count_bytes(run: DryRun) -> Counter:
    """Bytes by axis and operation."""
    n_bytes: Counter = Counter()
    for collective, times in run.collectives:
        n_bytes[collective.axis, collective.operation] += times * collective.n_bytes
    return n_bytes


@pytest.mark.parametrize(
    ("layout", "recompute", "pp_rank"),
    [
        ("one rank", "full", 0),
        ("one rank", "op", 0),
        ("dp2 x tp2", "none", 0),
        ("pp2 x dp2 x tp2", "full", 0),
        ("pp2 x dp2 x tp2", "every second layer", 1),
    ],
)
def test_memory_is_what_the_allocator_gives_out_with_real_tensors(layout, recompute, pp_rank):
    world_size, keys = LAYOUTS[layout]
    run = plan(world_size, {**MODEL, **keys, **RECOMPUTE[recompute]})
    assert dry_run(*run, pp_rank=pp_rank).peak_bytes == pytest.approx(measure_peak(*run, pp_rank), rel=0.001)


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [("one rank", "op"), ("one rank", "none"), ("dp2 x tp2", "every second layer"), ("pp2 x dp2 x tp2", "full")],
)
def test_the_bound_by_which_check_refuses_is_below_what_some_rank_holds(layout, recompute):
    world_size, keys = LAYOUTS[layout]
    run = config, shape, layout = plan(world_size, {**MODEL, **keys, **RECOMPUTE[recompute]})
    (bound,) = bound_memory(config, shape, layout.degrees, Machine("cuda", world_size, 2**40, "a GPU"), n_hosts=1)
    most = max(dry_run(*run, pp_rank=pp_rank, device_type="cuda").peak_bytes for pp_rank in range(layout.pp))
    assert bound.needed_bytes < most < 3 * bound.needed_bytes


@pytest.mark.parametrize(("layout", "recompute"), [("dp2 x tp2", "none"), ("dp2 x tp2", "full")])
def test_memory_is_that_of_real_ranks_over_gloo(pool, layout, recompute):
    world_size, keys = LAYOUTS[layout]
    run = plan(world_size, {**MODEL, **keys, **RECOMPUTE[recompute]})
    least = min(min(steps) for steps in pool.run(measure_on_gloo, world_size, *run))
    assert dry_run(*run, pp_rank=0).peak_bytes == pytest.approx(least, rel=0.02)


@pytest.mark.parametrize(
    ("world_size", "keys", "pp_rank"),
    [
        (2, {BATCH: 1, GLOBAL_BATCH: 8, **TWO_LAYERS}, 0),
        (2, {BATCH: 1, GLOBAL_BATCH: 8, ZERO: 1, MODE: "full", **TWO_LAYERS}, 0),
        (4, {PP: 2, BATCH: 6, **TWO_LAYERS}, 1),
        (4, {PP: 4, BATCH: 8, MODE: "none"}, 2),
        (2, {PP: 2, BATCH: 8, SCHEDULE: "GPipe", **TWO_LAYERS}, 0),
        (4, {PP: 2, BATCH: 6, SCHEDULE: "Interleaved1F1B"}, 0),
    ],
)
def test_a_few_microbatches_tell_the_same_as_all(world_size, keys, pp_rank):
    run = plan(world_size, keys)
    few, all_of_them = dry_run(*run, pp_rank=pp_rank), dry_run(*run, pp_rank=pp_rank, whole=True)
    assert few.memory == {**dict.fromkeys(few.memory, 0), **all_of_them.memory}
    assert count_bytes(few) == count_bytes(all_of_them)
    assert sum(times for _, times in few.collectives) == len(all_of_them.collectives)
    assert few.n_flops == all_of_them.n_flops


def test_flops_are_those_of_every_matmul_and_attention_kernel():
    config, shape, layout = plan(1, {MODE: "none"})
    n_tokens = config.training.global_batch_size * config.training.seq_len
    per_layer = count_layer_parameters(shape) - 2 * shape.dim
    head = shape.vocab_size * shape.dim
    # Two matmuls in attention's forward, five in its backward, which computes the scores again.
    attention = 2 * shape.n_heads * shape.head_dim * config.training.seq_len
    expected = n_tokens * (6 * (shape.n_layers * per_layer + head) + 7 * shape.n_layers * attention)
    assert dry_run(config, shape, layout).n_flops == expected

    recomputed = per_layer - shape.ffn_dim * shape.dim  # all of a block but w2, whose output nobody asks for again
    expected += n_tokens * shape.n_layers * (2 * recomputed + 2 * attention)
    assert dry_run(*plan(1, {MODE: "full"})).n_flops == expected


@pytest.mark.parametrize(
    ("world_size", "keys"), [(4, {TP: 2, BATCH: 4}), (8, {PP: 2, TP: 2, BATCH: 4}), (4, {CP: 2, BATCH: 4})]
)
def test_bytes_are_those_of_the_closed_form(world_size, keys):
    config, shape, layout = plan(world_size, keys)
    traffic = list_traffic(describe_workload(config, shape, layout), 0, list_rows(config.parallelism, layout))
    expected = {(each.axis, each.operation): each.n_bytes for each in traffic}
    assert count_bytes(dry_run(config, shape, layout)) == pytest.approx(expected, rel=0.001)


def test_an_extra_collective_in_the_step_is_seen_with_its_line():
    def with_one_more(run, loss):
        dist.all_reduce(loss.new_zeros(7), group=run.mesh.tp.get_group())
        return sum_losses(run, loss)

    sum_losses = step.sum_losses
    with patch.object(step, "sum_losses", with_one_more):
        seen = dry_run(*plan(2, {TP: 2, **TWO_LAYERS})).collectives
    (more,) = (collective for collective, _ in seen if collective.place.function == "with_one_more")
    assert (more.operation, more.axis, more.shape, more.n_bytes) == ("all-reduce", "tp", (7,), 28)
    line = with_one_more.__code__.co_firstlineno + 1
    assert more.place.line == f"test_dry_run.py:{line}"


def test_backward_collectives_bear_the_line_and_module_of_their_forward():
    seen = [collective for collective, _ in dry_run(*plan(2, {TP: 2, MODE: "full"})).collectives]
    of_layer = [each for each in seen if each.place.module.startswith("layers.2.")]
    walks = Counter((each.place.walk, each.operation) for each in of_layer)
    # Backward mirrors forward; and the inputs of attention and feed-forward are gathered again, as is what wo puts out.
    assert walks["forward", "all-gather"] == walks["forward", "reduce-scatter"] == 2
    assert walks["backward", "reduce-scatter"] == walks["backward", "all-gather"] == 2
    assert walks["recompute", "all-gather"] == 2
    assert all(each.place.line.startswith("model/llama3.py:") for each in of_layer)
    assert all(each.place.through == "DTensor" for each in of_layer)


def test_a_gpu_makes_no_mask_of_the_sequence():
    keys = {"training.seq_len": 512, BATCH: 1, MODE: "full"}
    masked = dry_run(*plan(1, {**keys, **DOCUMENTS})).peak_bytes
    config, shape, layout = plan(1, {**keys, **DOCUMENTS}, "cuda")
    on_gpu = dry_run(config, shape, layout, device_type="cuda").peak_bytes
    assert masked - on_gpu > 512 * 512


def test_a_gpu_keeps_no_steps_of_a_norm():
    """In bfloat16 a CPU keeps two: x in fp32, and x over its rms before the weight."""
    config, shape, layout = plan(1, {**MODEL, BATCH: 8, MODE: "none", DTYPE: "bfloat16"}, "cuda")
    on_cpu, on_gpu = (dry_run(config, shape, layout, device_type=device) for device in ("cpu", "cuda"))
    n_elements = 8 * config.training.seq_len * shape.dim
    steps = (2 * shape.n_layers + 1) * n_elements * (4 + 2)
    assert on_cpu.peak_bytes - on_gpu.peak_bytes == pytest.approx(steps, rel=0.05)
    assert on_cpu.n_flops == on_gpu.n_flops


def test_one_rank_of_thousands_is_run_like_any_other():
    keys = {PP: 16, TP: 4, BATCH: 16, "model.n_layers": 16, DTYPE: "bfloat16"}
    run = dry_run(*plan(16384, keys), pp_rank=7)
    sharded = [collective for collective, _ in run.collectives if collective.axis == "dp_shard"]
    assert {collective.n_ranks for collective in sharded} == {256}
    assert {collective.stride for collective in sharded} == {4}
