"""Format text for users: problems with a config and their remedies, commands, and paths."""

import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite import IS_INSTALLED, REPOSITORY
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.config.schema import Config, get_value

LONGEST_NAME = 255  # most bytes in the name of a file, on almost all file systems


@dataclass(frozen=True)
class Problem:
    """One problem with a config. The user must understand the remedy without reading code."""

    key: str  # as in TOML: "parallelism.tensor_parallel_degree"
    value: object  # the value that was set
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value!r}: {self.why}. {self.remedy}."


# A rule yields (key, why, remedy) or (key, why, remedy, value). Without `value`, the message shows the value of the key
Refused = Iterator[tuple[str, ...]]


class Problems(list):
    """The problems of one config, and the notices about it. `rules`: the problems that rules have already found."""

    def __init__(
        self,
        config: Config,
        model_args: ModelArgs | None = None,
        rules: Iterable[tuple[str, ...]] = (),
    ):
        super().__init__()
        self.config = config
        self.model_args = model_args
        self.notices: list[str] = []
        for refused in rules:
            self.refuse(*refused)

    def refuse(self, key: str, why: str, remedy: str, value: object = None) -> None:
        """Append a Problem that reports `key` and the value of this key in the config. For a size that [model] does not
        set, the Problem reports the value of the flavor."""
        if value is None:
            value = get_value(self.config, key)
        if value is None:
            value = getattr(self.model_args, key.removeprefix("model."))
        self.append(Problem(key, value, why, remedy))


def join_lines(message: str) -> str:
    """Return the first 300 characters of an error message on one line. The first line of a message may be empty."""
    return " ".join(message.split())[:300]


def tell(text: object) -> None:
    """Print a message to stderr, unless it is empty. Results go to stdout."""
    if text:
        print(text, file=sys.stderr, flush=True)


class UserError(ValueError):
    """Raised for an error that the user can fix. The message describes the remedy, and is printed without a
    traceback."""

    status = 2  # exit status of a tool


class ConfigError(UserError):
    """Raised for a config that cannot run. The message lists every problem that was found, not only the first."""

    def __init__(self, *problems: Problem):
        self.problems = problems
        super().__init__(
            "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
        )


@contextmanager
def collecting(problems: list[Problem]) -> Iterator[None]:
    """Context manager: catch a ConfigError and append its problems to `problems`."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems


def name_command(line: str) -> str:
    """Return the command that runs a tool in the current folder. `line`: the tool and its arguments, such as `plan
    --gpus 8`."""
    if IS_INSTALLED:
        return f"torchtitan-lite {line}"
    is_here = Path.cwd() == REPOSITORY
    folder = shlex.quote(str(REPOSITORY))
    tool, _, args = line.partition(" ")
    if tool == "train":
        return f"{'.' if is_here else folder}/run_train.sh {args}".rstrip()
    command = f"python3 -m torchtitan_lite {line}"
    return command if is_here else f"PYTHONPATH={folder} {command}"


def expand_path(text: str) -> str:
    """Replace ~ and $VAR in a path that does not exist as written.

    Raises UserError for an unknown user or variable, and for a path that is not UTF-8, because files of a run contain
    the path.
    """
    expanded = text
    if not os.path.exists(text):
        expanded = os.path.expanduser(os.path.expandvars(text))
        if unset := re.search(r"^~[^/]*|\$(\w+|\{[^}]*\})", expanded):
            raise UserError(
                f"the user or environment variable {unset[0]} does not exist: set it, or write the whole path. "
                "If this text is part of the folder's name, create the folder first"
            )
    if not is_unicode(expanded):
        raise UserError(f"{expanded!a} is not UTF-8: rename it")
    for name in expanded.split("/"):
        if len(name.encode()) > LONGEST_NAME:
            raise UserError(
                f"a name in the path has more than {LONGEST_NAME} bytes: shorten {name[:20]}..."
            )
    return expanded


def is_unicode(text: str) -> bool:
    """Return whether `text` is valid Unicode. Python uses lone surrogates for bytes of a path that are not UTF-8."""
    return not re.search("[\ud800-\udfff]", text)
