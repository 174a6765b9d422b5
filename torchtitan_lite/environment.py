"""`python3 -m torchtitan_lite.environment [--extra test]` prints the path of a Python that has the packages.

The packages and their bounds are in pyproject.toml:

    this Python has them                           -> this Python
    .venv at the root of the repository has them   -> .venv/bin/python
    otherwise                                      -> .venv is made, or pip installs what it lacks, once;
                                                      refused where pip installed this package

run_train.sh and tests/run.sh run it first; `python -m torchtitan_lite` and train.py call continue_with_packages().
pip does the work, with the tested versions of constraints.txt. Progress goes to stderr. Exit status: 0, or 1 with the
reason.
"""

import argparse
import fcntl
import os
import re
import subprocess
import sys
from importlib import metadata

from torchtitan_lite import IS_INSTALLED, REPOSITORY

try:  # tensorboard needs packaging, so that a Python without it lacks packages
    from packaging.requirements import Requirement
    from packaging.version import Version
except ImportError:
    Requirement = Version = None

VENV = REPOSITORY / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
# Locked while .venv is set up, and contains UNFINISHED until that is done, so that the next start notices if this one
# was killed. A .venv without this file is trusted, for instance one that was made by hand.
LOCK = REPOSITORY / ".venv.lock"
UNFINISHED = "unfinished"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extra", action="append", default=[], help="the packages of this extra too")
    parser.add_argument("--missing", action="store_true", help="only list what this Python lacks")
    options = parser.parse_args()
    for line in list_missing(options.extra) if options.missing else [find_python(options.extra)]:
        print(line)


def continue_with_packages() -> None:
    """Replace this process by the same command in a Python that has the packages. Return if this one has them."""
    python = find_python([])
    if python != sys.executable:
        os.execv(python, [python, *sys.orig_argv[1:]])


def find_python(extras: list[str]) -> str:
    """Return the path of a Python that has the packages; set up .venv if there is none."""
    missing = list_missing(extras)
    if not missing:
        return sys.executable
    if IS_INSTALLED:
        sys.exit(f"{sys.executable} lacks {', '.join(missing)}: install them where you installed torchtitan_lite.")
    if is_unfinished() or list_missing_in_venv(extras):
        LOCK.touch()
        with LOCK.open(encoding="utf-8") as lock:
            wait_for(lock)
            set_up(extras)
    return str(VENV_PYTHON)


def list_missing(extras: list[str]) -> list[str]:
    """Return the requirements of pyproject.toml that this Python does not meet."""
    return [text for text in read_requirements(extras) if not is_met(text)]


def read_requirements(extras: list[str]) -> list[str]:
    """Return the strings of `dependencies = [...]` and `EXTRA = [...]`: Python 3.10 has no reader of TOML."""
    pyproject = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    requirements = []
    for name in ["dependencies", *extras]:
        array = re.search(rf"^{name} = \[\n(.*?)^\]", pyproject, re.MULTILINE | re.DOTALL)
        if array is None:
            sys.exit(f"pyproject.toml has no extra {name!r}")
        requirements += [text for _, text in re.findall(r"""^\s*(["'])(.*?)\1""", array[1], re.MULTILINE)]
    return requirements


def is_met(text: str) -> bool:
    """Return whether this Python has a package within its bounds, or does not need it."""
    if Requirement is None:
        return False
    requirement = Requirement(text)
    if requirement.marker and not requirement.marker.evaluate():
        return True
    try:  # of 2.13.0+cpu and of NVIDIA's 2.13.0a0+nv26 the release decides: both work like it
        release = Version(metadata.version(requirement.name)).base_version
    except metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(release)


def is_unfinished() -> bool:
    """Return whether .venv has to be made: it does not exist, or making it was interrupted."""
    return not VENV.exists() or (LOCK.exists() and LOCK.read_text(encoding="utf-8") == UNFINISHED)


def list_missing_in_venv(extras: list[str]) -> list[str]:
    """Return what .venv lacks, as its own Python sees it. Exits if that does not start."""
    command = [VENV_PYTHON, "-m", __spec__.name, "--missing", *(f"--extra={extra}" for extra in extras)]
    try:
        answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        return answer.stdout.splitlines()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"{VENV_PYTHON} does not work: {error}\nRemove {VENV} to have it made anew.")


def set_up(extras: list[str]) -> None:
    """Make .venv if it is unfinished, and let pip install what it lacks. Another process may have done so meanwhile."""
    if is_unfinished():
        LOCK.write_text(UNFINISHED, encoding="utf-8")
        # A torch that the machine comes with fits its GPUs: then .venv sees the packages of this Python too.
        has_torch = any(is_met(text) for text in read_requirements([]) if text.startswith("torch>"))
        report(f"Making {VENV} with {sys.executable}.")
        command = [sys.executable, "-m", "venv", "--clear", *["--system-site-packages"] * has_torch, VENV]
        if subprocess.run(command, stdout=sys.stderr).returncode != 0:
            python = "python{}.{}".format(*sys.version_info[:2])
            sys.exit(f"python -m venv has failed. On Debian and Ubuntu it needs `apt install {python}-venv`.")
    if missing := list_missing_in_venv(extras):
        report(f"Installing {', '.join(missing)} into {VENV}, which takes a minute or more.")
        pip = [VENV_PYTHON, "-m", "pip", "--disable-pip-version-check", "install"]
        if subprocess.run([*pip, "-c", REPOSITORY / "constraints.txt", *missing], stdout=sys.stderr).returncode != 0:
            sys.exit("pip has failed: its last lines, above, say why. The next start tries again.")
    LOCK.write_text("", encoding="utf-8")


def wait_for(lock) -> None:
    """Lock an open file. The system frees it when this process ends, however it ends."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        report(f"Another process is setting up {VENV}: waiting for it.")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:  # some network file systems have no locks
        report(f"{LOCK} cannot be locked ({error}): do not set up twice at once.")


def report(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
