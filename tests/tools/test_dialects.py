"""Test rows of published data sets: ids equal transformers', targets, unused fields, and refused rows."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from folders import dump_json
from marks import each_row
from test_tokenizers import train_byte_level
from tokenizers import Tokenizer as HuggingFace
from transformers import AutoTokenizer

from torchtitan_lite.tools.corpora.prepare import Document, PrepareSettings, encode_row
from torchtitan_lite.tools.corpora.text_files import PreparationError, Row, read_file

# This template reads tools, tool calls, tool_call_id, thoughts, a date, and the switch enable_thinking. It fails
# without messages.
TEMPLATE = (
    "{% if messages[0].role != 'system' %}{{ date_string }}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}"
    "{% if enable_thinking is false %}/no_think\n{% endif %}"
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
    "{{ message.tool_call_id }}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{{ thought }}{% endif %}"
)
END = "<|im_end|>"
SHORT = {  # abbreviation in the tables -> its value. U(x) ... G(x) are messages
    "TALK": "[U(2+2?), A(4)]",
    "CALLED": '[U(?), CALL, {"role": "tool", "content": "5"}, A(6)]',
    "CALL": '{"role": "assistant", "tool_calls": [{"type": "function", "function": FUNCTION}]}',
    "FUNCTION": '{"name": "f", "arguments": {"a": 1, "b": null}}',
    "TOOL": '{"type": "function", "function": {"name": "f", "parameters": {"default": null, "enum": ["a", null]}}}',
    "ALPACA": '"instruction": "2+2?", "input": "", "output": "4"',
}
MESSAGES = {
    "U": r'{"role": "user", "content": "\1"}',
    "A": r'{"role": "assistant", "content": "\1"}',
    "S": r'{"role": "system", "content": "\1"}',
    "H": r'{"from": "human", "value": "\1"}',
    "G": r'{"from": "gpt", "value": "\1"}',
}


def read_json(text: str) -> Any:
    for word, meaning in SHORT.items():
        text = re.sub(rf"\b{word}\b", lambda _, meaning=meaning: meaning, text)
    for letter, message in MESSAGES.items():
        text = re.sub(rf"\b{letter}\((.*?)\)", message, text)
    return json.loads(text)


def read_cases(text: str) -> dict[str, dict]:
    """Return a dict mapping each name to the values in the indented lines below it."""
    cases = {}
    for block in re.split(r"\n(?! )", text.replace("\n    ", " ").strip("\n")):
        name, *lines = block.splitlines()
        pairs = [line.strip().split(": ", 1) for line in lines]
        cases[name] = {key: read_json(value) for key, value in pairs}
    return cases


DEFAULTS = read_cases("""
all
  written: {"messages": TALK}
  targets: ["4"]
  unused: []
  dialect: "messages"
""")["all"]
# row: a row of the data set. written: the arguments of apply_chat_template. targets: texts whose tokens are targets.
# unused: columns and keys that are not written. dialect: the form's name. Missing entries have the values of DEFAULTS.
RIGHT = read_cases(r"""
an id, a source, pairs of preferences
  row: {"id": 0, "source": "web", "chosen": [1], "rejected": [2], "ok": false, "messages": TALK}
  unused: ["column id", "column source", "column chosen", "column rejected", "column ok"]
both lists
  row: {"messages": TALK, "conversations": [U(2+2?)], "chat_template": "x"}
  unused: ["column conversations", "column chat_template"]
an argument of transformers
  row: {"messages": TALK, "return_assistant_tokens_mask": true}
  unused: ["column return_assistant_tokens_mask"]
empty columns
  row: {"messages": TALK, "id": "", "images": [], "history": null, "x": {}, "tools": ""}
a column for the system beside messages
  row: {"system": "S", "messages": TALK}
  written: {"messages": [S(S), U(2+2?), A(4)]}
variables
  row: {"messages": TALK, "date_string": "May", "enable_thinking": false, "weight": 0}
  written: {"messages": TALK, "date_string": "May", "enable_thinking": false}
  unused: ["column weight"]
