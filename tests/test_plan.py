"""`plan`: figures of the dry run and of the closed form side by side, and warnings whose remedies work."""

import json
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch.distributed as dist
from layouts import PP, TP

from torchtitan_lite import step
from torchtitan_lite.config.hardware import find_cluster
from torchtitan_lite.plan import command as plan
from torchtitan_lite.plan.plan_warnings import (
    simulate_bubble,
    warn_of_bubble,
    warn_of_few_microbatches,
    warn_of_memory,
    warn_of_tensor_parallel,
    warn_of_torn_groups,
)
from torchtitan_lite.plan.planned import group_pp_ranks, plan_run

SMALL = ["--config", "debug", "--training.seq_len", "32", "--model.n_layers", "2"]
H100 = find_cluster("h100")


def plan_for(capsys, *args: str) -> dict:
    assert plan.main([*SMALL, *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def llama(name: str, n_gpus: int, **keys):
    """A shipped config on GPUs, without a dry run. Keys: of parallelism or training."""
    sections = {"local_batch_size": "training", "global_batch_size": "training"}
    args = [part for key, n in keys.items() for part in (f"--{sections.get(key, 'parallelism')}.{key}", str(n))]
    return plan_run(["--config", name, *args], n_gpus, "cuda")


def test_a_plan_is_printed_and_drawn(capsys, tmp_path):
    svg, trace = tmp_path / "timeline.svg", tmp_path / "trace.json"
    pipeline = ["--gpus", "2", f"--{PP}", "2", "--svg", str(svg), "--trace", str(trace)]
    assert plan.main([*SMALL, *pipeline]) == 0
    printed = capsys.readouterr().out
    for words in (
        "1F1B, bubble",
        "reserved (est.)",
        "TFLOP on pp rank 1",
        "tokens/s/GPU",
        "\npp rank 1  .",
        "warning: ",
    ):
        assert words in printed
    assert svg.read_text().startswith("<svg") and json.loads(trace.read_text())


def test_an_extra_collective_in_the_step_is_in_the_plan(capsys):
    def with_one_more(run, loss):
        dist.all_reduce(loss.new_zeros(2**20), group=run.mesh.tp.get_group())
        return sum_losses(run, loss)

    def find(traffic: list[dict]) -> dict:
        return next(each for each in traffic if (each["axis"], each["operation"]) == ("tp", "all-reduce"))

    sum_losses, args = step.sum_losses, ["--gpus", "2", f"--{TP}", "2"]
    before = plan_for(capsys, *args)
    with patch.object(step, "sum_losses", with_one_more):
        after = plan_for(capsys, *args)
    assert find(after["traffic"])["calls"] == find(before["traffic"])["calls"] + 1
    assert find(after["traffic"])["bytes"] == find(before["traffic"])["bytes"] + 2**22
    assert before["pp_ranks"]["0"]["reserved_bytes"] == before["pp_ranks"]["0"]["live_bytes"] * H100.reserve_factor


def test_stages_that_hold_the_same_are_run_once_by_the_rank_that_holds_most():
    planned = llama("llama3_405b", 16384, pipeline_parallel_degree=16, local_batch_size=16)
    assert group_pp_ranks(planned) == {0: [0], 1: list(range(1, 15)), 15: [15]}


def test_an_idle_pipeline_is_told_how_many_microbatches_it_needs():
    planned = llama("llama3_405b", 16384, pipeline_parallel_degree=16, local_batch_size=16)
    bubble = simulate_bubble(planned, H100, 16)
    assert bubble > 15 / 31  # (p-1)/(m+p-1), and stages that wait for what is sent
    (warning,) = warn_of_bubble(planned, H100, bubble)
    n = int(warning.split("Use ")[1].split(" microbatches")[0])
    assert simulate_bubble(planned, H100, n) <= 0.15 < simulate_bubble(planned, H100, n // 2)
    assert f"training.global_batch_size = {n * 128}" in warning
    assert not warn_of_bubble(planned, H100, 0.15)


def test_a_batch_too_small_for_the_pipeline_is_told_the_least_one():
    few = {"pipeline_parallel_degree": 8, "pipeline_parallel_schedule": "GPipe", "tensor_parallel_degree": 8}
    (warning,) = warn_of_few_microbatches(llama("llama3_70b", 128, local_batch_size=2, **few))
    assert "training.global_batch_size = 16" in warning
    assert not warn_of_few_microbatches(llama("llama3_70b", 128, local_batch_size=8, **few))


def test_tensor_parallel_over_nodes_is_told_the_most_that_stays_inside():
    small_nodes = replace(H100, node_size=4)
    planned = llama("llama3_70b", 64, tensor_parallel_degree=8)
    assert not warn_of_tensor_parallel(planned, H100)
    (warning,) = warn_of_tensor_parallel(planned, small_nodes)
    assert "tensor_parallel_degree = 4" in warning


def test_groups_that_lie_across_two_nodes_are_told():
    planned = llama("llama3_70b", 64, tensor_parallel_degree=4)
    assert not warn_of_torn_groups(planned, H100)
    (warning,) = warn_of_torn_groups(planned, replace(H100, node_size=6))
    assert "tp 4 take 4 GPUs, which do not divide a node of 6" in warning and "1 or 2" in warning


def test_too_much_for_the_memory_is_told_how_many_gpus_would_do():
    warning = warn_of_memory(llama("llama3_405b", 64), H100)
    n_gpus = int(warning.split("fits ")[1].split(" ")[0].replace(",", ""))
    assert n_gpus * H100.memory_bytes / H100.reserve_factor > 16 * 405e9  # what the training state alone takes


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ([*SMALL, "--gpu", "h1000"], "--gpu"),
        ([*SMALL, "--search"], "--gpus"),
        (
            [*SMALL, "--gpus", "320", f"--{PP}", "10", "--parallelism.data_parallel_shard_degree", "8"],
            "parallelism.data_parallel_shard_degree",
        ),
    ],
)
def test_wrong_input_ends_with_status_2_and_its_key(capsys, args, key):
    assert plan.main([*args, "--json"]) == 2
    assert key in [problem["key"] for problem in json.loads(capsys.readouterr().out)["problems"]]
