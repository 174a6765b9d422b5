"""Print the path of a Python that has the required packages: `python3 -m torchtitan_lite.tools.environment [EXTRA]`.

    if this Python has the packages in pyproject.toml    this Python; missing packages of EXTRA are installed into it
    otherwise                                            .venv/bin/python; .venv is created if it does not exist

Packages are installed in the versions of constraints.txt. run_train.sh and tests/run.sh run this file first, and
`python3 -m torchtitan_lite` calls continue_with_packages(). Progress is printed to stderr. The exit status is 0, 1 for
an error, or 128 + the number of a signal that stopped it. If the first argument is --missing, print the packages that
this Python lacks.
"""

import fcntl
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
from torchtitan_lite.faults.processes import end_with_parent
from torchtitan_lite.tools.detect import (
    OLDER_INDEX,
    PYPI_CUDA,
    detect_machine,
    explain_misfit,
)

try:  # tensorboard depends on packaging, so a Python without packaging also lacks tensorboard
    from packaging.requirements import Requirement
    from packaging.version import Version
except ImportError:
    Requirement = Version = None

VENV = REPOSITORY / ".venv"
SIZE = """The CUDA build of torch takes about 5 GB and ten minutes. The CPU build takes 1 GB:
set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"""


def continue_with_packages() -> None:
    """If this Python lacks packages, replace this process: run the same command in a Python that has them."""
    python = find_python([])
    if python != sys.executable:
        os.execv(python, [python, *sys.orig_argv[1:]])


def find_python(extras: list[str]) -> str:
    """Return the path of a Python that has the packages. Create .venv if no Python has them."""
    names = ["dependencies", *extras]
    missing = list_missing(names)
    if not missing:
        return sys.executable
    if IS_INSTALLED:
        sys.exit(f"{sys.executable} lacks packages. Install them there: {shlex.join(missing)}")
    python = sys.executable
    try:
        with open(REPOSITORY / ".venv.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits for the first one
            if list_missing(names[:1]):
                python = str(VENV / "bin" / "python")
                if not VENV.exists():
                    create_venv()
                ask = [python, "-m", "torchtitan_lite.tools.environment", "--missing", *names]
                missing = subprocess.check_output(ask, cwd=REPOSITORY, text=True).splitlines()
            if missing:
                install(python, missing)
    except (OSError, subprocess.CalledProcessError) as error:  # such as a read-only folder
        remedy = "Delete it, or set PYTHON to a Python that has the packages"
        sys.exit(f"{VENV} cannot be used: {error}. {remedy}.")
    return python


def list_missing(names: list[str]) -> list[str]:
    """Return the requirements of these arrays of pyproject.toml that this Python does not meet."""
    requirements = []
    for name in names:
        requirements += read_requirements(name)
    return [text for text in requirements if not is_met(text)]


def read_requirements(name: str) -> list[str]:
    """Return the strings in `NAME = [...]` of pyproject.toml. Python 3.10 has no TOML parser."""
    pyproject = (REPOSITORY / "pyproject.toml").read_text()
    array = re.search(rf"^{name} = \[\n(.*?)^\]", pyproject, re.MULTILINE | re.DOTALL)
    return re.findall(r"""^\s*(?:"|\')(.*?)(?:"|\'),""", array[1], re.MULTILINE)


def is_met(text: str) -> bool:
    """Return whether this Python has a package in the required version, or does not need it."""
    if Requirement is None:
        return False
    requirement = Requirement(text)
    if requirement.marker and not requirement.marker.evaluate():
        return True
    try:
        version = Version(metadata.version(requirement.name))
        # 2.13.0+cpu and NVIDIA's 2.13.0a0+nv26 count as 2.13.0
        return requirement.specifier.contains(version.base_version)
    except metadata.PackageNotFoundError:
        return False


def create_venv() -> None:
    """Create .venv. Exits with the reason on failure."""
    command = [sys.executable, "-m", "venv", str(VENV)]
    torch = [text for text in read_requirements("dependencies") if text.startswith("torch>")]
    if any(map(is_met, torch)):
        # This Python has a torch that fits the machine's GPUs, so .venv uses this Python's packages too.
        command.append("--system-site-packages")
    try:
        run(command, "On Debian and Ubuntu: apt install python3-venv")
    except BaseException:
        shutil.rmtree(VENV, ignore_errors=True)  # it may lack pip
        raise


def install(python: str, requirements: list[str]) -> None:
    """Install the requirements with pip, in the versions of constraints.txt. Exits with the reason on failure."""
    packages = shlex.join(requirements)
    gets_torch = any(text.startswith("torch>") for text in requirements)
    chooses_index = any(map(os.environ.get, ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")))
    if gets_torch and not chooses_index:
        again = f"set PIP_EXTRA_INDEX_URL={OLDER_INDEX} and start again"
        misfit = explain_misfit(detect_machine(), PYPI_CUDA, again)
        if misfit:
            sys.exit(f"Not installing torch: {'. '.join(misfit)}.")
    print(f"Installing once, with {python} -m pip: {packages}.", file=sys.stderr, flush=True)
    if gets_torch:
        print(SIZE, file=sys.stderr, flush=True)
    command = [python, "-m", "pip", "install", "--disable-pip-version-check"]
    remedy = f"Other allowed versions will do: {python} -m pip install {packages}"
    run([*command, "-c", str(REPOSITORY / "constraints.txt"), *requirements], remedy)


def run(command: list[str], remedy: str) -> None:
    """Run a command in a new session. If a signal ends this process, all processes of the session are killed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, stop)
    with subprocess.Popen(command, stdout=sys.stderr, start_new_session=True) as process:
        try:
            status = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # also the processes that pip has started
            raise
    if status != 0:
        said = f"`{' '.join(command[:4])}` failed, see its last lines above"
        sys.exit(f"{said}. {remedy}. The next start tries again.")


def stop(number: int, frame: object) -> NoReturn:
    """Exit with status 128 + `number`, and ignore further signals of this kind."""
    signal.signal(number, signal.SIG_IGN)
    name = signal.Signals(number).name
    print(f"stopped by {name}; the next start tries again", file=sys.stderr)
    sys.exit(128 + number)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--missing"]:
        for requirement in list_missing(sys.argv[2:]):
            print(requirement)
        sys.exit()
    end_with_parent(signal.SIGTERM)  # bash does not forward a signal to a process that it waits for
    with suppress(BrokenPipeError):  # bash has ended already
        os.write(1, f"{find_python(sys.argv[1:])}\n".encode())
