"""Test `prepare --chat`: ids and targets equal transformers', in the corpus and in the batch, and invalid input is
refused."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from folders import dump_json, load_json
from marks import each_row
from test_dialects import read_cases, read_json, write_folder
from test_generate_tool import save
from test_model import PLAIN, build_ours
from test_tokenizers import SHIPPED
from transformers import AutoTokenizer, GenerationConfig

from torchtitan_lite.data.dataset import Corpus, SampleReader
from torchtitan_lite.data.tokenizer import load_tokenizer
from torchtitan_lite.model.loss import IGNORE_INDEX
from torchtitan_lite.tools.corpora.chat import mark_targets, read_chat_format
from torchtitan_lite.tools.corpora.dialects import read_conversation
from torchtitan_lite.tools.corpora.prepare import get_encoder

TALKS = {
    "single": r"""{"messages": [U(2+2?), A( é, e\u0301 😀)]}""",
    "multi": r"""{"messages": [S(Be brief.\n), U(2+2?),
        {"role": "assistant", "content": "4 ", "reasoning_content": "two and two"}, U(naïve 😀?),
        {"role": "assistant", "content": "4", "reasoning_content": "assistant: 4"}]}""",
    "calls": """{"messages": [U(Paris?),
        {"role": "assistant", "content": null, "tool_calls": [{"type": "function",
            "function": {"name": "weather", "arguments": {"city": "Paris"}}}], "name": null},
        {"role": "tool", "content": "sunny", "tool_calls": null},
        {"role": "assistant", "content": "It is sunny.", "tool_calls": null}],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]}""",
}
TALKS = {name: read_json(text) for name, text in TALKS.items()}
MULTI = TALKS["multi"]

HEAD = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
TAIL = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = "{{ date_string }}" + HEAD + "{{ message.content + '<|im_end|>\n' }}" + TAIL
# template -> targets of "single", "multi" and "calls". If the value is None, the targets are the texts between the
# template's generation marks. If it is a string, the row is refused for this reason.
TEMPLATES = {
    "plain": (
        CHATML,
        [" é, é 😀<|im_end|>"],
        ["4 <|im_end|>", "4<|im_end|>"],
        "leaves out message 2's tool_calls",
    ),
    "tool calls, thoughts of the last answer alone": (
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        + HEAD
        + "{% if loop.last and message.role == 'assistant' %}"
        "{{ '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
        "{{ message.content }}{% if message.tool_calls %}{{ message.tool_calls[0].function | tojson }}{% endif %}"
        "{{ '<|im_end|>\n' }}" + TAIL,
        ["<think>\n\n</think>\n\n é, é 😀<|im_end|>"],
        ["4 <|im_end|>", "<think>\nassistant: 4\n</think>\n\n4<|im_end|>"],
        [
            '{"name": "weather", "arguments": {"city": "Paris"}}<|im_end|>',
            "<think>\n\n</think>\n\nIt is sunny.<|im_end|>",
        ],
    ),
    "trims, thoughts in the generation prompt, another end of the last answer": (
        HEAD + "{{ message.content | trim }}"
        "{{ eos_token if loop.last and message.role == 'assistant' else '<|im_end|>' }}\n{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% else %}{{ eos_token }}{% endif %}",
        ["é, é 😀<|end_of_text|>"],
        ["4<|im_end|>", "4<|end_of_text|>"],
        "leaves out message 2's tool_calls",
    ),
    "always adds the generation prompt": (
        CHATML.replace("{% if add_generation_prompt %}", "{% if true %}"),
        [" é, é 😀<|im_end|>"],
        ["4 <|im_end|>", "4<|im_end|>"],
        "leaves out message 2's tool_calls",
    ),
    "no special tokens": (
        "{% for message in messages %}{% if message.role == 'assistant' %} {{ message.content }}</s>{% else %}"
        "[INST] {{ message.content }} [/INST]{% endif %}{% endfor %}",
        ["  é, é 😀</s>"],
        [" 4 </s>", " 4</s>"],
        "leaves out message 2's tool_calls",
    ),
    "marks on their own line": (
        HEAD
        + "{% if message.role == 'assistant' %}\n  {% generation %}\n{{ message.content }}<|im_end|>\n"
        "  {% endgeneration %}\n{% else %}{{ message.content }}<|im_end|>{% endif %}" + TAIL,
        None,
        None,
        None,
    ),
    "a content of parts": (
        CHATML.replace("message.content", "message.content[0].text"),
        [" é, é 😀<|im_end|>"],
        ["4 <|im_end|>", "4<|im_end|>"],
        "leaves out message 2's tool_calls",
    ),
    "marks that trim": (
        HEAD
        + "{%- if message.role == 'assistant' -%}{%- generation -%} {{ message.content }}<|im_end|> "
        "{%- endgeneration -%}{%- else -%}{{ message.content }}<|im_end|>{%- endif -%}" + TAIL,
        None,
        None,
        None,
    ),
}


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory) -> Callable[..., Path]:
    """Return a function: chat template, special tokens -> the folder of a tokenizer (see write_folder)."""
    return lambda *parts: write_folder(tmp_path_factory.mktemp("tokenizer"), *parts)


def encode(folder: Path, row: dict, **options: bool) -> tuple[list[int], list[int], list[str]]:
    tokenizer = load_tokenizer(folder)
    _, row = read_conversation(row)
    rendered = read_chat_format(tokenizer).render(row, **options)
    ids, ends = tokenizer.encode_special(rendered.text)
    turns = [rendered.text[turn.start : turn.stop] for turn in rendered.turns]
    return ids, list(mark_targets(ends, rendered.turns)), turns


@each_row("talk", TALKS)
@each_row("kind", TEMPLATES)
def test_ids_equal_those_of_transformers_and_the_targets_are_the_answers(kind, talk, make_folder):
    template, *by_talk = TEMPLATES[kind]
    expected = by_talk[list(TALKS).index(talk)]
    folder = make_folder(template)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            encode(folder, TALKS[talk])
        return
    has_marks = "endgeneration" in template
    if talk == "calls" and has_marks:
        pytest.skip("these templates have no tool calls")
    if talk == "calls" and sys.version_info < (3, 11):
        pytest.skip("the newest transformers for Python 3.10 writes an empty content as None")
    ids, targets, turns = encode(folder, TALKS[talk])
    oracle = AutoTokenizer.from_pretrained(folder)
    messages = TALKS[talk]["messages"]
    if kind == "a content of parts":
        messages = [
            each | {"content": [{"type": "text", "text": each["content"]}]} for each in messages
        ]
    right = oracle.apply_chat_template(
        messages,
        tools=TALKS[talk].get("tools"),
        return_dict=True,
        return_assistant_tokens_mask=has_marks,
    )
    assert ids == right["input_ids"]
    if has_marks:
        assert targets == right["assistant_masks"]
    elif expected:
        assert turns == expected
    trained = [id for id, is_target in zip(ids, targets, strict=True) if is_target]
    assert oracle.decode(trained) == "".join(turns)


def test_a_template_always_gets_the_same_date_which_prepare_prints(make_folder, prepare):
    folder = make_folder("{{ strftime_now('%d %b %Y') }}" + CHATML)
    said = prepare([{"messages": EXCHANGE}], "--tokenizer", folder)
    assert "26 July 2024" in said
    ids, _, _ = encode(folder, {"messages": EXCHANGE})
    assert load_tokenizer(folder).decode(ids).startswith("26 Jul 2024")


def test_a_message_of_the_assistant_that_begins_a_conversation_is_a_target(make_folder):
    messages = [{"role": "assistant", "content": "Hello"}, *EXCHANGE]
    for folder in (make_folder(CHATML), SHIPPED):
        greeting, answer = encode(folder, {"messages": messages})[2]
        assert greeting.startswith("Hello<|") and answer.startswith("4<|")


# special: special tokens. written: the text after a message. kept: the part of it that is a target. end: the end token
ENDINGS = read_cases(r"""
in brackets
  special: ["[|endofturn|]", "[|assistant|]", "[|user|]"]
  written: "[|endofturn|]\n"
  kept: "[|endofturn|]"
  end: "[|endofturn|]"
