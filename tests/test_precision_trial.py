"""The bfloat16 and float8 trials accuse no healthy layout; their reference, in float32, is the plain model.

test_verify.py runs their mutants with all others.
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
    EP,
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
    SHARED,
    TP,
    TWO_LAYERS,
    WHOLE_LOGITS,
    ZERO,
    Row,
)
from torch import nn

from torchtitan_lite.config.layout import plan_layout, resolve_config
from torchtitan_lite.model.llama3 import Llama3
from torchtitan_lite.tools.verify.precision_parts import fan_out, sum_partials
from torchtitan_lite.tools.verify.precision_reference import RoundedProcess
from torchtitan_lite.tools.verify.precision_trial import (
    MEASURES,
    ORDER_OF_SUMS,
    find_short_share,
    try_bfloat16,
    try_float8,
)
from torchtitan_lite.tools.verify.reduction import override, reduce_config
from torchtitan_lite.tools.verify.small_runs import choose_float8_sizes

FLOAT32 = {"training.mixed_precision_param": "float32"}
LEFT_OUT = {"quantize.linear.float8.filter_fqns": ["output", "experts"]}
# Each mesh dim, recipe, loss, attention, schedule and ZeRO stage is in a row of the default run; `slow` has more pairs.
HEALTHY = {
    "hsdp2x2, accumulation, ZeRO-1": Row(4, {**PRECOMPUTE, REPLICATE: 2, ZERO: 1, **ACCUMULATION_4}),
    "tp2, plain loss, tied": Row(2, {**GATHER, TP: 2, **WHOLE_LOGITS, "flavor.tie_embeddings": True}),
    "tp2, whole logits": Row(2, {**ROWWISE_HP, TP: 2, **NO_LOSS_PARALLEL, **WHOLE_LOGITS}),
    "cp2 x tp2 ring": Row(4, {**ROWWISE, CP: 2, TP: 2, **RING, **TWO_LAYERS}),
    "dp2 x cp2 documents": Row(4, {**PRECOMPUTE, CP: 2, **DOCUMENTS}),
    "experts on dp2 x tp2": Row(4, {**PRECOMPUTE, **LEFT_OUT, **SHARED, TP: 2}),
    "experts on pp2 x dp2 x cp2": Row(8, {**ROWWISE, **LEFT_OUT, **SHARED, PP: 2, CP: 2, EP: 2}),
    "pp2 x dp2 ZBVZeroBubble": Row(4, {**GATHER, PP: 2, SCHEDULE: "ZBVZeroBubble", MODE: "none"}),
}
SLOW = {
    "one rank": Row(1, PRECOMPUTE),
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


# In the float8 trial all but the linear layers is in bfloat16, so it shows most of what the other one shows.
IN_BOTH = (
    "hsdp2x2, accumulation, ZeRO-1",
    "experts on pp2 x dp2 x cp2",
    "cp2 x tp2 ring",
    "pp2 x dp2 ZBVZeroBubble",
)
CASES = [(try_float8, name) for name in HEALTHY] + [(try_bfloat16, name) for name in IN_BOTH]
FURTHER = [(try_it, name) for try_it in (try_bfloat16, try_float8) for name in {**HEALTHY, **SLOW}]
FURTHER = [pytest.param(*case, marks=pytest.mark.slow) for case in FURTHER if case not in CASES]


@pytest.mark.parametrize(("try_it", "name"), [*CASES, *FURTHER])
def test_a_healthy_layout_rounds_where_one_process_rounds(pool, tmp_path, try_it, name):
    row = {**HEALTHY, **SLOW}[name]
    trial = try_it(compare.reduce_row(row), pool.run, tmp_path)
    if try_it is try_bfloat16 and FLOAT32.items() <= row.overrides.items():
        assert trial.skipped == "the run computes in float32"
        return
    assert trial.faults == {} and not trial.skipped
    assert [measure.what for measure in trial.measures] == list(MEASURES)


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
    assert (reduction.args.dim, reduction.args.ffn_dim % 16) != (48, 0)  # the wide trial could not
    keys = choose_float8_sizes(reduction)
    process = RoundedProcess(*resolve(override(reduction.config, {"model.converters": ["float8"], **keys}), 1))
    linears = {name for name, module in process.model.named_modules() if type(module) is nn.Linear}
    assert process.in_float8 == linears and len(linears) == 28


# ---------------------------------------------------------------- the reference


def resolve(config, world_size):
    layout = plan_layout(config, compare.resolve_model(config.model), world_size)
    return resolve_config(config, layout, "cpu"), layout


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {TP: 2},
        {TP: 2, **NO_LOSS_PARALLEL},
        {TP: 4, **WHOLE_LOGITS},
        {CP: 2, TP: 2, **RING},
        {CP: 4},
        {CP: 4, **RING},
        {CP: 4, **DOCUMENTS},
    ],
    ids=str,
)
def test_in_float32_the_reference_is_the_plain_model(overrides):
    config, layout = resolve(compare.complete({**CHUNKS, **FLOAT32, **overrides}, 4), 4)
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
    assert sum_partials(shares, 0).tolist() == [258.0, 256.0, 258.0]
    assert sum_partials([share.float() for share in shares], 0).tolist() == [258.0, 258.0, 258.0]
    x = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    torch.autograd.backward(fan_out(x, 3, 0), shares)
    assert x.grad.tolist() == [258.0, 256.0, 258.0]


def test_one_number_that_rounds_the_other_way_is_beyond_the_bound_of_a_tensor_of_a_hundred_thousand():
    changed = (gradient := torch.ones(100_000)).clone()
    changed[0] += 2**-7  # one step of bfloat16
    assert compare.relative_error(changed, gradient) > ORDER_OF_SUMS
