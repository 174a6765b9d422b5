"""Culprits and endings of `verify`: a fault is named where it begins, and what is not known is not called wrong."""

import json
import os
import signal
import time
from argparse import Namespace
from dataclasses import replace
from datetime import timedelta
from functools import partial
from unittest.mock import patch

import compare
import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchtitan_lite import step
from torchtitan_lite.config.flavors import count_parameters
from torchtitan_lite.config.hardware import Machine
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.memory_bound import GIB, bound_memory
from torchtitan_lite.model.llama3 import FeedForward, Llama3, init_parameter
from torchtitan_lite.parallel import parallelize, tensor_parallel
from torchtitan_lite.parallel.tensor_parallel import MissingFromPlan
from torchtitan_lite.plan.ledger_forecast import open_ledger
from torchtitan_lite.plan.schedule_order import list_rows
from torchtitan_lite.preflight import preflight
from torchtitan_lite.tools import check
from torchtitan_lite.verify import command as tool
from torchtitan_lite.verify.certificate import Trial, describe_failure
from torchtitan_lite.verify.culprit import MOST_OF_CRASH, name_crash, name_first_output
from torchtitan_lite.verify.gradient_trial import FP32_TOLERANCE, load_reference, save_reference, try_layout
from torchtitan_lite.verify.matrix import COLUMNS, ROWS, Cell, describe_grid, judge_matrix
from torchtitan_lite.verify.module_outputs import OutputShare, observe_outputs
from torchtitan_lite.verify.ranks import RankKilled, RankPool, RankTimeout, describe_stack
from torchtitan_lite.verify.reduction import override