start of another
  special: ["[|end|]", "[|end|]\n\n"]
  written: "[|end|]\n"
  kept: "[|end|]"
  end: "[|end|]"
longer than another
  special: ["[|end|]x", "[|end|]"]
  written: "[|end|]x[|end|]"
  kept: "[|end|]x"
  end: "[|end|]x"
with spaces
  special: ["<end of> "]
  written: " <end of> \n"
  kept: " <end of> "
  end: "<end of> "
SentencePiece's spaces
  special: ["▁</s>"]
  written: "▁</s>\n"
  kept: "▁</s>"
  end: "▁</s>"
a word
  special: ["QZXJ", "QZX"]
  written: " QZXJ QZX"
  kept: " QZXJ"
  end: "QZXJ"
plain text
  special: []
  written: "</s>\n"
  kept: "</s>"
  end: null
no end, only headers
  special: ["[|assistant|]", "[|user|]"]
  written: "\n"
  kept: ""
  end: null
none
  special: []
  written: ""
  kept: ""
  end: null
""")
ANSWERS = ["<br>hello<br>", "<s>", "</s>hello", "[|end", "hello\n", " a <think> b ", "QZ"]


@each_row("kind", ENDINGS)
def test_an_answer_ends_with_a_special_token_of_the_tokenizer_however_it_is_spelled(
    kind, make_folder
):
    special, written, kept, end = ENDINGS[kind].values()
    head = "{% for message in messages %}[|{{ message.role }}|]{{ message.content }}"
    asks = "{% endfor %}{% if add_generation_prompt %}[|assistant|]{% endif %}"
    folder = make_folder(f"{head}{{{{ {written!r} }}}}{asks}", *special)
    oracle = AutoTokenizer.from_pretrained(folder)
    for answer in ANSWERS:
        messages = [message | {"content": answer} for message in EXCHANGE] * 3
        ids, _, turns = encode(folder, {"messages": messages})
        assert turns == [answer + kept] * 3
        assert ids == oracle.apply_chat_template(messages)["input_ids"]
    assert read_chat_format(load_tokenizer(folder)).end == end


LAST = "loop.last and message.role == 'assistant'"
# how a template writes a message -> targets of the two consecutive answers "\n4" and "5"
IN_A_ROW = {
    "{% if LAST %}<think>{% endif %}CONTENT<|im_end|>": ["\n4<|im_end|>", "<think>5<|im_end|>"],
    "CONTENT{{ eos_token if LAST else '<|im_end|>' }}": ["\n4<|im_end|>", "5<|end_of_text|>"],
}


@each_row("written", IN_A_ROW)
def test_consecutive_answers_may_be_written_in_different_ways(written, make_folder):
    template = written.replace("LAST", LAST).replace("CONTENT", "{{ message.content }}")
    folder = make_folder(HEAD + template + TAIL)
    talk = [*EXCHANGE[:1], EXCHANGE[1] | {"content": "\n4"}, EXCHANGE[1] | {"content": "5"}]
    ids, _, turns = encode(folder, {"messages": talk})
    assert turns == IN_A_ROW[written]
    assert ids == AutoTokenizer.from_pretrained(folder).apply_chat_template(talk)["input_ids"]


def test_white_space_that_a_header_token_strips_is_no_target(make_folder):
    """Phi-4-mini has such tokens."""
    folder = make_folder(
        "{% for message in messages %}<|im_start|>{{ message.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}",
        "</s>",
    )
    content = load_json(folder / "tokenizer.json")
    for token in content["added_tokens"]:
        token["rstrip"] = token["content"] == "<|im_start|>"
    dump_json(folder / "tokenizer.json", content)
    talk = [message | {"content": " \n4"} for message in EXCHANGE]
    ids, targets, _ = encode(folder, {"messages": talk})
    trained = [id for id, is_target in zip(ids, targets, strict=True) if is_target]
    assert load_tokenizer(folder).decode(trained) == "4</s>"


def test_the_content_of_a_message_with_tool_calls_is_null_if_the_template_needs_that(make_folder):
    """DeepSeek V3's template needs it."""
    folder = make_folder(
        HEAD + "{% if message.content is none %}{{ message.tool_calls | tojson }}"
        "{% else %}{{ message.content + '' }}{% endif %}<|im_end|>" + TAIL
    )
    _, _, (call, _) = encode(folder, TALKS["calls"] | {"tools": None})
    assert '"city": "Paris"' in call


