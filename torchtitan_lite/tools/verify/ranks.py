"""Run functions on several ranks, in a pool of worker processes, without launching a job for each call.

    parent:  pool.run(function, world_size, *args)   ->   [result of rank 0, result of rank 1, ...]
    worker:  join a fresh gloo group of world_size ranks, call function(rank, world_size, *args), leave the group

For eight ranks, it takes 10 s to start processes that import torch, and 20 s to launch them with torchrun. A call on a
warm pool takes 0.1 s. If a worker fails or hangs, all workers are killed, and the next call starts new ones.
"""

import faulthandler
import logging
import multiprocessing
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_lite.faults.processes import end_with_parent
from torchtitan_lite.parallel.gloo_workers import limit_gloo_workers
from torchtitan_lite.tools.forget_groups import forget_groups
from torchtitan_lite.tools.processes import start_worker_server

# torch's caches keep gloo groups and their threads alive. After dozens of jobs, hundreds of threads would compete for
# the cores. New workers are cheap, because they are forks of a process that has imported torch.
JOBS_PER_WORKER = 8
OF_A_PEER = "Check the logs of the remote worker"  # gloo's error has this text if a peer has ended
SECONDS_AFTER_A_FAILURE = 3  # time for the other ranks to finish after a rank has failed


class RankFailure(RuntimeError):
    """A rank has raised an error, died or hung. The message has the traceback of the first rank that failed."""


class NoAnswer(RankFailure):
    """Ranks were killed or timed out, so their results are unknown."""


class RankPool(AbstractContextManager):
    """Worker processes, which start when first needed. Use as a context manager, or call close()."""

    def __init__(self):
        self._workers: dict[Connection, BaseProcess] = {}  # in the order of ranks
        self._n_jobs = 0  # since the workers started

    def __exit__(self, *exception) -> None:
        self.close()

    def run(
        self, function: Callable, world_size: int, *args, timeout_s: float = 300, **kwargs
    ) -> list:
        """Call `function(rank, world_size, *args, **kwargs)` on each of `world_size` ranks. Return one result per rank.

        Function, arguments and results must be picklable. Raises RankFailure if a rank raises, dies or takes longer
        than `timeout_s`.
        """
        if self._n_jobs == JOBS_PER_WORKER:
            self.close()
        for rank in range(len(self._workers), world_size):
            self._start(rank)
        self._n_jobs += 1
        connections = list(self._workers)[:world_size]
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            for connection in connections:
                connection.send((function, world_size, folder, args, kwargs))
            return self._collect(connections, timeout_s)

    def close(self) -> None:
        """End the workers."""
        for process in self._workers.values():
            process.kill()
        for process in self._workers.values():
            process.join()
        self._workers = {}
        self._n_jobs = 0

    def _start(self, rank: int) -> None:
        start_worker_server()
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(rank, theirs), daemon=True)
        process.start()
        theirs.close()  # otherwise recv() would not notice that a worker died
        self._workers[ours] = process

    def _collect(self, connections: list[Connection], timeout_s: float) -> list:
        world_size = len(connections)
        results = [None] * world_size
        pending = {connection: rank for rank, connection in enumerate(connections)}
        failures: list[RankFailure] = []
        deadline = time.monotonic() + timeout_s
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = pending.pop(connection)
                try:
                    results[rank] = connection.recv()
                except EOFError:
                    process = self._workers[connection]
                    process.join(timeout=5)
                    name = f"rank {rank} of {world_size}"
                    results[rank] = RankFailure(f"{name} ended without an answer")
                    if process.exitcode and process.exitcode < 0:
                        killer = signal.Signals(-process.exitcode).name
                        results[rank] = NoAnswer(f"{name} was killed by {killer}")
                if isinstance(results[rank], RankFailure):
                    failures.append(results[rank])
                    deadline = min(deadline, time.monotonic() + SECONDS_AFTER_A_FAILURE)
        if pending and not failures:
            late = ", ".join(map(str, pending.values()))
            failures.append(NoAnswer(f"no answer within {timeout_s:g} s from rank {late}"))
        if failures:
            self.close()
            # If a rank was killed or has failed, its peers fail too.
            raise min(
                failures, key=lambda each: (not isinstance(each, NoAnswer), OF_A_PEER in str(each))
            )
        return results


def serve(rank: int, connection: Connection) -> None:
    """Worker: run jobs until the parent ends. For each job, join a group, call the function and send the result."""
    torch.set_num_threads(1)
    # DTensor warns that gathering over two dims takes two steps, but speed does not matter here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    end_with_parent()
    limit_gloo_workers()
    faulthandler.enable()  # a rank that crashes prints its stack
    while True:
        try:
            function, world_size, folder, args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            store = dist.FileStore(str(Path(folder) / "store"), world_size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
            try:
                dist.barrier()  # a rank with a short job must not leave the group before all ranks have joined
                result = function(rank, world_size, *args, **kwargs)
            finally:
                if dist.is_initialized():  # the job may have destroyed the group
                    dist.destroy_process_group()
                forget_groups()
            connection.send(result)
        except BaseException:  # a worker must always answer
            text = f"rank {rank} of {world_size}: {traceback.format_exc()}"
            connection.send(RankFailure(text))
