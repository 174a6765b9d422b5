"""Test a run that gets SIGINT or SIGTERM: the step after which it stops, what it saves, and how it ends."""

import itertools
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path
from unittest.mock import Mock

from folders import load_json
from marks import each_row
from programs import start_python
from test_orphans import list_processes
from warm_start import finish, launch, list_children, list_ranks, read_losses, read_until

from torchtitan_lite.checkpoint.format import find_steps
from torchtitan_lite.components import signals
from torchtitan_lite.components.endings import describe_newest
from torchtitan_lite.components.signals import COPIES_ARRIVE_WITHIN_S, Phase, StopFlag
from torchtitan_lite.config.messages import name_command
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.config.schema import ONE_SHOT, Config, get_value, with_value

AT_S = (0.0, COPIES_ARRIVE_WITHIN_S, COPIES_ARRIVE_WITHIN_S + 0.1)  # when SIGTERM arrives
ENDS_AT_S = {  # phase of the run -> when the process ends
    Phase.START: AT_S[0],
    Phase.STEPS: AT_S[2],  # earlier copies of the signal do not end the process
    Phase.FAILED: None,
}


@each_row("phase", ENDS_AT_S)
def test_the_effect_of_a_signal_depends_on_the_phase_of_the_run(monkeypatch, phase):
    request = StopFlag()
    request.follow(lambda: phase)
    monkeypatch.setattr(request, "end", Mock(side_effect=SystemExit))
    for now_s in AT_S:
        monkeypatch.setattr(signals.time, "monotonic", lambda now_s=now_s: now_s)
        try:
            request.note(signal.SIGTERM)
        except SystemExit:
            assert now_s == ENDS_AT_S[phase]
            return
        assert request.received == (0 if phase is Phase.FAILED else signal.SIGTERM)
    assert ENDS_AT_S[phase] is None


def test_a_signal_in_the_first_step_ends_the_process():
    """The process ends even if its main thread waits for a device in C code and never returns to Python."""
    program = "import ctypes, os; from torchtitan_lite.components.signals import StopFlag\n"
    program += "StopFlag().listen(); print(flush=True); ctypes.CDLL(None).read(os.pipe()[0], ctypes.c_buffer(1), 1)"
    process = start_python("-c", program)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.count("\n") == 1 and "SIGINT" in err


def test_a_rank_reports_only_its_first_ending_and_one_rank_of_a_host_reports_a_signal(
    tmp_path, monkeypatch
):
    said = []
    for rank in "011":
        file = tmp_path / rank / "error.json"
        file.parent.mkdir(exist_ok=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        said.append(signals.write_ending(143, f"stopped {len(said)} times before"))
    assert said == [True, False, False]
    for rank in (0, 1):
        ending = load_json(tmp_path / str(rank) / "error.json")
        assert (ending["status"], ending["message"]) == (143, f"stopped {rank} times before")


# arguments that act once | the config file | arguments that are added
ONCE = """
| |
--job.no_overwrite | |
--job.overwrite | |
--checkpoint.load-step 4 --job.overwrite=true | |
--checkpoint.exclude_from_loading=optimizer | |
| checkpoint.load_step = 4 | --checkpoint.load_step=-1
"""


@each_row("once, in_file, added", ONCE)
def test_the_printed_command_continues_the_run_from_its_last_step(
    tmp_path, monkeypatch, once, in_file, added
):
    monkeypatch.setenv("NGPU", "8")
    path = tmp_path / "run.toml"
    path.write_text(in_file)
    always = [f"--config={path}", "--checkpoint.enable"]
    args = [*always, *once.split(), "--training.steps", "9"]
    config = read_config(args).config
    line = describe_newest(Path("out/checkpoint/step-7"), config, args)
    resuming = [*always, "--training.steps", "9", *added.split()]
    command = f"{name_command('train')} {shlex.join(resuming)}"
    assert line.endswith(f"out/checkpoint/step-7; to continue: NGPU=8 {command}")
    again = read_config(resuming)
    assert not again.problems
    for key in ONE_SHOT:
        assert get_value(again.config, key) == get_value(Config(), key)
    assert describe_newest(None, config, args) == "nothing is saved"
    # Before the first save, the same command is printed, because it starts the same run again.
    newest = Path("out/checkpoint/step-7")
    line = describe_newest(newest, config, args, is_own=False)
    assert line.endswith(f"to continue: NGPU=8 {name_command('train')} {shlex.join(args)}")
    config = with_value(config, "checkpoint.load_only", True)
    assert describe_newest(newest, config, args) == "nothing is saved"


# ---------------------------------------------------------------- who gets which signal, and when, on two ranks

# The group and the launcher get the signal ten times in 0.2 s, because `timeout` and systemd send it repeatedly.
WHOM = ("group", "launcher", "one rank")
LONG = "--training.local_batch_size=4 --training.steps=5000 --validation.no_enable"
WHEN = {  # moment at which the signal arrives -> keys of the run
    "import": "",
    "first step": "--training.global_batch_size=2048",  # takes a second or more
    "step": "--parallelism.pipeline_parallel_degree=2",  # all stages stop after the same step
    "save": "--checkpoint.interval=1",
}
DEFAULT = [  # test_slurm.py tests a signal during a step, and test_report.py a signal to a pipeline
    ("group", signal.SIGINT, "import"),
    ("launcher", signal.SIGTERM, "save"),
]


def wait_for_moment(process: subprocess.Popen, when: str, whom: str, folder: Path) -> str:
    """Wait until the run is at the moment `when`. Return the output of the run so far."""
    if when == "import":
        output = read_until(process, "  files ")
        while not (list_ranks(process) if whom == "one rank" else list_children(process.pid)):
            time.sleep(0.001)
        return output
    output = read_until(process, "data: " if when == "first step" else "step +3/")
    while when == "save" and not list((folder / "checkpoint").glob("*.tmp")):
        time.sleep(0.001)
    return output


MOMENTS = itertools.product(WHOM, (signal.SIGTERM, signal.SIGINT), WHEN)


@each_row("whom, received, when", MOMENTS, fast=DEFAULT)
def test_a_signal_loses_no_step_however_often_it_arrives(letters, tmp_path, whom, received, when):
    folder = tmp_path / "run"
    keys = [*letters, *LONG.split(), *WHEN[when].split()]
    process = launch(folder, tmp_path, *keys, n_ranks=2, MAX_RESTARTS="9")
    output = wait_for_moment(process, when, whom, folder)
    if whom == "one rank":
        os.kill(list_ranks(process)[-1], received)
    else:
        for _ in range(10):
            (os.killpg if whom == "group" else os.kill)(process.pid, received)
            time.sleep(0.02)
    output += finish(process, status=128 + received)
    assert output.splitlines()[-1] == f"run_train.sh: stopped by {received.name}", output
    # if only one rank gets the signal in the first step, the other rank reports the lost peer with a traceback
    if (whom, when) != ("one rank", "first step"):
        assert "Traceback" not in output
    assert "All ranks start again" not in output
    assert list_processes(folder) == []
    steps = find_steps(folder / "checkpoint")
    if when in ("import", "first step"):
        assert steps == []
    else:
        assert steps[-1] == max(read_losses(folder)), "the last step that was made is saved"
        assert f"stopped by {received.name} after step {steps[-1]} of 5000" in output
        assert re.search(r"to continue: NGPU=2 \S+/run_train.sh ", output)
