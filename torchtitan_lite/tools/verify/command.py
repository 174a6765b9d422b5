"""`verify`: compare a reduced config with one process; print a certificate or the first difference.

wide        five steps with the optimizer and schedule of the run; two of them have a gradient that is not finite.
            With training.skip_spikes a sixth, whose gradient is a spike
deep        one step: twelve layers, twelve microbatches, rows of 280 tokens or more
train.py    three starts of train.py: one process; the layout; another layout that resumes
bfloat16    one step (float8: three steps), compared with one rank that rounds in the same places
"""

import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from torchtitan_lite.build import build_on_meta
from torchtitan_lite.config.checks import resolve_model
from torchtitan_lite.tools.plan.planned_run import read_target
from torchtitan_lite.tools.verify.certificate import CERTIFIED, describe, make_report
from torchtitan_lite.tools.verify.plain import count_steps
from torchtitan_lite.tools.verify.ranks import RankPool
from torchtitan_lite.tools.verify.reduction import Reduction, deepen, reduce_config
from torchtitan_lite.tools.verify.train_py import try_train
from torchtitan_lite.tools.verify.trial import (
    RunRanks,
    Trial,
    make_trial,
    try_layout,
    try_precision,
)


def main(options: Namespace) -> int:
    """Run the tool. Exit status: 0 certified, 1 wrong or not finished, 2 wrong input.

    Raises UserError if the code of the model differs from its table.
    """
    given, *_ = read_target(options.config_args, None)
    reduction = reduce_config(given.config, options.ranks)
    build_on_meta(reduction.config, resolve_model(reduction.config.model))
    torch.set_num_threads(1)
    with RankPool() as pool, tempfile.TemporaryDirectory(prefix="verify-") as folder:
        run_ranks = partial(pool.run, timeout_s=options.timeout)
        trials = make_trials(reduction, run_ranks, Path(folder))
    report = make_report(given.config_name, reduction, trials)
    print(json.dumps(report, default=str) if options.json else describe(report))
    return 0 if report["verdict"] == CERTIFIED else 1


def list_trials(
    reduction: Reduction, run_ranks: RunRanks, folder: Path
) -> dict[str, Callable[[], Trial]]:
    """Return the trials of a run by name, in the order in which they run."""
    real = reduction.real
    wide = reduction.config
    n_ranks = reduction.layout.world_size
    trials = {
        "wide": partial(try_layout, "wide", wide, n_ranks, run_ranks, folder, count_steps(wide)),
        "deep": partial(try_layout, "deep", deepen(reduction), n_ranks, run_ranks, folder, 1),
        "train.py": partial(try_train, reduction, run_ranks, folder),
    }
    if real.training.mixed_precision_param != "float32":
        trials["bfloat16"] = partial(try_precision, "bfloat16", reduction, run_ranks, folder)
    if real.model.uses_float8:
        trials["float8"] = partial(try_precision, "float8", reduction, run_ranks, folder)
    return trials


def make_trials(reduction: Reduction, run_ranks: RunRanks, folder: Path) -> list[Trial]:
    """Run the trials of one layout, up to the first trial that finds a fault."""
    trials: list[Trial] = []
    for name, call in list_trials(reduction, run_ranks, folder).items():
        print(f"  {name} ...", file=sys.stderr)
        trials.append(make_trial(name, call))
        if trials[-1].faults:
            break
    return trials
