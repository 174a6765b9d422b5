"""The trials "deep", "long" and "real width": their shapes, which healthy layouts pass, and what wide cannot see."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import compare
import pytest
import torch
import torch.nn.functional as F
from layouts import LAYOUTS, MODE, PP, SCHEDULE, TP, ZERO, Row
from mutant_table import CP, DOCUMENTS, RING
from mutants import MUTANTS
from mutants_of_sizes import LONG
from torch import nn

from torchtitan_lite import step
from torchtitan_lite.config.flavors import FLAVORS, count_parameters
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.config.schema import Config
from torchtitan_lite.model.llama3 import Llama3, init_parameter
from torchtitan_lite.verify.command import TRIALS
from torchtitan_lite.verify.difference import Slice, join_slices
from torchtitan_lite.verify.reduction import Reduction, override, reduce_config
from torchtitan_lite.verify.reference import BLOCK, make_batch, repeat_block, run_one_process
from torchtitan_lite.verify.small_runs import (
    MOST_PARAMETERS,
    deepen,
    fit_shape,
    keep_width,
    lengthen,
    measure_available_memory,
)

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIGS = sorted(path.stem for path in (REPOSITORY / "configs").glob("*.toml"))
GIB = 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where oracles are kept from test to test."""
    return tmp_path_factory.mktemp("oracles")


def read(*args: str) -> Config:
    reading = read_config(list(args))
    assert reading.problems == []
    return reading.config


def reduce_row(row: Row) -> Reduction:
    return reduce_config(compare.complete(row.overrides, row.world_size), row.world_size)


# ---------------------------------------------------------------- shapes

