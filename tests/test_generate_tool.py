"""`generate`: from a trained checkpoint the text that transformers writes from the export; refusals; manners."""

import argparse
import inspect
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from torchtitan_lite.checkpoint.hugging_face_export import Export, write_folder
from torchtitan_lite.checkpoint.one_process import CheckpointWriter
from torchtitan_lite.config.flavors import FLAVORS, RopeScaling
from torchtitan_lite.config.hardware import Machine
from torchtitan_lite.config.reader import REPOSITORY
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan_lite.data.tokenizer_files import describe_for_export
from torchtitan_lite.model.llama3 import Llama3, init_parameter
from torchtitan_lite.parallel.initial_weights import initialize_weights
from torchtitan_lite.tools import generate as tool

SHAPE = replace(FLAVORS["debug"], n_layers=2, rope_scaling=RopeScaling(factor=8.0, original_length=64))
SHIPPED = "assets/tokenizer"
PROMPT = "def read(self, n"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(SHIPPED)


@pytest.fixture(scope="module")
def trained(tokenizer) -> Llama3:
    """A model that has seen a little Python: what it writes next is more than a matter of rounding."""
    model = Llama3(SHAPE)
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
    assert loss < 5.5  # 7.7 is what knowing nothing costs
    return model


def save(
    folder: Path, weights: dict[str, Tensor], *, step: int = 40, shape: object = asdict(SHAPE), **facts: object
) -> Path:
    """A checkpoint as a run of 128 tokens with the shipped tokenizer would leave it, with further `facts`."""
    path = folder / f"step-{step}"
    tensors = {f"model.{fqn}": (weight.dtype, tuple(weight.shape)) for fqn, weight in weights.items()}
    config = Config()
    model = replace(config.model, hf_assets_path="assets/tokenizer")  # a run resolves "auto"
    config = replace(config, model=model, training=replace(config.training, seq_len=128))
    facts = {"shape": shape, "tokenizer": load_tokenizer(SHIPPED).identity, **facts}
    with CheckpointWriter(path, step, tensors, facts=facts, run={"config": asdict(config)}) as writer:
        for fqn, weight in weights.items():
            writer.write(f"model.{fqn}", weight)
        writer.commit()
    return path


@pytest.fixture(scope="module")
def checkpoint(trained, tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("run") / "checkpoint", trained.state_dict())


