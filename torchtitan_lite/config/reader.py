"""Read a TOML file and the command line into a Config, and collect every problem in one list.

    command line  --section.key value | --section.key=value | --section.flag | --section.no_flag      overrides
    TOML          the file that --config (or --job.config_file) names, a path or a bare name          overrides
    default       schema.py

The types in schema.py say how to convert values, so a new key needs no change here. If a value is invalid, the reader
reports the problem, keeps the default of this key, and still checks the other keys.
"""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from torchtitan_lite import REPOSITORY
from torchtitan_lite.config.extensions import load_extension
from torchtitan_lite.config.messages import Problem, UserError, expand_path, is_unicode
from torchtitan_lite.config.model_rows import AUTO, ModelArgs
from torchtitan_lite.config.schema import FOLDER, PATH, Config, Job, get_value, with_value

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10 has no tomllib
    try:
        import tomli as tomllib
    except ModuleNotFoundError:
        raise UserError(
            f"Python 3.10 cannot read TOML. Run `{sys.executable} -m pip install tomli`."
        ) from None

CONFIG_FOLDER = REPOSITORY / "configs"
# The values in these files are defaults. A value in a file that is not listed here is a choice of the user.
SHIPPED = set(
    """
    debug debug_3d debug_moe debug_moe_3d finetune llama3_1b llama3_1b_one_gpu llama3_3b llama3_405b llama3_70b
    llama3_8b llama3_8b_one_gpu mixtral_8x22b qwen2_7b qwen3_30b_a3b shakespeare
    """.split()
)


