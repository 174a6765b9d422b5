"""Rows of published data sets: ids as transformers gives them, targets, fields that are not used, and refusals."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from test_tokenizers import train_bpe, write
from transformers import AutoTokenizer

from torchtitan_lite.__main__ import main
from torchtitan_lite.tools.corpora.prepare import Document, PrepareSettings, encode_row
from torchtitan_lite.tools.corpora.text_files import PreparationError, Row, read_file

# Reads tools, tool calls, tool_call_id, thoughts, a date, and a switch. Cannot write a conversation without messages.
TEMPLATE = (
    "{% if messages[0].role != 'system' %}{{ date_string }}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}"
    "{% if enable_thinking is false %}/no_think\n{% endif %}"
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
    "{{ message.tool_call_id }}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
END = "<|im_end|>"


def user(text: str, **keys: object) -> dict:
    return {"role": "user", "content": text, **keys}


def answer(text: str, **keys: object) -> dict:
    return {"role": "assistant", "content": text, **keys}


def system(text: str) -> dict:
    return {"role": "system", "content": text}


def share(*turns: tuple[str, object]) -> dict:
    return {"conversations": [{"from": name, "value": value} for name, value in turns]}


def call(arguments: object, **keys: object) -> dict:
    """An assistant's message with a tool call and no text."""
    function = {"name": "f", "arguments": arguments}
    calls = [{"type": "function", "function": function, **keys}]
    return {"role": "assistant", "tool_calls": calls}


TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"default": None, "enum": ["a", None]}},
}
TALK = [user("2+2?"), answer("4")]
ALPACA = {"instruction": "2+2?", "input": "", "output": "4"}
CALLED = [user("?"), call({"a": 1, "b": None}), {"role": "tool", "content": "5"}, answer("6")]
FUNCTION = '{"name": "f", "arguments": {"a": 1, "b": null}}'
CALL = f"<call>{FUNCTION}</call>"
COMPOSED = "a line\n\u0303b e\u0301"  # NFC joins the last letter and its accent alone

