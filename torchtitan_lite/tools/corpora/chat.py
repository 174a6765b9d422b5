"""Write conversations as documents in which only the assistant's turns are targets.

    [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]

    <|begin_of_text|><|start_header_id|>user<|end_header_id|>\\n\\n2+2?<|eot_id|>
    <|start_header_id|>assistant<|end_header_id|>\\n\\n4<|eot_id|>
                                                     ^^^^^^^^^^^ targets

transformers (the extra `chat`) reads the tokenizer's folder and runs its chat template, so the text equals the text of
`apply_chat_template`. Targets are the text between the template's {% generation %} marks. If a template has no such
marks, two more texts are rendered, which show where a turn begins and ends in the whole text:

    prompt    the conversation before the answer, and the text that asks for the answer. The turn begins after this text
    signed    the conversation with a placeholder (SIGN) instead of the answer. The text after the placeholder and its
              end token also occurs in the whole text: the turn ends where this text begins

A corpus must depend only on its input files, so a template that asks for today's date gets DATE.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

from torchtitan_lite.data.encoding import match_longest
from torchtitan_lite.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from torchtitan_lite.files import import_extra
from torchtitan_lite.tools.corpora.dialects import read_conversation
from torchtitan_lite.tools.corpora.text_files import PreparationError

DATE = datetime(2024, 7, 26)  # the default date in the chat template of Llama 3.1
LLAMA_3 = (  # arXiv:2407.21783, and Llama 3's model card
    "<|begin_of_text|>{% for message in messages %}"
    "{% if tools or message.tool_calls %}{{ raise_exception('it has tools, which need a template') }}{% endif %}"
    "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA_3_NAMES = set(match_longest(SPECIAL_TOKENS).findall(LLAMA_3))
SIGN = "\U00100000"  # a placeholder that no template writes
TEMPLATE_ROLES = ("system", "developer", "user", "assistant", "tool")
# Arguments of the function that renders a template. If one of these arguments is true, the text does not end with the
# last answer.
OF_ENDS = ("continue_final_message", "add_generation_prompt")
# Arguments of the rendering function that are not variables of a template.
ARGUMENTS = ("conversations", "chat_template", "return_assistant_tokens_mask")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
CONTENTS = ("content", "tool_calls", "function_call", *MEDIA)  # keys of a message


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as text, normalized for `Tokenizer.encode_special`."""

    text: str
    turns: list[range]  # ranges of characters that are targets
    unused: list[
        str
    ]  # columns and message keys that the text does not contain; the summary lists them


