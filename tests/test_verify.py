"""`verify`: it catches and names every mutant, accuses no healthy layout, and says what it did not look at."""

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import compare
import pytest
import torch
import torch.nn.functional as F
from layouts import LAYOUTS
from mutants import MUTANTS

from torchtitan_lite import step
from torchtitan_lite.config.command_lines import make_verify_parser
from torchtitan_lite.config.layout import plan_layout, resolve_model
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.config.schema import Config, ConfigError
from torchtitan_lite.model.llama3 import FeedForward, Llama3, init_parameter
from torchtitan_lite.verify import command as tool
from torchtitan_lite.verify.bisection import FEATURES, bisect, find_smallest, list_features, turn_off
from torchtitan_lite.verify.certificate import (
    EXIT_STATUS,
    Certificate,
    Trial,
    describe,
    describe_verdict,
    record_for_runs,
    report_for_programs,
)
from torchtitan_lite.verify.command import TRIALS
from torchtitan_lite.verify.culprit import name_first_output
from torchtitan_lite.verify.difference import find_disagreement
from torchtitan_lite.verify.gradient_trial import FP32_TOLERANCE, load_reference, save_reference, try_layout
from torchtitan_lite.verify.matrix import COLUMNS, ROWS, Cell, describe_grid, plan_cell
from torchtitan_lite.verify.module_outputs import cut_piece, observe_outputs
from torchtitan_lite.verify.reduction import override, reduce_config
from torchtitan_lite.verify.reference import make_batch

