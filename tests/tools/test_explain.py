"""Test `explain`, which prints the slices of weights, and the collectives with the lines of code that call them."""

import re
from collections import Counter

import torch
from layouts import TP, read_rows
from marks import each_row
from measure_memory import plan
from torch.distributed.tensor import distribute_tensor

from torchtitan_lite import build
from torchtitan_lite.checkpoint.format import find_coordinates
from torchtitan_lite.parallel.context_parallel import plan_query_positions
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.tools.plan.explain import describe_slice
from torchtitan_lite.tools.plan.fake_world import fake_group
from torchtitan_lite.tools.plan.slices import find_slices


def cut(full: torch.Tensor, text: str) -> torch.Tensor:
    """Return the slice that a text such as "rows 0..3, columns 2..5" means."""
    names = ("experts", "rows", "columns") if full.dim() == 3 else ("rows|elements", "columns")
    for dim, name in enumerate(names):
        if found := re.search(rf"(?:{name}) (\d+)\.\.(\d+)", text):
            full = full.narrow(dim, int(found[1]), int(found[2]) - int(found[1]) + 1)
    return full if text != "nothing" else full[:0]


LAYOUTS = read_rows("""
dp2 x dp2 x tp2 | 8 | TP=2 REPLICATE=2 TWO_LAYERS
dp2 x tp4 | 8 | TP=4 REPLICATE=2 TWO_LAYERS
cp2 x tp2 | 8 | CP=2 TP=2 TWO_LAYERS
pp2 x tp2 | 8 | PP=2 TP=2 TWO_LAYERS
dp8 | 8 | TWO_LAYERS
experts, replicas, ep2 | 8 | TP=2 REPLICATE=2 EP=2 EXPERTS TWO_LAYERS
experts, tp2 | 8 | TP=2 EP=1 EXPERTS TWO_LAYERS
experts, tp2, ep4 | 8 | TP=2 EP=4 EXPERTS TWO_LAYERS
one expert on each rank, split by efsdp | 8 | EP=4 EXPERTS TWO_LAYERS flavor.n_experts=4
""")


@each_row("name", LAYOUTS)
def test_slices_in_words_and_in_a_picture_are_those_that_the_rank_holds(name):
    config, model_args, layout = plan(*LAYOUTS[name])
    seq_len = config.training.seq_len
    n_experts = model_args.moe.n_experts if model_args.moe else 0
    for rank in (0, 3, 6, 7):
        told = {}
        with fake_group(8, rank=rank):
            part, *_ = build.build_parts(config, model_args, layout, build_mesh(layout, "cpu"))
            for fqn, parameter in part.named_parameters():
                full = torch.arange(parameter.numel()).view(parameter.shape)
                own = distribute_tensor(
                    full, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
                described = describe_slice(parameter, rank)
                assert cut(full, described).equal(own.to_local()), f"{fqn}: {described}"
                told[fqn.partition(".")[2].partition(".")[2]] = described
        drawn = find_slices(layout, rank, model_args.dim, seq_len, n_experts)
        assert cut(torch.arange(model_args.dim), told["attention.wq.weight"]).tolist() == [
            *drawn.held_rows
        ]
        at = find_coordinates(rank, list(layout.degrees), layout.degrees)
        positions = torch.arange(seq_len)
        if layout.cp > 1:
            positions = plan_query_positions(at["cp"], layout.cp, seq_len)
        own = positions.chunk(layout.tp)[at["tp"]]
        assert [*sum(map(list, drawn.used_tokens), [])] == positions.tolist()
        assert [*sum(map(list, drawn.held_tokens), [])] == own.tolist()
        if n_experts:
            first, last = re.search(
                r"experts (\d+)\.\.(\d+)", told["feed_forward.experts.w1"]
            ).groups()
            assert {int(first), int(last)} <= {*drawn.experts}


def test_explain_prints_the_mesh_slices_and_all_to_alls_of_an_moe_model(run_tool):
    args = "--config debug_moe_3d --gpus 16 --parallelism.data_parallel_shard_degree 4 "
    args += "--training.global_batch_size 16 --training.seq_len 32"
    printed = run_tool("explain", *args.split())
    assert "mesh (pp, dp_shard, tp):\ntensor([[[ 0,  1],\n         [ 2,  3]," in printed
    (slices,) = re.findall("layers.2-3.feed_forward.experts.w1 .*", printed)
    held = [f"experts {first}..{first}" for first in (0, 2, 4, 6, 1, 3, 5, 7)]
    assert re.split(r"  +", slices)[1:] == ["[8, 128, 96]", *held]
    # 8 of 32 rows stay on their rank. The other 24 rows are sent, and their results are sent back, in bf16 with a width
    # of 128.
    exchanged = re.findall(r"all-to-all over ep +(\[.*?\]) (\w+) +(\S+ \S+)", printed)
    assert set(exchanged) == {("[8]", "int64", "48 B"), ("[32, 128]", "bfloat16", "6.0 KiB")}
    assert "reduce-scatter over efsdp" in printed[printed.index("backward: ") :]


def test_collectives_are_printed_in_order_and_equal_layers_are_printed_once(run_tool):
    """Check also that torch still has the file and the functions of FSDP that meter.py finds on the stack."""
    args = "--config debug --gpus 4 --model.n_layers 2 --training.seq_len 32"
    printed = run_tool(*f"explain {args} --{TP} 2 --training.global_batch_size=-1".split())
    in_order = "mesh .*forward: 1 x.*layers.0-1: each.*norm, output +all-gather over dp_shard"
    in_order += r".*backward: 1 x\n  layers.1 +all-gather over dp_shard.*between: 1 x"
    assert re.search(in_order, printed, re.DOTALL)
    layer = printed[printed.index("layers.0-1: each") : printed.index("  output ")]
    assert layer.count("all-gather over tp") == layer.count("reduce-scatter over tp") == 2
    assert layer.count("models/llama3/modules.py:") == 6


def test_a_rank_is_explained_with_its_rows_and_its_slices_in_every_stage(run_tool):
    printed = run_tool(*"explain --config debug_3d --gpus 8 --rank 3".split())
    assert "rank 3 reads rows 4..7 of 8" in printed
    assert re.search(r"tok_embeddings.weight +\[2304, 128\] +rows 1728\.\.2303\n", printed)
    assert re.findall(r"(rank \d)\n", printed) == ["rank 3", "rank 7"]
    moved = Counter(re.findall(r"(send|receive) over pp ", printed))
    assert moved["send"] == moved["receive"] > 0
