"""The manifest of a checkpoint: what its folder holds, and how to check that it still does. Needs no torch.

    step-20/                       named by one rename, when everything in it is on the disk
        manifest.json              line 1: the hash of everything below it. Then: format, step, fingerprint (what must
                                   match on resume), run, size and hash of every file, dtype, shape and chunks of every
                                   tensor
        rank-00000.safetensors     what rank 0 wrote: one entry per chunk
        rank-00001.safetensors     ...

A checkpoint may come from anywhere, so nothing in it is trusted. It contains no pickle, and everything in the manifest
is checked before a tensor file is opened: file names are plain, files are regular files of the right size, chunks fill
their tensors exactly and fit into their files.

Hashes are BLAKE2b with 256 bits; `b2sum -l 256` prints the same.
"""

import hashlib
import json
import re
import stat
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

from torchtitan_lite.config.files import read_regular_file
from torchtitan_lite.config.flavors import MixtureArgs, ModelArgs, RopeScaling

MANIFEST = "manifest.json"
FORMAT = 2  # of what is written. Format 1, which is still read, calls the fingerprint "facts"
UNFINISHED = ".tmp"  # suffix of a folder that is not a checkpoint yet, or no longer
MOST_BYTES = 2**30  # of a manifest: 405B parameters on 16,384 ranks need a fifth of it
HASH_BYTES = 32

# Names of dtypes in the safetensors format.
DTYPE_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}

FIRST_LINE = b'{"blake2b": "%s",\n'
FIRST_LINE_BYTES = len(FIRST_LINE % (b"0" * 2 * HASH_BYTES))
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
TENSOR_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used or written."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is not what was saved. The message names the file."""


class Chunk(NamedTuple):
    """A box of a tensor, stored in one file."""

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
    size: int  # bytes
    blake2b: str  # hexadecimal


@dataclass(frozen=True)
class Manifest:
    step: int
    fingerprint: dict[str, object]  # what must match on resume: data, batch size, shape
    run: dict[str, object]  # for people: config, layout, certificate, date
    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]


def name_entry(name: str, record: TensorRecord, chunk: Chunk) -> str:
    """Return the name of a chunk in its file: "model.norm.weight", or "model.output.weight[0:128,64:128]"."""
    if chunk.sizes == record.shape:
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


# --- write ---


def encode(manifest: Manifest) -> bytes:
    """Return the content of manifest.json: its hash, then JSON with one line per file and per tensor."""
    about = {"format": FORMAT, "step": manifest.step, "fingerprint": manifest.fingerprint, "run": manifest.run}
    parts = {name: json.dumps(value) for name, value in about.items()}
    for name, records in {"files": manifest.files, "tensors": manifest.tensors}.items():
        lines = (f"{json.dumps(key)}: {json.dumps(vars(record))}" for key, record in records.items())
        parts[name] = "{\n" + ",\n".join(lines) + "}"
    body = ",\n".join(f'"{name}": {text}' for name, text in parts.items()) + "}\n"
    return FIRST_LINE % hash_bytes(body.encode()).encode() + body.encode()


def hash_bytes(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=HASH_BYTES).hexdigest()


