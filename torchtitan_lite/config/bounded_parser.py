"""argparse in bounded time, and with errors that fit on a line: the parser of every tool."""

from argparse import ArgumentParser, Namespace
from typing import NoReturn

from torchtitan_lite.config.shown import show_text

MOST_OPTIONS = 1000  # argparse takes a time that grows with the square of their number


class BoundedParser(ArgumentParser):
    def parse_known_args(self, args: list[str], namespace: Namespace | None = None) -> tuple[Namespace, list[str]]:
        n_options = sum(arg.startswith("-") for arg in args)
        if n_options > MOST_OPTIONS:
            self.error(f"there are {n_options:,} options, and at most {MOST_OPTIONS:,} are read")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        super().error(show_text(message, 400))
