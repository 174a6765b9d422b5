"""A fork adds a row as described in README. Every tool then works with it, or refuses it in a line with key and
remedy."""

import json
from pathlib import Path

import pytest
from forks import BROKEN, FORKS, write_forks
from marks import each_row, read_lines, slow
from programs import run_python
from warm_start import read_losses

from torchtitan_lite import REPOSITORY

SMALL = """
--config=debug --model.n_layers=2 --model.dim=64 --model.n_heads=4 --model.n_kv_heads=2 --model.head_dim=16
--model.ffn_dim=96 --training.seq_len=32 --training.local_batch_size=2 --training.global_batch_size=4
--training.dataset=own_sources --parallelism.tensor_parallel_degree=2
""".split()  # the corpus of the fork "a corpus" is smaller than the default one
ONE_SHARD = "--parallelism.data_parallel_shard_degree=1"
UNSPLIT = [ONE_SHARD, "--parallelism.tensor_parallel_degree=1"]
STAGES = [*UNSPLIT, "--parallelism.pipeline_parallel_degree=2"]
SHORT = {  # abbreviation in the table below -> keys
    "STAGES": STAGES,
    "TP2": [ONE_SHARD, "--ranks=2"],
    "CONTEXT": [*UNSPLIT, "--parallelism.context_parallel_degree=2"],
    "EXPORT": ["--checkpoint.last_save_in_hf", "--checkpoint.enable", "--gpus=4"],
}
# fork | tool | keys | exit status | words of the answer. SLOW_WALKS certify each fork on dp2 x tp2 and on pp2, in all
# trials. Parameters of "a norm" have no names in transformers, which computes the norm in a different way.
ENDS = read_lines("""
a second prediction | verify wide | STAGES --model.attention=document --ranks=2 | 0 \
    | 'cross_entropy' had no observed effect
adapters | verify wide | STAGES --ranks=2 | 0 | certified
an attention | verify wide | CONTEXT --ranks=2 | 0 | 'sliding' had no observed effect
an attention | check | CONTEXT --parallelism.context_parallel_rotate_method=ring --gpus=2 | 2 | the ring has no masks
a teacher | explain | --gpus=4 | 0 |
an inner attention | verify wide | CONTEXT --ranks=2 | 1 | layers.1.attention.inner is NearAttention
an optimizer | check | --optimizer.lr=0.03 --gpus=4 | 2 | optimizer.lr
a teacher | check | STAGES --parallelism.data_parallel_replicate_degree=2 --gpus=4 | 2 | training.teacher
a window | check | CONTEXT --gpus=2 | 2 | context_parallel_degree
a decay | check | --gpus=4 | 0 | the learning rate falls to -1.49e-05 at step 184
a decay | check | --lr_scheduler.decay_type=log --gpus=4 | 2 | 'log': the decay gives ValueError
a decay | check | --lr_scheduler.decay_type=nan --gpus=4 | 2 | 'nan': the decay gives nan in step 201
the ends | check | --gpus=4 | 0 | 0.000872 GFLOP per token
a norm | check | EXPORT | 2 | checkpoint.last_save_in_hf
an attention | check | EXPORT | 2 | checkpoint.last_save_in_hf
""")
# Slow, because WHOLE_WALK is certified on dp2 x tp2 by default
SLOW_ENDS = read_lines("""
an optimizer | verify wide | TP2 --optimizer.eps=1e-6 --optimizer.beta1=0.8 | 0 | optimizer: eps 1e-06 had no
the ends | verify wide | TP2 | 0 | certified
a value | verify wide | CONTEXT --ranks=2 | 0 | certified
latent attention | verify wide | TP2 | 0 | certified
a gain | verify wide | TP2 | 0 | certified
a teacher | verify wide | --ranks=4 | 0 | 'cross_entropy' had no observed effect
adapters | verify wide | --ranks=4 | 0 | certified
a gpt | verify wide | TP2 | 0 | certified
a gpt | verify wide | CONTEXT --ranks=2 | 0 | certified
a decay | verify wide | --optimizer.name=SGD --optimizer.beta1=0.8 TP2 | 0 | optimizer.beta1 has no effect
""")
REFUSED = {  # fork -> tool -> the key that it names
    "an attention": {"generate": "model.attention", "convert": "model.attention"},
    "a window": {"convert": "window"},
    "an inner attention": {"generate": "layers.1.attention.inner"},
    "slopes": {"generate": "layers.0.attention.inner"},
    "ids": {"generate": "The forward fails if targets and extra fields are missing"},
}
MODEL_FORKS = []  # the forks that `explain` shows
for name, fork in FORKS.items():
    if fork.keys[0].startswith("--model."):
        MODEL_FORKS.append(name)
        REFUSED.setdefault(name, {}).setdefault("convert", "model.name")