REPOSITORY = Path(__file__).resolve().parent.parent
PP, TP, CP = (f"parallelism.{name}_parallel_degree" for name in ("pipeline", "tensor", "context"))
SHARD, REPLICATE = (f"parallelism.data_parallel_{name}_degree" for name in ("shard", "replicate"))
SCHEDULE, LAYERS_PER_STAGE = (f"parallelism.pipeline_parallel_{name}" for name in ("schedule", "layers_per_stage"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where oracles are kept from test to test."""
    return tmp_path_factory.mktemp("oracles")


# ---------------------------------------------------------------- mutants and healthy layouts


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught_and_rightly_named(pool, folder, name):
    mutant = MUTANTS[name]

    def run_ranks(worker, world_size, *args, **options):
        return pool.run(compare.run_mutant, world_size, name, worker, *args, **options)

    config = compare.complete(mutant.row.overrides, mutant.row.world_size)
    with mutant.patch():  # one of them lets a refused config through
        reduction = reduce_config(config, mutant.row.world_size)
    trial = TRIALS[mutant.trial](reduction, run_ranks, folder)
    assert mutant.noticed_by in trial.faults
    assert (trial.culprit.kind, trial.culprit.name) == mutant.culprit
    assert tuple(trial.culprit.mesh_dims) == mutant.mesh_dims
    assert trial.culprit.cause.startswith(mutant.cause)


WATCHED = [
    "accumulation 2",
    "ddp2 accumulation 2",
    "tp2 whole logits",
    "pp2 DualPipeV",
    "pp2 Interleaved1F1B, embedding and head alone",
    "pp2 x dp2 x tp2 Interleaved1F1B",
    "dp2 x tp2 full recompute",
]
CONTEXT_PARALLEL = {"cp2": (2, {CP: 2}), "cp2 x tp2": (4, {CP: 2, TP: 2}), "pp2 x cp2": (4, {PP: 2, CP: 2})}
HEALTHY = {name: (LAYOUTS[name].world_size, LAYOUTS[name].overrides) for name in WATCHED} | CONTEXT_PARALLEL


@pytest.mark.parametrize("name", HEALTHY)
def test_no_module_of_a_healthy_layout_is_accused_and_every_one_is_looked_at(pool, folder, name):
    world_size, overrides = HEALTHY[name]
    config = compare.complete(overrides, world_size)
    path = save_reference(config, folder)
    shares = pool.run(observe_outputs, world_size, config, path)
    oracle = load_reference(path)
    assert name_first_output(shares, oracle, FP32_TOLERANCE / 5) is None
    assert {module for share in shares for module in share.error} == set(oracle.outputs)


def test_a_piece_is_cut_as_cp_tp_and_data_parallel_split_it():
    config = compare.complete({CP: 2, TP: 2}, 8)
    layout = plan_layout(config, resolve_model(config.model), 8)
    whole = torch.arange(8 * 32).view(8, 32, 1)[4:]  # rows, sequence, width
    at = {"pp": 0, "dp_replicate": 0, "dp_shard": 1, "cp": 1, "tp": 1}
    piece = cut_piece(whole, torch.empty(4, 8, 1), at, layout, config)
    assert piece[0].flatten().tolist() == [4 * 32 + place for place in range(16, 24)]  # second half of 8..15, 16..23
    early = cut_piece(whole, torch.empty(4, 8, 1), {**at, "tp": 0}, layout, config)
    assert early[0].flatten().tolist() == [4 * 32 + place for place in range(8, 16)]


def test_ranks_disagree_along_the_dims_on_which_neighbours_differ():
    ranks = [{"pp": p, "tp": t} for p in (0, 1) for t in (0, 1)]
    assert find_disagreement([(rank, 1.0 + rank["pp"]) for rank in ranks], 1e-5) == ["pp"]
    assert find_disagreement([(rank, 3.0) for rank in ranks], 1e-5) == []
    assert find_disagreement([(rank, float(n)) for n, rank in enumerate(ranks)], 1e-5) == ["pp", "tp"]


def test_the_batch_masks_unequally_and_documents_restart_positions():
    batch = make_batch(0, n_rows=8, seq_len=40, vocab_size=100, documents=True)
    counted = (batch.targets != -100).sum(1)
    assert counted[0] == 40 and counted[1] == 0 and len(set(counted.tolist())) > 5
    begins = batch.doc_ids.diff(dim=1) == 1
    assert begins.sum() > 10
    assert (batch.positions[:, 1:][begins] == 0).all()
    assert (batch.positions.diff(dim=1)[~begins] == 1).all()


# ---------------------------------------------------------------- a fork's model


class CubedFeedForward(FeedForward):
    def forward(self, x):
        return self.w2(F.relu(self.w1(x)) ** 2 * self.w3(x))


class Fork(Llama3):
    """A changed model: another activation, and norms that are not the usual ones."""

    def __init__(self, shape, **options):
        super().__init__(shape, **options)
        for block in self.layers.values():
            block.feed_forward = CubedFeedForward(shape)


def init_fork(fqn, full, shape, generator):
    if full.dim() == 1:
        full.uniform_(0.5, 1.5, generator=generator)
    else:
        init_parameter(fqn, full, shape, generator)


WITH_FORK = partial(patch.dict, step.MODELS, {"fork": (Fork, init_fork)})


def run_fork(rank: int, world_size: int, mutant: str | None, worker, *args, **options):
    """Worker: another one, with the fork's model known, and perhaps broken."""
    with WITH_FORK(), MUTANTS[mutant].patch() if mutant else nullcontext():
        return worker(rank, world_size, *args, **options)


@pytest.mark.parametrize(
    ("mutant", "culprit"),
    [(None, None), ("causal_mask_lost_on_one_rank", "layers.0.attention.inner")],
)
def test_a_forks_model_is_verified_unchanged(pool, folder, mutant, culprit):
    config = compare.complete({"model.name": "fork", TP: 2}, 2)

    def run_ranks(worker, world_size, *args, **options):
        return pool.run(run_fork, world_size, mutant, worker, *args, **options)

    with WITH_FORK():
        trial = try_layout(config, 2, run_ranks, folder)
    assert (trial.culprit and trial.culprit.name) == culprit
    usual = load_reference(save_reference(compare.complete({TP: 2}, 2), folder))
    with WITH_FORK():
        forked = load_reference(save_reference(config, folder))
    assert abs(forked.losses[0] - usual.losses[0]) > 1e-3  # the oracle runs the fork's code


# ---------------------------------------------------------------- reduction


def read(*args: str) -> Config:
    reading = read_config(list(args))
    assert reading.problems == []
    return reading.config


@pytest.mark.parametrize("name", sorted(path.stem for path in (REPOSITORY / "configs").glob("*.toml")))
@pytest.mark.parametrize("ranks", [1, 2, 8, 16])
def test_every_shipped_config_reduces_to_a_sound_small_one(name, ranks):
    config = read("--config", name)
    reduction = reduce_config(config, ranks)
    small, real = reduction.shape, resolve_model(config.model)
    assert reduction.layout.world_size <= ranks
    assert small.n_heads // small.n_kv_heads == real.n_heads // real.n_kv_heads
    assert (small.dim == small.n_heads * small.head_dim) == (real.dim == real.n_heads * real.head_dim)
    assert small.rope_scaling == real.rope_scaling and small.tie_embeddings == real.tie_embeddings
    assert small.dim <= 512 and small.n_layers <= 8
    listed = {change.key for change in reduction.changes}
    assert {"optimizer.name", "training.seq_len"} <= listed
    assert "model.n_layers" in listed or small.n_layers == real.n_layers


EVEN = ("--model.n_layers=30", f"--{PP}=4")  # embedding and head weigh a layer each: 32 on 4 stages
ENDS_ALONE = (*EVEN, f"--{SCHEDULE}=Interleaved1F1B", f"--{LAYERS_PER_STAGE}=1")


@pytest.mark.parametrize(
    ("args", "n_stages", "layers_of_stages"),
    [
        (EVEN, 2, [2, 2]),
        ((*EVEN, "--model.n_layers=31"), 2, [2, 1]),
        ((*EVEN, f"--{SCHEDULE}=Interleaved1F1B", f"--{LAYERS_PER_STAGE}=4"), 4, [1, 2, 2, 1]),
        ((*EVEN, f"--{SCHEDULE}=ZBVZeroBubble", "--activation_checkpoint.mode=full"), 4, [1, 2, 2, 1]),
        (ENDS_ALONE, 4, [0, 1, 1, 0]),
        (("--model.n_layers=3", f"--{PP}=4"), 2, [1, 0]),
        (("--model.n_layers=2", f"--{PP}=4"), 2, [0, 1]),  # both ends alone would be no model
    ],
)
def test_stages_stay_as_many_per_rank_and_as_even(args, n_stages, layers_of_stages):
    config = read("--config", "llama3_8b", "--training.local_batch_size=16", *args)
    layout = reduce_config(config, 2).layout
    layers = [sum(name.startswith("layers.") for name in stage) for stage in layout.stages]
    assert len(layout.stages) == n_stages
    assert layers == layers_of_stages


def test_explicit_stages_keep_which_of_them_is_short():
    stages = [
        ["tok_embeddings", "layers.0"],
        ["layers.1", "layers.2", "layers.3"],
        ["layers.4", "layers.5"],
        ["layers.6", "norm", "output"],
    ]
    args = ("--config", "debug", f"--{PP}=4", f"--{SHARD}=1", "--training.local_batch_size=8")
    config = override(read(*args), {"model.n_layers": 7})
    config = override(config, {"parallelism.module_fqns_per_model_part": stages})
    full = reduce_config(config, 4).layout
    assert [sum(name.startswith("layers.") for name in stage) for stage in full.stages] == [1, 2, 2, 1]
    half = reduce_config(config, 2)
    assert [len(stage) for stage in half.layout.stages] == [2, 3]
    alone, _ = turn_off(half.config, half.layout, frozenset({"pp"}))
    assert alone.parallelism.module_fqns_per_model_part == []


@pytest.mark.parametrize(
    ("n_real", "schedule", "n_small"),
    [(4, "1F1B", 2), (16, "1F1B", 4), (7, "1F1B", 3), (2, "GPipe", 1), (8, "Interleaved1F1B", 4), (12, "DualPipeV", 5)],
)
def test_microbatches_keep_their_relation_to_the_stages(n_real, schedule, n_small):
    config = read(
        *("--config", "llama3_8b", f"--training.local_batch_size={n_real}", "--activation_checkpoint.mode=full"),
        *(f"--{PP}=4", f"--{SCHEDULE}={schedule}"),
    )
    assert reduce_config(config, 2).layout.n_microbatches == n_small


def test_a_size_that_does_not_divide_over_all_shards_stays_so():
    config = read("--config", "debug", f"--{SHARD}=4", f"--{TP}=2", "--model.vocab_size=2306")  # 2306 = 2 * 1153
    assert reduce_config(config, 4).shape.vocab_size % 4 == 2
    even = reduce_config(override(config, {"model.vocab_size": 2304}), 4)
    assert even.shape.vocab_size % 4 == 0


def test_accumulation_and_documents_and_recompute_are_kept():
    config = read(
        *("--config", "debug", f"--{SHARD}=2", "--training.local_batch_size=4", "--training.global_batch_size=32"),
        *("--model.attention=document", "--activation_checkpoint.selective_ac_option=4"),
    )
    reduction = reduce_config(config, 8)
    assert reduction.layout.n_microbatches == 3
    assert reduction.config.model.attention == "document"
    assert reduction.config.activation_checkpoint.selective_ac_option == "2"


def test_a_real_config_that_could_not_start_is_refused():
    with pytest.raises(ConfigError, match="n_kv_heads"):
        reduce_config(read("--config", "debug", f"--{TP}=4"), 8)


# ---------------------------------------------------------------- bisection and matrix


THREE_D = {PP: 2, TP: 2, SHARD: 2, "model.tie_embeddings": False, SCHEDULE: "Interleaved1F1B"}


@pytest.mark.parametrize(
    ("guilty", "smallest"),
    [
        (lambda config, layout: layout.tp > 1 and layout.pp > 1, ["pp", "tp"]),
        (
            lambda config, layout: config.activation_checkpoint.mode != "none" and layout.dp > 1,
            ["dp_shard", "recompute"],
        ),
        (lambda config, layout: len(layout.stages) > 2, ["pp", "schedule"]),
        (lambda config, layout: True, []),
    ],
)
def test_bisection_finds_the_smallest_combination(guilty, smallest):
    config = compare.complete(THREE_D, 8)
    layout = plan_layout(config, resolve_model(config.model), 8)
    names = list_features(config, layout)
    assert {"pp", "dp_shard", "tp", "recompute", "schedule", "loss parallel"} == set(names)
    assert find_smallest(names, list(bisect(config, layout, guilty))) == smallest


def test_what_cannot_be_turned_off_is_told_and_kept():
    config = compare.complete(THREE_D, 8)
    layout = plan_layout(config, resolve_model(config.model), 8)
    stubborn = replace(FEATURES["tp"], off={TP: 3})  # 3 divides no number of heads here
    with patch.dict(FEATURES, {"tp": stubborn}):
        steps = list(bisect(config, layout, lambda config, layout: True))
    assert {step.fails for step in steps if "tp" in step.off} == {None}
    assert find_smallest(list_features(config, layout), steps) == ["tp"]


def test_fewer_data_parallel_ranks_leave_each_rank_its_rows():
    config = compare.complete({SHARD: 4, "training.local_batch_size": 1, "training.global_batch_size": 8}, 4)
    layout = plan_layout(config, resolve_model(config.model), 4)
    small, small_layout = turn_off(config, layout, frozenset({"dp_shard"}))
    assert (small_layout.world_size, small_layout.global_batch_size, small_layout.n_microbatches) == (1, 2, 2)
    _, without = turn_off(config, layout, frozenset({"accumulation"}))
    assert (without.world_size, without.global_batch_size, without.n_microbatches) == (4, 4, 1)


def test_the_matrix_has_thirty_layouts_that_can_run():
    config = read("--config", "debug")
    layouts = {(row, column): plan_cell(config, row, column, 8).layout for row in ROWS for column in COLUMNS}
    assert len({str(layout) + str(cell[1]) for cell, layout in layouts.items()}) == 30
    assert str(layouts["dp2 x tp2", "DualPipeV"]) == "pp2 x dp_shard2 x tp2"
    assert len(layouts["tp2", "ZBVZeroBubble"].stages) == 4


def test_the_grid_shows_errors_failures_and_refusals():
    failed = Trial("wide", [], {"loss": "off"}, None, 1.0)
    cells = [Cell(row, column, failed) for row in ROWS for column in COLUMNS]
    cells[0] = Cell("one rank", COLUMNS[0], None, why_not="it cannot be split")
    grid = describe_grid(cells)
    assert grid.count("FAILS") == 29 and "refused: it cannot be split" in grid


def test_tied_embeddings_are_refused_under_a_pipeline_only():
    config = read("--config", "llama3_1b")
    plan_cell(config, "tp2", COLUMNS[0], 8)
    with pytest.raises(ConfigError, match="tied"):
        plan_cell(config, "tp2", "1F1B", 8)


# ---------------------------------------------------------------- the door


def verify(pool, folder, args: list[str], mutant: str | None = None) -> Certificate:
    """What main does, on the tests' ranks."""
    options, config_args = make_verify_parser().parse_known_args(args)
    reduction = reduce_config(read(*config_args), options.ranks)

    def run_ranks(worker, world_size, *args, **options):
        return pool.run(compare.run_mutant, world_size, mutant, worker, *args, **options)

    return tool.verify("debug", reduction, options, run_ranks, folder)


TP2 = ["--config", "debug", "--ranks", "2", f"--{TP}=2"]


def test_a_certificate_says_what_it_is_for_and_what_it_does_not_cover(pool, folder):
    certificate = verify(pool, folder, TP2)
    assert certificate.verdict == "certified"
    said = describe(certificate, verbose=False)
    assert "certified for tp2: this layout computes the one-process model" in said
    assert "dp_shard is automatic, and no rank was left for it" in said and "--ranks 4 would try dp_shard2" in said
    assert "optimizer.name" in said and "AdamW -> SGD" in said
    assert "layers.*.attention.wq.weight" in said and "R over tp" in said
    assert "the model file, which both sides share" in said

    report = json.loads(json.dumps(report_for_programs(certificate)))
    assert report["certified"] is True and report["culprit"] is None and report["faults"] == {}
    assert report["degrees"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 2}
    assert report["asked"]["dp_shard"] == "automatic" and report["asked"]["tp"] == 2
    assert {change["key"] for change in report["reduced"]} >= {"optimizer.name", "model.dim"}
    wq = report["parameters"]["layers.1.attention.wq.weight"]
    assert wq["initial_equal"] is True and 0 < wq["gradient"] < 1e-6 and wq["copies_unequal_over"] == []
    assert "S(0) over tp" in wq["placement"]
    assert [trial["name"] for trial in report["trials"]] == list(TRIALS)

    record = record_for_runs(certificate)
    assert record["layout"] == "tp2" and record["largest_error"] < 1e-5 and "optimizer.name" in record["reduced"]


def test_a_wrong_layout_ends_with_its_first_fault_and_the_smallest_combination(pool, folder):
    certificate = verify(pool, folder, [*TP2, "--bisect"], mutant="loss_counted_by_every_tp_rank")
    assert certificate.verdict == "wrong" and [trial.name for trial in certificate.trials] == ["wide"]
    said = describe(certificate, verbose=False)
    assert "certified" not in said
    assert "wrong: this layout does not compute the one-process model (trial wide)" in said
    assert "first to differ: module output: output" in said
    assert "cause: unknown" in said
    assert "smallest combination that fails: tp" in said


WIDE = Trial("wide", [], {}, None, 1.0)
MISSING = Trial("train.py", [], {}, None, 0.0, skipped="train.py is not beside the package", is_missing=True)
NOT_ASKED = Trial("float8", [], {}, None, 0.0, skipped="the run has no float8")
WRONG = Trial("deep", [], {"loss": "loss is off by 1.0e-02"}, None, 1.0)
SILENT = Trial("deep", [], {"no answer": "ranks [1] did not answer within 300 s"}, None, 300.0, finished=False)


@pytest.mark.parametrize(
    ("max_ranks", "trials", "verdict", "status", "said"),
    [
        (4, [WIDE, NOT_ASKED], "certified", 0, "certified for pp2 x tp2: this layout"),
        (4, [WIDE, MISSING], "certified in part", 3, "certified in part for pp2 x tp2"),
        (2, [WIDE], "in part", 3, "in part: right as pp2, but tp 2 could not be tried on so few ranks."),
        (2, [WIDE, MISSING], "in part", 3, "There is no certificate of this layout; --ranks 4 would try every dim"),
        (4, [WIDE, WRONG], "wrong", 1, "loss is off by 1.0e-02"),
        (2, [WIDE, WRONG], "wrong", 1, "wrong: this layout does not compute the one-process model (trial deep)"),
        (4, [WIDE, SILENT], "not finished", 4, "not finished: in trial deep, ranks [1] did not answer within 300 s"),
    ],
)
def test_the_verdict_is_for_what_was_tried(max_ranks, trials, verdict, status, said):
    config = read("--config", "debug", f"--{PP}=2", f"--{TP}=2", f"--{SHARD}=1")
    certificate = Certificate("debug", reduce_config(config, max_ranks), trials)
    assert (certificate.verdict, EXIT_STATUS[certificate.verdict]) == (verdict, status)
    assert report_for_programs(certificate)["verdict"] == verdict
    told = "\n".join(describe_verdict(certificate))
    assert said in told
    assert ("certified" in told) == (verdict in ("certified", "certified in part"))


def test_a_reduced_degree_is_named_in_the_verdict():
    degrees = (f"--{PP}=16", f"--{CP}=8", f"--{SHARD}=1", f"--{TP}=2")
    config = read("--config", "llama3_70b", "--training.local_batch_size=16", *degrees)
    certificate = Certificate("llama3_70b", reduce_config(config, 8), [WIDE])
    verdict, *_ = describe_verdict(certificate)
    assert verdict.startswith("certified for pp2 x cp2 x tp2; pp 16 and cp 8 were reduced: ")


@pytest.mark.parametrize(
    "args",
    [
        ["--config", "debug", "--parallelism.tensor_paralel_degree=2"],
        ["--config", "debug", f"--{TP}=4"],
        ["--config", "no such file"],
    ],
)
def test_wrong_input_ends_with_2_and_says_why(args, capsys):
    assert tool.main(args) == 2
    assert "could not start" in capsys.readouterr().err
    assert tool.main([*args, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["problems"]


def test_too_many_ranks_are_refused():
    with pytest.raises(SystemExit) as exit_:
        tool.main(["--config", "debug", "--ranks", "17"])
    assert exit_.value.code == 2


def test_the_command_verifies_a_config_from_a_cold_start():
    command = [sys.executable, "-m", "torchtitan_lite", "verify", "--config", "debug", "--ranks", "2"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "certified for dp_shard2: this layout computes the one-process model" in done.stdout
    assert "kept for runs of this config" in done.stderr