@dataclass
class ChatFormat:
    """Writes a conversation as text, and finds the assistant's turns in it."""

    tokenizer: Tokenizer
    theirs: Any  # transformers' tokenizer, which has the chat templates and names of special tokens
    templates: Any  # transformers' functions for chat templates
    name: str  # for the summary

    def __post_init__(self) -> None:
        """Find the form in which the template accepts message contents, and the text that it writes after an answer.

        takes_parts  whether contents must be [{"type": "text", "text": ...}], as for many models with image input
        end          the special token after an answer, such as "<|im_end|>", or None
        closings     the texts that may follow an answer. Each text ends with `end`, or before the final white space if
                     `end` is None. If the template writes an end token after a user's message, the second text is the
                     text after this message, because some templates write it after an answer that more messages follow
        """
        self.special = match_longest(self.tokenizer.special)
        _, exchange = read_conversation({"prompt": SIGN, "completion": SIGN})
        # if the template accepts neither form, takes_parts stays False
        for self.takes_parts in (False, True, False):
            _, sign, after = self.try_write(exchange).rpartition(SIGN)
            if sign:
                break
        name = self.special.search(after)
        self.end = name and name[0]
        self.closings = [after[: name.end()] if name else after.rstrip()]
        question = {"messages": [{"role": "user", "content": SIGN}]}
        _, _, after = self.try_write(question).rpartition(SIGN)
        if name := self.special.search(after):
            self.closings.append(after[: name.end()])

    def write(self, row: dict) -> tuple[str, list[range] | None]:
        """Return the text of a conversation, and the ranges between its {% generation %} marks, as transformers does.

        Returns None for the ranges if the template has no such marks. Raises ValueError if the template refuses the
        conversation.
        """
        template = self.theirs.get_chat_template(tools=row.get("tools"))
        has_marks = "endgeneration" in template
        variables = self.theirs.special_tokens_map | row
        messages = variables.pop("messages")
        for name in ARGUMENTS:
            variables.pop(name, None)
        if self.takes_parts:
            messages = [
                {**message, "content": [{"type": "text", "text": message.get("content", "")}]}
                for message in messages
            ]
        try:
            (text,), places = self.templates.render_jinja_template(
                [messages],
                chat_template=template,
                return_assistant_tokens_mask=has_marks,
                **variables,
            )
        except Exception as error:  # a template is a program, which can raise anything
            raise ValueError(
                f"the chat template refuses the conversation: {type(error).__name__}: {error}"
            ) from None
        return text, [range(*place) for place in places[0]] if has_marks else None

    def try_write(self, row: dict) -> str:
        """Return the text of a conversation, or "" if the template raises an error."""
        try:
            return self.write(row)[0]
        except ValueError:
            return ""

    def render(self, row: dict, *, only_last_turn: bool = False) -> RenderedChat:
        """Write a conversation, with special tokens spelled by name. Raises ValueError with the reason.

        If the template does not accept a message without a content, such as a tool call, the content is "", or null if
        the template tests for null.
        """
        for name in OF_ENDS:
            if row.get(name):
                raise ValueError(
                    f"{name} is {row[name]!r}, so the text would not end with the answer. Remove it"
                )
        messages = row["messages"]
        if not self.try_write(row):
            template = self.theirs.get_chat_template(tools=row.get("tools"))
            content = None if "is none" in template else ""
            messages = [{"content": content, **message} for message in messages]
            row = row | {"messages": messages}
        text, turns = self.write(row)
        unused = self.check_fields(row, text)
        answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        trained = answers[-1:] if only_last_turn else answers
        trained = [n for n in trained if "weight" not in messages[n]]
        if turns is None:
            turns = [self.find_turn(row, text, n) for n in trained]
        elif len(turns) == len(answers):
            turns = [turns[answers.index(n)] for n in trained]
        elif trained != answers:
            raise ValueError(
                "the template does not mark each answer exactly once, so no answer can be excluded from the targets"
            )
        if not any(turns):
            raise ValueError("it has no targets, because no assistant turn of weight 1 has text")
        text, turns = normalize_turns(text, turns, self.tokenizer.normalize)
        return RenderedChat(text, turns, unused)

    def check_fields(self, row: dict, text: str) -> list[str]:
        """Return descriptions of the fields that are not in the text.

        Raises ValueError if a field would become special tokens, or if the template does not use a role or a field that
        is part of the conversation. A field is in the text if a different value would change the text. A column such as
        Qwen3's enable_thinking may change only the text that asks for an answer. Targets begin after this text.
        """
        unused = {}
        template = self.theirs.get_chat_template(tools=row.get("tools"))
        for number, part in enumerate([row, *row["messages"]]):
            place = f"message {number}'s" if number else "column"
            asks = {} if number else {"add_generation_prompt": True}
            written = text if number else self.try_write(row | asks)
            needed = CONTENTS if number else MEDIA
            role = part["role"] if number else "user"
            is_named = f"'{role}'" in template or f'"{role}"' in template
            if role not in TEMPLATE_ROLES and not is_named:
                raise ValueError(
                    f"{place} role {role!r} is unknown to the chat template. Use {', '.join(TEMPLATE_ROLES)}"
                )
            for key, value in part.items():
                named = self.special.findall(str(value))
                is_no_text = key == "messages" or (number and key in ("role", "weight"))
                if is_no_text or value in ("", [], {}):
                    continue
                is_written = True
                for other in list_varied(value):
                    part[key] = other
                    is_written = is_written and self.try_write(row | asks) != written
                part[key] = value
                if named and is_written:
                    raise ValueError(
                        f"{place} {key} has the text {named[0]!r}, which would become a special token"
                    )
                if key in needed and not is_written:
                    raise ValueError(f"the chat template leaves out {place} {key}")
                if not is_written:
                    noun = f"messages whose {key}" if number else f"a column {key}, which"
                    unused[f"conversations with {noun} is not used"] = None
                elif key == "content" and isinstance(value, str) and value.strip() not in text:
                    unused["conversations with content that the template shortens or changes"] = (
                        None
                    )
        return list(unused)

    def find_turn(self, row: dict, whole: str, number: int) -> range:
        """Return the range of an answer's characters in `whole`. Raises ValueError if the range cannot be determined
        with certainty."""
        messages = row["messages"]
        earlier = {"messages": messages[:number], "add_generation_prompt": True}
        prompt = self.try_write(row | earlier)
        if not prompt:
            raise ValueError(
                f"message {number + 1} is an answer, but the chat template cannot write the conversation before it. "
                'Begin with a user message, or give this answer "weight": 0'
            )
        signed = messages.copy()
        signed[number] = {"role": "assistant", "content": SIGN}
        head, sign, tail = self.try_write(row | {"messages": signed}).partition(SIGN)
        # Some templates add text such as <think> to the end of the prompt, but not in front of an answer that the
        # conversation already contains. For these templates, the answer begins with its content.
        if whole.startswith(prompt):
            head = prompt
        elif messages[number - 1]["role"] == "assistant":
            # In some templates, the form of an answer depends on whether more messages follow it.
            asks = prompt.removeprefix(self.try_write(row | {"messages": messages[:number]}))
            n_answers = sum(each["role"] == "assistant" for each in messages[: number + 1])
            if head.count(asks) == n_answers:
                head = prompt = head[: head.rfind(asks)] + asks
        closing = next(filter(tail.startswith, self.closings), "")
        rest = tail.removeprefix(closing)
        start = len(head)
        if sign and head and prompt.startswith(head) and whole.startswith(head):
            if whole[start:].endswith(rest):
                return range(start, len(whole) - len(rest))
        raise ValueError(
            f"the text of message {number + 1} cannot be found with certainty. Its generation prompt ends with "
            f'{prompt[-40:]!r}. Give this message "weight": 0, or train only the last answer (--only-last-turn)'
        )


