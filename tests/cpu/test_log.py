"""Log lines: who says what, and where."""

import logging

import pytest

from torchtitan_lite.components.log import IN_FILE, start_logging


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


def test_a_line_that_the_launcher_shows_is_only_in_log_txt(logger, tmp_path, capsys):
    for rank in (0, 1):
        start_logging(rank, tmp_path)
        logger.log(IN_FILE, "seq_len is 512")
    assert capsys.readouterr() == ("", "")
    assert (tmp_path / "log.txt").read_text().count("seq_len is 512") == 1


def test_other_ranks_write_only_warnings_to_stderr_with_their_rank(logger, tmp_path, capsys):
    start_logging(3, tmp_path)
    logger.info("nobody reads this")
    logger.warning("disk is slow")
    out, err = capsys.readouterr()
    assert (out, err[8:]) == ("", " WARNING rank 3: disk is slow\n")
    assert list(tmp_path.iterdir()) == []
