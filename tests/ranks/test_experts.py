"""Test MoE layers: results in one process, token counts, updates of the expert bias, log."""

import copy
from types import SimpleNamespace

import compare
import pytest
import torch
import torch.nn.functional as F
from layouts import MODE, MOE, read_rows
from marks import each_row
from safetensors.torch import load_file
from torch import Tensor

from torchtitan_lite import step as stepping
from torchtitan_lite import validation
from torchtitan_lite.components.expert_balance import (
    ExpertBalance,
    describe_load,
)
from torchtitan_lite.config.model_rows import MoEArgs
from torchtitan_lite.config.schema import Training
from torchtitan_lite.model.moe import MoE

TOKENS = compare.GLOBAL_BATCH_SIZE * compare.SEQ_LEN


# ---------------------------------------------------------------- one MoE layer in one process


def make_moe(**sizes) -> MoE:
    torch.manual_seed(0)
    sizes = {"n_experts": 6, "top_k": 2, "expert_ffn_dim": 24} | sizes
    moe = MoE(16, MoEArgs(**sizes))
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return moe


def compute_plainly(moe: MoE, x: Tensor) -> Tensor:
    """Compute an MoE layer by the paper's formula, token by token."""
    router = moe.router
    experts = moe.experts
    outputs = []
    for token in x.flatten(0, 1):
        logits = router.weight @ token
        scores = logits.softmax(0)
        if router.args.router_scores == "sigmoid":
            scores = logits.sigmoid()
        biased = scores.detach() + router.expert_bias
        chosen = biased.topk(router.args.top_k).indices
        weights = scores[chosen]
        if router.args.normalize_top_k:
            weights = weights / weights.sum()
        output = 0.0
        for weight, expert in zip(weights, chosen, strict=True):
            gate = F.silu(token @ experts.w1[expert])
            hidden = gate * (token @ experts.w3[expert])
            output = output + weight * (hidden @ experts.w2[expert])
        outputs.append(output)
    return torch.stack(outputs).view_as(x)


@pytest.mark.parametrize(
    "sizes",
    [{}, {"router_scores": "sigmoid"}, {"normalize_top_k": False}, {"top_k": 6}],
    ids=str,
)
def test_the_outputs_and_gradients_of_an_moe_layer_equal_the_formula(sizes):
    moe = make_moe(**sizes)
    x = torch.randn(2, 5, 16, requires_grad=True)
    # a bias changes which experts are chosen, but not the routing weights
    moe.router.expert_bias[3] = 0.4
    results = []
    for output in (moe(x), compute_plainly(moe, x)):
        gradients = torch.autograd.grad(output.square().sum(), [x, *moe.parameters()])
        results.append([output, *gradients])
    for ours, plain in zip(*results, strict=True):
        assert compare.relative_error(ours, plain) < 1e-6


def test_in_bfloat16_scores_and_the_sum_of_a_tokens_experts_are_computed_in_fp32():
    moe = make_moe(top_k=6).bfloat16()
    x = torch.randn(2, 5, 16).bfloat16()
    weights, routes, *_ = moe.router(x)
    in_float = copy.deepcopy(moe.router).float()
    in_float.choose = lambda scores: routes
    expected, *_ = in_float(x.float())
    assert torch.equal(weights, expected)
    # then the output of a token is the weighted sum of six copies of its input
    moe.experts.forward = lambda rows, counts: rows
    assert torch.equal(moe(x), x)


# ---------------------------------------------------------------- loads and biases of a step


def count_step(rank: int, world_size: int, overrides: dict) -> Tensor:
    """Worker: return the loads and the entropy of each layer in a step. test_layouts.py compares loads and biases."""
    run = compare.build_table_run(world_size, {**MOE, **overrides})
    batch = compare.read_rows(run)
    sharded = stepping.shard_for_cp(run, batch)
    validation.forward_only(run, sharded, torch.ones(()))  # validation counts nothing
    return stepping.train_step(run, batch).expert_loads


COUNTED_ALIKE = read_rows("""
full recompute | 1 | MODE=full
accumulation | 1 | ACCUMULATION_4
pp2 ZBVZeroBubble | 2 | PP=2 SCHEDULE=ZBVZeroBubble MODE=none
cp2 x tp2, ep4 | 4 | CP=2 TP=2 EP=4
""")


@each_row("name", COUNTED_ALIKE)
def test_every_layout_counts_each_token_once_and_has_the_same_entropy(pool, name):
    (alone,) = pool.run(count_step, 1, {MODE: "none"})
    assert alone[:, :-1].sum(1).tolist() == [2 * TOKENS] * 2
    for found in pool.run(count_step, *COUNTED_ALIKE[name]):
        torch.testing.assert_close(found, alone, rtol=1e-6, atol=0)


# ---------------------------------------------------------------- checkpoints


WEIGHTS_ALONE = "--checkpoint.last_save_model_only --checkpoint.export_dtype=float16"
IN_BFLOAT16 = (
    "--training.dtype=bfloat16 --optimizer.moments_dtype=bfloat16 --parallelism.zero_stage=1"
)


def test_exported_weights_are_rounded_only_in_the_last_checkpoint_and_biases_of_experts_never(
    run_training, letters, tmp_path
):
    keys = [*letters, "--model.flavor=debug_moe", "--training.steps=2", "--checkpoint.interval=1"]
    for name, more in (("whole", ""), ("alone", WEIGHTS_ALONE)):
        run_training(tmp_path / name, [*keys, *f"{IN_BFLOAT16} {more}".split()])
    paths = [tmp_path / name / "checkpoint" for name in ("whole", "alone")]
    whole, alone = (load_file(path / "step-2" / "rank-00000.safetensors") for path in paths)
    earlier = load_file(paths[1] / "step-1" / "rank-00000.safetensors")
    assert earlier.keys() == whole.keys()
    assert alone.keys() == {name for name in whole if name.startswith("model.")}
    for name, tensor in alone.items():
        expected = whole[name]
        assert earlier[name].dtype == expected.dtype
        if name.endswith("expert_bias"):
            assert expected.any() and expected.dtype == torch.float32
        else:
            expected = expected.half()
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected)


# ---------------------------------------------------------------- the log


def test_the_log_describes_the_expert_load_of_a_step_by_three_numbers():
    """The batch has 16 tokens with two routes each. Layer 0 is dense."""
    entropy = 16 * 1.25
    loads = [
        [0, 0, 0, 0, 0],
        [16, 8, 8, 0, entropy],
        [8, 8, 8, 8, entropy],
    ]
    assert describe_load(torch.tensor(loads, dtype=torch.float64), top_k=2) == {
        "expert_max_over_mean": 2.0,
        "expert_dead_share": 0.125,
        "router_entropy": 1.25,
    }


def test_a_load_that_stays_on_one_expert_causes_one_warning_with_keys(caplog):
    moe_args = MoEArgs(n_experts=8, top_k=2, expert_ffn_dim=1)
    part = SimpleNamespace(layers={}, model_args=SimpleNamespace(n_layers=1, moe=moe_args))
    balance = ExpertBalance([part], Training(), 1, [], torch.device("cpu"))
    for step, ratio in enumerate([3.2, 3.2, 1.0, 3.2, 3.2, 3.2, 3.2], start=1):
        others = [(8 - ratio) / 7] * 7
        balance.describe(step, torch.tensor([[ratio, *others, 5.0]]))
    (warning,) = caplog.messages
    assert warning.startswith("step 6: an expert gets 3.2 times the mean load of its layer")
