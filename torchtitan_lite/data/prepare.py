"""Text files to a prepared corpus, which is whole or absent.

    OUT.unfinished/lock                held by the process that works here
                   plan.json           what is being made; another plan cannot continue it
                   corpus/             the shards
                   units/00003.json    unit 3 is finished: its shards are on the disk
                   replaced/           the corpus that was at OUT, for the moment between two renames
    OUT                                the folder corpus, renamed when every unit is finished

What says that something is whole is written after it: the record of a unit after its shards, plan.json after corpus/
and units/; the rename comes last. So after a kill at any instant the same command continues, and ends with the same
bytes.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import platform
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path

from torchtitan_lite.config.command_lines import count_cores
from torchtitan_lite.config.files import replace_file, sync_folder
from torchtitan_lite.data.corpus_folder import (
    BYTES_OF,
    FORMAT,
    MANIFEST,
    SPLITS,
    CorpusError,
    CorpusManifest,
    Shard,
    check_sizes,
    check_small,
    choose_dtype,
    dump_manifest,
    read_manifest,
)
from torchtitan_lite.data.documents import Tally
from torchtitan_lite.data.shards import Plan, Recipe, Unfinished, count_bytes, make_plan, make_units
from torchtitan_lite.data.text_files import PreparationError, find_sources
from torchtitan_lite.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

SOURCES = "sources.jsonl"
MANY_BYTES = 2**26  # of files: from here on it pays to start more processes that tokenise


def prepare_files(
    files: Iterable[Path],
    out: Path,
    tokenizer: Tokenizer,
    *,
    validation_share: float,
    n_processes: int = 1,
    names_below: str = "",
) -> CorpusManifest:
    """Prepare `files` into the folder `out`. What another plan left there is deleted.

    Raises PreparationError, Unfinished.
    """
    plan = make_plan(find_sources(files)[0], out, Recipe(validation_share, names_below=names_below), tokenizer)
    with open_work(plan, start_over=True) as missing:
        make_units(plan, missing, n_processes=max(1, min(n_processes, len(missing))))
        return commit(plan)[0]


def prepare_dataset(
    name: str, files: list[Path], tokenizer: Tokenizer, cache_folder: Path, validation_share: float
) -> Path:
    """Return the folder of a named corpus inside the cache; the first process prepares it. Raises CorpusError."""
    stats = [f"{path}:{path.stat().st_size}:{path.stat().st_mtime_ns}" for path in files]
    key = hashlib.sha256("\n".join([tokenizer.identity, platform.python_version(), *stats]).encode()).hexdigest()
    folder = cache_folder / f"{name}-{key[:16]}"
    if find_fault(folder):
        cache_folder.mkdir(parents=True, exist_ok=True)
        n_bytes = sum(path.stat().st_size for path in files)
        logger.info(f"Tokenising {name} once: {n_bytes / 1e6:,.1f} MB in {len(files)} files into {folder}")
        # Ranks of a host arrive together: one takes the lock and prepares, the others wait and then find the folder.
        # The system releases the lock of a process that dies, so nobody waits for one that was killed.
        with open(folder.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if fault := find_fault(folder):
                if folder.exists():
                    logger.warning(f"{fault}. The corpus {name} is prepared again")
                shutil.rmtree(folder, ignore_errors=True)
                options = {
                    "validation_share": validation_share,
                    "n_processes": count_cores() if n_bytes > MANY_BYTES else 1,
                    "names_below": os.path.commonpath(map(os.path.abspath, files)),
                }
                try:
                    prepare_files(files, folder, tokenizer, **options)
                except (PreparationError, Unfinished) as error:
                    raise CorpusError(str(error)) from None
    return folder


def find_fault(folder: Path) -> CorpusError | None:
    """Return why a corpus is absent or damaged, as far as manifest, sizes, and hashes of a small corpus tell."""
    try:
        check_small(folder, read_manifest(folder))
    except CorpusError as error:
        return error
    return None


# ---------------------------------------------------------------- the work folder


@contextmanager
def open_work(plan: Plan, *, overwrite: bool = False, start_over: bool = False) -> Iterator[list[int]]:
    """Hold the work folder for this process, ready for `plan`; yield the numbers of the units that are missing.

    With `start_over`, what another plan left there is deleted, else it is refused. Raises PreparationError; Unfinished
    where another process works there, and for every OSError inside.
    """
    if not plan.work.exists():
        refuse_existing(plan.out, overwrite)  # before anything is made
    try:
        plan.work.mkdir(parents=True, exist_ok=True)
        with hold(plan.work):
            if (plan.work / "replaced").exists() and not plan.out.exists():
                (plan.work / "replaced").rename(plan.out)  # a kill came between the two renames of `commit`
            described, left = describe(plan), read_json(plan.work / "plan.json") or {}
            if left != described or not plan.is_committed:
                refuse_existing(plan.out, overwrite)
                if left != described:
                    start_plan(plan, left, described, start_over)
            try:
                yield [] if plan.is_committed else find_missing(plan)
            except PreparationError:  # the user repairs something, and so makes another plan
                if len(find_missing(plan)) == len(plan.units):
                    discard(plan.work)
                raise
    except OSError as error:
        raise Unfinished(explain(error, plan)) from error


def refuse_existing(out: Path, overwrite: bool) -> None:
    """Raise PreparationError if the corpus would replace something that should stay."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / MANIFEST).is_file():
        raise PreparationError(f"{out} exists and is no prepared corpus, so it stays as it is. Give another --out.")
    if not overwrite:
        remedy = "Give another --out, or --overwrite to replace it when the new one is whole."
        raise PreparationError(f"{out} exists. {remedy}")


