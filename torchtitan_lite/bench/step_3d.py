"""The 3-D rows of `bench step`: train_step on 2 x 2 x 2 CPU ranks beside a hand-written step of the same work.

    trainer_3d    train_step as train.py calls it: pp2 x dp_shard2 x tp2, 1F1B
    bare_3d       bare_3d.py

Both live in the same eight processes and take turns there; a barrier starts and ends each turn. Their first losses must
be the same.
"""

import torch
import torch.distributed as dist

from torchtitan_lite.bench.bare_3d import Bare3D
from torchtitan_lite.bench.rounds import BenchFailed, measure_rounds
from torchtitan_lite.config.layout import plan_layout, resolve_config, resolve_model
from torchtitan_lite.config.schema import ActivationCheckpoint, Config, LRScheduler, Model, Parallelism, Training
from torchtitan_lite.data.dataset import Batch
from torchtitan_lite.model.llama3 import Llama3, init_parameter
from torchtitan_lite.parallel.initial_weights import initialize_weights
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.step import build_run, train_step
from torchtitan_lite.verify.ranks import RankFailure, RankPool

N_RANKS = 8
LOSS_TOLERANCE = 1e-5  # relative
N_WARM_UP_STEPS = 2

STEP_3D_CONFIG = Config(
    model=Model(flavor="debug", dim=256, n_layers=6, n_heads=16, n_kv_heads=16, ffn_dim=704, vocab_size=2304),
    lr_scheduler=LRScheduler(warmup_steps=0, decay_ratio=0.0),
    training=Training(local_batch_size=4, seq_len=128, mixed_precision_param="float32"),
    parallelism=Parallelism(
        pipeline_parallel_degree=2,
        pipeline_parallel_schedule="1F1B",
        data_parallel_shard_degree=2,
        tensor_parallel_degree=2,
    ),
    activation_checkpoint=ActivationCheckpoint(mode="none"),
)


def measure_3d(config: Config, batch: Batch, *, n_rounds: int, n_steps: int) -> dict[str, list[float]]:
    """Return contender -> seconds per step of each round. `batch` is the global one. Raises BenchFailed."""
    with RankPool(N_RANKS) as pool:
        try:
            return pool.run(take_turns, N_RANKS, config, batch, n_rounds, n_steps, timeout_s=3600)[0]
        except RankFailure as error:
            raise BenchFailed(str(error)) from error


def take_turns(
    rank: int, world_size: int, config: Config, batch: Batch, n_rounds: int, n_steps: int
) -> dict[str, list[float]]:
    """Worker. Collective. Raises RuntimeError where the contenders do not compute the same."""
    args = resolve_model(config.model)
    layout = plan_layout(config, args, world_size)
    config = resolve_config(config, layout, "cpu")
    mesh = build_mesh(layout, "cpu")
    own = batch.split(layout.dp)[mesh.data_rank]
    run = build_run(config, args, layout, mesh, torch.device("cpu"))
    model = Llama3(args)
    initialize_weights(model, init_parameter, config.debug.seed)
    bare = Bare3D(args, dict(model.named_parameters()), (layout.pp, layout.dp, layout.tp), config)
    del model
    contenders = {
        "trainer_3d": lambda: train_step(run, own).loss,
        "bare_3d": lambda: bare.train_step(own.tokens, own.targets, layout.n_microbatches),
    }
    losses = [torch.stack([step() for _ in range(N_WARM_UP_STEPS)]) for step in contenders.values()]
    if not torch.allclose(*losses, rtol=LOSS_TOLERANCE, atol=0):
        said = " and ".join(f"{each.tolist()} of {name}" for name, each in zip(contenders, losses, strict=True))
        raise RuntimeError(f"first losses that start from the same weights differ: {said}")
    return measure_rounds(contenders, n_rounds=n_rounds, n_steps=n_steps, wait_for_device=dist.barrier)