def list_types(section: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the type of every key in a section class and its subsections."""
    for name, kind in get_type_hints(section, include_extras=True).items():
        if is_dataclass(kind):
            yield from list_types(kind, f"{prefix}{name}.")
        elif kind != ModelArgs | None:  # Model.row, which users cannot set
            yield prefix + name, kind


OTHER_KEYS = "torchtitan_keys"  # the extension that explains unknown keys
KEYS = dict(list_types(Config))  # "training.steps" -> its type
SECTIONS = list(dict.fromkeys(key.rpartition(".")[0] for key in KEYS))


def list_changed(config: Config) -> Iterator[str]:
    """Yield the keys whose values differ from their defaults."""
    default = Config()
    return (key for key in KEYS if get_value(config, key) != get_value(default, key))


@dataclass
class UserConfig:
    """A config as the user gave it, with the problems and notices of the run.

    The config is complete even if there are problems, because invalid keys keep their defaults.
    """

    config: Config
    chosen: frozenset[str]  # keys set by the command line, or by a file that is not one of SHIPPED
    problems: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def resolve(self, key: str, value: object) -> None:
        """Replace the value "auto" of a key."""
        if get_value(self.config, key) == AUTO:
            self.config = with_value(self.config, key, value)

    def set_default(self, key: str, value: object, why: str) -> None:
        """Change the default of a key, with a notice, unless the user chose a value."""
        if key not in self.chosen and get_value(self.config, key) != value:
            self.config = with_value(self.config, key, value)
            self.notices.append(f"{key} is {value}, {why}")


def read_config(args: list[str]) -> UserConfig:
    """Read command-line arguments and the TOML file that they name. Errors go to `problems` of the result."""
    problems: list[Problem] = []
    notices: list[str] = []
    texts = parse_arguments(args, problems, notices)
    named = texts.pop("job.config_file", Job.config_file)
    config_file = "" if named is True else str(named)  # True: --config has no value
    table = {}
    is_shipped = False
    try:
        path = find_config_file(expand_path(config_file))
        is_shipped = path.stem in SHIPPED and path.parent.resolve() == CONFIG_FOLDER
        table |= flatten_table(load_toml(path))
        # in a saved config.toml, this key has the name of the original file. Replace it with the name of the file that
        # was read here
        table["job.config_file"] = config_file
    except ValueError as error:
        remedy = "Correct the name or the file. A name is a path, or a bare name in configs/"
        problems.append(Problem("job.config_file", config_file, str(error), remedy))
    if not {*table, *texts} <= KEYS.keys():
        translate_keys = load_extension(OTHER_KEYS).translate_keys
        table, texts = translate_keys(table, texts, problems, notices)
    given = table | texts  # values on the command line override values in the file

    config = Config()
    for key, value in given.items():
        try:
            config = with_value(config, key, convert(KEYS[key], value))
        except WrongValue as wrong:
            problems.append(Problem(key, value, *wrong.args))
    chosen = texts if is_shipped else given
    return UserConfig(config, frozenset(chosen), problems, notices)


# ---------------------------------------------------------------- command line and file


def parse_arguments(
    args: list[str], problems: list[Problem], notices: list[str]
) -> dict[str, str | bool]:
    """Return a dict mapping keys to texts. Adds problems and notices.

    `--section.flag` means True, and `--section.no_flag` means False; - and _ are equivalent.
    """
    values: dict[str, str | bool] = {}
    rest = list(args)
    while rest:
        argument = rest.pop(0)
        flag, equals, value = argument.partition("=")
        if not re.match("--.", flag):
            remedy = "Write --section.key value, or --section.key=value"
            if argument in SHIPPED:
                remedy = f"Write --config {argument}"
            problems.append(Problem("argument", argument, "no key precedes it", remedy))
            continue
        name = "job.config_file" if flag == "--config" else flag[2:].replace("-", "_")
        if not equals:
            is_bare = not rest or rest[0].startswith("--")
            value = True if is_bare else rest.pop(0)
        if value is True and ".no_" in name:
            positive = name.replace(".no_", ".")
            if positive in KEYS or load_extension(OTHER_KEYS).is_switch(positive):
                name = positive
                value = False
        if values.get(name, value) != value:
            notices.append(f"{name} is given twice: {value!r} replaces {values[name]!r}")
        values[name] = value
    return values


def find_key(written: str) -> str:
    """Return the key named `written`. If `written` is a key of torchtitan, return the key with the same meaning
    here."""
    return written if written in KEYS else load_extension(OTHER_KEYS).resolve_alias(written)


def find_config_file(name: str) -> Path:
    """Find a TOML file: `name` is a path, or a name in configs/, with or without `.toml`. Raises ValueError."""
    for folder in (Path(), CONFIG_FOLDER):
        for path in (folder / name, folder / f"{name}.toml"):
            if path.is_file():
                return path
    known = sorted(file.stem for file in CONFIG_FOLDER.glob("*.toml"))
    near = get_close_matches(Path(name).stem, known, n=1) or known
    raise ValueError(f"there is no such file here or in configs/; configs/ has {', '.join(near)}")


def load_toml(path: Path) -> dict[str, Any]:
    """Return the table of a TOML file. Raises ValueError with the reason."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors write a BOM
    except (OSError, ValueError) as error:  # the text of a TOMLDecodeError names line and column
        raise ValueError(f"{path} cannot be read as TOML: {error}") from None


def flatten_table(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("a.b.c", 1) for `[a.b]` with `c = 1`.

    Two kinds of tables are yielded unchanged: a table where a value is expected, and an empty table, whose name may be
    a misspelled section. A quoted name with a dot keeps its quotes, because in TOML `"b.c"` is not key c of table b.
    """
    for name, value in table.items():
        key = prefix + (f'"{name}"' if "." in name else name)
        if value and isinstance(value, dict) and key not in KEYS:
            yield from flatten_table(value, f"{key}.")
        else:
            yield key, value


# ---------------------------------------------------------------- values


class WrongValue(Exception):
    """Raised for an invalid value of a key. The arguments are the fields `why` and `remedy` of a Problem."""


TYPE_NAMES = {bool: "true or false", str: "text", int: "a whole number", float: "a finite number"}
EXAMPLES = {bool: "true", str: '"a text"', int: "8", float: "0.5 or 1e-4"}


def convert(kind: Any, value: Any) -> Any:
    """Convert a value to the type of its key. If the type of the key is not str, a str is parsed as a TOML literal.

    Integers are accepted as floats. Raises WrongValue.
    """
    origin = get_origin(kind)
    inner = get_args(kind)
    if origin is Annotated:
        return check_limits(convert(inner[0], value), inner[1])
    if origin is list:
        # a str is text of the command line, or a file has "a" instead of ["a"], as in torchtitan
        if isinstance(value, str):
            value = split_list(inner[0], value)
        if not isinstance(value, list):
            raise WrongValue("it must be a list", describe_list(inner[0]))
        return [convert(inner[0], item) for item in value]
    if NoneType in inner:  # `X | None`
        return None if value in ("none", "None") else convert(inner[0], value)
    if is_dataclass(kind):
        return load_extension("parameter_groups").convert_table(kind, value)
    choices = inner if origin is Literal else ()
    if isinstance(value, str) and kind is not str and value not in choices:
        value = parse_literal(value)
    if origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in choices):
            return value
        remedy = f"Choose from {', '.join(map(repr, choices))}"
        lower = {str(choice).lower(): choice for choice in choices}
        for near in get_close_matches(str(value).lower(), lower, n=1):
            remedy = f"The nearest is {lower[near]!r}. {remedy}"
        raise WrongValue("there is no such choice", remedy)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is float and not isfinite(value)):
        raise WrongValue(f"it must be {TYPE_NAMES[kind]}", f"Write for example {EXAMPLES[kind]}")
    if kind is str and not is_unicode(value):
        raise WrongValue("it is not UTF-8", "Rename it, or write it in UTF-8")
    return value


def describe_list(kind: Any) -> str:
    """Return a sentence that shows how to write a list with items of this type."""
    if is_dataclass(kind):
        table = ", ".join(f"{name} = ..." for name in get_type_hints(kind))
        return f"Write [[double brackets]] in a file, or '[{{{table}}}]' on the command line"
    return 'Write ["a", "b"], or a,b on the command line'


def check_limits(value: Any, limits: Any) -> Any:
    """Check that a number is in its range, and that the name of a folder is not a path. Expand a path. Raises
    WrongValue."""
    if limits == PATH:
        try:
            return expand_path(value)
        except UserError as error:
            raise WrongValue(str(error), "Correct the path") from None
    if limits == FOLDER:
        if value in ("", ".", "..") or "/" in value:
            raise WrongValue(
                "it is not the name of a folder", 'Use a name without slashes, such as "traces"'
            )
    elif value not in limits:
        raise WrongValue("it is out of range", f"Use {limits}")
    return value


def parse_literal(text: str) -> Any:
    """Return the value of a TOML literal, such as 8, 1e-3, true or ["a"], or `text` if it is not a literal."""
    with suppress(tomllib.TOMLDecodeError):
        # inside brackets, a second line or a comment after the literal is an error, so neither is dropped silently
        items = tomllib.loads(f"items = [{text}]")["items"]
        if len(items) == 1:
            return items[0]
    with suppress(ValueError):
        return float(text)  # TOML does not accept .5 or 3.e-4
    return text


def split_list(kind: Any, text: str) -> list[Any]:
    """Return the items of a TOML list, or of a text separated by commas. Raises WrongValue."""
    literal = parse_literal(text)
    if isinstance(literal, list):
        return literal
    if is_dataclass(kind):
        raise WrongValue("it is not a list of tables in TOML", describe_list(kind))
    if text.startswith("["):  # the shell has removed the quotes around the items
        raise WrongValue("it is not a TOML list", """Quote the list: '["a", "b"]', or write a,b""")
    return list(filter(None, map(str.strip, text.split(","))))


# ---------------------------------------------------------------- writing


def dump_config_toml(config: Config) -> str:
    """Write a config as TOML. Reading the text gives the same config. Keys that are None are omitted: TOML has no
    None."""
    sections = {section: f"[{section}]\n" for section in SECTIONS}
    for key in KEYS:
        value = get_value(config, key)
        if value is not None:
            section, _, name = key.rpartition(".")
            sections[section] += f"{name} = {write_literal(value)}\n"
    return "\n".join(sections.values())


def write_literal(value: Any) -> str:
    """Write a value as a TOML literal. A dataclass becomes an inline table."""
    if isinstance(value, list):
        return f"[{', '.join(map(write_literal, value))}]"
    if is_dataclass(value):
        items = [f"{name} = {write_literal(item)}" for name, item in vars(value).items()]
        return "{" + ", ".join(items) + "}"
    # for all other types, JSON and TOML have the same literals
    return json.dumps(value, ensure_ascii=False)
