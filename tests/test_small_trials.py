"""The trials "deep", "long" and "real width": which healthy layouts pass, and what the wide trial cannot see."""

from functools import partial
from unittest.mock import patch

import compare
import pytest
import torch
import torch.nn.functional as F
from layouts import CP, DOCUMENTS, LAYOUTS, MODE, PP, RING, SCHEDULE, TP, ZERO, Row
from mutants import MUTANTS, try_mutant
from mutants_of_sizes import LONG
from torch import nn

from torchtitan_lite.config.flavors import FLAVORS
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.model.llama3 import Llama3, init_parameter
from torchtitan_lite.tools.verify.command import TRIALS
from torchtitan_lite.tools.verify.reference import BLOCK, make_batch, repeat_block, run_one_process
from torchtitan_lite.tools.verify.small_runs import WIDE, Method

# ---------------------------------------------------------------- what they are made of


def draw_batch(n_rows: int, seq_len: int, attention: str, method: Method = WIDE) -> Batch:
    keys = {"training.global_batch_size": n_rows, "training.seq_len": seq_len, "model.attention": attention}
    return make_batch(compare.override(compare.TABLE_CONFIG, keys), 0, method)


def test_the_batch_masks_unequally_and_documents_restart_positions():
    batch = draw_batch(8, 40, "document")
    counted = (batch.targets != -100).sum(1)
    assert counted[0] == 40 and counted[1] == 0 and len(set(counted.tolist())) > 5
    begins = batch.doc_ids.diff(dim=1) == 1
    assert begins.sum() > 10
    assert (batch.positions[:, 1:][begins] == 0).all()
    assert (batch.positions.diff(dim=1)[~begins] == 1).all()


def test_the_long_batch_has_far_positions_where_targets_count_and_hundreds_of_documents():
    method = Method(farthest_position=8192, tokens_per_document=4)
    plain = draw_batch(2, 2048, "causal", method)
    assert plain.positions[:, 0].tolist() == [8192, 4096] and plain.positions[0, -1] == 8192 + 2047
    assert (plain.targets[0] != -100).all() and 100 < (plain.targets[1] != -100).sum() < 400
    packed = draw_batch(2, 2048, "document", method)
    assert packed.doc_ids.max() > 400
    begins = packed.doc_ids.diff(dim=1) == 1
    assert (packed.positions[0, 1:][begins[0]] == 8192).all()
    single = draw_batch(1, 2048, "causal", method)
    assert (single.targets[0, :200] != -100).sum() > 180 and (single.targets[0, -200:] != -100).sum() < 50


def test_a_repeated_block_has_the_scale_of_the_rule_and_no_two_equal_rows():
    shape, fqn = FLAVORS["8B"], "layers.0.feed_forward.w1.weight"
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    full = torch.empty(1000, 4096)
    repeat_block(init_parameter, fqn, full, shape, generators[0])
    assert abs(full.std().item() / 0.02 - 1) < 0.02 and abs(full.mean().item()) < 1e-4
    assert torch.equal(full.flatten()[:BLOCK], full.flatten()[BLOCK : 2 * BLOCK])
    assert len(set(full[:, :3].flatten().tolist())) > 2900
    small, drawn = torch.empty(10, 20), torch.empty(10, 20)
    repeat_block(init_parameter, fqn, small, shape, torch.Generator().manual_seed(2))
    init_parameter(fqn, drawn, shape, torch.Generator().manual_seed(2))
    assert torch.equal(small, drawn)


def test_the_reference_clips_the_first_step_alone_and_updates_as_torch_does():
    config = compare.complete({"optimizer.weight_decay": 0.1, "model.n_layers": 1}, 1)
    outcome = run_one_process(config)
    model = Llama3(resolve_model(config.model))
    model.load_state_dict(outcome.initial)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1)
    for number, max_norm in enumerate((config.training.max_norm, 1e9)):
        batch = compare.make_batch(number, 256)
        logits = model(batch.tokens, positions=batch.positions)
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        assert (norm > max_norm) == (number == 0) and abs(norm / outcome.grad_norms[number] - 1) < 1e-5
        optimizer.step()
    for fqn, parameter in model.named_parameters():
        assert compare.relative_error(parameter.detach(), outcome.weights[fqn]) < 1e-6


