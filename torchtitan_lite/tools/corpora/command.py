"""Run `prepare`: make a corpus from text files, prepare a named corpus, or compare a corpus with its manifest."""

import argparse
import json
import os
import shlex
import sys
from dataclasses import asdict
from math import ceil
from pathlib import Path

from torchtitan_lite.config.files import find_damage
from torchtitan_lite.config.messages import name_command
from torchtitan_lite.config.schema import Training
from torchtitan_lite.data.corpus_folder import DATASETS, CorpusManifest, read_manifest
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.tools.corpora.named import prepare_dataset
from torchtitan_lite.tools.corpora.prepare import BAD_ROWS, PrepareSettings, prepare
from torchtitan_lite.tools.corpora.text_files import PreparationError, find_files, is_text


def main(options: argparse.Namespace) -> int:
    """Run the command. Return its exit status."""
    if options.check:
        return check(options.check)
    try:
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
        raise PreparationError("--dataset takes no other inputs, and no --out")
    if options.dataset not in DATASETS:
        why = f"There is no corpus named {options.dataset!r}"
        raise PreparationError(f"{why}. Use {', '.join(DATASETS)}")
    folder = prepare_dataset(
        options.dataset,
        load_tokenizer(options.tokenizer),
        Path(options.cache_folder or Training.cache_folder),
        options.dataset_path,
        skip_bad=options.skip_bad,
    )
    return str(folder)


def run(options: argparse.Namespace) -> str:
    """Prepare the corpus, and return the output."""
    if not options.inputs or not options.out:
        why = "Name the input files and the output folder"
        raise PreparationError(f"{why}: prepare texts/ --out data/mine")
    if options.train_tokenizer and options.chat:
        why = "--train-tokenizer makes a tokenizer without a chat template"
        raise PreparationError(f"{why}. Leave out --chat")
    files, counts = find_files([*options.validation, *options.inputs], options.suffix)
    validation_files = []
    if options.validation:
        validation_files, _ = find_files(options.validation, options.suffix)
    share = options.validation_share
    tail = 0.0
    if len(files) == 1 and is_text(files[0]):
        tail = 0.1 if share is None else share
    elif share is None:
        share = 0.01
    settings = PrepareSettings(
        assets=str(load_tokenizer(options.tokenizer).path),
        validation_share=0.0 if tail or validation_files else share,
        tail=tail,
        validation_files=frozenset(validation_files),
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
        report = {"folder": str(options.out), "files": len(files), "bad_rows": counts[BAD_ROWS]}
        return json.dumps(report | {"counts": counts} | asdict(manifest))
    lines = [f"{options.out} is complete, from {len(files):,} files:"]
    for name, split in manifest.splits.items():
        figures = f"{split.n_tokens:,} tokens in {split.n_documents:,} documents"
        if split.n_targets:
            figures += f", {split.n_targets:,} of these tokens are targets"
        lines.append(
            f"  {name:10} {figures}; {split.n_text_bytes / split.n_tokens:.2f} bytes per token"
        )
    for reason, n in counts.items():
        lines.append(f"  {n:,} {reason}")
    return "\n".join([*lines, f"Train on it: {suggest_command(options, manifest)}"])


def suggest_command(options: argparse.Namespace, manifest: CorpusManifest) -> str:
    """Return a command that trains on the corpus: weights in the tokenizer's folder if any, else the debug model."""
    tokenizer = str(options.out / "tokenizer") if options.train_tokenizer else options.tokenizer
    words = ["train", "--training.dataset", str(options.out)]
    if list(Path(tokenizer).glob("*.safetensors")):
        words += ["--config", "finetune", "--checkpoint.initial_load_path", tokenizer]
    else:
        n_rows = ceil(load_tokenizer(tokenizer).vocab_size / 64) * 64
        words += ["--model.hf_assets_path", tokenizer, "--model.vocab_size", str(n_rows)]
        words += ["--job.dump_folder", f"outputs/{options.out.name}"]
    if "validation" not in manifest.splits:
        words.append("--validation.no_enable")
    return name_command(shlex.join(words))


def check(folder: Path) -> int:
    """Compare a corpus with its manifest. Print damaged files and return 1 if there are any."""
    manifest = read_manifest(folder, check_sizes=False)
    hashes = {}
    for name, split in manifest.splits.items():
        for suffix, expected in split.sha256.items():
            hashes[folder / f"{name}.{suffix}"] = expected
    problems = find_damage(hashes)
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    print(f"{folder} is complete: every file has the SHA-256 in its manifest")
    return 0
