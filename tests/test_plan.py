"""`plan`: figures of the dry run and of the closed form side by side, and warnings whose remedies work."""

import json
import re
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch.distributed as dist
from layouts import PP, TP

from torchtitan_lite import step
from torchtitan_lite.__main__ import main
from torchtitan_lite.config.machine import GIB
from torchtitan_lite.config.schema import Config, with_value
from torchtitan_lite.tools.command_lines import parse_command
from torchtitan_lite.tools.plan import command as plan
from torchtitan_lite.tools.plan.cluster import find_cluster
from torchtitan_lite.tools.plan.dry_run import PlannedRun, group_pp_ranks, plan_run
from torchtitan_lite.tools.plan.forecast import list_memory
from torchtitan_lite.tools.plan.remedies import (
    list_memory_of,
    simulate_bubble,
    warn_of_bubble,
    warn_of_few_microbatches,
    warn_of_groups,
    warn_of_memory,
)
from torchtitan_lite.tools.plan.simulator import plan_order
from torchtitan_lite.tools.plan.workload import Workload

SMALL = ["--config", "debug", "--training.seq_len", "32", "--model.n_layers", "2", "--training.global_batch_size=-1"]
H100 = find_cluster("h100")


def llama(name: str, n_gpus: int, **keys) -> PlannedRun:
    """A shipped config on GPUs, without a dry run. Keys: of parallelism or training."""
    sections = {"local_batch_size": "training", "global_batch_size": "training"}
    args = [part for key, n in keys.items() for part in (f"--{sections.get(key, 'parallelism')}.{key}", str(n))]
    return plan_run(["--config", name, *args], n_gpus, "cuda")


def work(*args, **keys) -> tuple[Config, Workload]:
    planned = llama(*args, **keys)
    return planned.config, planned.describe_workload()


def test_a_plan_is_printed_and_drawn(capsys, tmp_path):
    svg = tmp_path / "timeline.svg"
    assert main(["plan", *SMALL, "--gpus", "2", f"--{PP}", "2", "--svg", str(svg)]) == 0
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
    assert svg.read_text().startswith("<svg")


def make(*args: str) -> plan.Plan:
    options = parse_command("plan", list(args))
    return plan.make_plan(options.config_args, options, H100)


def test_an_extra_collective_in_the_step_is_in_the_plan_and_in_the_dry_run_with_its_line():
    def with_one_more(run, loss):
        dist.all_reduce(loss.new_zeros(2**20), group=run.mesh.tp.get_group())
        return sum_losses(run, loss)

    sum_losses, args = step.sum_losses, [*SMALL, f"--{TP}", "2", "--gpus", "2"]
    before = make(*args)
    with patch.object(step, "sum_losses", with_one_more):
        after = make(*args)
    of_tp, now = (
        next(
            each
            for each in plan.list_for_json(one)["traffic"]
            if (each["axis"], each["operation"]) == ("tp", "all-reduce")
        )
        for one in (before, after)
    )
    assert (now["calls"], now["bytes"]) == (of_tp["calls"] + 1, of_tp["bytes"] + 2**22)
    (more,) = (call for call, _ in after.runs[0].collectives if call.place.function == "with_one_more")
    assert (more.operation, more.axis, more.shape, more.n_bytes) == ("all-reduce", "tp", (2**20,), 2**22)
    assert more.place.line == f"test_plan.py:{with_one_more.__code__.co_firstlineno + 1}"
    rank = plan.list_for_json(before)["pp_ranks"][0]
    assert rank["reserved_bytes"] == rank["live_bytes"] * H100.reserve_factor


def test_stages_that_hold_the_same_are_run_once_by_the_rank_that_holds_most():
    planned = llama("llama3_405b", 16384, pipeline_parallel_degree=16, local_batch_size=16)
    assert group_pp_ranks(planned) == {0: [0], 1: list(range(1, 15)), 15: [15]}


