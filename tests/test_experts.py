"""Mixtures of experts: what one process computes, what is counted, how the bias moves, what the log says."""

import copy
from dataclasses import replace

import compare
import pytest
import torch
import torch.nn.functional as F
from checkpoints import list_differing, load_and_train, merge_states, train_and_save
from layouts import ACCUMULATION_4, ADAMW, CP, EP, MODE, PP, SCHEDULE, TP, TWO_LAYERS
from torch import Tensor

from torchtitan_lite import step as stepping
from torchtitan_lite.components.expert_balance import count_collapsed, describe_load
from torchtitan_lite.config.block import list_parameters
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.model_rows import MoEArgs
from torchtitan_lite.config.schema import Checkpoint, Model
from torchtitan_lite.model.kv_cache import CachedModel
from torchtitan_lite.model.moe import MoE, list_moes
from torchtitan_lite.models.llama3.modules import Llama3
from torchtitan_lite.parallel.initial_weights import fill_tensor

RATE = "training.expert_bias_rate"
MOE = {"model.flavor": "debug_moe", "flavor.expert_ffn_dim": 48, "model.head_dim": 8}
TOKENS = compare.GLOBAL_BATCH_SIZE * compare.SEQ_LEN


# ---------------------------------------------------------------- one MoE layer in one process


def make_moe(**numbers) -> MoE:
    torch.manual_seed(0)
    moe = MoE(16, MoEArgs(**{"n_experts": 6, "top_k": 2, "expert_ffn_dim": 24} | numbers))
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return moe


def compute_plainly(moe: MoE, x: Tensor) -> Tensor:
    """The paper's formula, token by token."""
    args, experts = moe.router.args, moe.experts
    rows = []
    for token in x.flatten(0, 1):
        logits = moe.router.weight @ token
        scores = logits.softmax(0) if args.router_scores == "softmax" else logits.sigmoid()
        chosen = (scores.detach() + moe.router.expert_bias).topk(args.top_k).indices.tolist()
        total = sum(scores[e] for e in chosen) if args.normalize_top_k else 1.0
        outputs = [(F.silu(token @ experts.w1[e]) * (token @ experts.w3[e])) @ experts.w2[e] for e in chosen]
        rows.append(sum(scores[e] / total * output for e, output in zip(chosen, outputs, strict=True)))
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize(
    "numbers", [{}, {"router_scores": "sigmoid"}, {"normalize_top_k": False}, {"top_k": 6}], ids=str
)
def test_an_moe_layer_and_its_gradients_are_those_of_the_formula(numbers):
    moe, x = make_moe(**numbers), torch.randn(2, 5, 16, requires_grad=True)
    moe.router.expert_bias[3] = 0.4  # counts for the choice, not for the weights
    results = []
    for compute in (moe, lambda x: compute_plainly(moe, x)):
        output = compute(x)
        tensors = [x, *moe.parameters()]
        results.append([output, *torch.autograd.grad(output.square().sum(), tensors)])
    for ours, plain in zip(*results, strict=True):
        assert compare.relative_error(ours, plain) < 1e-6


def test_in_bfloat16_scores_and_the_sum_of_a_tokens_experts_are_computed_in_fp32():
    moe, x = make_moe(top_k=6).bfloat16(), torch.randn(2, 5, 16).bfloat16()
    weights, routes = moe.router(x)
    in_float = copy.deepcopy(moe.router).float()
    in_float.choose = lambda scores: routes
    assert torch.equal(weights, in_float(x.float())[0])
    moe.experts.forward = lambda rows, counts: rows  # then a token is the weighted sum of six times itself
    assert torch.equal(moe(x), x)


def test_the_auxiliary_gradient_is_that_of_the_papers_loss():
    """Sum over experts of f x P for each sequence, f without gradient (DeepSeek-V3, eq. 17 to 20)."""
    moe, x = make_moe(router_scores="sigmoid"), torch.randn(3, 7, 16)
    moe.router.balance_loss = 0.25
    weights, routes = moe.router(x)
    (0 * weights.sum()).backward()
    injected, moe.router.weight.grad = moe.router.weight.grad, None
    scores = (x @ moe.router.weight.T).sigmoid()
    share = F.one_hot(routes, 6).sum(2).float().mean(1) * 6 / 2  # f (B, E)
    mean_score = (scores / scores.sum(-1, keepdim=True)).mean(1)  # P (B, E)
    (0.25 * (share * mean_score).sum()).backward()
    assert compare.relative_error(injected, moe.router.weight.grad) < 1e-6


def test_layers_without_experts_are_where_the_numbers_say():
    args = resolve_model(Model(flavor="debug_moe", n_layers=6))
    args = replace(args, moe=replace(args.moe, n_first_dense_layers=2, moe_every=2, n_shared_experts=1))
    with torch.device("meta"):
        built = Llama3(args)
    assert [layer for layer, _ in list_moes(built)] == [3, 5]
    assert [block.shared_experts is not None for block in built.layers.values()] == [
        layer in (3, 5) for layer in range(6)
    ]


# ---------------------------------------------------------------- loads and biases of a step


