"""The folder in which a corpus grows, and by which a prepare that was killed goes on.

    OUT.unfinished/lock                held by whoever is at work here
                   plan.json           what is being made; another plan cannot go on with it
                   corpus/             the shards
                   units/00003.json    unit 3 is finished: its shards are on the disk
                   replaced/           the corpus that was at OUT, for the moment between two renames
    OUT                                the folder corpus, renamed when every unit is finished

Each thing is written before the one that vouches for it: shards, then the record of their unit; corpus/ and units/,
then plan.json; everything, then the rename. So a kill at any instant leaves what the same command can go on with.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from torchtitan_lite.config.files import replace_file, sync_folder
from torchtitan_lite.data.corpora import BYTES_OF, FORMAT, MANIFEST, Shard, choose_dtype
from torchtitan_lite.data.documents import Part, Tally
from torchtitan_lite.data.sources import PreparationError, Source
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.data.units import FinishedUnit, Recipe

PATIENCE_S = 10  # for the workers of a killed process: they notice within a second or so


class Unfinished(RuntimeError):
    """The corpus could not be finished, through no fault of what was asked for. The same command goes on with it."""


@dataclass(frozen=True)
class Plan:
    out: Path
    sources: list[Source]
    units: list[list[Part]]
    recipe: Recipe
    tokenizer: Tokenizer

    @property
    def work(self) -> Path:
        return self.out.with_name(self.out.name + ".unfinished")

    @cached_property
    def n_bytes(self) -> int:
        return sum(source.n_bytes for source in self.sources)


def count_bytes(unit: list[Part]) -> int:
    return sum(part.stop - part.start for part in unit)


@contextmanager
def open_work(plan: Plan, *, overwrite: bool, start_over: bool) -> Iterator[list[int]]:
    """Holds the work folder for this process, ready for `plan`, and gives the numbers of the units that are missing.

    With `start_over`, what another plan left there is deleted, else it is refused. Raises PreparationError; Unfinished
    where another process is at work there, and in the place of every OSError that leaves the body.
    """
    if not plan.work.exists():
        refuse_existing(plan, overwrite)  # before anything is made
    try:
        plan.work.mkdir(parents=True, exist_ok=True)
        with hold(plan.work):
            if (plan.work / "replaced").exists() and not plan.out.exists():
                (plan.work / "replaced").rename(plan.out)  # a kill came between the two renames of `commit`
            described = describe(plan)
            left = read_json(plan.work / "plan.json") or {}
            if not (left == described and is_committed(plan)):
                refuse_existing(plan, overwrite)
                if left != described:
                    clear_work(plan, left, described, start_over)
            try:
                yield [] if is_committed(plan) else find_missing(plan)
            except PreparationError:  # to be repaired by the user, which makes it another plan
                if len(find_missing(plan)) == len(plan.units):
                    discard(plan.work)
                raise
    except OSError as error:
        raise Unfinished(explain(error, plan)) from error


def refuse_existing(plan: Plan, overwrite: bool) -> None:
    """Raises PreparationError where the corpus would take the place of something that should stay."""
    out = plan.out
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / MANIFEST).is_file():
        raise PreparationError(f"{out} exists and is no prepared corpus, so it stays as it is. Give another --out.")
    if not overwrite:
        raise PreparationError(
            f"{out} exists. Give another --out, or --overwrite to replace it when the new one is whole."
        )


@contextmanager
def hold(work: Path) -> Iterator[None]:
    """The lock of the work folder, for this process and the workers that will `share` it. Raises Unfinished.

    The system takes a lock from a process that dies. Workers share it, so nobody begins before all of them are gone.
    """
    with open(work / "lock", "ab") as file:
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody else has it, nor shares it
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise Unfinished(f"Another process prepares a corpus in {work}. Wait until it has ended.") from None
                time.sleep(0.1)
        if os.fstat(file.fileno()).st_nlink == 0:  # deleted by the one who held it
            raise Unfinished(f"Another process has just ended its work in {work}. Give the command again.")
        try:
            yield
        finally:
            if not (work / "plan.json").exists():
                (work / "lock").unlink()  # nothing is left to go on with
                with suppress(OSError):  # not empty: another process begins here already
                    work.rmdir()


@contextmanager
def share(work: Path) -> Iterator[None]:
    """The lock for a worker. Raises BlockingIOError where the process that started it is dead and another has begun."""
    with open(work / "lock", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def describe(plan: Plan) -> dict[str, object]:
    """What decides the bytes of the corpus. Lines that are skipped do so too, and stand in the records of units."""
    sources = hashlib.sha256()
    for source in plan.sources:
        sources.update(f"{source.path} {source.n_bytes} {source.modified_ns}\n".encode(errors="surrogateescape"))
    return {
        "format": FORMAT,
        "tokenizer": f"{plan.tokenizer.identity} {plan.tokenizer.vocab_size}",
        "held-out": plan.recipe.held_out_share,
        "field": plan.recipe.field,
        "files": sources.hexdigest(),
    }


def clear_work(plan: Plan, left: dict, described: dict, start_over: bool) -> None:
    """Deletes what another plan left, if that is nothing of worth or `start_over`; then begins this one."""
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
    """Deletes all but the lock. The plan goes first: what has no plan is nothing to go on with."""
    for path in sorted(work.iterdir(), key=lambda path: path.name != "plan.json"):
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


def read_json(path: Path) -> dict | None:
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None


# ---------------------------------------------------------------- records


def save_unit(work: Path, number: int, unit: FinishedUnit) -> None:
    """From here on the unit is finished. Its shards are on the disk; their names are not before this."""
    sync_folder(work / "corpus")
    with replace_file(work / "units" / f"{number:05}.json") as file:
        file.write(json.dumps(asdict(unit)).encode())


def read_unit(plan: Plan, number: int) -> FinishedUnit | None:
    """The record of a unit; None: it is not finished, or has left out lines that must not be."""
    record = read_json(plan.work / "units" / f"{number:05}.json")
    if record is None:
        return None
    shards = {split: Shard(**shard) for split, shard in record["shards"].items()}
    unit = FinishedUnit(shards, Tally(**record["tally"]))
    return unit if plan.recipe.skip_bad or unit.tally.n_bad_lines == 0 else None


def find_missing(plan: Plan) -> list[int]:
    return [number for number in range(len(plan.units)) if read_unit(plan, number) is None]


def is_committed(plan: Plan) -> bool:
    """Whether the folder corpus has become OUT: it was made before plan.json was written."""
    return not (plan.work / "corpus").exists() and (plan.out / MANIFEST).is_file()


def explain(error: OSError, plan: Plan) -> str:
    """An error of writing, and how much room there must be."""
    said = f"{error.filename or plan.work} cannot be written ({error.strerror})."
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{said} What is finished is kept in {plan.work}."
    units = {number: unit for number in range(len(plan.units)) if (unit := read_unit(plan, number))}
    n_tokens = sum(shard.n_tokens for unit in units.values() for shard in unit.shards.values())
    n_bytes_read = sum(count_bytes(plan.units[number]) for number in units)
    tokens_per_byte = n_tokens / n_bytes_read if n_bytes_read else 1  # at most
    width = BYTES_OF[choose_dtype(plan.tokenizer.vocab_size)]
    needed = (plan.n_bytes - n_bytes_read) * tokens_per_byte * width
    free = shutil.disk_usage(plan.work.parent).free
    guess = "About" if units else "At most"
    return (
        f"{said} {guess} {needed / 1e6:,.1f} MB more are needed, and the disk has {free / 1e6:,.1f} MB free. "
        f"Make room there (or lift the limit: quota, ulimit -f), and give the same command again: it goes on from here."
    )
