"""All mutants, and one trial of `verify` on ranks that are broken by one of them."""

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import compare

# Each adds its patches to the table.
import mutants_of_experts  # noqa: F401
import mutants_of_gradients  # noqa: F401
import mutants_of_models  # noqa: F401
import mutants_of_muon  # noqa: F401
import mutants_of_precision  # noqa: F401
import mutants_of_sizes  # noqa: F401
import mutants_of_train  # noqa: F401
import mutants_of_updates  # noqa: F401
from mutant_table import MUTANTS

from torchtitan_lite.tools.verify.command import list_trials
from torchtitan_lite.tools.verify.trial import Trial, make_trial


def apply_mutant(name: str) -> AbstractContextManager:
    return MUTANTS[name].patch()


def try_mutant(name: str, pool, folder: Path) -> Trial:
    """Make the trial that must notice, on ranks that are all broken in this way."""
    trial = MUTANTS[name].trial
    with apply_mutant(name):  # one of them lets a refused config through
        reduction = compare.reduce_row(MUTANTS[name].row)
    trials = list_trials(reduction, compare.ranks_inside(pool, partial(apply_mutant, name)), folder)
    return make_trial(trial, trials[trial])
