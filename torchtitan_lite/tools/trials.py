"""The trials of a certificate, in the order in which they are made. The first that finds a fault is the last."""

from collections.abc import Callable
from pathlib import Path

from torchtitan_lite.tools.gradient_trial import try_layout
from torchtitan_lite.tools.precision_trial import try_bfloat16, try_float8
from torchtitan_lite.tools.reduction import Reduction
from torchtitan_lite.tools.train_trial import try_train
from torchtitan_lite.tools.trial import RunRanks, Trial
from torchtitan_lite.tools.update_trial import try_updates


def try_wide(reduction: Reduction, run_ranks: RunRanks, folder: Path) -> Trial:
    """The layout with a model of a few wide layers."""
    return try_layout(reduction.config, reduction.layout.world_size, run_ranks, folder, name="wide")


TRIALS: dict[str, Callable[[Reduction, RunRanks, Path], Trial]] = {
    "wide": try_wide,
    "updates": try_updates,
    "train.py": try_train,
    "bfloat16": try_bfloat16,
    "float8": try_float8,
}
