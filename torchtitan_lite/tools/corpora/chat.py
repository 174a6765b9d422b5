"""Write conversations as documents in which only the assistant's turns are targets.

    [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]

    <|begin_of_text|><|start_header_id|>user<|end_header_id|>\\n\\n2+2?<|eot_id|>
    <|start_header_id|>assistant<|end_header_id|>\\n\\n4<|eot_id|>
                                                     ^^^^^^^^^^^ targets

The chat template is in the tokenizer's folder: chat_template.jinja, or `chat_template` in tokenizer_config.json.
Without one, the template of Llama 3 is used, as above. A turn is the text that the template adds for a message, after
the conversation so far and the generation prompt. If a template rewrites earlier turns, there is no such text, and the
conversation is refused.

Jinja runs the template in its sandbox, without access to the date, so a corpus depends only on its files.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtitan_lite.config.files import import_extra, read_json
from torchtitan_lite.data.tokenizer import Tokenizer
from torchtitan_lite.data.vocabulary import CONFIG
from torchtitan_lite.tools.corpora.text_files import PreparationError

ASSISTANT = "assistant"
LLAMA_3 = (  # arXiv:2407.21783, and Llama 3's model card
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MARKS = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")  # a tag of transformers that jinja2 does not support


@dataclass(frozen=True)
class ChatFormat:
    """Formats a conversation as text, and finds the assistant's turns in it."""

    write: Callable[..., str]  # messages, add_generation_prompt -> text
    tokenizer: Tokenizer

    def render(self, messages: Any) -> tuple[str, list[range]]:
        """Return the text, with special tokens as their names, and the character range of each assistant turn.

        Raises ValueError if the conversation cannot be formatted.
        """
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise ValueError("it is not a list of messages")
        for message in messages:
            if not all(isinstance(message.get(key), str) for key in ("role", "content")):
                raise ValueError(f"a message needs a role and a content, both strings: {message!r:.60}")
            if spelled := [name for name in self.tokenizer.special if name in message["content"]]:
                raise ValueError(f"a message contains the text {spelled[0]!r}, which would become a special token")
        messages = [{**message, "content": self.tokenizer.normalize(message["content"])} for message in messages]
        text = self.write(messages)
        turns = [self.find_turn(text, messages, n) for n, each in enumerate(messages) if each["role"] == ASSISTANT]
        if not turns:
            raise ValueError("it has no assistant turn, so it has no targets")
        return text, turns

    def find_turn(self, text: str, messages: list[dict], number: int) -> range:
        """Return the character range of message `number` in `text`. Raises ValueError."""
        before = self.write(messages[:number], add_generation_prompt=True)
        after = self.write(messages[: number + 1])
        if not (text.startswith(after) and after.startswith(before)):
            raise ValueError(f"the chat template changes message {number + 1} when more messages follow")
        return range(len(before), len(after))


def read_chat_format(tokenizer: Tokenizer) -> ChatFormat:
    """Return the chat format in the tokenizer's folder, or Llama 3's. Raises UserError."""
    config = read_json(tokenizer.path.with_name(CONFIG), may_be_missing=True)
    file = tokenizer.path.with_name("chat_template.jinja")
    template = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template", LLAMA_3)
    if isinstance(template, list):  # several named templates
        template = {entry["name"]: entry["template"] for entry in template}["default"]
    texts = {id: name for name, id in tokenizer.special.items()}
    names = {"bos_token": texts.get(tokenizer.bos_id, ""), "eos_token": texts.get(tokenizer.eos_id, "")}
    jinja2, sandbox = import_extra("jinja2", "data"), import_extra("jinja2.sandbox", "data")
    environment = sandbox.ImmutableSandboxedEnvironment(  # as in transformers
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = refuse
    try:
        compiled = environment.from_string(MARKS.sub("", template))
    except jinja2.TemplateError as error:
        raise PreparationError(f"The chat template of {tokenizer.path.parent} cannot be read: {error}") from None

    def write(messages: list[dict], add_generation_prompt: bool = False) -> str:
        try:
            return compiled.render(messages=messages, add_generation_prompt=add_generation_prompt, **names)
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template raised: {error}") from None

    return ChatFormat(write, tokenizer)


def refuse(message: str) -> None:
    raise ValueError(message)
