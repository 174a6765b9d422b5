"""`bench`: run one bench."""

from argparse import Namespace

from torchtitan_lite.tools.bench import gpu, step


def main(options: Namespace) -> int:
    """Return the exit status: 0 measured, 1 failed or contenders that compute different things, 2 wrong input."""
    return {"step": step.main, "gpu": gpu.main}[options.bench](options)