def test_a_conversation_with_only_empty_answers_is_refused_with_this_message(make_folder):
    folder = make_folder(
        "{% for message in messages %}|{{ message.role }}|{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}|assistant|{% endif %}"
    )
    talk = [EXCHANGE[0], EXCHANGE[1] | {"content": ""}]
    with pytest.raises(ValueError, match="no assistant turn of weight 1 has text"):
        encode(folder, {"messages": talk})


def test_message_weights_choose_targets_among_the_answers_that_a_template_marks(make_folder):
    """test_dialects.py tests weights and --only-last-turn for templates without generation marks."""
    folder = make_folder(TEMPLATES["marks on their own line"][0])
    first, last = encode(folder, MULTI)[2]
    assert encode(folder, MULTI, only_last_turn=True)[2] == [last]
    *others, answer = MULTI["messages"]
    talk = {"messages": [*others, answer | {"weight": 0}]}
    assert encode(folder, talk)[2] == [first]
    with pytest.raises(ValueError, match="no assistant turn"):
        encode(folder, talk, only_last_turn=True)


# ---------------------------------------------------------------- rows


@pytest.fixture
def prepare(run_tool, tmp_path) -> Callable[..., str]:
    """Return a function that runs `prepare --chat` on rows, checks the exit status, and returns what it prints."""

    def run(rows: list, *arguments: object, status: int = 0) -> str:
        file = tmp_path / "in.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = ["--chat", "--processes", "1", *arguments]
        if "--out" not in arguments:
            options += ["--out", tmp_path / "out"]
        return run_tool("prepare", file, *options, status=status)

    return run


