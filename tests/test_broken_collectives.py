"""One collective of each mesh dim is broken in turn: no request gets a certificate that names this dim."""

from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import compare
import pytest
import torch
import torch.distributed as dist
from layouts import CP, PP, REPLICATE, RING, TP
from mutant_table import SHARD
from mutants import MUTANTS
from torch import Tensor
from torch.distributed.pipelining.stage import _PipelineStageBase

from torchtitan_lite.config.reader import read_config
from torchtitan_lite.parallel import context_parallel
from torchtitan_lite.tools.verify import command as tool
from torchtitan_lite.tools.verify.certificate import IN_PART, describe_verdict
from torchtitan_lite.tools.verify.reduction import reduce_config

REDUCE_SCATTER = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)  # torch 2.13, before


def shards_not_summed() -> AbstractContextManager:
    """FSDP's reduce-scatter leaves each rank its share of its own gradients."""

    def keep_own(output: Tensor, input: Tensor, *args, group: dist.ProcessGroup, **options) -> None:
        output.copy_(input.chunk(group.size())[group.rank()])

    return patch.object(dist, REDUCE_SCATTER, keep_own)


def keys_not_fetched() -> AbstractContextManager:
    """Context parallel's all-gather and ring bring a rank its own keys and values again."""

    def repeat_own(own: Tensor, n_ranks: int, group_name: str) -> Tensor:
        return torch.cat([own] * n_ranks)

    ops = torch.ops._c10d_functional
    broken = SimpleNamespace(
        all_gather_into_tensor=repeat_own,
        all_to_all_single=lambda own, *splits_and_group: own.clone(),
        reduce_scatter_tensor=ops.reduce_scatter_tensor,
        wait_tensor=lambda tensor: tensor if tensor.is_leaf else ops.wait_tensor(tensor),
    )
    return patch.object(context_parallel, "collectives", broken)


def hidden_states_not_sent() -> AbstractContextManager:
    """A pipeline stage sends zeros."""
    original = _PipelineStageBase.get_fwd_send_ops

    def send_zeros(stage: _PipelineStageBase, microbatch: int) -> list[dist.P2POp]:
        ops = original(stage, microbatch)
        for op in ops:
            op.tensor = torch.zeros_like(op.tensor)
        return ops

    return patch.object(_PipelineStageBase, "get_fwd_send_ops", send_zeros)


BROKEN = {  # mesh dim -> what breaks its collective
    "dp_replicate": MUTANTS["replicas_not_reduced"].patch,
    "dp_shard": shards_not_summed,
    "cp": keys_not_fetched,
    "pp": hidden_states_not_sent,
    "tp": MUTANTS["partial_sums_averaged"].patch,
}


def break_collective(dim: str) -> AbstractContextManager:
    return BROKEN[dim]()


slow = partial(pytest.param, marks=pytest.mark.slow)  # a second request of what the other rows have
# On how many ranks, and the degrees asked for; dp_shard is automatic where it is not given.
REQUESTS = [
    ("dp_replicate", 2, {REPLICATE: 2}),  # asked for and tried
    ("dp_replicate", 2, {REPLICATE: 2, PP: 2, TP: 2}),  # given up
    ("dp_shard", 2, {}),  # automatic
    ("cp", 3, {CP: 8, **RING}),  # reduced
    ("cp", 2, {CP: 2, PP: 2, SHARD: 1}),
    ("pp", 2, {PP: 2}),
    ("pp", 1, {PP: 2}),
    ("tp", 2, {TP: 2}),
    slow("dp_shard", 2, {SHARD: 8, PP: 2}),
    slow("cp", 4, {CP: 2, TP: 2}),
    slow("pp", 4, {PP: 4, SHARD: 2}),
    slow("tp", 1, {TP: 2, CP: 2}),
]


@pytest.mark.parametrize(("dim", "max_ranks", "asked"), REQUESTS)
def test_no_certificate_names_a_dim_whose_collective_is_broken(pool, tmp_path, dim, max_ranks, asked):
    args = [f"--{key}={value}" for key, value in asked.items()]
    reading = read_config(
        ["--config", "debug", "--training.local_batch_size=8", "--training.global_batch_size=-1", *args]
    )
    assert not reading.problems
    reduction = reduce_config(reading.config, max_ranks)

    run_ranks = compare.ranks_inside(pool, partial(break_collective, dim))
    certificate = tool.verify("debug", reduction, run_ranks, tmp_path)
    if reduction.layout.degrees[dim] > 1:
        assert certificate.verdict == "wrong"
    elif certificate.verdict != "wrong":  # too few ranks for it, and train.py's second layout does not have it either
        assert certificate.verdict == IN_PART
        assert f"{dim} {reduction.degrees.asked[dim]}" in describe_verdict(certificate)[0]
