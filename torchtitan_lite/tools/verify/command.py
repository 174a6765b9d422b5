"""`verify`: runs a config, reduced, beside one process, and prints a certificate or the first difference."""

import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.preflight import read_run_config
from torchtitan_lite.tools.verify.certificate import (
    EXIT_STATUS,
    Certificate,
    describe,
    report_for_programs,
)
from torchtitan_lite.tools.verify.gradient_trial import try_small, try_wide
from torchtitan_lite.tools.verify.precision_trial import try_bfloat16, try_float8
from torchtitan_lite.tools.verify.ranks import RankPool
from torchtitan_lite.tools.verify.reduction import Reduction, override, reduce_config
from torchtitan_lite.tools.verify.small_runs import deepen, keep_width, lengthen
from torchtitan_lite.tools.verify.train_trial import try_train
from torchtitan_lite.tools.verify.trial import RunRanks, Trial, make_trial
from torchtitan_lite.tools.verify.update_trial import try_updates

# Name -> trial, in the order in which they are made. The first that finds a fault is the last.
TRIALS: dict[str, Callable[[Reduction, RunRanks, Path], Trial]] = {
    name: partial(make_trial, name, make)
    for name, make in {
        "wide": try_wide,
        "deep": partial(try_small, deepen),
        "long": partial(try_small, lengthen),
        "real width": partial(try_small, keep_width),
        "updates": try_updates,
        "train.py": try_train,
        "bfloat16": try_bfloat16,
        "float8": try_float8,
    }.items()
}


def main(options: Namespace) -> int:
    """Run the tool. Exit status: 0 certified, 1 wrong, 2 wrong input, 3 certified in part, 4 not finished."""
    reading = read_run_config(options.config_args)
    try:
        if reading.problems:
            raise ConfigError(reading.problems)
        reduction = reduce_config(reading.config, options.ranks)
    except ConfigError as error:
        if options.json:
            print(json.dumps({"certified": False, "problems": list(map(asdict, error.problems))}, default=str))
        print(f"This run could not start:\n{error}", file=sys.stderr)
        return 2
    if options.bf16:
        reduction = replace(reduction, real=override(reading.config, {"training.mixed_precision_param": "bfloat16"}))
    torch.set_num_threads(1)
    n_ranks = reduction.layout.world_size
    print(f"starting {n_ranks} processes ...", file=sys.stderr)
    with RankPool(n_ranks) as pool, tempfile.TemporaryDirectory(prefix="verify-") as folder:
        run_ranks = partial(pool.run, timeout_s=options.timeout)
        certificate = verify(reading.config_name, reduction, run_ranks, Path(folder))
    if options.json:
        print(json.dumps(report_for_programs(certificate), default=str))
    else:
        print(describe(certificate, verbose=options.verbose))
    return EXIT_STATUS[certificate.verdict]


def verify(config_name: str, reduction: Reduction, run_ranks: RunRanks, folder: Path) -> Certificate:
    """Make the trials of one layout, up to the first that finds a fault."""
    trials: list[Trial] = []
    for name, make in TRIALS.items():
        print(f"  {name} ...", file=sys.stderr)
        trials.append(make(reduction, run_ranks, folder))
        if trials[-1].faults:
            break
    return Certificate(config_name, reduction, trials)
