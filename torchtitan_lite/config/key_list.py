"""Describe the keys of the config as TOML with comments, for `check --keys`.

Type and default come from the dataclasses of schema.py, the meaning from the comments there.
"""

import ast
import io
import textwrap
import tokenize
from pathlib import Path

from torchtitan_lite.config import schema
from torchtitan_lite.config.messages import ConfigError, Problem
from torchtitan_lite.config.reader import KEYS, SECTIONS, format_toml
from torchtitan_lite.config.schema import Config, get_value
from torchtitan_lite.config.values import describe_type


def describe_keys(section: str) -> str:
    """Return the keys of a section, or of all sections for "", as TOML that holds the defaults.

    Raises ConfigError if there is no such section.
    """
    if section and section not in SECTIONS:
        remedy = f"The sections are {', '.join(SECTIONS)}"
        raise ConfigError([Problem("--keys", section, "there is no such section", remedy)])
    config, meanings = Config(), read_comments(Path(schema.__file__).read_text(encoding="utf-8"))
    blocks = []
    for shown in [section] if section else SECTIONS:
        lines = [f"[{shown}]"]
        for key, annotation in KEYS.items():
            of_section, _, name = key.rpartition(".")
            if of_section != shown:
                continue
            meaning = meanings[type(get_value(config, shown)).__name__, name]
            text = describe_type(annotation) + f". {meaning}" * bool(meaning)
            lines += textwrap.wrap(text, 118, initial_indent="# ", subsequent_indent="#     ", break_on_hyphens=False)
            default = get_value(config, key)
            lines.append(f"# {name} = none" if default is None else f"{name} = {format_toml(default)}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def read_comments(source: str) -> dict[tuple[str, str], str]:
    """Return the comment of each field of each class: the lines right above it, and the rest of its own line."""
    above, beside = {}, {}  # line number -> comment
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments = above if token.line.lstrip().startswith("#") else beside
            comments[token.start[0]] = token.string.lstrip("# ")
    meanings = {}
    for section in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
        for field in (node for node in section.body if isinstance(node, ast.AnnAssign)):
            parts, line = [beside.get(field.end_lineno, "")], field.lineno
            while (line := line - 1) in above:
                parts.insert(0, above[line])
            meaning = " ".join(filter(None, parts))
            meanings[section.name, field.target.id] = meaning.removeprefix("new").lstrip(": ")
    return meanings
