"""Test that a tool shows its progress on a terminal, and shows no progress if the output is not a terminal."""

import os
import pty
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from programs import run_python

from torchtitan_lite.tools import progress


def test_prepare_shows_its_progress_from_the_start_but_only_on_a_terminal(tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "a line of a text"}\n' * 20_000)
    command = f"-m torchtitan_lite prepare {texts} --tokenizer bytes --out {tmp_path}/out".split()
    shown, terminal = pty.openpty()
    streams = {"stdout": subprocess.DEVNULL, "stderr": terminal}
    process = subprocess.Popen([sys.executable, *command], **streams)
    os.close(terminal)
    line = os.read(shown, 100).decode()
    assert "0% of 0.58 MB" in line
    assert process.wait() == 0
    (tmp_path / "out").rename(tmp_path / "shown")
    done = run_python(*command)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_save_that_takes_long_shows_how_much_is_on_disk(tmp_path, monkeypatch, capsys):
    save = tmp_path / "step-8.tmp"
    save.mkdir()
    file = (save / ".tmp1").open("wb", buffering=0)

    def write_a_part() -> None:
        file.write(bytes(1_003_520))  # whole blocks
        os.fsync(file.fileno())

    # safetensors first extends the file to its whole length, then writes
    acts = [partial(file.truncate, 4_014_080), write_a_part]
    events = iter([*acts, partial(save.rename, tmp_path / "step-8")])
    clock = iter(range(100, 1000, 10))
    # only for this module: daemon threads of other tests sleep too
    time = SimpleNamespace(monotonic=partial(next, clock), sleep=lambda _: next(events)())
    monkeypatch.setattr(progress, "time", time)
    with pytest.raises(StopIteration):
        progress.watch_saves(tmp_path)
    lines = capsys.readouterr().err.split("\r\033[K")
    assert lines == [
        "",
        "saving: 0% of 4.01 MB\r",
        "saving: 25% of 4.01 MB, 0.05 MB/s, 0:01:00 left\r",
        "",
    ]
