"""Only one run at a time uses a dump folder, and the folder is only emptied if a run starts over."""

import errno
import fcntl
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from checkpoints import limit_files
from folders import list_files
from marks import each_row

from torchtitan_lite.build import build_on_meta
from torchtitan_lite.checkpoint.format import CheckpointError
from torchtitan_lite.config.messages import Problems
from torchtitan_lite.config.model import resolve_model
from torchtitan_lite.config.reader import dump_config_toml, read_config
from torchtitan_lite.config.schema import Config, with_value
from torchtitan_lite.dump_folder import (
    check_files,
    name_snapshots,
    open_dump_folder,
)
from torchtitan_lite.tools.host_rules import check_snapshots, count_saved_bytes
from torchtitan_lite.tools.verify.reduction import override

LOCAL = "checkpoint.local_folder"
FOLDERS = ("checkpoint", "tb", "traces", "memory_snapshot", "comm_traces")
CONFIG = dump_config_toml(Config())
OF_A_RUN = """
config.toml metrics.jsonl log.txt hang/restart-0/rank-00000.json
tb/run/events.out.tfevents.1.host.2.0 wandb_id traces/step-10/rank-0.json
memory_snapshot/step-10/rank-0.pickle comm_traces/rank_0 checkpoint/run_id
checkpoint/step-5/manifest.json checkpoint/step-5/rank-00000.safetensors
checkpoint/step-5-hf/config.json checkpoint/step-4.damaged/manifest.json
checkpoint/step-6.tmp/rank-00000.safetensors
""".split()
OF_OTHERS = [
    "notes.txt",
    "elsewhere/step-5/manifest.json",
    "hang/letter.txt",
    *(f"{name}/{letter}" for name in FOLDERS for letter in ("letter.txt", "step-1/letter.txt")),
]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Make a dump folder with the files of an earlier run, files of the user, and a checkpoint that is a link."""
    for name in (*OF_A_RUN, *OF_OTHERS):
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(CONFIG if name == "config.toml" else "of an earlier run")
    (tmp_path / "run" / "checkpoint" / "step-7").symlink_to(
        tmp_path / "run" / "elsewhere" / "step-5"
    )
    return tmp_path / "run"


def in_folder(folder: Path, *, overwrite: bool = False) -> Config:
    return override(Config(), {"job.dump_folder": str(folder), "job.overwrite": overwrite})


def start(folder: Path, *, overwrite: bool = False, restarted: bool = False) -> None:
    """Start a run in this folder, and end it."""
    open_dump_folder(in_folder(folder, overwrite=overwrite), restarted=restarted).close()


def test_a_run_that_starts_over_deletes_what_a_run_leaves_and_its_config_never_deletes_the_run(
    folder,
):
    start(folder, overwrite=True)
    assert list_files(folder) == {"config.toml", "lock", *OF_OTHERS}
    written = read_config([f"--config={folder / 'config.toml'}"])
    assert not written.problems and not written.config.job.overwrite


def test_a_resumed_run_changes_only_its_config_and_hang_reports(folder):
    start(folder, restarted=True)
    assert list_files(folder) == {"lock", *OF_A_RUN, *OF_OTHERS}
    start(folder)
    kept = {*OF_A_RUN, *OF_OTHERS} - {"hang/restart-0/rank-00000.json"}
    assert list_files(folder) == {"lock", *kept}
    contents = {name: (folder / name).read_text() for name in kept}
    assert contents.pop("config.toml") == dump_config_toml(in_folder(folder))
    assert set(contents.values()) == {"of an earlier run"}


def test_files_that_no_run_wrote_are_not_deleted(tmp_path):
    (tmp_path / "log.txt").write_text("of an application")
    start(tmp_path, overwrite=True)
    assert list_files(tmp_path) == {"config.toml", "lock", "log.txt"}


NAMES = f"""
/data/run-1/a | /data/run/1-a
/data/run/1/a | /data/run-1-a
/a/run | /b/run
/{"x" * 250}/run | /{"x" * 251}/run
/{"x" * 254}y | /{"x" * 254}z
/ünï/ {"世" * 80} | /ünï/{"世" * 80}
"""


@each_row("one, another", NAMES)
def test_snapshots_of_two_runs_have_names_of_their_own_that_a_file_system_accepts(
    one, another, tmp_path
):
    folders = [name_snapshots(str(tmp_path), Path(path)) for path in (one, another)]
    for folder in folders:
        folder.mkdir()  # raises if the folder exists already, or its name is too long
    assert name_snapshots(str(tmp_path), Path(one)) in folders
    assert folders[0].name.startswith(Path(one).name[:20])


# steps | bytes of a snapshot that is replaced | key of the problem
SNAPSHOTS = f"""
1000 | 0 | {LOCAL}
1000 | 1 |
31 | 0 | {LOCAL}  # after steps 10, 20 and 30
30 | 0 |
10 | 0 |
"""


@each_row("steps, n_replaced, key", SNAPSHOTS)
def test_a_disk_without_room_for_three_snapshots_is_refused(
    steps, n_replaced, key, tmp_path, monkeypatch
):
    """Snapshots of 100 bytes go to a folder with 299 free bytes."""
    monkeypatch.chdir(tmp_path)
    old = name_snapshots("snapshots", Path("run")) / "an id" / "step-1" / "rank-00000.safetensors"
    old.parent.mkdir(parents=True)
    old.write_bytes(bytes(int(n_replaced)))
    keys = {LOCAL: "snapshots", "training.steps": int(steps)}
    config = override(in_folder(Path("run")), keys)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=299))
    problems = check_snapshots(config, 100)
    assert "".join(refused for refused, *_ in problems) == key


def test_a_snapshot_has_as_many_bytes_as_the_weights_and_the_optimizer_state():
    for name, bytes_per_parameter in (("AdamW", 12), ("SGD", 4)):
        config = with_value(Config(), "optimizer.name", name)
        model_args = resolve_model(config.model)
        n_parameters = sum(p.numel() for p in build_on_meta(config, model_args).parameters())
        assert count_saved_bytes(config, model_args) == bytes_per_parameter * n_parameters


# key | path | key of the problem
FOLDERS_OF_KEYS = f"""
{LOCAL} | file/snapshots | {LOCAL}
job.dump_folder | file/run | job.dump_folder
job.dump_folder | broken/run | job.dump_folder
training.cache_folder | file/cache | training.cache_folder
{LOCAL} | run/there | {LOCAL}
checkpoint.folder | there | checkpoint.folder
{LOCAL} | new |
"""


@each_row("key, path, refused", FOLDERS_OF_KEYS)
def test_a_folder_that_cannot_be_read_or_hold_files_is_refused(
    key, path, refused, tmp_path, monkeypatch
):
    """For root, os.access allows everything, so a stub denies read access to folders named `there`, and allows all
    other access."""
    monkeypatch.chdir(tmp_path)
    Path("run/there").mkdir(parents=True)
    Path("file").touch()
    Path("broken").symlink_to("nowhere")
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "there" or not mode & os.R_OK)
    keys = {"job.dump_folder": "run", "training.cache_folder": "cache", key: path}
    found = check_files(override(Config(), keys), False)
    assert "".join(key for key, _, _ in found) == refused


def test_a_second_run_in_the_same_folder_is_refused_until_the_first_run_releases_its_lock(folder):
    first = open_dump_folder(in_folder(folder), restarted=False)
    before = list_files(folder)
    with pytest.raises(CheckpointError, match=str(folder)):
        start(folder, overwrite=True)
    assert list_files(folder) == before  # nothing of the first run is deleted
    first.close()
    start(folder, overwrite=True)


def test_a_file_system_without_locks_causes_a_warning_and_is_used(folder, caplog):
    with patch.object(fcntl, "flock", side_effect=OSError(errno.ENOLCK, "No locks available")):
        start(folder)
    assert str(folder) in caplog.text


def test_a_full_disk_stops_the_start_and_keeps_the_earlier_config(folder, caplog):
    before = list_files(folder)
    with limit_files(100), pytest.raises(CheckpointError, match=f"{folder}.*too large"):
        start(folder)
    assert (folder / "config.toml").read_text() == CONFIG
    assert list_files(folder) == before | {"lock"}
    with limit_files(100):  # torchrun has restarted the run
        start(folder, overwrite=True, restarted=True)
    assert f"{folder / 'config.toml'} cannot be written" in caplog.text


# -- an earlier run in the folder

SAVED, IN_CK, NEVER = "saved", "saved in ck", "never saved"
ON = "--checkpoint.enable"
RESUME, REFUSED, ANEW = "resume", "refused", "anew"
# Files of the earlier run | arguments of this run | what happens | if refused: arguments that would resume the run,
# which the message must name.
# `saved` and `saved in ck` have a checkpoint; `killed` had none yet; `never saved` had checkpoint.enable = false.
# `lost`: config.toml is gone. `records`: the folder contains only metrics.jsonl.
EARLIER = f"""
nothing                |                                       | {ANEW}    |
nothing                | {ON}                                  | {ANEW}    |
saved                  | {ON}                                  | {RESUME}  |
saved                  | {ON} --metrics.save_tb_folder=events  | {RESUME}  |
saved                  | {ON} --checkpoint.load_only           | {RESUME}  |
saved                  |                                       | {REFUSED} | {ON}
saved                  | {ON} --checkpoint.folder=other        | {REFUSED} | --checkpoint.folder=checkpoint
saved                  | --checkpoint.folder=other             | {REFUSED} | {ON} --checkpoint.folder=checkpoint
saved in ck            | {ON}                                  | {REFUSED} | --checkpoint.folder=ck
saved in ck            |                                       | {REFUSED} | {ON} --checkpoint.folder=ck
saved in ck            | {ON} --checkpoint.load_only           | {REFUSED} | --checkpoint.folder=ck
saved in ck            | {ON} --checkpoint.load_step=4         | {REFUSED} | --checkpoint.folder=ck
saved in ck            | {ON} --checkpoint.folder=ck           | {RESUME}  |
saved in ck            | {ON} --job.overwrite                  | {ANEW}    |
never saved            | {ON}                                  | {REFUSED} |
never saved            |                                       | {REFUSED} |
never saved            | {ON} --checkpoint.folder=ck           | {REFUSED} |
never saved            | --job.overwrite                       | {ANEW}    |
killed                 | {ON}                                  | {ANEW}    |
killed                 | {ON} --checkpoint.folder=ck           | {ANEW}    |
killed                 |                                       | {REFUSED} |
saved, lost            | {ON}                                  | {RESUME}  |
saved, lost            |                                       | {REFUSED} | {ON}
records                | {ON}                                  | {ANEW}    |
records                |                                       | {REFUSED} |
"""


def write_earlier(folder: Path, left: str) -> None:
    """Write the files that an earlier run left."""
    if left == "nothing":
        return
    name = "ck" if left == IN_CK else "checkpoint"
    config = override(Config(), {"checkpoint.enable": left != NEVER, "checkpoint.folder": name})
    folder.mkdir()
    if "lost" not in left and left != "records":
        (folder / "config.toml").write_text(dump_config_toml(config))
    record = {"kind": "step", "step": 1, "loss": 8.0}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    if left.startswith(SAVED):
        checkpoint = folder / name / "step-4"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("of the earlier run")


def find_problems(folder: Path, args: list[str], restarted: bool = False) -> list:
    config = read_config([*args, f"--job.dump_folder={folder}"]).config
    config = with_value(config, "training.cache_folder", str(folder.parent))
    return Problems(config, rules=check_files(config, restarted))


@each_row("left, args, expected, named", EARLIER)
def test_an_earlier_run_is_resumed_or_refused_depending_on_its_files_and_the_remedies_work(
    tmp_path, left, args, expected, named
):
    folder = tmp_path / "run"
    args = ["--config=llama3_1b", "--checkpoint.no_enable", *args.split()]
    write_earlier(folder, left)
    problems = find_problems(folder, args)
    assert find_problems(folder, args, restarted=True) == []  # the files are its own
    assert len(problems) == (expected == REFUSED)
    if problems:
        (problem,) = problems
        assert problem.key == "job.dump_folder"
        flags = re.findall(r"--[\w.]+(?:=\w+)?", problem.remedy)
        ways = [named.split()] if named else []
        if "--checkpoint.load_only" not in args:
            ways.insert(0, ["--job.overwrite"])
        assert flags == sum(ways, [])
        for way in ways:
            assert find_problems(folder, args + way) == []
        assert find_problems(tmp_path / "another", args) == []


def test_job_overwrite_deletes_the_checkpoints_of_the_earlier_run_wherever_it_saved_them(tmp_path):
    write_earlier(tmp_path / "run", IN_CK)
    (tmp_path / "run" / "ck" / "letter.txt").write_text("not of a run")
    start(tmp_path / "run", overwrite=True)
    assert list_files(tmp_path / "run") == {"config.toml", "lock", "ck/letter.txt"}


def test_a_run_that_only_reads_needs_no_permission_to_write(tmp_path):
    write_earlier(tmp_path / "run", SAVED)
    args = ["--config=llama3_1b", ON, "--checkpoint.load_only"]
    with patch("os.access", lambda path, mode: Path(path) != tmp_path / "run"):
        assert not find_problems(tmp_path / "run", args)
