"""Find corpora by their names in `training.dataset`, read their manifests, and check them before a run. Needs no torch.

    python_stdlib, c4    rows of DATASETS: the launcher prepares them in training.cache_folder
    data/my_corpus       a folder that `python3 -m torchtitan_lite prepare` wrote

A prepared corpus is a folder with a manifest and up to three files per split, "train" and "validation":

    train.tokens       token ids, little-endian, document after document
    train.documents    int64: position of each document's first token
    train.targets      conversations only: one byte per token, 1 if the token is a target
    manifest.json      sizes and SHA-256 of these files

The folder is written under a temporary name, and renamed when it is complete. Opening a corpus compares file sizes with
the manifest; `prepare --check` compares hashes.
"""

import hashlib
import json
import os
import shlex
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal

from torchtitan_lite.config.extensions import load_extension, load_module
from torchtitan_lite.config.messages import Refused, UserError, name_command
from torchtitan_lite.config.schema import Config, Training
from torchtitan_lite.data.tokenizer import Tokenizer

CORPUS_FORMAT = 3
CORPUS_MANIFEST = "manifest.json"
WIDTHS = {"uint16": 2, "uint32": 4}  # bytes per token


class CorpusError(UserError):
    """Raised if a corpus cannot be used. `why` describes the problem and names the file. `remedy` explains how to fix
    the problem."""

    def __init__(self, why: str, remedy: str = "Delete the folder, and prepare or copy it again"):
        self.why, self.remedy = why, remedy
        super().__init__(f"{why}. {remedy}.")


@dataclass(frozen=True)
class CorpusSplit:
    """The files NAME.tokens, NAME.documents and, for conversations, NAME.targets."""

    n_tokens: int
    n_documents: int
    n_targets: int  # conversations: number of the assistant's tokens
    n_text_bytes: int  # in UTF-8
    sha256: dict[str, str]  # suffix of a file -> hash of its content

    @property
    def fingerprint(self) -> str:
        """A hash of the split's tokens, documents and targets."""
        return hashlib.sha256(json.dumps(self.sha256).encode()).hexdigest()


@dataclass(frozen=True)
class CorpusManifest:
    """The fields of manifest.json."""

    dtype: Literal["uint16", "uint32"]
    tokenizer: str  # Tokenizer.fingerprint
    splits: dict[str, CorpusSplit]
    format: int = CORPUS_FORMAT


def dump_manifest(manifest: CorpusManifest) -> str:
    """Return the content of manifest.json."""
    return json.dumps(asdict(manifest), indent=1) + "\n"


def read_corpus_manifest(folder: Path) -> CorpusManifest:
    """Read the manifest of a corpus. Raises CorpusError."""
    try:
        file = json.loads((folder / CORPUS_MANIFEST).read_bytes())
        if file["format"] != CORPUS_FORMAT:
            raise ValueError(
                f"its format is {file['format']}, but this version reads {CORPUS_FORMAT}"
            )
        if file["dtype"] not in WIDTHS:
            raise ValueError(f"dtype = {file['dtype']!r}; use {' or '.join(WIDTHS)}")
        splits = {name: CorpusSplit(**split) for name, split in file["splits"].items()}
        return CorpusManifest(file["dtype"], file["tokenizer"], splits)
    except (FileNotFoundError, NotADirectoryError):
        raise explain_missing(folder) from None
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise CorpusError(
            f"{folder} is not a prepared corpus: {CORPUS_MANIFEST}: {error}"
        ) from None


def explain_missing(folder: Path) -> CorpusError:
    """Return an error that says how to prepare the corpus in `folder`, which has no manifest."""
    name = shlex.quote(str(folder))
    if not folder.exists():
        why = f"there is no folder {folder.absolute()}, and nothing is downloaded"
        remedy = (
            f"Prepare this corpus: {name_command(f'prepare FILES --tokenizer ... --out {name}')}"
        )
        return CorpusError(why, remedy)
    if why := load_extension("hub_names").explain_hub_cache(folder):
        return CorpusError(why, f"Prepare them: {name_command('prepare FILES --out NEW_FOLDER')}")
    remedy = f"Prepare its files: {name_command(f'prepare {name} --out NEW_FOLDER')}"
    return CorpusError(f"{folder} is not a prepared corpus: it has no {CORPUS_MANIFEST}", remedy)


