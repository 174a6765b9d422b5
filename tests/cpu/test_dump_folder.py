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
from marks import read_lines

from torchtitan_lite.build import build_on_meta
from torchtitan_lite.checkpoint.format import CheckpointError
from torchtitan_lite.config.model import resolve_model
from torchtitan_lite.config.reader import dump_config_toml, read_config
from torchtitan_lite.config.schema import Config, with_value
from torchtitan_lite.dump_folder import (
    check_files,
    name_snapshots,
    open_dump_folder,
)
from torchtitan_lite.extensions.overwrite import list_earlier
from torchtitan_lite.tools.host_rules import check_snapshots, count_saved_bytes
from torchtitan_lite.tools.verify.reduction import override

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


def list_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_starts_over_deletes_what_a_run_leaves_and_nothing_else(folder):
    open_dump_folder(in_folder(folder, overwrite=True), restarted=False).close()
    assert list_files(folder) == {"config.toml", "lock", *OF_OTHERS}


def test_a_run_that_goes_on_changes_nothing_but_its_config_and_hang_reports(folder):
    open_dump_folder(in_folder(folder), restarted=True).close()
    assert list_files(folder) == {"lock", *OF_A_RUN, *OF_OTHERS}
    open_dump_folder(in_folder(folder), restarted=False).close()
    kept = {*OF_A_RUN, *OF_OTHERS} - {"hang/restart-0/rank-00000.json"}
    assert list_files(folder) == {"lock", *kept}
    contents = {name: (folder / name).read_text() for name in kept}
    assert contents.pop("config.toml") == dump_config_toml(in_folder(folder))
    assert set(contents.values()) == {"of an earlier run"}


def test_files_that_no_run_wrote_are_not_deleted(tmp_path):
    config = in_folder(tmp_path)
    (tmp_path / "log.txt").write_text("of an application")
    assert list_earlier(tmp_path, config) == []


@pytest.mark.parametrize(
    "one, another",
    [
        ("/data/run-1/a", "/data/run/1-a"),
        ("/data/run/1/a", "/data/run-1-a"),
        ("/a/run", "/b/run"),
        (f"/{'x' * 250}/run", f"/{'x' * 251}/run"),
        (f"/{'x' * 254}y", f"/{'x' * 254}z"),
        ("/ünï/ " + "世" * 80, "/ünï/" + "世" * 80),
    ],
)
def test_snapshots_of_two_runs_have_names_of_their_own_that_a_file_system_accepts(
    one, another, tmp_path
):
    folders = [name_snapshots(str(tmp_path), Path(path)) for path in (one, another)]
    for folder in folders:
        folder.mkdir()  # raises if the folder exists already, or its name is too long
    assert name_snapshots(str(tmp_path), Path(one)) in folders
    assert folders[0].name.startswith(Path(one).name[:20])


def find_problem(*, steps: int = 1000, replaced_bytes: int = 0) -> str:
    """Return the key of the problem that a run has if snapshots of 100 bytes go to a folder with 299 free bytes."""
    folder = Path("snapshots")
    old = name_snapshots(str(folder), Path("run")) / "an id" / "step-1" / "rank-00000.safetensors"
    old.parent.mkdir(parents=True)
    old.write_bytes(bytes(replaced_bytes))
    keys = {"checkpoint.local_folder": str(folder), "training.steps": steps}
    config = override(in_folder(Path("run")), keys)
    with patch.object(shutil, "disk_usage", return_value=SimpleNamespace(free=299)):
        return "".join(problem.key for problem in check_snapshots(config, 100))


@pytest.mark.parametrize(
    "options, key",
    [
        ({}, "checkpoint.local_folder"),
        ({"replaced_bytes": 1}, ""),
        ({"steps": 31}, "checkpoint.local_folder"),  # after steps 10, 20 and 30
        ({"steps": 30}, ""),
        ({"steps": 10}, ""),
    ],
)
def test_a_disk_without_room_for_three_snapshots_is_refused(options, key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_problem(**options) == key


def test_a_snapshot_has_the_bytes_of_the_weights_and_the_optimizer_state():
    for name, bytes_per_parameter in (("AdamW", 12), ("SGD", 4)):
        config = with_value(Config(), "optimizer.name", name)
        model_args = resolve_model(config.model)
        n_parameters = sum(p.numel() for p in build_on_meta(config, model_args).parameters())
        assert count_saved_bytes(config, model_args) == bytes_per_parameter * n_parameters


def test_a_folder_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    """Root can read every folder, so a stub of os.access returns the result for a different user."""
    (tmp_path / "there").mkdir()
    can_write = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: can_write(path, mode) and not mode & os.R_OK
    )
    for name, key in (("there", "checkpoint.local_folder"), ("new", "")):
        keys = {"checkpoint.local_folder": str(tmp_path / name)}
        config = override(Config(), keys | {"training.cache_folder": str(tmp_path / "cache")})
        assert "".join(problem.key for problem in check_files(config, False)) == key


