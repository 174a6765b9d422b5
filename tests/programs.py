"""Start Python programs that use the package, and read their output."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest

from torchtitan_lite import REPOSITORY

PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def start_python(*args: object, folder: Path = REPOSITORY, **variables: str) -> subprocess.Popen:
    """Start Python in a folder. `variables`: environment variables that are added."""
    command = [sys.executable, *map(str, args)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)} | variables
    return subprocess.Popen(command, cwd=folder, env=environment, **PIPES)


def run_python(*args: object, **options) -> subprocess.CompletedProcess:
    """Run Python to its end. `options`: as for start_python."""
    process = start_python(*args, **options)
    out, err = process.communicate(timeout=900)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def find_port() -> str:
    """Return a port of this host that no program uses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


class Stubs:
    """A folder of stub programs, which replace real programs of the same names. A stub appends a line to `calls_file`
    for each call."""

    def __init__(self, root: Path, calls_file: Path):
        self.root = root
        self.calls_file = calls_file
        calls_file.touch()

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)

    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines()


needs_browser = pytest.mark.skipif(not which("chromium"), reason="chromium is not installed")


def browse(page: Path, *options: str) -> subprocess.CompletedProcess:
    """Open a page in a browser. The output is the page after its scripts, the errors are the browser's log."""
    command = "chromium --headless --no-sandbox --enable-logging=stderr --virtual-time-budget=4000"
    command = [*command.split(), "--dump-dom", *options, str(page)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)
