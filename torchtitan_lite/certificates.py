"""Records of what `verify` has certified, for runs to find: was this layout ever shown to compute the right gradients?

`verify` writes one file per certified config; train.py looks for its own, and every checkpoint carries what it found.
A record belongs to the code of this package, to the last byte, and to the sections that decide how a model is computed.
"""

import hashlib
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

from torchtitan_lite.config import Config

FOLDER = Path("outputs/certificates")  # from the working directory, as training.cache_folder
PACKAGE = Path(__file__).resolve().parent
SECTIONS = ("model", "parallelism", "activation_checkpoint", "compile")


def write_certificate(config: Config, record: dict[str, object]) -> Path:
    """Keeps `record` for runs of `config`, which is as it was read: automatic values are not resolved yet."""
    path = FOLDER / f"{identify(config)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text(json.dumps({**record, "code": hash_code()}, indent=1), encoding="utf-8")
    unfinished.replace(path)
    return path


def find_certificate(config: Config) -> dict[str, object] | None:
    """The record of this config and this code, if there is one."""
    try:
        record = json.loads((FOLDER / f"{identify(config)}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def describe_certificate(record: object) -> str:
    """One line for the log of a run that goes on, from what its checkpoint carries."""
    if not isinstance(record, dict):
        return "layout not proven: `python -m torchtitan_lite verify` with this config would do it"
    shown = f"{record.get('layout')}, worst gradient error {record.get('largest_error')}, {record.get('date')}"
    return f"trained on a proven layout: {shown}"


def identify(config: Config) -> str:
    """The same for configs that compute alike. Precision of compute counts; data, optimizer and files do not."""
    model = replace(config.model, hf_assets_path="")
    sections = {name: asdict(getattr(config, name)) for name in SECTIONS} | {"model": asdict(model)}
    sections["precision"] = [config.training.mixed_precision_param, config.training.mixed_precision_reduce]
    content = json.dumps([hash_code(), sections], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def hash_code() -> str:
    """Of every Python file of this package."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(PACKAGE.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(PACKAGE)} {len(content)}\n".encode() + content)
    return digest.hexdigest()
