"""`explain`: slices of weights, collectives with their lines, and the difference of two configs or two checkouts."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from layouts import CP, EP, EXPERTS, PP, REPLICATE, TP, TWO_LAYERS
from measure_memory import BATCH, plan
from torch.distributed.tensor import distribute_tensor

from torchtitan_lite import step
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.tools.plan import explain
from torchtitan_lite.tools.plan.dry_run import describe_sharding
from torchtitan_lite.tools.plan.explain import describe_slice, draw_mesh
from torchtitan_lite.tools.plan.fake_world import fake_group

REPOSITORY = Path(__file__).resolve().parent.parent
SMALL = ["--config", "debug", "--model.n_layers", "2", "--training.seq_len", "32"]
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
        (part,) = step.build_parts(config, model_args, layout, build_mesh(layout, "cpu"))
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
    args += ["--training.global_batch_size", "16", "--training.seq_len", "32", "--stage", "1", "--imbalance", "1.5"]
    assert explain.main(args) == 0
    printed = capsys.readouterr().out
    mesh = "  pp 0  [0 1 2 3]  [4 5 6 7]\n  pp 1  [8 9 10 11]  [12 13 14 15]"
    assert f"mesh: ep in brackets, efsdp across\n{mesh}" in printed
    (slices,) = (line for line in printed.splitlines() if "feed_forward.experts.w1" in line)
    held = [f"experts {first}..{first}" for first in (0, 2, 4, 6, 1, 3, 5, 7)]
    assert re.split(r"  +", slices) == ["layers.2-3.feed_forward.experts.w1", "[8, 128, 96]", *held]
    # Of 32 rows, 12 stay: 20 are sent. 48 arrive, and the results of 36 go back. In bf16, 128 wide.
    exchanged = ["[8] int64", "48 B", "[32, 128] bfloat16", "5.0 KiB", "[48, 128] bfloat16", "9.0 KiB"]
    forward = printed[printed.index("forward, once") : printed.index("backward")]
    assert [
        cell for line in forward.splitlines() if "over ep" in line for cell in re.split(r"  +", line)[2:4]
    ] == exchanged
    assert "reduce-scatter over efsdp" in printed[printed.index("backward, once") :]
    first, *_, gathered = (line for line in printed.splitlines() if re.match(r"  [15]\. ", line))
    assert re.findall(r"\d+", first) == ["1", "4", "4", "16", "32", "4", "1"], "of 4 ranks each: 4 of 16 sequences"
    assert "picks 2 of 8 experts for each token. Each of 4 ep ranks has 2" in printed


def test_collectives_are_printed_in_order_and_equal_layers_once(capsys):
    assert explain.main([*SMALL, *TP2]) == 0
    printed = capsys.readouterr().out
    in_order = ["forward, once", "layers.0-1: each", "backward, once", "layers.1", "between, once", "in words"]
    places = [printed.index(words) for words in in_order]
    assert places == sorted(places)
    layer = printed[printed.index("layers.0-1: each") : printed.index("  output ")]
    assert layer.count("all-gather over tp") == layer.count("reduce-scatter over tp") == 2
    assert layer.count("model/llama3.py:") == 4


def test_against_another_config_prints_what_has_changed(capsys, tmp_path):
    base = tmp_path / "base.toml"
    base.write_text("[model]\nn_layers = 2\n[training]\nseq_len = 32\n[parallelism]\ntensor_parallel_degree = 2\n")
    same = ["--config", str(base), "--gpus", "2", "--against", str(base)]
    assert explain.main(same) == 0
    assert "the same collectives" in capsys.readouterr().out
    assert explain.main([*same, "--parallelism.disable_loss_parallel"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"\+ 1 x all-gather over tp, [^\n]* 576.0 KiB[^\n]*\n[^\n]*chunked_loss", printed, re.DOTALL)
    assert re.search(r"- 1 x all-gather over tp, [^\n]*\n[^\n]*chunked_loss", printed, re.DOTALL)


@pytest.mark.slow
def test_against_another_checkout_prints_what_its_code_does_differently(capsys, tmp_path):
    """A copy without configs: the config is ours. What it adds to train_step is what our code lacks."""
    package = tmp_path / "torchtitan_lite"
    shutil.copytree(REPOSITORY / "torchtitan_lite", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    before = "    run.lr_scheduler.step()\n"
    code = (package / "step.py").read_text(encoding="utf-8")
    assert code.count(before) == 1
    more = "    dist.all_reduce(grad_norm, group=run.mesh.tp.get_group())\n"
    (package / "step.py").write_text(code.replace(before, more + before), encoding="utf-8")
    line = code[: code.index(before)].count("\n") + 1
    assert explain.main([*SMALL, *TP2, "--against", str(tmp_path)]) == 1
    _, *changes = capsys.readouterr().out.splitlines()
    assert [change.strip() for change in changes] == [
        "- 1 x all-reduce over tp, [] float32, 4 B each (1 -> 0)",
        f"pp rank 0, between: step.py:{line} train_step",
    ]


def test_what_is_no_checkout_or_fails_there_is_refused_in_one_line(capsys, tmp_path):
    assert explain.main([*SMALL, *TP2, "--against", str(tmp_path)]) == 2
    assert re.fullmatch(r"[^\n]*\n  1\. --against = [^\n]* is no checkout: [^\n]*\n", capsys.readouterr().err)
    package = tmp_path / "torchtitan_lite"
    package.mkdir()
    (package / "__main__.py").write_text("raise RuntimeError('first line\\nof two')\n")
    assert explain.main([*SMALL, *TP2, "--against", str(tmp_path)]) == 2
    assert re.fullmatch(r"[^\n]*\n  1\. --against = [^\n]* ended with 1: of two\. [^\n]*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("args", "printed"),
    [
        (["--config", "llama3_405b", "--gpus", "320", f"--{TP}", "3"], "n_kv_heads"),
        ([*SMALL, "--stage", "1"], "Use 0 to 0"),
        ([*SMALL, "--imbalance", "1.5"], "--imbalance = 1.5"),
        (["--config", "debug_moe", "--gpus", "2", "--imbalance", "2.1"], "Use 1 to 2"),
        ([*SMALL, "--against", "nowhere.toml"], "no such file"),
    ],
)
def test_wrong_input_ends_with_status_2_and_a_remedy(capsys, args, printed):
    assert explain.main(args) == 2
    assert printed in capsys.readouterr().err
