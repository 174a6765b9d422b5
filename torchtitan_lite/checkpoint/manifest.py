"""Read the manifest of a checkpoint folder, and check whether files have changed. Needs no torch.

    step-20/                      renamed from step-20.tmp/ when everything in it is on disk
        rank-00000.safetensors    the shards that rank 0 wrote, under the names of their tensors
        rank-00001.safetensors    ...
        manifest.json             step, fingerprint (must match on resume), run (for people), and for each tensor
                                  dtype, shape and chunks
        checksums                 SHA-256 of each file above; `sha256sum --check checksums` lists changed files

No file contains code, and pickles are never opened. The manifest is trusted if its hash matches.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torchtitan_lite.config import files
from torchtitan_lite.config.messages import UserError
from torchtitan_lite.config.model_rows import ModelArgs, MoEArgs, RopeScaling

MANIFEST, CHECKSUMS = "manifest.json", "checksums"
FORMAT = 3
UNFINISHED = ".tmp"  # suffix of a folder that is being written or deleted


class CheckpointError(UserError):
    """Raised if a checkpoint cannot be used or written."""

    status = 1


class DamagedCheckpoint(CheckpointError):
    """Raised if a checkpoint has changed since it was saved. The message names the file."""


class Chunk(NamedTuple):
    """One stored slice of a tensor."""

    file: str
    offsets: tuple[int, ...]  # index of the first element in the full tensor
    sizes: tuple[int, ...]


class TensorRecord(NamedTuple):
    dtype: str  # torch's name: "float32"
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Manifest:
    step: int
    fingerprint: dict[str, object]  # must match on resume: data, tokenizer, batch size, model_args
    run: dict[
        str, object
    ]  # for people: config, layout, date; for exports: the published config.json
    tensors: dict[str, TensorRecord]
    format: int = FORMAT


def find_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in `folder`, ascending. Does not check them."""
    names = [path.parent.name.removeprefix("step-") for path in folder.glob(f"step-*/{MANIFEST}")]
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


def encode(manifest: Manifest) -> bytes:
    """Return the content of manifest.json, with one line per tensor."""
    parts = {name: json.dumps(value) for name, value in vars(manifest).items() if name != "tensors"}
    lines = [
        f"{json.dumps(name)}: {json.dumps(record)}" for name, record in manifest.tensors.items()
    ]
    parts["tensors"] = "{\n" + ",\n".join(lines) + "}"
    return ("{" + ",\n".join(f'"{name}": {text}' for name, text in parts.items()) + "}\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the checkpoint `folder`, and check that every file exists and can be opened.

    Raises DamagedCheckpoint if a file is missing or has changed, and CheckpointError if this process cannot read it.
    """
    try:
        content = (folder / MANIFEST).read_bytes()
        checksums = read_checksums(folder)
        for name in checksums:
            (folder / name).open("rb").close()
    except FileNotFoundError as error:
        if (folder / MANIFEST).exists():
            raise DamagedCheckpoint(f"{error.filename} is missing") from None
        raise CheckpointError(f"{folder} is not a checkpoint: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from None
    if hashlib.sha256(content).hexdigest() != checksums.get(MANIFEST):
        raise DamagedCheckpoint(
            f"{folder / MANIFEST} has changed since it was written: see {CHECKSUMS}"
        )
    raw = json.loads(content)
    if raw["format"] != FORMAT:
        raise CheckpointError(
            f"{folder} has format {raw['format']}, but this version reads format {FORMAT}"
        )
    tensors = {
        name: TensorRecord(
            dtype, tuple(shape), tuple(Chunk(file, tuple(o), tuple(s)) for file, o, s in chunks)
        )
        for name, (dtype, shape, chunks) in raw["tensors"].items()
    }
    return Manifest(**raw | {"tensors": tensors})


def read_checksums(folder: Path) -> dict[str, str]:
    """Return file name -> hash. Raises OSError."""
    lines = (folder / CHECKSUMS).read_text(errors="replace").splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def find_damage(folder: Path, names: list[str]) -> list[str]:
    """Hash these files. Return one sentence for each file that has changed."""
    checksums = read_checksums(folder)
    return files.find_damage({folder / name: checksums[name] for name in names})


def parse_model_args(manifest: Manifest) -> ModelArgs:
    """Return the ModelArgs in the fingerprint. Raises KeyError or TypeError if they are missing."""
    shape = manifest.fingerprint["shape"]
    scaling, moe = shape["rope_scaling"], shape["moe"]
    scaling, moe = scaling and RopeScaling(**scaling), moe and MoEArgs(**moe)
    return ModelArgs(**shape | {"rope_scaling": scaling, "moe": moe})
