"""Read TOML and command line as a Config, with every problem in one list.

    command line  --section.key value | --section.key=value | --section.flag | --section.no_flag      wins over
    TOML          the file that --config (or --job.config_file) names, a path or a bare name          wins over
    default       schema.py

What a key may hold is its type in schema.py (values.py), so that a new key needs no line here. A bad value is reported
and replaced by its default: the checks that follow still run, and the user sees all problems at once.
"""

import json
import os
import re
import textwrap
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

from torchtitan_lite import REPOSITORY
from torchtitan_lite.config import schema
from torchtitan_lite.config.files import check_depth, read_regular_file
from torchtitan_lite.config.messages import ConfigError, Problem, show_value
from torchtitan_lite.config.schema import Config, Job, get_value, with_value
from torchtitan_lite.config.torchtitan_keys import ABSENT, OFF, Absent, is_torchtitan_key, resolve_alias
from torchtitan_lite.config.values import WrongValue, accepts_flag, convert, describe_type

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

CONFIG_FOLDER = REPOSITORY / "configs"
MOST_TOML_BYTES = 2**16  # ten times the largest config that says everything
MOST_DOTS = 256  # in a line of TOML: tomllib takes a time that grows with the square of a name's parts
MOST_NAMED = 20  # unknown keys whose nearest known key is searched, and old names that are noted
NO_SUCH_KEY = "there is no such key"


