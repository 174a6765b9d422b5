"""The trials of a certificate, in the order in which they are made. The first that finds a fault is the last."""

from collections.abc import Callable
from pathlib import Path

from torchtitan_lite.verify.gradient_trial import try_layout
from torchtitan_lite.verify.precision_trial import try_bfloat16, try_float8
from torchtitan_lite.verify.reduction import Reduction
from torchtitan_lite.verify.reference import Method
from torchtitan_lite.verify.small_trials import SmallRun, deepen, find_far_position, keep_width, lengthen
from torchtitan_lite.verify.train_trial import try_train
from torchtitan_lite.verify.trial import RunRanks, Trial
from torchtitan_lite.verify.update_trial import try_updates


def try_wide(reduction: Reduction, run_ranks: RunRanks, folder: Path) -> Trial:
    """The layout with a model of a few wide layers."""
    return try_layout(reduction.config, reduction.layout.world_size, run_ranks, folder, name="wide")


def try_deep(reduction: Reduction, run_ranks: RunRanks, folder: Path) -> Trial:
    """The layout with a model of many narrow layers."""
    return try_small("deep", deepen(reduction), Method(updates=False), run_ranks, folder)


def try_long(reduction: Reduction, run_ranks: RunRanks, folder: Path) -> Trial:
    """The layout with long sequences, many documents, and far positions."""
    method = Method(updates=False, farthest_position=find_far_position(reduction), tokens_per_document=4)
    return try_small("long", lengthen(reduction), method, run_ranks, folder)


def try_real_width(reduction: Reduction, run_ranks: RunRanks, folder: Path) -> Trial:
    """The layout with matrices as large as the real ones, or as large as memory and time allow."""
    return try_small(
        "real width", keep_width(reduction), Method(updates=False, repeats_weights=True), run_ranks, folder
    )


def try_small(name: str, run: SmallRun, method: Method, run_ranks: RunRanks, folder: Path) -> Trial:
    """The gradients of one step."""
    options = {"name": name, "method": method, "subject": run.subject}
    return try_layout(run.config, run.layout.world_size, run_ranks, folder, **options)


TRIALS: dict[str, Callable[[Reduction, RunRanks, Path], Trial]] = {
    "wide": try_wide,
    "deep": try_deep,
    "long": try_long,
    "real width": try_real_width,
    "updates": try_updates,
    "train.py": try_train,
    "bfloat16": try_bfloat16,
    "float8": try_float8,
}
