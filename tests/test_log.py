"""Log lines and the progress line: who says what, where, and that no escape code strays."""

import io
import logging
import sys

import pytest
from torch.distributed.tensor import _redistribute

from torchtitan_lite.components.log import ESCAPE_CODE, Progress, log_rank_on_error, paint, start_logging


class FakeClock:
    """Time passes only when the test says so."""

    def __init__(self):
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def logger():
    """The package's logger, put back afterwards as it was: other tests may listen to it."""
    package_logger = logging.getLogger("torchtitan_lite")
    handlers, level, propagate = list(package_logger.handlers), package_logger.level, package_logger.propagate
    yield package_logger
    for handler in list(package_logger.handlers):
        package_logger.removeHandler(handler)
        handler.close()
    package_logger.handlers, package_logger.propagate = handlers, propagate
    package_logger.setLevel(level)


# -- log lines


def test_rank_0_writes_info_to_stdout_and_appends_to_log_txt(logger, tmp_path, capsys):
    for text in ("first run", "second run"):
        start_logging(0, tmp_path)
        logging.getLogger("torchtitan_lite.data.dataset").info(text)
    out, err = capsys.readouterr()
    assert [line[8:] for line in out.splitlines()] == [" first run", " second run"]  # after 12:30:01
    assert err == ""
    log = (tmp_path / "log.txt").read_text()
    assert [line[19:] for line in log.splitlines()] == [" first run", " second run"]  # after 2026-11-20 12:30:01


def test_other_ranks_write_only_warnings_to_stderr_with_their_rank(logger, tmp_path, capsys):
    start_logging(3, tmp_path)
    logger.info("nobody reads this")
    logger.warning("disk is slow")
    with pytest.raises(OSError), log_rank_on_error(3, {"pp": 1, "tp": 0}):
        raise OSError("disk is gone")
    out, err = capsys.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert first[8:] == " WARNING rank 3: disk is slow"
    assert second[8:].startswith(" ERROR rank 3: rank 3 (pp 1, tp 0)") and "disk is gone" in second
    assert list(tmp_path.iterdir()) == []


def test_dtensors_hint_on_two_gathers_in_a_row_is_not_shown_and_other_warnings_of_torch_are(logger, monkeypatch):
    shown, of_torch = [], logging.getLogger(_redistribute.__name__)
    monkeypatch.setattr(
        of_torch, "handle", lambda record: shown.append(record.msg) if of_torch.filter(record) else None
    )
    monkeypatch.setattr(of_torch, "filters", [])
    for again in range(2):
        _redistribute._warned_flatten_issues.clear()
        hint = type("Mesh", (), {"mesh_dim_names": ("dp_shard", "tp")})(), (0, 1), (), (), 2, "all_gather"
        _redistribute._warn_flatten_optimization_not_possible(*hint, "no_flattened_mesh")
        of_torch.warning("memory is low")
        assert len(shown) == (3 if again else 2), "both, and after start_logging the second alone"
        start_logging(0, None)


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


# -- progress line


def test_progress_rewrites_one_line_of_a_terminal_estimates_the_end_and_a_log_line_erases_it(logger, monkeypatch):
    terminal, clock = Terminal(), FakeClock()
    monkeypatch.setattr(sys, "stdout", terminal)
    start_logging(0, None)
    progress = Progress(0, 100, stream=terminal, clock=clock)
    for step, step_time_s in ((51, 60.0), (52, 2.0), (53, 4.0)):  # resumed; the first step compiles
        progress.show(step, "loading")
        progress.show(step, "computing")
        clock.advance(step_time_s)
    progress.show(54, "computing")  # 47 steps are left, this one included, at (2 + 4) / 2 seconds
    logger.info("saved")
    first, second, *_, last, log_line = terminal.getvalue().split("\r\x1b[K")[1:]
    bar = "step  51/100 [##########..........]  50%  ETA ?  "
    assert (first, second) == (f"{bar}loading", f"{bar}computing")
    assert last == "step  54/100 [##########..........]  53%  ETA 0:02:21  computing"
    assert log_line[8:] == " saved\n"


@pytest.mark.parametrize("rank, stream", [(0, io.StringIO()), (1, Terminal())], ids=["pipe", "rank 1"])
def test_progress_writes_nothing_without_a_terminal_or_on_other_ranks(rank, stream):
    progress = Progress(rank, 10, stream=stream)
    progress.show(1, "loading")
    progress.clear()
    assert stream.getvalue() == ""


def test_progress_never_wraps_on_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal()
    Progress(0, 10, stream=terminal).show(1, "loading")
    assert len(ESCAPE_CODE.sub("", terminal.getvalue()).strip("\r")) == 19
