"""Memory of a step with real tensors, by torch's allocator, beside the dry run. `python tests/measure_memory.py` prints
all rows; test_dry_run.py has some of them.

The real step runs as one rank of a fake group, for gloo copies what it sends with the same allocator, when its threads
come to it: up to 28 % more on models as small as these, and not twice the same.
"""

import gc
import sys
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import compare
import torch
from layouts import ADAMW, MODE, OPTION, PP, TP
from torch.profiler import ProfilerActivity, profile, record_function

from torchtitan_lite import step as stepping
from torchtitan_lite.config import Config
from torchtitan_lite.layout import Layout, plan_layout, resolve_config
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.sizes import Shape, resolve_shape
from torchtitan_lite.tools.dry_run import dry_run, fake_group, make_batch, static_stages
from torchtitan_lite.tools.meter import Meter

BATCH, GLOBAL_BATCH = "training.local_batch_size", "training.global_batch_size"
MODEL = {  # small, but with activations larger than its weights
    "training.seq_len": 128,
    "model.dim": 128,
    "model.head_dim": 16,
    "model.ffn_dim": 352,
    "model.vocab_size": 512,
}
LAYOUTS = {
    "one rank": (1, {BATCH: 8}),
    "dp2 x tp2": (4, {TP: 2, BATCH: 4}),
    "pp2 x dp2 x tp2": (8, {PP: 2, TP: 2, BATCH: 4}),
}
RECOMPUTE = {
    "none": {MODE: "none"},
    "full": {MODE: "full"},
    "op": {MODE: "selective"},
    "every second layer": {MODE: "selective", OPTION: "2"},
}


def plan(world_size: int, overrides: dict, device_type: str = "cpu") -> tuple[Config, Shape, Layout]:
    """The table config with these keys, resolved."""
    config = compare.override(compare.TABLE_CONFIG, {**ADAMW, GLOBAL_BATCH: -1, **overrides})
    shape = resolve_shape(config.model)
    layout = plan_layout(config, shape, world_size)
    return resolve_config(config, layout, device_type), shape, layout


def measure_peak(config: Config, shape: Shape, layout: Layout, pp_rank: int) -> int:
    """Bytes that the allocator has given out at the worst moment of a second step."""
    gc.collect()
    rank = pp_rank * layout.world_size // layout.pp
    stages = static_stages(config, shape, layout, Meter(str)) if layout.pp > 1 else nullcontext()
    with fake_group(layout.world_size, rank=rank), stages, record_memory() as recording:
        mesh = build_mesh(layout, "cpu")
        run = stepping.build_run(config, shape, layout, mesh, torch.device("cpu"))
        batch = make_batch(layout, config.training.seq_len)
        stepping.train_step(run, batch)
        gc.collect()
        with record_function("second step"):
            stepping.train_step(run, batch)
    events = sorted(recording.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    begins_at = next(event.start_ns() for event in events if event.name() == "second step")
    n_bytes = most = 0
    for event in events:
        if event.name() == "[memory]":
            n_bytes += event.nbytes()
            most = max(most, n_bytes if event.start_ns() >= begins_at else 0)
    return most


def record_memory() -> profile:
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, (world_size, keys) in LAYOUTS.items():
        for recompute, mode in RECOMPUTE.items():
            run = plan(world_size, {**MODEL, **keys, **mode})
            for pp_rank in range(run[2].pp):
                real, planned = measure_peak(*run, pp_rank), dry_run(*run, pp_rank=pp_rank).peak_bytes
                print(f"{name:16} recompute {recompute:18} stage {pp_rank}: {real:,} bytes, {planned / real - 1:+.4%}")
