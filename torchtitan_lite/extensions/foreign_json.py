"""Read JSON files that other programs wrote, and check each value when it is used. Needs no torch."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from torchtitan_lite.config.messages import UserError

REMEDY = "Correct the file, or download it again"
REQUIRED = object()  # default of JsonObject.take: the key must be present


class JsonObject(dict):
    """An object of a JSON file that another program wrote. `take` returns a value and checks its type."""

    def __init__(self, path: Path, values: dict[str, Any], place: str = ""):
        super().__init__(values)
        self.path = path
        self.place = place  # keys that lead to this object: "rope_scaling."

    def take(self, key: str, kind: Any, default: Any = REQUIRED) -> Any:
        """Return the value of `key`, which must have the type `kind`, such as `int`, `list` or `str | dict`.

        Returns the default if the key is missing or null. An object becomes a JsonObject. Raises UserError.
        """
        value = self.get(key)
        name = self.place + key
        if value is None and default is not REQUIRED:
            return default
        if not has_kind(value, kind):
            found = "is missing" if value is None else f"= {shorten_value(value)}"
            expected = kind.__name__ if type(kind) is type else kind
            raise UserError(f"{self.path}: {name} {found}; it must be {expected}. {REMEDY}")
        return JsonObject(self.path, value, f"{name}.") if isinstance(value, dict) else value


def read_json(path: Path, *, may_be_missing: bool = False) -> JsonObject:
    """Return the object in a JSON file. With `may_be_missing`, return an empty object if the file does not exist.

    Raises UserError.
    """
    if may_be_missing and not path.exists():
        return JsonObject(path, {})
    try:
        value = json.loads(path.read_bytes(), object_pairs_hook=make_object)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}. {REMEDY}") from None
    if not isinstance(value, dict):
        raise UserError(
            f"{path} must be an object {{...}}, but is {shorten_value(value)}. {REMEDY}"
        )
    return JsonObject(path, value)


def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object from (key, value) pairs. Raises ValueError for a repeated key. Pass this function as
    object_pairs_hook."""
    content = dict(pairs)
    if len(content) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"an object has the key {key!r} more than once: {shorten_value(content)}")
    return content


def has_kind(value: Any, kind: Any) -> bool:
    """Return whether a JSON value has the type `kind`. An int is also a float. A bool is neither int nor float."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, float | int if kind is float else kind)


def shorten_value(value: Any) -> str:
    """Return the first characters of a JSON value."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}..."
