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
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_lite.config.layout import plan_layout, resolve_model
from torchtitan_lite.config.reader import dump_config_toml
from torchtitan_lite.config.schema import Config, Job
from torchtitan_lite.verify.ranks import RankFailure
from torchtitan_lite.verify.reduction import Reduction
from torchtitan_lite.verify.train_checks import BOUNDS, Check, StartPlan, check_start
from torchtitan_lite.verify.train_reference import run_reference
from torchtitan_lite.verify.train_setup import choose_other_layout, make_config, write_corpora
from torchtitan_lite.verify.train_start import TRAIN_PY, Seen, start_train_py
from torchtitan_lite.verify.trial import Measure, RunRanks, Trial, describe_failure

NAME = "train.py"
SAVED_STEP, FIRST_END, SECOND_END = 2, 3, 4


def try_train(reduction: Reduction, run_ranks: RunRanks, folder: Path) -> Trial:
    """Two starts of train.py on the ranks of the layout, beside one process. `folder` keeps their files."""
    begin = time.monotonic()
    if not TRAIN_PY.is_file():
        return Trial(NAME, [], {}, None, 0.0, skipped=f"there is no {TRAIN_PY}", is_missing=True)
    own_folder = Path(tempfile.mkdtemp(prefix="train.py-", dir=folder)).absolute()
    first, second = plan_starts(reduction, own_folder)
    texts = write_corpora(first.config)
    validated = {*first.validated, *second.validated}
    expected = run_reference(first.config, *texts, kept=(SAVED_STEP, FIRST_END, SECOND_END), validated=validated)
    expected_path = own_folder / "expected.pt"
    torch.save(expected, expected_path)
    try:
        checks = check_start(first, expected, start_ranks(first, run_ranks, expected_path))
        if all(check.is_right for check in checks):
            saved = Path(first.config.checkpoint.folder) / f"step-{SAVED_STEP}"
            (second.dump_folder / saved).parent.mkdir(parents=True)
            (first.dump_folder / saved).rename(second.dump_folder / saved)
            checks += check_start(second, expected, start_ranks(second, run_ranks, expected_path))
    except RankFailure as failure:
        return describe_failure(NAME, failure, time.monotonic() - begin)
    subject = f"{FIRST_END} steps on {first.layout}, resumed after step {SAVED_STEP} on {second.layout}"
    return judge(checks, subject, time.monotonic() - begin)


def plan_starts(reduction: Reduction, folder: Path) -> tuple[StartPlan, StartPlan]:
    """On the layout of the run, and on another one."""
    config = make_config(reduction, folder)
    layout = plan_layout(config, resolve_model(config.model), reduction.layout.world_size)
    other, other_layout = choose_other_layout(config, layout)

    def leading_to(config: Config, step: int, name: str) -> Config:
        checkpoint = replace(config.checkpoint, interval=SAVED_STEP)
        training = replace(config.training, steps=step)
        return replace(config, job=Job(dump_folder=str(folder / name)), training=training, checkpoint=checkpoint)

    return (
        StartPlan(leading_to(config, FIRST_END, "first"), layout, 0, FIRST_END),
        StartPlan(leading_to(other, SECOND_END, "resumed"), other_layout, SAVED_STEP, SECOND_END),
    )


def start_ranks(plan: StartPlan, run_ranks: RunRanks, expected_path: Path) -> list[Seen]:
    """train.py on every rank; what each one saw. Raises RankFailure."""
    path = plan.dump_folder.with_suffix(".toml")
    path.write_text(dump_config_toml(plan.config), encoding="utf-8")
    n_ranks = plan.layout.world_size
    own_rows = [plan.own_rows(rank) for rank in range(n_ranks)]
    # As torchrun does: the parent holds the store by which ranks meet, at a port that the system chooses.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    args = ["--config", str(path)]
    return run_ranks(start_train_py, n_ranks, TRAIN_PY, args, store.port, str(expected_path), own_rows)


def judge(checks: list[Check], subject: str, seconds: float) -> Trial:
    """The worst of each measure, and what is wrong first."""
    measures, faults = [], {}
    for name, (bound, of) in BOUNDS.items():
        of_measure = [check for check in checks if check.measure == name]
        if of_measure:
            measures.append(Measure(name, max(check.error for check in of_measure), bound, of))
        if wrong := [check for check in of_measure if not check.is_right]:
            faults[name] = wrong[0].culprit.detail
    culprit = next((check.culprit for check in checks if not check.is_right), None)
    return Trial(NAME, measures, faults, culprit, seconds, subject=subject)
