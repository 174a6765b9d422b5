"""What torch.compile needs beside torch, looked for without torch: a run is not to find out in its first step.

backend      on a CPU                                  on CUDA
inductor     a C++ compiler, and Python's headers      triton, a C compiler, and Python's headers
aot_eager    nothing: it traces and differentiates, and runs torch's own kernels
"""

import os
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from torchtitan_lite.config.schema import Compile, Problem


def check_compilers(section: Compile, device_type: str) -> list[Problem]:
    """What is missing here for the code that inductor writes."""
    if not section.enable or section.backend != "inductor":
        return []
    missing = find_missing_compiler(device_type)
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        missing.append((f"{headers} holds no Python.h", "Install Python's headers (Debian: apt install python3-dev)"))
    otherwise = 'or set compile.backend = "aot_eager" or compile.enable = false'
    return [
        Problem(
            "compile.backend", section.backend, f"what it writes has to be compiled, and {what}", f"{how}, {otherwise}"
        )
        for what, how in missing
    ]


def find_missing_compiler(device_type: str) -> list[tuple[str, str]]:
    """What is missing, and how to get it. Looked up as torch (CXX, one name) and triton (CC, else gcc or clang) do."""
    if device_type == "cpu":
        name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
        if shutil.which(name):
            return []
        return [(f"there is no C++ compiler {name!r} here", "Install one (apt install g++), name another one in CXX")]
    missing = []
    if find_spec("triton") is None:
        missing.append(("there is no triton here", "Install the triton that belongs to this torch"))
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(shutil.which(name) for name in names):
        how = "Install one (apt install gcc), name another one in CC"
        missing.append((f"there is no C compiler {' or '.join(names)} here", how))
    return missing