@pytest.fixture(scope="module")
def export(trained, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "llama"
    write_folder(folder, trained.state_dict().__getitem__, Export(SHAPE, "float32"))
    return folder


@pytest.fixture
def generate(capsys):
    """Function: arguments -> what --json prints."""

    def call(source: Path, *args: object) -> dict:
        status = tool.main([str(source), "--json", *map(str, args)])
        printed = capsys.readouterr()
        assert status == 0, printed.err
        return json.loads(printed.out)

    return call


@pytest.fixture
def refuse(capsys):
    """Function: arguments -> exit status and what is said."""

    def call(source: Path, *args: object) -> tuple[int, str]:
        status = tool.main([str(source), *map(str, args)])
        printed = capsys.readouterr()
        assert printed.out == ""
        return status, printed.err

    return call


# ---------------------------------------------------------------- the text


def test_greedy_text_is_that_of_transformers_on_the_exported_model(checkpoint, export, tokenizer, generate):
    prompt = tokenizer.encode(PROMPT, bos=True)
    theirs = LlamaForCausalLM.from_pretrained(export, dtype=torch.float32).generate(
        torch.tensor([prompt]),
        do_sample=False,
        max_new_tokens=100,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.eos_id,
    )
    expected = theirs[0, len(prompt) :].tolist()
    assert len(expected) == 100 and len(set(expected)) > 10  # it does not only repeat itself
    greedy = ("--prompt", PROMPT, "--temperature", 0, "--max-new-tokens", 100)
    for report in (generate(checkpoint, *greedy), generate(export, *greedy, "--tokenizer", SHIPPED)):
        (sample,) = report["samples"]
        assert report["prompt_tokens"] == prompt and sample["tokens"] == expected
        assert sample["text"] == tokenizer.decode(expected) and sample["stopped"] == "max_new_tokens"


def test_each_sample_depends_on_its_own_seed_alone(checkpoint, generate):
    arguments = ("--prompt", PROMPT, "--max-new-tokens", 20, "--temperature", 1.5)
    samples = generate(checkpoint, *arguments, "--n", 3, "--seed", 7)["samples"]
    assert [sample["seed"] for sample in samples] == [7, 8, 9]
    assert len({sample["text"] for sample in samples}) == 3
    for sample in samples:
        (alone,) = generate(checkpoint, *arguments, "--seed", sample["seed"])["samples"]
        assert alone["tokens"] == sample["tokens"]


def test_limits_on_what_is_drawn_reach_the_model(checkpoint, generate):
    arguments = ("--prompt", PROMPT, "--max-new-tokens", 20, "--temperature")
    (greedy,) = generate(checkpoint, *arguments, 0)["samples"]
    for limits in (("--top-k", 1), ("--top-p", 0), ("--top-p", 1e-9)):
        (sample,) = generate(checkpoint, *arguments, 2, *limits)["samples"]
        assert sample["tokens"] == greedy["tokens"]
    (free,) = generate(checkpoint, *arguments, 2)["samples"]
    assert free["tokens"] != greedy["tokens"]


def test_tied_model_has_its_embedding_as_head(tokenizer, generate, tmp_path):
    shape = replace(SHAPE, tie_embeddings=True)
    model = Llama3(shape)
    initialize_weights(model, init_parameter, seed=1)
    write_folder(tmp_path / "llama", model.state_dict().__getitem__, Export(shape, "float32"))
    path = save(tmp_path, dict(model.named_parameters()), shape=asdict(shape))
    with torch.no_grad():
        tokens = torch.tensor([tokenizer.encode(PROMPT, bos=True)])
        expected = int(model(tokens, positions=torch.arange(tokens.shape[1])[None])[0, -1].argmax())
    for source in (path, tmp_path / "llama"):
        arguments = ("--prompt", PROMPT, "--temperature", 0, "--max-new-tokens", 1, "--tokenizer", SHIPPED)
        assert generate(source, *arguments)["samples"][0]["tokens"] == [expected]


def test_prompt_and_text_go_to_standard_output_and_the_rest_to_standard_error(checkpoint, generate, capsys):
    arguments = ["--prompt", PROMPT, "--max-new-tokens", "12", "--n", "2"]
    texts = [sample["text"] for sample in generate(checkpoint, *arguments)["samples"]]
    assert tool.main([str(checkpoint), *arguments]) == 0
    printed = capsys.readouterr()
    heads = [f"--- sample {number} of 2, seed {number - 1} ---\n" for number in (1, 2)]
    assert printed.out == "".join(f"{head}{PROMPT}{text}\n" for head, text in zip(heads, texts, strict=True))
    assert printed.err.count("12 tokens, ") == 2 and "stopped by --max-new-tokens" in printed.err


def test_prompt_comes_as_an_argument_from_a_file_or_from_standard_input(checkpoint, generate, tmp_path, monkeypatch):
    prompt = "  naïve\r\n\tdef  "
    (tmp_path / "prompt").write_bytes(prompt.encode())
    short = ("--max-new-tokens", 3)
    expected = generate(checkpoint, "--prompt", prompt, *short)
    assert expected["prompt"] == prompt
    assert (
        generate(checkpoint, "--prompt-file", tmp_path / "prompt", *short)["samples"][0]["text"]
        == expected["samples"][0]["text"]
    )
    for arguments in ([], ["--prompt-file", "-"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(prompt.encode())))
        report = generate(checkpoint, *arguments, *short)
        assert report["prompt_tokens"] == expected["prompt_tokens"]


def test_newest_checkpoint_of_a_run_is_taken(checkpoint, trained, generate, tmp_path):
    for step in (5, 40, 100):
        save(tmp_path / "checkpoint", trained.state_dict(), step=step)
    (tmp_path / "checkpoint" / "step-200.tmp").mkdir()
    for source in (tmp_path, tmp_path / "checkpoint"):
        assert generate(source, "--prompt", "", "--max-new-tokens", 1)["source"].endswith("step-100")


def test_text_ends_where_the_context_does(checkpoint, generate):
    n_tokens = len(generate(checkpoint, "--prompt", PROMPT, "--max-new-tokens", 1)["prompt_tokens"])
    for arguments, n_new in (
        ((), 128 - n_tokens),
        (("--context", n_tokens + 3), 3),
        (("--context", 200), 200 - n_tokens),
    ):
        (sample,) = generate(checkpoint, "--prompt", PROMPT, "--max-new-tokens", 1000, *arguments)["samples"]
        assert len(sample["tokens"]) == n_new and sample["stopped"] == "context"


def take(tokens: list[int], tokenizer: Tokenizer) -> tuple[tool.Sample, list[str]]:
    shown: list[str] = []
    end_ids = frozenset([tokenizer.eos_id])
    return tool.take(iter(tokens), tokenizer, end_ids, seed=0, at_most="max_new_tokens", show=shown.append), shown


def test_text_ends_with_the_token_that_ends_a_document_which_is_not_shown(tokenizer):
    ids = tokenizer.encode("x = 1\n")
    sample, shown = take([*ids, tokenizer.eos_id, *ids], tokenizer)
    assert "".join(shown) == sample.text == "x = 1\n"
    assert (sample.tokens, sample.stopped) == (ids, "end_of_document")


def test_text_ends_with_any_token_of_generation_config(checkpoint, trained, tokenizer, generate, tmp_path):
    greedy = ("--prompt", PROMPT, "--temperature", 0, "--max-new-tokens", 40)
    (unbroken,) = generate(checkpoint, *greedy)["samples"]
    at = next(n for n, token in enumerate(unbroken["tokens"]) if n > 5 and token not in unbroken["tokens"][:n])
    end = {"eos_token_id": [tokenizer.eos_id, unbroken["tokens"][at]]}
    export = Export(
        SHAPE, "float32", **describe_for_export(tokenizer.vocabulary)
    )  # its tokenizer is found without being named
    write_folder(tmp_path / "llama", trained.state_dict().__getitem__, export)
    (tmp_path / "llama" / "generation_config.json").write_text(json.dumps(end))
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "generation_config.json").write_text(json.dumps(end))
    shutil.copy(tokenizer.vocabulary.path, tmp_path / "assets")
    for source in ((tmp_path / "llama",), (checkpoint, "--tokenizer", tmp_path / "assets")):
        (sample,) = generate(source[0], *greedy, *source[1:])["samples"]
        assert sample["tokens"] == unbroken["tokens"][:at] and sample["stopped"] == "end_of_document"