PP, TP, CP = (f"parallelism.{name}_parallel_degree" for name in ("pipeline", "tensor", "context"))
SHARD = "parallelism.data_parallel_shard_degree"
LAPTOP = Machine("cpu", 1, 16 * GIB, "a laptop")
DOCUMENTS = {"model.attention": "document"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where oracles are kept from test to test."""
    return tmp_path_factory.mktemp("oracles")


# ---------------------------------------------------------------- a module is blamed only if its inputs are right


def observe(pool, folder, world_size: int, overrides: dict, mutant: str | None = None) -> tuple:
    config = compare.complete(overrides, world_size)
    path = save_reference(config, folder)
    return pool.run(compare.run_mutant, world_size, mutant, observe_outputs, config, path), load_reference(path)


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [(4, {PP: 2, CP: 2, **DOCUMENTS}), (4, {CP: 2, TP: 2}), (2, {TP: 2, "training.local_batch_size": 2})],
    ids=["pp2 x cp2 documents", "cp2 x tp2", "tp2 accumulation 4"],
)
def test_every_input_of_every_module_is_compared_and_right_where_nothing_is_wrong(pool, folder, world_size, overrides):
    shares, oracle = observe(pool, folder, world_size, overrides)
    for share in shares:
        assert set(share.pieces.values()) == {0.0}
        assert {error for errors in share.stage_pieces.values() for error in errors.values()} == {0.0}
        assert all(errors.keys() == oracle.inputs[name].keys() for name, errors in share.inputs.items())
        assert max(error for errors in share.inputs.values() for error in errors.values()) < FP32_TOLERANCE / 10
    assert {name for share in shares for name in share.inputs} == set(oracle.inputs) == set(oracle.outputs)
    firsts = {"tok_embeddings", "layers.2"} if PP in overrides else {"tok_embeddings"}
    assert {name for share in shares for name in share.stage_pieces} == firsts


def test_a_stage_is_given_every_field_of_its_microbatches(pool, folder):
    shares, _ = observe(pool, folder, 2, {PP: 2})
    assert set(shares[0].stage_pieces["tok_embeddings"]) == {"x", "targets", "positions", "doc_ids"}
    assert set(shares[1].stage_pieces["layers.2"]) == {"targets", "positions", "doc_ids"}


def with_error(share: OutputShare, output: dict[str, float], inputs: dict[str, dict[str, float]]) -> OutputShare:
    return replace(share, error={**share.error, **output}, inputs={**share.inputs, **inputs})


def test_a_module_with_wrong_inputs_is_not_blamed_for_its_output(pool, folder):
    (share,), oracle = observe(pool, folder, 1, {})
    name = partial(name_first_output, oracle=oracle, tolerance=FP32_TOLERANCE / 5)
    wq, wo = "layers.1.attention.wq", "layers.1.attention.wo"
    assert name([share]) is None
    assert name([with_error(share, {wo: 1e-3}, {})]).name == wo
    both = with_error(share, {wo: 1e-3}, {wo: {"input": 8e-4}})
    assert (name([both]).kind, name([both]).name) == ("growing error", wo)
    earlier = with_error(both, {wq: 1e-5}, {})
    assert (name([earlier]).kind, name([earlier]).name) == ("module output", wq)
    at_zero, at_one = (
        replace(one, coordinates={**share.coordinates, "tp": tp}) for tp, one in enumerate((share, both))
    )
    wrong_elsewhere = with_error(at_zero, {wo: 1e-3}, {})  # what one rank makes of right inputs, others may have spoilt
    assert name([wrong_elsewhere, at_one]).kind == "growing error"


def test_what_is_lost_between_two_modules_is_named_where_it_arrives(pool, folder):
    (share,), oracle = observe(pool, folder, 1, {})
    lost = with_error(share, {"layers.2": 1e-3}, {"layers.2": {"x": 1e-3}})
    culprit = name_first_output([lost], oracle, FP32_TOLERANCE / 5)
    assert (culprit.kind, culprit.name) == ("module input", "layers.2")
    assert "what layers.1 puts out is right" in culprit.detail


# ---------------------------------------------------------------- a module that the tensor-parallel plan does not name


class GatedFeedForward(FeedForward):
    """One linear layer more than the plan of torchtitan_lite names."""

    def __init__(self, shape):
        super().__init__(shape)
        self.gate = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x):
        return super().forward(x) * torch.sigmoid(self.gate(x))


class Gated(Llama3):
    def __init__(self, shape, **options):
        super().__init__(shape, **options)
        for block in self.layers.values():
            block.feed_forward = GatedFeedForward(shape)


WITH_GATE = partial(patch.dict, step.MODELS, {"fork": (Gated, init_parameter)})
original_plan = tensor_parallel.plan_tensor_parallel


def plan_without_a_row(part, **options) -> dict:
    return {name: style for name, style in original_plan(part, **options).items() if not name.endswith("0.ffn_norm")}


def run_gated(rank: int, world_size: int, worker, *args, **options):
    """Worker: another one, with the fork's model known."""
    with WITH_GATE():
        return worker(rank, world_size, *args, **options)


def run_without_a_row(rank: int, world_size: int, worker, *args, **options):
    """Worker: another one, with a row of the plan removed."""
    with patch.object(parallelize, "plan_tensor_parallel", plan_without_a_row):
        return worker(rank, world_size, *args, **options)


@pytest.mark.parametrize(
    ("around", "name", "parameter"),
    [
        (run_gated, "fork", "layers.0.feed_forward.gate.weight"),
        (run_without_a_row, "llama3", "layers.0.ffn_norm.weight"),
    ],
)
@pytest.mark.parametrize("world_size", [2, 4], ids=["tp2", "dp2 x tp2"])
def test_a_parameter_that_the_tensor_parallel_plan_does_not_name_is_named(
    pool, folder, around, name, parameter, world_size
):
    config = compare.complete({"model.name": name, TP: 2}, world_size)

    def run_ranks(worker, n_ranks, *args, **options):
        return pool.run(around, n_ranks, worker, *args, **options)

    with WITH_GATE():
        trial = try_layout(config, world_size, run_ranks, folder)
    assert (trial.culprit.kind, trial.culprit.name) == ("placement", parameter)
    assert trial.finished and set(trial.faults) == {"crash"}
    assert len(trial.faults["crash"]) < 500 and "plan does not name its module" in trial.culprit.detail


def test_of_a_long_crash_its_ends_are_shown():
    culprit = name_crash(
        f"rank 1 of 2: Traceback ...\n  File ...\nRuntimeError: got {'[Shard(0)], ' * 5000} in stack\n"
    )
    assert (culprit.kind, culprit.name) == ("crash", "rank 1 of 2")
    assert len(culprit.detail) <= MOST_OF_CRASH
    assert culprit.detail.startswith("RuntimeError: got") and culprit.detail.endswith("in stack")
    assert name_crash(f"rank 0 of 2: ...\n{MissingFromPlan.__module__}.MissingFromPlan: a.b lies here").name == "a.b"


# ---------------------------------------------------------------- ranks that do not answer


def sleep_on(rank: int, world_size: int, sleeping_rank: int) -> None:
    """Worker: takes longer than anyone waits, on one rank."""
    if rank == sleeping_rank:
        time.sleep(60)


def wait_for_each_other(rank: int, world_size: int) -> None:
    """Worker: one rank sums what another one gathers."""
    mesh = dist.new_group([0, 1])
    if rank == 0:
        dist.all_reduce(torch.ones(3), group=mesh)
    else:
        dist.recv(torch.ones(3), src=0)


def report_timeouts(rank: int, world_size: int) -> list[timedelta]:
    """Worker: how long the first group and a later one wait."""
    groups = (dist.group.WORLD, dist.new_group([0, 1]))
    dist.barrier()  # no rank leaves while another still joins
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


@pytest.fixture(scope="module")
def own_pool():
    """Of ranks that may be killed: the others' go on."""
    with RankPool(2) as ranks:
        yield ranks


def test_a_rank_that_sleeps_is_named_with_its_place_and_nothing_is_called_wrong(own_pool):
    own_pool.run(sleep_on, 2, None)  # started: the time is for the work alone
    with pytest.raises(RankTimeout) as timeout:
        own_pool.run(sleep_on, 2, 1, timeout_s=5)
    assert "of 2 ranks did not answer within 5 s: " in str(timeout.value)
    assert "rank 1 in sleep_on (test_culprits.py:" in str(timeout.value)
    trial = describe_failure("wide", timeout.value, 1.0)
    assert not trial.finished and trial.culprit is None
    assert "--timeout" in trial.faults["no answer"] and "rank 1 in sleep_on" in trial.faults["no answer"]
    assert own_pool.run(compare.all_ranks_agree, 2, "alive") == [True, True]


def kill_last(rank: int, world_size: int) -> None:
    """Worker: a signal ends the last rank; its peer notices and raises."""
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGABRT)
    dist.barrier()


