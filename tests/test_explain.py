"""`explain`: slices of weights, and collectives with their lines."""

import re
from collections import Counter

import pytest
import torch
from layouts import CP, EP, EXPERTS, PP, REPLICATE, TP, TWO_LAYERS
from measure_memory import BATCH, plan
from torch.distributed.tensor import distribute_tensor

from torchtitan_lite import build
from torchtitan_lite.__main__ import main
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.tools.plan.dry_run import describe_sharding, dry_run, shorten
from torchtitan_lite.tools.plan.explain import describe_slice, draw_mesh
from torchtitan_lite.tools.plan.fake_world import fake_group
from torchtitan_lite.tools.plan.planned_run import plan_run
from torchtitan_lite.tools.tables import format_bytes

SMALL = ["--config", "debug", "--model.n_layers", "2", "--training.seq_len", "32", "--training.global_batch_size=-1"]
TP2 = ["--gpus", "2", "--parallelism.tensor_parallel_degree", "2"]


def cut(full: torch.Tensor, text: str) -> torch.Tensor:
    """The slice that a text such as "rows 0..3, columns 2..5" means."""
    names = ("experts", "rows", "columns") if full.dim() == 3 else ("rows|elements", "columns")
    for dim, name in enumerate(names):
        if found := re.search(rf"(?:{name}) (\d+)\.\.(\d+)", text):
            full = full.narrow(dim, int(found[1]), int(found[2]) - int(found[1]) + 1)
    return full if text != "nothing" else full[:0]


@pytest.mark.parametrize(
    ("keys", "rank"),
    [
        ({TP: 2, REPLICATE: 2, BATCH: 2}, 3),
        ({CP: 2, TP: 2, BATCH: 2}, 4),
        ({TP: 2, REPLICATE: 2, EP: 2, BATCH: 2, **EXPERTS}, 7),
        ({TP: 2, EP: 1, BATCH: 2, **EXPERTS}, 5),
        ({EP: 4, BATCH: 2, **EXPERTS, "flavor.n_experts": 4}, 6),  # one expert a rank: efsdp splits it
    ],
)
def test_slices_are_those_that_the_rank_holds(keys, rank):
    config, model_args, layout = plan(8, {**keys, **TWO_LAYERS})
    with fake_group(8, rank=rank):
        (part,) = build.build_parts(config, model_args, layout, build_mesh(layout, "cpu"))
        for fqn, parameter in part.named_parameters():
            full = torch.arange(parameter.numel()).view(parameter.shape)
            own = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
            described = describe_slice(describe_sharding(parameter), layout, rank)
            assert cut(full, described).equal(own.to_local()), f"{fqn}: {described}"


def test_a_mesh_is_drawn_with_every_rank_at_its_place():
    assert draw_mesh(plan(8, {PP: 2, TP: 2, BATCH: 4})[2].degrees).splitlines() == [
        "mesh: tp in brackets, dp_shard across",
        "  pp 0  [0 1]  [2 3]",
        "  pp 1  [4 5]  [6 7]",
    ]


def test_experts_are_explained_with_their_mesh_slices_and_exchange(capsys):
    args = ["--config", "debug_moe_3d", "--gpus", "16", "--parallelism.data_parallel_shard_degree", "4"]
    args += ["--training.global_batch_size", "16", "--training.seq_len", "32", "--stage", "1"]
    assert main(["explain", *args]) == 0
    printed = capsys.readouterr().out
    mesh = "  pp 0  [0 1 2 3]  [4 5 6 7]\n  pp 1  [8 9 10 11]  [12 13 14 15]"
    assert f"mesh: ep in brackets, efsdp across\n{mesh}" in printed
    (slices,) = (line for line in printed.splitlines() if "feed_forward.experts.w1" in line)
    held = [f"experts {first}..{first}" for first in (0, 2, 4, 6, 1, 3, 5, 7)]
    assert re.split(r"  +", slices) == ["layers.2-3.feed_forward.experts.w1", "[8, 128, 96]", *held]
    # Of 32 rows, 8 stay: 24 are sent, and the results of 24 go back. In bf16, 128 wide.
    exchanged = ["[8] int64", "48 B", *["[32, 128] bfloat16", "6.0 KiB"] * 2]
    forward = printed[printed.index("forward, once") : printed.index("backward, 4 times")]
    assert [
        cell for line in forward.splitlines() if "over ep" in line for cell in re.split(r"  +", line)[2:4]
    ] == exchanged
    assert "reduce-scatter over efsdp" in printed[printed.index("backward, ") :]
    assert "Each of 4 data-parallel ranks takes 4 of 16 sequences of 32 tokens, in microbatches: 4 x 1." in printed
    assert "picks 2 of 8 experts for each token. Each of 4 ep ranks has 2" in printed


def test_collectives_are_printed_in_order_and_equal_layers_once(capsys):
    assert main(["explain", *SMALL, *TP2]) == 0
    printed = capsys.readouterr().out
    in_order = ["  1. Each of 1", "forward, once", "layers.0-1: each", "backward, once", "layers.1", "between, once"]
    places = [printed.index(words) for words in in_order]
    assert places == sorted(places)
    layer = printed[printed.index("layers.0-1: each") : printed.index("  output ")]
    assert layer.count("all-gather over tp") == layer.count("reduce-scatter over tp") == 2
    assert layer.count("model/llama3.py:") == 4


def test_a_tokens_way_has_the_bytes_of_the_forward_of_the_dry_run(capsys):
    """Of rank 3 of pp2 x dp2 x tp2: on both stages, each layer once."""
    assert main(["explain", "--config", "debug_3d", "--gpus", "8", "--rank", "3", "--token"]) == 0
    printed = capsys.readouterr().out
    assert "rows 4..7 of 8" in printed and "on rank 7" in printed and "send over pp, 16.0 KiB" in printed
    said = Counter(re.findall(r"(all-gather|reduce-scatter) over (\S+), (\S+ \S+)", printed))
    planned = shorten(plan_run(["--config", "debug_3d"], 8, "cuda"), 1)
    counted = Counter()
    for pp_rank in (0, 1):
        for call in dry_run(planned, pp_rank).collectives:
            if call.place.walk == "forward" and call.place.module.partition(".")[2].split(".")[0] not in ("1", "3"):
                counted[call.operation, call.axis, format_bytes(call.n_bytes)] += 1
    assert said == counted


@pytest.mark.parametrize(
    ("args", "printed"),
    [
        (["--config", "llama3_405b", "--gpus", "320", f"--{TP}", "3"], "n_kv_heads"),
        ([*SMALL, "--stage", "1"], "Use 0 to 0"),
        ([*SMALL, "--token", "--rank", "2", *TP2], "Use 0 to 1"),
    ],
)
def test_wrong_input_ends_with_status_2(capsys, args, printed):
    assert main(["explain", *args]) == 2
    assert printed in capsys.readouterr().err
