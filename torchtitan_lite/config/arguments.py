"""Read what people write on a command line: whole numbers, paths, and names of the Hugging Face Hub."""

import os
import re
from pathlib import Path

from torchtitan_lite.config.messages import UserError


def parse_whole(text: str) -> int:
    """Return a whole number: 7, 007, 1_000, 1e3. Raises ValueError."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
    if not number.is_integer():
        raise ValueError(f"{text} is not a whole number")
    return int(number)


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
    return expanded


def explain_hub_cache(folder: str | Path) -> str:
    """Return where the files of a cache folder of the Hugging Face Hub are; "" for any other folder."""
    root = Path(folder).absolute()
    if root.name == "snapshots":
        root = root.parent
    if not root.name.startswith(("models--", "datasets--")):
        return ""
    snapshots = sorted(map(str, root.glob("snapshots/*")))
    where = f"{folder} is a cache folder of the Hugging Face Hub. Its files are in"
    return f"{where} {' or '.join(snapshots)}" if snapshots else ""


def is_unicode(text: str) -> bool:
    """Return whether Python could decode all bytes of `text`, which are UTF-8 on almost all systems."""
    return not re.search("[\ud800-\udfff]", text)


def explain_hub_name(text: str | Path) -> str:
    """Return why a name or cache folder of the Hugging Face Hub cannot be read, and a remedy; "" for any other text."""
    if why := explain_hub_cache(text):
        return why
    prefix = r"hf:/+|https?:/+huggingface\.co/"
    match = re.fullmatch(rf"(?:{prefix})?(?!outputs/)(\w[\w.-]*)/(\w[\w.-]*)", str(text))
    if not match or os.path.exists(text) or os.path.exists(match[1]):
        return ""
    name = f"{match[1]}/{match[2]}"
    return f"{text} is no folder here; nothing is downloaded. Run: hf download {name} --local-dir {name}"