def test_a_rank_that_a_signal_ends_says_nothing_of_the_layout(own_pool):
    with pytest.raises(RankKilled) as killed:
        own_pool.run(kill_last, 2)
    trial = describe_failure("wide", killed.value, 1.0)
    assert not trial.finished and trial.faults["no answer"] == "rank 1 of 2: was killed by SIGABRT"


def test_ranks_that_wait_for_each_other_are_told_apart_by_what_they_wait_in(own_pool):
    own_pool.run(sleep_on, 2, None)
    with pytest.raises(RankTimeout) as timeout:
        own_pool.run(wait_for_each_other, 2, timeout_s=5)
    said = str(timeout.value)
    assert "2 of 2 ranks" in said and "rank 0 in all_reduce (distributed_c10d.py:" in said
    assert "rank 1 in recv (distributed_c10d.py:" in said


def test_a_place_is_the_innermost_call_and_the_line_of_this_package_that_made_it():
    text = f"""Thread 0x1 (most recent call first):
  File "/usr/lib/python3/threading.py", line 5 in wait
  File "/usr/lib/python3/threading.py", line 6 in run

Current thread 0x2 (most recent call first):
  File "/torch/distributed/distributed_c10d.py", line 3000 in all_reduce
  File "{optim_path()}", line 108 in clip_grad_norm
  File "{step.__file__}", line 120 in train_step
  File "{tool.__file__}/../ranks.py", line 150 in serve
"""
    place = (
        "in all_reduce (distributed_c10d.py:3000), called by clip_grad_norm (torchtitan_lite/components/optim.py:108)"
    )
    assert describe_stack(text) == place
    assert describe_stack("") == "cannot say where they are"


def optim_path() -> str:
    return step.build_optimizer.__code__.co_filename


def test_the_parent_gives_up_before_any_group_does(own_pool):
    for waits in own_pool.run(report_timeouts, 2, timeout_s=7200):
        assert all(seconds > timedelta(seconds=7200) for seconds in waits)


# ---------------------------------------------------------------- the matrix says what it did not run