FROM_LLAMA = {  # run -> its keys, and the weights that it starts from
    f"{name} from {source}": (keys, source)
    for name, keys in {"llama": (), "gain": FORKS["a gain"].keys}.items()
    for source in ("checkpoint/step-2", "hf")
}
SLOW_FAULTS = ["a gradient of one rank"]
# By default one run uses two forks: the first has its own state in checkpoints, the second cannot be converted.
WHOLE_WALK = ("an optimizer", "a norm")

# Calls tools, and train.py on a pool of ranks, in one process, because importing torch takes most of the time.
CALLS = """
import contextlib, io, json, sys, traceback
from torchtitan_lite.__main__ import main
from unittest.mock import patch
from torchtitan_lite.tools.processes import PRELOADED
from torchtitan_lite.tools.verify import command
from torchtitan_lite.tools.verify.ranks import RankPool
import warm_start

list_trials = command.list_trials

def call(tool, args):
    if tool == "train":
        return max(status for status, _ in pool.run(warm_start.start, args[0], args[1:]))
    if tool == "verify wide":
        with patch.object(command, "list_trials", lambda *of: {"wide": list_trials(*of)["wide"]}):
            return main(["verify", *args])
    return main([tool, *args])

PRELOADED.append("warm_start")
pool = RankPool()
answers = {}
for name, (tool, *args) in json.loads(sys.argv[1]).items():
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = call(tool, args)
        except SystemExit as end:
            status = end.code
        except Exception:
            status = traceback.format_exc()
    for stream in (out, err):
        stream.seek(0)
    answers[name] = status, out.read(), err.read()
pool.close()
print(json.dumps(answers))
"""

Answers = dict[str, tuple[int, str, str]]  # call -> exit status, stdout, stderr


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("forks")
    write_forks(folder)
    return folder


@pytest.fixture(scope="module")
def answers(checkout, request) -> Answers:
    """Run the calls of the selected tests for all forks. Return their answers."""
    calls = list_walk(WHOLE_WALK)
    del calls["verify pp2"]  # only the slow walks make this call and run all trials of `verify`
    calls["verify"][0] = "verify wide"
    for name, fork in FORKS.items():
        keys = [*SMALL, *fork.keys]
        calls[f"check {name}"] = ["check", *keys, "--gpus=4"]
        calls[f"plan {name}"] = ["plan", *keys, "--gpus=4", "--json"]
        if name in MODEL_FORKS:
            calls[f"explain {name}"] = ["explain", *keys, "--gpus=4"]
    runs_slow_tests = request.config.option.markexpr != "not slow"
    for fork, tool, words, *_ in ENDS + SLOW_ENDS * runs_slow_tests:
        call = [tool, *SMALL, *FORKS[fork].keys]
        for word in words.split():
            call += SHORT.get(word, [word])
        calls[f"{fork} {tool} {words}"] = call
    for name, (_, fork) in BROKEN.items():
        if runs_slow_tests or name not in SLOW_FAULTS:
            keys = [*SMALL, *fork.keys, ONE_SHARD]
            calls[f"explain {name}"] = ["explain", *keys, "--gpus=2"]
            calls[f"verify {name}"] = ["verify", *keys, "--ranks=2"]
    train = [*SMALL, "--checkpoint.enable", "--metrics.log_freq=1", "--validation.no_enable"]
    train.append(ONE_SHARD)
    llama = ["--job.dump_folder=llama", "--training.steps=2"]
    llama += ["--checkpoint.last_save_model_only", "--checkpoint.export_dtype=bfloat16"]
    calls["llama"] = ["train", 2, *train, *llama]
    calls["llama in hf"] = ["convert", "llama/checkpoint/step-2", "llama/hf"]
    for run, (keys, source) in FROM_LLAMA.items():
        keys = [*train, *keys, f"--job.dump_folder={run}"]
        keys += [f"--checkpoint.initial_load_path=llama/{source}", "--training.steps=1"]
        calls[f"check {run}"] = ["check", *keys, "--gpus=2"]
        calls[run] = ["train", 2, *keys]
    calls["plan "] = ["plan", *SMALL, "--gpus=4", "--json"]
    return run_calls(checkout, calls)


