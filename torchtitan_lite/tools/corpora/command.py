"""Run `prepare`: create a corpus from text files, prepare a named corpus, or compare a corpus with its manifest."""

import argparse
import json
import os
import shlex
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from torchtitan_lite.config.messages import ConfigError, name_command, tell
from torchtitan_lite.data.corpus_folder import (
    CORPUS_MANIFEST,
    DATASETS,
    VALIDATION_ONLY,
    CorpusError,
    CorpusManifest,
    find_corpus,
    open_split,
    read_corpus_manifest,
)
from torchtitan_lite.data.corpus_rules import DOWNLOADS
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan_lite.files import find_damage
from torchtitan_lite.tools.corpora.prepare import PrepareSettings, prepare
from torchtitan_lite.tools.corpora.text_files import (
    PARQUET,
    ROW_SUFFIXES,
    PreparationError,
    find_files,
    get_kind,
    is_text,
)
from torchtitan_lite.tools.tables import plural

VALIDATION_SHARE = 0.02  # fraction of a named corpus that is for validation
MANY_BYTES = 2**26  # several processes encode files above this size faster than one process


def main(options: argparse.Namespace) -> int:
    """Run the command. Return its exit status."""
    if options.check:
        return check_corpus(options.check)
    try:
        if options.dataset:
            if options.dataset not in DATASETS:
                raise PreparationError(
                    f"There is no corpus named {options.dataset!r}. Use {', '.join(DATASETS)}"
                )
            if options.dataset_path and options.dataset not in DOWNLOADS:
                raise PreparationError(
                    f"--dataset-path would have no effect with {options.dataset}. Leave it out"
                )
            tokenizer = load_tokenizer(options.tokenizer)
            corpus = (options.dataset, tokenizer, options.cache_folder, options.dataset_path)
            prepare_dataset(*corpus, skip_bad=options.skip_bad)
            summary = find_corpus(*corpus)
        else:
            summary = prepare_corpus(options)
    except ConfigError as error:
        raise PreparationError(
            f"--tokenizer {options.tokenizer}: {error.problems[0].why}. {error.problems[0].remedy}"
        ) from None
    except OSError as error:  # the disk may be full
        folder = options.out or options.cache_folder
        tell(f"The corpus in {folder} could not be created: {error}")
        return 1
    with suppress(BrokenPipeError):  # a closed pipe is not an error: the corpus is complete
        print(summary)
    return 0


def prepare_dataset(
    name: str,
    tokenizer: Tokenizer,
    cache_folder: Path,
    dataset_path: str = "",
    *,
    skip_bad: bool = False,
) -> bool:
    """Prepare a named corpus if it does not exist. Return False if it already exists, otherwise True.

    If two runs start at the same time, both prepare the corpus, and the first complete copy is kept. Raises
    CorpusError, PreparationError, OSError.
    """
    folder = find_corpus(name, tokenizer, cache_folder, dataset_path)
    if (folder / CORPUS_MANIFEST).exists():
        return False
    files = DATASETS[name](dataset_path)
    n_bytes = sum(path.stat().st_size for path in files)
    tell(f"Encoding {name}, {n_bytes / 1e6:,.1f} MB, once, to {folder}")
    share = 0.0 if name in VALIDATION_ONLY else VALIDATION_SHARE
    settings = PrepareSettings(str(tokenizer.path), share, skip_bad=skip_bad)
    n_processes = os.cpu_count() if n_bytes > MANY_BYTES else 1
    try:
        _, counts = prepare(files, folder, settings, n_processes=n_processes)
        print_counts(counts)
    except (OSError, PreparationError):
        # if the corpus exists now, another process has prepared it
        if not (folder / CORPUS_MANIFEST).exists():
            raise
    return True


def print_counts(counts: Counter[str]) -> None:
    """Print the number of rows or texts that were left out or replaced, by reason."""
    for reason, n in counts.items():
        tell(f"{reason}: {n:,}")


