"""`generate`: the text that transformers writes from the export, how it is shown, and what is refused."""

import argparse
import inspect
import io
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import flip_bit, write_tensors
from torch import Tensor
from transformers import LlamaForCausalLM

from torchtitan_lite.checkpoint.hugging_face import Export, write_folder
from torchtitan_lite.checkpoint.hugging_face_config import IN_MANIFEST
from torchtitan_lite.checkpoint.storage import open_checkpoint
from torchtitan_lite.config import choices
from torchtitan_lite.config.block import count_parameters
from torchtitan_lite.config.flavors import FLAVORS, RopeScaling
from torchtitan_lite.config.machine import Machine
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan_lite.model.llama3 import Llama3, init_parameter
from torchtitan_lite.parallel.initial_weights import initialize_weights
from torchtitan_lite.tools import generate as tool
from torchtitan_lite.tools.model_source import describe_checkpoint, open_source

ARGS = replace(FLAVORS["debug"], n_layers=2, rope_scaling=RopeScaling(factor=8.0, original_length=64))
SHIPPED = "assets/tokenizer"
PROMPT = "def read(self, n"
GREEDY = ("--prompt", PROMPT, "--temperature", 0)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(SHIPPED)


@pytest.fixture(scope="module")
def trained(tokenizer) -> Llama3:
    """A model that has seen a little Python: its next tokens depend on more than rounding."""
    model = Llama3(ARGS)
    initialize_weights(model, init_parameter, seed=0)
    tokens = torch.tensor(tokenizer.encode(inspect.getsource(argparse)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(64).expand(8, -1)
    for _ in range(40):
        starts = torch.randint(len(tokens) - 65, (8,), generator=generator)
        rows = torch.stack([tokens[start : start + 65] for start in starts])
        loss = model(rows[:, :-1], positions=positions, targets=rows[:, 1:]) / rows[:, 1:].numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 5.5  # 7.7 without any training
    return model


def save(
    path: Path,
    weights: dict[str, Tensor],
    *,
    shape: object = asdict(ARGS),
    attention: str = "causal",
    **fingerprint: object,
) -> Path:
    """A checkpoint as a run of 128 tokens with the shipped tokenizer would save it, with a further `fingerprint`."""
    config = Config()
    model = replace(config.model, hf_assets_path=SHIPPED, attention=attention)  # a run resolves "auto"
    config = replace(config, model=model, training=replace(config.training, seq_len=128))
    fingerprint = {"shape": shape, "tokenizer": load_tokenizer(SHIPPED).identity, **fingerprint}
    named, step = {f"model.{fqn}": weight for fqn, weight in weights.items()}, int(path.name.removeprefix("step-"))
    return write_tensors(path, named, step=step, fingerprint=fingerprint, run={"config": asdict(config)})


@pytest.fixture(scope="module")
def checkpoint(trained, tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("run") / "step-40", trained.state_dict())


@pytest.fixture(scope="module")
def export(trained, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "llama"
    write_folder(folder, trained.state_dict().__getitem__, Export(ARGS, "float32", context=1024))
    return folder


@pytest.fixture
def generate(capsys):
    """Function: arguments -> what --json prints."""

    def call(source: Path, *args: object) -> dict:
        started_s = time.monotonic()
        status = tool.main([str(source), "--json", *map(str, args)])
        printed = capsys.readouterr()
        assert status == 0, printed.err
        report = json.loads(printed.out)
        assert 0 < sum(sample["seconds"] for sample in report["samples"]) < time.monotonic() - started_s
        return report

    return call


def refuse_with(main: Callable[[list[str]], int], capsys) -> Callable[..., None]:
    """Function: source, arguments -> the exit status and what is named. Nothing goes to standard output."""

    def check(*args: object, status: int = 2, named: list[str]) -> None:
        assert main([str(arg) for arg in args]) == status
        printed = capsys.readouterr()
        assert printed.out == "" and [part for part in named if part not in printed.err] == []

    return check


@pytest.fixture
def assert_refused(capsys):
    return refuse_with(tool.main, capsys)


# ---------------------------------------------------------------- the text


def test_greedy_text_is_that_of_transformers_on_the_exported_model(checkpoint, export, tokenizer, generate):
    prompt = tokenizer.encode(PROMPT, bos=True)
    ends = {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.eos_id}
    theirs = LlamaForCausalLM.from_pretrained(export, dtype=torch.float32)
    expected = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=100, **ends)
    expected = expected[0, len(prompt) :].tolist()
    assert len(expected) == 100 and len(set(expected)) > 10  # it does not only repeat itself
    for source, more in ((checkpoint, ()), (export, ("--tokenizer", SHIPPED))):
        report = generate(source, *GREEDY, "--max-new-tokens", 100, *more)
        (sample,) = report["samples"]
        assert report["prompt_tokens"] == prompt and sample["tokens"] == expected
        assert sample["text"] == tokenizer.decode(expected) and sample["stopped"] == "max_new_tokens"


def test_limits_on_what_is_drawn_reach_the_model(checkpoint, generate):
    arguments = ("--prompt", PROMPT, "--max-new-tokens", 9, "--temperature")
    (greedy,) = generate(checkpoint, *arguments, 0)["samples"]
    for limits in (("--top-k", 1), ("--top-p", 0)):
        report = generate(checkpoint, *arguments, 2, *limits)
        assert report["samples"][0]["tokens"] == greedy["tokens"] and report["temperature"] == 2
        assert report[limits[0][2:].replace("-", "_")] == limits[1]
    assert generate(checkpoint, *arguments, 2)["samples"][0]["tokens"] != greedy["tokens"]


def test_a_tied_model_has_its_embedding_as_head(tokenizer, generate, tmp_path):
    args = replace(ARGS, tie_embeddings=True)
    model = Llama3(args)
    initialize_weights(model, init_parameter, seed=1)
    write_folder(tmp_path / "llama", model.state_dict().__getitem__, Export(args, "float32", context=1024))
    path = save(tmp_path / "step-40", dict(model.named_parameters()), shape=asdict(args))
    with torch.no_grad():
        tokens = torch.tensor([tokenizer.encode(PROMPT, bos=True)])
        expected = int(model(tokens, positions=torch.arange(tokens.shape[1])[None])[0, -1].argmax())
    for source in (path, tmp_path / "llama"):
        (sample,) = generate(source, *GREEDY, "--max-new-tokens", 1, "--tokenizer", SHIPPED)["samples"]
        assert sample["tokens"] == [expected]


def test_prompt_and_text_go_to_standard_output_and_each_sample_depends_on_its_own_seed_alone(
    checkpoint, generate, capsys
):
    arguments = ["--prompt", PROMPT, "--max-new-tokens", "12", "--temperature", "1.5"]
    samples = generate(checkpoint, *arguments, "--n", 3, "--seed", 7)["samples"]
    assert [sample["seed"] for sample in samples] == [7, 8, 9] and len({sample["text"] for sample in samples}) == 3
    assert tool.main([str(checkpoint), *arguments, "--n", "2", "--seed", "8"]) == 0
    printed = capsys.readouterr()
    heads = [f"--- sample {number} of 2, seed {number + 7} ---\n" for number in (1, 2)]
    expected = [f"{head}{PROMPT}{sample['text']}\n" for head, sample in zip(heads, samples[1:], strict=True)]
    assert printed.out == "".join(expected) and printed.err.count("12 tokens, ") == 2


def test_the_prompt_is_an_argument_a_file_or_standard_input(checkpoint, generate, tmp_path, monkeypatch):
    prompt, short = "  naïve\r\n\tdef  ", ("--max-new-tokens", 3)
    (tmp_path / "prompt").write_bytes(prompt.encode("utf-8-sig"))  # Windows marks a file so
    expected = generate(checkpoint, "--prompt", prompt, *short)
    assert expected["prompt"] == prompt
    for arguments in (["--prompt-file", tmp_path / "prompt"], [], ["--prompt-file", "-"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(prompt.encode())))
        assert generate(checkpoint, *arguments, *short)["prompt_tokens"] == expected["prompt_tokens"]


def test_the_newest_checkpoint_of_a_run_is_taken(generate, trained, tmp_path):
    for step in (5, 40, 100):
        save(tmp_path / "checkpoint" / f"step-{step}", trained.state_dict())
    for source in (tmp_path, tmp_path / "checkpoint"):
        assert generate(source, "--prompt", "", "--max-new-tokens", 1)["source"].endswith("step-100")


def test_a_text_ends_where_the_context_does(checkpoint, generate):
    n_tokens = len(generate(checkpoint, "--prompt", PROMPT, "--max-new-tokens", 1)["prompt_tokens"])
    for arguments, n_new in (((), 128 - n_tokens), *((("--context", n_tokens + n), n) for n in (3, 130))):
        (sample,) = generate(checkpoint, "--prompt", PROMPT, "--max-new-tokens", 1000, *arguments)["samples"]
        assert len(sample["tokens"]) == n_new and sample["stopped"] == "context"


def take(tokens: list[int], tokenizer: Tokenizer) -> tuple[tool.Sample, list[str]]:
    shown: list[str] = []
    end_ids = frozenset([tokenizer.eos_id])
    return tool.take(iter(tokens), tokenizer, end_ids, seed=0, limit="max_new_tokens", show=shown.append), shown


def test_a_text_ends_with_any_token_of_generation_config(checkpoint, trained, tokenizer, generate, tmp_path):
    greedy = (*GREEDY, "--max-new-tokens", 40)
    (unbroken,) = generate(checkpoint, *greedy)["samples"]
    at = next(n for n, token in enumerate(unbroken["tokens"]) if n > 5 and token not in unbroken["tokens"][:n])
    end = json.dumps({"eos_token_id": [unbroken["tokens"][at]]})
    export = Export(ARGS, "float32", context=1024, **tokenizer.describe_for_export())  # so no --tokenizer is needed
    write_folder(tmp_path / "llama", trained.state_dict().__getitem__, export)
    (tmp_path / "assets").mkdir()
    for name in ("llama", "assets"):
        (tmp_path / name / "generation_config.json").write_text(end)
    shutil.copy(tokenizer.path, tmp_path / "assets")
    for source in ((tmp_path / "llama",), (checkpoint, "--tokenizer", tmp_path / "assets")):
        (sample,) = generate(source[0], *greedy, *source[1:])["samples"]
        assert sample["tokens"] == unbroken["tokens"][:at] and sample["stopped"] == "end_of_document"
        opened = open_source(source[0], tokenizer=str(source[-1]) if source[1:] else None, verify=False)
        assert opened.end_ids == {tokenizer.eos_id, unbroken["tokens"][at]}


@pytest.mark.parametrize("assets", ["bytes", SHIPPED])
def test_characters_are_shown_whole_as_soon_as_their_last_byte_is_there_and_the_token_that_ends_a_text_is_not(assets):
    tokenizer = load_tokenizer(assets)
    text = "aé日\U0001f469\u200d\U0001f467 z"
    ids = tokenizer.encode(text)
    sample, shown = take([*ids, tokenizer.eos_id, *ids], tokenizer)
    assert (sample.tokens, sample.stopped) == (ids, "end_of_document")
    assert len(shown) == len(ids) + 1 and "".join(shown) == sample.text == text
    so_far = b""
    for n_tokens, piece in enumerate(shown[:-1], 1):
        before = so_far.decode(errors="ignore")
        so_far = b"".join(tokenizer.bytes_of_id[token] for token in ids[:n_tokens])
        assert before + piece == so_far.decode(errors="ignore")


def test_bytes_that_make_no_character_are_shown_as_decoding_has_them():
    sample, shown = take([0x61, 0xF0, 0x9F, 0x62, 0xFF, 0xE6, 0x97], load_tokenizer("bytes"))
    assert "".join(shown) == sample.text == "a\ufffdb\ufffd\ufffd"


def test_rows_of_the_head_without_a_token_are_never_drawn(export, generate):
    arguments = ("--tokenizer", "bytes", "--prompt", "x", "--temperature", 50, "--max-new-tokens", 60, "--n", 3)
    for sample in generate(export, *arguments)["samples"]:
        assert set(sample["tokens"]) < set(range(258)) - {257}


# ---------------------------------------------------------------- the end


def test_interrupted_from_the_keyboard_it_ends_quietly(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(tool, "build_model", lambda *_: signal.raise_signal(signal.SIGINT))
    assert tool.main([str(checkpoint), "--prompt", PROMPT]) == 130
    assert capsys.readouterr() == ("", "\n")


def test_when_nobody_reads_on_it_ends_quietly(checkpoint, monkeypatch, capfd):
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patch, open(writer, "w") as out:
        patch.setattr(sys, "stdout", out)
        assert tool.main([str(checkpoint), "--prompt", PROMPT]) == 1
    assert capfd.readouterr().err.count("\n") == 1  # the line that names the source


# ---------------------------------------------------------------- what is refused


def test_a_prompt_that_leaves_no_room_is_refused(checkpoint, export, tokenizer, assert_refused):
    assert_refused(checkpoint, "--prompt", "x " * 200, named=["202 tokens", "training.seq_len = 128", "--context"])
    of_export = ("--tokenizer", SHIPPED, "--prompt", "x " * 5000)
    assert_refused(export, *of_export, named=["max_position_embeddings = "])
    n_tokens = 1 + len(tokenizer.encode(PROMPT))
    assert_refused(checkpoint, "--prompt", PROMPT, "--context", n_tokens, named=[f"--context = {n_tokens}"])
    without_bos = SimpleNamespace(encode=lambda text, bos: [])
    with pytest.raises(tool.SourceError):
        tool.encode_prompt("", SimpleNamespace(tokenizer=without_bos), 10)


def test_a_prompt_that_is_no_text_is_refused(checkpoint, assert_refused, tmp_path, monkeypatch):
    (tmp_path / "prompt").write_bytes(b"abc\xff")
    for arguments, named in (
        (["--prompt-file", tmp_path / "prompt"], [str(tmp_path / "prompt"), "byte 3 is 0xff"]),
        (["--prompt-file", tmp_path / "nowhere"], ["--prompt-file", "nowhere"]),
        (["--prompt", "a\udcff"], ["--prompt", "byte 1 is 0xff"]),  # how Python has an argument that is not UTF-8
    ):
        assert_refused(checkpoint, *arguments, named=named)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert_refused(checkpoint, named=["--prompt"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--temperature", "-1"],
        ["--temperature", "nan"],
        ["--temperature", "inf"],
        ["--temp", "1"],  # nothing may be shortened
        ["--top-p", "1.5"],
        ["--top-k", "2.5"],
        ["--seed", "1" + "0" * 400],
        ["--n", "0"],
        ["--prompt", "a", "--prompt-file", "b"],
    ],
)
def test_arguments_that_mean_nothing_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        tool.main(["nowhere", *arguments])
    assert stopped.value.code == 2 and arguments[-2] in capsys.readouterr().err


def test_a_command_line_without_end_is_refused_in_few_words(capsys):
    for arguments in (["--top-k=1"] * 1001, ["--" + "y" * 9000]):
        with pytest.raises(SystemExit):
            tool.main(["nowhere", *arguments])
        assert len(capsys.readouterr().err) < 3000


def test_a_source_without_a_model_is_refused(assert_refused, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "step-7.tmp").mkdir()
    for source in ("file", "nowhere", ""):
        assert_refused(tmp_path / source, "--prompt", "a", named=[str(tmp_path / source)])
    save(tmp_path / "outputs" / "debug" / "checkpoint" / "step-3", {})
    for source in ("outputs", "outputs/another"):
        assert_refused(tmp_path / source, "--prompt", "a", named=[str(tmp_path / "outputs" / "debug")])
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert_refused(tmp_path, "--prompt", "a", named=["gpt2"])


def test_a_damaged_checkpoint_is_an_error_that_names_the_file(trained, assert_refused, generate, tmp_path):
    (file,) = save(tmp_path / "step-40", trained.state_dict()).glob("*.safetensors")
    flip_bit(file)
    assert_refused(tmp_path, "--prompt", "a", status=1, named=[str(file)])
    generate(tmp_path, "--prompt", "a", "--max-new-tokens", 1, "--no-verify")
    os.truncate(file, file.stat().st_size - 1)
    assert_refused(tmp_path, "--prompt", "a", "--no-verify", status=1, named=[str(file)])


def replace_in(**changes):
    """Change fields of the ModelArgs in the fingerprint."""
    return {"shape": {**asdict(ARGS), **changes}}


SMALL = replace(ARGS, vocab_size=300)
UNUSABLE = {  # change of the weights, of the manifest | what is named
    "missing tensor": (lambda weights: weights.pop("norm.weight"), {}, ["model.norm.weight is missing"]),
    "another size": (lambda weights: weights.update({"norm.weight": torch.ones(1, 128)}), {}, ["weight", "[1, 128]"]),
    "layers without end": (None, replace_in(n_layers=10**12), ["1000000000000 layers"]),
    "no shape": (None, {"shape": None}, ["manifest.json"]),
    "half a shape": (None, {"shape": {"dim": 1}}, ["manifest.json"]),
    "text": (None, replace_in(dim="128"), ["manifest.json"]),
    "negative": (None, replace_in(dim=-1), ["manifest.json"]),
    "beyond all memory": (None, replace_in(dim=2**62), ["manifest.json"]),
    "name of a scaling": (None, replace_in(rope_scaling="llama3"), ["manifest.json"]),
    "unknown scaling": (None, replace_in(rope_scaling={"kind": "yarn", "factor": 2.0}), ["kind", "yarn"]),
    "unknown scores": (
        None,
        replace_in(mixture={"n_experts": 2, "top_k": 1, "expert_ffn_dim": 8, "router_scores": "hash"}),
        ["router_scores", "hash"],
    ),
    "another tokenizer": (None, {"tokenizer": "0" * 64}, [SHIPPED, "--tokenizer"]),
    "too few rows": (
        lambda weights: weights.update(Llama3(SMALL).state_dict()),
        {"shape": asdict(SMALL)},
        ["2304 tokens", "300", "--tokenizer"],
    ),
    "attention that a cache lacks": (None, {"attention": "sliding_window"}, ['"causal", "document"', "in_cache"]),
    "unknown attention": (None, {"attention": "of_another_fork"}, ['model.attention = "of_another_fork"']),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_checkpoint_that_cannot_be_used_is_refused_before_weights_are_loaded(
    trained, assert_refused, tmp_path, monkeypatch, name
):
    monkeypatch.setitem(choices.ATTENTIONS, "sliding_window", choices.AttentionRow(uses_documents=True))
    monkeypatch.setattr(tool, "build_model", None)  # would raise TypeError
    change, about, named = UNUSABLE[name]
    weights = dict(trained.state_dict())
    if change:
        change(weights)
    assert_refused(save(tmp_path / "step-1", weights, **about), "--prompt", "a", named=[str(tmp_path), *named])


def test_another_tokenizer_may_be_named_and_a_folder_without_one_asks_for_it(
    trained, export, assert_refused, generate, tmp_path
):
    foreign = save(tmp_path / "step-1", trained.state_dict(), tokenizer="0" * 64, attention="document")
    generate(foreign, "--prompt", "a", "--max-new-tokens", 1, "--tokenizer", SHIPPED)
    assert_refused(export, "--prompt", "a", named=[str(export), "--tokenizer FOLDER"])


def test_a_source_that_does_not_say_its_context_asks_for_one(export, assert_refused, generate, tmp_path):
    folder = shutil.copytree(export, tmp_path / "llama")
    arguments = ("--tokenizer", SHIPPED, "--prompt", "a", "--max-new-tokens", 1)
    for odd in (None, "4096", -1):
        config = json.loads((export / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": odd}))
        assert_refused(folder, *arguments, named=["--context N"])
        generate(folder, *arguments, "--context", 10)
    for odd in (True, -1, "7"):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": odd}))
        assert_refused(folder, *arguments, "--context", 10, named=["eos_token_id"])


def test_a_model_that_was_trained_further_keeps_its_longer_context_and_its_end_tokens(checkpoint, tokenizer):
    opened = open_checkpoint(checkpoint, verify=False)
    for length, expected in ((4096, (4096, "max_position_embeddings")), (64, (128, "training.seq_len"))):
        config, generation = {"max_position_embeddings": length}, {"eos_token_id": 5}
        opened.manifest.run[IN_MANIFEST] = {"config.json": config, "generation_config.json": generation}
        source = describe_checkpoint(opened, None)
        assert (source.context, source.context_key) == expected and source.end_ids == {5, tokenizer.eos_id}


def test_a_model_that_does_not_fit_into_memory_is_refused_before_it_is_loaded(checkpoint, assert_refused, monkeypatch):
    monkeypatch.setattr(tool, "detect_machine", lambda: Machine("cpu", 1, 4 * count_parameters(ARGS), "small"))
    assert_refused(checkpoint, "--prompt", "a", named=["GiB of cpu memory"])


def test_weights_that_are_not_finite_end_with_an_error(trained, tmp_path, capsys):
    path = save(tmp_path / "step-1", {**trained.state_dict(), "norm.weight": torch.full((128,), torch.nan)})
    assert tool.main([str(path), "--prompt", "a", "--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["error"] in printed.err
