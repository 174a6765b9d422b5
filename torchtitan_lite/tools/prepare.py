"""`prepare`: makes a corpus of text files. data/prepare.py does the work; here is what a user sees."""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TextIO

from torchtitan_lite.components.log import BottomLine, draw_bar
from torchtitan_lite.config.command_lines import make_prepare_parser
from torchtitan_lite.config.files import find_damage
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.data.chat import read_chat_format
from torchtitan_lite.data.corpus_folder import MANIFEST, SPLITS, CorpusError, parse_manifest
from torchtitan_lite.data.prepare import SOURCES, commit, open_work
from torchtitan_lite.data.shards import Recipe, Unfinished, count_bytes, make_plan, make_units
from torchtitan_lite.data.text_files import PreparationError, Source, find_sources
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan_lite.data.vocabulary import VocabularyError


def main(args: list[str]) -> int:
    """Exit status: 0 fine, 1 it could not be finished or --check found damage, 2 wrong input."""
    parser = make_prepare_parser()
    options = parser.parse_args(args)
    sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be no text
    if options.check:
        return check(Path(options.check))
    if not options.inputs or not options.out:
        parser.error("name the files and folders to read, and the folder to make: prepare data/ --out data.corpus")
    try:
        print(prepare(options))
    except PreparationError as error:
        print(error, file=sys.stderr)
        return 2
    except Unfinished as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped. Finished parts are kept, and the same command continues.", file=sys.stderr)
        return 130
    return 0


def prepare(options: argparse.Namespace) -> str:
    """Make the corpus, and return what to print. Raises PreparationError, Unfinished."""
    try:
        tokenizer = load_tokenizer(options.tokenizer)
    except ConfigError as error:
        problem = error.problems[0]
        raise PreparationError(f"--tokenizer {options.tokenizer}: {problem.why}. {problem.remedy}.") from None
    out = Path(options.out)
    if not out.name:
        raise PreparationError(f"--out {options.out!r} names no new folder.")
    for given in options.inputs:  # a folder must not grow while it is read, nor have corpora among its files
        if given.is_dir() and out.resolve().is_relative_to(given.resolve()):
            raise PreparationError(f"--out {out} is inside {given}, which is read. Give a folder elsewhere.")
    sources, left_out = find_sources(options.inputs, more_suffixes=[suffix.lower() for suffix in options.suffix])
    if not sources:
        raise PreparationError(f"No file was found to read.{describe_left_out(left_out)}")
    recipe = make_recipe(options, sources, tokenizer)
    plan = make_plan(sources, out, recipe, tokenizer)
    with open_work(plan, overwrite=options.overwrite, start_over=options.start_over) as missing:
        n_done = plan.n_bytes - sum(count_bytes(plan.units[number]) for number in missing)
        n_processes = max(1, min(options.processes, len(missing)))
        done = f", of which {n_done / 1e6:,.1f} MB are done already" if n_done else ""
        print(
            f"Reading {plan.n_bytes / 1e6:,.1f} MB in {len(sources):,} files{done}. "
            f"Processes: {n_processes}; parts of work: {len(missing)}",
            file=sys.stderr,
        )
        progress = Progress(plan.n_bytes, n_done, stream=sys.stderr)
        try:
            make_units(plan, missing, n_processes=n_processes, report=progress.add)
        finally:
            progress.clear()
        manifest, tally = commit(plan)
    train, held_out = (manifest.splits[split] for split in SPLITS.values())
    shards = train + held_out
    numbers = {
        "folder": str(plan.out),
        "identity": manifest.identity,
        "dtype": manifest.dtype,
        "documents": sum(shard.n_documents for shard in shards),
        "documents_held_out": sum(shard.n_documents for shard in held_out),
        "tokens": sum(shard.n_tokens for shard in shards),
        "tokens_held_out": sum(shard.n_tokens for shard in held_out),
        "text_bytes": sum(shard.n_text_bytes for shard in shards),
        "files_left_out": left_out.total(),
        **asdict(tally),
    }
    if options.json:
        return json.dumps(numbers)
    return describe(numbers, left_out, options.out, n_files=len(sources))


