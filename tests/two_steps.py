"""Lets train.py make two steps as the only rank of a run, in a process forked from one that has imported torch."""

import multiprocessing
import os
import socket
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import train
from torchtitan_lite.config.messages import ConfigError

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["two_steps"])
MOST_SECONDS = 600  # on a loaded machine


class Enough(Exception):
    """Raised where the third step would begin: the second one is logged, validated and saved."""


@dataclass
class Counted:
    """train_step, which counts its calls."""

    n_steps: int = 0

    def __call__(self, run, batch):
        if self.n_steps == 2:
            raise Enough
        self.n_steps += 1
        return step_of_train(run, batch)


step_of_train = train.train_step


def run_train(args: list[str], log: Path, report: Connection) -> None:
    """Run train.py's main, and report how many steps it made, and how it ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ.update(ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with open(log, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    counted = Counted()
    end = "ended"
    try:
        with mock.patch.object(train, "train_step", counted):
            end = f"exit status {train.main(args)}"
    except Enough:
        end = "stopped"
    except ConfigError as error:
        end = f"refused: {error}"
    except BaseException as error:
        traceback.print_exc()
        end = f"{type(error).__name__}: {error}"
    sys.stdout.flush()
    report.send((counted.n_steps, end))
    os._exit(0)  # without waiting for what the broken-off run has begun


def make_two_steps(args: list[str], log: Path) -> tuple[int, str]:
    """How many steps a run of these arguments makes, at most two, and how it ended; its output is in `log`."""
    receiver, sender = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=run_train, args=(args, log, sender))
    process.start()
    sender.close()
    process.join(MOST_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        return 0, f"no end after {MOST_SECONDS} s"
    try:
        return receiver.recv()
    except EOFError:  # it ended before it could report
        return 0, f"exit code {process.exitcode}"
