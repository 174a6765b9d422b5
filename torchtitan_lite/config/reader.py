"""From TOML and command line to a Config, with every problem in one list.

    command line  --section.key value | --section.key=value | --section.flag | --section.no_flag      wins over
    TOML          the file that --config (or --job.config_file) names, a path or a bare name          wins over
    default       schema.py

What a key may hold is read off its type in schema.py, so a new key needs no line here. A bad value is reported and
replaced by its default, so that the checks that follow still run and the user sees all problems at once.
"""

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

from torchtitan_lite.config.json_file import check_depth, read_regular_file
from torchtitan_lite.config.schema import Config, Job, Problem
from torchtitan_lite.config.shown import show_value
from torchtitan_lite.config.torchtitan_keys import ABSENT, ALIASES, SETTINGS_OF_ABSENT, Absent
from torchtitan_lite.config.values import WrongValue, accepts_flag, convert, format_toml, get_value

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG_FOLDER = REPOSITORY / "configs"
MOST_TOML_BYTES = 2**16  # ten times the largest config that says everything
MOST_DOTS = 256  # in a line of TOML: tomllib takes a time that grows with the square of a name's parts
MOST_NAMED = 20  # unknown keys whose nearest known key is searched, and old names that are noted
NO_SUCH_KEY = "there is no such key"