# --- read ---


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the checkpoint `folder`, checked against itself and against the sizes of the files.

    Does not read the files of tensors (tensor_files.find_damage does). Raises CheckpointError where there is no
    checkpoint, or one of a later format; DamagedCheckpoint for everything else.
    """
    path = folder / MANIFEST
    try:
        found = path.lstat()
    except OSError as error:
        raise CheckpointError(f"{folder} is no checkpoint: {MANIFEST} cannot be read ({error.strerror})") from None
    try:
        if stat.S_ISLNK(found.st_mode):
            raise ValueError("is a link")
        content = read_regular_file(path, min(found.st_size, MOST_BYTES))  # allocates as many bytes at once
    except ValueError as error:
        raise DamagedCheckpoint(f"{path} {error}") from None
    first_line, body = content[:FIRST_LINE_BYTES], content[FIRST_LINE_BYTES:]
    if first_line != FIRST_LINE % hash_bytes(body).encode():
        raise DamagedCheckpoint(f"{path} has changed since it was written: the hash in its first line does not match")
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError):
        raise DamagedCheckpoint(f"{path} is not JSON") from None
    if isinstance(raw, dict) and isinstance(raw.get("format"), int) and raw["format"] > FORMAT:
        raise CheckpointError(
            f"{folder} has format {raw['format']}, this program reads formats 1 to {FORMAT}: use the program that "
            "saved it"
        )
    try:
        manifest = parse(raw)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(f"{path} is not a manifest: {error}") from None
    if folder.name.startswith("step-") and folder.name != f"step-{manifest.step}":
        raise DamagedCheckpoint(f"{path} is of step {manifest.step}, not of {folder.name}")
    for name, record in manifest.files.items():
        check_file(folder / name, record)
    return manifest


def check_file(path: Path, record: FileRecord) -> None:
    """Raise DamagedCheckpoint if `path` is not a plain file of the recorded size."""
    try:
        found = path.lstat()
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror}), and {MANIFEST} names it") from None
    if not stat.S_ISREG(found.st_mode):
        raise DamagedCheckpoint(f"{path} is not a plain file")
    if found.st_size != record.size:
        raise DamagedCheckpoint(f"{path} has {found.st_size:,} bytes, and {MANIFEST} says {record.size:,}")


def parse(raw: object) -> Manifest:
    """Check parsed JSON. Raises KeyError, TypeError or ValueError for everything that `encode` never writes."""
    require(isinstance(raw, dict) and 0 < parse_count(raw["format"]) <= FORMAT, "its format is unknown")
    fingerprint = raw["facts" if raw["format"] == 1 else "fingerprint"]
    for part in (fingerprint, raw["run"], raw["files"], raw["tensors"]):
        require(isinstance(part, dict), f"{part!r:.40} is not an object")
    if isinstance(shape := fingerprint.get("shape"), dict):
        if raw["format"] == 1:
            shape.setdefault("name", "llama3")  # which format 1 left out
        if isinstance(scaling := shape.get("rope_scaling"), dict):
            scaling.setdefault("kind", "llama3")  # the only one before 2026-11-24
        shape.setdefault("qk_norm", False)  # not there before 2026-11-24
        shape.setdefault("mixture", None)
    files = {}
    for name, record in raw["files"].items():
        require(FILE_NAME.fullmatch(name) is not None, f"{name!r} is not a plain name of a file")
        require(isinstance(record["blake2b"], str), f"{name} has no hash")
        files[name] = FileRecord(parse_count(record["size"]), record["blake2b"])
    tensors = {name: parse_tensor(name, record) for name, record in raw["tensors"].items()}
    n_bytes = dict.fromkeys(files, 0)
    for name, record in tensors.items():
        for chunk in record.chunks:
            require(chunk.file in files, f"{name} is in {chunk.file!r}, which is not listed")
            n_bytes[chunk.file] += prod(chunk.sizes) * DTYPE_BYTES[record.dtype]
    for name, record in files.items():
        require(n_bytes[name] <= record.size, f"{name} has {record.size:,} bytes for {n_bytes[name]:,} of tensors")
    return Manifest(parse_count(raw["step"]), fingerprint, raw["run"], files, tensors)


def parse_model_args(manifest: Manifest) -> ModelArgs:
    """Return the ModelArgs in the fingerprint. Raises KeyError, TypeError or AttributeError if there is none."""
    raw = manifest.fingerprint["shape"]
    scaling, mixture = raw["rope_scaling"], raw["mixture"]
    kinds = {"kind": ("llama3", "linear"), "router_scores": ("softmax", "sigmoid")}
    for name, value in (raw | (scaling or {}) | (mixture or {})).items():
        if name in kinds and value not in kinds[name]:
            raise KeyError(f"{name} is {value!r}")
        if name not in ("rope_scaling", "mixture", "name", *kinds) and not isinstance(value, int | float):
            raise TypeError(f"{name} is {value!r}, not a number")
    return ModelArgs(
        **{
            **raw,
            "rope_scaling": RopeScaling(**scaling) if scaling else None,
            "mixture": MixtureArgs(**mixture) if mixture else None,
        }
    )


def parse_tensor(name: str, raw: dict) -> TensorRecord:
    require(TENSOR_NAME.fullmatch(name) is not None, f"{name!r} is not the name of a tensor")
    require(raw["dtype"] in DTYPE_BYTES, f"{name} has the unknown dtype {raw['dtype']!r}")
    chunks = tuple(Chunk(file, parse_counts(offsets), parse_counts(sizes)) for file, offsets, sizes in raw["chunks"])
    record = TensorRecord(raw["dtype"], parse_counts(raw["shape"]), chunks)
    require(is_filled(record), f"the chunks of {name} do not fill its shape {list(record.shape)} exactly")
    return record


def is_filled(record: TensorRecord) -> bool:
    """Return whether the chunks are the cells of a grid, each of them once. Meshes cut tensors in no other way."""
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


def parse_counts(raw: object) -> tuple[int, ...]:
    require(isinstance(raw, list), f"{raw!r} is not a list of numbers")
    return tuple(parse_count(number) for number in raw)


def parse_count(raw: object) -> int:
    require(type(raw) is int and 0 <= raw < 2**63, f"{raw!r} is not a count")
    return raw


def require(condition: bool, problem: str) -> None:
    """Raise ValueError with `problem` if the condition does not hold."""
    if not condition:
        raise ValueError(problem)
