"""What `training.dataset` may name, and the checks of it before a run. No torch.

    python_stdlib      a row of DATASETS: tokenised on first use, into training.cache_folder
    c4                 a row of DOWNLOADS: the same with files that training.dataset_path says where to find
    data/my_corpus     a folder that `python -m torchtitan_lite prepare` wrote
    data/train.bin     a flat file of token ids, as nanoGPT writes it: uint16, or uint32 for a large vocabulary

A prepared corpus is a folder:

    manifest.json            all files with sizes and SHA-256; written last
    train-00000.tokens       token ids, little-endian, document after document
    train-00000.documents    uint64: the position of each document's first token; the last entry is the number of tokens
    train-00000.targets      of conversations: a byte for each token, 1 where it is a target
    held_out-00000.tokens    the documents for validation, chosen by a hash of their text
    sources.jsonl            the files that were read, one JSON object per line

A document is never split over two shards. The folder may have been copied, or written by another program, so every
type, name and size in the manifest is checked. A split of up to SMALL_BYTES is hashed whenever it is opened; a larger
one is hashed beside the first steps (corpus.py). `prepare --check` hashes all. A flat file has no hashes.
"""

import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from torchtitan_lite.config.files import find_damage, read_json_object
from torchtitan_lite.config.messages import Problem
from torchtitan_lite.data.text_files import explain_missing_package, split_suffix
from torchtitan_lite.data.vocabulary import Vocabulary

FORMAT = 1
MANIFEST = "manifest.json"
SPLITS = {"train": "train", "validation": "held_out"}  # our name of a split -> its name in the files
BYTES_OF = {"uint16": 2, "uint32": 4}
AGAIN = "Copy the folder again, or prepare it again"
MAX_MANIFEST_BYTES = 2**26  # a hundred times what a thousand shards take
SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
SMALL_BYTES = 2**26  # hashed in 0.04 s (1.6 GiB/s measured)


class CorpusError(ValueError):
    """A corpus that cannot be used: the file, what is wrong with it, and a remedy where a special one exists."""

    def __init__(self, why: str, remedy: str = ""):
        super().__init__(why)
        self.remedy = remedy


@dataclass(frozen=True)
class Shard:
    """The files NAME.tokens and NAME.documents, and NAME.targets where it has a hash."""

    name: str
    n_tokens: int
    n_documents: int
    n_text_bytes: int  # of the documents, in UTF-8
    tokens_sha256: str
    documents_sha256: str
    targets_sha256: str = ""  # none: each token but a document's first is a target


@dataclass(frozen=True)
class CorpusManifest:
    """manifest.json of a prepared corpus. Field names are those of the file."""

    dtype: Literal["uint16", "uint32"]
    tokenizer_identity: str  # of the tokenizer that made the ids
    vocab_size: int  # of that tokenizer: every id is below
    held_out_share: float  # of the documents
    splits: dict[str, list[Shard]]  # "train" and "held_out", shards in the order of the corpus
    sources_sha256: str

    @property
    def identity(self) -> str:
        """A hash that two corpora share only if all their tokens, documents and targets are equal."""
        shards = [(name, shard) for name in SPLITS.values() for shard in self.splits[name]]
        parts = [(name, s.tokens_sha256, s.documents_sha256, s.targets_sha256) for name, s in shards]
        parts = [part if part[-1] else part[:-1] for part in parts]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def list_files(self, *splits: str) -> dict[str, tuple[int, str]]:
        """Return size and SHA-256 of each file of these splits (all by default), by its name."""
        files = {}
        for shard in (shard for split in splits or SPLITS for shard in self.splits[SPLITS[split]]):
            files[f"{shard.name}.tokens"] = (shard.n_tokens * BYTES_OF[self.dtype], shard.tokens_sha256)
            files[f"{shard.name}.documents"] = ((shard.n_documents + 1) * 8, shard.documents_sha256)
            if shard.targets_sha256:
                files[f"{shard.name}.targets"] = (shard.n_tokens, shard.targets_sha256)
        return files


