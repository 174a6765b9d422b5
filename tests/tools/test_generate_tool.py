"""Test `generate`: end of a text, conversations, display and refusals. test_fine_tuning.py compares texts with
transformers."""

import io
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint
from folders import dump_json
from marks import each_row, read_lines
from test_hugging_face import edit_json
from test_model import build_ours
from test_tokenizers import make_word_piece, write
from tokenizers import Tokenizer as HuggingFace
from torch import Tensor

from torchtitan_lite.__main__ import main
from torchtitan_lite.config.model_rows import RopeScaling
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.tokenizer import Tokenizer, load_tokenizer
from torchtitan_lite.models.llama3.modules import Llama3
from torchtitan_lite.models.llama3.table import FLAVORS
from torchtitan_lite.tools import generate as tool
from torchtitan_lite.tools.corpora.chat import read_chat_format
from torchtitan_lite.tools.verify.reduction import override

ROPE_SCALING = RopeScaling(factor=8.0, original_length=64)
ARGS = replace(FLAVORS["debug"], n_layers=2, rope_scaling=ROPE_SCALING)
SHIPPED = "assets/tokenizer"
PROMPT = "def read(self, n"
GREEDY = ("--prompt", PROMPT, "--temperature", 0)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(SHIPPED)


@pytest.fixture(scope="module")
def model() -> Llama3:
    """Make a model with large weights: the next token depends on all earlier tokens, but not on rounding."""
    model = build_ours(ARGS)
    for parameter in model.parameters():
        parameter.data *= 3
    return model


def save(
    path: Path,
    weights: dict[str, Tensor],
    *,
    attention: str = "causal",
    assets: str = SHIPPED,
    corpora: Sequence[str] = (),
    **fingerprint: object,
) -> Path:
    """Save a checkpoint as a run with seq_len = 128 does. `fingerprint`: further entries of the fingerprint."""
    keys = {
        "model.hf_assets_path": assets,
        "model.attention": attention,  # a run would write the resolved value of "auto"
        "training.seq_len": 128,
        "training.dataset": corpora,
    }
    named = {f"model.{fqn}": weight for fqn, weight in weights.items()}
    fingerprint = {"shape": asdict(ARGS)} | fingerprint
    return write_checkpoint(path, override(Config(), keys), named, **fingerprint)


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("run") / "step-40", model.state_dict())


@pytest.fixture(scope="module")
def export(checkpoint, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "llama"
    assert main(["convert", str(checkpoint), str(folder)]) == 0
    return folder


@pytest.fixture
def generate(run_json):
    return partial(run_json, "generate")


# ---------------------------------------------------------------- the text


def test_the_text_depends_on_the_seed_and_the_prompt_may_be_standard_input(
    checkpoint, generate, monkeypatch, run_tool
):
    prompt = "  naïve\n\tdef  "
    arguments = "--max-new-tokens 12 --temperature 1.5 --seed".split()
    first, second = (generate(checkpoint, "--prompt", prompt, *arguments, seed) for seed in (7, 8))
    assert first["text"] != second["text"] and first["stopped"] == "max_new_tokens"
    for content, expected in (
        (prompt.encode(), f"{prompt}{second['text']}\n"),
        (b"caf\xe9", "Standard input is not UTF-8"),
    ):
        stdin = io.TextIOWrapper(io.BytesIO(content), errors="surrogateescape")
        monkeypatch.setattr(sys, "stdin", stdin)
        status = 0 if content == prompt.encode() else 2
        said = run_tool("generate", str(checkpoint), *arguments, "8", status=status)
        assert said.startswith(expected)


def test_a_text_ends_with_the_context_or_with_any_end_token_of_generation_config(
    checkpoint, export, tokenizer, generate, tmp_path, capsys
):
    n_tokens = len(tokenizer.encode(PROMPT, bos=True))
    report = generate(checkpoint, *GREEDY, "--max-new-tokens", 1000)
    assert len(report["tokens"]) == 128 - n_tokens
    assert report["stopped"] == "context"
    tokens = generate(checkpoint, *GREEDY, "--max-new-tokens", 40)["tokens"]
    at = 6
    while tokens[at] in tokens[:at]:
        at += 1
    folder = shutil.copytree(export, tmp_path / "llama")
    outside = 10**6
    ends = {"eos_token_id": [tokens[at], outside], "repetition_penalty": 1.3, "top_p": None}
    dump_json(folder / "generation_config.json", ends)
    report = generate(folder, *GREEDY, "--max-new-tokens", 40)
    assert report["tokens"] == tokens[:at]
    assert report["stopped"] == "end_of_document"
    assert main(["generate", str(folder), "--prompt", "a", "--max-new-tokens", "1"]) == 0
    printed = capsys.readouterr().err
    assert f"eos_token_id = {outside}" in printed
    assert "repetition_penalty = 1.3" in printed and "top_p" not in printed


@each_row("assets", ["bytes", SHIPPED])
def test_characters_are_shown_as_soon_as_their_last_byte_arrives(assets):
    tokenizer = load_tokenizer(assets)
    text = "aé日\U0001f469\u200d\U0001f467 z"
    shown = []
    ids = tokenizer.encode(text)
    ends = frozenset([tokenizer.eos_id])
    tokens = iter([*ids, tokenizer.eos_id, *ids])
    assert tool.take_tokens(tokens, tokenizer, ends, shown.append) == (ids, text)
    assert "".join(shown) == text
    for n_tokens in range(1, len(ids) + 1):
        so_far = b"".join(tokenizer.bytes_of_id[token] for token in ids[:n_tokens])
        assert "".join(shown[:n_tokens]) == so_far.decode(errors="ignore")


def test_text_after_a_prompt_has_the_same_spaces_as_with_the_decoder_of_tokenizers(tmp_path):
    content = make_word_piece()
    oracle = HuggingFace.from_str(json.dumps(content))
    tokenizer = load_tokenizer(write(tmp_path, content))
    prompt, more = "Return the", "text of tokenizers"
    before, ids = tokenizer.encode(prompt), tokenizer.encode(more)
    shown = []
    ends = frozenset([tokenizer.eos_id])
    taken, text = tool.take_tokens(
        iter([*ids, tokenizer.eos_id]), tokenizer, ends, shown.append, before
    )
    assert taken == ids and text == "".join(shown)
    assert oracle.decode(before) + text == oracle.decode([*before, *ids])


def test_rows_of_the_head_without_a_token_are_never_drawn(export, generate):
    arguments = "--tokenizer bytes --prompt x --temperature 50 --max-new-tokens 90"
    tokens = generate(export, *arguments.split())["tokens"]
    assert set(tokens) < set(range(258)) - {257}


# ---------------------------------------------------------------- conversations


def test_chat_encodes_a_message_as_transformers_does_and_stops_at_the_templates_end_token(
    export, tokenizer, generate
):
    text = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    text += "<|start_header_id|>assistant<|end_header_id|>\n\n"
    expected, _ = tokenizer.encode_special(text)
    for prompt in ("Hi", text):
        report = generate(export, "--chat", "--prompt", prompt, "--max-new-tokens", 1)
        assert report["prompt_tokens"] == expected
    assert read_chat_format(tokenizer).end == "<|eot_id|>"


def test_without_chat_special_tokens_in_a_prompt_are_text_and_a_notice_says_so(export, capsys):
    for prompt, is_named in (("a<|eot_id|>b", True), ("ab", False)):
        assert main(["generate", str(export), "--prompt", prompt, "--max-new-tokens", "1"]) == 0
        assert ("<|eot_id|>" in capsys.readouterr().err) == is_named


def test_a_conversation_gives_the_same_answers_as_a_single_prompt_with_all_its_messages(
    export, tokenizer, monkeypatch, capsys, run_tool
):
    lines = ["and then?", "Hi"]

    def read_line(prompt: str) -> str:
        if not lines:
            raise EOFError
        return lines.pop()

    monkeypatch.setattr("builtins.input", read_line)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    arguments = f"generate {export} --max-new-tokens 5 --temperature 0 --chat".split()
    assert main(arguments) == 0
    printed = capsys.readouterr()
    first, second = printed.out.split("\n", 1)
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "and then?"},
    ]
    chat = read_chat_format(tokenizer)
    text, _ = chat.write({"messages": messages, "add_generation_prompt": True})
    assert run_tool(*arguments, "--prompt", text) == second