def cell(outcome: str) -> Cell:
    faults = {"wrong": {"loss": "loss is off by 1.0e+00"}, "not finished": {"no answer": "1 of 2 ranks did not answer"}}
    if outcome in ("refused", "not run"):
        return Cell("tp2", "1F1B", None, why_not="it cannot be split" if outcome == "refused" else "")
    trial = Trial("wide", [], faults.get(outcome, {}), None, 1.0, difference=Namespace(gradient={"w": 1e-7}))
    return Cell("tp2", "1F1B", replace(trial, finished=outcome != "not finished"))


@pytest.mark.parametrize(
    ("outcomes", "verdict", "status"),
    [
        (["right", "refused"], "certified", 0),
        (["right", "not run"], "certified in part", 3),
        (["refused", "not run"], "in part", 3),
        (["right", "not finished", "not run"], "not finished", 4),
        (["right", "wrong", "not finished", "not run"], "wrong", 1),
    ],
)
def test_the_verdict_on_a_matrix_counts_what_was_not_run(outcomes, verdict, status):
    assert judge_matrix([cell(outcome) for outcome in outcomes]) == verdict
    assert tool.EXIT_STATUS[verdict] == status


def test_the_matrix_on_one_rank_is_in_part_and_says_how_many_layouts_were_run(pool, folder, capsys):
    config, options = compare.complete({}, 1), Namespace(ranks=1, json=False)
    assert tool.verify_matrix(config, options, pool.run, folder) == 3
    said = capsys.readouterr().out
    assert "certified in part: of 30 layouts 1 right, 29 not run" in said
    assert tool.verify_matrix(config, Namespace(ranks=1, json=True), pool.run, folder) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["certified"] is False and report["verdict"] == "certified in part"
    assert report["counts"] == {"right": 1, "wrong": 0, "not finished": 0, "refused": 0, "not run": 29}
    assert [each["outcome"] for each in report["cells"]].count("not run") == 29


def test_a_cell_that_timed_out_is_not_called_failed():
    cells = [replace(cell("right"), row=row, column=column) for row in ROWS for column in COLUMNS]
    cells[3] = replace(cell("not finished"), row="one rank", column=COLUMNS[3])
    grid = describe_grid(cells)
    assert grid.count("TIMEOUT") == 1 and "FAILS" not in grid
    assert "not finished: of 30 layouts 29 right, 1 not finished" in grid


# ---------------------------------------------------------------- what is counted for Llama is not said of a fork


def test_parameters_of_a_forks_model_are_not_those_of_llama():
    llama = preflight(["--config", "debug"], machine=LAPTOP, n_ranks=2)
    fork = replace(llama, config=override(llama.config, {"model.name": "fork"}), memory=[])
    place = check.Place(LAPTOP, 2, 1, "a laptop")
    assert "1,328,256 parameters" in check.describe(llama, place)
    said = check.describe(fork, place)
    assert "fork debug, parameters: those of model fork are not known without torch" in said
    assert "1,328,256" not in said and "FLOP" not in said and "not judged, for the parameters are not known" in said
    report = json.loads(check.describe_json(fork, place))
    assert report["parameters"] is None and report["flops_per_token"] is None and report["memory"] is None
    counts = json.loads(check.describe_json(llama, place))
    assert counts["parameters"] == 1328256 and counts["flops_per_token"]["full"] > 0

    degrees = llama.layout.degrees
    assert bound_memory(llama.config, llama.shape, degrees, LAPTOP, 1)
    assert bound_memory(fork.config, fork.shape, degrees, LAPTOP, 1) == []
    rows = list_rows(llama.config.parallelism, llama.layout)
    ledger, none = (open_ledger(each.config, each.shape, each.layout, LAPTOP, rows) for each in (llama, fork))
    assert ledger.predicted.memory_bytes and none.predicted.memory_bytes is None
    assert "no forecast: it is one of llama3, and this is fork" in none.notes


def test_a_run_counts_the_parameters_of_the_model_that_it_trains():
    config = compare.complete({}, 1)
    shape = resolve_model(config.model)
    llama = sum(parameter.numel() for parameter in step.build_on_meta(config, shape).parameters())
    assert llama == count_parameters(shape)
    with WITH_GATE():
        fork = step.build_on_meta(override(config, {"model.name": "fork"}), shape)
    assert sum(parameter.numel() for parameter in fork.parameters()) == llama + shape.n_layers * shape.dim**2
