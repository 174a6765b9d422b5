"""`python tests/show_mutant.py NAME`: what a user of broken code sees, and what `verify` says to it.

Without a name: the list of mutants.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torchtitan_lite.tools.environment import continue_with_packages

if __name__ == "__main__":
    continue_with_packages()

from mutants import MUTANTS, try_mutant

from torchtitan_lite.tools.verify.certificate import Certificate, describe_trial, describe_verdict
from torchtitan_lite.tools.verify.ranks import RankPool


def main(names: list[str]) -> int:
    if len(names) != 1 or names[0] not in MUTANTS:
        print("\n".join(MUTANTS))
        return 2
    (name,) = names
    mutant = MUTANTS[name]
    with RankPool(mutant.row.world_size) as pool, tempfile.TemporaryDirectory() as folder:
        reduction, trial = try_mutant(name, mutant.trial, pool, Path(folder))
    print(f"{name}: {mutant.seen}\n")
    print("\n".join([*describe_trial(trial), *describe_verdict(Certificate(name, reduction, [trial]))]))
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
