"""Check that this host has the software that a config needs: a compiler, optional packages, a version of torch that is
recent enough."""

import os
import shutil
import sys
import sysconfig
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from torchtitan_lite.config.choices import SCHEDULES
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.messages import Refused
from torchtitan_lite.config.schema import Config


def check_software(config: Config, machine: Machine) -> Refused:
    """Return a problem for each compiler, package or torch version that the config needs and this host lacks."""
    if config.compile.enable and config.compile.backend == "inductor":
        missing = find_missing_compiler(machine.device_type)
        if missing:
            why = f"inductor compiles C or C++, but {missing}"
            remedy = 'Install it (Debian: apt install g++ python3-dev), or use compile.backend = "aot_eager"'
            yield "compile.backend", why, remedy
    if config.metrics.enable_wandb and not find_spec("wandb"):
        install = f"Run `{sys.executable} -m pip install wandb` (the extra `wandb`)"
        remedy = f"{install}, or set the key to false: TensorBoard gets the same metrics"
        yield "metrics.enable_wandb", "the package `wandb` is not installed here", remedy
    name = config.parallelism.pipeline_parallel_schedule
    is_used = config.parallelism.pipeline_parallel_degree > 1
    if is_used and SCHEDULES[name].splits_backward and not torch_splits_backward():
        key = "parallelism.pipeline_parallel_schedule"
        why = f"a split backward pass fails inside torch {version('torch')}"
        yield key, why, "Install torch 2.13 or newer, or use Interleaved1F1B"


def torch_splits_backward() -> bool:
    """Return whether zero-bubble and V schedules run with the installed torch. The schedules fail with torch 2.11.0 and
    2.12.1.

    torch 2.13 fixed these schedules without changing an API, so only the version number shows whether they run.
    """
    major, minor = version("torch").split(".")[:2]
    return (int(major), int(minor)) >= (2, 13)


def find_missing_compiler(device_type: str) -> str:
    """Name the software that inductor needs and this host lacks. Return "" if nothing is missing.

    On a CPU, inductor needs a C++ compiler: CXX, or by default g++. On CUDA, triton needs a C compiler: CC, or by
    default gcc or clang. Both need Python's headers.
    """
    variable = "CXX" if device_type == "cpu" else "CC"
    default = "g++" if device_type == "cpu" else "gcc clang"
    names = os.environ.get(variable, default)
    if not any(map(shutil.which, names.split())):
        return f"there is no compiler {names} ({variable}) here"
    headers = Path(sysconfig.get_path("include"))
    return "" if (headers / "Python.h").is_file() else f"{headers} has no Python.h"
