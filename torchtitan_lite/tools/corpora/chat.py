"""Write conversations as documents in which only the assistant's turns are targets.

    [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]

    <|begin_of_text|><|start_header_id|>user<|end_header_id|>\\n\\n2+2?<|eot_id|>
    <|start_header_id|>assistant<|end_header_id|>\\n\\n4<|eot_id|>
                                                     ^^^^^^^^^^^ targets

transformers (the extra `chat`) runs the chat template in the tokenizer's folder, so the text equals the text of its
`apply_chat_template`. Targets are the text between the template's {% generation %} marks. turns.py finds them if a
template has no marks.

A corpus depends only on its files: a template that asks for today's date gets DATE.
"""

import json
import re
import sys
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from torchtitan_lite.config.files import JsonObject, import_extra, read_json
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.data.vocabulary import CONFIG
from torchtitan_lite.tools.corpora.text_files import PreparationError
from torchtitan_lite.tools.corpora.turns import (
    MARK,
    find_start,
    find_turn,
    get_mark,
    has_text,
    mark_messages,
)

ASSISTANT = "assistant"
GENERATION = "endgeneration"
DATE = datetime(2024, 7, 26)  # the default date of Llama 3.1's own template
LLAMA_3_NAMES = {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}
LLAMA_3 = (  # arXiv:2407.21783, and Llama 3's model card
    "<|begin_of_text|>{% for message in messages %}"
    "{% if tools or message.tool_calls %}{{ raise_exception('it has tools, which need a template') }}{% endif %}"
    "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


@dataclass(frozen=True)
class ChatFormat:
    """Writes a conversation as text, and finds the assistant's turns in it."""

    templates: dict[str, str]  # name -> template: "default", and perhaps "tool_use" and others
    variables: dict[str, str]  # special tokens by their names in a template, such as bos_token
    tokenizer: Tokenizer
    transformers: ModuleType  # its functions for chat templates
    name: str  # for the summary

    @cached_property
    def special_name(self) -> re.Pattern:
        names = sorted(self.tokenizer.special, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or "(?!)")  # (?!) matches nothing

    @cached_property
    def ends(self) -> list[str]:
        """End tokens: after the last answer of a conversation, and after another answer."""
        name = (
            self.special_name.pattern + r"|<[^<>\s]+>"
        )  # some names are plain text to this tokenizer
        ends = []
        for content in (
            "x",
            [{"type": "text", "text": "x"}],
        ):  # some templates write only lists of parts
            question = {"role": "user", "content": content}
            answer = {"role": ASSISTANT, "content": content}
            last = self.write_after([question, answer])
            prompting = self.write_after([question, answer], add_generation_prompt=True)
            earlier = self.write_after([question, answer, question])
            if last != prompting:  # names without a space between them end an answer together
                ends += re.findall(f"(?:{name})+", last)[:1]
            ends += re.findall(name, last)[:1]
            ends += re.findall(name, earlier)[:1]
        return ends

    def write_after(self, messages: list[dict], **options: bool) -> str:
        """Return the text between the answer of a small conversation and the next text, or ""."""
        pieces = MARK.split(self.try_write({"messages": mark_messages(messages)}, **options))
        return pieces[2] if len(pieces) > len(messages) else ""

    @property
    def end_ids(self) -> set[int]:
        """The special token that ends an answer, if there is one."""
        ids, _ = self.tokenizer.encode_special("".join(self.ends[:1]))
        return {*ids[-1:]} & {*self.tokenizer.special.values()}

    def write(
        self, row: dict[str, Any], *, add_generation_prompt: bool = False
    ) -> tuple[str, list[range]]:
        """Return the text of a conversation, and the ranges of its {% generation %} marks, as transformers does.

        Raises ValueError if the template refuses the conversation.
        """
        template = self.choose_template(row)
        variables = self.variables | row
        messages = variables.pop("messages")
        try:
            (text,), marked = self.transformers.render_jinja_template(
                [messages],
                chat_template=template,
                return_assistant_tokens_mask=GENERATION in template,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except Exception as error:  # a template is a program, which can raise anything
            raise ValueError(
                f"the chat template refuses it: {type(error).__name__}: {error}"
            ) from None
        return text, [range(*place) for place in marked[0]] if marked else []

    def choose_template(self, row: dict[str, Any]) -> str:
        """Return the template for a conversation, which transformers chooses in the same way."""
        return self.templates[
            "tool_use" if "tools" in row and "tool_use" in self.templates else "default"
        ]

    def try_write(self, row: dict[str, Any], **options: bool) -> str:
        """Return the text of a conversation, or "" if the template refuses it."""
        try:
            return self.write(row, **options)[0]
        except ValueError:
            return ""

    def render(
        self, row: dict[str, Any], *, only_last_turn: bool = False
    ) -> tuple[str, list[range]]:
        """Return the text, with special tokens as their names, and the character ranges of the targets.

        `row` has `messages`, and variables of the template. Raises ValueError with the reason.
        """
        row = json.loads(self.tokenizer.normalize(json.dumps(row, ensure_ascii=False, default=str)))
        messages = row["messages"]
        answers = [
            number for number, message in enumerate(messages) if message["role"] == ASSISTANT
        ]
        trained = answers[-1:] if only_last_turn else answers
        trained = [number for number in trained if messages[number].get("weight", 1)]
        if not trained:
            raise ValueError("it has no assistant turn to train on, so it has no targets")
        text, marked = self.write(row)
        self.refuse_special_names(row, text)
        if GENERATION not in self.choose_template(row):
            return text, self.find_turns(row, text, trained)
        if trained != answers:
            turns = self.find_turns(row, text, trained)
            marked = [each for each in marked if any(set(each) & set(turn) for turn in turns)]
        if not any(marked):
            raise ValueError(
                "the {% generation %} marks of the chat template are around none of its answers"
            )
        return text, marked

    def find_turns(self, row: dict[str, Any], text: str, numbers: list[int]) -> list[range]:
        """Return the characters of these answers. Raises ValueError if they cannot be found with certainty."""
        marked = {**row, "messages": mark_messages(row["messages"])}
        whole = self.try_write(marked)
        has_marks = whole != text and MARK.sub("", whole) == text
        if not has_marks:  # the template reads or changes the texts
            marked = row
            whole = text
        last = len(row["messages"]) - 1
        for number, message in enumerate(row["messages"]):
            is_list = isinstance(message.get("content"), list)
            is_needed = is_list or (has_marks and number in numbers)
            if is_needed and has_text(message) and get_mark(number) not in whole:
                why = f"the chat template leaves out the text of message {number + 1}"
                raise ValueError(f"{why} (a list of parts may have to be a string)")
        turns = []
        for number in numbers:
            turn = None
            if has_marks or number == last:
                turn = self.find_answer(marked, whole, number)
            if not turn:
                why = f"message {number + 1} cannot be found with certainty in the text of the chat template"
                raise ValueError(f"{why}; --only-last-turn trains the last answer alone")
            turns.append(turn)
        return turns

    def find_answer(self, marked: dict[str, Any], whole: str, number: int) -> range | None:
        """Return the characters of an answer in the marked text `whole`, counted without marks."""
        asked = {**marked, "messages": marked["messages"][:number]}
        prompt = self.try_write(asked, add_generation_prompt=True)
        start = find_start(whole, prompt, self.try_write(asked), number)
        if start is None and number == 0:  # a greeting, which no prompt asks for
            start = self.find_greeting(whole)
        if start is None:
            return None
        return find_turn(whole, start, number, self.ends)

    def find_greeting(self, whole: str) -> int | None:
        """Return the index at which an answer begins that is the first message of a conversation."""
        question = {"messages": [{"role": "user", "content": "x"}]}
        prompt = self.try_write(question, add_generation_prompt=True)
        header = prompt.removeprefix(self.try_write(question))
        before, found, _ = whole.partition(get_mark(0))[0].partition(header or prompt)
        return len(before + found) if found else None

    def refuse_special_names(self, row: dict[str, Any], text: str) -> None:
        """Raise ValueError if a text of the row would become special tokens of the document."""
        without = self.special_name.sub("", json.dumps(row, ensure_ascii=False))
        if self.try_write(json.loads(without)) == text:
            return
        places = {f"message {number}": message for number, message in enumerate(row["messages"], 1)}
        for place, value in (places | row).items():
            found = self.special_name.search(json.dumps(value, ensure_ascii=False))
            if found:
                raise ValueError(
                    f"{place} has the text {found.group()!r}, which would become a special token"
                )


def mark_targets(ends: list[int], turns: list[range]) -> bytearray:
    """Return 1 for each token with a character in a turn. `ends`: the index after each token's last character."""
    targets = bytearray(len(ends))
    for turn in turns:
        first = bisect_right(ends, turn.start)
        last = min(bisect_left(ends, turn.stop), len(ends) - 1)
        stop = bisect_right(ends, ends[last])  # a character can have several tokens
        targets[first:stop] = bytes([1]) * (stop - first)
    return targets


# ---------------------------------------------------------------- the tokenizer's folder


def read_chat_format(tokenizer: Tokenizer) -> ChatFormat:
    """Return the chat format in the tokenizer's folder, or Llama 3's. Raises UserError."""
    if sys.version_info < (3, 11):
        raise PreparationError(
            "conversations need Python 3.11 or newer, because transformers 5 does"
        )
    folder = tokenizer.path.parent
    import_extra("jinja2", "chat")
    transformers = import_extra("transformers.utils.chat_template_utils", "chat")
    config = read_json(folder / CONFIG, may_be_missing=True)
    name = "the tokenizer's chat template"
    templates = read_templates(folder, config)
    if not templates and LLAMA_3_NAMES <= tokenizer.special.keys():
        name = "the format of Llama 3, because the tokenizer has no chat template"
        templates = {"default": LLAMA_3}
    remedy = "Put chat_template.jinja of its model there, or name another --tokenizer"
    if "default" not in templates:
        raise PreparationError(f"{folder} has no chat template named default. {remedy}")
    try:
        for template in templates.values():
            compiled = transformers._compile_jinja_template(template)
            compiled.environment.globals["strftime_now"] = (
                DATE.strftime
            )  # a corpus does not depend on today's date
    except Exception as error:  # of jinja2
        raise PreparationError(
            f"the chat template in {folder} cannot be used: {error}. {remedy}"
        ) from None
    names = read_json(folder / "special_tokens_map.json", may_be_missing=True)
    variables = {}
    for key, token in (names | config).items():
        if isinstance(token, dict):
            token = token.get("content")
        if key.endswith("_token") and isinstance(token, str):
            variables[key] = token
    return ChatFormat(templates, variables, tokenizer, transformers, name)


def read_templates(folder: Path, config: JsonObject) -> dict[str, str]:
    """Return the chat templates of a folder by name: its files, else those of tokenizer_config.json."""
    files = {file.stem: file for file in (folder / "additional_chat_templates").glob("*.jinja")}
    files["default"] = folder / "chat_template.jinja"
    if files["default"].is_file():
        return {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    template = config.take("chat_template", str | dict | list[dict], {})
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list):
        return {entry.take("name", str): entry.take("template", str) for entry in template}
    return {name: template.take(name, str) for name in template}
