"""`python3 environment.py [--extra test]` prints the path of a Python that has the packages of pyproject.toml.

    this Python has them                           -> this Python
    .venv at the root of the repository has them   -> .venv/bin/python
    otherwise                                      -> .venv is made, or what it lacks is added, once

run_train.sh and tests/run.sh run it first; `python -m torchtitan_lite` and train.py call continue_with_packages().
Standard library only, and no package is imported to look at it. Progress goes to stderr. Exit status: 0, or 1 with the
reason.
"""

import sys

if sys.version_info < (3, 10):  # said before anything that an older Python does not know
    sys.exit(
        "torchtitan_lite needs Python 3.10 or newer, and {} is {}.{}. Set PYTHON=/path/to/a/newer/python3".format(
            sys.executable, *sys.version_info[:2]
        )
    )

import argparse
import fcntl
import operator
import os
import re
import shutil
import subprocess
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
VENV = REPOSITORY / ".venv"
VENV_PYTHON = VENV / "bin" / "python"

# Locked by whoever works on .venv. While .venv is being made it holds UNFINISHED: who finds that word once the lock is
# free knows that the making was interrupted. A .venv without it is trusted, one made by hand too.
VENV_LOCK = VENV / ".set_up"
UNFINISHED = "unfinished"

COMPARISONS = {">=": operator.ge, "<=": operator.le, "==": operator.eq, ">": operator.gt, "<": operator.lt}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extra", action="append", default=[], help="the packages of this extra too")
    parser.add_argument("--missing", action="store_true", help="only list what this Python lacks")
    options = parser.parse_args()
    if options.missing:
        for requirement in list_requirements(options.extra):
            if not requirement.is_met():
                print(requirement.text)
    else:
        print(find_python(options.extra))


def find_python(extras: list[str], only: Container[str] | None = None) -> str:
    """The Python that has the packages. `only`: this one will do where it has those of them."""
    requirements = list_requirements(extras)
    missing = [requirement for requirement in requirements if not requirement.is_met()]
    if not any(only is None or requirement.name in only for requirement in missing):
        return sys.executable
    if not is_venv_finished() or list_missing_in_venv(extras):
        has_torch = any(requirement.name == "torch" for requirement in set(requirements) - set(missing))
        prepare_venv(extras, share_packages=has_torch)
    return str(VENV_PYTHON)


def continue_with_packages(*, extras: list[str] | None = None, only: Container[str] | None = None) -> None:
    """Run this command again, as it was given, by the Python that has the packages. Returns where that is this one."""
    python = find_python(extras or [], only)
    if python != sys.executable:
        os.execv(python, [python, *sys.orig_argv[1:]])


# --- what is needed ---


@dataclass(frozen=True)
class Requirement:
    """One line of pyproject.toml: `torch>=2.11,<2.14`, or `tomli; python_version < "3.11"`."""

    text: str  # as pip reads it
    name: str
    bounds: tuple[tuple[str, str], ...]  # (">=", "2.11")
    below_python: str | None  # not needed from this Python on

    def is_met(self) -> bool:
        """Whether this Python has the package within its bounds, or does not need it."""
        if self.below_python and sys.version_info >= parse_release(self.below_python):
            return True
        try:
            installed = parse_release(metadata.version(self.name))
        except metadata.PackageNotFoundError:
            return False
        return all(COMPARISONS[sign](installed, parse_release(bound)) for sign, bound in self.bounds)


