"""Does train.py itself do what one process does? Its own path: data, rates, validation, logging, save and resume.

    first start     the layout       steps 1 2 3     saved after step 2, as [checkpoint] of the run says, and after 3
    second start    another layout             3 4   of the same ranks, from the checkpoint of step 2

Both are starts of the real file, in warm workers (train_start.py), on a corpus that is written here. One process
computes the same steps by its own code (train_reference.py).

What is compared follows the order of time, so that the first thing that is wrong is named: rows that each rank reads,
learning rate of each rank, loss, gradient norm, validation, weights, saved and loaded state, logged numbers.

The run's optimizer is kept, with an eps that does not amplify rounding, because a resume has to restore its moments.
Left out: CPU offload, which train.py refuses without a GPU; TensorBoard, traces, exports.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_lite.config import Checkpoint, Config, ConfigError, Job, LRScheduler, Metrics, Optimizer, Profiling
from torchtitan_lite.config import Validation
from torchtitan_lite.config_reader import dump_config_toml
from torchtitan_lite.layout import MESH_DIMS, Layout, plan_layout
from torchtitan_lite.sizes import resolve_shape
from torchtitan_lite.tools.ranks import RankFailure
from torchtitan_lite.tools.reduction import DEGREE_KEYS, Reduction, override
from torchtitan_lite.tools.train_checks import BOUNDS, Check, StartPlan, check_start, describe_extent
from torchtitan_lite.tools.train_corpus import N_WORDS, TOKENIZER, Text, make_text, write_corpus
from torchtitan_lite.tools.train_reference import Expected, run_reference
from torchtitan_lite.tools.train_start import TRAIN_PY, Seen, start_train_py
from torchtitan_lite.tools.trial import Measure, RunRanks, Trial, describe_failure

NAME = "train.py"
SAVED_STEP, FIRST_END, SECOND_END = 2, 3, 4
SECONDS_TO_WAIT = 300  # of ranks for each other, as verify's

# The resumed run differs from the first one where it can: a rank of a dim on the left goes to one on the right.
MOVES = [
    (source, target)
    for source in ("tp", "pp", "cp", "dp_replicate", "dp_shard")
    for target in ("dp_shard", "tp", "cp", "dp_replicate", "pp")
    if source != target
]


def try_train(reduction: Reduction, run_ranks: RunRanks, folder: Path) -> Trial:
    """Two starts of train.py on the ranks of the layout, beside one process. `folder` is a temporary one."""
    start = time.monotonic()
    if not TRAIN_PY.is_file():
        return Trial(NAME, [], {}, None, 0.0, skipped=f"{TRAIN_PY} is not there: this package is not a checkout")
    own_folder = Path(tempfile.mkdtemp(prefix="train.py-", dir=folder))
    config = make_config(reduction, own_folder)
    texts = write_corpora(config)
    validated = (1, FIRST_END, SECOND_END)
    expected = run_reference(config, *texts, kept=(SAVED_STEP, FIRST_END, SECOND_END), validated=validated)
    expected_path = own_folder / "expected.pt"
    torch.save(expected, expected_path)
    plans = [
        StartPlan(plan_again(config), 0, FIRST_END, own_folder / "first"),
        StartPlan(choose_other_layout(config), SAVED_STEP, SECOND_END, own_folder / "resumed"),
    ]
    checks: list[Check] = []
    try:
        for plan in plans:
            if plan.resumed_step:
                take_checkpoint(plans[0], plan)
            seen = start_ranks(plan, run_ranks, expected_path)
            checks += check_start(plan, expected, seen)
            if any(not check.is_right for check in checks):
                break
    except RankFailure as failure:
        return describe_failure(NAME, failure, time.monotonic() - start)
    ...
