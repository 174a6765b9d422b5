"""Runs `check` on a drawn config, and finds what it must never do: raise, take long, take much memory or a terminal."""

import io
import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from fuzz import Case

from torchtitan_lite.tools import check

MOST_CPU_S = 1.0  # of one check
LIMITS = {  # when a check that does not end is stopped, in seconds
    (signal.ITIMER_PROF, signal.SIGPROF): 10,  # of CPU time
    (signal.ITIMER_REAL, signal.SIGALRM): 120,  # a loaded machine takes long, one that waits for a pipe takes longer
}
MOST_LINES, MOST_CHARACTERS = 60, 8_000  # a screen of text
MOST_JSON_CHARACTERS = 500_000  # a sound layout lists every module


class Stopped(BaseException):
    """Raised in a check that takes too long."""


def stop(signum: int, frame: object) -> None:
    raise Stopped(signal.Signals(signum).name)


@contextmanager
def stopped_in_time() -> Iterator[None]:
    handlers = {number: signal.signal(number, stop) for _, number in LIMITS}
    for (timer, _), seconds in LIMITS.items():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer, number in LIMITS:
            signal.setitimer(timer, 0)
            signal.signal(number, handlers[number])


@contextmanager
def memory_limited(gib: int) -> Iterator[None]:
    """This process may take so much more memory than it has: who wants more gets a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + gib * 2**30, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@dataclass(frozen=True)
class Verdict:
    accepted: bool
    faults: list[str]  # what a check must not do


def judge(case: Case) -> Verdict:
    """Run `check` in this process, on the case's machine."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")  # as Python opens them
    environment = {name: value for name, value in os.environ.items() if name not in ("NGPU", "NNODES")}
    environment |= {"NGPU": case.n_ranks_per_host} if case.n_ranks_per_host is not None else {}
    faults: list[str] = []
    status: object = None
    started = time.process_time()
    with (
        mock.patch.object(check, "detect_machine", lambda: case.machine),
        mock.patch.dict(os.environ, environment, clear=True),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            with stopped_in_time():
                status = check.main(case.args)
        except SystemExit as error:  # argparse's own
            status = error.code
        except (Exception, Stopped) as error:
            faults.append(f"{type(error).__name__}: {str(error)[:200]}")
    cpu_s = time.process_time() - started
    if cpu_s > MOST_CPU_S:
        faults.append(f"{cpu_s:.1f} s of CPU time")
    if not faults and status not in (0, 2):
        faults.append(f"exit status {status!r}")
    printed = []
    for stream in (out, err):
        stream.flush()
        printed.append(stream.buffer.getvalue().decode())
    faults += find_ugly(*printed, as_json="--json" in case.args)
    return Verdict(status == 0, faults)


def find_ugly(out: str, err: str, *, as_json: bool) -> list[str]:
    """What a terminal should not be sent."""
    faults = []
    if control := {character for character in out + err if not (character.isprintable() or character == "\n")}:
        faults.append(f"control characters {sorted(control)}")
    shown = err if as_json else out + err
    if len(shown) > MOST_CHARACTERS or shown.count("\n") > MOST_LINES:
        faults.append(f"{len(shown)} characters in {shown.count(chr(10))} lines")
    if as_json and len(out) > MOST_JSON_CHARACTERS:
        faults.append(f"{len(out)} characters of JSON")
    if as_json and out.startswith("{"):
        try:
            json.loads(out, parse_constant=float.fromhex)  # NaN is no JSON
        except ValueError as error:
            faults.append(f"its JSON is none: {error}")
    return faults