@contextmanager
def hold(work: Path) -> Iterator[None]:
    """Lock the work folder for this process; the system unlocks it when the process dies. Raises Unfinished."""
    with open(work / "lock", "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unfinished(f"Another process prepares a corpus in {work}. Wait until it has ended.") from None
        if os.fstat(file.fileno()).st_nlink == 0:  # deleted by the process that held it
            raise Unfinished(f"Another process has just ended its work in {work}. Give the command again.")
        try:
            yield
        finally:
            if not (work / "plan.json").exists():  # nothing is left to continue
                (work / "lock").unlink()
                with suppress(OSError):  # not empty: another process has started here
                    work.rmdir()


def describe(plan: Plan) -> dict[str, object]:
    """Return what decides the bytes of the corpus. Skipped lines decide too: records of units say how many."""
    sources = hashlib.sha256()
    for source in plan.sources:
        sources.update(f"{source.path} {source.n_bytes} {source.modified_ns}\n".encode(errors="surrogateescape"))
    return {
        "format": FORMAT,
        "tokenizer": f"{plan.tokenizer.identity} {plan.tokenizer.vocab_size}",
        "held-out": plan.recipe.validation_share,
        "field": plan.recipe.field,
        "files": sources.hexdigest(),
        **({"held out by": "name"} if plan.recipe.names_below else {}),
        **({"chat": plan.recipe.chat.identity} if plan.recipe.chat else {}),
    }


def start_plan(plan: Plan, left: dict, described: dict, start_over: bool) -> None:
    """Delete what another plan left, if no unit of it is finished or `start_over`; then start this plan."""
    finished = list(plan.work.glob("units/*.json"))
    if left and finished and not start_over:
        changed = ", ".join(key for key in described if left.get(key) != described[key])
        raise PreparationError(
            f"{plan.work} holds {len(finished)} finished parts of another corpus (other: {changed}). "
            "Finish that with its own command, give another --out, or --start-over to delete them."
        )
    discard(plan.work)
    for name in ("units", "corpus"):
        (plan.work / name).mkdir()
    with replace_file(plan.work / "plan.json") as file:
        file.write(json.dumps(described, indent=1).encode())


def discard(work: Path) -> None:
    """Delete all but the lock. The plan goes first: a folder without a plan holds nothing to continue."""
    for path in sorted(work.iterdir(), key=lambda path: path.name != "plan.json"):
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


def read_json(path: Path) -> dict | None:
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def read_units(plan: Plan) -> dict[int, tuple[dict[str, Shard], Tally]]:
    """Return shards by split, and tally, of each finished unit; units that skipped lines only with --skip-bad."""
    units = {}
    for number in range(len(plan.units)):
        if record := read_json(plan.work / "units" / f"{number:05}.json"):
            shards, tally = record["shards"], Tally(**record["tally"])
            if plan.recipe.skip_bad or tally.n_bad_lines == 0:
                units[number] = {split: Shard(**shard) for split, shard in shards.items()}, tally
    return units


def find_missing(plan: Plan) -> list[int]:
    return sorted(set(range(len(plan.units))) - read_units(plan).keys())


def commit(plan: Plan) -> tuple[CorpusManifest, Tally]:
    """Rename the corpus of all units to OUT, which replaces an old one; then delete the work folder.

    Raises PreparationError where there is nothing to train on, Unfinished where a shard was changed.
    """
    units = read_units(plan).values()
    assert len(units) == len(plan.units), "commit is called when every unit is finished"
    tallies = [tally for _, tally in units]
    tally = Tally(
        **{f.name: sum(getattr(tally, f.name) for tally in tallies) for f in fields(Tally) if f.type is int},
        first_bad_line=next((tally.first_bad_line for tally in tallies if tally.first_bad_line), ""),
    )
    sources = "".join(json.dumps({"path": s.path, "bytes": s.n_bytes}) + "\n" for s in plan.sources).encode()
    manifest = CorpusManifest(
        dtype=choose_dtype(plan.tokenizer.vocab_size),
        tokenizer_identity=plan.tokenizer.identity,
        vocab_size=plan.tokenizer.vocab_size,
        held_out_share=plan.recipe.validation_share,
        splits={split: [shards[split] for shards, _ in units if split in shards] for split in SPLITS.values()},
        sources_sha256=hashlib.sha256(sources).hexdigest(),
    )
    if not manifest.splits["train"]:
        discard(plan.work)
        if n_documents := sum(shard.n_documents for shard in manifest.splits[SPLITS["validation"]]):
            all_of = f"--held-out {plan.recipe.validation_share} holds out all of the {n_documents} documents."
            raise PreparationError(f"{all_of} Lower it, or name more files.")
        bad = (
            f" Left out: {tally.n_bad_lines} bad lines, the first {tally.first_bad_line}." if tally.n_bad_lines else ""
        )
        raise PreparationError(f"There is no text in the {len(plan.sources)} files that were named.{bad}")
    corpus, replaced = plan.work / "corpus", plan.work / "replaced"
    if not plan.is_committed:
        try:
            check_sizes(corpus, manifest)
        except CorpusError as error:
            raise Unfinished(f"{error}: it was changed since. Delete {plan.work}, then start again.") from None
        for name, content in ((SOURCES, sources), (MANIFEST, dump_manifest(manifest).encode())):
            with replace_file(corpus / name) as file:
                file.write(content)
        if plan.out.exists():
            plan.out.rename(replaced)
        corpus.rename(plan.out)
        sync_folder(plan.out.parent)
    if replaced.exists():
        shutil.rmtree(replaced)
    discard(plan.work)
    return manifest, tally


def explain(error: OSError, plan: Plan) -> str:
    """Describe an error of writing, and how much room is needed."""
    message = f"{error.filename or plan.work} cannot be written ({error.strerror})."
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{message} What is finished is kept in {plan.work}."
    units = read_units(plan)
    n_tokens = sum(shard.n_tokens for shards, _ in units.values() for shard in shards.values())
    n_bytes_read = sum(count_bytes(plan.units[number]) for number in units)
    tokens_per_byte = n_tokens / n_bytes_read if n_bytes_read else 1  # at most
    width = BYTES_OF[choose_dtype(plan.tokenizer.vocab_size)]
    needed = (plan.n_bytes - n_bytes_read) * tokens_per_byte * width
    free = shutil.disk_usage(plan.work.parent).free
    return (
        f"{message} {'About' if units else 'At most'} {needed / 1e6:,.1f} MB more are needed, and the disk has "
        f"{free / 1e6:,.1f} MB free. Make room there (or lift the limit: quota, ulimit -f), and give the same command "
        "again: it continues from here."
    )
