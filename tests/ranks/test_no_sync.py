"""No operation in a step makes the host wait for the device: it reads no number, and no shape depends on data.

A host that waits cannot queue the next kernels, so the device then waits for the host. On a CPU, the host never waits
for a device, but the step calls the same operators. A dispatch mode sees these operators below DTensor, in backward, in
collectives and in the optimizer. It does not see copies between devices. In the last test, CUDA itself reports such
copies.
"""

from unittest.mock import patch

import compare
import pytest
import torch
import torch.distributed as dist
from layouts import ACCUMULATION_4, ADAMW, EP, MODE, MOE, TWO_LAYERS, read_rows
from marks import each_row
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_lite import build
from torchtitan_lite import step as stepping
from torchtitan_lite.config.checks import plan_layout, resolve_config
from torchtitan_lite.config.model import resolve_model
from torchtitan_lite.parallel import expert_parallel
from torchtitan_lite.parallel.mesh import build_mesh

# Operators that copy a number to the host, or whose output shape depends on the data.
WAITING = (
    "_local_scalar_dense is_nonzero equal allclose nonzero masked_select unique_dim _unique _unique2 "
    "unique_consecutive unique_dim_consecutive bincount histc repeat_interleave.Tensor _assert_async"
).split()
# indexing with a mask makes the host wait
BY_MASK = "index index_put index_put_ _index_put_impl_ _unsafe_index".split()

RUNS = read_rows("""
one rank | 1
one rank, accumulation | 1 | training.local_batch_size=2
one rank, bf16 | 1 | BFLOAT16
one rank, bf16 moments | 1 | optimizer.moments_dtype=bfloat16
one rank, documents | 1 | DOCUMENTS
one rank, float8 | 1 | ROWWISE
dp2, float8 gathered | 2 | PRECOMPUTE
dp2 x tp2 | 4 | TP=2
dp2 x tp2, bf16 moments | 4 | TP=2 optimizer.moments_dtype=bfloat16
pp2 | 2 | PP=2
cp2 | 2 | CP=2
one rank, experts | 1 | MOE
dp2 x tp2, experts without ep | 4 | TP=2 MOE
cp2, ring | 2 | CP=2 RING
""")


class HostWaits(AssertionError):
    pass


class NoWaiting(TorchDispatchMode):
    """Dispatch mode that raises HostWaits if an operator would make the host wait for a device."""

    def __enter__(self):
        # tolist and numpy read memory without calling an operator.
        self.readers = [patch.object(Tensor, name, refuse_reading) for name in ("tolist", "numpy")]
        for reader in self.readers:
            reader.start()
        return super().__enter__()

    def __exit__(self, *exception):
        for reader in self.readers:
            reader.stop()
        return super().__exit__(*exception)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(kind is not Tensor and kind is not torch.nn.Parameter for kind in types):
            return NotImplemented  # a subclass such as DTensor: its operators on inner tensors are checked instead
        name, overload = operator.__name__.split(".", 1)
        if (
            name in WAITING
            or f"{name}.{overload}" in WAITING
            or (name in BY_MASK and counts_by_mask(*args))
        ):
            raise HostWaits(f"{operator} makes the host wait for the device")
        return operator(*args, **(kwargs or {}))


def counts_by_mask(
    tensor: Tensor, indices: list[Tensor | None], values: Tensor | None = None, *_: object
) -> bool:
    """Return whether an operator must count the elements that a mask selects. Writing a single number through a mask
    counts nothing, because it is a fill."""
    masked = any(index is not None and index.dtype is torch.bool for index in indices)
    return masked and (values is None or values.numel() > 1)


def refuse_reading(tensor: Tensor, *args: object) -> None:
    raise HostWaits("the host reads a tensor")


def test_the_dispatch_mode_catches_operators_that_make_the_host_wait():
    x = torch.ones(3)
    for read in (lambda: x.max().item(), lambda: x.tolist(), x.nonzero, x.unique, lambda: x[x > 0]):
        with NoWaiting(), pytest.raises(HostWaits):
            read()


def list_waits(rank: int, world_size: int, runs: dict[str, dict[str, object]]) -> dict[str, str]:
    """Worker: return name of a run -> what made the host wait in step 2. Step 1 allocates and plans."""
    waits = {}
    for name, overrides in runs.items():
        run = compare.build_table_run(world_size, {**ADAMW, **TWO_LAYERS, **overrides})
        batches = [compare.read_rows(run, step, documents=True) for step in range(2)]
        stepping.train_step(run, batches[0])
        try:
            with NoWaiting():
                result = stepping.train_step(run, batches[1])
            assert result.applied
        except HostWaits as error:
            waits[name] = str(error)
    return waits


@each_row("n_ranks", [1, 2, 4])
def test_no_host_waits_for_the_device_inside_a_step(pool, n_ranks):
    runs = {name: row.overrides for name, row in RUNS.items() if row.world_size == n_ranks}
    assert pool.run(list_waits, n_ranks, runs) == [{}] * n_ranks


def count_waits(rank: int, world_size: int, overrides: dict[str, object]) -> int:
    """Worker: return how often the host reads the row counts of an all-to-all in a step."""
    run = compare.build_table_run(world_size, overrides)
    batch = compare.read_rows(run)
    read_splits = expert_parallel.read_splits
    with patch.object(expert_parallel, "read_splits", side_effect=read_splits) as reader:
        stepping.train_step(run, batch)
    return reader.call_count


@each_row("mode, n_waits", [("none", 2 * 4), ("full", 2 * 2 * 4)])
def test_with_ep_the_host_waits_once_per_layer_and_microbatch_and_again_if_the_layer_is_recomputed(
    pool, mode, n_waits
):
    overrides = {EP: 2, MODE: mode, **ACCUMULATION_4, **MOE}
    assert pool.run(count_waits, 2, overrides) == [n_waits] * 2


@pytest.fixture
def gpu(tmp_path):
    """Return a GPU, after creating a group of one rank on it."""
    device = torch.device("cuda", 0)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    yield device
    torch.cuda.set_sync_debug_mode("default")
    dist.destroy_process_group()


@pytest.mark.gpu
@each_row("name", [name for name, (world_size, _) in RUNS.items() if world_size == 1])
def test_cuda_sees_no_wait_inside_a_step(gpu, name):
    config = compare.complete({**ADAMW, **RUNS[name][1]}, world_size=1)
    shape = resolve_model(config.model)
    layout = plan_layout(config, shape, world_size=1)
    config = resolve_config(config, layout, "cuda")
    run = build.build_run(config, shape, layout, build_mesh(layout, "cuda"), gpu)
    batches = [
        compare.make_batch(step, shape.vocab_size, documents=True).to(gpu) for step in range(2)
    ]
    stepping.train_step(run, batches[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # raises in the operator that waits
    result = stepping.train_step(run, batches[1])
    torch.cuda.set_sync_debug_mode("default")
    assert result.applied
