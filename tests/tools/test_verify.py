"""`verify` finds and names every mutant, certifies exactly the config that was asked for, and reports what it did."""

import os
import signal
import time
from collections import defaultdict
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import compare
from layouts import MODE, SCHEDULE, SHARD, TP, ZERO, read_rows
from marks import each_row
from mutant_table import put_in_place
from mutants import MUTANTS, try_mutant
from test_config import with_another_value

from torchtitan_lite import build
from torchtitan_lite.config.checks import plan_layout
from torchtitan_lite.config.model import MODEL_SIZES
from torchtitan_lite.config.model_rows import ModelArgs, MoEArgs
from torchtitan_lite.config.reader import KEYS, read_config
from torchtitan_lite.config.schema import Config, get_value
from torchtitan_lite.parallel import activation_checkpoint, context_parallel, parallelize
from torchtitan_lite.tools.verify import train_py
from torchtitan_lite.tools.verify.command import (
    NO_RESULT,
    changes_results,
    describe_report,
    list_trials,
    make_report,
    make_trials,
)
from torchtitan_lite.tools.verify.derived_configs import choose_other_layout
from torchtitan_lite.tools.verify.ranks import RankPool
from torchtitan_lite.tools.verify.reduction import override, reduce_config
from torchtitan_lite.tools.verify.trial import Trial, make_trial
from torchtitan_lite.tools.verify.witnesses import WITNESSES

TP2 = ("--config", "debug", f"--{TP}=2", f"--{SHARD}=1")
# One mutant of each kind. `tests/run.sh --all` tries all of them.
DEFAULT = """
clip_norm_forgets_pp replicas_not_reduced
hidden_states_rounded_between_stages loads_of_own_tokens another_beta_on_one_rank odd_rows_lose_a_token
second_moments_rounded_by_a_resume gradients_reduced_in_bfloat16 owner_forgets_to_send
""".split()


@each_row("name", MUTANTS, fast=DEFAULT)
def test_mutant_is_caught_and_named_correctly(pool, tmp_path, name):
    mutant = MUTANTS[name]
    culprit = try_mutant(name, pool, tmp_path).culprit
    found = (culprit.kind, culprit.name, culprit.dims)
    assert found == (mutant.kind, mutant.name, mutant.dims), culprit


def reduce():
    return reduce_config(read_config([*TP2]).config, 2)


# ---------------------------------------------------------------- coverage

UNUSUAL = """
training.dataset=python_stdlib,python_stdlib training.dataset_weights=3,1 training.enable_cpu_offload=true
debug.deterministic=true debug.compare_copies_every=50 optimizer.moments_dtype=bfloat16 optimizer.beta2=0.9
lr_scheduler.decay_ratio=0.5 lr_scheduler.min_lr_factor=0.3 lr_scheduler.decay_type=cosine
training.max_norm=0.3 training.skip_spikes=3 validation.steps=3
checkpoint.async_mode=async checkpoint.enable_first_step_checkpoint=true checkpoint.initial_load_path=weights
parallelism.zero_plus_plus=["hpz","qwz"]
parallelism.enable_async_tensor_parallel=true activation_checkpoint.mode=full compile.enable=true
compile.components=["loss"] training.data_seed=5
optimizer.groups=[{match="tok*",lr=2},{match="*.1.*norm*",weight_decay=0}]
""".split()
# Keys of UNUSUAL that the trial of train.py must not replace.
AS_ASKED = """
training.dataset_weights debug.deterministic optimizer.moments_dtype optimizer.beta2 lr_scheduler.decay_type
training.max_norm training.data_seed optimizer.groups checkpoint.async_mode checkpoint.enable_first_step_checkpoint
""".split()
# Keys of UNUSUAL that must be reported as covered. IDLE has those that must be reported as without effect.
COVERED = """
training.dataset_weights training.skip_spikes training.max_norm debug.deterministic optimizer.moments_dtype
optimizer.beta2 lr_scheduler.min_lr_factor lr_scheduler.decay_ratio lr_scheduler.decay_type checkpoint.async_mode
activation_checkpoint.mode compile.enable
compile.components training.data_seed optimizer.groups
""".split()
NOT_COVERED = """
compile.backend checkpoint.initial_load_path parallelism.enable_async_tensor_parallel training.enable_cpu_offload
""".split()
IDLE = ["parallelism.zero_plus_plus", "parallelism.zero_plus_plus_node_size"]


