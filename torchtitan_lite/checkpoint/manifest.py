"""What the folder of a checkpoint holds, and whether it still does. Needs no torch.

    step-20/                      named by one rename, when everything in it is on the disk
        rank-00000.safetensors    what rank 0 wrote: an entry for each box of a tensor
        rank-00001.safetensors    ...
        manifest.json             step, fingerprint (what must match on resume), run (for people), and of each tensor
                                  dtype, shape and boxes
        checksums                 BLAKE2b of each file above: `b2sum --check checksums` prints what has changed

No file contains code: a pickle is never opened. The manifest is believed once its hash is right.
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torchtitan_lite.config.files import hash_file
from torchtitan_lite.config.flavors import MixtureArgs, ModelArgs, RopeScaling

MANIFEST, CHECKSUMS = "manifest.json", "checksums"
FORMAT = 3
UNFINISHED = ".tmp"  # suffix of a folder that is not a checkpoint yet, or no longer


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used or written."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is not what was saved. The message names the file."""


class Chunk(NamedTuple):
    """A box of a tensor, stored in one file."""

    file: str
    offsets: tuple[int, ...]  # of its first element in the whole tensor
    sizes: tuple[int, ...]


class TensorRecord(NamedTuple):
    dtype: str  # as torch calls it: "float32"
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Manifest:
    step: int
    fingerprint: dict[str, object]  # what must match on resume: data, batch size, shape
    run: dict[str, object]  # for people: config, layout, certificate, date
    tensors: dict[str, TensorRecord]
    format: int = FORMAT


def name_entry(name: str, shape: tuple[int, ...], chunk: Chunk) -> str:
    """Return the name of a chunk in its file: "model.norm.weight", or "model.output.weight[0:128,64:128]"."""
    if tuple(chunk.sizes) == tuple(shape):
        return name
    pairs = zip(chunk.offsets, chunk.sizes, strict=True)
    return f"{name}[{','.join(f'{offset}:{offset + size}' for offset, size in pairs)}]"


def name_file(number: int) -> str:
    """Return the name of the file that this rank writes; in one process, of the file with this number."""
    return f"rank-{number:05}.safetensors"


def find_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in `folder`, ascending. Does not check them."""
    names = [path.parent.name.removeprefix("step-") for path in folder.glob(f"step-*/{MANIFEST}")]
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


def encode(manifest: Manifest) -> bytes:
    """Return the content of manifest.json: a line for each tensor."""
    parts = {name: json.dumps(value) for name, value in vars(manifest).items() if name != "tensors"}
    lines = [f"{json.dumps(name)}: {json.dumps(record)}" for name, record in manifest.tensors.items()]
    parts["tensors"] = "{\n" + ",\n".join(lines) + "}"
    return ("{" + ",\n".join(f'"{name}": {text}' for name, text in parts.items()) + "}\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the checkpoint `folder`, whose files are there. Raises CheckpointError."""
    try:
        content, checksums = (folder / MANIFEST).read_bytes(), read_checksums(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} is no checkpoint: {error}") from None
    if hashlib.blake2b(content).hexdigest() != checksums.get(MANIFEST):
        raise DamagedCheckpoint(f"{folder / MANIFEST} has changed since it was written: see {CHECKSUMS}")
    raw = json.loads(content)
    if raw["format"] != FORMAT:
        raise CheckpointError(f"{folder} has format {raw['format']}, and this program reads {FORMAT}")
    for name in checksums:
        if not (folder / name).is_file():
            raise DamagedCheckpoint(f"{folder / name} is missing")
    records = {name: (dtype, tuple(shape), chunks) for name, (dtype, shape, chunks) in raw["tensors"].items()}
    tensors = {
        name: TensorRecord(dtype, shape, tuple(Chunk(file, tuple(o), tuple(s)) for file, o, s in chunks))
        for name, (dtype, shape, chunks) in records.items()
    }
    return Manifest(**raw | {"tensors": tensors})


def read_checksums(folder: Path) -> dict[str, str]:
    """Return name -> hash of each file. Raises OSError."""
    lines = (folder / CHECKSUMS).read_text(errors="replace").splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def find_damage(folder: Path, names: list[str]) -> list[str]:
    """Read and hash these files; return what is wrong with each that has changed."""
    checksums = read_checksums(folder)

    def look(name: str) -> str | None:
        try:
            found = hash_file(folder / name, hashlib.blake2b())
        except OSError as error:
            return f"{folder / name} cannot be read ({error.strerror})"
        return None if found == checksums[name] else f"{folder / name} has changed since it was written"

    with ThreadPoolExecutor() as threads:  # hashing releases the interpreter
        return [problem for problem in threads.map(look, names) if problem]


def parse_model_args(manifest: Manifest) -> ModelArgs:
    """Return the ModelArgs in the fingerprint. Raises KeyError or TypeError if there is none."""
    shape = manifest.fingerprint["shape"]
    scaling, mixture = shape["rope_scaling"], shape["mixture"]
    scaling, mixture = scaling and RopeScaling(**scaling), mixture and MixtureArgs(**mixture)
    return ModelArgs(**shape | {"rope_scaling": scaling, "mixture": mixture})