EXCHANGE = read_json("TALK")


# reason of the refusal => how the template writes a message
UNCERTAIN = r"""
message 2 cannot be found.*"weight": 0, .*--only-last-turn => {{ '<think>' if loop.last }}{{ message.content }}
leaves out message 2's content => {{ message.content | length }}{{ '\n' }}
leaves out message 2's tool_calls => {{ message.content }}
    {% if message.tool_calls %}{{ message.tool_calls[0] }}</s>{% endif %}
leaves out message 2's tool_calls => {{ message.content }}
    {% for call in message.tool_calls %}{{ call.function.name }}{% endfor %}</s>
leaves out message 2's tool_calls => {{ message.content }}
    {% for call in message.tool_calls %}{{ call.function.name }}{{ call.function.arguments.a }}{% endfor %}</s>
leaves out message 1's content => {{ message.content.split('\n')[0] }}</s>
leaves out message 1's content => {{ message.content[:4] }}</s>
leaves out message 1's content => {{ message.role }}
leaves out message 1's content => {{ message.content.value }}
"""


@each_row("line", UNCERTAIN.replace("\n    ", "").strip().splitlines())
def test_a_row_is_refused_if_the_template_hides_where_its_answers_are(line, make_folder):
    reason, template = line.split(" => ")
    folder = make_folder("{% for message in messages %}" + template + "{% endfor %}")
    arguments = {"a": 1, "b": [{"c": 2}]}
    calls = [{"id": n, "function": {"name": n, "arguments": arguments}} for n in ("alpha", "beta")]
    talk = [EXCHANGE[0], {**EXCHANGE[1], "tool_calls": calls}] if "calls" in template else EXCHANGE
    if "split" in template:
        talk = [message | {"content": f"{message['content']}\nx"} for message in talk]
    with pytest.raises(ValueError, match=reason):
        encode(folder, {"messages": talk * 2})


@each_row("written", [".lstrip('a')", ".replace('+', '')", ".split('2')[-1]", " | upper"])
def test_messages_that_the_template_changes_are_counted(written, make_folder):
    folder = make_folder(
        "{% for message in messages %}{{ message.content" + written + " }}</s>{% endfor %}"
    )
    talk = [{**message, "content": "a+2b"} for message in EXCHANGE]
    (said,) = read_chat_format(load_tokenizer(folder)).render({"messages": talk}).unused
    assert "shortens or changes" in said


# ---------------------------------------------------------------- templates


