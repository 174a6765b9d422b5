"""Import train.py as the module `train`, by its path. The fork server of the launcher imports this file.

A bare `import train` could find a train.py in the user's current folder, because this folder is in sys.path. Since
Python 3.12.8, 3.13.1 and 3.14, the folder is also in the fork server's sys.path (gh-117378). The launcher starts the
fork server in the folder of the right train.py.
"""

import importlib.util
import os
import sys

spec = importlib.util.spec_from_file_location("train", os.path.abspath("train.py"))
train = importlib.util.module_from_spec(spec)
sys.modules["train"] = train
spec.loader.exec_module(train)
