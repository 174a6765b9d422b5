"""Context parallel: the attention itself, its work, memory and kernels. The layout table runs it in a model."""

import pytest
import torch
import torch.nn.functional as F
from compare import TABLE_CONFIG, complete, local
from layouts import COMPILED, CP, DOCUMENTS, MODE, ROTATIONS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from watching import AttentionWork, Collectives, LargestTensor, PeakMemory, Watch

from torchtitan_lite import step as stepping
from torchtitan_lite.parallel.attention_kernels import KERNELS, choose_kernel, merge_into
from torchtitan_lite.parallel.context_parallel import (
    CausalContext,
    DocumentContext,
    context_attention,
    context_attention_backward,
    plan_query_positions,
    shard_sequence,
)
from torchtitan_lite.verify.reference import make_batch_of
from torchtitan_lite.verify.share import build_small_run, own_rows

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


def attend_on_ranks(rank: int, world_size: int, kind: str, n_kv_heads: int, dtype: torch.dtype) -> list[float]:
    """Worker: relative errors of this rank's output and gradients of query, key, value."""
    mesh = init_device_mesh("cpu", (world_size,))
    whole = make_inputs(n_kv_heads, dtype)
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
    return [((one - other).norm() / other.norm()).item() for one, other in pairs]


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("n_ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", [*METHODS, "documents"])
def test_attention_over_ranks_is_that_of_one_process(pool, kind, n_ranks, n_kv_heads):
    errors = pool.run(attend_on_ranks, n_ranks, kind, n_kv_heads, torch.float32)
    assert max(error for of_rank in errors for error in of_rank) < 1e-5


@pytest.mark.parametrize("kind", [*METHODS, "documents"])
def test_attention_over_ranks_in_bfloat16_errs_by_rounding_only(pool, kind):
    errors = pool.run(attend_on_ranks, 2, kind, 2, torch.bfloat16)
    assert max(error for of_rank in errors for error in of_rank) < 0.01  # bf16 has 8 bits


@pytest.mark.parametrize("n_ranks", [2, 3, 8])
def test_the_ranks_pieces_are_the_sequence_and_positions_rise_on_each(n_ranks):
    places = [plan_query_positions(rank, n_ranks, 48) for rank in range(n_ranks)]
    assert torch.cat(places).sort().values.tolist() == list(range(48))
    assert all((own.diff() > 0).all() for own in places)
    assert len({own.sum().item() for own in places}) == 1, "an early piece for each late one"


def shard_positions(rank: int, world_size: int) -> torch.Tensor:
    return shard_sequence(torch.arange(8).repeat(2, 1), init_device_mesh("cpu", (world_size,)))


def test_each_rank_holds_an_early_and_a_late_piece(pool):
    first, second = pool.run(shard_positions, 2)
    assert first.tolist() == [[0, 1, 6, 7]] * 2 and second.tolist() == [[2, 3, 4, 5]] * 2


