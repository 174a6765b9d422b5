"""Context parallel: the attention itself, its work, memory and kernels. The layout table runs it in a model."""

import pytest
import torch
import torch.nn.functional as F
from compare import TABLE_CONFIG, complete, local
from layouts import CP, MODE, ROTATIONS
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from watching import AttentionWork, Collectives, PeakMemory, Watch

from torchtitan_lite import step as stepping
from torchtitan_lite.parallel.attention_kernels import KERNELS, choose_kernel, merge_into
from torchtitan_lite.parallel.context_parallel import CausalContext, DocumentContext, plan_query_positions
from torchtitan_lite.tools.verify.plain import make_batch
from torchtitan_lite.tools.verify.rank import build_small_run, own_rows

METHODS = ["allgather", "ring"]
N_HEADS, SEQ_LEN, HEAD_DIM = 4, 48, 8

# ---------------------------------------------------------------- numbers


def make_inputs(n_kv_heads: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """query, key, value of whole sequences, and a gradient of the output; the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, n_heads, SEQ_LEN, HEAD_DIM) for n_heads in (N_HEADS, n_kv_heads, n_kv_heads, N_HEADS)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def make_documents() -> torch.Tensor:
    """doc_ids (2, S): borders inside pieces, at their ends, and a document that spans several."""
    begins = torch.zeros(2, SEQ_LEN, dtype=torch.int64)
    begins[0, [3, 12, 13, 40]] = 1
    begins[1, [30]] = 1
    return begins.cumsum(1)


def attend_in_one_process(query, key, value, grad_out, *, doc_ids=None):
    """Output and gradients, with softmax written out."""
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    group = query.shape[1] // key.shape[1]
    query, key, value = leaves[0], *(leaf.repeat_interleave(group, 1) for leaf in leaves[1:])
    hidden = torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).triu(1)
    if doc_ids is not None:
        hidden = hidden | (doc_ids[:, None, :, None] != doc_ids[:, None, None, :])
    scores = (query @ key.mT / HEAD_DIM**0.5).masked_fill(hidden, float("-inf"))
    out = scores.softmax(-1) @ value
    out.backward(grad_out)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def attend_on_ranks(rank: int, world_size: int, dtype: torch.dtype, n_kv_heads: tuple[int, ...]) -> list[tuple]:
    """Worker: by kind of attention and number of key heads, the largest error of this rank's output and gradients."""
    mesh = init_device_mesh("cpu", (world_size,))
    cases = [(kind, n) for kind in (*METHODS, "documents") for n in n_kv_heads]
    return [(kind, n, attend_on_rank(mesh, kind, make_inputs(n, dtype))) for kind, n in cases]


def attend_on_rank(mesh: DeviceMesh, kind: str, whole: list[torch.Tensor]) -> float:
    rank, world_size, dtype = mesh.get_local_rank(), mesh.size(), whole[0].dtype
    doc_ids = make_documents() if kind == "documents" else None
    expected = attend_in_one_process(*(tensor.float() for tensor in whole), doc_ids=doc_ids)
    places = plan_query_positions(rank, world_size, SEQ_LEN)
    *own, grad_out = (tensor[:, :, places] for tensor in whole)
    own = [tensor.requires_grad_() for tensor in own]
    inner = DocumentContext(mesh) if kind == "documents" else CausalContext(mesh, kind)
    out = inner(*own, doc_ids)
    out.backward(grad_out)
    found = [out.detach(), *(leaf.grad for leaf in own)]
    assert all(tensor.dtype == dtype for tensor in found)
    pairs = [(one.float(), other[:, :, places]) for one, other in zip(found, expected, strict=True)]
    return max(((one - other).norm() / other.norm()).item() for one, other in pairs)


@pytest.mark.parametrize(
    ("n_ranks", "dtype", "n_kv_heads", "most"),
    [(2, torch.float32, (4, 2, 1), 1e-5), (3, torch.float32, (2,), 1e-5), (4, torch.float32, (4, 1), 1e-5)]
    + [(2, torch.bfloat16, (2,), 0.01)],  # 8 bits
)
def test_attention_over_ranks_is_that_of_one_process(pool, n_ranks, dtype, n_kv_heads, most):
    for of_rank in pool.run(attend_on_ranks, n_ranks, dtype, n_kv_heads):
        assert [case for case in of_rank if case[2] > most] == []


# ---------------------------------------------------------------- work and memory

LONG = {  # the proportions of Llama 3 8B, small
    "model.dim": 32,
    "model.n_heads": 4,
    "model.n_kv_heads": 1,
    "model.ffn_dim": 112,
    "model.vocab_size": 32,
    "training.seq_len": 1024,
    "training.global_batch_size": 1,
    "training.local_batch_size": 1,
}


def watch_steps(rank: int, world_size: int, all_overrides: list[dict], *watch_classes: type[Watch]) -> list[list]:
    """Worker: what each of the classes sees of a forward and backward of a model with long sequences."""
    return [[watch_step(world_size, overrides, one) for one in watch_classes] for overrides in all_overrides]


def watch_step(world_size: int, overrides: dict[str, object], watch_class: type[Watch]) -> object:
    run = build_small_run(complete({**LONG, CP: world_size, **overrides}, world_size), world_size)
    batch = stepping.shard_for_cp(run, own_rows(run, make_batch(run.config, 0)))
    n_tokens = stepping.count_global_tokens(run, batch)
    stepping.forward_backward(run, batch, n_tokens)  # what stays from step to step is made now
    watch = watch_class()
    gradients = [parameter.grad for parameter in run.parameters.values()]
    watch.know(
        [
            *map(local, (*run.parameters.values(), *gradients)),
            *(each for each in vars(batch).values() if each is not None),
        ]
    )
    with watch:
        stepping.forward_backward(run, batch, n_tokens)
    return watch.result()


def test_activation_memory_of_a_rank_falls_with_the_number_of_ranks(pool):
    pairs = [("allgather", "selective"), ("ring", "none"), ("ring", "full")]
    cases = [{**ROTATIONS[method], MODE: mode} for method, mode in pairs]
    peak_bytes = {
        n_ranks: torch.tensor(pool.run(watch_steps, n_ranks, cases, PeakMemory)).amax(0) for n_ranks in (1, 2, 4)
    }
    assert (peak_bytes[2] <= 0.6 * peak_bytes[1]).all() and (peak_bytes[4] <= 0.6 * peak_bytes[2]).all(), peak_bytes


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_all_ranks_do_the_same_attention_work_and_none_of_it_twice(pool, n_ranks):
    by_rank = pool.run(watch_steps, n_ranks, list(ROTATIONS.values()), AttentionWork)
    n_pairs = torch.tensor(by_rank)  # of rank, method, 1, forward or backward
    seq_len, n_heads, n_layers = LONG["training.seq_len"], LONG["model.n_heads"], TABLE_CONFIG.model.n_layers
    assert (n_pairs.sum(0) == seq_len * (seq_len + 1) // 2 * n_heads * n_layers).all()
    assert (n_pairs.amax(0) <= 1.05 * n_pairs.amin(0)).all()


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("allgather", {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 1}),
        ("ring", {"all_to_all_single": 1 + 1 + 2}),  # keys forward, keys backward, their gradients there and home
    ],
)
def test_per_op_recompute_exchanges_no_keys_again(pool, method, expected):
    cases = [{**ROTATIONS[method], "model.n_layers": 1, MODE: mode} for mode in ("none", "selective")]
    assert pool.run(watch_steps, 2, cases, Collectives) == [[[expected], [expected]]] * 2


