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

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_lite import files
from torchtitan_lite.checkpoint.plan import Degrees, Slice, Split, TensorRecord, list_slices
from torchtitan_lite.config.extensions import load_extension
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.config.model_rows import ModelArgs, MoEArgs, RopeScaling
from torchtitan_lite.config.schema import Checkpoint
from torchtitan_lite.models.registry import MODELS

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
IN_MANIFEST = (
    "hugging_face"  # key in `run`: name -> content of files published with the initial weights
)
CHECKSUMS = "checksums"
FORMAT = 4
OLD_FORMAT = 3  # a list of slices for each tensor
OLD_READER = "checkpoint_format_3"  # the extension that reads it
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


# ---------------------------------------------------------------- read


def find_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in `folder`, ascending. Does not check them."""
    steps = []
    for path in folder.glob(f"step-*/{MANIFEST}"):
        number = path.parent.name.removeprefix("step-")
        if number.isdecimal():
            steps.append(int(number))
    return sorted(steps)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the checkpoint `folder`. Opens no other file except the checksums.

    Raises DamagedCheckpoint if one of them is missing or has changed, and CheckpointError if this process cannot read
    it.
    """
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
        # stop reading at the manifest, which is among the first lines
        named = (digest for name, digest in iterate_checksums(folder) if name == MANIFEST)
        expected = next(named, None)
    except FileNotFoundError as error:
        if path.exists():
            raise DamagedCheckpoint(f"{error.filename} is missing") from None
        raise CheckpointError(f"{folder} is not a checkpoint: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from None
    if hashlib.sha256(content).hexdigest() != expected:
        raise DamagedCheckpoint(f"{path} has changed since it was written: see {CHECKSUMS}")
    raw = json.loads(content)
    if raw["format"] == FORMAT:
        raw["tensors"] = {name: parse_record(*line) for name, line in raw["tensors"].items()}
    elif raw["format"] == OLD_FORMAT:
        raw["tensors"] = load_extension(OLD_READER).parse_records(raw["tensors"])
    else:
        supported = f"but this version reads formats {OLD_FORMAT} and {FORMAT}"
        raise CheckpointError(f"{folder} has format {raw['format']}, {supported}")
    return Manifest(**raw)


def parse_record(
    dtype: str, shape: list[int], stage: int, splits: list[list], copy: int
) -> TensorRecord:
    """Return the line of a tensor, from JSON."""
    cuts = [Split(dim, tuple(mesh_dims)) for dim, mesh_dims in splits]
    return TensorRecord(dtype, shape, stage, cuts, copy)


def find_slices(
    manifest: Manifest, name: str, offsets: Sequence[int], sizes: Sequence[int]
) -> Iterator[Slice]:
    """Yield the stored slices that overlap a box of a tensor."""
    record = manifest.tensors[name]
    if manifest.format == OLD_FORMAT:
        return load_extension(OLD_READER).list_slices(record, offsets, sizes)
    host = None
    if manifest.host:
        first, last = manifest.host
        host = range(first, last + 1)
    return list_slices(record, manifest.mesh, offsets, sizes, host)


def require_files(folder: Path) -> None:
    """Compare the names in the folder with the checksums. Opens no file. Raises DamagedCheckpoint."""
    missing = sorted(read_checksums(folder).keys() - set(os.listdir(folder)))
    if missing:
        others = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DamagedCheckpoint(f"{folder / missing[0]} is missing{others}")


def read_checksums(folder: Path) -> dict[str, str]:
    """Return file name -> hash. Raises OSError."""
    return dict(iterate_checksums(folder))


def iterate_checksums(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of each file, and its hash. Raises OSError."""
    with open(folder / CHECKSUMS, errors="replace") as file:
        for line in file:
            digest, _, name = line.rstrip("\n").partition("  ")
            yield name, digest


def require_undamaged(folder: Path, part: int = 0, n_parts: int = 1) -> None:
    """Hash part number `part` of `n_parts` of the files. Raises DamagedCheckpoint, which names the changed files."""
    checksums = read_checksums(folder)
    names = sorted(checksums)[part::n_parts]
    if damage := files.find_damage({folder / name: checksums[name] for name in names}):
        raise DamagedCheckpoint("; ".join(damage))


def parse_model_args(manifest: Manifest) -> ModelArgs:
    """Return the ModelArgs in the fingerprint. Raises CheckpointError if this code has no such model."""
    model_args = dict(manifest.fingerprint["shape"])
    for name, kind in (("rope_scaling", RopeScaling), ("moe", MoEArgs)):
        if model_args[name] is not None:
            model_args[name] = parse_fields(kind, model_args[name])
    model_args["layer_types"] = tuple(model_args.get("layer_types", ()))  # a list in JSON
    model = parse_fields(ModelArgs, model_args)
    if model.name not in MODELS:
        raise CheckpointError(
            f"its model is {model.name!r}, but this code only has {', '.join(MODELS)}"
        )
    return model


def parse_fields(kind: type, values: dict[str, object]) -> Any:
    """Return a dataclass. Raises CheckpointError for unknown fields, which a fork may have added."""
    unknown = [f"{name} = {values[name]!r}" for name in values if name not in kind.__annotations__]
    if unknown:
        why = f"its model has {', '.join(unknown)}, which this code does not know"
        raise CheckpointError(f"{why}: use the code that saved it")
    return kind(**values)


# ---------------------------------------------------------------- write


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


def quarantine(damaged: list[Path]) -> None:
    """Rename damaged checkpoints. Their steps can then be saved again."""
    for final in damaged:
        aside = final.with_name(f"{final.name}.damaged")
        n_earlier = len(list(final.parent.glob(f"{aside.name}*")))
        if n_earlier:
            aside = final.with_name(f"{aside.name}-{n_earlier + 1}")
        logger.error(f"{final} was renamed to {final.rename(aside)}; its steps are trained again")