def record_configs(run_ranks, configs: dict):
    """Return a version of run_ranks that also records in `configs` which config the ranks of each layout get."""

    def run(worker, world_size: int, *args, **options):
        if world_size > 1 and worker.__name__ == "start_train":
            configs["train.py"].append(args[0])
        elif world_size > 1:
            name = Path(args[1]).stem
            configs[name].append(args[0])
        return run_ranks(worker, world_size, *args, **options)

    return run


def test_every_key_that_a_trial_replaces_is_in_the_certificate(pool, tmp_path):
    given = read_config(["--config", "debug", *(f"--{pair}" for pair in UNUSUAL)])
    assert not given.problems
    configs = defaultdict(list)
    reduction = reduce_config(given.config, 2)
    trials = make_trials(reduction, record_configs(pool.run, configs), tmp_path)
    report = make_report("debug", reduction, trials) | {"idle": ["a is idle"]}
    text = describe_report(report)
    assert report["verdict"] == "certified", text
    assert text.startswith("certified: debug on dp_shard2, 2 ranks") and "seq_len 128 -> " in text
    assert configs.keys() == {"wide", "deep", "train.py", "bfloat16"}
    for trial in report["trials"]:
        for config in configs[trial["name"]]:
            for key in filter(changes_results, KEYS):
                asked, ran = get_value(given.config, key), get_value(config, key)
                if asked != ran and asked not in (-1, "auto", None):
                    assert key in trial["replaced"], (trial["name"], key)
    of_train_py = report["trials"][2]
    assert of_train_py["name"] == "train.py" and of_train_py["replaced"].keys().isdisjoint(AS_ASKED)
    assert report["not_covered"].keys() >= {*NOT_COVERED}
    assert list(report["did_not_act"]) == IDLE
    uncovered = {*report["not_covered"], *report["did_not_act"]}
    assert uncovered.isdisjoint(COVERED)
    first_lines = text.split("another value")[0]
    assert all(key.rpartition(".")[2] in first_lines for key in uncovered)


def set_every_key(config: Config) -> tuple[Config, set[str]]:
    """Return a config in which every key that changes results has a value that is not the default, and these keys. No
    rule checks the config."""
    names = {
        "model.name",
        "model.flavor",
        "model.attention",
        *(f"model.{size}" for size in MODEL_SIZES),
    }
    tried = set(filter(changes_results, KEYS)) - names
    for key in tried:
        config = with_another_value(config, key)
    return config, tried


def test_a_key_that_is_set_is_covered_only_if_its_witness_saw_it_act():
    """If a key without a witness is set, it is not covered. A new key has no witness."""
    sizes = [*fields(MoEArgs), *fields(ModelArgs)]
    known = KEYS.keys() | {f"model.{size.name}" for size in sizes}
    assert known >= WITNESSES.keys()
    sections = {key.partition(".")[0] for key in KEYS}
    assert KEYS.keys() | sections >= NO_RESULT
    small = reduce()
    real, tried = set_every_key(small.real)
    reduction = replace(small, real=real)
    idle = {}
    for acted in (False, True, None):
        trial = Trial("wide", ran=((real, dict.fromkeys(WITNESSES, acted)),))
        report = make_report("debug", reduction, [trial])
        idle[acted] = tried.intersection(report["did_not_act"])
    assert idle[False] == tried
    assert idle[True] == idle[None] == tried - WITNESSES.keys()


# ---------------------------------------------------------------- keys that are broken

ROWS = read_rows("""
sharded | 2 | ACCUMULATION_4 MODE=full ZERO=2
stages | 2 | PP=2 SCHEDULE=GPipe
ring | 2 | CP=2 RING COMPILED MODE=none
loops | 2 | ADAMW optimizer.implementation=for-loop
""")