# row -> messages and variables for apply_chat_template, targets, columns and keys that are not used
DEFAULTS = ({"messages": TALK}, ["4"], [])
# What is left out at the end of a row is as in DEFAULTS.
RIGHT: dict[str, tuple] = {
    "an id, a source, pairs of preferences": (
        {"id": 0, "source": "web", "chosen": [1], "rejected": [2], "ok": False, "messages": TALK},
        {"messages": TALK},
        ["4"],
        ["column id", "column source", "column chosen", "column rejected", "column ok"],
    ),
    "both lists": (
        {"messages": TALK, "conversations": TALK[:1], "chat_template": "x"},
        {"messages": TALK},
        ["4"],
        ["column conversations", "column chat_template"],
    ),
    "an argument of transformers": (
        {"messages": TALK, "return_assistant_tokens_mask": True},
        {"messages": TALK},
        ["4"],
        ["column return_assistant_tokens_mask"],
    ),
    "empty columns": (
        {"messages": TALK, "id": "", "images": [], "history": None, "x": {}, "tools": ""},
    ),
    "a column for the system beside messages": (
        {"system": "S", "messages": TALK},
        {"messages": [system("S"), *TALK]},
    ),
    "variables": (
        {"messages": TALK, "date_string": "May", "enable_thinking": False, "weight": 0},
        {"messages": TALK, "date_string": "May", "enable_thinking": False},
        ["4"],
        ["column weight"],
    ),
    "variables in chat_template_kwargs": (
        {"messages": TALK, "chat_template_kwargs": {"date_string": "May", "x": None}},
        {"messages": TALK, "date_string": "May"},
    ),
    "tools": (
        {"messages": TALK, "tools": [TOOL]},
        {"messages": TALK, "tools": [TOOL]},
    ),
    "tools as a text": (
        {"messages": TALK, "tools": f" {json.dumps([TOOL])}\n"},
        {"messages": TALK, "tools": [TOOL]},
    ),
    "no tools as a text": (
        {"messages": TALK, "tools": "[]"},
        {"messages": TALK, "tools": []},
    ),
    "tools of white space": ({"messages": TALK, "tools": " "},),
    "a null argument": (
        {"messages": CALLED},
        {"messages": CALLED},
        [CALL, "6"],
    ),
    "arguments as a text": (
        {"messages": [user("?"), call('{"b": null}')]},
        {"messages": [user("?"), call('{"b": null}')]},
        ['<call>{"name": "f", "arguments": "{\\"b\\": null}"}</call>'],
    ),
    "tool calls as a text": (
        {"messages": [user("?"), answer("", tool_calls=json.dumps(CALLED[1]["tool_calls"]))]},
        {"messages": [user("?"), call({"a": 1, "b": None})]},
        [CALL],
    ),
    "null keys of a message": (
        {"messages": [user("?", name=None), {**call({"a": 1, "b": None}), "content": None}]},
        {"messages": [user("?"), call({"a": 1, "b": None})]},
        [CALL],
    ),
    "keys of a message": (
        {
            "messages": [
                user("?", name="Al"),
                call({"a": 1, "b": None}, id="c1"),
                {"role": "tool", "content": "5", "tool_call_id": "c1", "name": "f"},
                answer("6", reasoning_content="five, one", id="m4"),
            ]
        },
        {
            "messages": [
                user("?"),
                call({"a": 1, "b": None}),
                {"role": "tool", "content": "5", "tool_call_id": "c1"},
                answer("6", reasoning_content="five, one"),
            ]
        },
        [CALL, "<think>five, one</think>6"],
        ["messages name", "messages id"],
    ),
    "ShareGPT": (
        share(("system", "S"), ("human", "2+2?"), ("gpt", "4")),
        {"messages": [system("S"), *TALK]},
    ),
    "ShareGPT of other models": (
        share(
            ("user", "a"),
            ("chatgpt", "b"),
            ("human", "c"),
            ("bing", "d"),
            ("user", "e"),
            ("bard", "f"),
        ),
        {"messages": [user("a"), answer("b"), user("c"), answer("d"), user("e"), answer("f")]},
        ["b", "d", "f"],
    ),
    "ShareGPT's function_call": (
        share(("human", "?"), ("function_call", FUNCTION), ("observation", "5"), ("gpt", "6")),
        {"messages": CALLED},
        [CALL, "6"],
    ),
    "ms-swift's tool_call": (
        {
            "messages": [
                user("?"),
                {"role": "tool_call", "content": f"[{FUNCTION}, {FUNCTION}]"},
                {"role": "tool_response", "content": "5"},
                answer("6"),
            ]
        },
        {
            "messages": [
                user("?"),
                {**CALLED[1], "tool_calls": CALLED[1]["tool_calls"] * 2},
                *CALLED[2:],
            ]
        },
        [CALL + CALL, "6"],
    ),
    "ShareGPT with other keys": (
        {"conversations": [{"from": "human", "content": "2+2?"}, {"role": "gpt", "value": "4"}]},
    ),
    "two contents": (
        {"messages": [user("2+2?", value="3+3?"), answer("4")]},
        {"messages": TALK},
        ["4"],
        ["messages value"],
    ),
    "role model": ({"messages": [user("2+2?"), {"role": "model", "content": "4"}]},),
    "role developer": (
        {"messages": [{"role": "developer", "content": "S"}, *TALK]},
        {"messages": [{"role": "developer", "content": "S"}, *TALK]},
    ),
    "weights, losses and trains": (
        {
            "messages": [
                user("a", weight=0),
                answer("b", loss=False),
                user("c", train=False),
                answer("d", weight=1.0),
                answer("e", weight=0.0),
                answer("f", train=False),
                answer("g", loss=True),
            ]
        },
        {
            "messages": [
                user("a"),
                answer("b"),
                user("c"),
                answer("d"),
                answer("e"),
                answer("f"),
                answer("g"),
            ]
        },
        ["d", "g"],
    ),
    "ShareGPT's weights, some null": (
        {
            "conversations": [
                {"from": "human", "value": "a", "weight": None},
                {"from": "gpt", "value": "b", "weight": 0},
                {"from": "gpt", "value": "c", "weight": None},
            ]
        },
        {"messages": [user("a"), answer("b"), answer("c")]},
        ["c"],
    ),
    "Alpaca": (ALPACA,),
    "Alpaca of other columns": (
        {**ALPACA, "text": "Below is", "prompt": "p", "system": "", "history": []},
        {"messages": TALK},
        ["4"],
        ["column text", "column prompt"],
    ),
    "Alpaca with all columns": (
        {
            "system": "S",
            "history": [["a", "b"], ["c", "d"]],
            "instruction": "e",
            "input": "f",
            "output": "g",
        },
        {
            "messages": [
                system("S"),
                *[user("a"), answer("b"), user("c"), answer("d")],
                *[user("e\n\nf"), answer("g")],
            ]
        },
        ["b", "d", "g"],
    ),
    "history as a text": (
        {**ALPACA, "history": '[["a", "b"]]'},
        {"messages": [user("a"), answer("b"), *TALK]},
        ["b", "4"],
    ),
    "prompt and completion": (
        {"prompt": "2+2?", "completion": "4", "history": [["a", "b"]], "label": True},
        {"messages": [user("a"), answer("b"), *TALK]},
        ["b", "4"],
        ["column label"],
    ),
    "an answer in the prompt": (
        {"prompt": [user("a"), answer("b"), user("c")], "completion": [answer("d")]},
        {"messages": [user("a"), answer("b"), user("c"), answer("d")]},
        ["d"],
    ),
    "a content of texts": (
        {"messages": [user(["2+", "2?"]), answer([{"type": "text", "text": "4"}, {"text": ""}])]},
    ),
    "a table's text": ({"messages": json.dumps(TALK)},),
    "accents after escapes": (
        {"messages": [user(COMPOSED), answer(f'"\u0303{COMPOSED}\\\u0303\t\u0303')]},
        {"messages": [user(COMPOSED), answer(f'"\u0303{COMPOSED}\\\u0303\t\u0303')]},
        ['"\u0303a line\n\u0303b é\\\u0303\t\u0303'],
    ),
    "accents after escapes in arguments": (
        {"messages": [user("e\u0301"), call({"e\u0301": "\n\u0303"}), answer("\u0301e")]},
        {"messages": [user("e\u0301"), call({"e\u0301": "\n\u0303"}), answer("\u0301e")]},
        ['<call>{"name": "f", "arguments": {"é": "\\ñ"}}</call>', "\u0301e"],
    ),
    "an assistant begins, without targets": (
        {"messages": [answer("hi", weight=0), *TALK]},
        {"messages": [answer("hi"), *TALK]},
    ),
    "an assistant begins after the system": (
        {"messages": [system("S"), answer("hi"), *TALK]},
        {"messages": [system("S"), answer("hi"), *TALK]},
        ["hi", "4"],
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tokenizer of NFC, as Qwen's, with TEMPLATE."""
    bpe = train_bpe("Qwen")
    bpe.add_special_tokens(["<|im_start|>"])
    folder = write(tmp_path_factory.mktemp("tokenizer"), bpe, "<|end_of_text|>")
    config = {"eos_token": "<|end_of_text|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    config["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def encode(folder) -> Callable[[dict], Document]:
    def encode(row: dict) -> Document:
        content = json.dumps(row).encode()
        return encode_row(
            PrepareSettings(str(folder), is_chat=True), Row(Path("in.jsonl"), 1, content, "")
        )

    return encode


def decode_targets(document: Document, folder: Path) -> str:
    pairs = zip(document.tokens, document.targets, strict=True)
    ids = [id for id, is_target in pairs if is_target]
    return AutoTokenizer.from_pretrained(folder).decode(ids)


@pytest.mark.parametrize("name", RIGHT)
def test_a_row_is_written_as_transformers_does_and_what_is_not_used_is_counted(
    name, folder, encode
):
    row, *given = RIGHT[name]
    left_out = DEFAULTS[len(given) :]
    conversation, targets, unused = [*given, *left_out]
    document = encode(row)
    variables = dict(conversation)
    messages = variables.pop("messages")
    oracle = AutoTokenizer.from_pretrained(folder)
    right = oracle.apply_chat_template(messages, **variables, return_dict=True)
    assert document.tokens.tolist() == right["input_ids"]
    assert decode_targets(document, folder) == "".join(text + END for text in targets)
    named = [reason for reason in document.counts if reason.endswith("is not used")]
    assert len(named) == len(unused)
    for reason, words in zip(named, unused, strict=True):
        assert set(words.split()) <= set(reason.replace(",", "").split())


NO_ROLE = [user("a"), {"role": "critic", "content": "b"}, answer("c")]
REFUSED: dict[str, tuple[dict, list[str]]] = {  # row -> words of the reason
    "an open end": (
        {"messages": TALK, "continue_final_message": True},
        ["continue_final_message"],
    ),
    "a repeated key in a text": (
        {"messages": [user("a"), answer("", tool_calls='[{"id": 1, "id": 2}]')]},
        ["'id' more than once"],
    ),
    "an open prompt": (
        {"messages": TALK, "chat_template_kwargs": {"add_generation_prompt": True}},
        ["add_generation_prompt"],
    ),
    "an unknown role": ({"messages": NO_ROLE}, ["message 2's role 'critic'", "assistant"]),
    "an unknown name": (share(("human", "a"), ("gpt-9", "b")), ["message 2's role 'gpt-9'"]),
    "observation as a role": (
        {"messages": [user("a"), {"role": "observation", "content": "b"}, answer("c")]},
        ["message 2's role 'observation'"],
    ),
    "a function that is no JSON": (
        share(("human", "a"), ("function_call", "f(1)")),
        ["message 2 calls a function", "name, arguments", "f(1)"],
    ),
    "a function without a name": (
        share(("human", "a"), ("function_call", '{"arguments": {}}')),
        ["message 2 calls a function"],
    ),
    "the old key of a call": (
        {"messages": [user("a"), answer("", function_call={"name": "f"})]},
        ["message 2's function_call"],
    ),
    "a value without a role": ({"messages": [{"value": "a"}, *TALK]}, ["message 1 needs a role"]),
    "thoughts alone": (
        {"messages": [user("a"), {"role": "assistant", "reasoning_content": "b"}]},
        ["message 2 needs a role, and a content"],
    ),
    "a part of thoughts": (
        {"messages": [user("a"), answer([{"type": "thinking", "thinking": "b"}, "c"])]},
        ["message 2 has a part", "thinking"],
    ),
    "a picture with a text": (
        {"messages": [user([{"type": "image", "text": "alt"}, "b"]), answer("c")]},
        ["message 1 has a part", "image"],
    ),
    "a column of pictures": ({"images": ["a.png"], "messages": TALK}, ["column images"]),
    "a picture of a message": (
        {"messages": [user("a", images=["a.png"]), answer("b")]},
        ["message 1's images"],
    ),
    "half a weight": ({"messages": [user("a"), answer("b", weight=0.5)]}, ["weight is 0.5"]),
    "a loss of the user": (
        {"messages": [user("a", loss=True), answer("b")]},
        ["message 1's loss is True", "assistant"],
    ),
    "only answers without loss": (
        {"messages": [user("a"), answer("b", loss=False)]},
        ["no assistant turn"],
    ),
    "two systems": (
        {"system": "S", "messages": [system("T"), *TALK]},
        ["column system", "remove one"],
    ),
    "tools that are no JSON": (
        {"tools": "f(a)", "messages": TALK},
        ["tools is not a list", "f(a)"],
    ),
    "one tool": ({"tools": TOOL, "messages": TALK}, ["tools is not a list"]),
    "a text of kwargs": ({"chat_template_kwargs": "x", "messages": TALK}, ["chat_template_kwargs"]),
    "a history of texts": ({**ALPACA, "history": ["a", "b"]}, ["history", "'a'"]),
    "a history of three": ({**ALPACA, "history": [["a", "b", "c"]]}, ["history"]),
    "a number in a history": ({**ALPACA, "history": [["a", 5]]}, ["message 2 needs"]),
    "a number as output": ({**ALPACA, "output": 4}, ["output is not a str: 4"]),
    "messages that are one message": ({"messages": TALK[0]}, ["messages is not a list"]),
    "preferences alone": (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        ["columns prompt, chosen, rejected", "--text-column"],
    ),
    "an assistant begins": (
        {"messages": [answer("hi"), *TALK]},
        ["message 1 is an answer", '"weight": 0'],
    ),
    "other columns": (
        {"question": "2+2?", "answer": "4"},
        ["question", "conversations", "instruction/output"],
    ),
    "a text as messages": ({"messages": "hello"}, ["messages is not a list: 'hello'"]),
    "a list as a row": (["messages"], ["no messages", "['messages']"]),
    "a name in a role": (
        {"messages": [{"role": f"user{END}", "content": "x"}, TALK[1]]},
        ["message 1's role has the text"],
    ),
    "a name in a content": ({"messages": [TALK[0], answer(END)]}, ["message 2's content has the"]),
    "a name in a column": (
        {"messages": TALK, "date_string": END},
        ["column date_string has the text"],
    ),
    "half a character": ({"messages": [user("\ud83d"), TALK[1]]}, ["surrogates not allowed"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_with_something_unknown_is_refused_by_its_name(name, encode):
    row, words = REFUSED[name]
    with pytest.raises(PreparationError) as error:
        encode(row)
    assert [word for word in words if word not in str(error.value)] == []


def test_parquet_fills_rows_with_nulls_which_are_removed_at_any_depth(folder, tmp_path, capsys):
    rows = [
        {"messages": CALLED[:2], "id": 1, "source": None},
        {"messages": [user("?"), call({"c": 2})], "id": None, "source": "web"},
    ]
    file = tmp_path / "in.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    settings = PrepareSettings(str(folder), is_chat=True)
    oracle = AutoTokenizer.from_pretrained(folder)
    arguments = [{"a": 1}, {"c": 2}]
    for row, expected in zip(read_file(file, "utf-8", 0), arguments, strict=True):
        document = encode_row(settings, Row(file, 1, row, ""))
        right = oracle.apply_chat_template([user("?"), call(expected)], return_dict=True)
        assert document.tokens.tolist() == right["input_ids"]
    options = ["--tokenizer", str(folder), "--out", str(tmp_path / "out"), "--processes", "1"]
    assert main(["prepare", str(file), "--chat", *options]) == 0
    summary = capsys.readouterr().out
    assert "1 conversations with a column id, which is not used" in summary
    assert "1 conversations with a column source, which is not used" in summary


def test_text_column_names_the_column_with_the_messages(folder, encode):
    content = json.dumps({"talk": TALK, "messages": 3}).encode()
    settings = PrepareSettings(str(folder), is_chat=True, column="talk")
    document = encode_row(settings, Row(Path("in.jsonl"), 1, content, ""))
    assert document.tokens == encode({"messages": TALK}).tokens


def test_only_last_turn_trains_after_a_conversation_that_the_assistant_begins(folder):
    content = json.dumps({"messages": [answer("hi"), *TALK]}).encode()
    settings = PrepareSettings(str(folder), is_chat=True, only_last_turn=True)
    document = encode_row(settings, Row(Path("in.jsonl"), 1, content, ""))
    assert decode_targets(document, folder) == "4" + END
