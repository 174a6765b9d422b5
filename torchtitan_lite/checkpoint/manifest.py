"""The manifest of a checkpoint: what is in its folder, and how to know that it still is. Needs no torch.

    step-20/                       the name is given by one rename, when everything in it is on the disk
        manifest.json              line 1: the hash of all that follows. Then: format, step, facts that must hold again,
                                   the run, every file with size and hash, every tensor with dtype, shape and chunks
        rank-00000.safetensors     what rank 0 wrote: one entry per chunk
        rank-00001.safetensors     ...

A checkpoint comes from somewhere: another run, a download. So nothing in it is believed. There is no pickle, and what
the manifest says is checked before any file of tensors is opened: names are plain, files are files and of that size,
chunks fill their tensors exactly and fit into their files.

Hashes are BLAKE2b with 256 bits; `b2sum -l 256` prints the same.
"""

import hashlib
import json
import re
import stat
from dataclasses import dataclass
from math import prod
from pathlib import Path

from torchtitan_lite.checkpoint.safetensors_header import DTYPE_BYTES

MANIFEST = "manifest.json"
FORMAT = 1
UNFINISHED = ".tmp"  # what a folder's name ends in that is no checkpoint: not yet, or no longer
MOST_BYTES = 2**30  # of a manifest: 405B parameters on 16,384 ranks take a fifth of it
HASH_BYTES = 32

FIRST_LINE = b'{"blake2b": "%s",\n'
FIRST_LINE_BYTES = len(FIRST_LINE % (b"0" * 2 * HASH_BYTES))
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
TENSOR_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used or written, and why."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that is not what was saved, and the file in which that shows."""


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, in one file."""

    file: str
    offsets: tuple[int, ...]  # of its first element in the whole tensor
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class TensorRecord:
    dtype: str  # a key of DTYPE_BYTES
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class FileRecord:
    size: int
    blake2b: str


@dataclass(frozen=True)
class Manifest:
    step: int
    facts: dict[str, object]  # what must hold again when the run goes on: data, batch size, shape
    run: dict[str, object]  # for the reader: config, layout, certificate, date
    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]


def name_entry(name: str, record: TensorRecord, chunk: Chunk) -> str:
    """What a chunk is called in its file: by the tensor, and by its place where the tensor is cut.

    "model.norm.weight", or "model.output.weight[0:128,64:128]".
    """
    if chunk.sizes == record.shape:
        return name
    pairs = zip(chunk.offsets, chunk.sizes, strict=True)
    return f"{name}[{','.join(f'{offset}:{offset + size}' for offset, size in pairs)}]"


def find_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in `folder`, ascending. Whether they are sound is not looked at."""
    names = [path.parent.name.removeprefix("step-") for path in folder.glob(f"step-*/{MANIFEST}")]
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


# ---------------------------------------------------------------- bytes


def encode(manifest: Manifest) -> bytes:
    """JSON with a line per file and per tensor, its hash in front."""
    parts = {
        "format": json.dumps(FORMAT),
        "step": json.dumps(manifest.step),
        "facts": json.dumps(manifest.facts),
        "run": json.dumps(manifest.run),
        "files": encode_lines({name: vars(record) for name, record in manifest.files.items()}),
        "tensors": encode_lines({name: list_record(record) for name, record in manifest.tensors.items()}),
    }
    body = ",\n".join(f'"{name}": {text}' for name, text in parts.items()) + "}\n"
    return FIRST_LINE % hash_bytes(body.encode()).encode() + body.encode()


def encode_lines(records: dict[str, object]) -> str:
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in records.items()) + "}"


def list_record(record: TensorRecord) -> dict[str, object]:
    chunks = [[chunk.file, chunk.offsets, chunk.sizes] for chunk in record.chunks]
    return {"dtype": record.dtype, "shape": record.shape, "chunks": chunks}


def hash_bytes(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=HASH_BYTES).hexdigest()


