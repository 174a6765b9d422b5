"""`train`: run_train.sh of this checkout, or of the installed package. Outputs go to the working directory."""

import os
import sys
from typing import NoReturn

from torchtitan_lite import REPOSITORY


def main(args: list[str]) -> NoReturn:
    """Replace this process by run_train.sh, which begins with this Python."""
    os.execvpe("bash", ["bash", str(REPOSITORY / "run_train.sh"), *args], os.environ | {"PYTHON": sys.executable})
