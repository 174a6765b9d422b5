"""What `training.dataset` may name, and the checks of it before a run. No torch.

python_stdlib        a row of DATASETS: tokenised on first use, into training.cache_folder
c4                   a row of DOWNLOADS: the same with files that training.dataset_path says where to find
data/my_corpus       a folder that `python -m torchtitan_lite prepare` wrote: corpus_folder.py
data/train.bin       a flat file of token ids, as nanoGPT writes it: uint16, or uint32 for a large vocabulary
"""

import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchtitan_lite.config.messages import Problem
from torchtitan_lite.data.corpus_folder import (
    SPLITS,
    CorpusError,
    check_readable,
    check_small,
    measure_flat,
    read_manifest,
)
from torchtitan_lite.data.file_kinds import explain_missing_package, split_suffix
from torchtitan_lite.data.vocabulary import Vocabulary


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

    @property
    def is_held_out(self) -> bool:
        return self.split == "validation"


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
        is_meant = row.split == "all" or row.is_held_out == ("validation" in inside)
        if is_meant and not is_hidden and file.is_file() and split_suffix(inside)[0] in DOWNLOADED_KINDS:
            files.append(file)
    keys = "training.dataset_path (validation.dataset_path, where validation has a folder of its own)"
    remedy = f"{row.advice}, and name its folder in {keys}"
    if not files:
        kinds = ", ".join(DOWNLOADED_KINDS)
        why = f"holds no file of {name} ({kinds}, .gz or .zst)" if path.exists() else f"is where {name} would be"
        raise CorpusError(f"{path.absolute()} {why}{'' if path.exists() else ', and it does not exist'}", remedy)
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
            check_corpus(name, split, vocabulary, dataset_path)
        except CorpusError as error:
            remedy = error.remedy or f"Name a folder made by `prepare`, a .bin file of token ids, or one of {named}"
            problems.append(Problem(key, name, str(error), remedy))
    if not names:
        problems.append(Problem(key, [], "it names no corpus", f"Name one, {named} for instance"))
    return problems


def check_corpus(name: str, split: str, vocabulary: Vocabulary | None, dataset_path: str) -> None:
    """Raises CorpusError."""
    path = Path(name)
    if name in DOWNLOADS:
        list_dataset(name, dataset_path)
    if name in DATASETS or name in DOWNLOADS:
        return
    if not path.is_dir():
        measure_flat(path, vocabulary.vocab_size if vocabulary else 1)
        return
    manifest = read_manifest(path)
    check_small(path, manifest, split)
    if vocabulary and manifest.tokenizer_identity != vocabulary.identity:
        raise CorpusError(
            f"{path} was made with another tokenizer than {vocabulary.path}",
            "Set model.hf_assets_path to the one that made it, or prepare it again with --tokenizer",
        )
    if not manifest.splits[SPLITS[split]]:
        remedy = "Prepare it again with a larger --held-out, name others in validation.dataset, or do not validate"
        raise CorpusError(f"{path} has no {split} documents", remedy if split == "validation" else "")


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
