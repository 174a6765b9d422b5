"""Run `prepare`: make a corpus from text files, prepare a named corpus, or compare a corpus with its manifest."""

import argparse
import json
import os
import shlex
import sys
from collections import Counter
from dataclasses import asdict
from math import ceil
from pathlib import Path

from torchtitan_lite.config.files import find_damage
from torchtitan_lite.config.layout import find_row
from torchtitan_lite.config.schema import Model, Training
from torchtitan_lite.data.corpus_folder import DATASETS, MANIFEST, CorpusError, CorpusManifest, read_manifest
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.preflight import SHIPPED
from torchtitan_lite.tools.corpora.named import prepare_dataset
from torchtitan_lite.tools.corpora.prepare import PrepareSettings, prepare
from torchtitan_lite.tools.corpora.text_files import PreparationError, find_files


def main(options: argparse.Namespace) -> int:
    """Run the command. Return its exit status."""
    try:
        if options.check:
            return check(options.check)
        if options.dataset:
            if options.dataset not in DATASETS:
                raise PreparationError(f"There is no corpus named {options.dataset!r}. Use {', '.join(DATASETS)}")
            tokenizer = load_tokenizer(options.tokenizer)
            cache_folder = Path(options.cache_folder or Training.cache_folder)
            print(prepare_dataset(options.dataset, tokenizer, cache_folder, options.dataset_path))
            return 0
        print(run(options))
    except OSError as error:  # for example a full disk
        print(f"The corpus could not be written: {error}", file=sys.stderr)
        return 1
    return 0


def run(options: argparse.Namespace) -> str:
    """Prepare the corpus, and return the output."""
    if not (options.inputs and options.out):
        raise PreparationError("Name the input files and the output folder: prepare texts/ --out data/mine")
    files, left_out = find_files(options.inputs, [suffix.lower() for suffix in options.suffix])
    settings = PrepareSettings(
        assets=str(load_tokenizer(options.tokenizer).path),
        validation_share=options.validation_share,
        column=options.text_column or ("messages" if options.chat else "text"),
        is_chat=options.chat,
        skip_bad=options.skip_bad,
        folder=os.path.commonpath([path.absolute().parent for path in files]),
    )
    manifest, bad = prepare(files, options.out, settings, n_processes=options.processes)
    numbers = {"folder": str(options.out), "files": len(files), "files_left_out": left_out.total()}
    numbers |= {"bad_rows": bad.n, "first_bad_row": bad.first, **asdict(manifest)}
    return json.dumps(numbers) if options.json else describe(numbers, left_out, suggest_command(options, manifest))


def describe(numbers: dict, left_out: Counter[str], command: str) -> str:
    """Describe the new corpus, and the command that trains on it."""
    lines = [f"{numbers['folder']} is complete, from {numbers['files']:,} files:"]
    for name, split in numbers["splits"].items():
        figures = f"{split['n_tokens']:,} tokens in {split['n_documents']:,} documents"
        figures += f", {split['n_targets']:,} of these tokens are targets" if split["n_targets"] else ""
        lines.append(f"  {name:10} {figures}; {split['n_text_bytes'] / split['n_tokens']:.2f} bytes per token")
    if left_out:
        kinds = ", ".join(f"{n} {suffix}" for suffix, n in left_out.most_common(5))
        lines.append(f"  left out   files of unknown kinds ({kinds}); --suffix .x adds a kind")
    if numbers["bad_rows"]:
        lines.append(f"  skipped    {numbers['bad_rows']:,} bad rows; the first is {numbers['first_bad_row']}")
    return "\n".join([*lines, f"Train on it: {command}"])


def suggest_command(options: argparse.Namespace, manifest: CorpusManifest) -> str:
    """Return a command that trains on the corpus: weights in the tokenizer's folder if any, else the debug model."""
    words = ["./run_train.sh", "--training.dataset", str(options.out)]
    tokenizer = options.tokenizer
    if list(Path(tokenizer).glob("*.safetensors")):
        words[1:1] = ["--config", "finetune", "--checkpoint.initial_load_path", tokenizer]
    else:
        n_rows = max(find_row(Model()).vocab_size, ceil(load_tokenizer(tokenizer).vocab_size / 64) * 64)
        words += (
            ["--model.hf_assets_path", tokenizer, "--model.vocab_size", str(n_rows)] if tokenizer != SHIPPED else []
        )
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
