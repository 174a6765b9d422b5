"""Fixtures of many tests: one thread, signals, one pool of ranks."""

import signal

import pytest
import torch

from torchtitan_lite.tools.verify.ranks import RankPool


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard():
    """A shell ignores SIGINT in its background jobs, and processes that the tests start would inherit that."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def pool():
    with RankPool() as ranks:
        yield ranks
