"""Where and when a bench ran. A number that comes without it says nothing."""

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version

import torch

from torchtitan_lite.config.hardware import detect_machine, list_gpus, select_visible

CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "temperature.gpu")  # as nvidia-smi calls them


def read_setting(bench: str, *packages: str) -> dict[str, object]:
    """What every report begins with; versions of Python, torch and of the packages named."""
    return {
        "bench": bench,
        "device": detect_machine().name,
        "clocks": read_clocks(),
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            **{package: find_version(package) for package in packages},
        },
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
    }


def find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def read_clocks() -> dict[str, str] | None:
    """Clocks, power and heat of the first GPU at this moment; None where there is none that tells."""
    gpus = select_visible(list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not gpus:
        return None
    query = ["nvidia-smi", f"--id={gpus[0].uuid}", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        return dict(zip(CLOCKS, answer.strip().split(", "), strict=True))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