def list_keys(section: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and type of every key below a section class."""
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


@dataclass(frozen=True)
class Setting:
    """One value that somebody wrote."""

    key: str  # our name for it
    written: str  # the name as it was written
    value: object
    is_text: bool  # from the command line, where everything is text and a bare flag is None


def read_config(args: list[str]) -> ConfigReading:
    """Command-line arguments, and the TOML file that they name, as a Config. Raises nothing: see `problems`."""
    from_command_line, problems = parse_arguments(args)
    named = [setting.value for setting in from_command_line if setting.key == "job.config_file"]
    config_file = str(named[-1]) if named else Job.config_file
    from_toml, toml_problems = read_toml(config_file)
    problems += toml_problems

    settings = {}
    for setting in from_toml:
        other = settings.get(setting.key)
        if other and other.value != setting.value:  # a table holds a name once, so one of the two is an old name
            why = f"{other.written} = {show_value(other.value)} is another name of this key"
            problems.append(Problem(setting.written, setting.value, why, f"Keep {setting.key} alone"))
        settings[setting.key] = setting
    settings |= {setting.key: setting for setting in from_command_line}
    settings["job.config_file"] = Setting("job.config_file", "job.config_file", config_file, is_text=False)

    values = {}
    unknown_sections = set()
    unknown = []
    for key, setting in settings.items():
        section = key.rpartition(".")[0]
        if key in KEYS:
            try:
                values[key] = convert(KEYS[key], setting.value, is_text=setting.is_text)
            except WrongValue as wrong:
                problems.append(Problem(key, wrong.value, wrong.why + note_old_name(setting), wrong.remedy))
        elif not is_torchtitan_key(key) and section not in unknown_sections:
            unknown.append(setting)
            if section not in SECTIONS:
                unknown_sections.add(section)  # a misspelt section is one problem, however many keys it holds
    problems += map(describe_unknown, unknown[:MOST_NAMED])
    problems += [Problem(other.written, other.value, NO_SUCH_KEY, "Leave it out") for other in unknown[MOST_NAMED:]]
    config = build_section(Config, values)
    problems += [problem for setting in settings.values() if (problem := refuse_absent(setting, config))]
    notices = [f"{setting.written} is now {setting.key}" for setting in settings.values() if note_old_name(setting)]
    found = find_config_file(config_file)
    # The stem of "...toml" is "..", and outputs/.. must not become the dump folder.
    config_name = found.stem.strip(".") if found else ""
    return ConfigReading(config, problems, notices[:MOST_NAMED], config_name or "config")


# --- what was written ---


def parse_arguments(args: list[str]) -> tuple[list[Setting], list[Problem]]:
    """Split `--section.key value`, `--section.key=value` and bare flags; `-` and `_` in keys are alike."""
    settings, problems = [], []
    rest = deque(args)
    while rest:
        argument = rest.popleft()
        if not argument.startswith("--") or argument == "--":
            why, remedy = "it belongs to no key", "Write --section.key value, or --section.key=value"
            problems.append(Problem("argument", argument, why, remedy))
            continue
        written, equals, text = argument[2:].partition("=")
        written = "job.config_file" if written == "config" else written.replace("-", "_")
        value = text if equals else None
        if value is None and rest and not rest[0].startswith("--"):
            value = rest.popleft()
        if written == "job.config_file" and not value:
            problems.append(Problem("job.config_file", value, "no file is named", "Write --config NAME_OR_PATH"))
        else:
            settings.append(name_setting(written, value, is_text=True))
    return settings, problems


def read_toml(name: str) -> tuple[list[Setting], list[Problem]]:
    """The settings of the TOML file that `--config NAME` means."""
    path = find_config_file(name)
    if path is None and os.path.exists(name):
        return [], [Problem("job.config_file", name, "it is not a regular file", "Name a TOML file, or a bare name")]
    if path is None:
        known = sorted(file.stem for file in CONFIG_FOLDER.glob("*.toml"))
        near = get_close_matches(Path(name).stem, known, n=1)
        remedy = f"The nearest in configs/ is {near[0]}" if near else f"configs/ has {', '.join(known)}"
        return [], [Problem("job.config_file", name, "there is no such file, here or in configs/", remedy)]
    try:
        return list(flatten_table(load_toml(path))), []
    except ValueError as error:
        return [], [Problem("job.config_file", str(path), f"it {error}", "Repair it, or name another file")]


def find_config_file(name: str) -> Path | None:
    """A path first, then a bare name in configs/; both with or without `.toml`."""
    candidates = [Path(name), Path(f"{name}.toml"), CONFIG_FOLDER / name, CONFIG_FOLDER / f"{name}.toml"]
    return next((path for path in candidates if os.path.isfile(path)), None)  # Path.is_file raises for long names


def load_toml(path: Path) -> dict[str, Any]:
    """The table that a TOML file holds. Raises ValueError with the reason, to be put behind the file's name."""
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


def flatten_table(table: dict[str, Any], prefix: str = "") -> Iterator[Setting]:
    """`[a.b]` with `c = 1` is the setting a.b.c = 1. A table in the place of a value stays whole, to be refused."""
    for name, value in table.items():
        if isinstance(value, dict) and prefix + name not in KEYS:
            yield from flatten_table(value, f"{prefix}{name}.")
        else:
            yield name_setting(prefix + name, value, is_text=False)


def name_setting(written: str, value: object, *, is_text: bool) -> Setting:
    """Attach our name: an old name is replaced, and a bare `--section.no_flag` is `--section.flag false`."""
    key = resolve_alias(written)
    section, _, name = written.rpartition(".")
    if is_text and value is None and name.startswith("no_") and key not in KEYS:
        positive = f"{section}.{name.removeprefix('no_')}"
        if is_flag(resolve_alias(positive)):
            return Setting(resolve_alias(positive), positive, "false", is_text)
    return Setting(key, written, value, is_text)


def resolve_alias(written: str) -> str:
    """Our name of a key, or the same name where it has no other."""
    section, _, name = written.rpartition(".")
    if f"{section}.*" in ALIASES:
        return ALIASES[f"{section}.*"].removesuffix("*") + name
    return ALIASES.get(written, written)


def is_flag(key: str) -> bool:
    """Whether a key is a truth value, ours or torchtitan's."""
    return accepts_flag(KEYS.get(key)) or (key in ABSENT and ABSENT[key].off == (False,))


# --- what it means ---


def build_section(section: type, values: dict[str, Any], prefix: str = "") -> Any:
    """A section object with the values given by dotted name, and defaults for the rest."""
    given = {}
    for field, annotation in ((field, get_type_hints(section)[field.name]) for field in fields(section)):
        if is_dataclass(annotation):
            given[field.name] = build_section(annotation, values, f"{prefix}{field.name}.")
        elif prefix + field.name in values:
            given[field.name] = values[prefix + field.name]
    return replace(section(), **given)


def note_old_name(setting: Setting) -> str:
    return "" if setting.written == setting.key else f" (written as {setting.written})"


def is_torchtitan_key(key: str) -> bool:
    """Whether a key that is not ours is torchtitan's."""
    sections = tuple(name.removesuffix("*") for name in SETTINGS_OF_ABSENT if name.endswith(".*"))
    return key in ABSENT or key in SETTINGS_OF_ABSENT or key.startswith(sections)


def refuse_absent(setting: Setting, config: Config) -> Problem | None:
    """A Problem where a setting switches on a feature of torchtitan that we do not have."""
    absent = ABSENT.get(setting.key)
    if absent is None or (absent.only_if and not get_value(config, absent.only_if)) or is_off(setting, absent):
        return None
    value = True if setting.value is None else setting.value  # a bare flag
    why = f"torchtitan_lite does not have this feature{note_old_name(setting)}"
    off = f" or at {format_toml(absent.off[0])}" if absent.off else ""
    return Problem(setting.key, value, why, f"Leave it out{off}. {absent.instead}")


def is_off(setting: Setting, absent: Absent) -> bool:
    """Whether the value asks for nothing. It is read as the type of the value that says so."""
    for off in absent.off:
        try:
            kind = list[str] if isinstance(off, list) else type(off)
            if convert(kind, setting.value, is_text=setting.is_text) == off:
                return True
        except WrongValue:
            continue
    return False


def describe_unknown(setting: Setting) -> Problem:
    """Name the nearest key for one that nobody knows: the same name in another section, else a similar spelling."""
    section, _, name = setting.key.rpartition(".")
    in_section = [key for key in KEYS if key.rpartition(".")[0] == section]
    near = [key for key in (*KEYS, *ABSENT) if key.rpartition(".")[2] == name]
    near += get_close_matches(setting.key, in_section, n=1) + get_close_matches(setting.key, KEYS, n=1)
    if in_section:
        why = NO_SUCH_KEY
        remedy = f"[{section}] has {', '.join(key.rpartition('.')[2] for key in in_section)}"
    else:
        why = f"there is no section [{section}]" if section else "a key needs its section in front of it"
        remedy = f"The sections are {', '.join(SECTIONS)}"
    return Problem(setting.written, setting.value, why, f"The nearest key is {near[0]}" if near else remedy)


def dump_config_toml(config: Config) -> str:
    """The config as TOML, which reads back as the same config. A key that is None is left out: TOML has no None."""
    lines = {section: [f"[{section}]"] for section in SECTIONS}
    for key in KEYS:
        section, _, name = key.rpartition(".")
        if (value := get_value(config, key)) is not None:
            lines[section].append(f"{name} = {format_toml(value)}")
    return "\n\n".join("\n".join(block) for block in lines.values()) + "\n"
