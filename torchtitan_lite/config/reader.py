"""Read a TOML file and the command line into a Config, and collect every problem in one list.

    command line  --section.key value | --section.key=value | --section.flag | --section.no_flag      overrides
    TOML          the file that --config (or --job.config_file) names, a path or a bare name          overrides
    default       schema.py

The types in schema.py say how to convert values, so a new key needs no change here. If a value is bad, the problem is
reported, the key keeps its default, and the other keys are still checked.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from torchtitan_lite import REPOSITORY
from torchtitan_lite.config.arguments import expand_path, parse_whole
from torchtitan_lite.config.messages import Problem, UserError
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.config.schema import PATH, Config, Job, get_value, with_value
from torchtitan_lite.config.torchtitan_keys import ABSENT, explain_absent, resolve_alias

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

CONFIG_FOLDER = REPOSITORY / "configs"


def list_keys(section: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the type of every key in a section class and its subsections."""
    for name, kind in get_type_hints(section, include_extras=True).items():
        if is_dataclass(kind):
            yield from list_keys(kind, f"{prefix}{name}.")
        elif kind != ModelArgs | None:  # Model.row, which users cannot set
            yield prefix + name, kind


KEYS = dict(list_keys(Config))  # "training.steps" -> its type
SECTIONS = list(dict.fromkeys(key.rpartition(".")[0] for key in KEYS))


@dataclass(frozen=True)
class ConfigReading:
    """Result of read_config. The config is complete even if there are problems: bad keys keep their defaults."""

    config: Config
    problems: list[Problem]
    notices: list[str]  # one line for each old key name that was used
    config_name: str  # name of the TOML file, without folder and extension
    given: frozenset[str]  # keys set by the file or the command line
    chosen: frozenset[str]  # keys set by the command line or by a file outside configs/


def read_config(args: list[str]) -> ConfigReading:
    """Read command-line arguments and the TOML file that they name. Does not raise: see `problems`."""
    texts, problems = parse_arguments(args)
    config_file = str(texts.pop("job.config_file", Job.config_file))
    table = {"job.config_file": config_file}
    is_shipped = False
    try:
        path = find_config_file(expand_path(config_file))
        is_shipped = path.parent.resolve() == CONFIG_FOLDER
        table |= dict(flatten_table(load_toml(path)))
    except ValueError as error:
        problems.append(
            Problem(
                "job.config_file", config_file, str(error), "Name a TOML file, or one in configs/"
            )
        )
    notices = [
        f"{name} is now {new}" for name in (*table, *texts) if (new := resolve_alias(name)) != name
    ]
    texts = {resolve_alias(name): text for name, text in texts.items()}
    values = {resolve_alias(name): value for name, value in table.items()} | texts

    config = Config()
    for key, value in values.items():
        if key in KEYS:
            try:
                converted = (
                    convert_text(KEYS[key], value) if key in texts else convert(KEYS[key], value)
                )
                config = with_value(config, key, converted)
            except WrongValue as wrong:
                problems.append(Problem(key, value, *wrong.args))
        elif (remedy := explain_absent(key, value)) is None:
            problems.append(Problem(key, value, "there is no such key", suggest_key(key)))
        elif remedy:
            problems.append(
                Problem(key, value, "torchtitan_lite does not have this feature", remedy)
            )
    given = frozenset(values)
    chosen = frozenset(texts) if is_shipped else given
    return ConfigReading(config, problems, notices, Path(config_file).stem, given, chosen)


# ---------------------------------------------------------------- command line and file


def parse_arguments(args: list[str]) -> tuple[dict[str, str | bool], list[Problem]]:
    """Return name -> text. `--section.flag` gives True, `--section.no_flag` gives False; - and _ are equivalent."""
    values: dict[str, str | bool] = {}
    problems, rest = [], list(args)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.removeprefix("--").partition("=")
        name = "job.config_file" if name == "config" else name.replace("-", "_")
        if not argument.startswith("--") or not name:
            remedy = "Write --section.key value, or --section.key=value"
            problems.append(Problem("argument", argument, "it does not follow a key", remedy))
            continue
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else True
        section, _, last = name.rpartition(".")
        positive = f"{section}.{last.removeprefix('no_')}"
        if value is True and positive != name and (resolve_alias(positive) in {**KEYS, **ABSENT}):
            name, value = positive, False
        values[name] = value
    return values, problems


def find_config_file(name: str) -> Path:
    """Look for a path first, then for a name in configs/, each with or without `.toml`. Raises ValueError."""
    for path in (
        Path(name),
        Path(f"{name}.toml"),
        CONFIG_FOLDER / name,
        CONFIG_FOLDER / f"{name}.toml",
    ):
        if path.is_file():
            return path
    known = sorted(file.stem for file in CONFIG_FOLDER.glob("*.toml"))
    near = get_close_matches(Path(name).stem, known, n=1) or known
    raise ValueError(f"there is no such file, here or in configs/, which has {', '.join(near)}")


