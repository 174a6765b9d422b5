"""Where tokens lie: what `training.dataset` may name, and the manifest of a prepared corpus. No torch.

    python_stdlib        a name of NAMED: tokenised on first use, into training.cache_folder
    data/my_corpus       a folder that `python -m torchtitan_lite prepare` made
    data/train.bin       a flat file of token ids, as nanoGPT writes them: uint16, uint32 for large vocabularies

A prepared corpus is a folder, whole or absent:

    manifest.json            what there is, with sizes and SHA-256; written last
    train-00000.tokens       token ids, little-endian, document after document
    train-00000.documents    uint64: where each document begins in that file; the last entry is its length
    held_out-00000.tokens    documents that are never trained on, chosen by a hash of their text
    sources.jsonl            the files that were read, one object a line

A document never lies in two shards.

Nothing in such a folder is believed: it may have been copied, or made by another program. The manifest is checked for
types, names and sizes before anything else. Splits of up to SMALL_BYTES are hashed whenever they are opened, larger
ones beside the first steps (data/background_hash.py). `prepare --check` hashes all. A flat file has no hashes to
compare with.
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

from torchtitan_lite.config.files import find_damage
from torchtitan_lite.config.json_file import read_json_object
from torchtitan_lite.config.schema import Problem
from torchtitan_lite.data.vocabulary import Vocabulary

FORMAT = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "held_out")
BYTES_OF = {"uint16": 2, "uint32": 4}
AGAIN = "Copy the folder again, or prepare it again"
MOST_MANIFEST_BYTES = 2**26  # a hundred times what a thousand shards take
SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
SMALL_BYTES = 2**26  # hashed in 0.04 s (1.6 GiB/s measured)


class CorpusError(ValueError):
    """A corpus that cannot be used: what is wrong, with the file; and what to do, where that is special."""

    def __init__(self, why: str, remedy: str = ""):
        super().__init__(why)
        self.remedy = remedy


@dataclass(frozen=True)
class Shard:
    """One pair of files, NAME.tokens and NAME.documents."""

    name: str
    n_tokens: int
    n_documents: int
    n_text_bytes: int  # of the documents, in UTF-8
    tokens_sha256: str
    documents_sha256: str


@dataclass(frozen=True)
class Manifest:
    dtype: Literal["uint16", "uint32"]
    tokenizer_identity: str  # of the tokenizer that made the ids
    vocab_size: int  # of it: every id is below
    held_out_share: float  # of the documents
    splits: dict[str, list[Shard]]  # "train" and "held_out", in the order of the corpus
    sources_sha256: str

    @property
    def identity(self) -> str:
        """Equal for two corpora exactly if all their tokens and borders are."""
        parts = [(name, shard.tokens_sha256, shard.documents_sha256) for name in SPLITS for shard in self.splits[name]]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def list_files(self, *splits: str) -> dict[str, tuple[int, str]]:
        """Size and SHA-256 of each file of these splits, by its name."""
        files = {}
        for shard in (shard for split in splits for shard in self.splits[split]):
            files[f"{shard.name}.tokens"] = (shard.n_tokens * BYTES_OF[self.dtype], shard.tokens_sha256)
            files[f"{shard.name}.documents"] = ((shard.n_documents + 1) * 8, shard.documents_sha256)
        return files


def dump_manifest(manifest: Manifest) -> str:
    return json.dumps({"format": FORMAT, **asdict(manifest), "identity": manifest.identity}, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a whole corpus, after a look at the size of every file. Raises CorpusError."""
    manifest = parse_manifest(folder)
    check_sizes(folder, manifest)
    return manifest


def parse_manifest(folder: Path) -> Manifest:
    """The manifest of a corpus whose other files may be damaged. Raises CorpusError."""
    path = folder / MANIFEST
    try:
        content = read_json_object(path, MOST_MANIFEST_BYTES)
    except ValueError as error:
        remedy = AGAIN if os.access(path, os.R_OK) else ""
        raise CorpusError(f"{path} {error}, so this is no prepared corpus", remedy) from None
    if type(content.get("format")) is not int or content["format"] != FORMAT:
        raise CorpusError(f"{path} is not of format {FORMAT}, the only one known here", AGAIN)
    try:
        manifest = parse_content(content)
        identical = manifest.identity == content["identity"]
    except (KeyError, TypeError) as error:
        raise CorpusError(f"{path} is not what prepare writes: {type(error).__name__} {error}", AGAIN) from None
    except ValueError as error:
        raise CorpusError(f"{path} is not what prepare writes: {error}", AGAIN) from None
    if not identical:
        raise CorpusError(f"{path} was changed: its hashes do not add up to its identity", AGAIN)
    return manifest


def parse_content(content: dict[str, Any]) -> Manifest:
    """Raises KeyError, TypeError or ValueError for what `dump_manifest` would not write."""
    if content["dtype"] not in BYTES_OF:
        raise ValueError(f"dtype is {content['dtype']!r:.60}")
    splits = {name: [parse_shard(shard) for shard in content["splits"][name]] for name in SPLITS}
    names = [shard.name for shards in splits.values() for shard in shards]
    if len(set(names)) < len(names):
        raise ValueError("two shards have one name")
    manifest = Manifest(**{name: content[name] for name in Manifest.__dataclass_fields__} | {"splits": splits})
    check_types(manifest)
    return manifest


def parse_shard(raw: dict[str, Any]) -> Shard:
    """Raises TypeError or ValueError for a shard that no unit of work makes."""
    shard = Shard(**raw)
    check_types(shard)
    if not SHARD_NAME.fullmatch(shard.name):
        raise ValueError(f"{shard.name!r:.60} is not a plain name of a shard")
    if not 0 < shard.n_documents <= shard.n_tokens:  # no document is empty
        raise ValueError(f"shard {shard.name} has {shard.n_documents} documents in {shard.n_tokens} tokens")
    return shard