def dump_manifest(manifest: CorpusManifest) -> str:
    """Return the text of manifest.json. A shard without marks does not mention them, as in corpora made before."""
    content = asdict(manifest, dict_factory=lambda items: {k: v for k, v in items if (k, v) != ("targets_sha256", "")})
    return json.dumps({"format": FORMAT, **content, "identity": manifest.identity}, indent=1) + "\n"


def read_manifest(folder: Path) -> CorpusManifest:
    """Read the manifest and compare the size of every file with it. Raises CorpusError."""
    manifest = parse_manifest(folder)
    check_sizes(folder, manifest)
    return manifest


def read_split(folder: Path, split: str, vocabulary: Vocabulary | None) -> tuple[CorpusManifest, dict[Path, str]]:
    """Return the manifest, and the SHA-256 of the files of `split` if they are too large to be hashed now.

    Raises CorpusError, also where the split has no documents, or where another tokenizer than `vocabulary` made it.
    """
    manifest = read_manifest(folder)
    unhashed = check_small(folder, manifest, split)
    if vocabulary and manifest.tokenizer_identity != vocabulary.identity:
        raise CorpusError(
            f"{folder} was made with another tokenizer than {vocabulary.path}",
            "Set model.hf_assets_path to the one that made it, or prepare it again with --tokenizer",
        )
    if not manifest.splits[SPLITS[split]]:
        remedy = "Prepare it again with a larger --held-out, name others in validation.dataset, or do not validate"
        raise CorpusError(f"{folder} has no {split} documents", remedy if split == "validation" else "")
    return manifest, unhashed


def parse_manifest(folder: Path) -> CorpusManifest:
    """Read the manifest of a corpus whose other files may be damaged. Raises CorpusError."""
    path = folder / MANIFEST
    try:
        content = read_json_object(path, MAX_MANIFEST_BYTES)
    except ValueError as error:
        remedy = AGAIN if os.access(path, os.R_OK) else ""
        raise CorpusError(f"{path} {error}, so this is no prepared corpus", remedy) from None
    try:
        manifest = parse_content(content)
        if manifest.identity != content["identity"]:
            raise ValueError("it was changed, since its hashes do not match its identity")
    except (KeyError, TypeError, ValueError) as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__} "
        raise CorpusError(f"{path} is not what prepare writes: {kind}{error}", AGAIN) from None
    return manifest


def parse_content(content: dict[str, Any]) -> CorpusManifest:
    """Return the manifest. Raises KeyError, TypeError or ValueError for what `dump_manifest` would not write."""
    if content["format"] != FORMAT:
        raise ValueError(f"its format is not {FORMAT}, the only one known here")
    if content["dtype"] not in BYTES_OF:
        raise ValueError(f"dtype is {content['dtype']!r:.60}")
    splits = {name: [Shard(**raw) for raw in content["splits"][name]] for name in SPLITS.values()}
    manifest = CorpusManifest(**{f.name: content[f.name] for f in fields(CorpusManifest)} | {"splits": splits})
    shards = [shard for of_split in splits.values() for shard in of_split]
    for record in (manifest, *shards):
        for field in fields(record):
            value = getattr(record, field.name)
            if field.type in (int, str) and (type(value) is not field.type or (field.type is int and value < 0)):
                raise ValueError(f"{field.name} is {value!r:.60}")
    for shard in shards:
        if not SHARD_NAME.fullmatch(shard.name):
            raise ValueError(f"{shard.name!r:.60} is not a plain name of a shard")
        if not 0 < shard.n_documents <= shard.n_tokens:  # no document is empty
            raise ValueError(f"shard {shard.name} has {shard.n_documents} documents in {shard.n_tokens} tokens")
    if len({shard.name for shard in shards}) < len(shards):
        raise ValueError("two shards have one name")
    return manifest


