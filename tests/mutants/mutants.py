"""Import all mutants, and run one trial of `verify` on ranks that have one mutant."""

from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from pathlib import Path

import compare
from mutant_table import MUTANTS

from torchtitan_lite.tools.verify.command import list_trials
from torchtitan_lite.tools.verify.trial import Trial, make_trial

for path in Path(__file__).parent.glob("mutants_of_*.py"):
    import_module(path.stem)  # the import adds the file's mutants to the table


def apply_mutant(name: str) -> AbstractContextManager:
    return MUTANTS[name].patch()


def try_mutant(name: str, pool, folder: Path) -> Trial:
    """Run the trial that must notice a mutant. All ranks have the mutant."""
    mutant = MUTANTS[name]
    run_ranks = compare.ranks_inside(pool, partial(apply_mutant, name))
    trials = list_trials(compare.reduce_row(mutant.row), run_ranks, folder)
    return make_trial(mutant.trial, trials[mutant.trial])
