"""A run that keeps weights and moments in the memory of the host."""

import compare
import pytest
import torch
import torch.distributed as dist
from layouts import ADAMW

from torchtitan_lite import build
from torchtitan_lite import step as stepping
from torchtitan_lite.config.layout import plan_layout, resolve_config, resolve_model
from torchtitan_lite.parallel.mesh import build_mesh

OFFLOAD = "training.enable_cpu_offload"


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: nothing can be moved off one"
)
def test_an_offloaded_run_is_the_run_on_the_gpu(tmp_path):
    device = torch.device("cuda", 0)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group(
        "cuda:nccl,cpu:gloo", store=store, rank=0, world_size=1, device_id=device
    )
    weights = []
    for offload in (False, True):
        config = compare.complete({**ADAMW, OFFLOAD: offload}, world_size=1)
        shape = resolve_model(config.model)
        layout = plan_layout(config, shape, world_size=1)
        run = build.build_run(
            resolve_config(config, layout, "cuda"),
            shape,
            layout,
            build_mesh(layout, "cuda"),
            device,
        )
        for step in range(3):
            stepping.train_step(run, compare.make_batch(step, shape.vocab_size).to(device))
        assert all(compare.local(p).is_cpu == offload for p in run.parameters.values())
        weights.append(compare.gather(run, lambda parameter: parameter.cpu()))
    dist.destroy_process_group()
    assert all(
        compare.relative_error(weights[1][fqn], weights[0][fqn]) < 1e-3 for fqn in weights[0]
    )