@pytest.mark.parametrize(
    "key", ["checkpoint.local_folder", "job.dump_folder", "training.cache_folder"]
)
def test_a_folder_where_no_file_can_be_created_is_refused(tmp_path, key):
    """The folder is refused even if the user is root, for whom os.access is always true."""
    keys = dict.fromkeys(("job.dump_folder", "training.cache_folder"), str(tmp_path))
    config = override(Config(), keys | {key: "/proc/snapshots"})
    assert [problem.key for problem in check_files(config, False)] == [key]


def test_a_second_run_on_one_folder_stops_until_the_lock_of_the_first_is_closed(folder):
    first = open_dump_folder(in_folder(folder), restarted=False)
    before = list_files(folder)
    with pytest.raises(CheckpointError, match=str(folder)):
        open_dump_folder(in_folder(folder, overwrite=True), restarted=False)
    assert list_files(folder) == before  # nothing of the first run is deleted
    first.close()
    open_dump_folder(in_folder(folder, overwrite=True), restarted=False).close()


def test_a_file_system_without_locks_is_warned_of_and_used(folder, caplog):
    with patch.object(fcntl, "flock", side_effect=OSError(errno.ENOLCK, "No locks available")):
        open_dump_folder(in_folder(folder), restarted=False).close()
    assert str(folder) in caplog.text


def test_a_full_disk_stops_the_start_with_a_sentence_and_the_earlier_config_stays(folder, caplog):
    before = list_files(folder)
    with limit_files(100), pytest.raises(CheckpointError, match=f"{folder}.*too large"):
        open_dump_folder(in_folder(folder), restarted=False)
    assert (folder / "config.toml").read_text() == CONFIG
    assert list_files(folder) == before | {"lock"}
    with limit_files(100):  # torchrun has restarted the run
        open_dump_folder(in_folder(folder, overwrite=True), restarted=True).close()
    assert f"{folder / 'config.toml'} cannot be written" in caplog.text


def test_training_from_the_config_of_a_run_never_deletes_the_run(tmp_path):
    open_dump_folder(in_folder(tmp_path, overwrite=True), restarted=False).close()
    written = read_config([f"--config={tmp_path / 'config.toml'}"])
    assert not written.problems and not written.config.job.overwrite


# -- an earlier run in the folder

SAVED, IN_CK, NEVER = "saved", "saved in ck", "never saved"
ON = "--checkpoint.enable"
RESUME, REFUSED, ANEW = "resume", "refused", "anew"
# Files of the earlier run | arguments of this run | what happens | if refused: arguments that would resume the run,
# which the message must name.
# `saved` and `saved in ck` have a checkpoint; `killed` had none yet; `never saved` had checkpoint.enable = false.
# `lost`: config.toml is gone. `records`: nothing is left but metrics.jsonl.
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
    return check_files(config, restarted)


@pytest.mark.parametrize("left, args, expected, named", read_lines(EARLIER))
def test_an_earlier_run_is_resumed_or_refused_by_what_it_wrote_and_the_remedies_work(
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
    open_dump_folder(in_folder(tmp_path / "run", overwrite=True), restarted=False).close()
    assert list_files(tmp_path / "run") == {"config.toml", "lock", "ck/letter.txt"}


def test_a_run_that_only_reads_needs_no_permission_to_write(tmp_path):
    write_earlier(tmp_path / "run", SAVED)
    (tmp_path / "file").write_text("no folder can be created inside this folder")
    args = ["--config=llama3_1b", ON, "--checkpoint.load_only"]
    assert not find_problems(tmp_path / "run", args)
    with patch("os.access", lambda path, mode: Path(path) != tmp_path / "run"):
        assert not find_problems(tmp_path / "run", args)
