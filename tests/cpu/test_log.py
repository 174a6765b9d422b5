"""Test which rank writes which log lines to the console and to the file."""

import logging
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from marks import each_row

from torchtitan_lite.components.log import IN_FILE, start_logging


@pytest.fixture
def logger(monkeypatch):
    """Provide the package's logger, and restore its handlers and level afterwards, for other tests."""
    package_logger = logging.getLogger("torchtitan_lite")
    level = package_logger.level
    monkeypatch.setattr(package_logger, "handlers", [])
    monkeypatch.setattr(package_logger, "propagate", package_logger.propagate)
    yield package_logger
    for handler in package_logger.handlers:
        with suppress(OSError):  # closing flushes text that is still in the buffer
            handler.close()
    package_logger.setLevel(level)


def log_three_lines(logger: logging.Logger, folder: Path) -> None:
    start_logging(0, folder)
    for number in range(3):
        logger.info(f"line {number}")


def test_rank_0_writes_to_stdout_and_log_txt_and_others_only_warnings_to_stderr(
    logger, tmp_path, capsys
):
    for start in ("first", "second"):
        start_logging(0, tmp_path)
        logging.getLogger("torchtitan_lite.data.dataset").info(f"{start} run")
        logger.log(IN_FILE, "the launcher shows this")
    start_logging(3, None)
    logger.info("nobody reads this")
    logger.warning("disk is slow")
    out, err = capsys.readouterr()
    assert [line[9:] for line in out.splitlines()] == ["first run", "second run"]
    assert err[9:] == "WARNING rank 3: disk is slow\n"
    log = (tmp_path / "log.txt").read_text()  # lines begin with 2026-11-20 12:30:01
    shown = "the launcher shows this"
    assert [line[20:] for line in log.splitlines()] == ["first run", shown, "second run", shown]


# -- a disk that is full


@each_row("kind", ["full", "folder"])
def test_a_log_txt_that_cannot_be_written_causes_one_line_and_the_console_continues(
    logger, tmp_path, capsys, kind
):
    path = tmp_path / "log.txt"
    if kind == "full":
        path.symlink_to("/dev/full")
    else:
        path.mkdir()
    log_three_lines(logger, tmp_path)
    out, err = capsys.readouterr()
    lines = (out + err).splitlines()
    assert [line[9:] for line in lines if "line" in line] == ["line 0", "line 1", "line 2"]
    (said,) = [line for line in lines if str(path) in line]
    assert "[Errno" in said
    assert len(lines) == 4


def test_a_console_that_cannot_be_written_causes_one_line_and_log_txt_continues(
    logger, tmp_path, capsys, monkeypatch
):
    with suppress(OSError), Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        log_three_lines(logger, tmp_path)
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "[Errno 28]" in err
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 3