def count_step(rank: int, world_size: int, overrides: dict, n_steps: int = 1) -> dict[str, object]:
    """Worker: loads of the last step, and the biases after it, of all layers."""
    run = compare.build_table_run(world_size, {**MOE, **overrides})
    for step in range(n_steps):
        batch = compare.own_rows(run, compare.make_batch(step, run.config.model.vocab_size))
        stepping.forward_only(run, stepping.shard_for_cp(run, batch), torch.ones(()))  # validation counts nothing
        loads = stepping.train_step(run, batch).expert_loads
    biases = {fqn: bias.tolist() for fqn, bias in run.balance.biases.items()}
    return {"loads": loads[:, :-1].tolist(), "entropy": loads[:, -1].tolist(), "biases": biases}


ALONE = (1, {MODE: "none", **TWO_LAYERS})
COUNTED_ALIKE = {
    "full recompute": (1, {MODE: "full", **TWO_LAYERS}),
    "accumulation": (1, {**ACCUMULATION_4, **TWO_LAYERS}),
    "pp2 ZBVZeroBubble": (2, {PP: 2, SCHEDULE: "ZBVZeroBubble", MODE: "none", **TWO_LAYERS}),
    "cp2 x tp2, ep4": (4, {CP: 2, TP: 2, EP: 4, **TWO_LAYERS}),
}


@pytest.mark.parametrize("name", COUNTED_ALIKE)
def test_every_layout_counts_each_token_once_and_moves_the_same_biases(pool, name):
    (alone,) = pool.run(count_step, *ALONE)
    assert [sum(load) for load in alone["loads"]] == [2 * TOKENS] * 2
    for load, bias in zip(alone["loads"], alone["biases"].values(), strict=True):
        mean = sum(load) / 8
        signs = [(mean > n) - (mean < n) for n in load]
        assert bias == pytest.approx([1e-3 * sign for sign in signs])
    biases = {}
    for rank in pool.run(count_step, *COUNTED_ALIKE[name]):
        assert rank["loads"] == alone["loads"]
        assert rank["entropy"] == pytest.approx(alone["entropy"])
        biases |= rank["biases"]
    assert biases == alone["biases"]


# ---------------------------------------------------------------- checkpoints


TRAINED = {**MOE, **ADAMW, **TWO_LAYERS, RATE: 0.01}
OPENED_ON = {"dp2, ep1": (2, {EP: 1}), "tp2 x dp2, ep4": (4, {TP: 2, EP: 4}), "pp2": (2, {PP: 2})}


@pytest.mark.parametrize("name", OPENED_ON)
def test_a_checkpoint_of_ep2_opens_on_another_layout_with_every_element_and_bias_equal(pool, tmp_path, name):
    section = Checkpoint(enable=True)
    saved = pool.run(train_and_save, 2, {**TRAINED, EP: 2}, str(tmp_path), 3, section)
    world_size, keys = OPENED_ON[name]
    opened = pool.run(load_and_train, world_size, {**TRAINED, **keys}, str(tmp_path), 3, section)
    state = merge_states([rank[0] for rank in saved])
    assert list_differing(merge_states([rank[0] for rank in opened]), state) == []
    biases = [tensor for fqn, tensor in state.items() if fqn.endswith("expert_bias")]
    assert len(biases) == 2 and all(bias.abs().max() >= 0.0099 for bias in biases)
    assert opened[0][1] == pytest.approx(saved[0][1], rel=1e-4)  # the losses of three more steps


# ---------------------------------------------------------------- the log


def make_loads(rows: list[list[float]], entropy: float = 0.0) -> Tensor:
    return torch.tensor([[*row, entropy] for row in rows], dtype=torch.float64)


def test_the_load_of_a_logged_step_is_three_numbers():
    """16 tokens of two routes each; layer 0 is dense."""
    load = describe_load(make_loads([[0] * 4, [16, 8, 8, 0], [8, 8, 8, 8]], entropy=16 * 1.25), top_k=2)
    assert load == {"expert_max_over_mean": 2.0, "expert_dead_share": 0.125, "router_entropy": 1.25}


def test_a_load_that_stays_on_one_expert_is_warned_of_once_with_keys(caplog):
    args, n_collapsed = MoEArgs(n_experts=8, top_k=2, expert_ffn_dim=1), 0
    even, uneven = [[4] * 8, [4] * 8], [[4] * 8, [12, 12, 2, 2, *[1] * 4]]
    for step, rows in enumerate([uneven, uneven, even, uneven, uneven, uneven, uneven], 1):
        n_collapsed = count_collapsed(step, describe_load(make_loads(rows), top_k=2), args, n_collapsed)
    (warning,) = caplog.messages
    assert warning.startswith("step 6: an expert gets 3.0 times the mean load of its layer")


# ---------------------------------------------------------------- with the rest of the trainer


def test_a_cache_gives_the_logits_of_the_whole_text():
    torch.manual_seed(0)
    args = resolve_model(Model(flavor="debug_moe", n_layers=2))
    args = replace(args, qk_norm=True, moe=replace(args.moe, n_shared_experts=1))
    model, tokens = Llama3(args), torch.randint(args.vocab_size, (9,)).tolist()
    for fqn, parameter in model.named_parameters():
        fill_tensor(parameter.data, list_parameters(args)[fqn], torch.Generator().manual_seed(len(fqn)))
    with torch.inference_mode():
        expected = model(torch.tensor([tokens]), positions=torch.arange(9)[None])[0, -1]
    cached = CachedModel(model)
    cached.read(tokens[:6])
    assert compare.relative_error([cached.read([token]) for token in tokens[6:]][-1], expected) < 1e-5