def test_an_idle_pipeline_gets_the_number_of_microbatches_that_it_needs():
    run = work("llama3_405b", 16384, pipeline_parallel_degree=16, local_batch_size=16)
    bubble = simulate_bubble(*run, H100, 16)
    assert bubble > 15 / 31  # (p-1)/(m+p-1), and stages that wait for what is sent
    (warning,) = warn_of_bubble(*run, H100, bubble)
    n = int(warning.split("Use ")[1].split(" microbatches")[0])
    assert simulate_bubble(*run, H100, n) <= 0.15 < simulate_bubble(*run, H100, n // 2)
    assert f"training.global_batch_size = {n * 128}" in warning
    assert "or about 6 stages a rank" in warning, "15 ranks x (1 / 0.15 - 1) / 16 microbatches"
    assert not warn_of_bubble(*run, H100, 0.15)


def test_a_batch_too_small_for_the_pipeline_gets_the_least_one():
    few = {"pipeline_parallel_degree": 8, "pipeline_parallel_schedule": "GPipe", "tensor_parallel_degree": 8}
    (warning,) = warn_of_few_microbatches(llama("llama3_70b", 128, local_batch_size=2, **few).layout)
    assert "training.global_batch_size = 16" in warning
    assert not warn_of_few_microbatches(llama("llama3_70b", 128, local_batch_size=8, **few).layout)


def test_groups_over_nodes_or_across_two_get_a_degree_that_stays_inside():
    layout = llama("llama3_70b", 64, tensor_parallel_degree=4).layout
    assert not warn_of_groups(layout, H100)
    (warning,) = warn_of_groups(layout, replace(H100, node_size=2))
    assert "tensor_parallel_degree = 2" in warning
    (warning,) = warn_of_groups(layout, replace(H100, node_size=6))
    assert "tp 4 take 4 GPUs, which do not divide a node of 6" in warning and "1 or 2" in warning
    (warning,) = warn_of_groups(llama("qwen3_30b_a3b", 64, expert_parallel_degree=32).layout, H100)
    assert "expert_parallel_degree = 8" in warning
    assert not warn_of_groups(llama("qwen3_30b_a3b", 64).layout, H100)
    layout = llama("llama3_70b", 24, tensor_parallel_degree=2, context_parallel_degree=2).layout
    (warning,) = warn_of_groups(layout, replace(H100, node_size=6))
    assert "cp 2 take 4 GPUs" in warning


def test_a_plan_of_experts_names_their_ranks_and_the_load(capsys, monkeypatch):
    args = ["--config", "debug_moe_3d", "--gpus", "8", "--training.seq_len", "32", "--imbalance", "1.5"]
    made = make(*args)
    monkeypatch.setattr(plan, "make_plan", lambda *_: made)  # once for both
    assert main(["plan", *args]) == 0
    printed = capsys.readouterr().out
    assert "pp2 x dp_shard2 x tp2, ep4" in printed
    assert "2 of 8 experts; each rank has 2 of them" in printed and "gets 1.5 times the mean" in printed
    assert re.search(r"\n  ep +all-to-all +\d+ calls", printed)
    assert main(["plan", *args, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["layout"]["ep"], values["layout"]["efsdp"], values["imbalance"]) == (4, 1, 1.5)
    config = made.planned.config
    of_stage = list_memory(made.workload, plan_order(config.parallelism, made.planned.layout))[1]
    n_tokens = config.training.steps * config.training.global_batch_size * 32
    assert f"\n{n_tokens:,} tokens take " in printed
    rank = values["pp_ranks"]["1"]
    assert rank["flops"] == made.runs[1].n_flops
    state = {kind: rank["memory"][kind] for kind in ("parameters", "gradients", "optimizer")}
    assert state == pytest.approx({kind: getattr(of_stage, kind) for kind in state}, rel=0.02)

    # Where memory is too small, and a node has four of the eight GPUs: each stage is on one.
    small = replace(made, cluster=replace(H100, memory_bytes=1e6, node_size=4))
    monkeypatch.setattr(plan, "make_plan", lambda *_: small)
    assert main(["plan", *args, "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    assert not values["fits"]
    assert {each["axis"] for each in values["traffic"] if each["tier"] == "network"} == {
        each["axis"] for each in values["traffic"] if "pp" in each["axis"]
    }


@pytest.mark.slow
def test_mixtral_on_2048_gpus_is_planned_and_fits(capsys):
    assert main(["plan", "--config", "mixtral_8x22b", "--gpus", "2048", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["fits"] and values["warnings"] == []
    assert [rank["alike"] for rank in values["pp_ranks"].values()] == [[0], [1, 2], [3]]


def test_too_much_for_the_memory_gets_a_number_of_gpus_that_would_do():
    warning = warn_of_memory(*work("llama3_405b", 64), H100)
    n_gpus = int(warning.split("fits ")[1].split(" ")[0].replace(",", ""))
    assert n_gpus * H100.memory_bytes / H100.reserve_factor > 16 * 405e9  # what the training state alone takes


def test_too_much_for_the_memory_gets_the_fewest_changes_that_would_do():
    """The second is needed: ZeRO 3 beside full recompute. What is named with its bytes is the peak with both."""
    config, workload = work("llama3_8b", 8, zero_stage=1, local_batch_size=4)
    with_one = with_value(config, "activation_checkpoint.mode", "full")
    with_both = with_value(with_one, "parallelism.zero_stage", 3)
    peaks = [max(each.live for each in list_memory_of(given, workload.args, 8)) for given in (with_one, with_both)]
    cluster = replace(H100, memory_bytes=(peaks[0] * peaks[1]) ** 0.5 * H100.reserve_factor)
    warning = warn_of_memory(config, workload, cluster)
    assert "activation_checkpoint.mode = " in warning and "parallelism.zero_stage = 3" in warning
    assert "local_batch_size" not in warning
    assert f" {peaks[1] * H100.reserve_factor / GIB:.0f} GiB" in warning


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ([*SMALL, "--gpu", "h1000"], "--gpu"),
        ([*SMALL, "--search"], "--gpus"),
        ([*SMALL, "--imbalance", "2"], "--imbalance"),
        (
            [*SMALL, "--gpus", "320", f"--{PP}", "10", "--parallelism.data_parallel_shard_degree", "8"],
            "parallelism.data_parallel_shard_degree",
        ),
    ],
)
def test_wrong_input_ends_with_status_2_and_its_key(capsys, args, key):
    assert main(["plan", *args, "--json"]) == 2
    assert key in [problem["key"] for problem in json.loads(capsys.readouterr().out)["problems"]]