def load_toml(path: Path) -> dict[str, Any]:
    """Return the table of a TOML file. Raises ValueError with the reason."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors write a BOM
    except (OSError, ValueError) as error:  # the text of a TOMLDecodeError names line and column
        raise ValueError(f"{path} cannot be read as TOML: {error}") from None


def flatten_table(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("a.b.c", 1) for `[a.b]` with `c = 1`. A table in place of a value is yielded as is, and refused later."""
    for name, value in table.items():
        if isinstance(value, dict) and prefix + name not in KEYS:
            yield from flatten_table(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


# ---------------------------------------------------------------- values


class WrongValue(Exception):
    """Raised for an invalid value of a key. The arguments are `why` and `remedy`, as in Problem."""


BOOLEANS = {"true": True, "false": False}
NAMES = {bool: "true or false", str: "text", int: "a whole number", float: "a finite number"}


def convert(kind: Any, value: Any) -> Any:
    """Convert a TOML value to the type of its key. Integers are accepted as floats. Raises WrongValue."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated and inner[1] == PATH:
        try:
            return expand_path(convert(str, value))
        except UserError as error:
            raise WrongValue(str(error), "Write the whole path, or set the variable") from None
    if origin is Annotated:
        limits, value = inner[1], convert(inner[0], value)
        if not limits.low <= value <= limits.high and value != limits.auto:
            raise WrongValue("it is out of range", f"Use {limits}")
        return value
    if origin is Literal:
        if not any(value == choice and type(value) is type(choice) for choice in inner):
            raise WrongValue(
                "there is no such choice", f"Choose from {', '.join(map(repr, inner))}"
            )
        return value
    if origin is list:
        if isinstance(value, str):  # on the command line, or torchtitan's "a" for ["a"]
            return [convert_text(inner[0], item) for item in split_list(inner[0], value)]
        if not isinstance(value, list):
            raise WrongValue("it must be a list", 'Write ["a", "b"], or a,b on the command line')
        return [convert(inner[0], item) for item in value]
    if NoneType in inner:  # `X | None`
        return None if value in ("none", "None") else convert(inner[0], value)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is float and not isfinite(value)):
        raise WrongValue(f"it must be {NAMES[kind]}", f"Write {NAMES[kind]}")
    return value


def convert_text(kind: Any, text: Any) -> Any:
    """Convert command-line text to the type of its key: text, a number as int() and float() read it, or a boolean.

    Raises WrongValue.
    """
    try:
        return convert(kind, text)
    except WrongValue:
        if isinstance(text, str):
            for read in (parse_whole, float, BOOLEANS.__getitem__):
                with suppress(ValueError, KeyError):
                    return convert(kind, read(text.lower()))
        raise


def split_list(kind: Any, text: str) -> list[Any]:
    """Return the items of ["a", "b"] in TOML, [a,b] after a shell removed the quotes, a,b, or a,b;c,d if nested."""
    with suppress(tomllib.TOMLDecodeError):
        value = tomllib.loads(f"value = {text}")["value"]
        if isinstance(value, list):
            return value
    separator = r"\]\s*,|;" if get_origin(kind) is list else ","
    items = [item.strip("[]\"' ") for item in re.split(separator, text)]
    return list(filter(None, items))


def suggest_key(key: str) -> str:
    """Return a remedy for an unknown key: a key with the same name in another section, or with a similar name."""
    section, _, name = key.rpartition(".")
    near = [known for known in (*KEYS, *ABSENT) if known.rpartition(".")[2] == name]
    near += get_close_matches(
        key, [known for known in KEYS if known.startswith(f"{section}.")], n=1
    )
    near += get_close_matches(key, KEYS, n=1)
    return f"The nearest key is {near[0]}" if near else "`check --keys` prints all keys"


# ---------------------------------------------------------------- writing


def dump_config_toml(config: Config) -> str:
    """Write a config as TOML. Reading it gives the same config. Keys that are None are omitted: TOML has no None."""
    lines = {section: [f"[{section}]"] for section in SECTIONS}
    for key in KEYS:
        section, _, name = key.rpartition(".")
        if (value := get_value(config, key)) is not None:
            literal = json.dumps(
                value, ensure_ascii=False
            )  # JSON and TOML have the same literals for these types
            lines[section].append(f"{name} = {literal}")
    return "\n\n".join("\n".join(block) for block in lines.values()) + "\n"
