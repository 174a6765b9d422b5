"""`prepare --chat`: ids and targets against transformers and by hand, through the corpus to the batch."""

import json
import random
import sys
from pathlib import Path

import pytest
import torch
from test_tokenizers import SHIPPED, train_bpe, write
from transformers import PreTrainedTokenizerFast

from torchtitan_lite.__main__ import main
from torchtitan_lite.data.corpus import open_corpus
from torchtitan_lite.data.dataset import SampleReader
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.model.head import IGNORE_INDEX
from torchtitan_lite.tools.corpora.chat import read_chat_format

TALK = [
    {"role": "system", "content": " Be brief.\n"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "naïve 😀?"},
    {"role": "assistant", "content": "é, def f(x):\n    return 😀"},
]
CHATML = (  # the marks are for transformers alone, which finds targets by them
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{%- else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def draw_talks(n: int) -> list[list[dict]]:
    draw, talks = random.Random(0), [TALK]
    pieces = ["alpha", " beta", "\n", "\n\n  ", "é", "😀", "日本", "x = 1", "'ll", " ", "e\u0301", "12345"]
    for _ in range(n):
        talk = [{"role": "system", "content": "sys"}] * draw.randrange(2)
        for _ in range(draw.randrange(1, 4)):
            texts = ["a" + "".join(draw.choices(pieces, k=draw.randrange(1, 12))) for _ in range(2)]
            talk += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
        talks.append(talk)
    return talks


def encode(tokenizer, talk) -> tuple[list[int], list[int]]:
    text, turns = read_chat_format(tokenizer).render(talk)
    ids, starts = tokenizer.encode_special(text)
    return ids, [int(any(start in turn for turn in turns)) for start in starts]


def test_without_a_template_it_is_llama_3s_format_and_the_targets_are_the_assistants_text_and_its_end():
    tokenizer = load_tokenizer(SHIPPED)
    begin, start, end, turn = (
        tokenizer.special[f"<|{name}|>"] for name in ("begin_of_text", "start_header_id", "end_header_id", "eot_id")
    )
    ids, targets = [begin], [0]
    for message in TALK:
        head = [start, *tokenizer.encode(message["role"]), end, *tokenizer.encode("\n\n")]
        body = [*tokenizer.encode(message["content"].strip()), turn]
        ids += head + body
        targets += [0] * len(head) + [int(message["role"] == "assistant")] * len(body)
    assert encode(tokenizer, TALK) == (ids, targets)


@pytest.mark.parametrize("kind", ["GPT-2", "Llama 3", "Qwen"])
def test_ids_and_targets_are_those_of_transformers(tmp_path, kind):
    bpe = train_bpe(kind)
    bpe.add_special_tokens(["<|im_start|>"])
    write(tmp_path, bpe, "<|im_end|>")
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    oracle = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), chat_template=CHATML)
    tokenizer = load_tokenizer(tmp_path)
    for talk in draw_talks(30):
        right = oracle.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
        assert encode(tokenizer, talk) == (right["input_ids"], right["assistant_masks"])


def write_talks(path: Path, talks: list) -> list[str]:
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return ["prepare", str(path), "--chat", "--processes", "1", "--out", str(path.with_name("out"))]


REFUSED = {  # what is wrong -> the conversation, a word of the reason
    "text": ("hello", "list of messages"),
    "null content": ([TALK[0], {"role": "assistant", "content": None}], "a content"),
    "no assistant": (TALK[:2], "no assistant turn"),
    "a special token": ([TALK[1], {"role": "assistant", "content": "no<|eot_id|>yes"}], "<|eot_id|>"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_conversation_is_named_with_its_row_and_left_out_with_skip_bad(tmp_path, capsys, case):
    messages, why = REFUSED[case]
    command = write_talks(tmp_path / "in.jsonl", [TALK, messages])
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "in.jsonl, row 2" in error and why in error and not (tmp_path / "out").exists()
    assert main([*command, "--skip-bad", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bad_rows"] == 1 and found["splits"]["train"]["n_targets"] == sum(
        encode(load_tokenizer(SHIPPED), TALK)[1]
    )


TEMPLATES = {  # a template -> a word of what is said about it
    "{% for message in messages %}{{ message.content }}{% if loop.last %}!{% endif %}{% endfor %}": "messages follow",
    "{{ raise_exception('no system message') }}": "no system message",
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{% if %}": "chat template",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_that_does_not_write_the_conversation_says_why(template, tmp_path, capsys):
    (tmp_path / "tokenizer.model").write_bytes((SHIPPED / "tokenizer.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert main([*write_talks(tmp_path / "in.jsonl", [TALK]), "--tokenizer", str(tmp_path)]) == 2
    assert TEMPLATES[template] in capsys.readouterr().err


def test_without_jinja2_the_extra_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(write_talks(tmp_path / "in.jsonl", [TALK])) == 2 and "`data`" in capsys.readouterr().err


def test_every_token_of_the_assistant_is_a_target_once_and_no_other_is(tmp_path):
    talks, tokenizer = draw_talks(40), load_tokenizer(SHIPPED)
    assert main([*write_talks(tmp_path / "in.jsonl", talks), "--validation-share", "0"]) == 0
    pairs = [pair for talk in talks for pair in zip(*encode(tokenizer, talk), strict=True)]
    reader = SampleReader([open_corpus(str(tmp_path / "out"), tokenizer, tmp_path)], 64, 2304)
    (n,) = reader.n_samples
    batch = reader.read(torch.zeros(n, dtype=torch.int64), torch.arange(n))
    expected = [id if is_target else IGNORE_INDEX for id, is_target in pairs[1:]]
    assert batch.targets.flatten()[: len(expected)].tolist() == expected
    assert batch.tokens.flatten()[: len(expected)].tolist() == [id for id, _ in pairs[:-1]]