a variable of the generation prompt, as enable_thinking of Qwen3
  row: {"messages": [U(2+2?), A(<no>4)], "thought": "<no>"}
  written: {"messages": [U(2+2?), A(<no>4)], "thought": "<no>"}
  targets: ["4"]
variables in chat_template_kwargs
  row: {"messages": TALK, "chat_template_kwargs": {"date_string": "May", "x": null}}
  written: {"messages": TALK, "date_string": "May"}
tools
  row: {"messages": TALK, "tools": [TOOL]}
  written: {"messages": TALK, "tools": [TOOL]}
tools as a text
  row: {"messages": TALK, "tools": " [{\"type\": \"function\", \"function\": {\"name\": \"f\",
    \"parameters\": {\"default\": null, \"enum\": [\"a\", null]}}}]\n"}
  written: {"messages": TALK, "tools": [TOOL]}
no tools as a text
  row: {"messages": TALK, "tools": "[]"}
  written: {"messages": TALK, "tools": []}
tools of white space
  row: {"messages": TALK, "tools": " "}
a null argument
  row: {"messages": CALLED}
  written: {"messages": CALLED}
  targets: ["<call>{\"name\": \"f\", \"arguments\": {\"a\": 1, \"b\": null}}</call>", "6"]
arguments as a text
  row: {"messages": [U(?), {"role": "assistant", "tool_calls": [{"type": "function",
    "function": {"name": "f", "arguments": "{\"b\": null}"}}]}]}
  written: {"messages": [U(?), {"role": "assistant", "tool_calls": [{"type": "function",
    "function": {"name": "f", "arguments": "{\"b\": null}"}}]}]}
  targets: ["<call>{\"name\": \"f\", \"arguments\": \"{\\\"b\\\": null}\"}</call>"]
tool calls as a text
  row: {"messages": [U(?), {"role": "assistant", "content": "", "tool_calls": "[{\"type\": \"function\",
    \"function\": {\"name\": \"f\", \"arguments\": {\"a\": 1, \"b\": null}}}]"}]}
  written: {"messages": [U(?), CALL]}
  targets: ["<call>{\"name\": \"f\", \"arguments\": {\"a\": 1, \"b\": null}}</call>"]
null keys of a message
  row: {"messages": [{"role": "user", "content": "?", "name": null}, {"role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": null}}}],
    "content": null}]}
  written: {"messages": [U(?), CALL]}
  targets: ["<call>{\"name\": \"f\", \"arguments\": {\"a\": 1, \"b\": null}}</call>"]
