"""Context parallel: the results, work, memory and kernels of attention. test_layouts.py tests whole models."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
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
HEAD_DIM = 8

# ---------------------------------------------------------------- numbers


def make_inputs(n_kv_heads: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return query, key and value of full sequences, and a gradient of the output. All ranks get the same."""
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for n_heads in (N_HEADS, n_kv_heads, n_kv_heads, N_HEADS):
        shape = (2, n_heads, SEQ_LEN, HEAD_DIM)
        inputs.append(torch.randn(shape, generator=generator).to(dtype))
    return inputs


def differentiate(attend, query, key, value, grad_out) -> list[torch.Tensor]:
    """Return the output of `attend` and the gradients of query, key and value."""
    leaves = []
    for tensor in (query, key, value):
        leaves.append(tensor.detach().requires_grad_())
    out = attend(*leaves)
    out.backward(grad_out)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def attend_masked(query, key, value, *, first: int):
    """Attend from tokens `first` .. S - 1 with torch's own attention and a mask."""
    mask = torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool, device=query.device)
    mask = mask.tril()[first:]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


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
    stepping.forward_backward(
        run, batch, n_tokens
    )  # the first call allocates the tensors that are kept between steps
    known = [batch.tokens, batch.targets, batch.positions, batch.doc_ids]
    for parameter in run.parameters.values():
        known += [local(parameter), local(parameter.grad)]
    watch = watch_class()
    watch.know(known)
    with watch:
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
def test_all_ranks_do_the_same_attention_work_and_none_of_it_twice(pool, n_ranks):
    by_rank = pool.run(watch_steps, n_ranks, list(ROTATIONS.values()), AttentionWork)
    n_pairs = torch.tensor(by_rank)  # [rank, method]
    seq_len = LONG["training.seq_len"]
    n_causal = seq_len * (seq_len + 1) // 2
    n_maps = LONG["model.n_heads"] * TABLE_CONFIG.model.n_layers
    assert (n_pairs.sum(0) == n_causal * n_maps).all()
    assert (n_pairs.amax(0) <= 1.05 * n_pairs.amin(0)).all()


# ---------------------------------------------------------------- kernels

N_EARLY = 17


def attend_in_parts(query, key, value, grad_out) -> list[torch.Tensor]:
    """Attend from late queries to late keys (causal) and early keys. Return the output and gradients."""
    early_key, late_key = key.tensor_split([N_EARLY], 2)
    early_value, late_value = value.tensor_split([N_EARLY], 2)
    late = late_key, late_value
    early = early_key, early_value
    out, lse = attend_to_part(query, *late, causal=True)
    out = out.float()
    lse = lse.float()
    early_out, early_lse = attend_to_part(query, *early, causal=False)
    merge_into(out, lse, early_out, early_lse)
    out = out.to(query.dtype)
    backward = partial(attend_to_part_backward, grad_out, query, out=out, lse=lse)
    grads = backward(*late, causal=True)
    early_grads = backward(*early, causal=False)
    grad_key = torch.cat((early_grads[1], grads[1]), 2)
    grad_value = torch.cat((early_grads[2], grads[2]), 2)
    grad_query = early_grads[0] + grads[0]
    return [out, grad_query, grad_key, grad_value]


@each_row(
    "device, dtype",
    [
        ("cpu", torch.float32),
        ("cpu", torch.bfloat16),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float16, marks=pytest.mark.gpu),
    ],
)
def test_parts_of_an_attention_merge_to_the_whole(device, dtype):
    query, key, value, grad_out = [tensor.to(device, dtype) for tensor in make_inputs(2)]
    inputs = query[:, :, N_EARLY:], key, value, grad_out[:, :, N_EARLY:]
    found = attend_in_parts(*inputs)
    exact = [tensor.float() for tensor in inputs]
    expected = differentiate(partial(attend_masked, first=N_EARLY), *exact)
    tolerance = 1e-5 if dtype == torch.float32 else 0.01
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one.float(), other) < tolerance


@each_row("n_kv_heads", [4, 2])
@each_row("cudnn", [False, True])
def test_kernels_take_their_arguments_and_return_the_shapes_that_are_merged(
    monkeypatch, cudnn, n_kv_heads
):
    monkeypatch.setattr(
        "torchtitan_lite.extensions.ring_attention.prefers_cudnn", lambda query, key: cudnn
    )
    inputs = make_inputs(n_kv_heads, torch.bfloat16)
    query, key, value, grad_out = [tensor.to("meta") for tensor in inputs]
    query = query.narrow(2, 0, 17)
    grad_out = grad_out.narrow(2, 0, 17)
    parts = (query, key, value)
    merged = attend_to_part(*parts, causal=False)
    out, lse = merged
    assert out.shape == query.shape
    assert lse.shape == query.shape[:-1]
    grads = attend_to_part_backward(grad_out, *parts, *merged, causal=False)
    for grad, part in zip(grads, parts, strict=True):
        assert grad.shape == part.shape


def test_merging_scores_that_are_far_apart_does_not_overflow():
    out = torch.zeros(1, 1, 2, 1)
    lse = torch.tensor([[[1000.0, -1000.0]]])
    merge_into(out, lse, torch.ones(1, 1, 2, 1), -lse)
    assert out.flatten().tolist() == [0, 1]
    assert lse.flatten().tolist() == [1000, 1000]