def keep_sharded(original, part, mesh, expert_mesh, section, layout):
    return original(part, mesh, expert_mesh, section, replace(layout, zero_stage=3))


def build_1f1b(original, parts, layout, mesh, *, section, **options):
    section = replace(section, pipeline_parallel_schedule="1F1B")
    return original(parts, layout, mesh, section=section, **options)


def build_foreach(original, section, *args):
    return original(replace(section, implementation="foreach"), *args)


def gather_keys(original, part, mesh, *, attention, method):
    return original(part, mesh, attention=attention, method="allgather")


BROKEN = [  # Row, key, the function that ignores the key, what it does instead. All numbers stay right.
    ("sharded", MODE, activation_checkpoint, "apply_recompute", lambda *_: None),
    ("sharded", ZERO, parallelize, "apply_fsdp", keep_sharded),
    ("stages", SCHEDULE, build, "build_schedule", build_1f1b),
    ("ring", "compile.enable", activation_checkpoint, "compile_method", lambda *_: None),
    (
        "ring",
        "parallelism.context_parallel_rotate_method",
        context_parallel,
        "apply_context_parallel",
        gather_keys,
    ),
    ("loops", "optimizer.implementation", build, "build_optimizer", build_foreach),
]


def break_row(number: int):
    *_, owner, name, function = BROKEN[number]
    return put_in_place(function, owner, name)


@each_row("name", ROWS, fast=["stages"])
def test_a_key_that_no_longer_acts_is_not_covered(pool, tmp_path, name):
    numbers = [number for number, (row, *_) in enumerate(BROKEN) if row == name]
    of_row = {BROKEN[number][1] for number in numbers}
    reduction = compare.reduce_row(ROWS[name])

    def find_idle(run_ranks) -> set[str]:
        trial = list_trials(reduction, run_ranks, tmp_path)["wide"]()
        report = make_report(name, reduction, [trial])
        assert report["verdict"] == "certified"
        return of_row.intersection(report["did_not_act"])

    assert find_idle(pool.run) == set()
    for number in numbers:
        broken = compare.ranks_inside(pool, partial(break_row, number))
        assert find_idle(broken) == {BROKEN[number][1]}


def hang(rank: int, world_size: int) -> None:
    time.sleep(60 * rank)


def kill(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def fail(rank: int, world_size: int) -> None:
    raise ValueError("no room")


@each_row(
    "function, timeout_s, verdict, text",
    [
        (hang, 1, "not finished", "no answer within 1 s"),
        (kill, 60, "not finished", "rank 1 of 2 was killed by SIGKILL"),
        (fail, 60, "wrong", "crash: ValueError: no room"),
    ],
)
def test_an_exception_in_a_rank_is_a_fault_and_a_rank_that_does_not_answer_is_not(
    function, timeout_s, verdict, text
):
    with RankPool() as own_pool:
        trial = make_trial("wide", partial(own_pool.run, function, 2, timeout_s=timeout_s))
        assert own_pool.run(divmod, 2) == [(0, 0), (0, 1)], "new ranks answer"
    report = make_report("debug", reduce(), [trial]) | {"idle": []}
    assert report["verdict"] == verdict and text in describe_report(report)


# ---------------------------------------------------------------- train.py


RESUMED_ON = read_rows("""
tp2 | 2
dp_shard2 x tp2 | 4 | PP=4
dp_shard4 | 4 | TP=2
dp_shard4 x tp2, ep8 | 8 | MOE PP=2 EP=2
""")  # layout of the second start | layout of the first


@each_row("other", RESUMED_ON)
def test_a_resume_is_tried_on_another_layout_of_the_same_ranks(tmp_path, other):
    row = RESUMED_ON[other]
    config = train_py.make_config(compare.reduce_row(row), tmp_path)
    config = choose_other_layout(override(config, train_py.RESUMED), row.world_size)
    layout = plan_layout(config, compare.resolve_model(config.model), row.world_size)
    assert str(layout) == other
