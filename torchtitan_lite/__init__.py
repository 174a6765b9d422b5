"""torchtitan_lite: Llama 3 on a DeviceMesh. Start reading at train.py."""

import sys
from pathlib import Path

if sys.version_info < (3, 10):  # before syntax that an older Python does not know
    sys.exit(
        "torchtitan_lite needs Python 3.10 or newer, and {} is {}.{}. Set PYTHON=/path/to/a/newer/python3".format(
            sys.executable, *sys.version_info[:2]
        )
    )

# The folder of train.py, run_train.sh, configs/, assets/ and pyproject.toml.
PACKAGE = Path(__file__).resolve().parent
SHIPPED = PACKAGE / "shipped"  # pip installs them here, as pyproject.toml says; a checkout has no such folder
IS_INSTALLED = SHIPPED.is_dir()
REPOSITORY = SHIPPED if IS_INSTALLED else PACKAGE.parent