def list_walk(names: tuple[str, ...]) -> dict[str, list]:
    """Return the calls that train with these forks on 4 ranks, resume on 2, verify, generate and convert."""
    keys, run = [key for name in names for key in FORKS[name].keys], describe_run(names)
    train = [*SMALL, *keys, f"--job.dump_folder={run}", "--checkpoint.enable", "--job.no_overwrite"]
    train += ["--validation.no_enable", "--metrics.log_freq=1"]
    step_3 = f"{run}/checkpoint/step-3"
    return {
        "prepare": ["prepare", "--dataset=own_sources"],  # the launcher prepares this corpus
        "train": ["train", 4, *train, "--training.steps=2"],
        "resume": ["train", 2, *train, "--training.steps=3"],
        "verify": ["verify", *SMALL, *keys, "--ranks=4", "--json"],
        "verify pp2": ["verify", *SMALL, *keys, *STAGES, "--ranks=2"],
        "generate": ["generate", step_3, "--prompt=import", "--max-new-tokens=4", "--json"],
        "convert": ["convert", step_3, f"hf of {run}"],
    }


def describe_run(names: tuple[str, ...]) -> str:
    return f"run of {' and '.join(names)}"


def run_calls(checkout: Path, calls: dict[str, list]) -> Answers:
    path = f"{checkout}:{REPOSITORY}/tests"
    answer = run_python("-c", CALLS, json.dumps(calls), folder=checkout, PYTHONPATH=path)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])


# fork | parameters that it adds to two layers, embedding, norm and head
ADDED = dict(
    read_lines("""
a norm | 256  # two norms of 64 in each layer
the ends | -71616  # a norm of 64, a matrix of 32 x 64, and a head of 2304 x 32
a second prediction | 4160
latent attention | 3136  # in each layer matrices of 40 x 64 and 96 x 32 and a norm of 32, without two of 32 x 64
a gain | 2
a value | 65
adapters | -145408  # in each layer matrices of 8 x 64 and 64 x 8; the embedding of 2304 x 64 is tied
slopes | 8  # a slope for each of four heads in each layer
ids | 299520  # in each layer an embedding of 2304 x 64, and 2304 biases
a gpt | -7616  # positions of 64 x 64; each layer has 288 biases, and two matrices of 64 x 96 instead of three
""")
)


@each_row("name", FORKS)
def test_a_fork_is_checked_planned_and_explained(answers, name):
    tools = ["check", "plan", "explain"] if name in MODEL_FORKS else ["check", "plan"]
    for tool in tools:
        assert answers[f"{tool} {name}"][0] == 0, answers[f"{tool} {name}"]
    block = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96 + 2 * 64
    n_parameters = 2 * block + int(ADDED.get(name, 0)) + 2 * 2304 * 64 + 64
    assert f"{n_parameters:,} parameters" in answers[f"check {name}"][1]


@each_row("fork, tool, words, status, said", ENDS + SLOW_ENDS, slow=SLOW_ENDS)
def test_a_fork_is_certified_or_the_refusal_names_what_it_does_not_support(
    answers, fork, tool, words, status, said
):
    ended, out, err = answers[f"{fork} {tool} {words}"]
    assert ended == int(status) and said in out + err, out + err


UNMODELED = dict(
    read_lines("""
a second prediction | calls of output
ids | of_ids
slopes | attention.inner.slopes
a teacher | training.teacher = initial
a loss | training.loss = z_loss
an optimizer | optimizer.name = Lion
an attention | model.attention = sliding
an inner attention | model.name = near
""")
)


