"""Where the files beside the package are: train.py, run_train.sh, configs/, assets/, pyproject.toml."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
SHIPPED = PACKAGE / "shipped"  # pip installs them here, as pyproject.toml says; a checkout has no such folder
IS_INSTALLED = SHIPPED.is_dir()
REPOSITORY = SHIPPED if IS_INSTALLED else PACKAGE.parent
