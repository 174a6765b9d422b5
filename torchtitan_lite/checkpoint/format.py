"""The format of a checkpoint folder: manifest, names and hashes, and how the folder becomes complete. Needs no torch.

    step-20.tmp/                  being written or deleted; the next save removes all folders that end in .tmp
    step-20/                      renamed from step-20.tmp/ when everything in it is on disk; never written to again
        rank-00000.safetensors    the shards that rank 0 wrote, under the names of their tensors
        rank-00001.safetensors    ...
        manifest.json             step, fingerprint (must match on resume), run (for people), and one line per tensor:
                                  dtype, shape and how it is split (plan.py)
        checksums                 SHA-256 of each file above; `sha256sum --check checksums` lists changed files
    step-10.damaged/              renamed, not deleted, so its step can be saved again

At any time, a folder without .tmp is a complete checkpoint. No file contains code, and pickles are never opened. The
manifest is trusted if its hash matches. Exports to Hugging Face folders are written and committed in the same way.
"""

import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan_lite import files
from torchtitan_lite.checkpoint.plan import Degrees, TensorRecord
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.config.schema import Checkpoint

MANIFEST = "manifest.json"
IN_MANIFEST = (
    "hugging_face"  # key in `run`: name -> content of files published with the initial weights
)
CHECKSUMS = "checksums"
FORMAT = 4
UNFINISHED = ".tmp"  # suffix of a folder that is being written or deleted


class CheckpointError(UserError):
    """Raised if a checkpoint cannot be used or written."""

    status = 1


class DamagedCheckpoint(CheckpointError):
    """Raised if a checkpoint has changed since it was saved. The message names the file."""


@dataclass(frozen=True)
class Manifest:
    step: int
    fingerprint: dict[str, object]  # must match on resume: documents, tokenizer, model_args
    run: dict[str, object]  # config, layout, launch; for exports: the published config.json
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    mesh: Degrees = field(default_factory=dict)  # degrees of the ranks that saved it, as in plan.py
    host: list[int] | None = None  # snapshots: first and last rank whose slices are here
    format: int = FORMAT


def find_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in `folder`, ascending. Does not check them."""
    steps = []
    for path in folder.glob(f"step-*/{MANIFEST}"):
        number = path.parent.name.removeprefix("step-")
        if number.isdecimal():
            steps.append(int(number))
    return sorted(steps)


def name_unfinished(final: Path) -> Path:
    return final.with_name(final.name + UNFINISHED)


def create_unfinished(final: Path) -> Path:
    """Create the temporary folder for `final`. Raises CheckpointError if it or `final` exists, and OSError."""
    unfinished = name_unfinished(final)
    for path in (final, unfinished):
        if path.exists():
            raise CheckpointError(f"{path} already exists, and is never overwritten")
    unfinished.mkdir(parents=True)
    return unfinished


def write_file(path: Path, content: bytes) -> str:
    """Write a file, flush it to disk, and return its hash. Raises OSError."""
    path.write_bytes(content)
    return flush_and_hash(path)


def flush_and_hash(path: Path) -> str:
    """Flush a file to disk. Return its hash, which is computed meanwhile from the page cache. Raises OSError."""
    with open(path, "rb") as file, ThreadPoolExecutor(1) as thread:
        hashing = thread.submit(files.hash_file, path)
        os.fsync(file.fileno())
    return hashing.result()


def write_manifest(folder: Path, manifest: Manifest, hashes: Mapping[str, str]) -> None:
    """Write the manifest and the checksums. `hashes` maps the name of every other file to its hash."""
    content = json.dumps(vars(manifest)).encode()
    hashes = {**hashes, MANIFEST: write_file(folder / MANIFEST, content)}
    lines = [f"{digest}  {name}\n" for name, digest in sorted(hashes.items())]
    write_file(folder / CHECKSUMS, "".join(lines).encode())


def commit(final: Path) -> None:
    """Rename the unfinished folder to `final`. Its files must be on disk. Raises OSError."""
    unfinished = name_unfinished(final)
    files.sync_folder(unfinished)
    unfinished.rename(final)
    files.sync_folder(final.parent)


def discard(final: Path) -> None:
    """Delete the failed save of `final`. If this fails too, the next save of the run deletes it."""
    shutil.rmtree(name_unfinished(final), ignore_errors=True)


def remove_partial(folder: Path) -> None:
    """Delete unfinished saves and deletions. Only the run that has locked the dump folder may call this."""
    for partial in folder.glob(f"step-*{UNFINISHED}"):
        shutil.rmtree(partial)


def prune(folder: Path, section: Checkpoint) -> None:
    """Delete all checkpoints except the newest keep_latest_k. 0 keeps all."""
    for step in find_steps(folder)[: -section.keep_latest_k]:  # [:-0] is empty
        path = folder / f"step-{step}"
        shutil.rmtree(path.rename(name_unfinished(path)))