@pytest.mark.parametrize("assets", ["bytes", SHIPPED])
def test_characters_are_shown_whole_when_their_last_byte_has_come(assets):
    tokenizer = load_tokenizer(assets)
    text = "aé日\U0001f469\u200d\U0001f467 z"
    ids = tokenizer.encode(text)
    sample, shown = take(ids, tokenizer)
    assert len(shown) == len(ids) + 1 and "".join(shown) == sample.text == text
    so_far = b""
    for n_tokens, piece in enumerate(shown[:-1], 1):
        before = so_far.decode(errors="ignore")
        so_far = b"".join(tokenizer.bytes_of_id[token] for token in ids[:n_tokens])
        assert before + piece == so_far.decode(errors="ignore")


def test_bytes_that_make_no_character_are_shown_as_decoding_has_them():
    tokenizer = load_tokenizer("bytes")
    ids = [0x61, 0xF0, 0x9F, 0x62, 0xFF, 0xE6, 0x97]
    sample, shown = take(ids, tokenizer)
    assert "".join(shown) == sample.text == tokenizer.decode(ids) == "a\ufffdb\ufffd\ufffd"


def test_rows_of_the_head_without_a_token_are_never_drawn(export, generate):
    arguments = ("--tokenizer", "bytes", "--prompt", "x", "--temperature", 50, "--max-new-tokens", 60, "--n", 3)
    for sample in generate(export, *arguments)["samples"]:
        assert set(sample["tokens"]) < set(range(258)) - {257}


def test_control_characters_cannot_command_a_terminal(monkeypatch):
    for on_terminal, expected in ((True, "a\\x1b[2J\\x07\\x9b\n\té日\u200d\U0001f467\\r"), (False, None)):
        out = io.StringIO()
        monkeypatch.setattr(out, "isatty", lambda answer=on_terminal: answer)
        monkeypatch.setattr(sys, "stdout", out)
        text = "a\x1b[2J\x07\x9b\n\té日\u200d\U0001f467\r"
        tool.write(text)
        assert out.getvalue() == (expected or text)