def read_plan(answers: Answers, name: str) -> dict:
    return json.loads(answers[f"plan {name}"][1])


@each_row("name", ["", "a window", *UNMODELED])
def test_plan_names_what_the_forecast_leaves_out(answers, name):
    unmodeled = read_plan(answers, name)["unmodeled"]
    if name in UNMODELED:
        assert UNMODELED[name] in unmodeled
    else:
        assert not unmodeled


def test_plan_counts_the_flops_of_a_window_and_of_two_predictions_but_of_no_embedding(answers):
    flops = []
    for name in ("", "a window", "a second prediction", "ids"):
        plan = read_plan(answers, name)
        flops.append(plan["mfu_full"] * plan["step_time_s"])
    plain, window, twice, ids = flops
    block = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96
    weights = 6 * (2 * block + 2304 * 64)
    attention = 12 * 64 * (32 + 32)
    second = 6 * (2304 * 64 + 64 * 64)
    in_window = 12 * 64 * (32 + 16)
    assert window / plain == pytest.approx((weights + in_window) / (weights + attention))
    assert ids == pytest.approx(plain)
    assert twice / plain == pytest.approx((weights + second + attention) / (weights + attention))


@each_row("name", BROKEN, slow=SLOW_FAULTS)
def test_a_fault_of_a_fork_under_tp_is_found(answers, name):
    """The fault is found even in a sum whose terms cancel and whose bound is therefore wider."""
    status, out, err = answers[f"verify {name}"]
    found, _ = BROKEN[name]
    assert status in (1, 2) and found in out + err, out + err
    if status == 1:  # the first trial that finds a fault is the last one
        assert out.startswith("wrong: ") and "trial wide" in out.splitlines()[1]
    status, out, err = answers[f"explain {name}"]
    is_own_error = "TypeError: of a fork" in str(status)
    assert status == 0 or status == 2 and found in err or is_own_error, out + err


def test_a_fork_starts_from_the_weights_of_a_llama(checkout, answers):
    assert [answers[call][0] for call in ("llama", "llama in hf")] == [0, 0]
    first = read_losses(checkout / "llama")[1]
    for run in FROM_LLAMA:
        assert [answers[call][0] for call in (f"check {run}", run)] == [0, 0], answers[run]
        assert read_losses(checkout / run) == read_losses(checkout / "llama from hf")
        assert read_losses(checkout / run)[1] < first
        listed = "start from initial weights: layers.*.gain.weight"
        assert (listed in answers[f"check {run}"][1]) == ("gain" in run)


# The slow walks take 20 s each. The slow walks use the same tables as the default walk.
SLOW_WALKS = [slow((name,)) for name in FORKS]


@pytest.mark.parametrize("names", [WHOLE_WALK, *SLOW_WALKS], ids=" and ".join)
def test_a_fork_trains_resumes_elsewhere_is_verified_generates_and_is_converted(
    checkout, names, request
):
    walked = (
        request.getfixturevalue("answers")
        if names == WHOLE_WALK
        else run_calls(checkout, list_walk(names))
    )
    assert [walked[call][0] for call in ("prepare", "train", "resume")] == [0, 0, 0], walked
    assert [*read_losses(checkout / describe_run(names))] == [1, 2, 3]
    status, out, err = walked["verify"]
    assert status == 0, out + err
    idle = json.loads(out)["did_not_act"]  # the plain loop has no code for these keys
    for key, forks in {
        "model.attention": {"an attention", "an inner attention", "slopes"},
        "training.loss": {"a loss", "a second prediction", "a teacher", "a value"},
    }.items():
        assert (key in idle) == bool(forks.intersection(names))
    if names not in (WHOLE_WALK, ("a teacher",)):
        status, out, err = walked["verify pp2"]
        assert status == 0, out + err
    for tool in ("generate", "convert"):
        status, out, err = walked[tool]
        refused = [REFUSED[name][tool] for name in names if tool in REFUSED.get(name, {})]
        assert status == (2 if refused else 0), f"{tool}: {out}{err}"
        assert all(key in out + err for key in refused)
