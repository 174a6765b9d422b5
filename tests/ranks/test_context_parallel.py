"""Test context parallel: the results, work, memory and kernels of attention. test_layouts.py tests whole models."""

import pytest
import torch
from compare import TABLE_CONFIG, complete, local, relative_error
from layouts import CP, MODE, ROTATIONS, read_rows
from marks import each_row
from watching import AttentionWork, PeakMemory, Watch

from torchtitan_lite import step as stepping
from torchtitan_lite.extensions.ring_attention import (
    attend_to_part,
    attend_to_part_backward,
    merge_into,
)
from torchtitan_lite.tools.verify.plain import draw_batch
from torchtitan_lite.tools.verify.rank import build_small_run, own_rows

N_HEADS = 4
SEQ_LEN = 48

# ---------------------------------------------------------------- work and memory

# a small model with the proportions of Llama 3 8B
(LONG,) = read_rows("""
long | 1 | model.dim=32 model.n_heads=4 model.n_kv_heads=1 model.ffn_dim=112 model.vocab_size=32 \
    training.seq_len=1024 training.global_batch_size=1 training.local_batch_size=1
""").values()
LONG = LONG.overrides


def watch_steps(rank: int, world_size: int, configs: list[dict], watch_class: type[Watch]) -> list:
    """Worker: for each config, return what `watch_class` sees in forward and backward with long sequences."""
    return [watch_step(world_size, overrides, watch_class) for overrides in configs]


def watch_step(world_size: int, overrides: dict, watch_class: type[Watch]):
    config = complete({**LONG, CP: world_size, **overrides}, world_size)
    run = build_small_run(config, world_size)
    batch = own_rows(run, draw_batch(run.config, 0))
    batch = stepping.shard_for_cp(run, batch)
    n_tokens = stepping.count_global_tokens(run, batch)
    # the first call allocates the tensors that are kept between steps
    stepping.forward_backward(run, batch, n_tokens)
    known = [batch.tokens, batch.targets, batch.positions, batch.doc_ids]
    for parameter in run.parameters.values():
        known += [local(parameter), local(parameter.grad)]
    with watch_class(known) as watch:
        stepping.forward_backward(run, batch, n_tokens)
    return watch.result()


def test_activation_memory_of_a_rank_falls_with_the_number_of_ranks(pool):
    cases = [
        {**ROTATIONS["allgather"], MODE: "selective"},
        {**ROTATIONS["ring"], MODE: "none"},
        {**ROTATIONS["ring"], MODE: "full"},
    ]
    of_two, of_four = (
        torch.tensor(pool.run(watch_steps, n_ranks, cases, PeakMemory)).amax(0)
        for n_ranks in (2, 4)
    )
    assert (of_four <= 0.6 * of_two).all()


@each_row("n_ranks", [2, 4])
def test_all_ranks_do_equal_attention_work_and_no_work_is_done_twice(pool, n_ranks):
    by_rank = pool.run(watch_steps, n_ranks, list(ROTATIONS.values()), AttentionWork)
    n_pairs = torch.tensor(by_rank)  # [rank, method]
    seq_len = LONG["training.seq_len"]
    n_causal = seq_len * (seq_len + 1) // 2
    n_maps = LONG["model.n_heads"] * TABLE_CONFIG.model.n_layers
    assert (n_pairs.sum(0) == n_causal * n_maps).all()
    assert (n_pairs.amax(0) <= 1.05 * n_pairs.amin(0)).all()


# ---------------------------------------------------------------- attention kernels on a GPU (test_layouts.py: CPU)


def run_kernels(
    device: str, dtype: torch.dtype, n_queries: int, n_kv_heads: int, *, causal: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return query, key and value, and what the kernels return: out, lse and gradients."""
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for n_heads, n_tokens in (
        (N_HEADS, n_queries),
        (n_kv_heads, SEQ_LEN),
        (n_kv_heads, SEQ_LEN),
        (N_HEADS, n_queries),
    ):
        drawn = torch.randn(2, n_heads, n_tokens, 8, generator=generator)
        inputs.append(drawn.to(device, dtype))
    *parts, grad_out = inputs
    merged = attend_to_part(*parts, causal=causal)
    return parts, [*merged, *attend_to_part_backward(grad_out, *parts, *merged, causal=causal)]


@pytest.mark.gpu
@each_row("causal, n_queries", [(True, SEQ_LEN), (False, 17)])
@each_row("dtype", [torch.bfloat16, torch.float16])
def test_attention_kernels_of_a_gpu_return_the_same_as_those_of_a_cpu(dtype, causal, n_queries):
    _, expected = run_kernels("cpu", torch.float32, n_queries, 2, causal=causal)
    _, found = run_kernels("cuda", dtype, n_queries, 2, causal=causal)
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one.float().cpu(), other) < 0.01


@each_row("n_kv_heads", [4, 2])
@each_row("cudnn", [False, True])
def test_attention_kernels_of_gpus_accept_the_arguments_of_the_ring_and_return_the_expected_shapes(
    monkeypatch, cudnn, n_kv_heads
):
    monkeypatch.setattr(
        "torchtitan_lite.extensions.ring_attention.prefers_cudnn", lambda query, key: cudnn
    )
    (query, *others), found = run_kernels("meta", torch.bfloat16, 17, n_kv_heads, causal=False)
    shapes = [tensor.shape for tensor in (query, query[..., 0], query, *others)]
    assert [tensor.shape for tensor in found] == shapes


def test_merging_scores_that_are_far_apart_does_not_overflow():
    out = torch.zeros(1, 1, 2, 1)
    lse = torch.tensor([[[1000.0, -1000.0]]])
    merge_into(out, lse, torch.ones(1, 1, 2, 1), -lse)
    assert out.flatten().tolist() == [0, 1]
    assert lse.flatten().tolist() == [1000, 1000]