def list_requirements(extras: list[str]) -> list[Requirement]:
    return read_requirements((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"), extras)


def read_requirements(pyproject: str, extras: list[str]) -> list[Requirement]:
    """The strings of `dependencies = [...]` and `EXTRA = [...]`, one per line: Python 3.10 has no reader of TOML."""
    requirements = []
    for name in ["dependencies", *extras]:
        array = re.search(rf"^{name} = \[\n(.*?)^\]", pyproject, re.MULTILINE | re.DOTALL)
        if array is None:
            sys.exit(f"pyproject.toml has no extra {name!r}")
        strings = re.findall(r"""^\s*(["'])(.*?)\1""", array[1], re.MULTILINE)
        requirements += [parse_requirement(text) for _, text in strings]
    return requirements


def parse_requirement(text: str) -> Requirement:
    """Understands what pyproject.toml uses, and stops at anything else."""
    parts = re.fullmatch(r'([\w.-]+)((?:(?:[<>=]=|[<>])[\d.]+,?)*)(?:; python_version < "([\d.]+)")?', text)
    if parts is None:
        sys.exit(f"pyproject.toml: environment.py does not understand {text!r}")
    name, bounds, below_python = parts.groups()
    return Requirement(text, name, tuple(re.findall(r"([<>=]+)([\d.]+)", bounds)), below_python)


def parse_release(version: str) -> tuple[int, ...]:
    """2.13.0+cpu as (2, 13). So is 2.13.0a0+nv26: what vendors ship under that name works like the release."""
    numbers = [int(number) for number in re.match(r"[\d.]*\d", version)[0].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


# --- .venv ---


def is_venv_finished() -> bool:
    """Whether there is a .venv whose making was not interrupted."""
    return VENV_PYTHON.exists() and not (VENV_LOCK.exists() and VENV_LOCK.read_text(encoding="utf-8"))


def list_missing_in_venv(extras: list[str]) -> list[str]:
    """What .venv lacks, as its own Python sees it."""
    command = [VENV_PYTHON, __file__, "--missing", *(f"--extra={extra}" for extra in extras)]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode != 0:
        sys.exit(f"{VENV_PYTHON} does not work: {answer.stderr.strip()}\nRemove {VENV} to have it made anew.")
    return answer.stdout.splitlines()


def prepare_venv(extras: list[str], *, share_packages: bool) -> None:
    """Make .venv, or add what it lacks.

    With share_packages it sees the packages of this Python too: a torch that a machine comes with fits its GPUs.
    """
    VENV.mkdir(exist_ok=True)
    with lock_venv():
        if not is_venv_finished():  # else another process has made it while this one waited
            make_venv(share_packages)
        if missing := list_missing_in_venv(extras):
            report(f"Installing {', '.join(missing)} into {VENV}, which takes a minute or more.")
            pip = [VENV_PYTHON, "-m", "pip", "--disable-pip-version-check", "install"]
            if run([*pip, "-c", REPOSITORY / "constraints.txt", *missing]) != 0:
                sys.exit("pip has failed: its last lines, above, say why. The next start tries again.")
            if missing := list_missing_in_venv(extras):
                sys.exit(f"pip has installed everything, and still {VENV} lacks {', '.join(missing)}")
        VENV_LOCK.write_text("", encoding="utf-8")


@contextmanager
def lock_venv() -> Iterator[None]:
    """Hold the lock on .venv. The system frees it when this process ends, however it ends."""
    with VENV_LOCK.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"Another process is setting up {VENV}: waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems know no locks
            report(f"{VENV_LOCK} cannot be locked ({error}): do not set up twice at once.")
        yield


def make_venv(share_packages: bool) -> None:
    """Make .venv without packages. What an interrupted making has left is removed, anything else is left alone."""
    leftovers = [path for path in VENV.iterdir() if path != VENV_LOCK]
    if leftovers and not VENV_LOCK.read_text(encoding="utf-8"):
        sys.exit(f"{VENV_PYTHON} does not work.\nRemove {VENV} to have it made anew.")
    VENV_LOCK.write_text(UNFINISHED, encoding="utf-8")
    for path in leftovers:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    report(f"Making {VENV} with {sys.executable}.")
    if run([sys.executable, "-m", "venv", *["--system-site-packages"] * share_packages, VENV]) != 0:
        python = "python{}.{}".format(*sys.version_info[:2])
        sys.exit(f"python -m venv has failed. On Debian and Ubuntu it needs `apt install {python}-venv`.")


def run(command: list[str | Path]) -> int:
    """Exit status of a command. Its output goes to stderr, because stdout is for the path alone."""
    return subprocess.run(command, stdout=sys.stderr).returncode


def report(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
