"""Import modules that only some configs need. config/features.py has a row for each file of extensions/."""

from importlib import import_module
from types import ModuleType


def load_module(name: str) -> ModuleType:
    """Import torchtitan_lite.NAME. Core code that only some configs need (experts, float8) is loaded here too."""
    return import_module(f"torchtitan_lite.{name}")


def load_extension(name: str) -> ModuleType:
    """Import torchtitan_lite/extensions/NAME.py."""
    return load_module(f"extensions.{name}")
