"""`verify`: it catches and names every mutant, certifies exactly what was asked, and says what it did."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path

import compare
import pytest
from layouts import (
    ACCUMULATION_4,
    COMPILED,
    CP,
    EP,
    MODE,
    MOE,
    PP,
    RING,
    SCHEDULE,
    SHARD,
    TP,
    ZERO,
    Row,
)
from marks import choose_fast
from mutant_table import put_in_place
from mutants import MUTANTS, apply_mutant, try_mutant

from torchtitan_lite import REPOSITORY, build, step
from torchtitan_lite.components import optim
from torchtitan_lite.config.checks import MODEL_SIZES, plan_layout
from torchtitan_lite.config.model_rows import MoEArgs
from torchtitan_lite.config.reader import KEYS, read_config
from torchtitan_lite.config.schema import Config, get_value, with_value
from torchtitan_lite.parallel import parallelize
from torchtitan_lite.tools.verify import train_py
from torchtitan_lite.tools.verify.certificate import describe, make_report
from torchtitan_lite.tools.verify.command import list_trials, make_trials
from torchtitan_lite.tools.verify.degrees import choose_other_layout
from torchtitan_lite.tools.verify.ranks import RankPool
from torchtitan_lite.tools.verify.reduction import override, reduce_config
from torchtitan_lite.tools.verify.trial import Trial, make_trial
from torchtitan_lite.tools.verify.witnesses import NO_RESULT, WITNESSES, changes_results

TP2 = ("--config", "debug", f"--{TP}=2", f"--{SHARD}=1")
# One of each kind. The others: `tests/run.sh --all`.
DEFAULT = """
clip_norm_forgets_pp loss_averaged_per_rank replicas_not_reduced shards_not_summed keys_not_fetched
hidden_states_not_sent the_gradient_of_the_tied_head_is_lost loads_of_own_tokens another_beta_on_one_rank
infinity_counts_as_finite odd_rows_lose_a_token layers_in_the_order_of_text experts_saved_in_another_order
tp_peers_read_other_rows moments_forgotten_by_a_resume gradients_reduced_in_bfloat16 scales_of_the_step_before
owner_forgets_to_send
""".split()


@pytest.mark.parametrize("name", choose_fast(MUTANTS, DEFAULT))
def test_mutant_is_caught_and_rightly_named(pool, tmp_path, name):
    mutant = MUTANTS[name]
    culprit = try_mutant(name, pool, tmp_path).culprit
    found = (culprit.kind, culprit.name, culprit.dims)
    assert found == (mutant.kind, mutant.name, mutant.dims), culprit


# ---------------------------------------------------------------- the door


def reduce(*args: str):
    given = read_config([*TP2, *args])
    assert not given.problems
    return reduce_config(given.config, 2)


def test_the_command_certifies_a_config_from_a_cold_start():
    command = [sys.executable, "-m", "torchtitan_lite", "verify", *TP2, "--ranks=2"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith("certified: debug on tp2, 2 ranks") and len(rest) < 50
    assert "seq_len 128 -> 42" in done.stdout and "the model file" in done.stdout
    assert all(f"{name}, " in done.stdout for name in ("wide", "deep", "train.py", "bfloat16"))


# ---------------------------------------------------------------- the verdict


def test_a_wrong_layout_ends_with_its_first_fault(pool, tmp_path):
    run_ranks = compare.ranks_inside(pool, partial(apply_mutant, "loss_counted_by_every_tp_rank"))
    reduction = reduce()
    trials = make_trials(reduction, run_ranks, tmp_path)
    text = json.dumps(make_report("debug", reduction, trials), default=str)
    report = json.loads(text)
    (trial,) = report["trials"]
    assert (report["verdict"], trial["name"]) == ("wrong", "wide")
    assert report["not_covered"]["training.seq_len"] == [128, 42]
    assert trial["faults"]["module output"]["name"] == "output" and "loss" in trial["faults"]
    error, bound = trial["measures"]["loss"]
    assert error > bound
    first, second, third, *_ = describe(report).splitlines()
    assert first.startswith("wrong: debug on tp2") and "trial wide" in second
    assert "module output: output, off by" in third


# ---------------------------------------------------------------- coverage

UNUSUAL = """
training.dataset=python_stdlib,python_stdlib training.dataset_weights=3,1 training.enable_cpu_offload=true
debug.deterministic=true debug.compare_copies_every=50 optimizer.moments_dtype=bfloat16 optimizer.beta2=0.9
lr_scheduler.decay_ratio=0.5 lr_scheduler.decay_type=cosine training.max_norm=0.3 validation.steps=3
checkpoint.async_mode=async checkpoint.enable_first_step_checkpoint=true checkpoint.initial_load_path=weights
parallelism.zero_plus_plus=["hpz","qwz"]
parallelism.enable_async_tensor_parallel=true activation_checkpoint.mode=full compile.enable=true
compile.components=["loss"]
""".split()
# Keys of this table that the trial of train.py must not replace.
AS_ASKED = """
training.dataset_weights debug.deterministic optimizer.moments_dtype optimizer.beta2 lr_scheduler.decay_type
training.max_norm checkpoint.async_mode checkpoint.enable_first_step_checkpoint
""".split()
# Keys of the first table that must be called covered, and keys that did not act.
COVERED = """
training.dataset_weights training.max_norm debug.deterministic optimizer.moments_dtype optimizer.beta2
lr_scheduler.decay_ratio lr_scheduler.decay_type checkpoint.async_mode activation_checkpoint.mode compile.enable
compile.components
""".split()
IDLE = ["parallelism.zero_plus_plus", "parallelism.zero_plus_plus_node_size"]


def record_configs(run_ranks, configs: dict):
    """Return run_ranks that also notes the config of each layout, as its ranks get it."""

    def run(worker, world_size: int, *args, **options):
        if world_size > 1 and worker.__name__ == "start_train":
            path = args[0][1]
            configs["train.py"].append(read_config(["--config", path]).config)
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
    report = make_report("debug", reduction, trials)
    text = describe(report)
    assert report["verdict"] == "certified", text
    assert configs.keys() == {"wide", "deep", "train.py", "bfloat16"}
    for trial in report["trials"]:
        for config in configs[trial["name"]]:
            for key in filter(changes_results, KEYS):
                asked, ran = get_value(given.config, key), get_value(config, key)
                if asked != ran and asked not in (-1, "auto", None):
                    assert key in trial["replaced"], (trial["name"], key)
    of_train_py = report["trials"][2]
    assert of_train_py["name"] == "train.py" and of_train_py["replaced"].keys().isdisjoint(AS_ASKED)
    assert {"compile.backend", "checkpoint.initial_load_path"} <= report["not_covered"].keys()
    assert {"parallelism.enable_async_tensor_parallel", "training.enable_cpu_offload"} <= report[
        "not_covered"
    ].keys()
    assert list(report["did_not_act"]) == IDLE
    uncovered = {*report["not_covered"], *report["did_not_act"]}
    assert uncovered.isdisjoint(COVERED)
    first_lines = text.split("another value")[0]
    assert all(key.rpartition(".")[2] in first_lines for key in uncovered)


OTHER = {bool: lambda v: not v, int: lambda v: v + 1, float: lambda v: v + 0.25}


def choose_other(value: object) -> object:
    """Any value but the default. No rule checks it here."""
    if isinstance(value, list):
        return [*value, "other"]
    return OTHER.get(type(value), lambda _: "other")(value)


NOT_TRIED = {"model.name", "model.flavor", *(f"model.{size}" for size in MODEL_SIZES)}


@pytest.mark.parametrize("key", sorted(set(filter(changes_results, KEYS)) - NOT_TRIED))
def test_a_key_that_is_set_is_covered_only_by_its_witness(key):
    """A new key has no witness."""
    small = reduce()
    real = with_value(small.real, key, choose_other(get_value(Config(), key)))
    reduction = replace(small, real=real)

    def find_idle(acted: dict) -> dict:
        return make_report("debug", reduction, [Trial("wide", ran=((real, acted),))])["did_not_act"]

    everything = dict.fromkeys(WITNESSES, True)
    without = {other: True for other in WITNESSES if other != key}
    idle = find_idle(everything)
    assert key in find_idle(without) and (key in idle) == (key not in WITNESSES)
    assert key in find_idle(everything | {key: False}) and key not in find_idle(
        everything | {key: None}
    )


def test_witnesses_and_keys_without_results_name_keys():
    sections = {key.partition(".")[0] for key in KEYS}
    sizes = {f"model.{size.name}" for size in fields(MoEArgs)}
    assert KEYS.keys() | sizes >= WITNESSES.keys()
    assert KEYS.keys() | sections >= NO_RESULT
    assert all(changes_results(key) for key in WITNESSES)


# ---------------------------------------------------------------- keys that are broken

SHARDED = {
    **ACCUMULATION_4,
    MODE: "full",
    ZERO: 2,
    "training.skip_spikes": 3.0,
    "lr_scheduler.min_lr_factor": 0.3,
    "lr_scheduler.decay_ratio": 0.5,
    "lr_scheduler.total_steps": 30,
    "optimizer.name": "AdamW",
    "optimizer.implementation": "fused",
    "optimizer.moments_dtype": "bfloat16",
}
ROWS = {
    "sharded": Row(2, SHARDED),
    "stages": Row(2, {PP: 2, SCHEDULE: "GPipe"}),
    "ring": Row(2, {CP: 2, **RING, **COMPILED, MODE: "none"}),
    "experts": Row(2, {EP: 2, **MOE, "training.expert_balance_loss": 0.1}),
}


def give_other(**changes):
    """A function in whose first argument, a config section, keys get other values."""

    def call(original, section, *args):
        return original(replace(section, **changes), *args)

    return call


def keep_sharded(original, part, mesh, expert_mesh, section, layout):
    return original(part, mesh, expert_mesh, section, replace(layout, zero_stage=3))


def build_1f1b(original, parts, layout, mesh, *, section, **options):
    section = replace(section, pipeline_parallel_schedule="1F1B")
    return original(parts, layout, mesh, section=section, **options)


def gather_keys(original, part, mesh, *, attention, method):
    return original(part, mesh, attention=attention, method="allgather")


def clip_nothing(original, optimizer, grad_norm, max_norm):
    return original(optimizer, grad_norm, 0.0)


BROKEN = [  # row, key, the function that no longer obeys it, what it does instead, whether verify finds a wrong number
    ("sharded", "training.skip_spikes", (step, "skip_spike"), lambda _, __, norm, *___: norm, True),
    ("sharded", "training.max_norm", (step, "update_weights"), clip_nothing, True),
    (
        "sharded",
        "lr_scheduler.min_lr_factor",
        (optim, "learning_rate_factor"),
        give_other(min_lr_factor=0.0),
        True,
    ),
    (
        "sharded",
        "optimizer.moments_dtype",
        (build, "build_optimizer"),
        give_other(moments_dtype="float32"),
        True,
    ),
    ("sharded", MODE, (parallelize, "apply_recompute"), lambda *_: None, False),
    ("sharded", ZERO, (parallelize, "apply_fsdp"), keep_sharded, False),
    ("stages", SCHEDULE, (build, "build_schedule"), build_1f1b, False),
    ("ring", "compile.enable", (parallelize, "compile_method"), lambda *_: None, False),
    (
        "ring",
        "parallelism.context_parallel_rotate_method",
        (parallelize, "apply_context_parallel"),
        gather_keys,
        False,
    ),
    (
        "experts",
        "training.expert_balance_loss",
        (build, "build_balance"),
        lambda build, parts, section, *rest: build(
            parts, replace(section, expert_balance_loss=0.0), *rest
        ),
        True,
    ),
]


def break_row(number: int):
    _, _, (owner, name), function, _ = BROKEN[number]
    return put_in_place(function, owner, name)


@pytest.fixture(scope="module")
def find_sound(pool, tmp_path_factory):
    """Function: name of a row -> report of the wide trial on sound ranks."""
    return cache(lambda name: try_wide(name, pool.run, tmp_path_factory.mktemp("sound")))


def try_wide(name: str, run_ranks, folder: Path) -> dict:
    reduction = compare.reduce_row(ROWS[name])
    trial = list_trials(reduction, run_ranks, folder)["wide"]()
    return make_report(name, reduction, [trial])


@pytest.mark.parametrize("number", choose_fast(range(len(BROKEN)), [0, 1, 4, 5, 6]))
def test_a_key_that_no_longer_acts_is_caught_or_not_covered(pool, tmp_path, find_sound, number):
    row, key, _, _, is_wrong = BROKEN[number]
    sound = find_sound(row)
    assert sound["verdict"] == "certified" and key not in sound["did_not_act"]
    run_ranks = compare.ranks_inside(pool, partial(break_row, number))
    broken = try_wide(row, run_ranks, tmp_path)
    assert broken["verdict"] == ("wrong" if is_wrong else "certified")
    assert is_wrong or key in broken["did_not_act"]


def hang(rank: int, world_size: int) -> None:
    time.sleep(60 * rank)


def kill(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def fail(rank: int, world_size: int) -> None:
    raise ValueError("no room")


@pytest.mark.parametrize(
    "function, timeout_s, verdict, text",
    [
        (hang, 1, "not finished", "no answer within 1 s"),
        (kill, 60, "not finished", "killed by SIGKILL"),
        (fail, 60, "wrong", "crash: ValueError: no room"),
    ],
)
def test_ranks_that_raise_are_a_fault_and_ranks_without_an_answer_are_not(
    function, timeout_s, verdict, text
):
    with RankPool() as own_pool:
        trial = make_trial("wide", partial(own_pool.run, function, 2, timeout_s=timeout_s))
    report = make_report("debug", reduce(), [trial])
    assert report["verdict"] == verdict and text in describe(report)


# ---------------------------------------------------------------- train.py


@pytest.mark.parametrize(
    "row, other",
    [
        (Row(2), "tp2"),
        (Row(4, {PP: 4}), "dp_shard2 x tp2"),
        (Row(4, {TP: 2}), "dp_shard4"),
        (Row(8, {**MOE, PP: 2, EP: 2}), "dp_shard4 x tp2, ep8"),
    ],
)
def test_a_resume_is_tried_on_another_layout_of_the_same_ranks(tmp_path, row, other):
    config = train_py.make_config(compare.reduce_row(row), tmp_path)
    config = choose_other_layout(override(config, train_py.RESUMED), row.world_size)
    layout = plan_layout(config, compare.resolve_model(config.model), row.world_size)
    assert str(layout) == other