# ---------------------------------------------------------------- healthy layouts, and broken ones

SLOW = pytest.mark.slow
HEALTHY = {
    "tp2 tied": LAYOUTS["tp2 tied"],
    "dp2 x cp2 documents": Row(4, {CP: 2, **DOCUMENTS, **LONG}),
    "pp2 ZBVZeroBubble": LAYOUTS["pp2 ZBVZeroBubble"],
}
SLOW_ROWS = {
    "cp4 ring": LAYOUTS["cp4 ring"],
    "pp2 x cp2 ring Interleaved1F1B": Row(
        4, {PP: 2, CP: 2, **RING, SCHEDULE: "Interleaved1F1B", "training.seq_len": 512}
    ),
    "pp2 x dp2 x tp2 ZeRO-3": Row(8, {PP: 2, TP: 2, ZERO: 3, MODE: "full", "model.vocab_size": 2**16}),
}


@pytest.mark.parametrize("name", [*HEALTHY, *(pytest.param(name, marks=SLOW) for name in SLOW_ROWS)])
def test_a_healthy_layout_passes_all_of_them(pool, references, name):
    reduction = compare.reduce_row({**HEALTHY, **SLOW_ROWS}[name])
    for trial_name in ("deep", "long", "real width"):
        trial = TRIALS[trial_name](reduction, pool.run, references)
        assert trial.faults == {} and trial.culprit is None, (trial_name, trial.faults)
        assert 0 < max(trial.difference.gradient.values()) < 2e-6
        assert trial.subject


def test_a_schedule_file_keeps_its_number_of_microbatches(pool, references, tmp_path):
    (tmp_path / "gpipe.csv").write_text("0F0,0F1,,,0B0,0B1\n,1F0,1F1,1B0,1B1,\n")
    keys = {"schedule_csv": str(tmp_path / "gpipe.csv"), "microbatch_size": 4}
    keys = {f"parallelism.pipeline_parallel_{key}": value for key, value in keys.items()}
    reduction = compare.reduce_row(Row(2, {PP: 2, MODE: "none", **keys}))
    for trial_name in ("deep", "long"):
        assert TRIALS[trial_name](reduction, pool.run, references).faults == {}


BEYOND_WIDE = [name for name, mutant in MUTANTS.items() if mutant.trial in ("deep", "long", "real width")]


@pytest.mark.slow  # two minutes: it guards the rows of the table of mutants, not the code
@pytest.mark.parametrize("name", BEYOND_WIDE)
def test_what_another_trial_sees_the_wide_one_does_not(pool, references, name):
    """Otherwise the mutant says nothing about its trial."""
    _, trial = try_mutant(name, "wide", pool, references)
    assert trial.faults == {}


# ---------------------------------------------------------------- a fork with an attention of its own


class SlidingWindowAttention(nn.Module):
    """Every token sees the 512 tokens up to itself."""

    def forward(self, query, key, value, doc_ids=None):
        places = torch.arange(query.shape[2])
        distance = places[:, None] - places
        mask = (distance >= 0) & (distance < 512)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


class SlidingWindowLlama(Llama3):
    def __init__(self, shape, **options):
        super().__init__(shape, **options)
        for block in self.layers.values():
            block.attention.inner = SlidingWindowAttention()


WITH_WINDOW = partial(patch.dict, "torchtitan_lite.build.MODELS", {"llama3": (SlidingWindowLlama, init_parameter)})


@pytest.mark.parametrize(("degree", "is_right"), [(TP, True), (CP, False)])
def test_attention_that_cp_replaces_by_another_one_is_seen_in_long_sequences(pool, tmp_path, degree, is_right):
    """A fork gives each block an attention with a window; context parallel puts full causal attention in its place."""
    reduction = compare.reduce_row(Row(2, {degree: 2, **LONG}))
    with WITH_WINDOW():
        trial = TRIALS["long"](reduction, compare.ranks_inside(pool, WITH_WINDOW), tmp_path)
    assert (trial.culprit is None) == (trial.faults == {}) == is_right
    if not is_right:
        assert (trial.culprit.kind, trial.culprit.name) == ("module output", "layers.0.attention.inner")
