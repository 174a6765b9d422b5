"""`eval`: the loss of transformers on the same windows, its choice of endings, one number on every layout."""

import json
import math
import socket
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from checkpoints import flip_bit
from test_generate_tool import ARGS, SHIPPED, refuse_with, save
from torchtitan_lite.tools.multiple_choice import Question, Row, encode_endings, score
from transformers import LlamaForCausalLM

from torchtitan_lite.checkpoint.hugging_face import Export, write_folder
from torchtitan_lite.config.block import count_parameters
from torchtitan_lite.config.layout import plan_degrees, resolve_model
from torchtitan_lite.config.schema import Config, Model
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.model.llama3 import Llama3, init_parameter
from torchtitan_lite.model.moe import list_mixtures
from torchtitan_lite.parallel.initial_weights import initialize_weights
from torchtitan_lite.tools import eval as tool
from torchtitan_lite.tools.corpora.prepare import Recipe, prepare
from torchtitan_lite.tools.corpora.text_files import find_files
from torchtitan_lite.tools.model_source import SourceError, build_model, open_source

WINDOW = 32
TEXTS = {
    "a.txt": "def read(self, n):\n" * 9,
    "b.md": "Grüße, 世界! " * 12,
    "c.py": "x = 134\n",
}  # `prepare` would hold out the last
QUESTIONS = [
    {"ctx": "import os", "endings": ["and sys", "# Grüße,\u2028世界", "from x import y as z"], "label": 1},
    {"ctx": "def f(self): ", "endings": ["return", "pass\n    return self.value + 1"], "label": "0"},
    {"ctx": "", "endings": ["class A:", "while True:", "if x:", "no"], "label": 3},
]
LAYOUTS = {  # ranks, flags; -1 of dp_shard takes what the other degrees leave
    "dp2": (2, []),
    "dp2 x tp2 by replicas": (4, ["tensor_parallel_degree 2", "data_parallel_replicate_degree 2"]),
    "cp2 ring": (2, ["context_parallel_degree 2", "context_parallel_rotate_method ring"]),
    "pp2 x tp2": (4, ["pipeline_parallel_degree 2", "tensor_parallel_degree 2"]),
}


@pytest.fixture(scope="module")
def model() -> Llama3:
    model = Llama3(ARGS)
    initialize_weights(model, init_parameter, seed=3)
    return model


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("run") / "step-40", model.state_dict())


