"""torchtitan_lite: Llama 3 on a DeviceMesh. Start reading at train.py."""

import sys
from pathlib import Path

# check the version first, because an older Python cannot parse the rest of the package
if sys.version_info < (3, 10):
    sys.exit(
        "torchtitan_lite needs Python 3.10 or newer, but {} is {}.{}. Set PYTHON=/path/to/a/newer/python3".format(
            sys.executable, *sys.version_info[:2]
        )
    )

# The folder that contains train.py, run_train.sh, configs/, assets/ and pyproject.toml.
PACKAGE = Path(__file__).resolve().parent
# pip copies run_train.sh, configs/ and the other files that this package reads to SHIPPED (see pyproject.toml). SHIPPED
# does not exist in a git checkout
SHIPPED = PACKAGE / "shipped"
IS_INSTALLED = SHIPPED.is_dir()
REPOSITORY = SHIPPED if IS_INSTALLED else PACKAGE.parent
