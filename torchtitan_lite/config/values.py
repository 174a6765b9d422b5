"""Check and convert a value to the type that schema.py gives its key.

`Literal` is a choice, `Annotated` with a Range a number within bounds, else a path that is not too long, `X | None` may
be left out. There is no guessing: 1 is not true and "1" is not 1; only a whole number where a fraction
may stand is taken as one (1 is 1.0).
"""

import json
from math import isfinite
from typing import Annotated, Any, Literal, get_args, get_origin

from torchtitan_lite.config.messages import show_value
from torchtitan_lite.config.schema import NAME_BYTES, PATH_BYTES, Range

MOST_OF_TEXT = 4096  # characters: the longest path that Linux takes
MOST_ITEMS = 2000  # of a list


class WrongValue(Exception):
    """A value that a key cannot hold; `why` and `remedy` as in Problem, `value` as far as it could be parsed."""

    def __init__(self, why: str, remedy: str, value: object):
        super().__init__(why, remedy, value)
        self.why, self.remedy, self.value = why, remedy, value


def convert(annotation: Any, value: object, *, is_text: bool) -> Any:
    """Return `value` as the type of its key. `is_text`: it comes from the command line and has yet to be parsed.

    A bare flag of the command line is None. Raises WrongValue.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if value is None and not accepts_flag(annotation):
        raise WrongValue("the value is missing", "Write it behind the key, as in --section.key value", value)
    if origin is Literal:
        named = {str(argument): argument for argument in arguments} if is_text else {arg: arg for arg in arguments}
        if type(value) not in {type(argument) for argument in named} or value not in named:
            raise WrongValue("there is no such choice", f"Choose from {', '.join(map(repr, arguments))}", value)
        return named[value]
    if origin is Annotated:
        converted = convert(arguments[0], value, is_text=is_text)
        check_limits(arguments[1], converted)
        return converted
    if origin is list:
        separator = ";" if get_origin(arguments[0]) is list else ","
        items = [item.strip() for item in value.split(separator) if item.strip()] if isinstance(value, str) else value
        if not isinstance(items, list):
            remedy = f'Write ["a", "b"] in TOML, a{separator}b on the command line'
            raise WrongValue("a list is needed", remedy, value)
        if len(items) > MOST_ITEMS:
            raise WrongValue(f"it has {len(items):,} items", f"Use {MOST_ITEMS:,} at most", value)
        return [convert(arguments[0], item, is_text=is_text) for item in items]
    if type(None) in arguments:  # `X | None`
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        try:
            return convert(inner, value, is_text=is_text)
        except WrongValue:
            if is_text and value == "none":  # TOML says the same by leaving the key out
                return None
            raise
    if annotation is bool:
        if is_text:
            value = True if value is None else {"true": True, "false": False}.get(str(value).lower(), value)
        if not isinstance(value, bool):
            raise WrongValue("a truth value is needed", "Use true or false", value)
        return value
    return convert_text(value) if annotation is str else convert_number(annotation, value, is_text=is_text)


def accepts_flag(annotation: Any) -> bool:
    """Whether a key is a truth value, so that its bare name on the command line means true."""
    return annotation is bool or bool in get_args(annotation)


def convert_text(value: object) -> str:
    if not isinstance(value, str):
        raise WrongValue("text is needed", f'Put it in quotes: "{show_value(value)}"', value)
    if "\0" in value or value.encode(errors="ignore").decode() != value:  # Python reads bad bytes as surrogates
        raise WrongValue("it holds a NUL, or bytes that are not UTF-8", "Leave them out", value)
    if len(value) > MOST_OF_TEXT:
        raise WrongValue(f"it has {len(value):,} characters", f"Use {MOST_OF_TEXT:,} at most", value)
    return value


def convert_number(kind: type, value: object, *, is_text: bool) -> int | float:
    if is_text:
        try:
            value = kind(value)
        except ValueError:
            pass  # still text, so it is refused below
    is_whole = isinstance(value, int) and not isinstance(value, bool)  # Python counts True as an int
    if kind is int and not is_whole:
        raise WrongValue("a whole number is needed", "Write digits only, as in 8", value)
    if kind is float and not (is_whole or (isinstance(value, float) and isfinite(value))):
        raise WrongValue("a finite number is needed", "Write it as in 0.1 or 3e-4", value)
    try:
        return kind(value)
    except OverflowError:  # a whole number beyond every float
        raise WrongValue("it is too large for a fraction", "Write it as in 0.1 or 3e-4", value) from None


def check_limits(limits: Range | Literal["path"], value: Any) -> None:
    """Raise WrongValue if `value` is beyond the limits of its key."""
    if isinstance(limits, Range):
        if not limits.low <= value <= limits.high and value != limits.auto:
            raise WrongValue("it is out of range", f"Use a value {describe_range(limits)}", value)
    elif len(path := value.encode()) > PATH_BYTES or any(len(name) > NAME_BYTES for name in path.split(b"/")):
        remedy = f"Use at most {NAME_BYTES} bytes a name, and {PATH_BYTES} in all"
        raise WrongValue("no file system takes so long a name", remedy, value)


def describe_range(limits: Range) -> str:
    low, high = (f"{n:,}" if isinstance(n, int) else f"{n:g}" for n in (limits.low, limits.high))
    derived = "" if limits.auto is None else f", or {limits.auto} to have it derived"
    return f"from {low} to {high}{derived}"


def describe_type(annotation: Any) -> str:
    """Return what a key of this type may hold, in the words of a reference."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return " or ".join(map(json.dumps, arguments))
    if get_origin(annotation) is Annotated:
        kind, limits = arguments
        return f"{describe_type(kind)} {describe_range(limits)}" if isinstance(limits, Range) else limits
    if get_origin(annotation) is list:
        return f"list, each: {describe_type(arguments[0])}"
    if type(None) in arguments:
        return f"{describe_type(arguments[0])}, or none"
    return {bool: "true or false", str: "text", int: "whole number", float: "number"}[annotation]
