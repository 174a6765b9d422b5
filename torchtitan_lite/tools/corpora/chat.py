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
    find_end,
    find_end_tokens,
    find_header,
    find_turn,
    mark,
    mark_messages,
    read_marks,
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
PROBES = ("x", [{"type": "text", "text": "x"}])  # some templates write only lists of parts


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
    def any_name(self) -> re.Pattern:
        """Match a special token, or a name in brackets that this tokenizer reads as plain text."""
        return re.compile(self.special_name.pattern + r"|<[^<>\s]+>")

    @cached_property
    def ends(self) -> list[str]:
        """End tokens of an answer. The first one ends the last answer of a conversation."""
        last = self.write_probe({}, ["user", ASSISTANT]).removesuffix(self.find_header({}))
        earlier = self.write_probe({}, ["user", ASSISTANT, "user"], after=1)
        return find_end_tokens(last, earlier, self.any_name)

    @property
    def end_ids(self) -> set[int]:
        """The special token that ends an answer, if there is one."""
        ids, _ = self.tokenizer.encode_special("".join(self.ends[:1]))
        return {*ids[-1:]} & {*self.tokenizer.special.values()}

    def write(self, row: dict[str, Any], *, add_generation_prompt: bool = False) -> tuple[str, list[range]]:
        """Return the text of a conversation, and the ranges of its {% generation %} marks, as transformers does.

        Raises ValueError if the template refuses the conversation.
        """
        arguments = self.variables | row
        template = self.choose_template(row)
        conversation = arguments.pop("messages")
        arguments |= {"conversations": [conversation], "chat_template": template, "continue_final_message": False}
        arguments["add_generation_prompt"] = add_generation_prompt
        arguments["return_assistant_tokens_mask"] = GENERATION in template
        try:
            (text,), marked = self.transformers.render_jinja_template(**arguments)
        except Exception as error:  # a template is a program, which can raise anything
            raise ValueError(f"the chat template refuses it: {type(error).__name__}: {error}") from None
        return text, [range(*place) for place in marked[0]] if marked else []

    def choose_template(self, row: dict[str, Any]) -> str:
        """Return the template for a conversation, which transformers chooses in the same way."""
        return self.templates["tool_use" if "tools" in row and "tool_use" in self.templates else "default"]

    def write_probe(self, row: dict[str, Any], roles: list[str], *, after: int = -1, **options: bool) -> str:
        """Return what the template writes after a message of a small conversation, up to the next text, or ""."""
        for content in PROBES:
            messages = mark_messages([{"role": role, "content": content} for role in roles])
            try:
                pieces = MARK.split(self.write({**row, "messages": messages}, **options)[0])
            except ValueError:
                continue
            if len(pieces) == 2 * len(roles) + 1:
                return pieces[2::2][after]
        return ""

    def find_header(self, row: dict[str, Any]) -> str:
        """Return the text before an answer in a conversation with the variables of `row`."""
        prompt = self.write_probe(row, ["user"], add_generation_prompt=True)
        return find_header(prompt, self.write_probe(row, ["user"]), self.any_name)

    def render(self, row: dict[str, Any], *, only_last_turn: bool = False) -> tuple[str, list[range]]:
        """Return the text, with special tokens as their names, and the character ranges of the targets.

        `row` has `messages`, and variables of the template. Raises ValueError with the reason.
        """
        row = json.loads(self.tokenizer.normalize(json.dumps(row, ensure_ascii=False, default=str)))
        messages = row["messages"]
        answers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        trained = answers[-1:] if only_last_turn else answers
        trained = [number for number in trained if messages[number].get("weight", 1)]
        if not trained:
            raise ValueError("it has no assistant turn to train on, so it has no targets")
        text, marked = self.write(row)
        text.encode()  # raises ValueError for half a surrogate pair
        self.refuse_special_names(row, text)
        if GENERATION not in self.choose_template(row):
            return text, self.find_turns(row, text, trained)
        if trained != answers:
            turns = self.find_turns(row, text, trained)
            marked = [each for each in marked if any(overlap(each, turn) for turn in turns)]
        if not any(marked):
            raise ValueError("the {% generation %} marks of the chat template are around none of its answers")
        return text, marked

    def find_turns(self, row: dict[str, Any], text: str, numbers: list[int]) -> list[range]:
        """Return the characters of these messages. Raises ValueError if they cannot be found with certainty."""
        messages = row["messages"]
        marks = []
        try:
            marked, _ = self.write({**row, "messages": mark_messages(messages)})
            if MARK.sub("", marked) == text:
                marks = read_marks(marked)
        except ValueError:  # the template reads the texts
            pass
        for number, message in enumerate(messages, 1):
            if isinstance(message.get("content"), list) and number - 1 not in dict(marks):
                raise ValueError(f"the chat template cannot write message {number}, a list of parts; use a string")
        header = self.find_header(row)
        turns = []
        for number in numbers:
            message = messages[number]
            if marks and mark(message, number) != message and number not in dict(marks):
                raise ValueError(f"the chat template leaves out the text of message {number + 1}")
            turn = find_turn(text, marks, number, header, self.ends)
            if not turn and number == len(messages) - 1:
                turn = self.find_last_turn(row, text)
            if not turn:
                why = f"message {number + 1} cannot be found with certainty in the text of the chat template"
                raise ValueError(f"{why}; --only-last-turn trains the last answer alone")
            turns.append(turn)
        return turns

    def find_last_turn(self, row: dict[str, Any], text: str) -> range | None:
        """Return what follows the prompt for the last answer."""
        prompt, _ = self.write({**row, "messages": row["messages"][:-1]}, add_generation_prompt=True)
        stop = find_end(text, len(prompt), len(text), self.ends)
        return range(len(prompt), stop or len(text)) if text.startswith(prompt) else None

    def refuse_special_names(self, row: dict[str, Any], text: str) -> None:
        """Raise ValueError if a text of the row would become special tokens of the document."""
        values = {key: value for key, value in row.items() if key != "messages"}
        for number, message in enumerate(row["messages"], 1):
            for key, value in message.items():
                values[f"{key} of message {number}"] = value
        for place, value in values.items():
            found = self.special_name.search(json.dumps(value, ensure_ascii=False))
            if found and self.write(self.remove_special_names(row))[0] != text:
                raise ValueError(f"{place} has the text {found.group()!r}, which would become a special token")

    def remove_special_names(self, row: dict[str, Any]) -> dict[str, Any]:
        return json.loads(self.special_name.sub("", json.dumps(row, ensure_ascii=False)))


