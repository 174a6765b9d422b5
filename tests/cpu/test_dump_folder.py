"""The dump folder belongs to one run at a time, and is emptied only if a run starts over."""

import errno
import fcntl
from pathlib import Path
from unittest.mock import patch

import pytest

from torchtitan_lite.checkpoint.format import CheckpointError
from torchtitan_lite.config.reader import dump_config_toml
from torchtitan_lite.config.schema import Config, with_value
from torchtitan_lite.dump_folder import list_earlier, open_dump_folder

FOLDERS = ("checkpoint", "tb", "traces", "memory_snapshot", "comm_traces")
CONFIG = dump_config_toml(Config())
OF_A_RUN = [
    "config.toml",
    "metrics.jsonl",
    "log.txt",
    "hang/restart-0/rank-00000.json",
    "tb/run/events.out.tfevents.1.host.2.0",
    "wandb_id",
    "traces/step-10/rank-0.json",
    "memory_snapshot/step-10/rank-0.pickle",
    "comm_traces/rank_0",
    "checkpoint/run_id",
    "checkpoint/step-5/manifest.json",
    "checkpoint/step-5/rank-00000.safetensors",
    "checkpoint/step-5-hf/config.json",
    "checkpoint/step-4.damaged/manifest.json",
    "checkpoint/step-6.tmp/rank-00000.safetensors",
]
OF_OTHERS = [
    "notes.txt",
    "elsewhere/step-5/manifest.json",
    "hang/letter.txt",
    *(f"{name}/{letter}" for name in FOLDERS for letter in ("letter.txt", "step-1/letter.txt")),
]


@pytest.fixture
def folder(tmp_path) -> Path:
    """What an earlier run has left, what is none of its business, and a checkpoint that is a link."""
    for name in (*OF_A_RUN, *OF_OTHERS):
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(CONFIG if name == "config.toml" else "of an earlier run")
    (tmp_path / "run" / "checkpoint" / "step-7").symlink_to(
        tmp_path / "run" / "elsewhere" / "step-5"
    )
    return tmp_path / "run"


def list_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_starts_over_deletes_what_a_run_leaves_and_nothing_else(folder):
    open_dump_folder(folder, Config(), starting_over=True).close()
    assert list_files(folder) == {"config.toml", "lock", *OF_OTHERS}


def test_a_run_that_goes_on_changes_nothing_but_its_config(folder):
    open_dump_folder(folder, Config(), starting_over=False).close()
    assert list_files(folder) == {"lock", *OF_A_RUN, *OF_OTHERS}
    contents = {name: (folder / name).read_text() for name in (*OF_A_RUN, *OF_OTHERS)}
    assert contents.pop("config.toml") == dump_config_toml(Config())
    assert set(contents.values()) == {"of an earlier run"}


def test_files_that_no_run_wrote_are_not_deleted(tmp_path):
    config = with_value(Config(), "job.dump_folder", str(tmp_path))
    (tmp_path / "log.txt").write_text("of an application")
    assert list_earlier(tmp_path, config) == []


def test_a_second_run_on_one_folder_stops_until_the_lock_of_the_first_is_closed(folder):
    first = open_dump_folder(folder, Config(), starting_over=False)
    before = list_files(folder)
    with pytest.raises(CheckpointError, match=str(folder)):
        open_dump_folder(folder, Config(), starting_over=True)
    assert list_files(folder) == before  # nothing of the first run is deleted
    first.close()
    open_dump_folder(folder, Config(), starting_over=True).close()


def test_a_file_system_without_locks_is_warned_of_and_used(folder, caplog):
    with patch.object(fcntl, "flock", side_effect=OSError(errno.ENOLCK, "No locks available")):
        open_dump_folder(folder, Config(), starting_over=False).close()
    assert str(folder) in caplog.text
