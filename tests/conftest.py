"""Fixtures of many tests: one pool of ranks, and the results of one process, computed once."""

import signal

import compare
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
    with RankPool(n_ranks=8) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def references(tmp_path_factory):
    """Where trials of `verify` keep their references from test to test."""
    return tmp_path_factory.mktemp("references")


@pytest.fixture(scope="session")
def oracle(tmp_path_factory):
    """Function: overrides of the table config -> file with one process's outcome on the same model."""
    folder = tmp_path_factory.mktemp("oracle")

    def path_for(overrides: dict[str, object]) -> str:
        sections = ("model.", "flavor.", "training.expert_")
        of_model = {key: value for key, value in overrides.items() if key.startswith(sections)}
        path = folder / ("oracle-" + "-".join(f"{key}-{value}" for key, value in sorted(of_model.items())) + ".pt")
        if not path.exists():
            torch.save(compare.run_one_process(compare.override(compare.TABLE_CONFIG, of_model)), path)
        return str(path)

    return path_for
