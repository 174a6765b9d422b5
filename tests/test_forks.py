"""A fork adds a row where README says, and every tool serves it, or refuses it in one line with key and remedy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forks import FORKS, Fork

SMALL = [
    "--config=debug",
    "--model.n_layers=2",
    "--model.dim=64",
    "--model.n_heads=4",
    "--model.n_kv_heads=2",
    "--model.head_dim=16",
    "--model.ffn_dim=96",
    "--training.seq_len=32",
    "--training.local_batch_size=2",
    "--training.global_batch_size=4",
    "--parallelism.tensor_parallel_degree=2",
]
REFUSED = {  # fork -> tool -> the key that it names
    "an attention": {"generate": "model.attention"},
    "a model": {"convert": "model.name"},
}
IN_PART = {"an optimizer": "optimizer.name", "a decay": "lr_scheduler.decay_type"}  # what `verify` cannot try

TOOLS = """
import contextlib, importlib, io, json, sys
from torchtitan_lite.config.command_lines import TOOLS

answers = {}
for tool, args in json.loads(sys.argv[1]).items():
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = importlib.import_module(f"torchtitan_lite.{TOOLS[tool][0]}").main(args)
        except SystemExit as end:
            status = end.code
    for stream in (out, err):
        stream.seek(0)
    answers[tool] = status, out.read(), err.read()
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """The folder of a fork, made once."""
    folders: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("fork")
            FORKS[name].write(folders[name])
        return folders[name]

    return of


def run_tools(folder: Path, **args_of: list[str]) -> dict[str, tuple[int, str, str]]:
    """Exit status, stdout and stderr of each tool of the fork in `folder`, called in one process."""
    command = [sys.executable, "-c", TOOLS, json.dumps(args_of)]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    answer = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])


def train(folder: Path, fork: Fork, n_steps: int, n_ranks: int) -> None:
    """./run_train.sh of the fork, whose checkpoints a later call resumes."""
    command = ["./run_train.sh", *SMALL, *fork.keys, f"--training.steps={n_steps}", "--job.dump_folder=run"]
    command += ["--checkpoint.enable", "--job.no_overwrite", "--validation.no_enable"]
    environment = {**os.environ, "PYTHON": sys.executable, "NGPU": str(n_ranks), "PYTHONPATH": ""}
    answer = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.parametrize("name", FORKS)
def test_a_fork_is_checked_planned_and_explained(make, name):
    folder, keys = make(name), [*SMALL, *FORKS[name].keys]
    check, planned = [*keys, "--ranks=4", "--json"], [*keys, "--gpus=4", "--json"]
    answers = run_tools(folder, check=check, plan=planned, explain=planned)
    assert {tool: status for tool, (status, _, _) in answers.items()} == {"check": 0, "plan": 0, "explain": 0}, answers
    block = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96 + 2 * 64 + (2 * 16 if name == "a model" else 0)
    assert json.loads(answers["check"][1])["parameters"] == 2 * block + 2 * 2304 * 64 + 64


def test_an_attention_that_context_parallel_cannot_compute_is_refused_there(make):
    keys = [*SMALL, *FORKS["an attention"].keys, "--parallelism.context_parallel_degree=2", "--ranks=4", "--json"]
    ((status, out, _),) = run_tools(make("an attention"), check=keys).values()
    assert status == 2
    assert [problem["key"] for problem in json.loads(out)["problems"]] == ["model.attention"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("an optimizer", "a model") else pytest.mark.slow) for name in FORKS],
)
def test_a_fork_trains_resumes_elsewhere_is_verified_generates_and_is_converted(make, name):
    folder, fork = make(name), FORKS[name]
    train(folder, fork, 2, n_ranks=4)
    train(folder, fork, 3, n_ranks=fork.resumed_on)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]

    verify = [*SMALL, *fork.keys, "--ranks=4", "--json"]
    generate = ["run/checkpoint/step-3", "--prompt=import", "--max-new-tokens=4", "--json"]
    answers = run_tools(folder, verify=verify, generate=generate, convert=["run/checkpoint/step-3", "hf"])
    status, out, err = answers.pop("verify")
    assert status == (3 if name in IN_PART else 0), out + err
    if name in IN_PART:
        assert IN_PART[name] in json.dumps(json.loads(out)["trials"])
    for tool, (status, out, err) in answers.items():
        key = REFUSED.get(name, {}).get(tool)
        assert status == (2 if key else 0), f"{tool}: {out}{err}"
        assert not key or key in out + err
