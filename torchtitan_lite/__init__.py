"""torchtitan_lite: Llama 3 on a DeviceMesh, proven on a laptop, then scaled. Start reading at train.py."""

import sys

if sys.version_info < (3, 10):  # before anything that an older Python does not know
    sys.exit(
        "torchtitan_lite needs Python 3.10 or newer, and {} is {}.{}. Set PYTHON=/path/to/a/newer/python3".format(
            sys.executable, *sys.version_info[:2]
        )
    )
