"""The dry run of a few microbatches, of GPU kernels, and of one rank of thousands; collectives with their lines."""

from collections import Counter
from unittest.mock import patch

import pytest
import torch.distributed as dist
from layouts import DOCUMENTS, MODE, PP, SCHEDULE, TP, TWO_LAYERS, ZERO
from measure_memory import BATCH, GLOBAL_BATCH, MODEL, plan

from torchtitan_lite import step
from torchtitan_lite.plan.dry_run import dry_run

DTYPE = "training.mixed_precision_param"


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
def test_a_few_microbatches_have_the_costs_of_all(world_size, keys, pp_rank):
    planned = plan(world_size, keys)
    few, all_of_them = dry_run(*planned, pp_rank=pp_rank), dry_run(*planned, pp_rank=pp_rank, whole=True)
    assert few.memory == {**dict.fromkeys(few.memory, 0), **all_of_them.memory}
    bytes_of_few, bytes_of_all = Counter(), Counter()
    for run, n_bytes in ((few, bytes_of_few), (all_of_them, bytes_of_all)):
        for collective, times in run.collectives:
            n_bytes[collective.axis, collective.operation] += times * collective.n_bytes
    assert bytes_of_few == bytes_of_all
    assert sum(times for _, times in few.collectives) == len(all_of_them.collectives)
    assert few.n_flops == all_of_them.n_flops


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
