"""What the command lines of the tools share. Each tool makes its own parser, whose description is its docstring."""

from argparse import ArgumentParser, RawDescriptionHelpFormatter

CONFIG = """config:
  --config NAME_OR_PATH  a bare name in configs/, or the path of a TOML file; default: debug
  --section.key VALUE    any key of it; `python -m torchtitan_lite check --keys` prints them all
"""


def make_parser(tool: str, description: str, epilog: str = "") -> ArgumentParser:
    """Make the parser of a tool. No option may be shortened, because it could then be a key of the config."""
    name, form = f"python -m torchtitan_lite {tool}", RawDescriptionHelpFormatter
    return ArgumentParser(name, description=description, epilog=epilog, formatter_class=form, allow_abbrev=False)


def positive(text: str) -> int:
    """Return a whole number above 0: the type of an argument."""
    if (number := int(text)) < 1:
        raise ValueError
    return number
