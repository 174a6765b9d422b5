"""With every optimizer and every way to save, a resumed run is bit-equal to the unbroken one."""

from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import get_args

import compare
import torch.distributed as dist
from checkpoints import copy_state, list_differing, make_saver, train
from layouts import MODE, TWO_LAYERS, read_rows
from marks import each_row

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
    """Worker: save steps 1 and 2 in every mode. Return mode -> what differs after a resume, and two steps later."""
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