def prepare_corpus(options: argparse.Namespace) -> str:
    """Prepare the corpus, and return the text to print: a summary, or JSON."""
    if not options.inputs or not options.out:
        needed = "Name the input files and the output folder: prepare texts/ --out data/mine"
        if options.validation:
            needed += ". Write the inputs first, because --validation takes all files after it"
        raise PreparationError(needed)
    if options.chat and options.train_tokenizer:
        raise PreparationError(
            "--train-tokenizer cannot be used with --chat: a new tokenizer has no chat template. Name a --tokenizer"
        )
    files, counts = find_files([*options.validation, *options.inputs], options.suffix)
    kinds = set(map(get_kind, files))
    why = ""
    if options.text_column is not None and not kinds & ROW_SUFFIXES:
        why = "--text-column would have no effect, because every file is one text"
    try:
        "text".encode(options.encoding)
    except (LookupError, UnicodeError) as error:
        raise PreparationError(
            f"--encoding: {error}. Name an encoding that Python has, such as cp1252"
        ) from None
    if options.encoding != "utf-8" and kinds == {PARQUET}:
        why = "--encoding would have no effect, because Parquet stores text in UTF-8"
    if options.train_tokenizer and not all(map(Path.is_file, files)):
        why = "--train-tokenizer would read each file twice, but a pipe can be read only once"
    if why:
        raise PreparationError(f"{why}. Leave it out")
    share = options.validation_share
    tail = 0.0
    if len(files) == 1 and is_text(files[0]):
        tail = 0.1 if share is None else share
    elif share is None:
        share = 0.01
    settings = PrepareSettings(
        options.tokenizer,
        validation_share=0.0 if tail or options.validation else share,
        tail=tail,
        validation=options.validation,
        column=options.text_column,
        is_chat=options.chat,
        only_last_turn=options.only_last_turn,
        skip_bad=options.skip_bad,
        encoding=options.encoding,
        train_tokenizer=options.train_tokenizer,
    )
    manifest, outcomes = prepare(files, options.out, settings, n_processes=options.processes)
    counts += outcomes
    if options.json:
        report = {"folder": str(options.out), "files": len(files), "counts": counts}
        return json.dumps(report | asdict(manifest))
    lines = [f"{options.out} is complete, from {plural(len(files), 'file')}:"]
    for name, split in manifest.splits.items():
        figures = f"{plural(split.n_tokens, 'token')} in {plural(split.n_documents, 'document')}"
        if split.n_targets:
            figures += f" (targets: {split.n_targets:,})"
        lines.append(
            f"  {name:10} {figures}; {split.n_text_bytes / split.n_tokens:.2f} bytes per token"
        )
    for reason, n in counts.items():
        lines.append(f"  {reason}: {n:,}")
    return "\n".join([*lines, f"Train on it: {suggest_command(options, manifest)}"])


def suggest_command(options: argparse.Namespace, manifest: CorpusManifest) -> str:
    """Return a command that trains on the corpus.

    The command fine-tunes the weights in the tokenizer's folder. If this folder has no weights, the command trains the
    debug model.
    """
    assets = str(options.out / "tokenizer") if options.train_tokenizer else options.tokenizer
    run_folder = f"outputs/{options.out.name}"
    words = ["train", "--training.dataset", str(options.out), "--job.dump_folder", run_folder]
    if list(Path(assets).glob("*.safetensors")):
        words += ["--config", "finetune", "--checkpoint.initial_load_path", assets]
    else:
        n_rows = load_tokenizer(assets).vocab_size
        words += ["--model.hf_assets_path", assets, "--model.vocab_size", str(n_rows)]
    if "validation" not in manifest.splits:
        words.append("--validation.no_enable")
    return name_command(shlex.join(words))


def check_corpus(folder: Path) -> int:
    """Compare a corpus with its manifest. Print damaged files and return 1 if there are any."""
    manifest = read_corpus_manifest(folder)
    hashes = {}
    for name, split in manifest.splits.items():
        for suffix, expected in split.sha256.items():
            hashes[folder / f"{name}.{suffix}"] = expected
    problems = find_damage(hashes)
    if not problems:
        try:
            for name in manifest.splits:
                open_split(folder, name, None)
        except CorpusError as error:
            problems = [str(error)]
    print(
        "\n".join(problems) or f"{folder} is complete: every file has the SHA-256 in its manifest"
    )
    return bool(problems)
