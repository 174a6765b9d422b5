"""Names inside torch that this project relies on, without an error if torch stops using them. Other tests hold more."""

import json
import os
import subprocess
import sys

import compare
import pytest
import torch
from checkpoints import train
from layouts import EMULATED, FLOAT8, GATHER, MODE, PP, TWO_LAYERS
from test_costs import make
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_lite import REPOSITORY
from torchtitan_lite.tools.plan.dry_run import dry_run

READ_RECORDER = """
import json, threading
import torch, torch.distributed as dist
from torchtitan_lite.extensions.hang_report import read_recorder
from torchtitan_lite.parallel.gloo_workers import limit_gloo_workers
limit_gloo_workers()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.new_group([0], group_desc="mesh_tp")
for _ in range(3):
    dist.all_reduce(torch.ones(5), group=group)
print(json.dumps(read_recorder(threading.main_thread().ident, has_failed=True, begun_ns=[])[0]))
"""


def test_gloos_recorder_tells_the_last_call_of_a_group():
    """The flight recorder's functions, environment variable and fields (hang_report.py)."""
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100"}
    answer = subprocess.run(
        [sys.executable, "-c", READ_RECORDER],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    row = json.loads(answer.stdout)["mesh_tp [0]"]
    assert row["n"] == 3
    assert row["pending"]["name"] == "all_reduce"
    assert row["pending"]["sizes"] == [[5]]


@pytest.mark.parametrize("world_size, keys", [(2, {}), (4, {PP: 2})])
def test_collectives_of_fsdp_bear_a_phase_and_the_modules_of_their_group(world_size, keys):
    """The file and functions of FSDP that meter.py finds on the stack."""
    run = dry_run(make(world_size, {**keys, **TWO_LAYERS}, "cpu"))
    of_fsdp = [
        call for call in run.collectives if call.operation in ("all-gather", "reduce-scatter")
    ]
    assert of_fsdp
    for call in of_fsdp:
        assert call.site.phase in ("forward", "backward")
        assert call.site.module.startswith(("tok_embeddings", "layers.", "norm"))


def test_fsdp_calls_the_hooks_that_gather_in_float8():
    run = dry_run(make(2, {**GATHER, **EMULATED, **TWO_LAYERS}, "cpu"))
    gathered = {
        call.site.module: call.dtype for call in run.collectives if call.operation == "all-gather"
    }
    assert gathered["layers.0"] == "uint8"
    assert gathered["tok_embeddings"] == "float32"


class Calls(TorchDispatchMode):
    """Counts calls of one operator."""

    def __init__(self, operator):
        super().__init__()
        self.operator = operator
        self.n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += func is self.operator
        return func(*args, **(kwargs or {}))


def count_calls(rank: int, world_size: int, name: str, overrides: dict) -> int:
    """Worker: calls of an operator in one step, forward and recompute."""
    run = compare.build_table_run(world_size, overrides)
    with Calls(getattr(torch.ops.aten, name).default) as calls:
        train(run, range(1))
    return calls.n


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize(
    "operator, keys, mode, n_calls",
    [
        (ATTENTION, {}, "none", 1),
        (ATTENTION, {}, "selective", 1),
        (ATTENTION, {}, "full", 2),
        ("_scaled_mm", FLOAT8, "none", 7 * 3),  # y, dx and dw of seven layers
        ("_scaled_mm", FLOAT8, "selective", 7 * 3),
        ("_scaled_mm", FLOAT8, "full", 7 * 4),
    ],
)
def test_per_op_recompute_keeps_the_outputs_of_expensive_operators(
    pool, operator, keys, mode, n_calls
):
    """The operators in KEPT_OPS are those that the model calls."""
    keys = {**keys, MODE: mode, "model.n_layers": 1}
    assert pool.run(count_calls, 1, operator, keys) == [n_calls]
