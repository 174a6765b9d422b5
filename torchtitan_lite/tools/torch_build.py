"""The build of torch, and the driver and GPUs below it. Reads version.py of torch without importing it."""

import re
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.messages import Problem

# CUDA that a torch is built for -> oldest driver that runs it. Source: docs.nvidia.com, CUDA compatibility
LEAST_DRIVERS = {12: 525, 13: 580}
# GPUs below compute capability 7.5, for which no torch for CUDA 13 has kernels; and GPUs that need CUDA 12.8
BEFORE_TURING = r"\b(V100\w*|P100|P40|P4|TITAN (V|X|Xp)|GTX (9|10)..)\b"
BLACKWELL = r"\b(G?B[123]00|GB10|RTX (PRO|50..))\b"
PYPI_CUDA = "13.0"  # of the torch on PyPI, from version 2.11 on
# Builds of torch 2.11 to 2.14 for an older CUDA, with kernels from Maxwell to Hopper
OLDER_INDEX = "https://download.pytorch.org/whl/cu126"


def check_torch_build(machine: Machine) -> list[Problem]:
    """Check that the installed torch was built for the GPUs and the driver of this host."""
    build = read_torch_build()
    if not build:
        return []
    if build["hip"]:
        why = f"it was built for ROCm {build['hip']}, but this trainer is for NVIDIA GPUs and CPUs"
        remedy = "Install a build of torch for CUDA, or for CPUs"
        return [Problem("torch", version("torch"), why, remedy)]
    if machine.driver and not build["cuda"]:
        why = f"it was built for CPUs, but this host has {machine.name}, driver {machine.driver}"
        remedy = "Install a build of torch for CUDA, or set CUDA_VISIBLE_DEVICES to an empty value"
        return [Problem("torch", version("torch"), why, remedy)]
    command = f'{sys.executable} -m pip install --upgrade "torch<2.15" --index-url {OLDER_INDEX}'
    misfit = explain_misfit(machine, build["cuda"], command)
    return [Problem("torch", version("torch"), *misfit)] if misfit else []


def read_torch_build() -> dict[str, str | None]:
    """Read `cuda` and `hip` from version.py of the installed torch, without importing it. {} if there is no torch."""
    found = find_spec("torch")
    if found is None or not found.origin:
        return {}
    text = Path(found.origin).with_name("version.py").read_text()
    build: dict[str, str | None] = {"cuda": None, "hip": None}
    for name, value in re.findall(r"^(cuda|hip)\b.*= ['\"](.*)['\"]", text, re.MULTILINE):
        build[name] = value
    return build


def explain_misfit(machine: Machine, cuda: str | None, install: str) -> tuple[str, str] | None:
    """Return why a torch built for this CUDA cannot use the GPUs of `machine`, and a remedy. Return None if it can.

    `install` is the command, or the advice, that installs torch from OLDER_INDEX.
    """
    if not machine.driver or not cuda:
        return None
    major, minor = map(int, cuda.split(".")[:2])
    driver = int(machine.driver.partition(".")[0])
    is_new = re.search(BLACKWELL, machine.name)
    least = LEAST_DRIVERS.get(major, 0)
    older = f"install torch for CUDA 12.6: {install}"
    if driver < least:
        why = (
            f"CUDA {cuda} needs NVIDIA driver {least} or newer, but this host has {machine.driver}"
        )
        remedy = f"Update the driver to {LEAST_DRIVERS[13]} or newer"
        if driver >= LEAST_DRIVERS[12] and not is_new:
            remedy = f"{remedy}, or {older}"
        return why, remedy
    why = f"the builds for CUDA {cuda} have no kernels for {machine.name}"
    if major > 12 and re.search(BEFORE_TURING, machine.name):
        return why, f"I{older[1:]}"
    if is_new and (major, minor) < (12, 8):
        return why, "Install the torch of PyPI"
    return None