# ---------------------------------------------------------------- kernels


def merge_parts(kernel, query, key, value, grad_out, n_early: int):
    """Causal attention of late queries, in two parts: early keys without mask, late keys causal. Gradients too."""
    late, early = slice(n_early, None), slice(0, n_early)
    query, grad_out = query[:, :, late], grad_out[:, :, late]
    parts = [(key[:, :, keys], value[:, :, keys], keys == late) for keys in (late, early)]
    (out, lse), other = (kernel.attend(query, *part) for part in parts)
    out, lse = out.float(), lse.float()
    merge_into(out, lse, *other)
    out = out.to(query.dtype)
    grads = [kernel.attend_backward(grad_out, query, *part[:2], out, lse, part[2]) for part in parts]
    grad_key, grad_value = (torch.cat((grads[1][i], grads[0][i]), 2) for i in (1, 2))
    return out, grads[0][0] + grads[1][0], grad_key, grad_value


def attend_late_queries(query, key, value, grad_out, n_early: int):
    """The same by torch's own attention with a mask."""
    leaves = [tensor.detach().requires_grad_() for tensor in (query[:, :, n_early:], key, value)]
    mask = torch.ones(key.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril()[n_early:]
    out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    out.backward(grad_out[:, :, n_early:])
    return out, *(leaf.grad for leaf in leaves)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        ("cpu", torch.bfloat16),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float16, marks=pytest.mark.gpu),
    ],
)
def test_parts_of_an_attention_merge_to_the_whole(device, dtype):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    inputs = [tensor.to(device) for tensor in make_inputs(2)]
    rounded = [tensor.to(dtype) for tensor in inputs]
    found = merge_parts(choose_kernel(rounded[0]), *rounded, 17)
    expected = attend_late_queries(*(tensor.float() for tensor in rounded), 17)
    tolerance = 1e-5 if dtype == torch.float32 else 0.01
    for one, other in zip(found, expected, strict=True):
        assert (one.float() - other).norm() < tolerance * other.norm()


@pytest.mark.parametrize("n_kv_heads", [4, 2])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_take_their_arguments_and_return_the_shapes_that_are_merged(name, n_kv_heads):
    kernel = KERNELS[name]
    query, key, value, grad_out = (tensor.to("meta") for tensor in make_inputs(n_kv_heads, torch.bfloat16))
    query, grad_out = query[:, :, :17], grad_out[:, :, :17]
    out, lse = kernel.attend(query, key, value, False)
    assert out.shape == query.shape and lse.shape == query.shape[:-1]
    grads = kernel.attend_backward(grad_out, query, key, value, out, lse, False)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, value.shape]


def test_merging_scores_that_are_far_apart_does_not_overflow():
    out, lse = torch.zeros(1, 1, 2, 1), torch.tensor([[[1000.0, -1000.0]]])
    merge_into(out, lse, torch.ones(1, 1, 2, 1), torch.tensor([[[-1000.0, 1000.0]]]))
    assert out.flatten().tolist() == [0, 1] and lse.flatten().tolist() == [1000, 1000]