def check_sizes(folder: Path, manifest: CorpusManifest) -> None:
    """Raise CorpusError for a file that is absent, unreadable, or of another size than the manifest says."""
    for name, (size, _) in manifest.list_files().items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            raise CorpusError(f"{folder / name} cannot be read ({error.strerror})", AGAIN) from None
        check_readable(folder / name)
        if found != size:
            raise CorpusError(f"{folder / name} has {found} bytes, and the manifest says {size}", AGAIN)


def check_small(folder: Path, manifest: CorpusManifest, *splits: str) -> dict[Path, str]:
    """Hash the files of these splits if they are small together, else return their SHA-256. Raises CorpusError."""
    files = manifest.list_files(*splits)
    hashes = {folder / name: sha256 for name, (_, sha256) in files.items()}
    if sum(size for size, _ in files.values()) > SMALL_BYTES:
        return hashes
    if damage := find_damage(hashes):
        raise CorpusError("; ".join(damage[:3]), AGAIN)
    return {}


def check_readable(path: Path) -> None:
    if not os.access(path, os.R_OK):
        raise CorpusError(f"{path} may not be read by this user", f"Allow it: chmod a+r {path}")


def choose_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the smallest type that holds every id."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


# ---------------------------------------------------------------- flat files


def measure_flat(path: Path, vocab_size: int) -> tuple[str, int]:
    """Return type and number of the ids in a flat file. Raises CorpusError."""
    if not path.is_file():
        raise CorpusError(f"there is no corpus {path}")
    if path.suffix != ".bin":
        raise CorpusError(f"{path} is no .bin file of token ids", "Make token ids with `prepare`, and name its folder")
    check_readable(path)
    dtype, n_bytes = choose_dtype(vocab_size), path.stat().st_size
    if n_bytes % BYTES_OF[dtype] or n_bytes < 2 * BYTES_OF[dtype]:
        raise CorpusError(
            f"{path} has {n_bytes} bytes, which are not two or more ids of {BYTES_OF[dtype]} bytes",
            f"Write it again as {dtype}, the type of ids below {vocab_size}",
        )
    return dtype, n_bytes // BYTES_OF[dtype]


# ---------------------------------------------------------------- what training.dataset may name


