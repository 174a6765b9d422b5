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

import os
import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
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
from torchtitan_lite.tools.corpora.turns import TurnFinder, mark, mark_messages, read_marks

ASSISTANT = "assistant"
MARKS = "endgeneration"
DATE = datetime(2024, 7, 26)  # the default date of Llama 3.1's own template
LLAMA_3_NAMES = {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}
LLAMA_3 = (  # arXiv:2407.21783, and Llama 3's model card
    "<|begin_of_text|>{% for message in messages %}"
    "{% if tools or message.tool_calls %}{{ raise_exception('it has tools, which need a template') }}{% endif %}"
    "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
PROBES = ("x", [{"type": "text", "text": "x"}])  # some templates write only lists of parts
SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class ChatFormat:
    """Writes a conversation as text, and finds the assistant's turns in it."""

    templates: dict[str, str]  # name -> template: "default", and perhaps "tool_use" and others
    variables: dict[str, str]  # special tokens by their names in a template, such as bos_token
    tokenizer: Tokenizer
    transformers: ModuleType  # its functions for chat templates
    is_llama3: bool  # there is no template, so Llama 3's is used

    @cached_property
    def special_names(self) -> re.Pattern:
        names = sorted(self.tokenizer.special, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or "(?!)")  # (?!) matches nothing

    @cached_property
    def ends(self) -> re.Pattern:
        """Match an end token: a special token, or a name in brackets that the tokenizer reads as plain text."""
        return re.compile(self.special_names.pattern + r"|<[^<>\s]+>")

    @cached_property
    def end(self) -> str:
        """The end token that follows the last answer of a conversation, or ""."""
        found = self.ends.search(self.write_probe({}, ["user", ASSISTANT]))
        return found.group() if found else ""

    def write(self, row: dict[str, Any], *, add_generation_prompt: bool = False) -> tuple[str, list[range]]:
        """Return the text of a conversation, and the ranges of its {% generation %} marks, as transformers does.

        Raises ValueError if the template refuses the conversation.
        """
        arguments = self.variables | row
        template = self.choose_template(row)
        conversation = arguments.pop("messages")
        arguments |= {"conversations": [conversation], "chat_template": template, "continue_final_message": False}
        arguments["add_generation_prompt"] = add_generation_prompt
        arguments["return_assistant_tokens_mask"] = MARKS in template
        try:
            (text,), marked = self.transformers.render_jinja_template(**arguments)
        except Exception as error:  # a template is a program, which can raise anything
            raise ValueError(f"the chat template refuses it: {type(error).__name__}: {error}") from None
        return text, [range(*place) for place in marked[0]] if marked else []

    def choose_template(self, row: dict[str, Any]) -> str:
        """Return the template for a conversation, which transformers chooses in the same way. Raises ValueError."""
        name = "tool_use" if "tools" in row and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise ValueError(f"the tokenizer has chat templates {', '.join(self.templates)}, but none named default")
        return self.templates[name]

    def write_probe(self, row: dict[str, Any], roles: list[str], *, add_generation_prompt: bool = False) -> str:
        """Return what a template writes after the text of the last message in a small conversation, or ""."""
        for content in PROBES:
            messages = [{"role": role, "content": content} for role in roles]
            probe = {**row, "messages": mark_messages(messages)}
            try:
                marked, _ = self.write(probe, add_generation_prompt=add_generation_prompt)
            except ValueError:
                continue
            text, marks = read_marks(marked)
            if marks and marks[-1].message == len(roles) - 1:
                return text[marks[-1].position :]
        return ""

    def find_header(self, row: dict[str, Any]) -> str:
        """Return the generation prompt, or the text before every answer if a template has no generation prompt."""
        prompt = self.write_probe(row, ["user"], add_generation_prompt=True)
        without = self.write_probe(row, ["user"])
        shared = os.path.commonprefix([prompt, without])
        if prompt != shared:
            return prompt[len(shared) :]
        end_of_user = self.ends.match(prompt)
        return prompt[end_of_user.end() :] if end_of_user else prompt

    # ---------------------------------------------------------------- one conversation

    def render(self, row: dict[str, Any], *, only_last_turn: bool = False) -> tuple[str, list[range]]:
        """Return the text, with special tokens as their names, and the character ranges of the targets.

        `row` has `messages`, and variables of the template. Raises ValueError with the reason.
        """
        messages = row["messages"]
        answers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        trained = answers[-1:] if only_last_turn else answers
        trained = [number for number in trained if messages[number].get("weight", 1)]
        if not trained:
            raise ValueError("it has no assistant turn to train on, so it has no targets")
        text, marked = self.write(row)
        self.refuse_special_names(row, text)
        finder = self.make_finder(row, text)
        refuse_lost_texts(messages, finder, trained)
        has_marks = MARKS in self.choose_template(row)
        turns = marked
        if not has_marks or trained != answers:
            turns = [self.find_turn(row, finder, number) for number in trained]
        if has_marks:
            turns = [each for each in marked if any(overlap(each, turn) for turn in turns)]
        if not turns:
            raise ValueError("the {% generation %} marks of the chat template are around none of its answers")
        return normalize(text, turns, self.tokenizer)

    def make_finder(self, row: dict[str, Any], text: str) -> TurnFinder:
        try:
            marked, _ = self.write({**row, "messages": mark_messages(row["messages"])})
        except ValueError:  # the template reads the texts
            marked = ""
        plain, marks = read_marks(marked)
        if plain != text:
            marks = []
        return TurnFinder(text, marks, self.find_header(row), self.end, self.ends)

    def find_turn(self, row: dict[str, Any], finder: TurnFinder, number: int) -> range:
        """Return the characters of message `number`. Raises ValueError if it cannot be found with certainty."""
        found = finder.find(number)
        if found:
            return found
        messages = row["messages"]
        if number == len(messages) - 1:
            prompt, _ = self.write({**row, "messages": messages[:number]}, add_generation_prompt=True)
            if finder.text.startswith(prompt):
                return range(len(prompt), finder.find_end(len(prompt), len(finder.text)))
        raise ValueError(
            f"message {number + 1} cannot be found with certainty in the text that the chat template writes. "
            "--only-last-turn trains the last answer alone"
        )

    def refuse_special_names(self, row: dict[str, Any], text: str) -> None:
        """Raise ValueError if a text of the row would become special tokens of the document."""
        found = []
        for place, value in list_texts(row):
            if SURROGATE.search(value):
                raise ValueError(f"{place} has half a surrogate pair, which is no character: {value!r:.60}")
            if name := self.special_names.search(value):
                found.append(f"{place} has the text {name.group()!r}, which would become a special token")
        if found and self.write(self.remove_special_names(row))[0] != text:
            raise ValueError(found[0])

    def remove_special_names(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self.remove_special_names(key): self.remove_special_names(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.remove_special_names(item) for item in value]
        return self.special_names.sub("", value) if isinstance(value, str) else value


def list_texts(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield every string in a JSON value, with its place: messages[0].content."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield f"a key in {place or 'the row'}", key
            yield from list_texts(item, f"{place}.{key}" if place else key)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from list_texts(item, f"{place}[{number}]")


def refuse_lost_texts(messages: list[dict], finder: TurnFinder, trained: list[int]) -> None:
    """Raise ValueError if the template leaves out the text of an answer, or of a list of parts."""
    written = {mark.message for mark in finder.marks}
    for number, message in enumerate(messages):
        is_checked = number in trained or isinstance(message.get("content"), list)
        if finder.marks and is_checked and number not in written and mark(message, number) != message:
            kinds = "a string instead of a list of parts, or the reverse"
            raise ValueError(f"the chat template leaves out the text of message {number + 1}. Try {kinds}")


def overlap(first: range, second: range) -> bool:
    return first.start < second.stop and second.start < first.stop


def normalize(text: str, turns: list[range], tokenizer: Tokenizer) -> tuple[str, list[range]]:
    """Return the text that `tokenizer` encodes, and the turns in it. Raises ValueError if they cannot be told apart."""
    whole = tokenizer.normalize(text)
    if whole == text:
        return text, turns
    pieces = []
    moved = []
    position = 0
    for turn in turns:
        pieces.append(tokenizer.normalize(text[position : turn.start]))
        start = sum(map(len, pieces))
        pieces.append(tokenizer.normalize(text[turn.start : turn.stop]))
        moved.append(range(start, start + len(pieces[-1])))
        position = turn.stop
    pieces.append(tokenizer.normalize(text[position:]))
    if "".join(pieces) != whole:
        raise ValueError("the first character of an answer is a combining mark that changes the text before it")
    return whole, moved


def mark_targets(ends: list[int], turns: list[range]) -> bytearray:
    """Return 1 for each token with a character in a turn. `ends`: the index after each token's last character."""
    targets = bytearray(len(ends))
    for turn in turns:
        if turn:
            first = bisect_right(ends, turn.start)
            last = bisect_left(ends, turn.stop)  # the token with the last character, or with the first part of it
            stop = bisect_right(ends, ends[last])
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
    templates = read_templates(folder, config)
    is_llama3 = not templates and LLAMA_3_NAMES <= tokenizer.special.keys()
    if is_llama3:
        templates = {"default": LLAMA_3}
    if not templates:
        why = f"{folder} has no chat template, and its tokenizer does not have the special tokens of Llama 3"
        raise PreparationError(f"{why}. Put the model's chat_template.jinja there, or name another --tokenizer")
    try:
        for template in templates.values():  # compiles it; a corpus does not depend on today's date
            compiled = transformers._compile_jinja_template(template)
            compiled.environment.globals["strftime_now"] = DATE.strftime
    except Exception as error:  # jinja2.TemplateError, or anything else in an unusual template
        raise PreparationError(f"The chat template of {folder} cannot be read: {error}") from None
    variables = read_special_tokens(read_json(folder / "special_tokens_map.json", may_be_missing=True))
    return ChatFormat(templates, variables | read_special_tokens(config), tokenizer, transformers, is_llama3)


def read_templates(folder: Path, config: JsonObject) -> dict[str, str]:
    """Return the chat templates of a folder by name: of its files, else of tokenizer_config.json. Raises UserError."""
    files = {"default": folder / "chat_template.jinja"}
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        files[file.stem] = file
    found = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    if found:
        return found
    template = config.take("chat_template", str | dict | list[dict], {})
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list):
        return {entry.take("name", str): entry.take("template", str) for entry in template}
    return {name: template.take(name, str) for name in template}


def read_special_tokens(config: JsonObject) -> dict[str, str]:
    """Return the special tokens that a file of the tokenizer names, such as eos_token."""
    found = {}
    for key in config:
        if key.endswith("_token"):
            token = config.take(key, str | dict | bool, None)
            found[key] = token.take("content", str) if isinstance(token, dict) else token
    return {key: token for key, token in found.items() if isinstance(token, str)}
