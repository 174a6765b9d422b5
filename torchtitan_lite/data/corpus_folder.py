"""What `training.dataset` may name, what a prepared corpus holds, and the checks before a run. No torch.

    python_stdlib, c4    rows of DATASETS: tokenised on first use, into training.cache_folder
    data/my_corpus       a folder that `python -m torchtitan_lite prepare` wrote

A prepared corpus is a folder with three files for each of its splits, "train" and "held_out":

    train.tokens       token ids, little-endian, document after document
    train.documents    int64: the position of each document's first token
    train.targets      of conversations alone: a byte for each token, 1 where it is a target
    manifest.json      what is in them, with their SHA-256

The folder is renamed into place when all of it is written, so it is whole or absent. Sizes are compared whenever it is
opened, hashes by `prepare --check`: one wrong word among millions harms no run.
"""

import hashlib
import json
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from torchtitan_lite.config.files import find_damage
from torchtitan_lite.config.messages import Problem
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.tools.corpora.text_files import explain_missing_package

FORMAT = 2
MANIFEST = "manifest.json"
SPLITS = {"train": "train", "validation": "held_out"}  # our name of a split -> its name in the files
BYTES_OF = {"uint16": 2, "uint32": 4}
DRAWS_PER_ROUND = 10_000


class CorpusError(ValueError):
    """A corpus that cannot be used: the file, what is wrong with it, and what to do."""

    def __init__(self, why: str, remedy: str = "Copy the folder again, or prepare it again"):
        super().__init__(why)
        self.remedy = remedy


@dataclass(frozen=True)
class Split:
    """The files NAME.tokens, NAME.documents and, of conversations, NAME.targets."""

    n_tokens: int
    n_documents: int
    n_targets: int  # of conversations: tokens of the assistant
    n_text_bytes: int  # in UTF-8
    sha256: dict[str, str]  # suffix of a file -> its hash


@dataclass(frozen=True)
class CorpusManifest:
    """manifest.json of a prepared corpus, with these names."""

    dtype: Literal["uint16", "uint32"]
    tokenizer: str  # identity of the one that made the ids
    splits: dict[str, Split]
    format: int = FORMAT

    def identify(self, split: str) -> str:
        """Return a hash that two splits share only if their tokens, documents and targets are equal."""
        return hashlib.sha256(json.dumps(self.splits[split].sha256).encode()).hexdigest()

    def list_sizes(self) -> dict[str, int]:
        """Return the bytes of each file, by its name."""
        widths = {"tokens": BYTES_OF[self.dtype], "documents": 8, "targets": 1}
        return {
            f"{name}.{suffix}": widths[suffix] * (split.n_documents if suffix == "documents" else split.n_tokens)
            for name, split in self.splits.items()
            for suffix in split.sha256
        }


def choose_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the smallest type that holds every id."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def dump_manifest(manifest: CorpusManifest) -> str:
    return json.dumps(asdict(manifest), indent=1) + "\n"


def read_manifest(folder: Path) -> CorpusManifest:
    """Read the manifest, and compare the size of every file with it. Raises CorpusError."""
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_bytes())
        if raw["format"] != FORMAT:
            raise ValueError(f"its format is {raw['format']}, and this program reads {FORMAT}")
        manifest = CorpusManifest(**{**raw, "splits": {name: Split(**split) for name, split in raw["splits"].items()}})
        sizes = manifest.list_sizes()
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CorpusError(f"{folder} is no prepared corpus: {path.name}: {error}") from None
    for name, n_bytes in sizes.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != n_bytes:
            raise CorpusError(f"{folder / name} has {found or 'no'} bytes, and the manifest says {n_bytes}")
    return manifest


def check_corpus(folder: Path) -> list[str]:
    """Hash all files; return what is wrong with them. Raises CorpusError where sizes are wrong already."""
    splits = read_manifest(folder).splits.items()
    return find_damage(
        {folder / f"{name}.{suffix}": sha256 for name, split in splits for suffix, sha256 in split.sha256.items()}
    )


def read_split(folder: Path, split: str, tokenizer: Tokenizer | None) -> CorpusManifest:
    """Return the manifest. Raises CorpusError where the split is empty, or another tokenizer made it."""
    manifest = read_manifest(folder)
    if tokenizer and manifest.tokenizer != tokenizer.identity:
        remedy = "Set model.hf_assets_path to the one that made it, or prepare it again with --tokenizer"
        raise CorpusError(f"{folder} was made with another tokenizer than {tokenizer.path}", remedy)
    if SPLITS[split] not in manifest.splits:
        remedy = "Prepare it again with a larger --held-out, name others in validation.dataset, or do not validate"
        raise CorpusError(f"{folder} has no {split} documents", remedy)
    return manifest


# ---------------------------------------------------------------- corpora with a name


def list_python_stdlib(_: str = "") -> list[Path]:
    """Return the sources of the running Python's standard library, about 11 MB: real text on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo"}
    # _sysconfigdata* is written when Python is built, so it differs between machines that have the same Python.
    return sorted(
        path
        for path in root.rglob("*.py")
        if left_out.isdisjoint(path.relative_to(root).parts) and not path.name.startswith("_sysconfigdata")
    )


def list_downloaded(folder: str, pattern: str, advice: str, dataset_path: str) -> list[Path]:
    """Return the files of a corpus that the user has downloaded into `dataset_path`, else `folder`.

    Raises CorpusError.
    """
    path = Path(dataset_path or folder)
    files = [path] if path.is_file() else sorted(path.rglob(pattern))
    remedy = f"{advice}, and name its folder in training.dataset_path"
    if not files:
        raise CorpusError(f"{path.absolute()} holds no {pattern}", remedy)
    if missing := next(filter(None, map(explain_missing_package, files)), ""):
        raise CorpusError(missing, remedy)
    return files


# A name for training.dataset -> a function that lists its files for a training.dataset_path. A fork adds a row.
# The last three are torchtitan's.
C4 = "Download en/c4-train.00000-of-01024.json.gz, and as many of the others as you want, of the dataset allenai/c4"
DATASETS: dict[str, Callable[[str], list[Path]]] = {
    "python_stdlib": list_python_stdlib,
    "c4": partial(list_downloaded, "allenai/c4", "c4-train.*", C4),
    "c4_validation": partial(list_downloaded, "allenai/c4", "c4-validation.*", C4.replace("train", "validation")),
    "c4_test": partial(list_downloaded, "tests/assets/c4_test", "*.json*", "Start in a checkout of torchtitan"),
}
DOWNLOADS = DATASETS.keys() - {"python_stdlib"}  # they have a training.dataset_path
HELD_OUT = {"c4_validation"}  # all of their documents are for validation


# ---------------------------------------------------------------- before a run


def check_corpora(
    key: str, names: Sequence[str], *, split: str, tokenizer: Tokenizer | None, dataset_path: str = ""
) -> list[Problem]:
    """Return the corpora that cannot be read, or whose ids another tokenizer made.

    Without a tokenizer, because it has a problem of its own, ids are not judged.
    """
    problems = []
    for name in names:
        try:
            if name in DATASETS:
                DATASETS[name](dataset_path)
            else:
                read_split(Path(name), split, tokenizer)
        except CorpusError as error:
            problems.append(Problem(key, name, str(error), error.remedy))
    if not names:
        problems.append(Problem(key, [], "it names no corpus", f"Name one, {', '.join(DATASETS)} for instance"))
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