def check_types(record: Manifest | Shard) -> None:
    """Raises ValueError for a number that is no count, and for a text that is none."""
    for field in fields(record):
        value = getattr(record, field.name)
        if field.type in (int, str) and (type(value) is not field.type or (field.type is int and value < 0)):
            raise ValueError(f"{field.name} is {value!r:.60}")


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raises CorpusError where a file has another size than the manifest says."""
    for name, (size, _) in manifest.list_files(*SPLITS).items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            raise CorpusError(f"{folder / name} cannot be read ({error.strerror})", AGAIN) from None
        check_readable(folder / name)
        if found != size:
            raise CorpusError(f"{folder / name} has {found} bytes, and the manifest says {size}", AGAIN)


def check_small(folder: Path, manifest: Manifest, *splits: str) -> dict[Path, str]:
    """Hash the files of these splits if they are small together, else return their hashes. Raises CorpusError."""
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
    """The smallest type that holds every id."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


# ---------------------------------------------------------------- several corpora

DRAWS_PER_ROUND = 10_000


def split_round(weights: Sequence[float]) -> list[int]:
    """How many of DRAWS_PER_ROUND draws each source gets: its share, the fractions that are left to the largest ones.

    Raises ValueError where a weight is not positive, or so small that its source would never be drawn.
    """
    if any(weight <= 0 for weight in weights):
        raise ValueError("every weight must be above 0")
    shares = [weight / sum(weights) * DRAWS_PER_ROUND for weight in weights]
    counts = [int(share) for share in shares]
    by_fraction = sorted(range(len(shares)), key=lambda source: counts[source] - shares[source])
    for source in by_fraction[: DRAWS_PER_ROUND - sum(counts)] if weights else []:
        counts[source] += 1
    if not all(counts):
        raise ValueError(f"a weight below 1/{DRAWS_PER_ROUND} of their sum means never")
    return counts


def check_weights(weights: Sequence[float], n_corpora: int) -> list[Problem]:
    """What is wrong with training.dataset_weights."""
    key, value = "training.dataset_weights", list(weights)
    if weights and len(weights) != n_corpora:
        why = f"training.dataset names {n_corpora} corpora"
        return [Problem(key, value, why, "Give one weight for each, or none: all samples are then drawn alike")]
    try:
        split_round(weights)
    except ValueError as error:
        return [Problem(key, value, str(error), "Leave that corpus out, or raise its weight")]
    return []


# ---------------------------------------------------------------- before a run


def check_corpora(key: str, names: Sequence[str], *, split: str, vocabulary: Vocabulary) -> list[Problem]:
    """Corpora that cannot be read, or whose ids `vocabulary` did not make. Shards are opened where they are small."""
    named = ", ".join(NAMED)
    problems = []
    for name in names:
        try:
            check_corpus(name, split, vocabulary)
        except CorpusError as error:
            remedy = error.remedy or f"Name a folder made by `prepare`, a .bin file of token ids, or one of {named}"
            problems.append(Problem(key, name, str(error), remedy))
    if not names:
        problems.append(Problem(key, [], "it names no corpus", f"Name one, {named} for instance"))
    return problems


def check_corpus(name: str, split: str, vocabulary: Vocabulary) -> None:
    """Raises CorpusError."""
    path = Path(name)
    if name in NAMED:
        return
    if not path.is_dir():
        measure_flat(path, vocabulary.vocab_size)
        return
    manifest = read_manifest(path)
    check_small(path, manifest, split)
    if manifest.tokenizer_identity != vocabulary.identity:
        raise CorpusError(
            f"{path} was made with another tokenizer than {vocabulary.path}",
            "Set model.hf_assets_path to the one that made it, or prepare it again with --tokenizer",
        )
    if not manifest.splits[split]:
        remedy = "Prepare it again with a larger --held-out, name others in validation.dataset, or do not validate"
        raise CorpusError(f"{path} has no {split} documents", remedy if split == "held_out" else "")


def measure_flat(path: Path, vocab_size: int) -> tuple[str, int]:
    """Type and number of the ids in a flat file. Raises CorpusError."""
    if not path.is_file():
        raise CorpusError(f"there is no corpus {path}")
    if path.suffix != ".bin":
        raise CorpusError(
            f"{path} is no .bin file of token ids", "Make token ids of text with `prepare`, and name those"
        )
    check_readable(path)
    dtype, n_bytes = choose_dtype(vocab_size), path.stat().st_size
    if n_bytes % BYTES_OF[dtype] or n_bytes < 2 * BYTES_OF[dtype]:
        raise CorpusError(
            f"{path} has {n_bytes} bytes, which are not two or more ids of {BYTES_OF[dtype]} bytes",
            f"Write it again as {dtype}, which is what ids below {vocab_size} have",
        )
    return dtype, n_bytes // BYTES_OF[dtype]


# ---------------------------------------------------------------- named corpora


def list_python_stdlib() -> list[Path]:
    """Sources of the running Python's standard library: real text that every machine has. About 11 MB."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo"}
    # _sysconfigdata* is written when Python is built: it differs between machines with the same Python
    return sorted(
        path
        for path in root.rglob("*.py")
        if left_out.isdisjoint(path.relative_to(root).parts) and not path.name.startswith("_sysconfigdata")
    )


# a name for training.dataset -> the files of that corpus, one document each
NAMED: dict[str, Callable[[], list[Path]]] = {"python_stdlib": list_python_stdlib}