OTHERS = {  # what no shipped config asks for
    "interleaved": (
        *("--config", "llama3_8b", f"--{PP}=4", f"--{SCHEDULE}=Interleaved1F1B"),
        *("--training.local_batch_size=8", "--parallelism.pipeline_parallel_layers_per_stage=3"),
    ),
    "V": (
        *("--config", "llama3_8b", f"--{PP}=2", f"--{SCHEDULE}=ZBVZeroBubble"),
        *("--training.local_batch_size=4", "--activation_checkpoint.mode=full"),
    ),
    "cp": ("--config", "llama3_8b", f"--{CP}=8", "--training.seq_len=8192"),
    "documents": ("--config", "debug", "--model.attention=document", "--training.seq_len=1024"),
}
ASKED = {name: ("--config", name) for name in CONFIGS} | OTHERS


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("ranks", [1, 2, 8, 16])
def test_each_run_keeps_the_layout_and_has_the_depth_the_length_and_the_width(name, ranks):
    config = read(*ASKED[name])
    reduction, real = reduce_config(config, ranks), resolve_model(config.model)
    deep, long, wide = deepen(reduction), lengthen(reduction), keep_width(reduction, 8 * GIB)
    for run in (deep, long, wide):
        shape = resolve_model(run.config.model)
        assert run.layout.degrees == reduction.layout.degrees
        assert run.config.training.seq_len not in (shape.dim, shape.ffn_dim, shape.vocab_size, shape.head_dim)
        assert {change.key for change in run.changes} >= {"optimizer.name", "model.n_layers"}
        kept = ("zero_stage", "context_parallel_rotate_method", "disable_loss_parallel")
        assert all(getattr(run.config.parallelism, key) == getattr(config.parallelism, key) for key in kept)
        assert run.config.activation_checkpoint == reduction.config.activation_checkpoint
        assert run.config.compile.enable == (config.compile.enable and run is deep)

    assert deep.config.model.n_layers >= 12 and resolve_model(deep.config.model).dim == 16
    assert any({"layers.9", "layers.10"} <= set(stage) for stage in deep.layout.stages)
    lengths = {sum(name.startswith("layers.") for name in stage) for stage in deep.layout.stages}
    assert len(lengths) > 1 or len(deep.layout.stages) == deep.layout.pp
    assert len(deep.layout.stages) == len(long.layout.stages) == len(reduction.layout.stages)

    assert long.config.training.seq_len >= max(512, min(config.training.seq_len, 2048))
    assert long.config.model.n_layers <= max(2, len(long.layout.stages) - 2)
    chunks = -(-long.config.training.seq_len // long.layout.cp // long.config.training.loss_chunk_tokens)
    assert chunks >= 11

    shape = resolve_model(wide.config.model)
    assert (shape.n_heads, shape.n_kv_heads, shape.head_dim) == (real.n_heads, real.n_kv_heads, real.head_dim)
    assert shape.n_layers == max(1, wide.layout.pp - 2)
    assert count_parameters(shape) <= MOST_PARAMETERS
    tensors = (shape.dim * shape.n_heads * shape.head_dim, shape.dim * shape.ffn_dim, shape.dim * shape.vocab_size)
    if real.dim >= 2048:
        assert max(tensors) >= 4e6 and shape.dim >= 512
    else:
        assert (shape.dim, shape.ffn_dim, shape.vocab_size) == (real.dim, real.ffn_dim, real.vocab_size)


def test_a_run_says_what_of_it_is_real():
    reduction = reduce_config(read("--config", "llama3_8b"), 8)
    assert deepen(reduction).subject == "12 layers of dim 16"
    assert lengthen(reduction).subject.startswith("2,048 of 8,192 tokens, at positions below 10,240")
    said = keep_width(reduction, 8 * GIB).subject
    assert "dim 2,048 of 4,096" in said and "vocabulary 2,004 of 128,256" in said
    small = keep_width(reduce_config(read("--config", "debug"), 8), 8 * GIB).subject
    assert "dim 128 real, ffn_dim 352 real, vocabulary 2,304 real" in small
    three_d = reduce_config(read("--config", "debug_3d"), 8)
    assert deepen(three_d).subject == "12 layers of dim 16, 6, 6 a stage"
    assert lengthen(three_d).subject.startswith("512 tokens")
    assert keep_width(three_d, 8 * GIB).subject.endswith("1F1B, one stage a rank")


def test_a_run_that_accumulates_does_so_three_times_in_wide():
    config = read("--config", "debug", "--training.local_batch_size=1", "--training.global_batch_size=8")
    assert reduce_config(config, 2).layout.n_microbatches == 3


def test_little_memory_halves_vocabulary_first_then_ffn_dim_then_dim():
    shape = FLAVORS["8B"]
    assert fit_shape(FLAVORS["debug"], 1, 2**28) == FLAVORS["debug"]
    one_layer = resolve_model(override(read("--config", "llama3_8b"), {"model.n_layers": 1}).model)
    sizes = [fit_shape(one_layer, 1, memory * GIB // 256) for memory in (400, 96, 64, 1)]
    assert [size.vocab_size for size in sizes] == [shape.vocab_size, 16032, 4008, 2004]
    assert [size.ffn_dim for size in sizes] == [shape.ffn_dim, shape.ffn_dim, shape.ffn_dim, 1792]
    assert [size.dim for size in sizes] == [4096, 4096, 4096, 512]


def test_the_full_width_is_what_memory_allows():
    reduction = reduce_config(read("--config", "llama3_8b"), 2)
    usual, full = (keep_width(replace(reduction, full_width=on), 64 * GIB).subject for on in (False, True))
    assert "dim 2,048 of 4,096" in usual
    assert "dim 4,096 real, ffn_dim 14,336 real, vocabulary 128,256 real" in full


def test_available_memory_is_what_linux_says(tmp_path):
    file = tmp_path / "meminfo"
    file.write_text("MemTotal: 2048 kB\nMemAvailable:    1024 kB\n")
    assert measure_available_memory(file) == 2**20
    assert measure_available_memory(tmp_path / "none") > 2**20


# ---------------------------------------------------------------- what they are made of


def test_the_long_batch_has_far_positions_where_targets_count_and_hundreds_of_documents():
    options = {"n_rows": 2, "seq_len": 2048, "vocab_size": 100, "farthest_position": 8192, "tokens_per_document": 4}
    plain = make_batch(0, documents=False, **options)
    assert plain.positions[:, 0].tolist() == [8192, 4096] and plain.positions[0, -1] == 8192 + 2047
    assert (plain.targets[0] != -100).all() and 100 < (plain.targets[1] != -100).sum() < 400
    packed = make_batch(0, documents=True, **options)
    assert packed.doc_ids.max() > 400
    begins = packed.doc_ids.diff(dim=1) == 1
    assert (packed.positions[0, 1:][begins[0]] == 8192).all()
    single = make_batch(0, documents=False, **{**options, "n_rows": 1})
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


def test_slices_are_joined_to_the_wholes_that_they_belong_to():
    here, there = (("tp", 0),), (("tp", 1),)  # a tensor that is copied over tp, and split over dp_shard
    ranks = [Slice(here, 1.0, 50.0, 50.0), Slice(here, 3.0, 50.0, 50.0), Slice(there, 0.0, 50.0, 50.0)]
    ranks.append(Slice(there, 100.0, 50.0, 0.0))
    joined = [of_rank["w"] for of_rank in join_slices([{"w": piece} for piece in ranks])]
    assert joined == [(0.2, 1.0), (0.2, 1.0), (1.0, 0.5), (1.0, 0.5)]
    assert join_slices([{"w": Slice(here, 1e-30, 0.0, 0.0)}])[0]["w"][0] == float("inf")
    assert join_slices([{"w": Slice(here, float("nan"), 1.0, 0.0)}])[0]["w"][0] == float("inf")


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

HEALTHY = {
    "one rank": Row(1, LONG),
    "dp2 accumulation 2": LAYOUTS["dp2 accumulation 2"],
    "tp2 tied": LAYOUTS["tp2 tied"],
    "pp2 ZBVZeroBubble": LAYOUTS["pp2 ZBVZeroBubble"],
    "cp4 ring": LAYOUTS["cp4 ring"],
    "hsdp2x2": LAYOUTS["hsdp2x2"],
    "dp2 x cp2 documents": Row(4, {CP: 2, **DOCUMENTS, **LONG}),
    "pp2 x cp2 ring Interleaved1F1B": Row(
        4, {PP: 2, CP: 2, **RING, SCHEDULE: "Interleaved1F1B", "training.seq_len": 512}
    ),
    "pp2 x dp2 x tp2 ZeRO-3": Row(8, {PP: 2, TP: 2, ZERO: 3, MODE: "full", "model.vocab_size": 2**16}),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_layout_passes_all_of_them(pool, folder, name):
    reduction = reduce_row(HEALTHY[name])
    for trial_name in ("wide", "deep", "long", "real width"):
        trial = TRIALS[trial_name](reduction, pool.run, folder)
        assert trial.faults == {} and trial.culprit is None, (trial_name, trial.faults)
        assert 0 < max(trial.difference.gradient.values()) < 2e-6
        assert trial.subject or trial_name == "wide"


BEYOND_WIDE = [name for name, mutant in MUTANTS.items() if mutant.trial in ("deep", "long", "real width")]


@pytest.mark.parametrize("name", BEYOND_WIDE)
def test_what_another_trial_sees_the_wide_one_does_not(pool, folder, name):
    """Otherwise the mutant says nothing about its trial."""

    def run_ranks(worker, world_size, *args, **options):
        return pool.run(compare.run_mutant, world_size, name, worker, *args, **options)

    assert TRIALS["wide"](reduce_row(MUTANTS[name].row), run_ranks, folder).faults == {}


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


WITH_WINDOW = partial(patch.dict, step.MODELS, {"llama3": (SlidingWindowLlama, init_parameter)})


def run_with_window(rank: int, world_size: int, worker, *args, **options):
    """Worker: another one, with the fork's model."""
    with WITH_WINDOW():
        return worker(rank, world_size, *args, **options)


@pytest.mark.parametrize(("degree", "is_right"), [(TP, True), (CP, False)])
def test_attention_that_cp_replaces_by_another_one_is_seen_in_long_sequences(pool, tmp_path, degree, is_right):
    """A fork gives each block an attention with a window; context parallel puts full causal attention in its place."""

    def run_ranks(worker, world_size, *args, **options):
        return pool.run(run_with_window, world_size, worker, *args, **options)

    reduction = reduce_row(Row(2, {degree: 2, **LONG}))
    with WITH_WINDOW():
        assert TRIALS["wide"](reduction, run_ranks, tmp_path).faults == {}
        trial = TRIALS["long"](reduction, run_ranks, tmp_path)
    assert (trial.culprit is None) == (trial.faults == {}) == is_right
    if not is_right:
        assert (trial.culprit.kind, trial.culprit.name) == ("module output", "layers.0.attention.inner")
