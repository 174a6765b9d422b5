"""With every optimizer and every way to save, a resumed run is bit-equal to the unbroken one."""

from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import get_args
from unittest.mock import patch

import compare
import torch.distributed as dist
from checkpoints import copy_state, list_differing, make_saver, train
from layouts import MODE, TWO_LAYERS, read_rows
from marks import each_row

from torchtitan_lite import resume
from torchtitan_lite.checkpoint.load import Saved
from torchtitan_lite.checkpoint.save import CheckpointSaver
from torchtitan_lite.config.choices import OPTIMIZERS
from torchtitan_lite.config.reader import KEYS
from torchtitan_lite.config.schema import Checkpoint
from torchtitan_lite.extensions.snapshots import Snapshots
from torchtitan_lite.parallel.process_groups import Place
from torchtitan_lite.resume import restore_run

# The learning rate changes in every step, so a shifted schedule would change the weights.
SCHEDULE = {
    "lr_scheduler.warmup_steps": 3,
    "lr_scheduler.total_steps": 6,
    "lr_scheduler.decay_ratio": None,
}
COMMON = {
    "optimizer.lr": 0.01,
    "optimizer.weight_decay": 0.1,
    MODE: "none",
    **TWO_LAYERS,
    **SCHEDULE,
}
EACH = [
    f"{name} {how} | 2 | COMMON optimizer.name={name} optimizer.implementation={how}"
    for name in OPTIMIZERS
    for how in get_args(KEYS["optimizer.implementation"])
]
MORE = """
AdamW, bfloat16 moments | 2 | COMMON ADAMW optimizer.moments_dtype=bfloat16
AdamW, offloaded | 2 | COMMON ADAMW OFFLOAD
AdamW, spikes skipped | 2 | COMMON optimizer.name=AdamW training.skip_spikes=3.0 training.spike_window=2
AdamW, experts | 2 | COMMON ADAMW MOE
"""
ROWS = read_rows("\n".join(EACH) + MORE, globals())
FAST = [name for name in ROWS if "fused" in name or ", " in name]
MODES = {
    "sync": Checkpoint(enable=True),
    "async": Checkpoint(enable=True, async_mode="async"),
    "pinned": Checkpoint(enable=True, async_mode="async_with_pinned_mem"),
    "snapshot": Checkpoint(enable=True),
}


def open_saver(run, mode: str, folder: Path) -> CheckpointSaver:
    saver = make_saver(folder / mode, MODES[mode], run)
    if mode != "snapshot":
        return saver
    saver = replace(saver, section=replace(saver.section, local_folder=str(folder)))
    host_ranks = range(dist.get_world_size())
    place = Place(dist.get_rank(), len(host_ranks), dist.get_rank(), host_ranks, 0)
    return Snapshots(saver, folder, place, dist.group.WORLD, timedelta(minutes=5)).saver


def save_and_resume(rank: int, world_size: int, overrides: dict, folder: str) -> dict[str, list]:
    """Worker: save steps 1 and 2 in every mode. Return mode -> what differs after resuming, and two steps later."""
    run, differing, saved = compare.build_table_run(world_size, overrides), {}, {}
    with ExitStack() as stack:
        savers = [stack.enter_context(open_saver(run, mode, Path(folder))) for mode in MODES]
        for step in (1, 2):
            train(run, range(step - 1, step))
            if step == 1 and run.spikes:  # then the next step is skipped
                run.spikes.history.fill_(1e-6)
            for mode, saver in zip(MODES, savers, strict=True):
                saver.save(step, run.name_tensors())
                saved[mode] = Saved(step, saver.folder / f"step-{step}", dist.group.WORLD)
        state = copy_state(run)
        assert run.spikes is None or run.spikes.skipped == 1
        losses = train(run, range(2, 4))
    last_state = copy_state(run)
    for mode, checkpoint in saved.items():
        resumed = compare.build_table_run(world_size, overrides)
        restore_run([checkpoint], resumed, dist.group.WORLD)
        differing[mode] = list_differing(copy_state(resumed), state)
        is_equal = train(resumed, range(2, 4)) == losses
        differing[mode] += [
            *list_differing(copy_state(resumed), last_state),
            *([] if is_equal else ["losses"]),
        ]
    return differing


@each_row("name", ROWS, fast=FAST)
def test_every_optimizer_is_saved_and_resumed_bit_equal_in_every_mode(pool, tmp_path, name):
    for differing in pool.run(save_and_resume, *ROWS[name], str(tmp_path)):
        assert differing == dict.fromkeys(MODES, [])


def resume_without_moments(rank: int, world_size: int, folder: str) -> str:
    """Worker: save a step of AdamW, and load it with an optimizer without state. Return what the log says."""
    run, stateless = (
        compare.build_table_run(world_size, ROWS[f"{name} fused"][1]) for name in ("AdamW", "SGD")
    )
    train(run, range(1))
    with make_saver(Path(folder), MODES["sync"], run) as saver:
        saver.save(1, run.name_tensors())
    saved = Saved(1, Path(folder) / "step-1", dist.group.WORLD)
    with patch.object(resume.logger, "info") as info:
        restore_run([saved], stateless, dist.group.WORLD)
    return str(info.call_args_list)


def test_optimizer_state_that_a_fork_no_longer_keeps_is_named(pool, tmp_path):
    for said in pool.run(resume_without_moments, 2, str(tmp_path)):
        assert "not loaded" in said and "optimizer.layers.0.attention.wk.weight.exp_avg," in said
