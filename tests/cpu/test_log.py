"""Log lines: who says what, where, and that no escape code strays."""

import io
import logging
import sys

import pytest

from torchtitan_lite.components.log import paint, start_logging


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def logger():
    """The package's logger, put back afterwards as it was: other tests may listen to it."""
    package_logger = logging.getLogger("torchtitan_lite")
    handlers, level, propagate = (
        list(package_logger.handlers),
        package_logger.level,
        package_logger.propagate,
    )
    yield package_logger
    for handler in list(package_logger.handlers):
        package_logger.removeHandler(handler)
        handler.close()
    package_logger.handlers, package_logger.propagate = handlers, propagate
    package_logger.setLevel(level)


def test_rank_0_writes_info_to_stdout_and_appends_to_log_txt(logger, tmp_path, capsys):
    for text in ("first run", "second run"):
        start_logging(0, tmp_path)
        logging.getLogger("torchtitan_lite.data.dataset").info(text)
    out, err = capsys.readouterr()
    assert [line[8:] for line in out.splitlines()] == [
        " first run",
        " second run",
    ]  # after 12:30:01
    assert err == ""
    log = (tmp_path / "log.txt").read_text()
    assert [line[19:] for line in log.splitlines()] == [
        " first run",
        " second run",
    ]  # after 2026-11-20 12:30:01


def test_other_ranks_write_only_warnings_to_stderr_with_their_rank(logger, tmp_path, capsys):
    start_logging(3, tmp_path)
    logger.info("nobody reads this")
    logger.warning("disk is slow")
    out, err = capsys.readouterr()
    assert (out, err[8:]) == ("", " WARNING rank 3: disk is slow\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "stream, allowed, colored",
    [(Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False)],
    ids=["terminal", "terminal without colour", "pipe"],
)
def test_only_a_terminal_that_wants_it_gets_colour_and_log_txt_never(
    logger, tmp_path, monkeypatch, stream, allowed, colored
):
    monkeypatch.setattr(sys, "stdout", stream)
    start_logging(0, tmp_path, color=allowed)
    logger.warning(f"{paint('loss 6.1', 'green')} fell")
    assert ("\x1b[32mloss 6.1\x1b[0m fell" in stream.getvalue()) is colored
    assert ("\x1b[" in stream.getvalue().replace("\x1b[K", "")) is colored
    log = (tmp_path / "log.txt").read_text()
    assert log.endswith("WARNING loss 6.1 fell\n") and "\x1b" not in log