def list_python_stdlib() -> list[Path]:
    """Return the sources of the running Python's standard library, about 11 MB: real text on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo"}
    # _sysconfigdata* is written when Python is built, so it differs between machines that have the same Python.
    return sorted(
        path
        for path in root.rglob("*.py")
        if left_out.isdisjoint(path.relative_to(root).parts) and not path.name.startswith("_sysconfigdata")
    )


# A name for training.dataset -> a function that lists its files, one document each. A fork adds a row.
DATASETS: dict[str, Callable[[], list[Path]]] = {
    "python_stdlib": list_python_stdlib,
}


@dataclass(frozen=True)
class Download:
    """A corpus of files that the user has downloaded."""

    folder: str  # where they are without a dataset_path: as torchtitan names it
    split: Literal["train", "validation", "all"]  # of the files there; "validation": those below a name with that word
    advice: str  # what to download


# torchtitan's names. A name for training.dataset or validation.dataset -> where its documents come from.
DOWNLOADS = {
    "c4": Download(
        "allenai/c4",
        "train",
        "Download en/c4-train.00000-of-01024.json.gz, and as many of the 1,024 as you want, of the dataset allenai/c4",
    ),
    "c4_validation": Download(
        "allenai/c4",
        "validation",
        "Download en/c4-validation.00000-of-00008.json.gz, or all 8, of the dataset allenai/c4",
    ),
    "c4_test": Download(
        "tests/assets/c4_test",
        "all",
        "Start in a checkout of torchtitan, which has them, or download a file of the dataset allenai/c4",
    ),
}
DOWNLOADED_KINDS = (".json", ".jsonl", ".parquet")  # one document a line, or a row; also .gz and .zst of the first two


def list_dataset(name: str, dataset_path: str) -> list[Path]:
    """Return the files of a corpus of DATASETS or DOWNLOADS, in its order. Raises CorpusError where there is none."""
    if name in DATASETS:
        if files := DATASETS[name]():
            return files
        raise CorpusError(f"no files of {name} were found on this machine")
    row = DOWNLOADS[name]
    path = Path(dataset_path or row.folder)
    folder = path.parent if path.is_file() else path
    if (path / "en").is_dir():  # the other languages of allenai/c4 are beside it
        folder = path / "en"
    files = []
    for file in [path] if path.is_file() else sorted(folder.rglob("*")):
        inside = file.relative_to(folder).as_posix()
        is_hidden = any(part.startswith(".") for part in Path(inside).parts)
        is_meant = row.split == "all" or (row.split == "validation") == ("validation" in inside)
        if is_meant and not is_hidden and file.is_file() and split_suffix(inside)[0] in DOWNLOADED_KINDS:
            files.append(file)
    keys = "training.dataset_path (validation.dataset_path, where validation has a folder of its own)"
    remedy = f"{row.advice}, and name its folder in {keys}"
    if not files:
        why = f"is where {name} would be, and it does not exist"
        if path.exists():
            why = f"holds no file of {name} ({', '.join(DOWNLOADED_KINDS)}, .gz or .zst)"
        raise CorpusError(f"{path.absolute()} {why}", remedy)
    for file in files:
        if missing := explain_missing_package(str(file)):
            raise CorpusError(missing, f"Install it, or {remedy[0].lower()}{remedy[1:]}")
        check_readable(file)
    return files


# ---------------------------------------------------------------- before a run


def check_corpora(
    key: str, names: Sequence[str], *, split: str, vocabulary: Vocabulary | None, dataset_path: str = ""
) -> list[Problem]:
    """Return the corpora that cannot be read, or whose ids another vocabulary made. Hashes those that are small.

    `dataset_path` is where those of DOWNLOADS are. Without a vocabulary, because the tokenizer has a problem of its
    own, ids are not judged.
    """
    named = ", ".join((*DATASETS, *DOWNLOADS))
    problems = []
    for name in names:
        try:
            if name in DOWNLOADS:
                list_dataset(name, dataset_path)
            elif name in DATASETS:
                continue
            elif Path(name).is_dir():
                read_split(Path(name), split, vocabulary)
            else:
                measure_flat(Path(name), vocabulary.vocab_size if vocabulary else 1)
        except CorpusError as error:
            remedy = error.remedy or f"Name a folder made by `prepare`, a .bin file of token ids, or one of {named}"
            problems.append(Problem(key, name, str(error), remedy))
    if not names:
        problems.append(Problem(key, [], "it names no corpus", f"Name one, {named} for instance"))
    return problems


def check_weights(weights: Sequence[float], n_corpora: int) -> list[Problem]:
    """Return what is wrong with training.dataset_weights."""
    key, value = "training.dataset_weights", list(weights)
    if weights and len(weights) != n_corpora:
        why = f"training.dataset names {n_corpora} corpora"
        return [Problem(key, value, why, "Give one weight for each, or none: every sample then counts the same")]
    try:
        split_round(weights)
    except ValueError as error:
        return [Problem(key, value, str(error), "Leave that corpus out, or raise its weight")]
    return []


DRAWS_PER_ROUND = 10_000


def split_round(weights: Sequence[float]) -> list[int]:
    """Return how many of DRAWS_PER_ROUND draws each corpus gets; draws left over go to the largest remainders.

    Raises ValueError for a weight that is not positive, or so small that its corpus would never be drawn.
    """
    if any(weight <= 0 for weight in weights):
        raise ValueError("every weight must be above 0")
    shares = [weight / sum(weights) * DRAWS_PER_ROUND for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda source: counts[source] - shares[source])
    for source in by_remainder[: DRAWS_PER_ROUND - sum(counts)] if weights else []:
        counts[source] += 1
    if not all(counts):
        raise ValueError(f"a weight below 1/{DRAWS_PER_ROUND} of their sum means never")
    return counts
