"""Texts of the command line: paths, and whether they can be decoded."""

import os
import re

from torchtitan_lite.config.messages import UserError

LONGEST_NAME = 255  # bytes, on almost all file systems


def expand_path(text: str) -> str:
    """Replace ~ and $VAR in a path that does not exist as written.

    Raises UserError for an unknown user or variable, and for a name that is not UTF-8, as all files of a run are.
    """
    expanded = text
    if not os.path.exists(text):
        expanded = os.path.expanduser(os.path.expandvars(text))
        if unset := re.search(r"^~[^/]*|\$(\w+|\{[^}]*\})", expanded):
            raise UserError(f"the user or environment variable {unset[0]} does not exist")
    if not is_unicode(expanded):
        raise UserError(f"{expanded!a} is not UTF-8: rename it")
    for name in expanded.split("/"):
        if len(name.encode()) > LONGEST_NAME:
            raise UserError(
                f"a name in the path has more than {LONGEST_NAME} bytes: {name[:20]}..."
            )
    return expanded


def is_unicode(text: str) -> bool:
    """Return whether Python could decode all bytes of `text`, which are UTF-8 on almost all systems."""
    return not re.search("[\ud800-\udfff]", text)
