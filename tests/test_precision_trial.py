"""The trials in the run's own arithmetic: no healthy layout is accused, and their reference is what it says it is.

What they have to catch are the mutants of mutants.py whose trial is "bfloat16" or "float8".
"""

import math
from dataclasses import replace

import compare
import pytest
import torch
import torch.nn.functional as F
from layouts import (
    ACCUMULATION_4,
    CHUNKS,
    CP,
    DOCUMENTS,
    GATHER,
    MODE,
    NO_LOSS_PARALLEL,
    OFFLOAD,
    PP,
    PRECOMPUTE,
    REPLICATE,
    RING,
    ROWWISE,
    ROWWISE_HP,
    SCHEDULE,
    TP,
    TWO_LAYERS,
    WHOLE_LOGITS,
    ZERO,
    Row,
)
from torch import nn

from torchtitan_lite.config.layout import plan_layout, resolve_config
from torchtitan_lite.model.head import IGNORE_INDEX
from torchtitan_lite.model.llama3 import Llama3
from torchtitan_lite.verify.precision_parts import (
    RoundedContext,
    RoundedDocumentContext,
    RoundedLoss,
    share_out,
    sum_shares,
)
from torchtitan_lite.verify.precision_reference import RoundedProcess
from torchtitan_lite.verify.precision_trial import (
    ORDER_OF_SUMS,
    cut,
    find_short_share,
    make_late_batch,
    try_bfloat16,
    try_float8,
)
from torchtitan_lite.verify.reduction import override, reduce_config
from torchtitan_lite.verify.small_runs import choose_float8_sizes

FLOAT32 = {"training.mixed_precision_param": "float32"}
# Each mesh dim, recipe, loss, attention, schedule and ZeRO stage is in a row of the default run; `slow` has more pairs.
HEALTHY = {
    "hsdp2x2, accumulation, ZeRO-1": Row(4, {**PRECOMPUTE, REPLICATE: 2, ZERO: 1, **ACCUMULATION_4}),
    "tp2, plain loss, tied": Row(2, {**GATHER, TP: 2, **WHOLE_LOGITS, "model.tie_embeddings": True}),
    "tp2, whole logits": Row(2, {**ROWWISE_HP, TP: 2, **NO_LOSS_PARALLEL, **WHOLE_LOGITS}),
    "cp2 x tp2 ring": Row(4, {**ROWWISE, CP: 2, TP: 2, **RING, **TWO_LAYERS}),
    "dp2 x cp2 documents": Row(4, {**PRECOMPUTE, CP: 2, **DOCUMENTS}),
    "pp2 x dp2 ZBVZeroBubble": Row(4, {**GATHER, PP: 2, SCHEDULE: "ZBVZeroBubble", MODE: "none"}),
}
SLOW = {
    "one rank": Row(1, PRECOMPUTE),
    "dp2, tied embeddings": Row(2, {**GATHER, "model.tie_embeddings": True}),
    "ddp2 offloaded, ZeRO-2": Row(2, {**ROWWISE, REPLICATE: 2, ZERO: 2, **OFFLOAD, **ACCUMULATION_4}),
    "tp4, plain loss": Row(4, {**ROWWISE, TP: 4, **WHOLE_LOGITS}),
    "tp4, gathered logits": Row(4, {**GATHER, TP: 4, **NO_LOSS_PARALLEL, **CHUNKS}),
    "dp2 x tp2 in float32": Row(4, {**GATHER, **FLOAT32, TP: 2}),
    "cp4 ring": Row(4, {**GATHER, CP: 4, **RING}),
    "cp4 all-gather": Row(4, {**ROWWISE, CP: 4, MODE: "full"}),
    "tp2 documents": Row(2, {**ROWWISE, TP: 2, **DOCUMENTS}),
    "pp2 x tp2": Row(4, {**PRECOMPUTE, PP: 2, TP: 2}),
    "pp2 Interleaved1F1B": Row(2, {**ROWWISE_HP, PP: 2, SCHEDULE: "Interleaved1F1B"}),
}
MEASURES = ["rotary angles", "block outputs", "loss", "gradient reduction", "gradients"]


