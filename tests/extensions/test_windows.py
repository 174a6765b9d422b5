"""Compare windows, sinks and documents with a float64 softmax under a mask: training, KV cache, flex attention, FLOPs.

test_data.py tests the positions of packed documents.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from compare import TABLE_CONFIG, resolve_model
from marks import each_row
from test_model import build_ours, read_flavor
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from torchtitan_lite.config.block import count_keys
from torchtitan_lite.config.messages import UserError, collecting
from torchtitan_lite.config.model_rows import LAYER_TYPES, ModelArgs
from torchtitan_lite.config.schema import Model
from torchtitan_lite.extensions.windowed_attention import attend_in_windows
from torchtitan_lite.model import document_attention
from torchtitan_lite.model.attention import CausalAttention, build_attention
from torchtitan_lite.model.document_attention import DocumentAttention, plan_mask
from torchtitan_lite.model.own_attention import explain_own_attention
from torchtitan_lite.models.llama3.modules import Attention, Llama3
from torchtitan_lite.parallel.context_parallel import apply_context_parallel
from torchtitan_lite.tools.kv_cache import CachedModel

ARGS = replace(resolve_model(TABLE_CONFIG.model), n_layers=3)
SEQ_LEN = 150
# A context-parallel rank has some of the queries and all keys. The keys are not in the order of the sequence.
QUERIES = torch.cat((torch.arange(20, 60), torch.arange(100, SEQ_LEN)))
KEYS = torch.arange(SEQ_LEN).roll(-100)
CASES = [  # window, layer types, sinks
    (7, (), False),
    (7, LAYER_TYPES, True),
    (1, LAYER_TYPES[::-1], False),
    (SEQ_LEN, (), True),
    (None, (), True),
    (None, (), False),
]


def make_documents() -> torch.Tensor:
    """Return random doc_ids (2, S). The first row is one document; the other one has a document per 40 tokens, on
    average."""
    generator = torch.Generator().manual_seed(0)
    begins = torch.rand(2, SEQ_LEN, generator=generator) < 1 / 40
    begins[0] = False
    return begins.cumsum(1)


def list_sees(model_args: ModelArgs, layer: int, doc_ids: torch.Tensor | None) -> torch.Tensor:
    """Return the attention mask (B or 1, S, S), which is True for each key that a query sees."""
    types = model_args.layer_types or ("sliding_attention",)
    distance = torch.arange(SEQ_LEN)[:, None] - torch.arange(SEQ_LEN)
    sees = distance >= 0
    if model_args.sliding_window and types[layer % len(types)] == "sliding_attention":
        sees &= distance < model_args.sliding_window
    if doc_ids is None:
        return sees[None]
    return sees & (doc_ids[:, :, None] == doc_ids[:, None])


def attend_exactly(query, key, value, sinks, sees):
    """Attend in float64, with a softmax over the visible scores and the sink."""
    query, key, value = (tensor.double() for tensor in (query, key, value))
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    weights = torch.einsum("bhqe,bhke->bhqk", query, key).div(math.sqrt(query.shape[-1])).exp()
    weights = weights * sees[:, None]
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp()[:, None, None]
    return weights / total @ value


def make_case(window, layer_types, sinks) -> ModelArgs:
    return replace(ARGS, sliding_window=window, layer_types=layer_types, attention_sinks=sinks)


def make_inputs(model_args: ModelArgs, inner: nn.Module):
    generator = torch.Generator().manual_seed(3)
    heads = []
    for n_heads in (model_args.n_heads, model_args.n_kv_heads, model_args.n_kv_heads):
        heads.append(torch.randn(2, n_heads, SEQ_LEN, model_args.head_dim, generator=generator))
    leaves = [tensor.requires_grad_() for tensor in heads]
    sinks = None
    if model_args.attention_sinks:
        sinks = inner.sinks.weight
        nn.init.normal_(sinks, generator=generator)
        leaves.append(sinks)
    return heads, sinks, leaves


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@each_row("documents", [False, True])
@each_row("case", CASES)
def test_attention_is_a_softmax_over_the_window_and_the_sink(case, documents, monkeypatch):
    """Compare outputs and gradients with the float64 softmax. With documents, compare the outputs of flex attention
    too."""
    model_args = make_case(*case)
    doc_ids = make_documents()
    attention = "document" if documents else "causal"
    seen_ids = doc_ids if documents else None
    for layer in range(2):
        inner = build_attention(attention, model_args, layer)
        heads, sinks, leaves = make_inputs(model_args, inner)
        sees = list_sees(model_args, layer, seen_ids)
        found = inner(*heads, inner.plan(doc_ids))
        expected = attend_exactly(*heads, sinks, sees)
        results = []
        for out in (found, expected):
            gradients = torch.autograd.grad(out.square().sum(), leaves)
            results.append([tensor.double() for tensor in (out, *gradients)])
        torch.testing.assert_close(*results, rtol=1e-5, atol=2e-5)
        if documents:
            with monkeypatch.context() as patches, torch.no_grad():  # no backward on a CPU
                flex = attend_by_flex(patches, model_args, layer, heads, sinks, doc_ids)
            expected = expected[:, :, QUERIES]
            torch.testing.assert_close(flex.double(), expected, rtol=1e-5, atol=1e-5)


def take_part(query, key, value):
    """Return the heads of a context-parallel rank."""
    return query[:, :, QUERIES], key[:, :, KEYS], value[:, :, KEYS]


def attend_by_flex(patches, model_args, layer, heads, sinks, doc_ids) -> torch.Tensor:
    # on a CPU, only eager flex attention returns the lse
    patches.setattr(document_attention, "compile_once", lambda function: function)
    patches.setattr(document_attention, "create_mask", create_block_mask)
    blocks = plan_mask(doc_ids, QUERIES, KEYS, model_args.find_window(layer))
    return attend_in_windows(*take_part(*heads), blocks, sinks)


def attend_part(query, key, value, doc_ids):
    blocks = plan_mask(doc_ids, QUERIES, KEYS)
    return flex_attention(query, key, value, block_mask=blocks, enable_gqa=True)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@torch.no_grad()  # flex attention has no backward on a CPU
def test_flex_attention_compiles_without_a_graph_break(monkeypatch):
    heads, *_ = make_inputs(ARGS, None)
    heads, doc_ids = take_part(*heads), make_documents()
    expected = DocumentAttention()(*heads, plan_mask(doc_ids, QUERIES, KEYS))
    monkeypatch.setattr(document_attention, "create_mask", create_block_mask)
    torch._dynamo.reset()
    attend = torch.compile(attend_part, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(attend(*heads, doc_ids), expected, rtol=1e-5, atol=1e-5)


def test_flex_attention_skips_blocks_that_contain_no_pair_of_the_same_document(monkeypatch):
    monkeypatch.setattr(document_attention, "create_mask", create_block_mask)
    positions = torch.arange(4 * 128)
    blocks = plan_mask(positions[None] // 128, positions, positions)  # each document is one block
    assert blocks.to_dense()[0, 0].tolist() == torch.eye(4).tolist()


@pytest.mark.gpu
def test_flex_attention_on_a_gpu_gives_the_same_outputs_and_gradients_as_on_a_cpu():
    heads, *_ = make_inputs(ARGS, None)
    found = []
    for device in ("cpu", "cuda"):
        leaves = [tensor.detach().to(device).requires_grad_() for tensor in take_part(*heads)]
        places = (each.to(device) for each in (make_documents(), QUERIES, KEYS))
        out = DocumentAttention()(*leaves, plan_mask(*places))
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other.cpu(), one, rtol=1e-3, atol=1e-3)


@each_row("case", CASES)
@each_row("pieces", [[100] + [1] * 50, [3, 90, 1, 56], [150]])
def test_logits_with_a_kv_cache_equal_logits_without_it(case, pieces):
    model_args = make_case(*case)
    model = build_ours(model_args)
    with torch.no_grad():
        for block in model.layers.values():  # initial scores are almost equal
            block.attention.wq.weight *= 7
            block.attention.wk.weight *= 7
            if model_args.attention_sinks:
                block.attention.inner.sinks.weight.add_(1)
        tokens = torch.randint(model_args.vocab_size, (SEQ_LEN,))
        expected = model(tokens[None], positions=torch.arange(SEQ_LEN)[None])[0]
    cached = CachedModel(model)
    ends = list(itertools.accumulate(pieces))
    for _ in range(2):
        for n_tokens, end in zip(pieces, ends, strict=True):
            logits = cached.read(tokens[end - n_tokens : end].tolist())
            assert (logits - expected[end - 1]).abs().max() < 2e-5
        windows = [cache.window for cache in cached.caches]
        kept = [cache.cache.shape[3] for cache in cached.caches]
        assert kept == [min(SEQ_LEN, (window or SEQ_LEN + 1) - 1) for window in windows]
        cached.forget()


@each_row("case", CASES)
def test_flops_count_the_query_key_pairs_that_each_layer_computes(case):
    model_args = make_case(*case)
    full, causal = count_keys(model_args, SEQ_LEN, "causal")
    n_pairs = 0
    for layer in range(model_args.n_layers):
        sees = list_sees(model_args, layer, None)
        n_keys = sees.sum(-1).max().item()
        # subtract half of the diagonal, because 12*L*H*E*S / 2 does not count it
        n_pairs += sees.sum().item() - n_keys / 2
        full -= n_keys
    assert full == 0
    assert causal * SEQ_LEN == pytest.approx(n_pairs)


# fields | key of the problem
WINDOWS = """
{"sliding_window": 0} | model.attention
{"sliding_window": 4, "layer_types": ["full_attention"]} | model.flavor
{"sliding_window": 4, "layer_types": ["sliding"]} | model.flavor
{"layer_types": ["full_attention", "sliding_attention"]} | model.flavor
{"layer_types": ["full_attention"]} |
{"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]} |
"""


@each_row("fields, key", WINDOWS)
def test_windows_that_no_layer_has_are_refused(fields, key):
    problems: list = []
    with collecting(problems):
        resolve_model(Model(row=read_flavor(fields)))
    assert "".join(problem.key for problem in problems) == key


# ---------------------------------------------------------------- models with an attention of their own


class OwnInner(CausalAttention):
    """An inner attention of a fork."""


class Capped(Attention):
    """Attention that computes its own scores, and does not call its inner attention."""

    def forward(self, x, rotation, doc_ids):
        return self.wo(self.wq(x).tanh())


class Gated(Attention):
    def forward(self, x, rotation, doc_ids):
        return 2 * super().forward(x, rotation, doc_ids)


def change(cls: type[nn.Module] | None = None, inner: nn.Module | None = None) -> Llama3:
    """Return a model whose layer 1 has a different class of attention, or a different inner attention."""
    with torch.device("meta"):
        model = Llama3(ARGS)
    attention = model.layers["1"].attention
    if cls:
        attention.__class__ = cls
    attention.inner = inner or attention.inner
    return model


@each_row(
    "model, named",
    [
        (change(), ""),
        (change(Gated), ""),
        (change(inner=OwnInner()), "layers.1.attention.inner is OwnInner"),
        (change(inner=nn.Identity()), "layers.1 has no InnerAttention"),
        (change(Capped), "layers.1.attention, Capped, does not call inner"),
    ],
)
def test_a_cache_and_context_parallel_refuse_an_attention_that_they_would_replace(model, named):
    why = explain_own_attention(model, CausalAttention)
    assert named in why and bool(named) == bool(why)
    for replace_attention in (
        lambda: CachedModel(model),
        lambda: apply_context_parallel(model, None, attention="causal", method="ring"),
    ):
        if named:
            with pytest.raises(UserError, match=named):
                replace_attention()


class Shifted(nn.Module):
    """A module that adds the hidden state of an earlier token."""

    def __init__(self, distance):
        super().__init__()
        self.distance = distance

    def forward(self, x):
        return x + nn.functional.pad(x, (0, 0, self.distance, 0))[:, : x.shape[1]] / 10


class Failing(nn.Module):
    def forward(self, x):
        raise TypeError("of a fork")


@pytest.mark.parametrize(
    "module, named",
    [
        (Shifted(1), "outside of attention.inner"),
        (Shifted(32), "outside of attention.inner"),
        (Failing(), "The forward fails .*of a fork"),
    ],
)
def test_a_kv_cache_is_refused_if_a_module_other_than_attention_mixes_tokens_or_needs_fields(
    module, named
):
    model = build_ours(ARGS)
    model.layers["0"].ffn_norm = module
    with pytest.raises(UserError, match=named):
        CachedModel(model)
