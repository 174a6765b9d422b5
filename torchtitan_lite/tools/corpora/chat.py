"""Write conversations as documents in which only the assistant's turns are targets.

    [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]

    <|begin_of_text|><|start_header_id|>user<|end_header_id|>\\n\\n2+2?<|eot_id|>
    <|start_header_id|>assistant<|end_header_id|>\\n\\n4<|eot_id|>
                                                     ^^^^^^^^^^^ targets

transformers (the extra `chat`) reads the tokenizer's folder and runs its chat template, so the text equals the text of
`apply_chat_template`. Targets are the text between the template's {% generation %} marks. Without marks, a turn is
found in the whole text by two other texts of the template:

    prompt    the conversation before the answer, and the text that asks for it: the turn begins at its end
    answered  the conversation up to the answer: the turn ends where its text is the end of this one

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

ASSISTANT = "assistant"
DATE = datetime(2024, 7, 26)  # the default date of Llama 3.1's own template
LLAMA_3_NAMES = {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}
LLAMA_3 = (  # arXiv:2407.21783, and Llama 3's model card
    "<|begin_of_text|>{% for message in messages %}"
    "{% if tools or message.tool_calls %}{{ raise_exception('it has tools, which need a template') }}{% endif %}"
    "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
NAME = re.compile(r"<[^<>\s]+>")  # of a special token, which may be plain text to this tokenizer
SIGN = "\U00100000"  # a text that no template writes
EXCHANGE = [{"role": "user", "content": SIGN}, {"role": ASSISTANT, "content": SIGN}]


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
    def end(self) -> str:
        """The name that usually ends an answer, such as "<|im_end|>"; "" if there is none."""
        text = self.try_write({"messages": EXCHANGE})
        found = NAME.match(text.rpartition(SIGN)[2].lstrip())
        return found.group() if found else ""

    @property
    def end_ids(self) -> set[int]:
        """The special token that ends an answer, if there is one."""
        special = self.tokenizer.special
        return {special[self.end]} if self.end in special else set()

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
        text, marked = self.write(row)
        self.refuse_special_names(row, text)
        messages = row["messages"]
        answers = [n for n, message in enumerate(messages) if message["role"] == ASSISTANT]
        trained = answers[-1:] if only_last_turn else answers
        trained = [number for number in trained if messages[number].get("weight", 1)]
        for number in trained:
            self.refuse_lost_answer(row, text, number)
        turns = marked
        if marked is None:
            turns = [self.find_turn(row, text, number) for number in trained]
        elif len(marked) == len(answers):
            turns = [marked[answers.index(number)] for number in trained]
        elif trained != answers:
            raise ValueError("the template does not mark each answer once, so none can be left out")
        if not any(turns):
            raise ValueError("it has no assistant turn to train on, so it has no targets")
        return text, turns

    def find_turn(self, row: dict[str, Any], whole: str, number: int) -> range:
        """Return the characters of an answer in the text `whole`. Raises ValueError if that is not certain."""
        messages = row["messages"]
        part = {**row, "messages": messages[:number]}
        prompt = self.try_write(part, add_generation_prompt=True)
        start = len(os.path.commonprefix([prompt, whole]))
        is_certain = prompt != "" and start == len(prompt)
        if start < len(prompt):
            # The answer can leave out the last names of the prompt, such as <think>.
            if prompt[start] != "<":
                start = prompt.rfind("<", 0, start)
            before = os.path.commonprefix([prompt, self.try_write(part)])
            is_certain = start > len(before)
        part["messages"] = messages[: number + 1]
        answered = self.try_write(part).rstrip()
        usual = answered[: answered.rfind(self.end) + len(self.end)]  # without another prompt
        ends = [found.end() for found in NAME.finditer(whole, start)]
        for stop in [*ends, len(whole.rstrip())]:
            turn = whole[start:stop]
            is_end = answered.endswith(turn) or usual.endswith(turn)
            if is_certain and is_end:
                return range(start, stop)
        why = f"message {number + 1} cannot be found with certainty in the template's text"
        raise ValueError(f"{why}; --only-last-turn trains the last answer alone")

    def refuse_special_names(self, row: dict[str, Any], text: str) -> None:
        """Raise ValueError if a text of the row would become special tokens of the document."""
        parts = {"column": row}
        for number, message in enumerate(row["messages"], 1):
            parts[f"message {number}:"] = message
        for place, part in parts.items():
            for key, value in part.items():
                content = json.dumps(value, ensure_ascii=False)
                found = self.special_name.search(content)
                if key == "messages" or not found:
                    continue
                other = json.loads(self.special_name.sub("", content))
                if self.is_written(row, part, key, other, text):
                    why = f"{place} {key} has the text {found.group()!r}"
                    raise ValueError(f"{why}, which would become a special token")

    def refuse_lost_answer(self, row: dict[str, Any], text: str, number: int) -> None:
        """Raise ValueError if the template leaves out a text or a tool call of an answer."""
        message = row["messages"][number]
        for key in ("content", "tool_calls"):
            value = str(message.get(key, "")).strip()
            if value and not self.is_written(row, message, key, "", text):
                raise ValueError(f"the chat template leaves out {key} of message {number + 1}")

    def is_written(self, row: dict[str, Any], part: dict, key: str, other: Any, text: str) -> bool:
        """Return whether another value in a part of the row gives another text than `text`."""
        value = part[key]
        part[key] = other
        is_written = self.try_write(row) != text
        part[key] = value
        return is_written


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