@pytest.fixture(scope="module")
def export(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "llama"
    write_folder(folder, model.state_dict().__getitem__, Export(ARGS, "float32"))
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for name, text in TEXTS.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("questions") / "some.jsonl"
    path.write_text("\n".join(json.dumps(each, ensure_ascii=False) for each in QUESTIONS) + "\n\n", encoding="utf-8")
    return path


@pytest.fixture
def evaluate(capsys, monkeypatch, pool):
    """Function: arguments -> what --json prints. Ranks are those of the tests' own pool."""
    monkeypatch.setattr(tool, "RankPool", lambda n_ranks: nullcontext(pool))

    def call(*args: object) -> dict:
        started_s = time.monotonic()
        status = tool.main(["--json", *map(str, args)])
        printed = capsys.readouterr()
        assert status == 0, printed.err
        report = json.loads(printed.out)
        assert report["dtype"] == "float32" and 0 < report["seconds"] < time.monotonic() - started_s
        return report

    return call


@pytest.fixture
def assert_refused(capsys):
    return refuse_with(tool.main, capsys)


def measure_with_transformers(export: Path) -> dict[str, float]:
    """The figures of TEXTS by a plain loop over windows of one row of documents."""
    tokenizer, theirs = load_tokenizer(SHIPPED), LlamaForCausalLM.from_pretrained(export, dtype=torch.float32)
    documents = [tokenizer.encode(text, bos=True, eos=True) for text in TEXTS.values()]
    tokens = torch.tensor(sum(documents, []))
    is_first = torch.tensor(sum(([True] + [False] * (len(document) - 1) for document in documents), []))
    nats = n_tokens = 0
    for start in range(0, len(tokens) - 1, WINDOW):
        window, counted = tokens[start : start + WINDOW + 1], ~is_first[start + 1 : start + WINDOW + 1]
        with torch.no_grad():
            logits = theirs(window[None, :-1]).logits[0].double()
        nats += F.cross_entropy(logits[counted], window[1:][counted], reduction="sum").item()
        n_tokens += counted.sum().item()
    n_bytes = sum(len(text.encode()) for text in TEXTS.values())
    return {
        "nats_per_token": nats / n_tokens,
        "perplexity": math.exp(nats / n_tokens),
        "bits_per_byte": nats / math.log(2) / n_bytes,
        "tokens": sum(len(document) - 1 for document in documents),
        "bytes": n_bytes,
    }


def test_a_text_has_the_loss_of_transformers_on_the_same_windows(evaluate, checkpoint, export, texts):
    expected = measure_with_transformers(export)
    for source, more in ((checkpoint, ("--training.batch_size", 2)), (export, ("--tokenizer", SHIPPED))):
        found = evaluate(source, "--data", texts, "--training.seq_len", WINDOW, *more)
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert (found["tokens"], found["bytes"]) == (expected["tokens"], expected["bytes"])
    shown = {f"{expected['perplexity']:.5g}", f"{expected['bits_per_byte']:.4f}", f"{expected['bytes']:,}"}
    assert shown < set(tool.describe(found).split())


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_the_figures_of_one_rank_in_just_its_memory(
    evaluate, checkpoint, texts, questions, name, monkeypatch
):
    n_ranks, keys = LAYOUTS[name]
    n_bytes = 4 * count_parameters(ARGS) * (2 if "replicas" in name else 1)
    monkeypatch.setattr(tool, "measure_cpu_memory", lambda: n_bytes)
    flags = [word for key in keys for word in f"--parallelism.{key}".split()]
    of_text, of_choice = ("--data", texts, "--training.seq_len", WINDOW), ("--multiple-choice", questions)
    for what in (of_text, of_choice):
        expected, found = evaluate(checkpoint, *what), evaluate(checkpoint, *what, "--ranks", n_ranks, *flags)
        if what is of_text:
            names = ("nats_per_token", "perplexity", "bits_per_byte", "tokens", "bytes")
            assert [found[name] for name in names] == pytest.approx([expected[name] for name in names], rel=1e-6)
        else:
            for ours, theirs in zip(found["log_likelihoods"], expected["log_likelihoods"], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-6)
        assert expected["layout"] == "one rank" != found["layout"]


def test_a_prepared_corpus_has_the_figures_of_its_text_and_shows_what_it_holds_out(
    evaluate, checkpoint, texts, tmp_path, assert_refused
):
    prepare(
        find_files([texts])[0],
        tmp_path / "all",
        Recipe(str(SHIPPED), 0.0, folder=str(tmp_path)),
    )
    window = ("--training.seq_len", WINDOW)
    of_text = evaluate(checkpoint, "--data", texts, *window)
    of_corpus = evaluate(checkpoint, "--data", tmp_path / "all", "--split", "train", *window)
    assert of_corpus["nats_per_token"] == of_text["nats_per_token"] and of_corpus["tokens"] == of_text["tokens"]
    assert_refused(checkpoint, "--data", tmp_path / "all", named=["--data", "validation"])
    prepare(
        find_files([texts])[0],
        tmp_path / "bytes",
        Recipe("bytes", 0.5, folder=str(tmp_path)),
    )
    assert_refused(checkpoint, "--data", tmp_path / "bytes", named=["--data", "tokenizer"])


def test_endings_have_the_log_likelihood_of_transformers(evaluate, export, questions):
    tokenizer, theirs = load_tokenizer(SHIPPED), LlamaForCausalLM.from_pretrained(export, dtype=torch.float32)
    report = evaluate(export, "--multiple-choice", questions, "--tokenizer", SHIPPED)
    assert report["questions"] == len(QUESTIONS)
    for question, found in zip(QUESTIONS, report["log_likelihoods"], strict=True):
        n_context = len(tokenizer.encode(question["ctx"].rstrip(), bos=True))
        for ending, log_likelihood in zip(question["endings"], found, strict=True):
            tokens = torch.tensor(tokenizer.encode(f"{question['ctx']} {ending}", bos=True))
            with torch.no_grad():
                logits = theirs(tokens[None]).logits[0, n_context - 1 : -1].double()
            expected = -F.cross_entropy(logits, tokens[n_context:], reduction="sum").item()
            assert log_likelihood == pytest.approx(expected, rel=1e-5)
    labels = [int(question["label"]) for question in QUESTIONS]
    chosen = [max(range(len(found)), key=found.__getitem__) for found in report["log_likelihoods"]]
    assert report["acc"] == sum(map(int.__eq__, chosen, labels)) / len(labels)
    shown = [word for word in tool.describe(report).split() if word.endswith("%")]
    assert shown == [f"{report[name]:.2%}" for name in ("acc", "acc_norm", "acc_bytes")]


def test_biases_of_experts_choose_the_experts_also_here(evaluate, tmp_path):
    args = resolve_model(Model(flavor="debug_moe", n_layers=2))
    model = Llama3(args)
    initialize_weights(model, init_parameter, seed=3)
    for _, mixture in list_mixtures(model):
        mixture.router.expert_bias.copy_(torch.arange(8) % 3)
    path, question = save(tmp_path / "step-4", model.state_dict(), shape=asdict(args)), QUESTIONS[0]
    (tmp_path / "one.jsonl").write_text(json.dumps(question))
    (found,) = evaluate(path, "--multiple-choice", tmp_path / "one.jsonl")["log_likelihoods"]
    loaded = build_model(open_source(path, tokenizer=None, verify=False), torch.device("cpu"), 2**40, 1)
    assert all(torch.equal(ours, model.state_dict()[fqn]) for fqn, ours in loaded.state_dict().items())
    row = encode_endings([Question(question["ctx"], question["endings"], 1)], load_tokenizer(SHIPPED))[0]
    tokens = torch.tensor(row.tokens)
    logits = model(tokens[None], positions=torch.arange(len(tokens))[None])[0, row.n_context - 1 : -1]
    nats = F.cross_entropy(logits.double(), tokens[row.n_context :], reduction="sum").item()
    assert found[0] == pytest.approx(-nats, rel=1e-5)


@pytest.mark.parametrize(("label", "right"), [(0, "acc"), (1, "acc_norm"), (2, "acc_bytes")])
def test_endings_are_chosen_as_they_are_or_by_their_characters_or_by_their_bytes(label, right):
    question = Question("?", ["a", "abcdefgh", "世界世界"], label)  # 1, 8 and 4 characters, 1, 8 and 12 bytes
    found = score([question], [[-2.0, -4.0, -5.0]])  # per character -2, -0.5, -1.25; per byte -2, -0.5, -0.417
    assert found == {name: float(name == right) for name in ("acc", "acc_norm", "acc_bytes")}


def test_an_ending_has_a_token_of_its_own_and_one_before_it():
    joining = SimpleNamespace(encode=lambda text, bos: [7, 8])
    assert [row.n_context for row in encode_endings([Question("a", ["b", "c"], 0)], joining)] == [1, 1]
    without_bos = SimpleNamespace(encode=lambda text, bos: list(text.encode()))
    with pytest.raises(SourceError):
        encode_endings([Question("", ["b", "c"], 0)], without_bos)


def test_a_rank_of_torchrun_joins_its_group_and_windows_are_as_trained(
    evaluate, checkpoint, texts, monkeypatch, assert_refused, capsys
):
    arguments = (checkpoint, "--data", texts)
    expected = evaluate(*arguments)
    assert expected["seq_len"] == 128
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ours = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in {**ours, "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, str(value))
    assert evaluate(*arguments)["nats_per_token"] == expected["nats_per_token"]
    assert_refused(*arguments, "--ranks", 2, named=["--ranks"])
    monkeypatch.setattr(tool, "LONGEST_WINDOW", WINDOW)
    assert evaluate(*arguments)["seq_len"] == WINDOW
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(tool, "evaluate", lambda *_: expected)
    assert tool.main(list(map(str, arguments))) == 0 and capsys.readouterr().out == ""  # rank 0 alone prints


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", ["line 2"]),
        ('{"ctx": "a", "label": 0}', ["line 2", "endings"]),
        ('{"ctx": "a", "endings": ["b", "c"], "label": 2}', ["line 2", "label 2"]),
        ('{"ctx": "a", "endings": ["b", "c"], "label": ""}', ["line 2", "label"]),
        ('{"ctx": "a", "endings": ["b", "c"], "label": -1}', ["line 2", "label -1"]),
        ('{"ctx": "a", "endings": ["b", "c"], "label": 0.9}', ["line 2", "label"]),
        ('{"ctx": 3, "endings": ["b", "c"], "label": 0}', ["line 2", "ctx"]),
        ('{"ctx": "a", "endings": ["b", " "], "label": 0}', ["line 2", "endings"]),
        ('{"ctx": "a", "endings": ["b"], "label": 0}', ["line 2", "endings"]),
        ("[]", ["line 2"]),
    ],
)
def test_a_line_that_is_no_question_is_refused_by_its_number(checkpoint, tmp_path, assert_refused, line, named):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(QUESTIONS[0]) + f"\n{line}\n")
    assert_refused(checkpoint, "--multiple-choice", path, named=[str(path), *named])


