"""Free memory before the first step, then collect Python's garbage at fixed steps.

A rank that collects alone makes all others wait.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def collect_at_steps(freq: int) -> Iterator[Callable[[int], None]]:
    """Turn automatic collection off. Yields a function to call with each step; it collects every `freq` steps."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # initializing or loading weights allocated one full tensor at a time
    gc.collect()
    gc.freeze()  # never scan objects that exist now
    gc.disable()

    def collect(step: int) -> None:
        if step % freq == 0:
            gc.collect(1)

    try:
        yield collect
    finally:
        gc.enable()
        gc.unfreeze()
