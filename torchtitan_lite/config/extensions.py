"""Import modules that only some configs need. config/features.py has a row for each key that loads an extension."""

from importlib import import_module
from types import ModuleType
from typing import Any

from torchtitan_lite.config.messages import UserError


def load_module(name: str) -> ModuleType:
    """Import torchtitan_lite.NAME: an extension, or core code that only some configs need (experts, float8)."""
    return import_module(f"torchtitan_lite.{name}")


def load_extension(name: str) -> ModuleType:
    """Import torchtitan_lite/extensions/NAME.py."""
    return load_module(f"extensions.{name}")


def find_code(file: str, name: str, home: str = "torchtitan_lite.extensions") -> Any:
    """Return the function or class `name` of extensions/FILE.py, or of the module `home` if `file` is "".

    Raises UserError if the row names code that does not exist, for example a row that a fork has added.
    """
    try:
        return getattr(load_extension(file) if file else import_module(home), name)
    except (ImportError, AttributeError) as error:
        why = f"the row of {name!r} in config/choices.py names code that cannot be loaded: {error}"
        remedy = "Set `extension` to the name of a file in extensions/. An attention may set `window` instead"
        raise UserError(f"{why}. {remedy}") from error
