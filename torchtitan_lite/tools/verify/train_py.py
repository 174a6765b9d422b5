"""Run train.py on this layout and in one process, and compare the logs. This trial tests data, learning rates,
validation, save and resume.

    one process         steps 1 2 3 4     without interruption
    the layout          steps 1 2
    a second layout             3 4       on the same ranks, with a different ep if possible, from the last checkpoint

train.py is started three times in warm workers. All numbers in metrics.jsonl that have a bound in BOUNDS (trial.py) are
compared. The checkpoints after each step are compared too, because a loss would not show that resuming has rounded the
optimizer state. This trial cannot find faults that also occur in one process. The tests find such faults.
"""

import gc
import io
import json
import logging
import math
import os
import random
import runpy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from string import ascii_letters
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_lite import REPOSITORY, build, preflight
from torchtitan_lite.checkpoint.load import OpenCheckpoint
from torchtitan_lite.components.signals import StopFlag
from torchtitan_lite.config.model import resolve_model
from torchtitan_lite.config.reader import KEYS, UserConfig
from torchtitan_lite.config.schema import Config, LRScheduler, with_value
from torchtitan_lite.extensions.parameter_groups import list_used
from torchtitan_lite.model.moe import Router
from torchtitan_lite.parallel.initial_weights import initialize_weights
from torchtitan_lite.tools.corpora.prepare import PrepareSettings, prepare
from torchtitan_lite.tools.verify.derived_configs import (
    choose_other_layout,
    leave_out_compiler,
    put_on_one_rank,
)
from torchtitan_lite.tools.verify.errors import Seen, relative_error
from torchtitan_lite.tools.verify.reduction import (
    STAGES,
    TOKENIZER,
    Reduction,
    override,
)
from torchtitan_lite.tools.verify.rounding import packing_checked
from torchtitan_lite.tools.verify.trial import (
    BOUNDS,
    Noise,
    RunRanks,
    Trial,
    judge,
    round_differently,
)
from torchtitan_lite.tools.verify.witnesses import Acted, actions_noted, merge

# The resumed run continues up to step 4, on a different layout. These values are valid for every layout.
RESUMED = {
    STAGES: None,
    "training.steps": 4,
    "parallelism.pipeline_parallel_schedule": "GPipe",
    "parallelism.pipeline_parallel_microbatch_size": 1,
    "training.local_batch_size": 1,
}
N_ROUNDINGS = 3  # random roundings that measure the noise of saved tensors
Log = dict[int, dict[str, float]]  # step -> numbers in metrics.jsonl


def try_train(reduction: Reduction, run_ranks: RunRanks, folder: Path) -> Trial:
    """Start train.py three times. Files are written to `folder`."""
    folder = folder.absolute() / "train.py"
    n_ranks = reduction.layout.world_size
    first = make_config(reduction, folder)
    resumed = choose_other_layout(override(first, RESUMED), n_ranks)
    alone = put_on_one_rank(resumed, first.training.global_batch_size)
    alone = with_value(alone, "job.dump_folder", str(folder / "one process"))
    write_corpora(first)
    right, _ = run_train(alone, 1, run_ranks)
    seen = Seen({})
    ran = []
    for name, config, steps in (("first start", first, (0, 1)), ("resumed start", resumed, (2, 3))):
        log, acted = run_train(config, n_ranks, run_ranks)
        ran.append((config, acted))
        for seen.step in steps:
            own = log[seen.step + 1]
            for key, expected in right[seen.step + 1].items():
                measure = key.partition("/")[0]  # lr, or lr/PATTERN of a parameter group
                if measure in BOUNDS:
                    seen.compare(measure, name, own.get(key, math.inf), expected)
            compare_checkpoints(alone, config, seen)
        trial = judge("train.py", [seen], partial(measure_noise, alone, run_ranks))
        if trial.faults:
            break
    return replace(trial, ran=tuple(ran))


def measure_noise(alone: Config, run_ranks: RunRanks) -> Noise:
    """Measure how much the saved tensors of one process change if its initial weights are perturbed by a rounding
    error."""
    seen = Seen({})
    for seed in range(N_ROUNDINGS):
        other = with_value(alone, "job.dump_folder", f"{alone.job.dump_folder} {seed}")
        run_train(other, 1, run_ranks, seed)
        for seen.step in range(alone.training.steps):
            compare_checkpoints(alone, other, seen)
    return seen.errors


def compare_checkpoints(alone: Config, config: Config, seen: Seen) -> None:
    """Compare every tensor of a checkpoint, weights and optimizer state, with the checkpoint of one process."""
    folder = Path(config.checkpoint.folder, f"step-{seen.step + 1}")
    right = OpenCheckpoint(Path(alone.job.dump_folder) / folder)
    own = OpenCheckpoint(Path(config.job.dump_folder) / folder)
    saved = own.manifest.tensors
    expected = right.manifest.tensors
    errors = {}
    for name, entry in expected.items():
        errors[name] = math.inf
        if name in saved and saved[name][:2] == entry[:2]:  # dtype, shape
            errors[name] = relative_error(own.read(name), right.read(name))
    # Report the largest error first. A wrong optimizer state also causes errors in the weights, but they are smaller
    # than the errors in the state.
    for name in sorted(errors, key=errors.get, reverse=True):
        seen.note("saved tensor", name, errors[name])