def overlap(first: range, second: range) -> bool:
    return first.start < second.stop and second.start < first.stop


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
        raise PreparationError("conversations need Python 3.11 or newer, because transformers 5 does")
    folder = tokenizer.path.parent
    import_extra("jinja2", "chat")
    transformers = import_extra("transformers.utils.chat_template_utils", "chat")
    config = read_json(folder / CONFIG, may_be_missing=True)
    name = "the tokenizer's chat template"
    templates = read_templates(folder, config)
    if not templates and LLAMA_3_NAMES <= tokenizer.special.keys():
        name = "the format of Llama 3, because the tokenizer has no chat template"
        templates = {"default": LLAMA_3}
    if "default" not in templates:
        why = f"{folder} has no chat template" + (f" named default, only {', '.join(templates)}" if templates else "")
        raise PreparationError(f"{why}. Put chat_template.jinja of its model there, or name another --tokenizer")
    try:
        for template in templates.values():  # a corpus does not depend on today's date
            compiled = transformers._compile_jinja_template(template)
            compiled.environment.globals["strftime_now"] = DATE.strftime
    except Exception as error:  # of jinja2
        raise PreparationError(f"the chat template in {folder} cannot be used: {error}") from None
    names = read_json(folder / "special_tokens_map.json", may_be_missing=True)
    return ChatFormat(templates, read_special_tokens(names | config), tokenizer, transformers, name)


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


def read_special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens in a tokenizer's files by the names that templates use, such as eos_token."""
    found = {}
    for key, token in config.items():
        if isinstance(token, dict):
            token = token.get("content")
        if key.endswith("_token") and isinstance(token, str):
            found[key] = token
    return found