def compare_layouts(rank: int, world_size: int, method: str, batch_first: bool) -> list[tuple[str, tuple, tuple]]:
    """Worker: of each result of the two operators its strides, and those that compile is told beforehand."""
    where = (method, init_device_mesh("cpu", (world_size,)).get_group().group_name, rank, world_size)
    query, key, value, grad_out = (tensor[:, :, : SEQ_LEN // world_size].contiguous() for tensor in make_inputs(2))
    if batch_first:  # (B, S, H, E) in memory, as projections leave it
        query, key, value, grad_out = (
            tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (query, key, value, grad_out)
        )
    out, lse = context_attention(query, key, value, *where)
    backward = context_attention_backward, (grad_out, query, key, value, out, lse)
    told = []
    for operator, tensors in ((context_attention, (query, key, value)), backward):
        real = operator(*tensors, *where)
        with FakeTensorMode() as mode:
            fake = operator(*map(mode.from_tensor, tensors), *where)
        told += [(operator._name, one.stride(), other.stride()) for one, other in zip(real, fake, strict=True)]
    return told


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_results_lie_in_memory_as_compile_is_told(pool, method, batch_first):
    """Inductor reads them where they are said to be, and stops where they are not."""
    for name, real, fake in pool.run(compare_layouts, 2, method, batch_first)[0]:
        assert real == fake, name


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


def watch_step(rank: int, world_size: int, overrides: dict[str, object], watch_class: type[Watch]) -> object:
    """Worker: one forward and backward of a model with long sequences, watched."""
    run = build_small_run(complete({**LONG, CP: world_size, **overrides}, world_size), world_size)
    batch = stepping.shard_for_cp(run, own_rows(run, make_batch_of(run.config, 0)))
    n_tokens = stepping.count_global_tokens(run, batch)
    stepping.forward_backward(run, batch, n_tokens)  # what stays from step to step is made now
    watch = watch_class()
    gradients = [parameter.grad for parameter in run.parameters.values()]
    watch.know([*map(local, (*run.parameters.values(), *gradients)), *vars(batch).values()])
    with watch:
        stepping.forward_backward(run, batch, n_tokens)
    return watch.result()


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("method", METHODS)
def test_activation_memory_of_a_rank_falls_with_the_number_of_ranks(pool, method, mode):
    overrides = {**ROTATIONS[method], MODE: mode}
    peak_bytes = [max(pool.run(watch_step, n_ranks, overrides, PeakMemory)) for n_ranks in (1, 2, 4)]
    assert peak_bytes[1] <= 0.6 * peak_bytes[0] and peak_bytes[2] <= 0.6 * peak_bytes[1], peak_bytes


@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_all_ranks_do_the_same_attention_work_and_none_of_it_twice(pool, method, n_ranks):
    n_pairs = pool.run(watch_step, n_ranks, ROTATIONS[method], AttentionWork)
    seq_len, n_heads, n_layers = LONG["training.seq_len"], LONG["model.n_heads"], TABLE_CONFIG.model.n_layers
    in_one_process = seq_len * (seq_len + 1) // 2 * n_heads * n_layers
    for of_ranks in zip(*n_pairs, strict=True):  # forward, backward
        assert sum(of_ranks) == in_one_process
        assert max(of_ranks) <= 1.05 * min(of_ranks)


@pytest.mark.parametrize("method", METHODS)
def test_no_tensor_has_a_number_for_each_pair_of_tokens(pool, method):
    largest = pool.run(watch_step, 2, ROTATIONS[method], LargestTensor)
    a_piece = LONG["training.seq_len"] // 4
    assert max(largest) < a_piece**2 * LONG["model.n_heads"]
    with_mask = pool.run(watch_step, 2, DOCUMENTS, LargestTensor)
    assert min(with_mask) >= (2 * a_piece) * (4 * a_piece), "a mask would have been seen"


@pytest.mark.parametrize("method", METHODS)
def test_per_op_recompute_exchanges_no_keys_again(pool, method):
    overrides = {**ROTATIONS[method], "model.n_layers": 1}
    plain, selective = (
        pool.run(watch_step, 2, {**overrides, MODE: mode}, Collectives) for mode in ("none", "selective")
    )
    expected = {
        "allgather": {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 1},
        "ring": {"all_to_all_single": 1 + 1 + 2},  # keys forward, keys backward, their gradients there and home
    }[method]
    assert plain == selective == [expected] * 2


def count_graphs(rank: int, world_size: int, overrides: dict[str, object]) -> int:
    """Worker: graphs that compiling all layers of a model made in two steps."""
    run = build_small_run(complete(overrides, world_size), world_size)
    batch = own_rows(run, make_batch_of(run.config, 0))
    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        stepping.train_step(run, batch)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("options", [ROTATIONS["allgather"], ROTATIONS["ring"], DOCUMENTS], ids=[*METHODS, "documents"])
def test_compiled_layers_share_one_graph(pool, options):
    only_blocks = {**COMPILED, "compile.components": ["model"]}
    assert pool.run(count_graphs, 2, {CP: 2, **options, **only_blocks, MODE: "none"}) == [1, 1]


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
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
