"""Define the fixtures that many tests share: one thread, signals, one pool of ranks, the output of a tool."""

import json
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
import warm_start
from compare import ranks_inside

from torchtitan_lite.__main__ import main
from torchtitan_lite.tools.processes import PRELOADED
from torchtitan_lite.tools.verify.ranks import RankPool

# The server that forks the ranks imports these modules once, because each rank would need 0.2 s for the imports, or 1.5
# s to compile.
PRELOADED += ["torch._dynamo.backends.debugging", "torch._inductor.compile_fx", "tests.preloaded"]


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard():
    """Restore SIGINT. A shell ignores SIGINT in background jobs, and the processes that tests start would ignore it
    too."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def skip_without_gpu(request):
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture(scope="session")
def pool():
    with RankPool() as ranks:
        yield ranks


@pytest.fixture(scope="session")
def run_training(pool):
    """Return a function that runs train.py on ranks of the pool, checks the status, and returns what rank 0 prints.

    `stop_at`: send SIGTERM before step number `stop_at` of this start (1 is the first). 0: train to the end.
    `inside`: a function that returns the context manager of a rank, and can be pickled.
    """

    def run(
        folder: Path,
        keys: list[str],
        n_ranks: int = 1,
        stop_at: int = 0,
        restarts: int = 0,
        inside: Callable[[], AbstractContextManager] = nullcontext,
    ) -> str:
        keys = [*keys, f"--job.dump_folder={folder}"]
        status = 128 + signal.SIGTERM if stop_at else 0
        run_ranks = ranks_inside(pool, inside)
        statuses, outputs = zip(
            *run_ranks(warm_start.start, n_ranks, keys, stop_at, restarts), strict=True
        )
        assert statuses == (status,) * n_ranks
        return outputs[0]

    return run


@pytest.fixture(scope="session")
def letters(tmp_path_factory) -> list[str]:
    """Return the keys of a small model that reads a corpus of random letters."""
    return warm_start.write_letters(tmp_path_factory.mktemp("a corpus") / "letters")


@pytest.fixture
def run_tool(capsys):
    """Return a function that runs a tool, checks its exit status, and returns what it prints.

    These are results from stdout if the status is 0, errors from stderr if it is 2, and both if it is 1.
    """

    def run(*args: object, status: int = 0) -> str:
        capsys.readouterr()
        try:
            ended = main([*map(str, args)])
        except SystemExit as stop:  # argparse
            ended = stop.code
        out, err = capsys.readouterr()
        assert ended == status, out + err
        return {0: out, 2: err}.get(status, out + err)

    return run


@pytest.fixture
def run_json(run_tool):
    """Return a function that runs a tool with arguments and returns what --json prints."""
    return lambda *args: json.loads(run_tool(*args, "--json"))
