"""`prepare`: makes a corpus of text files. The work is done in components/preparation; here is what a user sees."""

import argparse
import json
import sys
from pathlib import Path

from torchtitan_lite.config.command_lines import make_prepare_parser
from torchtitan_lite.config.files import find_damage
from torchtitan_lite.config.schema import ConfigError
from torchtitan_lite.data.corpora import MANIFEST, SPLITS, CorpusError, parse_manifest
from torchtitan_lite.data.prepare import commit, finish_unit, make_plan
from torchtitan_lite.data.shards import SOURCES
from torchtitan_lite.data.sources import PreparationError, find_sources
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.data.units import Recipe
from torchtitan_lite.data.work_folder import Unfinished, count_bytes, open_work
from torchtitan_lite.tools.prepare_report import Progress, count, describe, describe_left_out
from torchtitan_lite.tools.prepare_workers import make_units_in_parallel


def main(args: list[str]) -> int:
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
        print("Stopped. What is finished is kept, and the same command goes on with it.", file=sys.stderr)
        return 1
    return 0


def prepare(options: argparse.Namespace) -> str:
    """Does it, and returns what to print. Raises PreparationError, Unfinished."""
    try:
        tokenizer = load_tokenizer(options.tokenizer)
    except ConfigError as error:
        problem = error.problems[0]
        raise PreparationError(f"--tokenizer {options.tokenizer}: {problem.why}. {problem.remedy}.") from None
    refuse_out_inside(options.inputs, Path(options.out))
    sources, left_out = find_sources(options.inputs, more_suffixes=[suffix.lower() for suffix in options.suffix])
    if not sources:
        raise PreparationError(f"No file was found to read.{describe_left_out(left_out)}")
    recipe = Recipe(options.held_out, options.field, options.skip_bad)
    plan = make_plan(sources, Path(options.out), recipe, tokenizer)
    with open_work(plan, overwrite=options.overwrite, start_over=options.start_over) as missing:
        n_left = sum(count_bytes(plan.units[number]) for number in missing)
        n_processes = max(1, min(options.processes, len(missing)))
        done = f", of which {(plan.n_bytes - n_left) / 1e6:,.1f} MB are done already" if n_left < plan.n_bytes else ""
        print(
            f"Reading {plan.n_bytes / 1e6:,.1f} MB in {len(sources):,} files{done}. "
            f"Processes: {n_processes}; parts of work: {len(missing)}",
            file=sys.stderr,
        )
        progress = Progress(plan.n_bytes, plan.n_bytes - n_left, stream=sys.stderr)
        try:
            if n_processes > 1:
                make_units_in_parallel(
                    plan, missing, n_processes=n_processes, tokenizer_folder=options.tokenizer, report=progress.add
                )
            else:
                for number in missing:
                    finish_unit(
                        plan.work, number, plan.units[number], recipe=recipe, tokenizer=tokenizer, report=progress.add
                    )
        finally:
            progress.clear()
        corpus = commit(plan)
    if options.json:
        return json.dumps(count(corpus, left_out))
    return describe(corpus, left_out, options.out, n_files=len(sources))


def refuse_out_inside(inputs: list[Path], out: Path) -> None:
    """A folder that is read must not grow while it is read, nor have corpora among its files."""
    for given in inputs:
        if given.is_dir() and out.resolve().is_relative_to(given.resolve()):
            raise PreparationError(f"--out {out} lies inside {given}, which is read. Give a folder elsewhere.")
    if not out.name:
        raise PreparationError(f"--out {str(out)!r} names no new folder.")


def check(folder: Path) -> int:
    """0 where every file is as the manifest says, 1 with the names of those that are not."""
    try:
        manifest = parse_manifest(folder)
        hashes = {folder / name: sha256 for name, (_, sha256) in manifest.list_files(*SPLITS).items()}
        problems = find_damage({folder / SOURCES: manifest.sources_sha256, **hashes})
    except CorpusError as error:
        problems = [str(error)]
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    print(f"{folder} is whole: every file has the SHA-256 that {MANIFEST} says")
    return 0
