"""Print the path of a Python that has the required packages: `python3 -m torchtitan_lite.tools.environment [EXTRA]`.

    if this Python has the packages in pyproject.toml    this Python
    otherwise                                            .venv/bin/python, created with the versions in constraints.txt

run_train.sh and tests/run.sh run it first; `python -m torchtitan_lite` calls continue_with_packages(). Progress goes to
stderr. Exit status: 0, or 1 with the reason.
"""

import fcntl
import os
import re
import subprocess
import sys
from importlib import metadata

from torchtitan_lite import IS_INSTALLED, REPOSITORY

try:  # tensorboard depends on packaging, so a Python without packaging also lacks tensorboard
    from packaging.requirements import Requirement
    from packaging.version import Version
except ImportError:
    Requirement = Version = None

VENV = REPOSITORY / ".venv"
INSTALLED = VENV / "installed.txt"  # requirements that pip installed; written when pip succeeds


def continue_with_packages() -> None:
    """If this Python lacks packages, run the same command in a Python that has them, instead of this process."""
    python = find_python([])
    if python != sys.executable:
        os.execv(python, [python, *sys.orig_argv[1:]])


def find_python(extras: list[str]) -> str:
    """Return the path of a Python that has the packages. Create .venv if there is none."""
    requirements = []
    for name in ("dependencies", *extras):
        requirements += read_requirements(name)
    if all(map(is_met, requirements)):
        return sys.executable
    if IS_INSTALLED:
        names = ", ".join(requirements)
        sys.exit(f"{sys.executable} lacks packages. Install them into its environment: {names}.")
    with open(REPOSITORY / ".venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits until the first one has finished
        installed = INSTALLED.read_text().splitlines() if INSTALLED.exists() else []
        missing = [requirement for requirement in requirements if requirement not in installed]
        if missing:
            set_up(missing)
            INSTALLED.write_text("\n".join(installed + missing))
    return str(VENV / "bin" / "python")


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


def set_up(requirements: list[str]) -> None:
    """Create .venv if necessary, and install the requirements with pip. Exits with the reason on failure."""
    about = f"Setting up {VENV} once, as ./run_train.sh does: {', '.join(requirements)}. It takes a minute or more."
    print(about, file=sys.stderr, flush=True)
    create = [sys.executable, "-m", "venv", VENV]
    if any(is_met(text) for text in requirements if text.startswith("torch>")):
        # That build of torch fits the machine's GPUs, so .venv also uses the packages of this Python.
        create.insert(3, "--system-site-packages")
    run(create, "On Debian and Ubuntu: apt install python3-venv.")
    install = [VENV / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install"]
    run(
        [*install, "-c", REPOSITORY / "constraints.txt", *requirements], "See its last lines above."
    )


def run(command: list, remedy: str) -> None:
    if subprocess.run(command, stdout=sys.stderr).returncode != 0:
        sys.exit(
            f"`{' '.join(map(str, command[:4]))}` failed. {remedy} The next start tries again."
        )


if __name__ == "__main__":
    print(find_python(sys.argv[1:]))
