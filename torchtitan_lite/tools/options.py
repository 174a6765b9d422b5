"""Define arguments of the command line, and the types that parse their values."""

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torchtitan_lite.config.messages import UserError, expand_path, is_unicode
from torchtitan_lite.config.schema import MANY, Range


class Option(NamedTuple):
    """An argument of a tool. The fields are arguments of `ArgumentParser.add_argument`."""

    name: str
    help: str
    type: Callable | None = None  # name of the value in --help; None for a flag
    default: object = None
    nargs: str | None = None
    action: str = "store"
    choices: tuple | None = None


def add_option(parser: ArgumentParser, option: Option) -> None:
    if option.type:
        fields = option._asdict()
        name = fields.pop("name")
        word = option.type.__name__ if name.startswith("-") else name
        parser.add_argument(name, metavar=word.upper(), **fields)
    else:
        parser.add_argument(option.name, action="store_true", help=option.help)


def number(name: str, limits: Range) -> Callable:
    """Return an argument type that parses a number within `limits`. `name` appears in --help and in errors.

    The number must be whole if the limits are whole numbers.
    """
    kind = type(limits.low)

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:  # 1e3 is a whole number too
            value = float(text)
            if not value.is_integer():
                raise
            value = int(value)
        if value not in limits:
            raise ArgumentTypeError(f"{text} is out of range. Use {limits}")
        return value

    parse.__name__ = name
    return parse


count = number("count", Range(1, MANY))


DEGREE_KEYS = {
    "pp": "parallelism.pipeline_parallel_degree",
    "dp": "parallelism.data_parallel_shard_degree",
    "dp_replicate": "parallelism.data_parallel_replicate_degree",
    "cp": "parallelism.context_parallel_degree",
    "tp": "parallelism.tensor_parallel_degree",
}


def degree(text: str) -> tuple[str, int]:
    """Parse a mesh dim and its degree, such as tp2. Return the config key of the dim, and the degree."""
    dim = text.rstrip("0123456789")
    n_ranks = text.removeprefix(dim)
    if dim not in DEGREE_KEYS or not n_ranks.strip("0"):
        raise ArgumentTypeError(
            f"{text} is not a degree. Use {', '.join(DEGREE_KEYS)} and a number: tp2"
        )
    return DEGREE_KEYS[dim], int(n_ranks)


def text(written: str) -> str:
    """The type of an argument: a string that a tokenizer can encode."""
    if not is_unicode(written):
        raise ArgumentTypeError("it is not UTF-8: convert it")
    return written


def file(text: str) -> str:
    """The type of an argument: a string in which ~ and $VAR are expanded."""
    try:
        return expand_path(text)
    except UserError as error:
        raise ArgumentTypeError(str(error)) from None


def path(text: str) -> Path:
    """The type of an argument: a path in which ~ and $VAR are expanded."""
    return Path(file(text))


def words(text: str) -> list[str]:
    """The type of an argument: a string that is split at commas."""
    return text.split(",")