def make_recipe(options: argparse.Namespace, sources: list[Source], tokenizer: Tokenizer) -> Recipe:
    """Raises PreparationError."""
    chat = None
    if options.chat:
        if texts := [source.path for source in sources if not source.holds_rows]:
            raise PreparationError(f"{texts[0]} holds no conversations: --chat reads JSON lines and Parquet.")
        try:
            chat = read_chat_format(tokenizer.vocabulary)
        except VocabularyError as error:
            raise PreparationError(f"--chat with --tokenizer {options.tokenizer}: {error}.") from None
    column = options.text_column or ("messages" if chat else "text")
    return Recipe(options.held_out, column, options.skip_bad, chat)


def check(folder: Path) -> int:
    """Return 0 where every file is as the manifest says, 1 with the names of those that are not."""
    try:
        manifest = parse_manifest(folder)
        hashes = {folder / name: sha256 for name, (_, sha256) in manifest.list_files().items()}
        problems = find_damage({folder / SOURCES: manifest.sources_sha256, **hashes})
    except CorpusError as error:
        problems = [str(error)]
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    print(f"{folder} is whole: every file has the SHA-256 that {MANIFEST} says")
    return 0


def describe_left_out(left_out: Counter[str]) -> str:
    """Return a sentence about files of folders that were not read; nothing where there are none."""
    if not left_out:
        return ""
    kinds = ", ".join(f"{n} {suffix}" for suffix, n in left_out.most_common(5))
    more = ", ..." if len(left_out) > 5 else ""
    return f" Left out: {left_out.total()} files that are not known as text ({kinds}{more}); --suffix .x adds a kind."


def describe(n: dict[str, object], left_out: Counter[str], out: str, *, n_files: int) -> str:
    """Return the numbers of a corpus for people, and what to do next."""
    rows = {
        "documents": f"{n['documents']:,}, of which {n['documents_held_out']:,} are held out for validation "
        f"({n['documents_held_out'] / n['documents']:.2%})",
        "tokens": f"{n['tokens']:,} as {n['dtype']}, of which {n['tokens_held_out']:,} are held out; "
        f"{n['text_bytes'] / n['tokens']:.2f} bytes per token",
        "targets": f"{n['n_targets']:,} tokens of the assistant ({n['n_targets'] / n['tokens']:.1%})"
        if n["n_targets"]
        else "",
        "text": f"{n['text_bytes'] / 1e6:,.1f} MB from {n_files:,} files.{describe_left_out(left_out)}",
        "empty": f"{n['n_empty']:,} documents without text, left out" if n["n_empty"] else "",
        "replaced": f"{n['n_replaced']:,} pieces of broken UTF-8, by U+FFFD" if n["n_replaced"] else "",
        "skipped": f"{n['n_bad_lines']:,} bad lines, the first: {n['first_bad_line']}" if n["n_bad_lines"] else "",
    }
    lines = [f"  {name:10} {text}" for name, text in rows.items() if text]
    return "\n".join([f"{out} is whole:", *lines, f"Train on it: ./run_train.sh --training.dataset {out}"])


class Progress(BottomLine):
    """How many bytes are done: a line rewritten in place on a terminal, else one line every half minute.

    [#########...........]  47%  1,203.4 of 2,560.0 MB  14.1 MB/s  ETA 0:01:36
    """

    def __init__(self, n_bytes: int, n_done: int, *, stream: TextIO, clock: Callable[[], float] = time.monotonic):
        super().__init__(stream)
        self.n_bytes, self.n_done, self.n_done_before = n_bytes, n_done, n_done
        self.clock = clock
        self.interval_s = 0.2 if self.on_terminal else 30.0
        self.started_s = self.shown_s = clock()

    def add(self, n_bytes_more: int) -> None:
        self.n_done += n_bytes_more
        now_s = self.clock()
        if now_s - self.shown_s < self.interval_s:
            return
        self.shown_s = now_s
        if self.on_terminal:
            self.rewrite(self.describe())
        else:
            print(self.describe(), file=self.stream, flush=True)

    def describe(self) -> str:
        share = self.n_done / self.n_bytes if self.n_bytes else 1.0
        rate = (self.n_done - self.n_done_before) / max(self.clock() - self.started_s, 1e-9)
        left = str(timedelta(seconds=round((self.n_bytes - self.n_done) / rate))) if rate else "?"
        done = f"{self.n_done / 1e6:,.1f} of {self.n_bytes / 1e6:,.1f} MB"
        return f"{draw_bar(share)}  {done}  {rate / 1e6:.1f} MB/s  ETA {left}"