# ---------------------------------------------------------------- the end


def test_interrupted_from_the_keyboard_it_ends_quietly(checkpoint):
    arguments = ["--prompt", PROMPT, "--context", "20000", "--max-new-tokens", "20000"]
    command = [sys.executable, "-m", "torchtitan_lite", "generate", str(checkpoint), *arguments]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        begun = process.stdout.read(len(PROMPT) + 20)  # it is at work
        process.send_signal(signal.SIGINT)
        rest, said = process.communicate()
    assert process.returncode == 1
    assert begun.startswith(PROMPT.encode()) and (begun + rest).decode()
    assert said.decode().splitlines() == [
        f"{checkpoint} on cpu, {len(load_tokenizer(SHIPPED).encode(PROMPT)) + 1} tokens of prompt",
        "",
    ]


def test_when_nobody_reads_on_it_ends_quietly(checkpoint, monkeypatch, capfd):
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patch, open(writer, "w") as out:
        patch.setattr(sys, "stdout", out)
        assert tool.main([str(checkpoint), "--prompt", PROMPT]) == 1
    assert capfd.readouterr().err.count("\n") == 1  # the line that names the source


# ---------------------------------------------------------------- what is refused


def test_prompt_that_leaves_no_room_is_refused_by_name(checkpoint, export, refuse):
    status, said = refuse(checkpoint, "--prompt", "x " * 200)
    assert status == 2
    for part in ("202 tokens", "training.seq_len = 128", "--context"):
        assert part in said
    status, said = refuse(export, "--tokenizer", SHIPPED, "--prompt", "x " * 5000)
    assert status == 2 and "max_position_embeddings = " in said
    n_tokens = 1 + len(load_tokenizer(SHIPPED).encode(PROMPT))
    status, said = refuse(checkpoint, "--prompt", PROMPT, "--context", n_tokens)
    assert status == 2 and f"--context = {n_tokens} leaves no room" in said


