"""Does train.py itself do what one process does? Its own path: data, rates, validation, logging, save and resume.

    first start     the layout       steps 1 2 3     saved after step 2, as [checkpoint] of the run says, and after 3
    second start    another layout             3 4   of the same ranks, from the checkpoint of step 2

Both are starts of the real file, in warm workers (train_start.py), on a corpus that is written in a temporary folder.
One process computes the same steps by its own code (train_reference.py). train_checks.py compares in the order of
time, so that the first difference is named.

    kept        the layout, as reduced; the optimizer, because a resume has to restore its moments; the form of the
                learning rate's schedule, the number of corpora (two at most) and their weights, the way of saving
    replaced    paths; numbers of the optimizer that amplify rounding; layers and microbatches: as few as can run
    given       the routes of training: routers choose their own in validation alone
    left out    CPU offload, which train.py refuses without a GPU; TensorBoard, traces, exports
"""

import tempfile
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_lite.config.layout import Layout, plan_layout, resolve_model
from torchtitan_lite.config.messages import ConfigError
from torchtitan_lite.config.reader import dump_config_toml
from torchtitan_lite.config.schema import (
    Checkpoint,
    Comm,
    Config,
    Job,
    LRScheduler,
    Metrics,
    Optimizer,
    Profiling,
    Validation,
    with_value,
)
from torchtitan_lite.tools.verify.degrees import give_degrees
from torchtitan_lite.tools.verify.reduction import STAGES_BY_RULE, Reduction, override, round_up
from torchtitan_lite.tools.verify.small_runs import shrink_stages
from torchtitan_lite.tools.verify.step_formulas import FORMULAS, LEFT
from torchtitan_lite.tools.verify.train_checks import MEASURES, StartPlan, list_checks
from torchtitan_lite.tools.verify.train_reference import (
    N_WORDS,
    TOKENIZER,
    Text,
    make_text,
    run_reference,
    write_corpus,
)
from torchtitan_lite.tools.verify.train_start import TRAIN_PY, RankRecord, start_train_py
from torchtitan_lite.tools.verify.trial import RunRanks, Trial, judge

SAVED_STEP, FIRST_END, SECOND_END = 2, 3, 4


def try_train(reduction: Reduction, run_ranks: RunRanks, folder: Path) -> Trial:
    """Start train.py twice on the ranks of the layout, beside one process. `folder` keeps their files."""
    if not TRAIN_PY.is_file():
        return Trial(skipped=f"there is no {TRAIN_PY}", is_missing=True)
    own_folder = Path(tempfile.mkdtemp(prefix="train.py-", dir=folder)).absolute()
    config = make_config(reduction, own_folder)
    layout = plan_layout(config, resolve_model(config.model), reduction.layout.world_size)
    first = StartPlan(give_steps(config, FIRST_END, own_folder / "first"), layout, 0)
    other, other_layout = choose_other_layout(config, layout)
    second = StartPlan(give_steps(other, SECOND_END, own_folder / "resumed"), other_layout, SAVED_STEP)
    expected = run_reference(config, *write_corpora(config), n_steps=SECOND_END)
    expected_path = own_folder / "expected.pt"
    torch.save(expected, expected_path)
    checks = list(list_checks(first, expected, start_ranks(first, run_ranks, expected_path)))
    if all(check.excess <= 1 for check in checks):
        saved = Path(first.config.checkpoint.folder) / f"step-{SAVED_STEP}"
        (second.dump_folder / saved).parent.mkdir(parents=True)
        (first.dump_folder / saved).rename(second.dump_folder / saved)
        checks += list_checks(second, expected, start_ranks(second, run_ranks, expected_path))
    subject = f"{FIRST_END} steps on {first.layout}, resumed after step {SAVED_STEP} on {second.layout}"
    return judge(checks, MEASURES, subject)


def give_steps(config: Config, last_step: int, folder: Path) -> Config:
    """Return the config of one start, which ends after `last_step` and writes into `folder`."""
    return override(config, {"training.steps": last_step, "job": Job(dump_folder=str(folder))})


def start_ranks(plan: StartPlan, run_ranks: RunRanks, expected_path: Path) -> list[RankRecord]:
    """Run train.py on every rank; return the record of each. Raises RankFailure."""
    path = plan.dump_folder.with_suffix(".toml")
    flavor = {"debug": resolve_model(plan.config.model)}  # a TOML file cannot hold numbers of experts
    path.write_text(dump_config_toml(with_value(plan.config, "model.flavor", "debug")), encoding="utf-8")
    n_ranks = plan.layout.world_size
    own_rows = [plan.own_rows(rank) for rank in range(n_ranks)]
    # As torchrun does: the parent holds the store by which ranks meet, at a port that the system chooses.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    args = ["--config", str(path)]
    return run_ranks(start_train_py, n_ranks, TRAIN_PY, args, store.port, str(expected_path), own_rows, flavor)


# ---------------------------------------------------------------- the small config, its corpora, a second layout

MOST_CORPORA = 2
SCHEDULED_STEPS = 6  # some more than are trained
SECONDS_TO_WAIT = 300  # of ranks for each other

DATA, OTHERS = ("dp_shard", "dp_replicate"), ("tp", "pp", "cp")
# The second layout moves the smallest factor of one mesh dim to another: the first pair that can run. First come pairs
# after which ranks read other rows; those that end tp are quick besides.
MOVES = [
    *((source, target) for target in DATA for source in OTHERS),
    *((source, target) for target in OTHERS for source in DATA),
    *permutations(DATA),
    *permutations(OTHERS, 2),
]


