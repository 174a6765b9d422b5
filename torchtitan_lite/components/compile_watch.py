"""Notices when a step compiles again. A run of one shape compiles in its first two steps, and then never more.

What is compiled again and again costs seconds each time, on all ranks, for the others wait; and after a few times torch
gives up and runs that function uncompiled. Nothing of it shows in the loss.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch._dynamo.utils import get_compilation_metrics  # torch has no public name for it yet

logger = logging.getLogger(__name__)

N_STEPS_THAT_MAY_COMPILE = 2


@contextmanager
def warn_on_recompile(n_th_step: int) -> Iterator[None]:
    """Warns by name of what is compiled inside, from the third step of a process on."""
    before = get_compilation_metrics()
    yield
    if n_th_step > N_STEPS_THAT_MAY_COMPILE and (compiled := list_compiled_since(before)):
        logger.warning(f"step {n_th_step} of this process has compiled again: {'; '.join(compiled)}")


def list_compiled_since(before: list) -> list[str]:
    """What torch has compiled since get_compilation_metrics() was `before`, and why: `forward (llama3.py:78): ...`."""
    # torch keeps the last 64 entries, so that their number alone tells nothing.
    known = {id(entry) for entry in before}
    entries = [entry for entry in get_compilation_metrics() if id(entry) not in known]
    return [
        f"{entry.co_name} ({Path(entry.co_filename).name}:{entry.co_firstlineno}): {entry.recompile_reason or 'new'}"
        for entry in entries
        if entry.co_name is not None  # a backward has no name, and follows from its forward
    ]
