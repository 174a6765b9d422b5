"""Small patches that break the code on purpose. `verify` must catch and name each of them, or it proves nothing.

They are teaching material too: each says what its user would have seen, which is mostly nothing at all. A patch is in
force inside one worker process, for one measurement.
"""

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import compare

# Each adds its patches to the table.
import mutants_of_experts  # noqa: F401
import mutants_of_gradients  # noqa: F401
import mutants_of_precision  # noqa: F401
import mutants_of_sizes  # noqa: F401
import mutants_of_train  # noqa: F401
import mutants_of_updates  # noqa: F401
from mutant_table import MUTANTS

from torchtitan_lite.tools.verify.command import TRIALS
from torchtitan_lite.tools.verify.reduction import Reduction
from torchtitan_lite.tools.verify.trial import Trial

__all__ = ["MUTANTS"]


def apply_mutant(name: str) -> AbstractContextManager:
    return MUTANTS[name].patch()


def try_mutant(name: str, trial: str, pool, folder: Path) -> tuple[Reduction, Trial]:
    """Make one trial, on ranks that are all broken in this way."""
    row = MUTANTS[name].row
    with apply_mutant(name):  # one of them lets a refused config through
        reduction = compare.reduce_row(row)
    return reduction, TRIALS[trial](reduction, compare.ranks_inside(pool, partial(apply_mutant, name)), folder)
