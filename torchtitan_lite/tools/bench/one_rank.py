"""Build a run of one rank on random tokens, and run its steps, with the functions that train.py calls."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lite.build import Run, build_run
from torchtitan_lite.config.layout import plan_layout, resolve_config, resolve_model
from torchtitan_lite.config.machine import detect_machine
from torchtitan_lite.config.schema import Config
from torchtitan_lite.model.batch import Batch
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.parallel.process_groups import choose_device
from torchtitan_lite.step import train_step


@contextmanager
def one_rank() -> Iterator[torch.device]:
    """Context manager: a process group with this process only. Yields its device."""
    device = choose_device(0, detect_machine().device_type)
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def build_alone(config: Config, device: torch.device) -> tuple[Run, Batch]:
    """Build a run, and a batch on its device. All tokens of the batch count for the loss."""
    model_args = resolve_model(config.model)
    layout = plan_layout(config, model_args, 1)
    mesh = build_mesh(layout, device.type)
    resolved = resolve_config(config, layout, device.type)
    run = build_run(resolved, model_args, layout, mesh, device)
    n_rows = config.training.local_batch_size
    seq_len = config.training.seq_len
    generator = torch.Generator().manual_seed(config.debug.seed)
    tokens = torch.randint(model_args.vocab_size, (n_rows, seq_len + 1), generator=generator)
    positions = torch.arange(seq_len).repeat(n_rows, 1)
    batch = Batch(
        tokens[:, :-1],
        tokens[:, 1:],
        positions,
        torch.zeros_like(positions),
    )
    return run, batch.to(device)


def make_step(run: Run, batch: Batch) -> Tensor:
    """Run one step and wait for it, as train.py does. Return its loss, a scalar on the device."""
    result = train_step(run, batch)
    assert result.read()[0], "the gradient norm is not finite"
    return result.loss