@pytest.mark.parametrize("name", [*HEALTHY, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
@pytest.mark.parametrize("try_it", [try_bfloat16, try_float8])
def test_a_healthy_layout_rounds_where_one_process_rounds(pool, tmp_path, try_it, name):
    row = {**HEALTHY, **SLOW}[name]
    trial = try_it(reduce_config(compare.complete(row.overrides, row.world_size), row.world_size), pool.run, tmp_path)
    if try_it is try_bfloat16 and FLOAT32.items() <= row.overrides.items():
        assert trial.skipped == "the run computes in float32"
        return
    assert trial.faults == {} and not trial.skipped
    assert [measure.what for measure in trial.measures] == MEASURES


def test_a_run_without_bfloat16_or_float8_skips_them(tmp_path):
    reduction = reduce_config(compare.complete(FLOAT32, 1), 1)
    trials = [try_it(reduction, None, tmp_path) for try_it in (try_bfloat16, try_float8)]
    assert [bool(trial.skipped) for trial in trials] == [True, True]
    assert not any(trial.is_missing or trial.faults for trial in trials)


def test_an_attention_without_a_reference_under_cp_is_missing_and_named(tmp_path):
    reduction = reduce_config(compare.complete({CP: 2}, 2), 2)
    reduction = replace(reduction, config=override(reduction.config, {"model.attention": "window"}))
    trial = try_bfloat16(reduction, None, tmp_path)
    assert trial.is_missing and trial.skipped.startswith("model.attention = window under cp has no reference")


def test_every_layer_of_a_run_that_computes_in_float8_does_so_in_its_trial():
    sizes = {"dim": 48, "n_heads": 3, "n_kv_heads": 1, "head_dim": 16}
    config = compare.complete({**GATHER, **{f"model.{name}": size for name, size in sizes.items()}}, 1)
    reduction = reduce_config(config, 1)
    assert (reduction.args.dim, reduction.shape.ffn_dim % 16) != (48, 0)  # the wide trial could not
    keys = choose_float8_sizes(reduction)
    process = RoundedProcess(*resolve(override(reduction.config, {"model.converters": ["float8"], **keys}), 1))
    linears = {name for name, module in process.model.named_modules() if type(module) is nn.Linear}
    assert process.in_float8 == linears and len(linears) == 28


# ---------------------------------------------------------------- the reference


def resolve(config, world_size):
    layout = plan_layout(config, compare.resolve_model(config.model), world_size)
    return resolve_config(config, layout, "cpu"), layout


@pytest.mark.parametrize("degrees", [{}, {TP: 2}, {CP: 2}, {CP: 2, TP: 2, **RING}, {CP: 2, **DOCUMENTS}], ids=str)
def test_in_float32_the_reference_is_the_plain_model(degrees):
    config, layout = resolve(compare.complete({**degrees, **FLOAT32, **CHUNKS}, 4), 4)
    batch = compare.make_batch(0, config.model.vocab_size, documents=config.model.attention == "document")
    process = RoundedProcess(config, layout)
    rounded = process.compute_gradients(batch)

    model = Llama3(compare.resolve_model(config.model), attention=config.model.attention)
    model.load_state_dict(rounded.initial)
    logits = model(batch.tokens, positions=batch.positions, doc_ids=batch.doc_ids)
    loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    loss.backward()
    assert math.isclose(rounded.loss, loss.item(), rel_tol=1e-6)
    errors = {
        fqn: compare.relative_error(rounded.gradients[fqn], weight.grad) for fqn, weight in model.named_parameters()
    }
    assert len(errors) == 39 and max(errors.values()) < 1e-6


def test_in_bfloat16_the_reference_rounds_to_bfloat16_and_sums_contributions_in_float32():
    config, layout = resolve(compare.complete({"training.mixed_precision_param": "bfloat16"}, 1), 1)
    batch = compare.make_batch(0, config.model.vocab_size)
    alone = RoundedProcess(config, layout).compute_gradients(batch)
    assert {find_short_share(gradient) for gradient in alone.gradients.values()} == {1.0}
    two = RoundedProcess(config, replace(layout, dp_shard=2)).compute_gradients(batch)
    assert max(find_short_share(gradient) for gradient in two.gradients.values()) < 0.9
    exact, _ = resolve(compare.complete(FLOAT32, 1), 1)
    plain = RoundedProcess(exact, layout).compute_gradients(batch)
    errors = [compare.relative_error(alone.gradients[fqn], plain.gradients[fqn]) for fqn in plain.gradients]
    assert 1e-3 < max(errors) < 0.05


def test_shares_are_added_down_the_ring_and_rounded_each_time():
    shares = [torch.tensor(numbers).bfloat16() for numbers in ([256.0, 256.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 256.0])]
    # (rank 2 + rank 1) + rank 0, (rank 0 + rank 2) + rank 1, (rank 1 + rank 0) + rank 2; in bfloat16 256 + 1 is 256.
    assert sum_shares(shares, 0).tolist() == [258.0, 256.0, 258.0]
    assert sum_shares([share.float() for share in shares], 0).tolist() == [258.0, 258.0, 258.0]
    x = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    torch.autograd.backward(share_out(x, 3, 0), shares)
    assert x.grad.tolist() == [258.0, 256.0, 258.0]


@pytest.mark.parametrize("chunk_tokens", [5, 100])
@pytest.mark.parametrize("by_share", [False, True])
def test_the_loss_by_shares_of_the_vocabulary_is_the_cross_entropy(chunk_tokens, by_share):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator).requires_grad_() for shape in ((23, 16), (32, 16)))
    targets = torch.randint(32, (23,), generator=generator).index_fill(0, torch.tensor([3, 9]), IGNORE_INDEX)
    plain = F.cross_entropy(hidden @ weight.t(), targets, reduction="sum") / 7
    expected = torch.autograd.grad(plain, (hidden, weight))
    loss = RoundedLoss.apply(targets, chunk_tokens, by_share, *share_out(hidden, 2, 0), *weight.chunk(2)) / 7
    assert torch.isclose(loss, plain, rtol=1e-6)
    for own, other in zip(torch.autograd.grad(loss, (hidden, weight)), expected, strict=True):
        assert compare.relative_error(own, other) < 1e-6


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("kind", ["allgather", "ring", "documents"])
def test_attention_part_by_part_is_attention(kind, n_ranks):
    generator = torch.Generator().manual_seed(0)
    seq_len = 8 * n_ranks
    whole = [torch.randn(2, heads, seq_len, 8, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    doc_ids = (torch.rand(2, seq_len, generator=generator) < (0.2 if kind == "documents" else 0)).long().cumsum(1)
    mask = (torch.ones(seq_len, seq_len).tril().bool() & (doc_ids[:, :, None] == doc_ids[:, None]))[:, None]
    expected = F.scaled_dot_product_attention(*whole, attn_mask=mask, enable_gqa=True)
    pieces = torch.arange(seq_len).chunk(2 * n_ranks)
    places = [torch.cat((pieces[rank], pieces[-1 - rank])) for rank in range(n_ranks)]
    rows = [torch.cat([x[:, :, at] for at in places]) for x in whole]
    attend = RoundedDocumentContext(n_ranks) if kind == "documents" else RoundedContext(n_ranks, kind)
    out = attend(*rows, doc_ids)
    wanted = torch.cat([expected[:, :, at] for at in places])
    assert compare.relative_error(out, wanted) < 1e-6
    weights = torch.randn(wanted.shape, generator=generator)
    for own, other in zip(
        torch.autograd.grad((out * weights).sum(), whole),
        torch.autograd.grad((wanted * weights).sum(), whole),
        strict=True,
    ):
        assert compare.relative_error(own, other) < 1e-6


# ---------------------------------------------------------------- measures


def test_a_rank_finds_its_piece_of_all_cp_rows_and_tp_tokens():
    whole = torch.arange(4 * 6).view(4, 6, 1)  # 2 cp ranks of 2 rows, 2 tp ranks of 3 tokens
    assert cut(whole, torch.empty(2, 3, 1), [1, 0]).flatten().tolist() == [12, 13, 14, 18, 19, 20]
    assert cut(whole, torch.empty(4, 3, 1), [1]).flatten().tolist() == [3, 4, 5, 9, 10, 11, 15, 16, 17, 21, 22, 23]
    assert torch.equal(cut(whole, torch.empty(4, 6, 1), [1]), whole)


def test_a_sum_of_two_bfloat16_numbers_is_seldom_one():
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(10_000, generator=generator).bfloat16().float() for _ in range(2))
    assert find_short_share(one) == 1.0
    assert find_short_share(one + other) < 0.5
    assert find_short_share((one + other).bfloat16().float()) == 1.0
    assert find_short_share(torch.zeros(3)) == 0.0


def test_one_number_that_rounds_the_other_way_is_beyond_the_bound_of_a_tensor_of_a_hundred_thousand():
    gradient = torch.ones(100_000)
    changed = gradient.clone()
    changed[0] += 2**-7  # one step of bfloat16
    assert compare.relative_error(changed, gradient) > ORDER_OF_SUMS


def test_positions_of_the_trial_are_those_of_a_long_sequence():
    config = compare.complete({**DOCUMENTS}, 1)
    batch = make_late_batch(config, 0, 8192)
    assert batch.positions.max() < 8192 and batch.positions.min() >= 8192 - config.training.seq_len
    assert (batch.positions.bfloat16().long() != batch.positions).float().mean() > 0.8
