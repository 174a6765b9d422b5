"""Write conversations as documents in which only the assistant's turns are targets.

    [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]

    <|begin_of_text|><|start_header_id|>user<|end_header_id|>\\n\\n2+2?<|eot_id|>
    <|start_header_id|>assistant<|end_header_id|>\\n\\n4<|eot_id|>
                                                     ^^^^^^^^^^^ targets

transformers (the extra `chat`) reads the tokenizer's folder and runs its chat template, so the text equals the text of
`apply_chat_template`. Targets are the text between the template's {% generation %} marks. turns.py finds them if a
template has no marks.

A corpus depends only on its files: a template that asks for today's date gets DATE.
"""

import json
import os
import re
import sys
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from types import ModuleType
from typing import Any

from torchtitan_lite.config.files import import_extra
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.tools.corpora.text_files import PreparationError
from torchtitan_lite.tools.corpora.turns import (
    MARK,
    NAME,
    NAMES,
    find_start,
    find_stop,
    get_mark,
    mark_messages,
)

ASSISTANT = "assistant"
DATE = datetime(2024, 7, 26)  # the default date of Llama 3.1's own template
LLAMA_3_NAMES = {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}
LLAMA_3 = (  # arXiv:2407.21783, and Llama 3's model card
    "<|begin_of_text|>{% for message in messages %}"
    "{% if tools or message.tool_calls %}{{ raise_exception('it has tools, which need a template') }}{% endif %}"
    "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
SIGN = get_mark(0)
OTHER = {"role": ASSISTANT, "content": SIGN}


@dataclass(frozen=True)
class ChatFormat:
    """Writes a conversation as text, and finds the assistant's turns in it."""

    tokenizer: Tokenizer
    theirs: Any  # transformers' tokenizer, which has the chat templates and names of special tokens
    templates: ModuleType  # transformers' functions for chat templates
    name: str  # for the summary

    @cached_property
    def special_name(self) -> re.Pattern:
        names = sorted(self.tokenizer.special, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or "(?!)")  # (?!) matches nothing

    @cached_property
    def content_type(self) -> type | None:
        """The only type of content that the template writes: str, or list of parts. None: both or neither."""
        written = []
        for content in (SIGN, [{"type": "text", "text": SIGN}]):
            if SIGN in self.try_write({"messages": [{"role": "user", "content": content}]}):
                written.append(type(content))
        return written[0] if len(written) == 1 else None

    def convert(self, message: dict) -> dict:
        """Return a message with its text in the type of content that the template writes."""
        content = message.get("content")
        if isinstance(content, str) and self.content_type is list:
            content = [{"type": "text", "text": content}]
        elif isinstance(content, list) and self.content_type is str:
            texts = [part.get("text") for part in content]
            content = content if None in texts else "".join(texts)
        return message if content is None else {**message, "content": content}

    @cached_property
    def end(self) -> str:
        """The names that end an answer, such as "<|im_end|>"; "" if answers end with the next header."""
        question = self.convert({"role": "user", "content": SIGN})
        row = {"messages": [question, {**question, "role": ASSISTANT}]}
        text = self.try_write(row)
        always_asks = text == self.try_write(row, add_generation_prompt=True)
        names = NAME if always_asks else NAMES
        found = names.match(text.rpartition(SIGN)[2].lstrip())
        return found.group() if found else ""

    @property
    def end_ids(self) -> set[int]:
        """The special token that ends an answer, if there is one."""
        ids, _ = self.tokenizer.encode_special(self.end)
        return {*ids[-1:]} & {*self.tokenizer.special.values()}

    def write(
        self, row: dict[str, Any], *, add_generation_prompt: bool = False
    ) -> tuple[str, list[range] | None]:
        """Return the text of a conversation, and the ranges of its {% generation %} marks, as transformers does.

        None: the template has no such marks. Raises ValueError if the template refuses the conversation.
        """
        template = self.theirs.get_chat_template(tools=row.get("tools"))
        variables = self.theirs.special_tokens_map | row
        messages = variables.pop("messages")
        has_marks = "endgeneration" in template
        try:
            (text,), places = self.templates.render_jinja_template(
                [messages],
                chat_template=template,
                return_assistant_tokens_mask=has_marks,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except Exception as error:  # a template is a program, which can raise anything
            why = f"the chat template refuses it: {type(error).__name__}: {error}"
            raise ValueError(why) from None
        return text, [range(*place) for place in places[0]] if has_marks else None

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
        messages = [self.convert(message) for message in row["messages"]]
        row["messages"] = messages
        text, _ = self.write(row)
        self.refuse_special_names(row, text)
        marked = {**row, "messages": mark_messages(messages)}
        whole, turns = self.write(marked)
        if MARK.sub("", whole) != text:
            raise ValueError("the chat template changes its texts, so no answer can be found")
        answers = {n for n, message in enumerate(messages) if message["role"] == ASSISTANT}
        trained = {max(answers)} if only_last_turn and answers else answers
        trained = {number for number in trained if messages[number].get("weight", 1)}
        for number in trained:
            if marked["messages"][number] != messages[number] and get_mark(number) not in whole:
                raise ValueError(f"the chat template leaves out the text of message {number + 1}")
        if turns is None:
            turns = [self.find_turn(marked, whole, number) for number in sorted(trained)]
        else:
            others = {get_mark(number) for number in answers - trained}
            turns = [turn for turn in turns if others.isdisjoint(whole[turn.start : turn.stop])]
        if not any(turns):
            raise ValueError("it has no assistant turn to train on, so it has no targets")
        places = []
        for turn in turns:
            start = len(MARK.sub("", whole[: turn.start]))
            length = len(MARK.sub("", whole[turn.start : turn.stop]))
            places.append(range(start, start + length))
        return text, places

    def find_turn(self, marked: dict[str, Any], whole: str, number: int) -> range:
        """Return the characters of an answer in the marked text `whole`. Raises ValueError if that is not certain."""
        messages = marked["messages"]
        asked = {**marked, "messages": messages[:number]}
        answered = self.try_write({**marked, "messages": messages[: number + 1]})
        if number:
            prompt = self.try_write(asked, add_generation_prompt=True)
            start = find_start(whole, prompt, self.try_write(asked), number)
        else:  # a greeting, which no prompt asks for
            other = self.try_write({**marked, "messages": [self.convert(OTHER), *messages[1:]]})
            start = len(os.path.commonprefix([whole, other]))
        stop = None
        if start is not None:
            stop = find_stop(whole, start, answered, number, self.end)
        if stop is None:
            why = f"message {number + 1} cannot be found with certainty in the text of the chat template"
            raise ValueError(f"{why}; --only-last-turn trains the last answer alone")
        return range(start, stop)

    def refuse_special_names(self, row: dict[str, Any], text: str) -> None:
        """Raise ValueError if a text of the row would become special tokens of the document."""
        parts = [("column", row)]
        for number, message in enumerate(row["messages"], 1):
            parts.append((f"message {number}:", message))
        for place, part in parts:
            for key, value in part.items():
                content = json.dumps(value, ensure_ascii=False)
                found = self.special_name.search(content)
                if key == "messages" or not found:
                    continue
                part[key] = json.loads(self.special_name.sub("", content))
                is_written = self.try_write(row) != text
                part[key] = value
                if is_written:
                    why = f"{place} {key} has the text {found.group()!r}"
                    raise ValueError(f"{why}, which would become a special token")


def mark_targets(ends: list[int], turns: list[range]) -> bytearray:
    """Return 1 for each token with a character in a turn. `ends`: the index after each token's last character."""
    targets = bytearray(len(ends))
    for turn in turns:
        first = bisect_right(ends, turn.start)
        last = min(bisect_left(ends, turn.stop), len(ends) - 1)
        stop = bisect_right(ends, ends[last])  # a character can have several tokens
        targets[first:stop] = bytes([1]) * (stop - first)
    return targets


def read_chat_format(tokenizer: Tokenizer) -> ChatFormat:
    """Return the chat format in the tokenizer's folder, or Llama 3's. Raises UserError."""
    if sys.version_info < (3, 11):
        raise PreparationError(
            "conversations need Python 3.11 or newer, because transformers 5 does"
        )
    import_extra("jinja2", "chat")
    transformers = import_extra("transformers", "chat")
    templates = import_extra("transformers.utils.chat_template_utils", "chat")
    folder = tokenizer.path.parent
    name = "the tokenizer's chat template"
    try:
        if tokenizer.path.suffix == ".json":
            theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        else:
            theirs = transformers.PreTrainedTokenizerBase()
        if not theirs.chat_template and LLAMA_3_NAMES <= tokenizer.special.keys():
            theirs.chat_template = LLAMA_3
            name = "the format of Llama 3, because the tokenizer has no chat template"
        if not theirs.chat_template:
            raise ValueError("there is none")
        for tools in (None, []):
            template = theirs.get_chat_template(tools=tools)
            compiled = templates._compile_jinja_template(template)
            compiled.environment.globals["strftime_now"] = DATE.strftime
    except Exception as error:  # of jinja2 and transformers
        remedy = "Put chat_template.jinja of its model there, or name another --tokenizer"
        raise PreparationError(
            f"{folder} has no chat template that can be used: {error}. {remedy}"
        ) from None
    if "strftime_now" in template:
        name += f", with the date {DATE:%d %B %Y}"
    return ChatFormat(tokenizer, theirs, templates, name)