# ---------------------------------------------------------------- what is refused or has no effect


# option | words of the notice
WITH_NOTICES = """
--tokenizer=bytes | bytes is not the tokenizer
--top-k=1 | no effect
--top-p=0 | no effect
--top-k=1000000 | no effect
"""


def test_a_wrong_tokenizer_and_options_without_effect_cause_a_notice(export, capsys):
    given = ["generate", str(export), "--prompt", "a", "--max-new-tokens", "1"]
    for option, words in read_lines(WITH_NOTICES):
        assert main([*given, option]) == 0
        assert words in capsys.readouterr().err


# model | prompt | words of the refusal
WRONG = f"""
ours | {"x " * 200}. | has 202 tokens
absent | a | /absent
step-1 | a | {SHIPPED}
step-2 | a | 'of_another_fork' has no row
bare | a | --tokenizer
llama | a | max_position_embeddings
"""


def test_wrong_input_is_refused_before_weights_are_loaded(
    model, checkpoint, export, tmp_path, run_tool, monkeypatch
):
    monkeypatch.setattr(tool, "build_model", None)  # building a model would raise TypeError
    (tmp_path / "ours").symlink_to(checkpoint)
    weights = model.state_dict()
    save(tmp_path / "step-1", weights, tokenizer="0" * 64)
    save(tmp_path / "step-2", weights, attention="of_another_fork")
    no_tokenizer = shutil.ignore_patterns("tokenizer*")
    shutil.copytree(export, tmp_path / "bare", ignore=no_tokenizer)
    llama = shutil.copytree(export, tmp_path / "llama")
    edit_json(llama / "config.json", max_position_embeddings=None)
    for source, prompt, named in read_lines(WRONG):
        said = run_tool("generate", tmp_path / source, "--prompt", prompt, status=2)
        assert named in said
    other = tmp_path / "step-2"
    for words in (("convert", other, tmp_path / "hf"), ("eval", other, "--data", __file__)):
        said = run_tool(*words, status=2)
        assert "has no row" in said


def test_generate_ends_with_status_1_if_the_weights_have_diverged(model, tmp_path, run_tool):
    nan = {"norm.weight": torch.full((128,), torch.nan)}
    path = save(tmp_path / "step-41", model.state_dict() | nan)
    assert "not finite" in run_tool("generate", str(path), "--prompt", "a", status=1)