def open_split(folder: Path, split: str, tokenizer: Tokenizer | None) -> CorpusManifest:
    """Read the manifest of a corpus, and compare the size of every file with the manifest.

    Raises CorpusError if a size differs from the manifest, if `split` is missing, or if the corpus was prepared with a
    tokenizer other than `tokenizer`.
    """
    manifest = read_corpus_manifest(folder)
    widths = {"tokens": WIDTHS[manifest.dtype], "documents": 8, "targets": 1}
    for name, own in manifest.splits.items():
        for suffix in own.sha256:
            n_entries = own.n_documents if suffix == "documents" else own.n_tokens
            n_bytes = n_entries * widths[suffix]
            path = folder / f"{name}.{suffix}"
            found = path.stat().st_size if path.is_file() else 0
            if found != n_bytes:
                expected = f"but the manifest says {n_bytes}"
                raise CorpusError(f"{path} has {found or 'no'} bytes, {expected}")
    if tokenizer and manifest.tokenizer != tokenizer.fingerprint:
        remedy = (
            f"Prepare it again with --tokenizer {shlex.quote(str(tokenizer.path))}. If no weights are loaded, you can "
            "use the tokenizer of the corpus instead (model.hf_assets_path, or --tokenizer of `eval`)"
        )
        why = f"{folder} was prepared with a different tokenizer, not with {tokenizer.path}"
        raise CorpusError(why, remedy)
    if split not in manifest.splits:
        remedy = "Prepare it again with a larger --validation-share, or name a different corpus for validation"
        raise CorpusError(f"{folder} has no {split} documents", remedy)
    return manifest


# ---------------------------------------------------------------- named corpora


NOT_READ = set(
    "test tests idle_test site-packages dist-packages idlelib lib2to3 turtledemo".split()
)


@cache
def list_python_stdlib(_: str = "") -> list[Path]:
    """Return the source files of the running Python's standard library: 11 MB of real text on every machine."""
    files = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = set(folders) - NOT_READ
        # _sysconfigdata* is generated when Python is built, so these files differ between machines with the same
        # Python.
        for name in names:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                files.append(Path(folder, name))
    return sorted(files)


def list_downloaded(folder: str, pattern: str, advice: str, dataset_path: str) -> list[Path]:
    """Return the files of a downloaded corpus in `dataset_path`, or in `folder` by default. Raises CorpusError."""
    path = Path(dataset_path or folder)
    # a cache folder may contain several versions of the corpus
    if why := load_extension("hub_names").explain_hub_cache(path):
        raise CorpusError(
            why, "Set training.dataset_path, or --dataset-path of `prepare`, to that folder"
        )
    files = [path] if path.is_file() else sorted(path.rglob(pattern))
    # leave out the metadata of Hugging Face downloads
    files = [file for file in files if not file.relative_to(path).parts[:1] == (".cache",)]
    if not files:
        remedy = f"{advice}, and set training.dataset_path, or --dataset-path of `prepare`, to the folder of the files"
        raise CorpusError(f"{path.absolute()} has no {pattern}", remedy)
    return files


# Name in training.dataset -> function that takes training.dataset_path and returns the files. A fork adds a row.
C4 = "Download en/c4-{}.json.gz, and more such files if you like, from the dataset allenai/c4"
DATASETS: dict[str, Callable[[str], list[Path]]] = {
    "python_stdlib": list_python_stdlib,
    "c4": partial(list_downloaded, "allenai/c4", "c4-train.*", C4.format("train.00000-of-01024")),
    "c4_validation": partial(
        list_downloaded,
        "allenai/c4",
        "c4-validation.*",
        C4.format("validation.00000-of-00008"),
    ),
    "c4_test": partial(list_downloaded, "tests/assets/c4_test", "*.json*", "Check out torchtitan"),
}
VALIDATION_ONLY = {"c4_validation"}  # all documents are for validation


def choose_split(name: str, split: str) -> str:
    """Return the prefix of the files to read. If a corpus is only for validation, all its documents are in train.*."""
    return "train" if name in VALIDATION_ONLY else split