# ---------------------------------------------------------------- reading


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint `folder`, checked against itself and against names and sizes of the files.

    What the files contain is not looked at: `find_damage` in tensor_files.py does that. Raises CheckpointError where
    there is no checkpoint or one of a later format, DamagedCheckpoint for all else.
    """
    path = folder / MANIFEST
    try:
        found = path.lstat()
    except OSError as error:
        raise CheckpointError(f"{folder} is no checkpoint: {MANIFEST} cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
        raise DamagedCheckpoint(f"{path} is no plain file of at most {MOST_BYTES:,} bytes")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror})") from None
    first_line, body = content[:FIRST_LINE_BYTES], content[FIRST_LINE_BYTES:]
    if first_line != FIRST_LINE % hash_bytes(body).encode():
        raise DamagedCheckpoint(f"{path} has changed since it was written: the hash in its first line is not its own")
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError):
        raise DamagedCheckpoint(f"{path} is not JSON") from None
    if isinstance(raw, dict) and isinstance(raw.get("format"), int) and raw["format"] > FORMAT:
        raise CheckpointError(
            f"{folder} has format {raw['format']}, this program reads format {FORMAT}: use the program that saved it"
        )
    try:
        manifest = parse(raw)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(f"{path} is no manifest: {error}") from None
    if folder.name.startswith("step-") and folder.name != f"step-{manifest.step}":
        raise DamagedCheckpoint(f"{path} is that of step {manifest.step}, not of {folder.name}")
    for name, record in manifest.files.items():
        check_file(folder / name, record)
    return manifest


def check_file(path: Path, record: FileRecord) -> None:
    """A plain file of the size that it had."""
    try:
        found = path.lstat()
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror}), and {MANIFEST} names it") from None
    if not stat.S_ISREG(found.st_mode):
        raise DamagedCheckpoint(f"{path} is not a plain file")
    if found.st_size != record.size:
        raise DamagedCheckpoint(f"{path} has {found.st_size:,} bytes, and {MANIFEST} says {record.size:,}")


def parse(raw: object) -> Manifest:
    """Raises KeyError, TypeError or ValueError for whatever `encode` would not write."""
    demand(isinstance(raw, dict) and count(raw["format"]) == FORMAT, "its format is unknown")
    for part in ("facts", "run", "files", "tensors"):
        demand(isinstance(raw[part], dict), f"{part} is not an object")
    files = {name: parse_file(name, record) for name, record in raw["files"].items()}
    tensors = {name: parse_tensor(name, record) for name, record in raw["tensors"].items()}
    held = dict.fromkeys(files, 0)
    for name, record in tensors.items():
        for chunk in record.chunks:
            demand(chunk.file in files, f"{name} is in {chunk.file!r}, which is not listed")
            held[chunk.file] += prod(chunk.sizes) * DTYPE_BYTES[record.dtype]
    for name, record in files.items():
        demand(held[name] <= record.size, f"{name} would hold {held[name]:,} bytes of tensors, and has {record.size:,}")
    return Manifest(count(raw["step"]), raw["facts"], raw["run"], files, tensors)


def parse_file(name: str, raw: dict) -> FileRecord:
    demand(FILE_NAME.fullmatch(name) is not None, f"{name!r} is not a plain name of a file")
    demand(isinstance(raw["blake2b"], str), f"{name} has no hash")
    return FileRecord(count(raw["size"]), raw["blake2b"])


def parse_tensor(name: str, raw: dict) -> TensorRecord:
    demand(TENSOR_NAME.fullmatch(name) is not None, f"{name!r} is not the name of a tensor")
    demand(raw["dtype"] in DTYPE_BYTES, f"{name} has the unknown dtype {raw['dtype']!r}")
    chunks = tuple(Chunk(file, counts(offsets), counts(sizes)) for file, offsets, sizes in raw["chunks"])
    record = TensorRecord(raw["dtype"], counts(raw["shape"]), chunks)
    demand(is_filled(record), f"the chunks of {name} do not fill its shape {list(record.shape)} exactly")
    return record


def is_filled(record: TensorRecord) -> bool:
    """Whether the chunks are the cells of a grid, each of them once. Meshes cut tensors in no other way."""
    if any(len(chunk.offsets) != len(record.shape) or len(chunk.sizes) != len(record.shape) for chunk in record.chunks):
        return False
    if 0 in record.shape:
        return not record.chunks
    n_cells = 1
    for dim, length in enumerate(record.shape):
        intervals = sorted({(chunk.offsets[dim], chunk.sizes[dim]) for chunk in record.chunks})
        end = 0
        for offset, size in intervals:
            if offset != end or size == 0:
                return False
            end += size
        if end != length:
            return False
        n_cells *= len(intervals)
    return len(record.chunks) == n_cells == len({chunk.offsets for chunk in record.chunks})


def counts(raw: object) -> tuple[int, ...]:
    demand(isinstance(raw, list), f"{raw!r} is not a list of numbers")
    return tuple(count(number) for number in raw)


def count(raw: object) -> int:
    demand(type(raw) is int and 0 <= raw < 2**63, f"{raw!r} is not a number of things")
    return raw


def demand(sound: bool, otherwise: str) -> None:
    if not sound:
        raise ValueError(otherwise)
