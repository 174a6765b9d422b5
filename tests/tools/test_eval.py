"""Test that `eval` gives transformers' loss on the same windows, for texts, corpora and MoE models."""

import json
import math
from dataclasses import asdict
from functools import partial
from pathlib import Path

import compare
import pytest
import test_generate_tool
import torch
from checkpoints import flip_bit
from marks import read_lines
from test_generate_tool import ARGS, SHIPPED, save
from test_model import build_ours
from test_tokenizers import make_word_piece, write
from transformers import LlamaForCausalLM

from torchtitan_lite.__main__ import main
from torchtitan_lite.config.model import resolve_model
from torchtitan_lite.config.schema import Model
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.model.moe import list_moes
from torchtitan_lite.models.llama3.modules import Llama3

WINDOW = 32
TEXTS = {"a.txt": "def read(self, n):\n" * 9, "b.md": "Grüße, 世界! " * 12, "c.py": "x = 134\n"}
N_BYTES = sum(len(text.encode()) for text in TEXTS.values())


@pytest.fixture(scope="module")
def model() -> Llama3:
    return build_ours(ARGS)


checkpoint = test_generate_tool.checkpoint  # a fixture that saves `model`
export = test_generate_tool.export


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for name, text in TEXTS.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def evaluate(run_json):
    return partial(run_json, "eval")


def measure(model, window_size: int) -> dict[str, float]:
    """Compute the figures of TEXTS by a loop over windows of one row that has all documents. `model`: ids -> logits."""
    tokenizer = load_tokenizer(SHIPPED)
    tokens = []
    begins = []
    for text in TEXTS.values():
        document = tokenizer.encode(text, bos=True, eos=True)
        tokens += document
        begins += [True] + [False] * (len(document) - 1)
    starts = range(0, len(tokens) - 1, window_size)
    tokens, begins = map(torch.tensor, (tokens, begins))
    n_tokens, figures = compare.measure_losses(model, tokens, begins, starts, window_size, N_BYTES)
    names = ("loss", "perplexity", "bits_per_byte")
    return dict(zip(names, figures, strict=True)) | {"tokens": n_tokens, "bytes": N_BYTES}


def test_the_loss_of_a_text_equals_that_of_transformers_on_the_same_windows(
    evaluate, checkpoint, export, texts, run_tool
):
    theirs = LlamaForCausalLM.from_pretrained(export, dtype=torch.float32)
    expected = measure(lambda ids: theirs(ids).logits, WINDOW)
    options = ["--data", str(texts), "--seq-len", str(WINDOW)]
    for source in (checkpoint, export):
        found = evaluate(source, *options)
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert evaluate(checkpoint, "--data", texts)["seq_len"] == 128  # the length of its training
    assert evaluate(checkpoint, "--data", texts / "c.py")["seq_len"] < 10  # without padding
    shown = run_tool("eval", checkpoint, *options).split()
    assert f"{expected['perplexity']:.5g}" in shown
    assert f"{expected['bytes']:,}" in shown


def prepare(texts: Path, out: Path, tokenizer: str, share: str) -> None:
    """Make a corpus of `texts` in `out`."""
    arguments = f"--tokenizer {tokenizer} --validation-share {share} --processes 1 --json"
    assert main(["prepare", str(texts), "--out", str(out), *arguments.split()]) == 0


def test_eval_reads_the_validation_documents_of_a_corpus(
    evaluate, checkpoint, texts, tmp_path, capsys
):
    prepare(texts, tmp_path / "corpus", SHIPPED, "0.5")
    validation = json.loads(capsys.readouterr().out)["splits"]["validation"]
    found = evaluate(checkpoint, "--data", tmp_path / "corpus")
    assert found["tokens"] == validation["n_tokens"] - validation["n_documents"] > 0


def test_bits_per_byte_count_the_bytes_of_the_text_itself(evaluate, export, texts, tmp_path):
    vocabulary = write(tmp_path, make_word_piece())
    found = evaluate(export, "--data", texts, "--tokenizer", vocabulary)
    assert found["bytes"] == N_BYTES
    bits = found["loss"] * found["tokens"] / math.log(2)
    assert found["bits_per_byte"] == pytest.approx(bits / found["bytes"])


def test_eval_chooses_experts_with_the_biases_of_the_checkpoint(evaluate, texts, tmp_path):
    args = resolve_model(Model(flavor="debug_moe", n_layers=2))
    model = build_ours(args)
    for _, moe in list_moes(model):
        moe.router.expert_bias.copy_(torch.arange(8) % 3)
    path = save(tmp_path / "step-4", model.state_dict(), shape=asdict(args))
    expected = measure(lambda ids: model(ids, positions=torch.arange(ids.shape[1])[None]), WINDOW)
    found = evaluate(path, "--data", texts, "--seq-len", WINDOW)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)


# model | texts | exit status | words
WRONG = """
ours | absent | 2 | absent
ours | bytes | 2 | tokenizer
ours | all | 2 | validation
ours | all | 2 | only the validation split
texts | texts | 2 | /texts
step-1 | texts | 1 | step-1/rank-00000.safetensors  # a flipped bit
step-2 | texts | 1 | loss is nan
step-2 | texts | 1 | longer than the context of the model, 128 tokens
step-2 | rows.jsonl | 1 | rows with a column url, which is not used: 1
"""


def test_wrong_input_is_refused_and_damaged_weights_give_no_figures(
    model, checkpoint, texts, tmp_path, run_tool
):
    (tmp_path / "ours").symlink_to(checkpoint)
    (tmp_path / "texts").symlink_to(texts)
    prepare(texts, tmp_path / "bytes", "bytes", "0.5")
    prepare(texts, tmp_path / "all", SHIPPED, "0")
    flip_bit(save(tmp_path / "step-1", model.state_dict()) / "rank-00000.safetensors")
    norm = {"norm.weight": torch.full((128,), torch.nan)}
    save(tmp_path / "step-2", model.state_dict() | norm)
    (tmp_path / "rows.jsonl").write_text('{"text": "a b", "url": "c"}')
    run_tool("eval", checkpoint, status=2)
    for source, data, status, named in read_lines(WRONG):
        args = tmp_path / source, "--seq-len=129", "--data", tmp_path / data
        said = run_tool("eval", *args, status=int(status))
        assert named in said and "perplexity" not in said
