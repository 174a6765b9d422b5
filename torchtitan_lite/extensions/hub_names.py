"""Explain a name or a cache folder of the Hugging Face Hub that a user gives instead of a folder. Needs no torch."""

import os
import re
from pathlib import Path


def explain_hub_cache(folder: str | Path) -> str:
    """Explain where a cache folder of the Hugging Face Hub keeps its files. Return "" for any other folder."""
    root = Path(folder).absolute()
    if root.name == "snapshots":
        root = root.parent
    if not root.name.startswith(("models--", "datasets--")):
        return ""
    snapshots = sorted(map(str, root.glob("snapshots/*")))
    where = f"{folder} is a cache folder of the Hugging Face Hub. Its files are in"
    return f"{where} {' or '.join(snapshots)}" if snapshots else ""


def explain_hub_name(text: str | Path) -> str:
    """Explain why a name or cache folder of the Hugging Face Hub cannot be read, and how to fix it.

    Returns "" for any other text.
    """
    if why := explain_hub_cache(text):
        return why
    prefix = r"hf:/+|https?:/+huggingface\.co/"
    match = re.fullmatch(rf"(?:{prefix})?(?!outputs/)(\w[\w.-]*)/(\w[\w.-]*)", str(text))
    if not match or os.path.exists(text) or os.path.exists(match[1]):
        return ""
    name = f"{match[1]}/{match[2]}"
    return f"{text} is not a folder here, and nothing is downloaded. Run: hf download {name} --local-dir {name}"
