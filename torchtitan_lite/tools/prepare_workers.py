"""The processes of `prepare`: each makes one unit at a time, and the parent keeps count.

    parent   -> (number, parts)                    one unit; when none is left, the worker is ended
    worker   -> ("read", bytes) ...                how far it is, a few times a second
                ("finished", number)               its record is on the disk
                ("failed", error)                  of the files that it read or the disk that it wrote to

A worker whose parent is gone, by kill -9 too, finds the pipe closed when it next tells something, and ends. It shares
the lock of the work folder until then.
"""

import multiprocessing
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

from torchtitan_lite.data.documents import Part
from torchtitan_lite.data.prepare import finish_unit
from torchtitan_lite.data.sources import PreparationError
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.data.units import Recipe
from torchtitan_lite.data.work_folder import Plan, Unfinished, count_bytes, share

REPORT_BYTES = 2**18


class ParentGone(Exception):
    """Nobody listens any more."""


def make_units_in_parallel(
    plan: Plan, numbers: list[int], *, n_processes: int, tokenizer_folder: str, report: Callable[[int], None]
) -> None:
    """Finishes the units `numbers`. Raises what a worker met: PreparationError, OSError; Unfinished if one died."""
    waiting = sorted(numbers, key=lambda number: count_bytes(plan.units[number]))  # the largest is taken first
    workers = start_workers(min(n_processes, len(numbers)), plan.work, plan.recipe, tokenizer_folder)
    try:
        for connection in workers:
            send_unit(connection, plan, waiting.pop())
        busy = list(workers)
        while busy:
            for connection in wait(busy):
                kind, value = receive(connection, workers[connection])
                if kind == "failed":
                    raise value
                if kind == "read":
                    report(value)
                elif waiting:
                    send_unit(connection, plan, waiting.pop())
                else:
                    busy.remove(connection)
    finally:
        for process in workers.values():
            process.terminate()
        for process in workers.values():
            process.join()


def start_workers(
    n: int, folder: Path, recipe: Recipe, tokenizer_folder: str
) -> dict[Connection, multiprocessing.Process]:
    """`n` processes by the connections to them. Ctrl-C reaches them too, but is for the parent alone to act on."""
    context = multiprocessing.get_context("spawn")  # a fork would hold the pipes of its siblings open
    workers = {}
    # What is ignored here stays so in the processes that are started; what is blocked, multiprocessing unblocks.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for _ in range(n):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, folder, recipe, tokenizer_folder), daemon=True)
            process.start()
            theirs.close()  # so that the death of the worker closes the pipe
            workers[ours] = process
    finally:
        signal.signal(signal.SIGINT, handler)
    return workers


def send_unit(connection: Connection, plan: Plan, number: int) -> None:
    with suppress(ConnectionError):  # of a worker that died: `receive` says so
        connection.send((number, plan.units[number]))


def receive(connection: Connection, process: multiprocessing.Process) -> tuple[str, object]:
    try:
        return connection.recv()
    except (EOFError, ConnectionError):
        process.join()
        raise Unfinished(
            f"A worker ended with exit status {process.exitcode}. If the memory was too small for it (status -9), take "
            f"fewer --processes. What is finished is kept, and the same command goes on with it."
        ) from None


def work(connection: Connection, folder: Path, recipe: Recipe, tokenizer_folder: str) -> None:
    """What a worker does, until the parent ends it or is gone."""
    n_unreported = 0

    def tell(kind: str, value: object) -> None:
        try:
            connection.send((kind, value))
        except ConnectionError:
            raise ParentGone from None

    def report(n_bytes: int) -> None:
        nonlocal n_unreported
        n_unreported += n_bytes
        if n_unreported >= REPORT_BYTES:
            tell("read", n_unreported)
            n_unreported = 0

    def ask() -> tuple[int, list[Part]]:
        try:
            return connection.recv()
        except (EOFError, ConnectionError):
            raise ParentGone from None

    with suppress(ParentGone), share(folder):
        tokenizer = load_tokenizer(tokenizer_folder)
        while True:
            number, parts = ask()
            try:
                finish_unit(folder, number, parts, recipe=recipe, tokenizer=tokenizer, report=report)
            except (PreparationError, OSError) as error:
                tell("failed", error)
            else:
                tell("finished", number)
