"""Write and find certificates: records of what `verify` has shown of a layout.

`verify` writes one file per certified config and set of mesh dims. train.py looks for that of its run, logs what it
covers and what not, and every checkpoint carries it. A record belongs to

    the code        of this package and of train.py, to the last byte, and torch's version
    the mesh dims   that are larger than 1: a proof for tp2 says nothing of pp2 x tp2
    the config      every key, but those of NOT_IN_THE_KEY, and what a schedule's CSV file holds

No torch here.
"""

import hashlib
import json
import os
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from torchtitan_lite import PACKAGE
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.schema import Config

FOLDER = Path("outputs/certificates")  # from the working directory, as training.cache_folder
# Paths, what is printed and saved, data, seed and the number of steps do not decide whether a layout computes what one
# device would.
NOT_IN_THE_KEY = {
    **dict.fromkeys(("job", "profiling", "metrics", "checkpoint", "validation", "comm"), "all"),
    "model": ("hf_assets_path",),
    "training": ("dataset", "dataset_weights", "cache_folder", "steps", "gc_freq"),
    "parallelism": ("pipeline_parallel_schedule_csv",),  # its content counts, not its name
    "debug": ("seed",),
}


def write_certificate(config: Config, layout: Layout, record: dict[str, object]) -> Path:
    """Write the record for runs of `config`, as it was read, on the mesh dims of `layout`. Return its path."""
    path = FOLDER / f"{identify(config, layout)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text(json.dumps({**record, "code": hash_code()}, indent=1), encoding="utf-8")
    unfinished.replace(path)
    return path


def find_certificate(config: Config, layout: Layout) -> dict[str, object] | None:
    """Return the record of this config (as it was read), these mesh dims and this code, if there is one."""
    try:
        record = json.loads((FOLDER / f"{identify(config, layout)}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def describe_certificate(record: object) -> str:
    """Return one line for the log of a run that resumes, from the record in its checkpoint."""
    if not isinstance(record, dict):
        return "layout not proven: `python -m torchtitan_lite verify` with this config would do it"
    shown = f"{record.get('layout')}, worst gradient error {record.get('largest_error')}, {record.get('date')}"
    return f"trained on a proven layout: {shown}"


def describe_coverage(record: dict[str, object], layout: Layout) -> list[str]:
    """Say at the start of a run on `layout` what its certificate covers, and what not."""
    trials, uncovered = (record.get(name) or [] for name in ("trials", "not_covered"))
    return [
        f"certified {record.get('date')} for {record.get('layout')}; this run is {layout}. "
        f"Worst gradient error {record.get('largest_error')}; trials: {', '.join(map(str, trials))}",
        f"the certificate does not cover: {'; '.join(map(str, uncovered))}",
    ]


def identify(config: Config, layout: Layout) -> str:
    """Return an id that is equal for runs that compute alike."""
    sections = asdict(config)
    for name, keys in NOT_IN_THE_KEY.items():
        if keys == "all":
            del sections[name]
        else:
            sections[name] = {key: value for key, value in sections[name].items() if key not in keys}
    used_dims = [dim for dim, degree in layout.degrees.items() if degree > 1]
    csv = config.parallelism.pipeline_parallel_schedule_csv
    schedule = Path(csv).read_bytes() if csv else b""
    content = json.dumps([hash_code(), find_torch_version(), used_dims, sections], sort_keys=True)
    return hashlib.blake2b(content.encode() + schedule, digest_size=16).hexdigest()


def hash_code() -> str:
    """Hash every Python file of this package, and train.py where it is beside it."""
    digest = hashlib.blake2b(digest_size=16)
    for path in [*sorted(PACKAGE.rglob("*.py")), PACKAGE.parent / "train.py"]:
        content = path.read_bytes() if path.exists() else b""
        digest.update(f"{path.relative_to(PACKAGE.parent)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def find_torch_version() -> str:
    """Return torch's release without its build: a certificate of a CPU build holds for the CUDA build too."""
    try:
        return version("torch").split("+")[0]
    except PackageNotFoundError:
        return ""