keys of a message
  row: {"messages": [{"role": "user", "content": "?", "name": "Al"}, {"role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": null}},
    "id": "c1"}]}, {"role": "tool", "content": "5", "tool_call_id": "c1", "name": "f"},
    {"role": "assistant", "content": "6", "reasoning_content": "five, one", "id": "m4"}]}
  written: {"messages": [U(?), CALL, {"role": "tool", "content": "5", "tool_call_id": "c1"},
    {"role": "assistant", "content": "6", "reasoning_content": "five, one"}]}
  targets: ["<call>{\"name\": \"f\", \"arguments\": {\"a\": 1, \"b\": null}}</call>", "<think>five,
    one</think>6"]
  unused: ["messages name", "messages id"]
ShareGPT
  dialect: "conversations"
  row: {"conversations": [{"from": "system", "value": "S"}, H(2+2?), G(4)]}
  written: {"messages": [S(S), U(2+2?), A(4)]}
ShareGPT of other models
  dialect: "conversations"
  row: {"conversations": [{"from": "user", "value": "a"}, {"from": "chatgpt", "value": "b"}, H(c),
    {"from": "bing", "value": "d"}, {"from": "user", "value": "e"}, {"from": "bard", "value": "f"}]}
  written: {"messages": [U(a), A(b), U(c), A(d), U(e), A(f)]}
  targets: ["b", "d", "f"]
ShareGPT's function_call
  dialect: "conversations"
  row: {"conversations": [H(?), {"from": "function_call", "value": "{\"name\": \"f\",
    \"arguments\": {\"a\": 1, \"b\": null}}"}, {"from": "observation", "value": "5"}, G(6)]}
  written: {"messages": CALLED}
  targets: ["<call>{\"name\": \"f\", \"arguments\": {\"a\": 1, \"b\": null}}</call>", "6"]
ms-swift's tool_call
  row: {"messages": [U(?), {"role": "tool_call", "content": "[{\"name\": \"f\", \"arguments\": {\"a\": 1,
    \"b\": null}}, {\"name\": \"f\", \"arguments\": {\"a\": 1, \"b\": null}}]"}, {"role": "tool_response",
    "content": "5"}, A(6)]}
  written: {"messages": [U(?), {"role": "assistant", "tool_calls": [{"type": "function",
    "function": {"name": "f", "arguments": {"a": 1, "b": null}}}, {"type": "function",
    "function": {"name": "f", "arguments": {"a": 1, "b": null}}}]}, {"role": "tool", "content": "5"}, A(6)]}
  targets: ["<call>{\"name\": \"f\", \"arguments\": {\"a\": 1, \"b\": null}}</call><call>{\"name\": \"f\",
    \"arguments\": {\"a\": 1, \"b\": null}}</call>", "6"]
ShareGPT with other keys
  dialect: "conversations"
  row: {"conversations": [{"from": "human", "content": "2+2?"}, {"role": "gpt", "value": "4"}]}
two contents
  row: {"messages": [{"role": "user", "content": "2+2?", "value": "3+3?"}, A(4)]}
  unused: ["messages value"]
role model
  row: {"messages": [U(2+2?), {"role": "model", "content": "4"}]}
role developer
  row: {"messages": [{"role": "developer", "content": "S"}, U(2+2?), A(4)]}
  written: {"messages": [{"role": "developer", "content": "S"}, U(2+2?), A(4)]}
weights, losses and trains
  row: {"messages": [{"role": "user", "content": "a", "weight": 0}, {"role": "assistant", "content": "b",
    "loss": false}, {"role": "user", "content": "c", "train": false}, {"role": "assistant", "content": "d",
    "weight": 1.0}, {"role": "assistant", "content": "e", "weight": 0.0}, {"role": "assistant",
    "content": "f", "train": false}, {"role": "assistant", "content": "g", "loss": true}, {"role": "assistant",
    "content": "h", "trainable": false}, {"role": "assistant", "content": "i", "loss_mask": 0}]}
  written: {"messages": [U(a), A(b), U(c), A(d), A(e), A(f), A(g), A(h), A(i)]}
  targets: ["d", "g"]
ShareGPT's weights, some null
  dialect: "conversations"
  row: {"conversations": [{"from": "human", "value": "a", "weight": null}, {"from": "gpt", "value": "b",
    "weight": 0}, {"from": "gpt", "value": "c", "weight": null}]}
  written: {"messages": [U(a), A(b), A(c)]}
  targets: ["c"]
Alpaca
  dialect: "Alpaca"
  row: {ALPACA}
Alpaca of other columns
  dialect: "Alpaca"
  row: {ALPACA, "text": "Below is", "prompt": "p", "system": "", "history": []}
  unused: ["column text", "column prompt"]
Alpaca with all columns
  dialect: "Alpaca"
  row: {"system": "S", "history": [["a", "b"], ["c", "d"]], "instruction": "e", "input": "f", "output": "g"}
  written: {"messages": [S(S), U(a), A(b), U(c), A(d), U(e\n\nf), A(g)]}
  targets: ["b", "d", "g"]
history as a text
  dialect: "Alpaca"
  row: {ALPACA, "history": "[[\"a\", \"b\"]]"}
  written: {"messages": [U(a), A(b), U(2+2?), A(4)]}
  targets: ["b", "4"]
prompt and completion
  dialect: "prompt/completion"
  row: {"prompt": "2+2?", "completion": "4", "history": [["a", "b"]], "label": true}
  written: {"messages": [U(a), A(b), U(2+2?), A(4)]}
  targets: ["b", "4"]
  unused: ["column label"]
an answer in the prompt
  dialect: "prompt/completion"
  row: {"prompt": [U(a), A(b), U(c)], "completion": [A(d)]}
  written: {"messages": [U(a), A(b), U(c), A(d)]}
  targets: ["d"]
a content of texts
  row: {"messages": [{"role": "user", "content": ["2+", "2?"]}, {"role": "assistant",
    "content": [{"type": "text", "text": "4"}, {"text": ""}]}]}
a table's text
  row: {"messages": "[{\"role\": \"user\", \"content\": \"2+2?\"}, {\"role\": \"assistant\",
    \"content\": \"4\"}]"}
accents after escapes
  row: {"messages": [U(a line\n\u0303b e\u0301), A(\"\u0303a line\n\u0303b e\u0301\\\u0303\t\u0303)]}
  written: {"messages": [U(a line\n\u0303b e\u0301), A(\"\u0303a line\n\u0303b e\u0301\\\u0303\t\u0303)]}
  targets: ["\"\u0303a line\n\u0303b \u00e9\\\u0303\t\u0303"]
accents after escapes in arguments
  row: {"messages": [U(e\u0301), {"role": "assistant", "tool_calls": [{"type": "function",
    "function": {"name": "f", "arguments": {"e\u0301": "\n\u0303"}}}]}, A(\u0301e)]}
  written: {"messages": [U(e\u0301), {"role": "assistant", "tool_calls": [{"type": "function",
    "function": {"name": "f", "arguments": {"e\u0301": "\n\u0303"}}}]}, A(\u0301e)]}
  targets: ["<call>{\"name\": \"f\", \"arguments\": {\"\u00e9\": \"\\\u00f1\"}}</call>", "\u0301e"]
an assistant begins, without targets
  row: {"messages": [{"role": "assistant", "content": "hi", "weight": 0}, U(2+2?), A(4)]}
  written: {"messages": [A(hi), U(2+2?), A(4)]}
several answers in a row
  row: {"messages": [U(2+2?), A(a), A(b), U(c), A(d), A(assistant)]}
  written: {"messages": [U(2+2?), A(a), A(b), U(c), A(d), A(assistant)]}
  targets: ["a", "b", "d", "assistant"]
an assistant begins after the system
  row: {"messages": [S(S), A(hi), U(2+2?), A(4)]}
  written: {"messages": [S(S), A(hi), U(2+2?), A(4)]}
  targets: ["hi", "4"]
""")


def write_folder(folder: Path, template: object, *special: str) -> Path:
    """Write a tokenizer with a chat template, which normalizes texts to NFC as Qwen's does.

    `special`: further special tokens; the first of them is EOS.
    """
    bpe = HuggingFace.from_str(train_byte_level("Qwen"))
    bpe.add_special_tokens(["<|im_start|>", *special])
    bpe.save(str(folder / "tokenizer.json"))
    eos = [*special, "<|end_of_text|>"][0]
    config = {"eos_token": eos, "tokenizer_class": "PreTrainedTokenizerFast"}
    dump_json(folder / "tokenizer_config.json", config | {"chat_template": template})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)


@pytest.fixture(scope="module")
def encode(folder) -> Callable[..., Document]:
    """Return a function that encodes a row of a data set, with further settings of `prepare`."""

    def encode(row: dict, **settings: object) -> Document:
        in_file = Row(Path("in.jsonl"), 1, json.dumps(row).encode(), "")
        return encode_row(PrepareSettings(str(folder), is_chat=True, **settings), in_file)

    return encode


def decode_targets(document: Document, folder: Path) -> str:
    pairs = zip(document.tokens, document.targets, strict=True)
    ids = [id for id, is_target in pairs if is_target]
    return AutoTokenizer.from_pretrained(folder).decode(ids)


@each_row("name", RIGHT)
def test_ids_of_a_row_equal_those_of_transformers_and_unused_fields_are_counted(
    name, folder, encode
):
    case = DEFAULTS | RIGHT[name]
    document = encode(case["row"])
    variables = dict(case["written"])
    messages = variables.pop("messages")
    oracle = AutoTokenizer.from_pretrained(folder)
    right = oracle.apply_chat_template(messages, **variables, return_dict=True)
    assert document.tokens.tolist() == right["input_ids"]
    targets = [text + END for text in case["targets"]]
    assert decode_targets(document, folder) == "".join(targets)
    counts = "\n".join(document.counts)
    assert f"{case['dialect']}, written" in counts
    named = re.findall("(.*) is not used$", counts, re.MULTILINE)
    for reason, words in zip(named, case["unused"], strict=True):
        assert {*words.split()} <= {*reason.replace(",", "").split()}


# name | row | words of the reason
REFUSED = r"""
an open end | {"messages": TALK, "continue_final_message": true} | continue_final_message
a repeated key in a text | {"messages": [U(a), {"role": "assistant", "content": "",
    "tool_calls": "[{\"id\": 1, \"id\": 2}]"}]} | 'id' more than once
an open prompt | {"messages": TALK,
    "chat_template_kwargs": {"add_generation_prompt": true}} | add_generation_prompt
an unknown role | {"messages": [U(a), {"role": "critic", "content": "b"},
    A(c)]} | message 2's role 'critic' | assistant
an unknown name | {"conversations": [H(a), {"from": "gpt-9", "value": "b"}]} | message 2's role 'gpt-9'
observation as a role | {"messages": [U(a), {"role": "observation", "content": "b"},
    A(c)]} | message 2's role 'observation'
a function that is no JSON | {"conversations": [H(a), {"from": "function_call",
    "value": "f(1)"}]} | message 2 calls a function | name, arguments | f(1)
a function without a name | {"conversations": [H(a), {"from": "function_call",
    "value": "{\"arguments\": {}}"}]} | message 2 calls a function
the old key of a call | {"messages": [U(a), {"role": "assistant", "content": "",
    "function_call": {"name": "f"}}]} | message 2's function_call
a value without a role | {"messages": [{"value": "a"}, U(2+2?), A(4)]} | message 1 needs a role
thoughts alone | {"messages": [U(a), {"role": "assistant",
    "reasoning_content": "b"}]} | message 2 needs a role, and a content
a part of thoughts | {"messages": [U(a), {"role": "assistant", "content": [{"type": "thinking",
    "thinking": "b"}, "c"]}]} | message 2 has a part | thinking
a picture with a text | {"messages": [{"role": "user", "content": [{"type": "image", "text": "alt"}, "b"]},
    A(c)]} | message 1 has a part | image
a column of pictures | {"images": ["a.png"], "messages": TALK} | column images
a picture of a message | {"messages": [{"role": "user", "content": "a", "images": ["a.png"]},
    A(b)]} | message 1's images
another key of targets | {"messages": [U(a), {"role": "assistant", "content": "b",
    "masked": true}]} | message 2's masked is True | weight, loss, train
half a weight | {"messages": [U(a), {"role": "assistant", "content": "b", "weight": 0.5}]} | weight is 0.5
a loss of the user | {"messages": [{"role": "user", "content": "a", "loss": true},
    A(b)]} | message 1's loss is True | assistant
only answers without loss | {"messages": [U(a), {"role": "assistant", "content": "b",
    "loss": false}]} | no assistant turn of weight 1
two systems | {"system": "S", "messages": [S(T), U(2+2?), A(4)]} | column system | remove one
tools that are no JSON | {"tools": "f(a)", "messages": TALK} | tools is not a list | f(a)
one tool | {"tools": TOOL, "messages": TALK} | tools is not a list
a text of kwargs | {"chat_template_kwargs": "x", "messages": TALK} | chat_template_kwargs
a history of texts | {ALPACA, "history": ["a", "b"]} | history | 'a'
a history of three | {ALPACA, "history": [["a", "b", "c"]]} | history
a number in a history | {ALPACA, "history": [["a", 5]]} | message 2 needs
a number as output | {"instruction": "2+2?", "input": "", "output": 4} | output is not a str: 4
messages that are one message | {"messages": U(2+2?)} | messages is not a list
preferences alone | {"prompt": "a", "chosen": "b", "rejected": "c"} | columns prompt, chosen,
    rejected | --text-column
an assistant begins | {"messages": [A(hi), U(2+2?), A(4)]} | message 1 is an answer | "weight": 0
other columns | {"question": "2+2?", "answer": "4"} | question | conversations | instruction/output
a text as messages | {"messages": "hello"} | messages is not a list: 'hello'
a list as a row | ["messages"] | no messages | ['messages']
a name in a role | {"messages": [{"role": "user<|im_end|>", "content": "x"},
    A(4)]} | message 1's role 'user<|im_end|>'
a name in a content | {"messages": [U(2+2?), A(<|im_end|>)]} | message 2's content has the
a name in a column | {"messages": TALK, "date_string": "<|im_end|>"} | column date_string has the text
half a character | {"messages": [U(\ud83d), A(4)]} | surrogates not allowed
"""


@each_row("line", REFUSED.replace("\n    ", " ").strip().splitlines())
def test_a_row_with_an_unknown_field_or_value_is_refused_with_its_name(line, encode):
    _, row, *words = line.split(" | ")
    with pytest.raises(PreparationError) as error:
        encode(read_json(row))
    assert all(word in str(error.value) for word in words), error.value


def test_parquet_fills_rows_with_nulls_which_are_removed_at_any_depth(folder, tmp_path, run_tool):
    rows = [
        {"messages": read_json("[U(?), CALL]"), "id": 1, "source": None},
        {"messages": read_json("[U(?), CALL]"), "id": None, "source": "web"},
    ]
    first, second = [row["messages"][1]["tool_calls"][0]["function"] for row in rows]
    second["arguments"] = {"c": 2}
    file = tmp_path / "in.parquet"
    table = pyarrow.Table.from_pylist(rows)
    times = pyarrow.array([10**18 + 1, None], pyarrow.timestamp("ns"))
    pyarrow.parquet.write_table(table.append_column("time", times), file)
    settings = PrepareSettings(str(folder), is_chat=True)
    oracle = AutoTokenizer.from_pretrained(folder)
    del first["arguments"]["b"]
    for row, expected in zip(read_file(file, "utf-8", 0), rows, strict=True):
        document = encode_row(settings, Row(file, 1, row, ""))
        right = oracle.apply_chat_template(expected["messages"], return_dict=True)
        assert document.tokens.tolist() == right["input_ids"]
    options = ["--tokenizer", str(folder), "--out", str(tmp_path / "out"), "--processes", "1"]
    summary = run_tool("prepare", file, "--chat", *options)
    assert "conversations with a column id, which is not used: 1" in summary
    assert "conversations with a column source, which is not used: 1" in summary
    assert "conversations with a column time, which is not used: 1" in summary
    with pytest.raises(PreparationError, match=r"bytes, not text: b'a'. Cast"):
        encode_row(settings, Row(file, 1, {"prompt": b"a", "completion": "b"}, ""))


def test_text_column_names_the_column_with_the_messages(encode):
    talk = read_json("TALK")
    document = encode({"talk": talk, "messages": 3}, column="talk")
    assert document.tokens == encode({"messages": talk}).tokens


def test_only_the_last_turn_is_trained_on_even_if_the_assistant_begins_the_conversation(
    folder, encode
):
    document = encode(read_json('{"messages": [A(hi), U(2+2?), A(4)]}'), only_last_turn=True)
    assert decode_targets(document, folder) == "4" + END