def list_keys(section: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the type of every key below a section class."""
    for name, annotation in get_type_hints(section, include_extras=True).items():
        if is_dataclass(annotation):
            yield from list_keys(annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, annotation


KEYS = dict(list_keys(Config))  # "training.steps" -> its type
SECTIONS = list(dict.fromkeys(key.rpartition(".")[0] for key in KEYS))


@dataclass(frozen=True)
class ConfigReading:
    """What was read. The config is complete even when there are problems: those keys hold their defaults."""

    config: Config
    problems: list[Problem]
    notices: list[str]  # old names that were understood, one line each
    config_name: str  # of the TOML file, without folder and ending


def read_config(args: list[str]) -> ConfigReading:
    """Read command-line arguments, and the TOML file that they name, as a Config. Raises nothing: see `problems`."""
    texts, problems = parse_arguments(args)
    config_file = texts.pop("job.config_file", Job.config_file)
    table, toml_problems = read_toml(config_file)
    problems += toml_problems

    given: dict[str, Any] = {"job.config_file": config_file}  # our key -> value, of the command line as text
    names = {"job.config_file": "job.config_file"}  # our key -> the name that was written
    for written, value in table.items():
        key = resolve_alias(written)
        if key == "job.config_file":  # a file does not name another one
            continue
        if key in given and given[key] != value:  # one of the two is an old name
            why = f"{names[key]} = {show_value(given[key])} is another name of this key"
            problems.append(Problem(written, value, why, f"Keep {key} alone"))
        given[key], names[key] = value, written
    names |= {resolve_alias(written): written for written in texts}
    texts = {resolve_alias(written): text for written, text in texts.items()}
    given |= texts
    old_name = {key: "" if written == key else f" (written as {written})" for key, written in names.items()}

    config, unknown, unknown_sections = Config(), {}, set()
    for key, value in given.items():
        section = key.rpartition(".")[0]
        if key in KEYS:
            try:
                config = with_value(config, key, convert(KEYS[key], value, is_text=key in texts))
            except WrongValue as wrong:
                problems.append(Problem(key, wrong.value, wrong.why + old_name[key], wrong.remedy))
        elif not is_torchtitan_key(key) and section not in unknown_sections:
            unknown[key] = value
            if section not in SECTIONS:
                unknown_sections.add(section)  # a misspelt section is one problem, however many keys it holds
    for n, (key, value) in enumerate(unknown.items()):
        why, remedy = explain_unknown(key) if n < MOST_NAMED else (NO_SUCH_KEY, "Leave it out")
        problems.append(Problem(names[key], value, why, remedy))
    for key, value in given.items():
        if key in ABSENT and asks_for(ABSENT[key], value, config, is_text=key in texts):
            why = f"torchtitan_lite does not have this feature{old_name[key]}"
            off = f" or at {format_toml(ABSENT[key].off[0])}" if ABSENT[key].off else ""
            shown = True if value is None else value  # None: a bare flag
            problems.append(Problem(key, shown, why, f"Leave it out{off}. {ABSENT[key].instead}"))

    notices = [f"{written} is now {key}" for key, written in names.items() if written != key]
    found = find_config_file(config_file)
    # The stem of "...toml" is "..", and outputs/.. must not become the dump folder.
    config_name = found.stem.strip(".") if found else ""
    return ConfigReading(config, problems, notices[:MOST_NAMED], config_name or "config")


# ---------------------------------------------------------------- what was written


def parse_arguments(args: list[str]) -> tuple[dict[str, str | None], list[Problem]]:
    """Return each name with its text, None for a bare flag. `--section.key value` and `--section.key=value` are alike.

    `-` and `_` in names are alike, and a bare `--section.no_flag` is `--section.flag false`.
    """
    texts: dict[str, str | None] = {}
    problems = []
    rest = deque(args)
    while rest:
        argument = rest.popleft()
        if not argument.startswith("--") or argument == "--":
            why, remedy = "it belongs to no key", "Write --section.key value, or --section.key=value"
            problems.append(Problem("argument", argument, why, remedy))
            continue
        name, equals, text = argument[2:].partition("=")
        name = "job.config_file" if name == "config" else name.replace("-", "_")
        value = text if equals else None
        if value is None and rest and not rest[0].startswith("--"):
            value = rest.popleft()
        section, _, last = name.rpartition(".")
        positive = f"{section}.{last.removeprefix('no_')}"
        key = resolve_alias(positive)
        is_flag = accepts_flag(KEYS.get(key)) or (key in ABSENT and ABSENT[key].off == OFF)
        if value is None and last.startswith("no_") and is_flag:
            name, value = positive, "false"
        if name == "job.config_file" and not value:
            problems.append(Problem(name, value, "no file is named", "Write --config NAME_OR_PATH"))
            continue
        texts.pop(name, None)  # of two names of one key, the one written last counts
        texts[name] = value
    return texts, problems


def read_toml(name: str) -> tuple[dict[str, Any], list[Problem]]:
    """Return the dotted names and values of the TOML file that `--config NAME` means."""
    path = find_config_file(name)
    if path is None and os.path.exists(name):
        return {}, [Problem("job.config_file", name, "it is not a regular file", "Name a TOML file, or a bare name")]
    if path is None:
        known = sorted(file.stem for file in CONFIG_FOLDER.glob("*.toml"))
        near = get_close_matches(Path(name).stem, known, n=1)
        remedy = f"The nearest in configs/ is {near[0]}" if near else f"configs/ has {', '.join(known)}"
        return {}, [Problem("job.config_file", name, "there is no such file, here or in configs/", remedy)]
    try:
        return dict(flatten_table(load_toml(path))), []
    except ValueError as error:
        return {}, [Problem("job.config_file", str(path), f"it {error}", "Repair it, or name another file")]


def find_config_file(name: str) -> Path | None:
    """Look for a path first, then for a bare name in configs/; both with or without `.toml`."""
    candidates = [Path(name), Path(f"{name}.toml"), CONFIG_FOLDER / name, CONFIG_FOLDER / f"{name}.toml"]
    return next((path for path in candidates if os.path.isfile(path)), None)  # Path.is_file raises for long names


def load_toml(path: Path) -> dict[str, Any]:
    """Return the table of a TOML file. Raises ValueError with the reason as a predicate: "is not TOML: ..."."""
    content = read_regular_file(path, MOST_TOML_BYTES)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot be read: byte {error.start} is not UTF-8") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > MOST_DOTS:
            raise ValueError(f"has more than {MOST_DOTS} dots in line {number}")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:  # its text names line and column
        raise ValueError(f"is not TOML: {error}") from None
    except ValueError:  # Python's, which does not say where
        raise ValueError("has a number of too many digits") from None
    except RecursionError:
        raise ValueError("has lists and tables too deep in each other") from None
    check_depth(table)
    return table


def flatten_table(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a.b.c and 1 for `[a.b]` with `c = 1`. A table in the place of a value stays whole, to be refused."""
    for name, value in table.items():
        if isinstance(value, dict) and prefix + name not in KEYS:
            yield from flatten_table(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


# ---------------------------------------------------------------- what it means


def asks_for(absent: Absent, value: object, config: Config, *, is_text: bool) -> bool:
    """Whether the value of a torchtitan key switches on a feature that we do not have.

    It is read as the type of the values that mean "off".
    """
    if absent.only_if and not get_value(config, absent.only_if):
        return False
    for off in absent.off:
        try:
            kind = list[str] if isinstance(off, list) else type(off)
            if convert(kind, value, is_text=is_text) == off:
                return False
        except WrongValue:
            continue
    return True


def explain_unknown(key: str) -> tuple[str, str]:
    """Return why and remedy of an unknown key: the nearest is the same name in another section, or a like spelling."""
    section, _, name = key.rpartition(".")
    in_section = [known for known in KEYS if known.rpartition(".")[0] == section]
    near = [known for known in (*KEYS, *ABSENT) if known.rpartition(".")[2] == name]
    near += get_close_matches(key, in_section, n=1) + get_close_matches(key, KEYS, n=1)
    if in_section:
        why = NO_SUCH_KEY
        remedy = f"[{section}] has {', '.join(known.rpartition('.')[2] for known in in_section)}"
    else:
        why = f"there is no section [{section}]" if section else "a key needs its section in front of it"
        remedy = f"The sections are {', '.join(SECTIONS)}"
    return why, f"The nearest key is {near[0]}" if near else remedy


# ---------------------------------------------------------------- writing


def dump_config_toml(config: Config) -> str:
    """Write a config as TOML that reads back as the same config. A key that is None is left out: TOML has no None."""
    lines = {section: [f"[{section}]"] for section in SECTIONS}
    for key in KEYS:
        section, _, name = key.rpartition(".")
        if (value := get_value(config, key)) is not None:
            lines[section].append(f"{name} = {format_toml(value)}")
    return "\n\n".join("\n".join(block) for block in lines.values()) + "\n"


def format_toml(value: object) -> str:
    """Write a TOML literal. JSON writes strings, lists, numbers and truth values alike, but does not escape DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def describe_keys(section: str) -> str:
    """Return the keys of a section, or of all sections for "", as TOML that holds the defaults, for `check --keys`.

    The meaning of a key is its comment in schema.py. Raises ConfigError if there is no such section.
    """
    if section and section not in SECTIONS:
        remedy = f"The sections are {', '.join(SECTIONS)}"
        raise ConfigError([Problem("--keys", section, "there is no such section", remedy)])
    config, meanings = Config(), read_comments(Path(schema.__file__).read_text(encoding="utf-8"))
    lines = {shown: [f"[{shown}]"] for shown in ([section] if section else SECTIONS)}
    for key, annotation in KEYS.items():
        shown, _, name = key.rpartition(".")
        if shown in lines:
            meaning, default = meanings[type(get_value(config, shown)).__name__, name], get_value(config, key)
            text = describe_type(annotation) + f". {meaning}" * bool(meaning)
            wrapped = textwrap.wrap(text, 118, initial_indent="# ", subsequent_indent="#     ", break_on_hyphens=False)
            value = f"# {name} = none" if default is None else f"{name} = {format_toml(default)}"
            lines[shown] += [*wrapped, value]
    return "\n\n".join("\n".join(block) for block in lines.values())


def read_comments(source: str) -> dict[tuple[str, str], str]:
    """Return the comment of each field of each class: the lines right above it, and the rest of its own line."""
    meanings, section, parts = {}, "", []
    for line in source.splitlines():
        if match := re.match(r"    # (.*)", line):
            parts.append(match[1])
            continue
        if match := re.match(r"class (\w+)", line):
            section = match[1]
        elif match := re.match(r"    (\w+): .*?(?:  # (.*))?$", line):
            meaning = " ".join([*parts, match[2] or ""]).strip()
            meanings[section, match[1]] = meaning.removeprefix("new").lstrip(": ")
        parts = []
    return meanings
