"""Text files to a prepared corpus, which is whole or absent.

    plan      which files, in which units           sources.py, units.py
    make      the units, in any order               here, or in the processes of tools/prepare.py
    commit    the corpus appears under its name

All of it can be repeated: where it grows, and how it goes on after a kill, is said in work_folder.py.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.config.files import replace_file, sync_folder
from torchtitan_lite.data.corpora import (
    MANIFEST,
    SPLITS,
    CorpusError,
    Manifest,
    check_sizes,
    choose_dtype,
    dump_manifest,
)
from torchtitan_lite.data.documents import Part, Tally
from torchtitan_lite.data.shards import SOURCES
from torchtitan_lite.data.sources import PreparationError, Source, find_sources
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.data.units import Recipe, make_unit, plan_units
from torchtitan_lite.data.work_folder import (
    Plan,
    Unfinished,
    count_bytes,
    discard,
    is_committed,
    open_work,
    read_unit,
    save_unit,
)


@dataclass(frozen=True)
class PreparedCorpus:
    folder: Path
    manifest: Manifest
    tally: Tally


def prepare_files(
    files: Iterable[Path],
    out: Path,
    tokenizer: Tokenizer,
    *,
    held_out_share: float,
    report: Callable[[int, int], None] = lambda n_bytes_read, n_bytes: None,
) -> PreparedCorpus:
    """Prepares `files` into the folder `out`, in this process. What is left there of another plan is deleted.

    `report` is told how many of the bytes were read. Raises PreparationError, Unfinished.
    """
    sources, _ = find_sources(files)
    recipe = Recipe(held_out_share, field="text", skip_bad=False)
    plan = make_plan(sources, out, recipe, tokenizer)
    with open_work(plan, overwrite=False, start_over=True) as missing:
        n_bytes_read = plan.n_bytes - sum(count_bytes(plan.units[number]) for number in missing)

        def count(n_bytes_more: int) -> None:
            nonlocal n_bytes_read
            n_bytes_read += n_bytes_more
            report(n_bytes_read, plan.n_bytes)

        for number in missing:
            finish_unit(plan.work, number, plan.units[number], recipe=recipe, tokenizer=tokenizer, report=count)
        return commit(plan)


def make_plan(sources: list[Source], out: Path, recipe: Recipe, tokenizer: Tokenizer) -> Plan:
    return Plan(out.resolve(), sources, plan_units(sources), recipe, tokenizer)


def finish_unit(
    work: Path,
    number: int,
    parts: list[Part],
    *,
    recipe: Recipe,
    tokenizer: Tokenizer,
    report: Callable[[int], None],
) -> None:
    """Makes a unit and its record. Raises as make_unit does."""
    save_unit(
        work, number, make_unit(number, parts, work / "corpus", recipe=recipe, tokenizer=tokenizer, report=report)
    )


def commit(plan: Plan) -> PreparedCorpus:
    """Makes the corpus of all units appear, in the place of an old one; then deletes the work folder."""
    units = [read_unit(plan, number) for number in range(len(plan.units))]
    assert None not in units, "commit is called when every unit is finished"
    tally = add_tallies(unit.tally for unit in units)
    sources = "".join(json.dumps({"path": s.path, "bytes": s.n_bytes}) + "\n" for s in plan.sources).encode()
    manifest = Manifest(
        dtype=choose_dtype(plan.tokenizer.vocab_size),
        tokenizer_identity=plan.tokenizer.identity,
        vocab_size=plan.tokenizer.vocab_size,
        held_out_share=plan.recipe.held_out_share,
        splits={split: [unit.shards[split] for unit in units if split in unit.shards] for split in SPLITS},
        sources_sha256=hashlib.sha256(sources).hexdigest(),
    )
    if not manifest.splits["train"]:
        discard(plan.work)
        raise PreparationError(explain_emptiness(plan, manifest, tally))
    if not is_committed(plan):
        corpus = plan.work / "corpus"
        try:
            check_sizes(corpus, manifest)
        except CorpusError as error:
            raise Unfinished(f"{error}: it was changed since. Delete {plan.work}, then begin anew.") from None
        for name, content in ((SOURCES, sources), (MANIFEST, dump_manifest(manifest).encode())):
            with replace_file(corpus / name) as file:
                file.write(content)
        if plan.out.exists():
            plan.out.rename(plan.work / "replaced")
        corpus.rename(plan.out)
        sync_folder(plan.out.parent)
    if (plan.work / "replaced").exists():
        shutil.rmtree(plan.work / "replaced")
    discard(plan.work)
    return PreparedCorpus(plan.out, manifest, tally)


def add_tallies(tallies: Iterable[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total.n_empty += tally.n_empty
        total.n_replaced += tally.n_replaced
        total.n_bad_lines += tally.n_bad_lines
        total.first_bad_line = total.first_bad_line or tally.first_bad_line
    return total


def explain_emptiness(plan: Plan, manifest: Manifest, tally: Tally) -> str:
    """Why there is nothing to train on."""
    if n_documents := sum(shard.n_documents for shard in manifest.splits["held_out"]):
        share = plan.recipe.held_out_share
        return f"--held-out {share} holds out all of the {n_documents} documents. Lower it, or name more files."
    bad = f" Left out: {tally.n_bad_lines} bad lines, the first {tally.first_bad_line}." if tally.n_bad_lines else ""
    return f"There is no text in the {len(plan.sources)} files that were named.{bad}"