def list_varied(value: Any) -> list[Any]:
    """Return variants of a field's value, such as an empty list, or a string whose end is changed.

    Each variant of a list lacks one element. For an element that is a tool call, there are additional variants: the
    call has a different name, or one argument is different.
    """
    is_nested = isinstance(value, list | dict)
    others = [type(value)()] if is_nested else list_leaf_varied(value)
    if isinstance(value, str):
        others.append(value + SIGN)
    elif isinstance(value, list):
        for n, each in enumerate(value):
            for instead in [[], *([other] for other in list_other_calls(each))]:
                others.append([*value[:n], *instead, *value[n + 1 :]])
    return others


def list_other_calls(call: Any) -> list[Any]:
    """Return tool calls that differ from `call` in the name or one argument, not in the id or type."""
    if not isinstance(call, dict):
        return []
    if "function" in call:
        return [{**call, "function": other} for other in list_other_calls(call["function"])]
    parts = {key: call[key] for key in ("name", "arguments") if key in call}
    return [{**call, **other} for other in list_leaf_varied(parts)]


def list_leaf_varied(value: Any) -> list[Any]:
    """Return copies of a JSON value, each with one leaf changed. A boolean is inverted; strings, numbers and null
    become SIGN."""
    if not isinstance(value, dict | list):
        return [not value if isinstance(value, bool) else SIGN]
    copies = []
    for key in value if isinstance(value, dict) else range(len(value)):
        for other in list_leaf_varied(value[key]):
            copied = value.copy()
            copied[key] = other
            copies.append(copied)
    return copies


def normalize_turns(
    text: str, turns: list[range], normalize: Callable[[str], str]
) -> tuple[str, list[range]]:
    """Normalize the text inside and between turns. Return the whole text and the ranges of the turns."""
    cuts = {0, len(text)}
    for turn in turns:
        cuts |= {turn.start, turn.stop}
    cuts = sorted(cuts)
    pieces = [normalize(text[start:stop]) for start, stop in pairwise(cuts)]
    moved = dict(zip(cuts, accumulate(map(len, pieces), initial=0), strict=True))
    return "".join(pieces), [range(moved[turn.start], moved[turn.stop]) for turn in turns]


def mark_targets(ends: list[int], turns: list[range]) -> bytearray:
    """Return one byte per token: 1 if a character of the token belongs to a turn, otherwise 0. `ends` has the index
    after the last character of each token."""
    targets = bytearray(len(ends))
    for turn in turns:
        first = bisect_right(ends, turn.start)
        last = bisect_left(ends, turn.stop)
        stop = bisect_right(ends, ends[last])  # a character can consist of several tokens
        targets[first:stop] = b"\1" * (stop - first)
    return targets


def read_chat_format(tokenizer: Tokenizer) -> ChatFormat:
    """Return the chat format in the tokenizer's folder, or the format of Llama 3 if the folder has none. Raises
    UserError."""
    transformers = import_extra("transformers", "chat")
    templates = transformers.utils.chat_template_utils
    templates.datetime = SimpleNamespace(now=lambda: DATE)
    name = f"the tokenizer's chat template (if the template asks for today's date, it gets {DATE:%d %B %Y})"
    try:
        if tokenizer.path.suffix == ".json":
            theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer.path.parent)
        else:
            theirs = transformers.PreTrainedTokenizerBase()
        if not theirs.chat_template and tokenizer.special.keys() >= LLAMA_3_NAMES:
            theirs.chat_template = LLAMA_3
            name = "the format of Llama 3, because the tokenizer has no chat template"
        theirs.get_chat_template()  # raises an error if there is no template
        if isinstance(theirs.chat_template, dict):
            name += f", `default` or `tool_use` of {', '.join(theirs.chat_template)}"
        return ChatFormat(tokenizer, theirs, templates, name)
    except Exception as error:  # jinja2 and transformers raise their own errors
        place = tokenizer.path
        remedy = "Name a different --tokenizer"
        if place.is_file():
            place = place.parent
            remedy = f"{remedy}, or put the model's chat_template.jinja into this folder"
        raise PreparationError(f"{place} has no usable chat template: {error}. {remedy}") from None
