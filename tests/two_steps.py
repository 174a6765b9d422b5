"""Lets train.py make two steps as the only rank of a run, in a process forked from one that has imported torch."""

import multiprocessing
import os
import socket
import sys
import traceback
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
    steps, train_step, end = [], train.train_step, "ended"

    def step_twice(run, batch):
        if len(steps) == 2:
            raise Enough
        steps.append(batch)
        return train_step(run, batch)

    try:
        with mock.patch.object(train, "train_step", step_twice):
            end = f"exit status {train.main(args)}"
    except Enough:
        end = "stopped"
    except ConfigError as error:
        end = f"refused: {error}"
    except BaseException as error:
        traceback.print_exc()
        end = f"{type(error).__name__}: {error}"
    sys.stdout.flush()
    report.send((len(steps), end))
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