def run_train(
    config: Config, n_ranks: int, run_ranks: RunRanks, seed: int | None = None
) -> tuple[Log, Acted]:
    """Run train.py on ranks of the pool. Return the log of train.py, and which keys had an effect. Raises
    RankFailure."""
    # Like torchrun, the parent hosts the rendezvous store, at a port that the system chooses.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = run_ranks(start_train, n_ranks, config, store.port, seed)
    log: Log = defaultdict(dict)
    for line in Path(config.job.dump_folder, "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] in ("step", "validation"):
            log[record["step"]] |= record
    return log, merge(ranks)


# ---------------------------------------------------------------- a start


def start_train(rank: int, world_size: int, config: Config, port: int, seed: int | None) -> Acted:
    """Worker: execute train.py as under torchrun. The TCPStore of the parent listens at `port`.

    With a `seed`, initial weights are perturbed by a rounding error. Returns which keys acted. Exceptions of train.py
    propagate. Raises RuntimeError if the exit status of train.py is not 0.
    """
    # Pass the config as an object, because a TOML file has no key for the number of experts.
    given = UserConfig(config, frozenset(KEYS))
    log = io.StringIO()
    acted: Acted = {}
    dist.destroy_process_group()
    with (
        process_left_as_it_was(),
        patch.dict(os.environ, make_environment(rank, world_size, port)),
        patch.object(preflight, "read_config", lambda args: given),
        patch.object(build, "initialize_weights", partial(initialize, seed)),
        patch.object(Router, "choose", choose_by_bias),
        packing_checked(Seen({})),
        actions_noted(acted),
        redirect_stdout(log),
        redirect_stderr(log),
    ):
        names = runpy.run_path(str(REPOSITORY / "train.py"), run_name="train")
        status = names["main"]([], StopFlag())
    if status != 0:
        raise RuntimeError(
            f"train.py ended with status {status}; its log:\n{log.getvalue()[-4000:].strip()}"
        )
    return acted


def initialize(seed: int | None, part: nn.Module, *options) -> None:
    """Stand in for `initialize_weights`. If `seed` is not None, also perturb the rounding of the weights."""
    initialize_weights(part, *options)
    if seed is not None:
        round_differently(part, torch.Generator().manual_seed(seed))


def choose_by_bias(router: Router, scores: Tensor) -> Tensor:
    """Replace Router.choose: every token chooses the experts with the largest biases.

    The usual choice depends on scores, whose rounding differs between layouts. Biases change by fixed amounts, so the
    chosen experts vary between steps, but not between layouts.
    """
    order = router.expert_bias - 1e-6 * torch.arange(router.n_experts, device=scores.device)
    return order.topk(router.args.top_k).indices.expand(*scores.shape[:-1], -1)


def make_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets on a host without GPUs."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # connect to the parent's store; rank 0 must not create one
        "TORCHELASTIC_RESTART_COUNT": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }


@contextmanager
def process_left_as_it_was() -> Iterator[None]:
    """Context manager: restore process-wide settings that train.py changes."""
    gc.freeze()  # garbage collections in train.py skip the objects that exist now
    try:
        yield
    finally:
        logging.getLogger("torchtitan_lite").propagate = True
        torch.use_deterministic_algorithms(False)
        gc.unfreeze()
        gc.enable()


# ---------------------------------------------------------------- the small config, its corpus, another layout


def make_config(reduction: Reduction, folder: Path) -> Config:
    """Return the config for train.py. The run has few steps. The settings are chosen so that an error of the layout
    changes every logged number."""
    real = reduction.real
    small = leave_out_compiler(reduction.config)  # compilation is slow, and the wide trial tests it
    optimizer = real.optimizer
    # the optimizer of a fork may accept only some learning rates
    if optimizer.name in (
        "AdamW",
        "Muon",
    ):
        # Unless eps is as large as gradients, AdamW's first updates depend only on the signs of gradients.
        optimizer = replace(optimizer, lr=0.015, eps=1e-3)
    # train.py raises an error for a parameter group that matches no parameter of the small model.
    optimizer = replace(optimizer, groups=list_used(optimizer.groups, resolve_model(small.model)))
    # The learning rate differs in every step, to detect an extra or a missing step.
    decay_type = real.lr_scheduler.decay_type
    return override(
        small,
        {
            "training.steps": 2,
            "training.seq_len": 2
            * small.training.seq_len,  # even, because tp of the second layout splits rows
            "job.dump_folder": str(folder / "layout"),
            "optimizer": optimizer,
            "lr_scheduler": LRScheduler(warmup_steps=2, total_steps=6, decay_type=decay_type),
            "training.expert_bias_rate": 1e-3,
            "training.dataset": [str(folder / name) for name in small.training.dataset],
            "training.cache_folder": str(folder / "cache"),
            "training.enable_cpu_offload": False,  # refused without a GPU
        },
    )


def write_corpora(config: Config) -> None:
    """Prepare corpora of random documents. The corpora are so small that the run reaches their second epoch."""
    n_tokens = config.training.global_batch_size * config.training.seq_len
    draw = random.Random(0)
    for name in config.training.dataset:
        folder = Path(name)
        folder.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        for _ in range(n_tokens // 5):
            letters = draw.choices(ascii_letters, k=draw.randint(1, 48))
            lines.append(json.dumps({"text": "".join(letters)}))
        file = folder.with_suffix(".jsonl")
        file.write_text("\n".join(lines))
        prepare([file], folder, PrepareSettings(TOKENIZER, validation_share=0.35))
