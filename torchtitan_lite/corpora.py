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
"""

import hashlib
import json
import sysconfig
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

FORMAT = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "held_out")
BYTES_OF = {"uint16": 2, "uint32": 4}


class CorpusError(ValueError):
    """A corpus that cannot be used: what is wrong, with the file."""


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
    n_words: int  # of it: every id is below
    held_out_share: float  # of the documents
    splits: dict[str, list[Shard]]  # "train" and "held_out", in the order of the corpus
    sources_sha256: str

    @property
    def identity(self) -> str:
        """Equal for two corpora exactly if all their tokens and borders are."""
        parts = [(name, shard.tokens_sha256, shard.documents_sha256) for name in SPLITS for shard in self.splits[name]]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


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
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CorpusError(f"{path} cannot be read ({error.strerror}), so this is no prepared corpus") from None
    except ValueError as error:
        raise CorpusError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CorpusError(f"{path} is not of format {FORMAT}, the only one known here")
    try:
        fields = {name: content[name] for name in Manifest.__dataclass_fields__}
        fields["splits"] = {name: [Shard(**shard) for shard in content["splits"][name]] for name in SPLITS}
        manifest = Manifest(**fields)
        names = [shard.name for name in SPLITS for shard in manifest.splits[name]]
        identical = manifest.identity == content["identity"]
        sound = manifest.dtype in BYTES_OF and all(name == Path(name).name for name in names)
    except (KeyError, TypeError, AttributeError) as error:
        raise CorpusError(f"{path} is not what prepare writes: {type(error).__name__} {error}") from None
    if not (identical and sound):
        raise CorpusError(f"{path} was changed: its hashes do not add up to its identity")
    return manifest


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raises CorpusError where a file has another size than the manifest says."""
    for shard in (shard for name in SPLITS for shard in manifest.splits[name]):
        sizes = {
            f"{shard.name}.tokens": shard.n_tokens * BYTES_OF[manifest.dtype],
            f"{shard.name}.documents": (shard.n_documents + 1) * 8,
        }
        for name, size in sizes.items():
            try:
                found = (folder / name).stat().st_size
            except OSError as error:
                raise CorpusError(f"{folder / name} cannot be read ({error.strerror})") from None
            if found != size:
                raise CorpusError(f"{folder / name} has {found} bytes, and the manifest says {size}")


def choose_dtype(n_words: int) -> Literal["uint16", "uint32"]:
    """The smallest type that holds every id."""
    return "uint16" if n_words <= 2**16 else "uint32"


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
