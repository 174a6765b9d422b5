"""Keys that save memory: what the memory must hold, and what verify leaves out."""

import compare
import pytest
import torch
import torch.distributed as dist
from layouts import ADAMW, MODE, TP

from torchtitan_lite import build
from torchtitan_lite import step as stepping
from torchtitan_lite.config.checks import check_machine, check_run
from torchtitan_lite.config.layout import plan_layout, resolve_config, resolve_model
from torchtitan_lite.config.machine import GIB, Machine
from torchtitan_lite.config.memory_bound import bound_memory
from torchtitan_lite.config.reader import read_config
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.tools.verify.reduction import reduce_config

GPU, CPU = Machine("cuda", 1, 141 * 10**9, "NVIDIA H200"), Machine("cpu", 1, 64 * GIB, "a CPU")
MOMENTS, OFFLOAD = "optimizer.moments_dtype", "training.enable_cpu_offload"


@pytest.mark.parametrize(
    ("keys", "machine", "bytes_each"),
    [
        ({}, GPU, 16),
        ({MOMENTS: "bfloat16"}, GPU, 12),
        ({OFFLOAD: True}, GPU, 0),
        ({"optimizer.name": "SGD"}, CPU, 8),
    ],
)
def test_the_state_of_the_8b_is_counted_by_optimizer_and_place(keys, machine, bytes_each):
    config = compare.override(read_config(["--config", "llama3_8b"]).config, keys)
    model_args = resolve_model(config.model)
    bound = bound_memory(config, model_args, plan_layout(config, model_args, 1).degrees, machine, n_hosts=1)
    assert bound.state_bytes == 8_030_261_248 * bytes_each


def test_verify_leaves_out_what_only_a_gpu_has_and_keeps_the_rest():
    args = ["--parallelism.enable_async_tensor_parallel", f"--{TP}=2", f"--{MODE}=memory_budget", "--compile.enable"]
    reduction = reduce_config(read_config([*args, f"--{MOMENTS}=bfloat16"]).config, max_ranks=4)
    changed = set(reduction.changes)
    assert "parallelism.enable_async_tensor_parallel" in changed
    assert not changed & {MOMENTS, MODE, "activation_checkpoint.memory_budget", "compile.enable"}
    assert check_run(reduction.config) + check_machine(reduction.config, CPU) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: nothing can be moved off one")
def test_an_offloaded_run_is_the_run_on_the_gpu(tmp_path):
    device = torch.device("cuda", 0)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("cuda:nccl,cpu:gloo", store=store, rank=0, world_size=1, device_id=device)
    weights = []
    for offload in (False, True):
        config = compare.complete({**ADAMW, OFFLOAD: offload}, world_size=1)
        shape = resolve_model(config.model)
        layout = plan_layout(config, shape, world_size=1)
        run = build.build_run(resolve_config(config, layout, "cuda"), shape, layout, build_mesh(layout, "cuda"), device)
        for step in range(3):
            stepping.train_step(run, compare.make_batch(step, shape.vocab_size).to(device))
        assert all(compare.local(p).is_cpu == offload for p in run.parameters.values())
        weights.append(compare.gather(run, lambda parameter: parameter.cpu()))
    dist.destroy_process_group()
    assert all(compare.relative_error(weights[1][fqn], weights[0][fqn]) < 1e-3 for fqn in weights[0])
