"""Small patches that break the code on purpose. `verify` must catch and name each of them, or it proves nothing.

They are teaching material too: each says what its user would have seen, which is mostly nothing at all. A patch is in
force inside one worker process, for one measurement.
"""

# Each adds its patches to the table.
import mutants_of_gradients  # noqa: F401
import mutants_of_precision  # noqa: F401
import mutants_of_sizes  # noqa: F401
import mutants_of_train  # noqa: F401
import mutants_of_updates  # noqa: F401
from mutant_table import MUTANTS

__all__ = ["MUTANTS"]
