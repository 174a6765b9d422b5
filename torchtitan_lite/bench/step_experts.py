"""The rows of `bench step` about experts: what a mixture costs beside a dense model, and beside others' code.

    experts          train_step of the flavor debug_moe: 8 experts, 2 of them for each token
    dense            train_step of a dense model with the same parameters active: a token costs as many FLOPs
    mixtral          transformers' Mixtral of the same shape in the hand-written loop of step.py
    expert_loop      experts, with a matmul for each expert in place of grouped_mm
    experts_dp2      on two ranks of a CPU, whole experts on each, sharded by FSDP
    experts_ep2      the same, half of the experts on each, and all-to-alls

Except for the last two all run in one process, on one thread.
"""

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lite.bench.rounds import BenchFailed, measure_rounds
from torchtitan_lite.config.flavors import count_flops_per_token
from torchtitan_lite.config.layout import plan_layout, resolve_config, resolve_model
from torchtitan_lite.config.schema import (
    ActivationCheckpoint,
    Config,
    LRScheduler,
    Model,
    Training,
    with_value,
)
from torchtitan_lite.data.dataset import Batch
from torchtitan_lite.model import moe
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.step import build_run, train_step
from torchtitan_lite.verify.ranks import RankFailure, RankPool

EXPERTS_CONFIG = Config(
    model=Model(flavor="debug_moe"),
    lr_scheduler=LRScheduler(warmup_steps=0, decay_ratio=0.0),
    training=Training(local_batch_size=8, seq_len=128, mixed_precision_param="float32"),
    activation_checkpoint=ActivationCheckpoint(mode="none"),
)
RATIO_OF = {
    "experts_over_dense": ("experts", "dense"),
    "experts_over_mixtral": ("experts", "mixtral"),
    "grouped_over_loop": ("experts", "expert_loop"),
    "ep2_over_dp2": ("experts_ep2", "experts_dp2"),
}
N_WARM_UP_STEPS = 2

TrainStep = Callable[[], Tensor]


def make_dense(config: Config) -> Config:
    """Return the config of a dense model whose feed-forward is as wide as the experts of a token together."""
    args = resolve_model(config.model)
    width = args.mixture.top_k * args.mixture.expert_ffn_dim
    names = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "vocab_size")
    dense = with_value(config, "model", Model(flavor="debug", ffn_dim=width, **{n: getattr(args, n) for n in names}))
    flops, of_dense = (count_flops_per_token(a, 1).full for a in (args, resolve_model(dense.model)))
    assert abs(flops / of_dense - 1) < 0.02, "only the router is more"
    return dense


def without_grouped_mm(step: TrainStep) -> TrainStep:
    """Return the step with a matmul for each expert."""

    def run() -> Tensor:
        with patch.object(moe, "multiply_groups", moe.multiply_each):
            return step()

    return run


def measure_ep(config: Config, batch: Batch, *, n_rounds: int, n_steps: int) -> dict[str, list[float]]:
    """Return contender -> seconds per step of each round, on two ranks. Raises BenchFailed."""
    with RankPool(2) as pool:
        try:
            return pool.run(take_turns, 2, config, batch, n_rounds, n_steps, timeout_s=3600)[0]
        except RankFailure as error:
            raise BenchFailed(str(error)) from error


def take_turns(
    rank: int, world_size: int, config: Config, batch: Batch, n_rounds: int, n_steps: int
) -> dict[str, list[float]]:
    """Worker. Collective."""
    config = with_value(config, "training.local_batch_size", len(batch.tokens) // world_size)
    args = resolve_model(config.model)
    contenders: dict[str, TrainStep] = {}
    for name, ep in (("experts_dp2", 1), ("experts_ep2", 2)):
        layout_config = with_value(config, "parallelism.expert_parallel_degree", ep)
        layout = plan_layout(layout_config, args, world_size)
        mesh = build_mesh(layout, "cpu")
        run = build_run(resolve_config(layout_config, layout, "cpu"), args, layout, mesh, torch.device("cpu"))
        contenders[name] = partial(train_step, run, batch.split(world_size)[mesh.data_rank])
    for step in contenders.values():
        for _ in range(N_WARM_UP_STEPS):
            step()
    return measure_rounds(contenders, n_rounds=n_rounds, n_steps=n_steps, wait_for_device=dist.barrier)