def make_config(reduction: Reduction, folder: Path) -> Config:
    """Return the config of train.py. `folder` is absolute and holds the corpora."""
    real, n_ranks = reduction.real, reduction.layout.world_size
    small = override(reduction.config, shrink_stages(reduction))
    schedule = choose_schedule(real.lr_scheduler)
    n_corpora = min(MOST_CORPORA, len(real.training.dataset))
    vocab_size = reduction.args.vocab_size
    vocab_size += round_up(max(0, N_WORDS - vocab_size), n_ranks)  # it divides by the same degrees as before
    return override(
        small,
        {
            "profiling": Profiling(),
            "metrics": Metrics(log_freq=1, enable_tensorboard=False),
            "optimizer": choose_optimizer(real.optimizer, small.optimizer, warms_up=schedule.warmup_steps > 1),
            "lr_scheduler": schedule,
            "checkpoint": Checkpoint(
                enable=True, interval=SAVED_STEP, async_mode=real.checkpoint.async_mode, verify=real.checkpoint.verify
            ),
            "validation": Validation(enable=True, freq=10**6),
            "comm": Comm(init_timeout_seconds=SECONDS_TO_WAIT, train_timeout_seconds=SECONDS_TO_WAIT, trace_buf_size=0),
            "model.hf_assets_path": TOKENIZER,
            "model.vocab_size": vocab_size,
            "training.dataset": [str(folder / f"corpus-{number}") for number in range(n_corpora)],
            "training.dataset_path": "",
            "training.dataset_weights": real.training.dataset_weights[:n_corpora],
            "training.cache_folder": str(folder / "cache"),
            "training.enable_cpu_offload": False,  # refused without a GPU
        },
    )


def choose_optimizer(real: Optimizer, small: Optimizer, *, warms_up: bool) -> Optimizer:
    """Return the real optimizer if it has moments, with numbers that do not amplify rounding; else SGD.

    Rates are such that updates stand out from the rounding of the weights that they are added to. Three times these
    rates, and the error of one parameter's moment grew to 1.1e-5 in four steps (Llama 3.2 1B, reduced).
    """
    if real.name not in FORMULAS or not FORMULAS[real.name].moments:
        return replace(small, lr=2.0, weight_decay=0.01)
    return replace(
        real,
        lr=0.045 if warms_up else 0.015,
        beta1=min(real.beta1, 0.99),
        beta2=min(real.beta2, 0.999),
        eps=1e-3,  # of the size of a clipped gradient: a step then follows the gradient instead of its sign
        weight_decay=min(real.weight_decay, 1.0),
        implementation="fused" if real.implementation == "fused" else "for-loop",  # foreach is planned for seconds
        moments_dtype="float32",
    )


def choose_schedule(real: LRScheduler) -> LRScheduler:
    """Return the real decay, or its warm-up where it has none: then the third step's rate is like no other.

    A decay without a formula is replaced: the updates trial reports that its rates have no reference.
    """
    if real.decay_type not in LEFT:
        real = replace(real, decay_type="linear")
    if real.decay_ratio == 0 or real.min_lr_factor == 1:
        return LRScheduler(warmup_steps=SCHEDULED_STEPS, total_steps=SCHEDULED_STEPS, decay_ratio=0.0)
    ratio = None if real.decay_ratio is None else 1 - 1 / SCHEDULED_STEPS
    return replace(real, warmup_steps=1, total_steps=SCHEDULED_STEPS, decay_ratio=ratio)


def write_corpora(config: Config) -> tuple[list[Text], list[Text]]:
    """Write training.dataset; return training documents and held-out documents of each corpus.

    Four steps read more samples than there are, so that a second epoch begins; padding completes the last batch of
    held-out samples.
    """
    training = config.training
    n_tokens = training.global_batch_size * training.seq_len // len(training.dataset)
    train, held_out = [], []
    for number, name in enumerate(training.dataset):
        train.append(make_text(2 * number, 3 * n_tokens))
        held_out.append(make_text(2 * number + 1, n_tokens * 5 // 4))
        write_corpus(Path(name), train[-1], held_out[-1])
    return train, held_out


def choose_other_layout(config: Config, layout: Layout) -> tuple[Config, Layout]:
    """Return the same global batch on the first of MOVES that can run; where none can, the same layout."""
    for source, target in MOVES:
        if (degree := layout.degrees[source]) == 1:
            continue
        factor = next(n for n in range(2, degree + 1) if degree % n == 0)
        degrees = {**layout.degrees, source: degree // factor, target: layout.degrees[target] * factor}
        dp = degrees["dp_replicate"] * degrees["dp_shard"]
        keys = {
            **give_degrees(config, degrees),
            **STAGES_BY_RULE,
            "training.local_batch_size": max(1, config.training.global_batch_size // dp),
            "parallelism.pipeline_parallel_schedule": "GPipe",  # which takes any number of microbatches
            "parallelism.pipeline_parallel_microbatch_size": 1,
            "compile.enable": False,  # once is enough: it takes most of the time
        }
        if config.activation_checkpoint.mode == "memory_budget":  # the compiler's
            keys["activation_checkpoint.mode"] = "full"
        other = override(config, keys)
        try:
            return other, plan_layout(other, resolve_model(other.model), layout.world_size)
        except ConfigError:
            continue
    return config, layout
