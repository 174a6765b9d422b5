"""`eval`: the loss of transformers on the same windows, on text, corpora and models with experts."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from checkpoints import flip_bit
from test_generate_tool import ARGS, SHIPPED, save
from transformers import LlamaForCausalLM

from torchtitan_lite.__main__ import main
from torchtitan_lite.config.layout import resolve_model
from torchtitan_lite.config.schema import Model
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.model.moe import list_moes
from torchtitan_lite.models.llama3.modules import Llama3
from torchtitan_lite.parallel.initial_weights import initialize_weights

WINDOW = 32
TEXTS = {"a.txt": "def read(self, n):\n" * 9, "b.md": "Grüße, 世界! " * 12, "c.py": "x = 134\n"}


@pytest.fixture(scope="module")
def model() -> Llama3:
    model = Llama3(ARGS)
    initialize_weights(model, seed=3)
    return model


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("run") / "step-40", model.state_dict())


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for name, text in TEXTS.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def evaluate(capsys):
    """Function: arguments -> what --json prints."""

    def call(*args: object) -> dict:
        status, printed = main(["eval", "--json", *map(str, args)]), capsys.readouterr()
        assert status == 0, printed.err
        return json.loads(printed.out)

    return call


def measure(model, window_size: int) -> dict[str, float]:
    """Compute the figures of TEXTS by a plain loop over windows of one row of documents. `model`: ids -> logits."""
    tokenizer = load_tokenizer(SHIPPED)
    documents = [tokenizer.encode(text, bos=True, eos=True) for text in TEXTS.values()]
    tokens = torch.tensor(sum(documents, []))
    is_first = torch.tensor(
        sum(([True] + [False] * (len(document) - 1) for document in documents), [])
    )
    nats = n_tokens = 0
    for start in range(0, len(tokens) - 1, window_size):
        window, counted = (
            tokens[start : start + window_size + 1],
            ~is_first[start + 1 : start + window_size + 1],
        )
        with torch.no_grad():
            logits = model(window[None, :-1])[0].double()
        nats += F.cross_entropy(logits[counted], window[1:][counted], reduction="sum").item()
        n_tokens += counted.sum().item()
    n_bytes = sum(len(text.encode()) for text in TEXTS.values())
    loss = nats / n_tokens
    figures = {
        "loss": loss,
        "perplexity": math.exp(loss),
        "bits_per_byte": nats / math.log(2) / n_bytes,
    }
    return {**figures, "tokens": n_tokens, "bytes": n_bytes}


def test_a_text_has_the_loss_of_transformers_on_the_same_windows(
    evaluate, checkpoint, texts, tmp_path, capsys
):
    assert main(["convert", str(checkpoint), str(tmp_path / "llama")]) == 0
    capsys.readouterr()
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.float32)
    expected = measure(lambda ids: theirs(ids).logits, WINDOW)
    for source in (checkpoint, tmp_path / "llama"):
        found = evaluate(source, "--data", texts, "--seq-len", WINDOW)
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert evaluate(checkpoint, "--data", texts)["seq_len"] == 128  # as it was trained
    assert main(["eval", str(checkpoint), "--data", str(texts), "--seq-len", str(WINDOW)]) == 0
    shown = {
        f"{expected['perplexity']:.5g}",
        f"{expected['bits_per_byte']:.4f}",
        f"{expected['bytes']:,}",
    }
    assert shown < set(capsys.readouterr().out.split())


def test_of_a_corpus_the_held_out_documents_count(evaluate, checkpoint, texts, tmp_path, capsys):
    prepare = ["prepare", str(texts), "--tokenizer", SHIPPED, "--processes", "1"]
    assert (
        main([*prepare, "--out", str(tmp_path / "corpus"), "--validation-share", "0.5", "--json"])
        == 0
    )
    validation = json.loads(capsys.readouterr().out)["splits"]["validation"]
    found = evaluate(checkpoint, "--data", tmp_path / "corpus")
    assert found["tokens"] == validation["n_tokens"] - validation["n_documents"] > 0


def test_biases_choose_the_experts(evaluate, texts, tmp_path):
    args = resolve_model(Model(flavor="debug_moe", n_layers=2))
    model = Llama3(args)
    initialize_weights(model, seed=3)
    for _, moe in list_moes(model):
        moe.router.expert_bias.copy_(torch.arange(8) % 3)
    path = save(tmp_path / "step-4", model.state_dict(), shape=asdict(args))
    expected = measure(lambda ids: model(ids, positions=torch.arange(ids.shape[1])[None]), WINDOW)
    found = evaluate(path, "--data", texts, "--seq-len", WINDOW)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_wrong_input_is_refused_and_damaged_weights_have_no_figures(
    model, checkpoint, texts, tmp_path, capsys
):
    prepare = ["prepare", str(texts), "--processes", "1", "--tokenizer"]
    assert (
        main([*prepare, "bytes", "--out", str(tmp_path / "bytes"), "--validation-share", "0.5"])
        == 0
    )
    assert main([*prepare, SHIPPED, "--out", str(tmp_path / "all"), "--validation-share", "0"]) == 0
    damaged = save(tmp_path / "step-1", model.state_dict())
    (file,) = damaged.glob("*.safetensors")
    flip_bit(file)
    nan = save(
        tmp_path / "step-2", {**model.state_dict(), "norm.weight": torch.full((128,), torch.nan)}
    )
    for source, data, status, named in (
        (checkpoint, tmp_path / "absent", 2, "absent"),
        (checkpoint, tmp_path / "bytes", 2, "tokenizer"),
        (checkpoint, tmp_path / "all", 2, "validation"),
        (texts, texts, 2, str(texts)),
        (damaged, texts, 1, str(file)),
        (nan, texts, 1, "loss is nan"),
    ):
        capsys.readouterr()
        assert main(["eval", str(source), "--data", str(data)]) == status
        printed = capsys.readouterr()
        assert printed.out == "" and named in printed.err