def test_what_cannot_be_evaluated_is_refused_before_weights_are_loaded(
    checkpoint, texts, tmp_path, assert_refused, model, monkeypatch
):
    data = ("--data", texts)
    assert_refused(checkpoint, *data, "--model.n_layers", 3, named=["model.n_layers", "parallelism"])
    assert_refused(checkpoint, *data, "--parallelism.tensor_parallel_degree", 3, named=["model.n_heads = 4"])
    assert_refused(checkpoint, *data, "--parallelism.tensor_parallel_degree", "x", named=["tensor_parallel_degree"])
    assert_refused(checkpoint, "--data", tmp_path / "absent", named=["absent"])
    assert_refused(checkpoint, *data, "--split", "train", named=["--split"])
    assert_refused(tmp_path, *data, named=[str(tmp_path)])
    with pytest.raises(SystemExit):
        tool.main([str(checkpoint)])  # what is to be read?
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({**QUESTIONS[0], "ctx": "word " * 200}))
    assert_refused(checkpoint, "--multiple-choice", long, named=["training.seq_len = 128"])
    long.write_text("\n")
    assert_refused(checkpoint, "--multiple-choice", long, named=[str(long)])
    source, one_rank = open_source(checkpoint, tokenizer=None, verify=False), plan_degrees(Config().parallelism, 1)
    assert tool.fit_rows(Config(), [Row([0] * 129, 1)], one_rank, source).training.seq_len == 128
    with pytest.raises(SourceError):
        tool.fit_rows(Config(), [Row([0] * 130, 1)], one_rank, source)
    unknown = save(tmp_path / "step-1", model.state_dict(), attention="mine")
    assert_refused(unknown, *data, named=["model.attention"])
    monkeypatch.setattr(tool, "measure_cpu_memory", lambda: 4 * count_parameters(ARGS))
    replicas = ("--ranks", 2, "--parallelism.data_parallel_replicate_degree", 2)
    assert_refused(checkpoint, *data, *replicas, named=["GiB", str(checkpoint)])


def test_damaged_weights_have_no_figures(model, texts, questions, tmp_path, assert_refused):
    nan = {**model.state_dict(), "norm.weight": torch.full((128,), torch.nan)}
    for what in (("--data", texts), ("--multiple-choice", questions)):
        path = save(tmp_path / f"step-{len(what[0])}", nan)
        assert_refused(path, *what, status=1, named=["not finite"])
    (file,) = path.glob("*.safetensors")
    flip_bit(file)
    assert_refused(path, "--data", texts, status=1, named=[str(file)])
