"""Print the path of a Python that has the required packages: `python3 -m torchtitan_lite.tools.environment [EXTRA]`.

    if this Python has the packages in pyproject.toml    this Python; missing packages of EXTRA are installed into it
    otherwise                                            .venv/bin/python; .venv is created if it does not exist

run_train.sh and tests/run.sh run this program first; `python3 -m torchtitan_lite` calls continue_with_packages(). If
the running Python lacks the packages, this function runs the same command again with .venv's Python, which installs the
packages. Progress is printed to stderr. Exit status: 0, 1 with the reason, or 128 + the number of a signal.
"""

import fcntl
import importlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from typing import NoReturn

from torchtitan_lite import IS_INSTALLED, REPOSITORY
from torchtitan_lite.components.signals import describe_signal, handle_signals
from torchtitan_lite.faults.processes import end_with_parent
from torchtitan_lite.tools.detect import (
    OLDER_INDEX,
    PYPI_CUDA,
    detect_machine,
    explain_misfit,
)

VENV = REPOSITORY / ".venv"
PYTHON = str(VENV / "bin" / "python")
SIZE = """The CUDA build of torch takes about 5 GB and ten minutes. For the CPU build, which takes 1 GB,
set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"""


def continue_with_packages(extras: list[str] | None = None) -> None:
    """Make sure that the packages are installed. If none is missing, return.

    If all missing packages belong to `extras`, or if this process runs .venv's Python, install the missing packages.
    Otherwise create .venv, and replace this process by the same command with .venv's Python.
    """
    names = ["dependencies", *(extras or [])]
    missing = list_missing(names)
    if not missing:
        return
    if IS_INSTALLED:
        sys.exit(f"{sys.executable} lacks packages. Install them there: {shlex.join(missing)}")
    try:
        with open(REPOSITORY / ".venv.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits for the first one
            if list_missing(names[:1]) and sys.executable != PYTHON:
                if not VENV.exists():
                    create_venv()
                os.execv(PYTHON, [PYTHON, *sys.orig_argv[1:]])  # releases the lock
            # another process may have installed the packages while this process waited for the lock
            if missing := list_missing(names):
                install(missing)
    except OSError as error:  # for example, the folder is read-only
        sys.exit(
            f"{VENV} cannot be used: {error}. Delete it, or set PYTHON to a Python that has the packages."
        )


def list_missing(names: list[str]) -> list[str]:
    """Return the requirements in these arrays of pyproject.toml that this Python does not satisfy."""
    return [text for name in names for text in read_requirements(name) if not is_met(text)]


def read_requirements(name: str) -> list[str]:
    """Return the strings in `NAME = [...]` of pyproject.toml. Python 3.10 has no TOML parser."""
    pyproject = (REPOSITORY / "pyproject.toml").read_text()
    array = re.search(rf"^{name} = \[\n(.*?)^\]", pyproject, re.MULTILINE | re.DOTALL)
    return re.findall(r"""^\s*(?:"|\')(.*?)(?:"|\'),""", array[1], re.MULTILINE)


def is_met(text: str) -> bool:
    """Return whether this Python satisfies a requirement, or the requirement does not apply to this Python."""
    try:  # tensorboard depends on packaging, so a Python without packaging also lacks tensorboard
        packaging = importlib.import_module("packaging.requirements")
        versions = importlib.import_module("packaging.version")
        requirement = packaging.Requirement(text)
        if requirement.marker and not requirement.marker.evaluate():
            return True
        version = versions.Version(metadata.version(requirement.name))
    except ImportError:  # also metadata.PackageNotFoundError
        return False
    # treat 2.13.0+cpu and NVIDIA's 2.13.0a0+nv26 as 2.13.0
    return requirement.specifier.contains(version.base_version)


def create_venv() -> None:
    """Create .venv. Exits with the reason on failure."""
    command = [sys.executable, "-m", "venv", str(VENV)]
    torch = [text for text in read_requirements("dependencies") if text.startswith("torch>")]
    if any(map(is_met, torch)):
        # The torch of this Python fits the machine's GPUs, so .venv uses this Python's packages too.
        command.append("--system-site-packages")
    try:
        run_command(command, "On Debian and Ubuntu: apt install python3-venv")
    except BaseException:
        shutil.rmtree(VENV, ignore_errors=True)  # an incomplete .venv may lack pip
        raise


def install(requirements: list[str]) -> None:
    """Install the requirements with pip in the tested versions. Exits with the reason on failure."""
    pip = [sys.executable, "-m", "pip"]
    packages = shlex.join(requirements)
    gets_torch = any(text.startswith("torch>") for text in requirements)
    chooses_index = any(map(os.environ.get, ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")))
    if gets_torch and not chooses_index:
        again = f"set PIP_EXTRA_INDEX_URL={OLDER_INDEX} and start again"
        misfit = explain_misfit(detect_machine(), PYPI_CUDA, again)
        if misfit:
            sys.exit(f"Not installing torch: {'. '.join(misfit)}.")
    print(f"Installing once, with {' '.join(pip)}: {packages}.", file=sys.stderr, flush=True)
    if gets_torch:
        print(SIZE, file=sys.stderr, flush=True)
    tested = ["--disable-pip-version-check", "-c", str(REPOSITORY / "constraints.txt")]
    remedy = f"To use versions other than the tested ones, run: {' '.join(pip)} install {packages}"
    run_command([*pip, "install", *tested, *requirements], remedy)


def run_command(command: list[str], remedy: str) -> None:
    """Run a command in a new session. If a signal ends this process, all processes of the session are killed."""
    handle_signals(stop)
    with subprocess.Popen(command, stdout=sys.stderr, start_new_session=True) as process:
        try:
            status = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # also ends the processes that pip has started
            raise
    if status != 0:
        said = f"`{' '.join(command[:4])}` failed, see its last lines above"
        sys.exit(f"{said}. {remedy}. The next start tries again.")


def stop(number: int, frame: object) -> NoReturn:
    """Exit with status 128 + `number`, and ignore further signals of this kind."""
    signal.signal(number, signal.SIG_IGN)
    status = 128 + number
    print(f"{describe_signal(status)}; the next start tries again", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    end_with_parent(signal.SIGTERM)  # bash does not forward a signal to a process that it waits for
    continue_with_packages(sys.argv[1:])
    with suppress(BrokenPipeError):  # bash has already ended
        os.write(1, f"{sys.executable}\n".encode())