def list_corpus_files(name: str, dataset_path: str) -> list[Path]:
    """Return the files of a named corpus. Raises CorpusError if there are no files."""
    files = DATASETS[name](dataset_path)
    if not files:
        why = f"the function of {name} in DATASETS returned no files"
        raise CorpusError(why, "Correct the function (data/corpus_folder.py)")
    return files


def find_corpus(name: str, tokenizer: Tokenizer, cache_folder: Path, dataset_path: str) -> Path:
    """Return the folder of a corpus. A named corpus has one folder per tokenizer and list of files. Raises
    CorpusError."""
    if name not in DATASETS:
        return Path(name)
    stats = []
    for path in list_corpus_files(name, dataset_path):
        stat = path.stat()
        stats.append(f"{path}:{stat.st_size}:{stat.st_mtime_ns}")
    content = repr([CORPUS_FORMAT, tokenizer.fingerprint, *stats]).encode()
    return cache_folder / f"{name}-{hashlib.sha256(content).hexdigest()[:16]}"


def find_prepared(name: str, tokenizer: Tokenizer, cache_folder: Path, dataset_path: str) -> Path:
    """Return the folder of a corpus. Raises CorpusError if a named corpus is not prepared on this host.

    The launcher prepares named corpora; ranks only read them.
    """
    folder = find_corpus(name, tokenizer, cache_folder, dataset_path)
    if name not in DATASETS or (folder / CORPUS_MANIFEST).is_file():
        return folder
    words = ["--dataset", name, "--tokenizer", str(tokenizer.path)]
    words += ["--cache-folder", str(cache_folder)]
    if dataset_path:
        words += ["--dataset-path", dataset_path]
    command = name_command(f"prepare {shlex.join(words)}")
    raise CorpusError(f"{name} is not prepared here", f"Run: {command}")


def list_corpora(config: Config) -> list[tuple[str, str, str, str]]:
    """Return (config key, name, split, dataset_path) for every corpus that a run reads."""
    training = config.training
    validation = config.validation
    key = "training.dataset"
    corpora = [(key, name, "train", training.dataset_path) for name in training.dataset]
    if validation.enable:
        names = training.dataset
        if validation.dataset:
            key = "validation.dataset"
            names = validation.dataset
        dataset_path = validation.dataset_path or training.dataset_path
        corpora += [(key, name, "validation", dataset_path) for name in names]
    return corpora


# ---------------------------------------------------------------- before a run


def check_data(config: Config, tokenizer: Tokenizer | None) -> Refused:
    """Find corpora that are missing, damaged, or prepared with a different tokenizer. `tokenizer` is None if
    unknown."""
    training = config.training
    refused = set()
    for key, name, split, dataset_path in list_corpora(config):
        try:
            if name in DATASETS:
                list_corpus_files(name, dataset_path)
            else:
                open_split(Path(name), split, tokenizer)
        except CorpusError as error:
            if (key, error.why) not in refused:  # both splits may have the same problem
                refused.add((key, error.why))
                yield key, error.why, error.remedy, name
    if not training.dataset:
        remedy = f"Name at least one: {', '.join(DATASETS)}, or a folder that `prepare` wrote"
        yield "training.dataset", "it names no corpus", remedy
    if training.dataset_path or training.dataset_weights or config.validation.dataset_path:
        yield from load_module("data.corpus_rules").check_keys(config)


# number of tokens in the library of Python 3.11, with the shipped tokenizer
STDLIB_TOKENS = 3_600_000
MOST_EPOCHS = 4  # epochs beyond this number help little: arXiv:2305.16264


def describe_epochs(training: Training) -> Iterator[str]:
    """If a run repeats python_stdlib often, yield a notice with the commands that prepare a larger corpus."""
    n_tokens = training.steps * training.global_batch_size * training.seq_len
    n_epochs = n_tokens / STDLIB_TOKENS
    if training.dataset != ["python_stdlib"] or n_epochs < MOST_EPOCHS:
        return
    file = "HuggingFaceFW/fineweb-edu sample/10BT/000_00000.parquet"
    download = f"hf download {file} --repo-type dataset --local-dir fineweb-edu"
    prepare = name_command("prepare fineweb-edu --out data/fineweb-edu")
    why = f"the run reads {n_epochs:,.0f} epochs of {STDLIB_TOKENS / 1e6}M tokens of python_stdlib"
    yield f"{why}. For --training.dataset data/fineweb-edu: {download}; {prepare}"
