"""Run `prepare`: make a corpus from text files, prepare a named corpus, or compare a corpus with its manifest."""

import argparse
import codecs
import json
import os
import shlex
import sys
from dataclasses import asdict
from math import ceil
from pathlib import Path

from torchtitan_lite.config.files import find_damage
from torchtitan_lite.config.schema import Training
from torchtitan_lite.data.corpus_folder import DATASETS, MANIFEST, CorpusError, CorpusManifest, read_manifest
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.preflight import SHIPPED
from torchtitan_lite.tools.corpora.named import prepare_dataset
from torchtitan_lite.tools.corpora.prepare import BAD_ROWS, PrepareSettings, prepare
from torchtitan_lite.tools.corpora.text_files import Batch, PreparationError, find_files

SHARE = 0.01  # default of --validation-share
TAIL = 0.1  # the same for a single text


def main(options: argparse.Namespace) -> int:
    """Run the command. Return its exit status."""
    try:
        if options.check:
            return check(options.check)
        output = prepare_named(options) if options.dataset else run(options)
    except OSError as error:  # for example a full disk
        print(f"The corpus could not be made: {error}", file=sys.stderr)
        return 1
    try:
        print(output, flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has ended; the corpus is complete
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def prepare_named(options: argparse.Namespace) -> str:
    """Prepare a corpus of DATASETS, and return its folder."""
    if options.inputs or options.out or options.validation or options.train_tokenizer:
        raise PreparationError("--dataset prepares a corpus of this name alone. Leave out other inputs and --out")
    if options.dataset not in DATASETS:
        raise PreparationError(f"There is no corpus named {options.dataset!r}. Use {', '.join(DATASETS)}")
    tokenizer = load_tokenizer(options.tokenizer or SHIPPED)
    cache_folder = Path(options.cache_folder or Training.cache_folder)
    return str(prepare_dataset(options.dataset, tokenizer, cache_folder, options.dataset_path))


def run(options: argparse.Namespace) -> str:
    """Prepare the corpus, and return the output."""
    check_options(options)
    validation_files: list[Path] = []
    if options.validation:
        validation_files, _ = find_files(options.validation, options.suffix)
    files, skipped = find_files(options.inputs, options.suffix, known=validation_files)
    share = options.validation_share
    tail = 0.0
    if len(files) == 1 and not validation_files and Batch(files[0], 1, []).is_text:
        tail = TAIL if share is None else share
    settings = PrepareSettings(
        assets=str(load_tokenizer(options.tokenizer or SHIPPED).path),
        validation_share=SHARE if share is None else share,
        column=None if options.chat else options.text_column or "text",
        is_chat=options.chat,
        chat_column=options.text_column,
        only_last_turn=options.only_last_turn,
        skip_bad=options.skip_bad,
        folder=os.path.commonpath([path.absolute().parent for path in files]),
        encoding=codecs.lookup(options.encoding).name,
        tail=tail,
        validation_files=frozenset(validation_files),
        train_tokenizer=options.train_tokenizer or 0,
    )
    files += validation_files
    made = prepare(files, options.out, settings, n_processes=options.processes)
    counts = {f"files left out: {reason}": n for reason, n in skipped.items()} | made.counts
    numbers = {"folder": str(options.out), "files": len(files), "validation": made.validation, "counts": counts}
    numbers |= {"bad_rows": made.counts[BAD_ROWS], "first_bad_row": made.first_bad, **asdict(made.manifest)}
    return json.dumps(numbers) if options.json else describe(numbers, suggest_command(options, made.manifest))


def check_options(options: argparse.Namespace) -> None:
    """Raise PreparationError for options that cannot be used, or not together."""
    if not (options.inputs and options.out):
        raise PreparationError("Name the input files and the output folder: prepare texts/ --out data/mine")
    share = options.validation_share
    if share is not None and options.validation:
        raise PreparationError("--validation names all validation documents. Leave out --validation-share")
    if share is not None and not 0 <= share < 1:
        raise PreparationError(f"--validation-share is {share}. Use a number from 0 to below 1, such as 0.01")
    if options.train_tokenizer and (options.tokenizer or options.chat):
        raise PreparationError("--train-tokenizer makes a new tokenizer for text. Leave out --tokenizer and --chat")
    try:
        "a".encode(options.encoding)
    except LookupError as error:
        raise PreparationError(f"--encoding: {error}. Use a name of Python, such as cp1252 or utf-16-le") from None


def describe(numbers: dict, command: str) -> str:
    """Describe the new corpus, and the command that trains on it."""
    lines = [f"{numbers['folder']} is complete, from {numbers['files']:,} files:"]
    for name, split in numbers["splits"].items():
        figures = f"{split['n_tokens']:,} tokens in {split['n_documents']:,} documents"
        figures += f", {split['n_targets']:,} of these tokens are targets" if split["n_targets"] else ""
        lines.append(f"  {name:10} {figures}; {split['n_text_bytes'] / split['n_tokens']:.2f} bytes per token")
    lines.append(f"  split      validation is {numbers['validation']}")
    for reason, n in numbers["counts"].items():
        lines.append(f"  {n:,} {reason}")
    if numbers["bad_rows"]:
        lines.append(f"  the first bad row is {numbers['first_bad_row']}")
    return "\n".join([*lines, f"Train on it: {command}"])


def suggest_command(options: argparse.Namespace, manifest: CorpusManifest) -> str:
    """Return a command that trains on the corpus: weights in the tokenizer's folder if any, else the debug model."""
    words = ["./run_train.sh", "--training.dataset", str(options.out)]
    tokenizer = str(options.out / "tokenizer") if options.train_tokenizer else options.tokenizer or SHIPPED
    if list(Path(tokenizer).glob("*.safetensors")):
        words[1:1] = ["--config", "finetune", "--checkpoint.initial_load_path", tokenizer]
    else:
        if tokenizer != SHIPPED:
            n_rows = ceil(load_tokenizer(tokenizer).vocab_size / 64) * 64
            words += ["--model.hf_assets_path", tokenizer, "--model.vocab_size", str(n_rows)]
        words += ["--job.dump_folder", f"outputs/{options.out.name}"]  # outputs/debug may have a run on another corpus
    if "validation" not in manifest.splits:
        words.append("--validation.no_enable")
    return shlex.join(words)


def check(folder: Path) -> int:
    """Compare a corpus with its manifest. Print damaged files and return 1 if there are any."""
    try:
        splits = read_manifest(folder).splits.items()
        hashes = {folder / f"{name}.{suffix}": h for name, split in splits for suffix, h in split.sha256.items()}
        problems = find_damage(hashes)
    except CorpusError as error:
        problems = [str(error)]
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    print(f"{folder} is complete: every file has the SHA-256 in {MANIFEST}")
    return 0
