"""Documents packed into one sequence: attention in blocks. test_windows.py: in general; test_data.py: positions."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from torchtitan_lite.model import document_attention
from torchtitan_lite.model.document_attention import DocumentAttention, plan_mask


def make_documents(n_rows: int, seq_len: int) -> torch.Tensor:
    """Return random doc_ids (B, S). The first row is one document; the other rows have a document per 40 tokens, on
    average."""
    generator = torch.Generator().manual_seed(0)
    begins = torch.rand(n_rows, seq_len, generator=generator) < 1 / 40
    begins[0] = False
    return begins.cumsum(1)


# ---------------------------------------------------------------- flex attention: the part that a CPU can run

BLOCK = 128
SEQ_LEN = 3 * BLOCK + 50


def make_part(n_rows: int):
    """Return the inputs of a context-parallel rank: some queries of a sequence, and all of its keys in a different
    order."""
    doc_ids = make_documents(n_rows, SEQ_LEN)
    generator = torch.Generator().manual_seed(0)
    sizes = [(n_rows, n_heads, SEQ_LEN, 16) for n_heads in (4, 2, 2)]
    heads = [torch.randn(size, generator=generator) for size in sizes]
    sees = doc_ids[:, :, None] == doc_ids[:, None]
    mask = sees.tril()[:, None]
    expected = F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
    first = torch.arange(20, 200)
    second = torch.arange(300, SEQ_LEN)
    query_positions = torch.cat((first, second))
    key_positions = torch.arange(SEQ_LEN).roll(-100)
    part = []
    positions = (query_positions, key_positions, key_positions)
    for head, kept in zip(heads, positions, strict=True):
        part.append(head[:, :, kept])
    part += (doc_ids, query_positions, key_positions)
    return part, expected[:, :, query_positions]


@pytest.fixture
def blocks_on_a_cpu(monkeypatch):
    monkeypatch.setattr(document_attention, "create_mask", create_block_mask)


def attend_part(query, key, value, *places):
    return flex_attention(query, key, value, block_mask=plan_mask(*places), enable_gqa=True)


@pytest.mark.usefixtures("blocks_on_a_cpu")
def test_blocks_that_no_document_reaches_into_are_left_out():
    doc_ids = (torch.arange(4 * BLOCK) // BLOCK)[None]  # each document is one block
    positions = torch.arange(4 * BLOCK)
    blocks = plan_mask(doc_ids, positions, positions)
    assert blocks.to_dense()[0, 0].tolist() == torch.eye(4).tolist()


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.usefixtures("blocks_on_a_cpu")
def test_attention_in_blocks_is_attention_document_by_document_and_compiles_without_a_break():
    part, expected = make_part(2)
    torch._dynamo.reset()
    attend = torch.compile(attend_part, backend="aot_eager", fullgraph=True)
    with torch.no_grad():  # flex attention has no backward on a CPU
        torch.testing.assert_close(attend(*part), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_attention_in_blocks_on_a_gpu_gives_outputs_and_gradients_of_the_cpu():
    part, _ = make_part(2)
    found = []
    for device in ("cpu", "cuda"):
        *heads, doc_ids, query_positions, key_positions = (tensor.to(device) for tensor in part)
        for tensor in heads:
            tensor.detach_().requires_grad_()
        mask = plan_mask(doc_ids, query_positions, key_positions)
        out = DocumentAttention()(*heads, mask)
        found.append([out, *torch.autograd.grad(out.square().sum(), heads)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other.cpu(), one, rtol=1e-3, atol=1e-3)
