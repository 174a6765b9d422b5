"""Measure the memory of a step with real tensors, by torch's allocator. test_costs.py compares the result with the dry
run.

Only one thread computes, because a kernel's scratch memory grows with the number of threads and is not in the plan.

torch's profiler can miss a release by another thread. If the profiler misses the release of a tensor, the tensor counts
as released when a different tensor gets its address.
"""

import gc
from unittest.mock import patch

import compare
import torch
from layouts import ADAMW
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from torchtitan_lite import build
from torchtitan_lite import step as stepping
from torchtitan_lite.config.checks import plan_layout, resolve_config
from torchtitan_lite.config.layout import Layout
from torchtitan_lite.config.model import resolve_model
from torchtitan_lite.config.model_rows import ModelArgs
from torchtitan_lite.config.schema import Config
from torchtitan_lite.model.moe import Router
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.tools.plan.fake_world import (
    fake_group,
    make_fake_batch,
    static_stages,
)

BATCH, GLOBAL_BATCH = "training.local_batch_size", "training.global_batch_size"
MODEL = {  # a small model whose activations are larger than its weights
    "training.seq_len": 128,
    "model.dim": 128,
    "model.head_dim": 16,
    "model.ffn_dim": 352,
    "model.vocab_size": 512,
}
A_STEP = "a step that is measured"


def plan(
    world_size: int, overrides: dict, device_type: str = "cpu"
) -> tuple[Config, ModelArgs, Layout]:
    """Return the table config with these keys, resolved."""
    config = compare.override(compare.TABLE_CONFIG, {**ADAMW, GLOBAL_BATCH: -1, **overrides})
    model_args = resolve_model(config.model)
    layout = plan_layout(config, model_args, world_size)
    return resolve_config(config, layout, device_type), model_args, layout


def measure_peak(config: Config, model_args: ModelArgs, layout: Layout, pp_rank: int) -> int:
    """Return the allocator's peak in bytes during the second step. No other rank runs."""
    rank = pp_rank * layout.world_size // layout.pp
    with fake_group(layout.world_size, rank=rank), static_stages(config, model_args, layout):
        return measure_step(config, model_args, layout)


def measure_step(config: Config, model_args: ModelArgs, layout: Layout) -> int:
    """Return the peak bytes of the second step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        mesh = build_mesh(layout, "cpu")
        run = build.build_run(config, model_args, layout, mesh, torch.device("cpu"))
        batch = make_fake_batch(layout, config.training.seq_len)
        with patch.object(Router, "choose", choose_evenly):
            stepping.train_step(run, batch)
            gc.collect()
            with record_function(A_STEP):
                stepping.train_step(run, batch)
    return find_peak(recording.profiler.kineto_results.experimental_event_tree())


def choose_evenly(router: Router, scores: torch.Tensor) -> torch.Tensor:
    """Replace Router.choose, so that every expert gets the same number of tokens. scores (B, S, E) -> (B, S, K)."""
    # this top-k allocates as much memory as the top-k of the original method
    routes = (scores + router.expert_bias).topk(router.args.top_k, dim=-1).indices
    return (torch.arange(routes.numel()) % router.n_experts).view_as(routes)


def find_peak(events: list) -> int:
    """Return the peak bytes of the measured step, computed from these events."""
    moments = []
    to_do = list(events)
    while to_do:
        event = to_do.pop()
        to_do += event.children
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            moments.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        elif event.name == A_STEP:
            moments.append((event.start_time_ns, None, 0))
    n_bytes = 0
    peak = 0
    sizes = {}  # address -> bytes
    for _, address, size in sorted(moments, key=lambda moment: moment[0]):
        if address is None:
            peak = 0
        n_bytes += max(size, 0) - sizes.pop(address, 0)
        if size > 0:
            sizes[address] = size
        peak = max(n_bytes, peak)
    return peak