def test_prompt_that_is_no_text_is_refused(checkpoint, refuse, tmp_path, monkeypatch):
    (tmp_path / "prompt").write_bytes(b"abc\xff")
    status, said = refuse(checkpoint, "--prompt-file", tmp_path / "prompt")
    assert status == 2 and f"{tmp_path / 'prompt'} is not UTF-8: byte 3 is 0xff" in said
    status, said = refuse(checkpoint, "--prompt-file", tmp_path / "nowhere")
    assert status == 2 and "nowhere cannot be read" in said
    status, said = refuse(checkpoint, "--prompt", "a\udcff")  # how Python has an argument that is not UTF-8
    assert status == 2 and "--prompt is not UTF-8: byte 1 is 0xff" in said
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    status, said = refuse(checkpoint)
    assert status == 2 and "There is no prompt" in said


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--temperature", "-1"], "'-1' is not a number of 0 or more"),
        (["--temperature", "nan"], "'nan' is not a number of 0 or more"),
        (["--temperature", "inf"], "'inf' is not a number"),
        (["--top-p", "1.5"], "'1.5' is not a number from 0 to 1"),
        (["--top-k", "2.5"], "'2.5' is not a whole number of 0 or more"),
        (["--seed", "1" + "0" * 400], "is not a whole number from 0 to"),
        (["--n", "0"], "'0' is not a whole number of 1 or more"),
        (["--prompt", "a", "--prompt-file", "b"], "not allowed with"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(arguments, named, capsys):
    with pytest.raises(SystemExit) as stopped:
        tool.main(["nowhere", *arguments])
    assert stopped.value.code == 2 and named in capsys.readouterr().err


def test_source_without_a_model_is_refused(refuse, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "step-7.tmp").mkdir()
    for source, said in (("file", "is not a folder"), ("nowhere", "is not a folder"), ("", "holds no checkpoint")):
        status, error = refuse(tmp_path / source, "--prompt", "a")
        assert status == 2 and f"{tmp_path / source} {said}" in error
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    status, error = refuse(tmp_path, "--prompt", "a")
    assert status == 2 and "gpt2" in error


def test_damaged_checkpoint_is_an_error_that_names_the_file(checkpoint, trained, refuse, generate, tmp_path):
    damaged = save(tmp_path, trained.state_dict())
    (file,) = damaged.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    status, said = refuse(damaged, "--prompt", "a")
    assert status == 1 and str(file) in said
    generate(damaged, "--prompt", "a", "--max-new-tokens", 1, "--no-verify")
    file.write_bytes(content[:-1])
    assert refuse(damaged, "--prompt", "a", "--no-verify")[0] == 1


def test_checkpoint_of_another_shape_than_it_says_is_refused(trained, refuse, tmp_path):
    weights = trained.state_dict()
    norm = weights.pop("norm.weight")
    status, said = refuse(save(tmp_path, weights), "--prompt", "a")
    assert status == 2 and "model.norm.weight is missing" in said
    status, said = refuse(save(tmp_path, {**weights, "norm.weight": norm[None, :]}, step=41), "--prompt", "a")
    assert status == 2 and "model.norm.weight has the shape [1, 128]" in said
    deep = save(tmp_path, trained.state_dict(), step=42, shape={**asdict(SHAPE), "n_layers": 10**12})
    status, said = refuse(deep, "--prompt", "a")
    assert status == 2 and "calls for 1000000000000 layers" in said


@pytest.mark.parametrize(
    "shape",
    [
        None,
        {},
        {"dim": 1},
        {**asdict(SHAPE), "dim": "128"},
        {**asdict(SHAPE), "dim": -1},
        {**asdict(SHAPE), "dim": 2**62},
        {**asdict(SHAPE), "norm_eps": "1e-5"},
        {**asdict(SHAPE), "rope_scaling": "llama3"},
    ],
    ids=str,
)
def test_manifest_that_describes_no_model_is_refused(trained, shape, refuse, tmp_path):
    status, said = refuse(save(tmp_path, trained.state_dict(), shape=shape), "--prompt", "a")
    assert status == 2 and str(tmp_path) in said and "manifest.json" in said


def test_another_tokenizer_than_in_training_is_refused_unless_it_is_asked_for(trained, refuse, generate, tmp_path):
    foreign = save(tmp_path, trained.state_dict(), tokenizer="0" * 64)
    status, said = refuse(foreign, "--prompt", "a")
    assert status == 2 and "assets/tokenizer holds another tokenizer" in said and "--tokenizer" in said
    generate(foreign, "--prompt", "a", "--max-new-tokens", 1, "--tokenizer", SHIPPED)


def test_source_that_does_not_say_its_context_asks_for_one(export, refuse, generate, tmp_path):
    folder = shutil.copytree(export, tmp_path / "llama")
    for odd in (None, "4096", -1, []):
        config = json.loads((export / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": odd}))
        arguments = ("--tokenizer", SHIPPED, "--prompt", "a", "--max-new-tokens", 1)
        status, said = refuse(folder, *arguments)
        assert status == 2 and "Give --context N" in said
        generate(folder, *arguments, "--context", 10)


def test_model_without_its_tokenizer_asks_for_one(export, refuse):
    status, said = refuse(export, "--prompt", "a")
    assert status == 2 and str(export) in said and "--tokenizer FOLDER" in said


def test_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path, refuse):
    shape = replace(SHAPE, vocab_size=300)
    model = Llama3(shape)
    status, said = refuse(save(tmp_path, model.state_dict(), shape=asdict(shape)), "--prompt", "a")
    assert status == 2 and "has 2304 tokens, and the model 300" in said


def test_model_that_does_not_fit_into_memory_is_refused_before_it_is_loaded(checkpoint, refuse, monkeypatch):
    monkeypatch.setattr(tool, "detect_machine", lambda: Machine("cpu", 1, 2**20, "small"))
    status, said = refuse(checkpoint, "--prompt", "a")
    assert status == 2 and "0.0 GiB of cpu memory" in said


def test_weights_that_are_not_finite_end_with_an_error(trained, refuse, tmp_path, capsys):
    weights = {**trained.state_dict(), "norm.weight": torch.full((128,), torch.nan)}
    path = save(tmp_path, weights)
    assert tool.main([str(path), "--prompt", "a", "--json"]) == 1
    printed = capsys.readouterr()
    assert "logits are not finite" in json.loads(printed.out)["error"] and "logits are not finite" in printed.err
