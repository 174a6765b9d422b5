"""What the parsers of all tools share: argparse in bounded time, errors that fit on a line, ranges of numbers."""

import argparse
import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from typing import NoReturn

from torchtitan_lite.config.messages import show_text

MOST_OPTIONS = 1000  # argparse takes a time that grows with the square of their number
OF_THE_CONFIG = """config:
  --config NAME_OR_PATH  a bare name in configs/, or the path of a TOML file; default: debug
  --section.key VALUE    any key of it; `python -m torchtitan_lite check --keys` prints them all
"""
NO_CONFIG = "config: none; --config is for tools that build a run.\n"


class BoundedParser(ArgumentParser):
    """argparse that refuses an endless command line, and shows only part of it."""

    def parse_known_args(self, args: list[str], namespace: Namespace | None = None) -> tuple[Namespace, list[str]]:
        n_options = sum(arg.startswith("-") for arg in args)
        if n_options > MOST_OPTIONS:
            self.error(f"there are {n_options:,} options, and at most {MOST_OPTIONS:,} are read")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        super().error(show_text(message, 400))


def make_parser(name: str, description: str, epilog: str, *, config: str = NO_CONFIG) -> ArgumentParser:
    """Make the parser of a tool. No option may be shortened, because it could then be a key of the config."""
    return BoundedParser(
        f"python -m torchtitan_lite {name}",
        description=description.strip(),
        epilog=f"{config}\n{epilog}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def number(kind: type, low: float, high: float = math.inf, *, but: float = math.inf) -> Callable[[str], float]:
    """Return the type of an argument: a finite number from `low` to `high`, except `but`."""

    def parse(text: str) -> float:
        bounds = f"of {low} or more" if high == math.inf else f"from {low} to {high}"
        bounds += f", but not {but}" * (but != math.inf)
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (low <= value <= high and value not in (but, math.inf)):
            whole = "whole " if kind is int else ""
            raise ArgumentTypeError(f"{text!r} is not a {whole}number {bounds}")
        return value

    return parse