def test_without_a_template_only_llama_3_s_tokens_have_a_format(make_folder, prepare, tmp_path):
    text = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
    text += "<|start_header_id|>assistant<|end_header_id|>\n\n4<|eot_id|>"
    expected, _ = load_tokenizer(SHIPPED).encode_special(text)
    ids, targets, _ = encode(SHIPPED, {"messages": EXCHANGE})
    assert ids == expected and targets == [0] * (len(ids) - 2) + [1, 1]
    assert "Llama 3" in prepare([{"messages": EXCHANGE}])
    elsewhere = ["--out", tmp_path / "2", "--tokenizer", make_folder(None)]
    said = prepare([{"messages": EXCHANGE}], *elsewhere, status=2)
    assert "chat_template.jinja" in said
    said = prepare(
        [{"messages": EXCHANGE}], "--tokenizer", "bytes", "--out", tmp_path / "3", status=2
    )
    assert said.startswith("bytes has no usable chat template")


NO_TEMPLATES = """
[{"name": "rag", "template": "x"}]
[{"name": 1}]
{"rag": "x"}
3
"{% if %}"
"""


@each_row("template", NO_TEMPLATES.split("\n")[1:-1])
def test_an_invalid_template_is_refused(template, make_folder, prepare):
    error = prepare(
        [{"messages": EXCHANGE}], "--tokenizer", make_folder(json.loads(template)), status=2
    )
    assert "template" in error and "Traceback" not in error


def test_a_model_that_was_trained_on_conversations_is_exported_with_its_chat_format(
    make_folder, prepare, tmp_path, run_tool
):
    named = make_folder(CHATML)
    (named / "chat_template.jinja").write_text(CHATML)
    (named / "additional_chat_templates").mkdir()
    (named / "additional_chat_templates/rag.jinja").write_text("{{ messages | tojson }}")
    for tokenizer in (SHIPPED, named):
        folder = tmp_path / tokenizer.name
        corpus = folder / "talks"
        prepare([{"messages": EXCHANGE}], "--tokenizer", tokenizer, "--out", corpus)
        ours = load_tokenizer(tokenizer)
        args = replace(PLAIN, vocab_size=ours.vocab_size)
        about = {"assets": str(tokenizer), "corpora": [str(corpus)], "shape": asdict(args)}
        save(folder / "step-1", build_ours(args).state_dict(), **about)
        said = run_tool("convert", folder, folder / "out")
        assert ("`default` or `tool_use` of" in said) == (tokenizer == named)
        ids, _, (answer,) = encode(tokenizer, {"messages": EXCHANGE})
        oracle = AutoTokenizer.from_pretrained(folder / "out")
        assert oracle.apply_chat_template(EXCHANGE)["input_ids"] == ids
        if tokenizer == named:
            assert oracle.chat_template == AutoTokenizer.from_pretrained(named).chat_template
            assert oracle.chat_template.keys() == {"default", "rag"}
        settings = GenerationConfig.from_pretrained(folder / "out")
        assert settings.eos_token_id == [ours.special[answer[1:]], ours.eos_id]
        corpus.rename(folder / "elsewhere")
        assert f"{corpus} is not here" in run_tool("convert", folder, folder / "again")


def test_without_transformers_the_extra_is_named(prepare, monkeypatch):
    get_encoder.cache_clear()
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "`chat`" in prepare([{"messages": EXCHANGE}], status=2)


def test_every_token_of_an_answer_is_a_target_once_and_no_other_token_is_a_target(
    prepare, tmp_path
):
    rows = []
    expected_ids, expected_targets = [], []
    for n in range(1, 40):
        text = f"{'naïve 😀 ' * n}\n{n}"
        row = {"messages": [message | {"content": text} for message in EXCHANGE]}
        rows.append(row)
        ids, targets, _ = encode(SHIPPED, row)
        expected_ids += ids
        expected_targets += [
            id if it else IGNORE_INDEX for id, it in zip(ids, targets, strict=True)
        ]
    prepare(rows, "--validation-share", 0)
    corpus = Corpus(str(tmp_path / "out"), load_tokenizer(SHIPPED), tmp_path)
    reader = SampleReader([corpus], 64, 2304)
    (n_samples,) = reader.n_samples
    batch = reader.read(torch.arange(n_samples))
    n_tokens = len(expected_ids) - 1
    assert batch.tokens.flatten()[:n_tokens].tolist() == expected_ids[:-1]
    assert batch.targets.flatten()[:n_tokens].tolist() == expected_targets[1:]
