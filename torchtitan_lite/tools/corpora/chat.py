"""Conversations to documents whose targets are the assistant's turns alone.

    [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]

    <|begin_of_text|><|start_header_id|>user<|end_header_id|>\\n\\n2+2?<|eot_id|>
    <|start_header_id|>assistant<|end_header_id|>\\n\\n4<|eot_id|>
                                                     ^^^^^^^^^^^ targets: what the model has to write

The chat template beside the tokenizer says how a conversation is written: chat_template.jinja, or `chat_template` of
tokenizer_config.json. Without one it is Llama 3's, as above. A turn is what the template adds to the conversation
before it and the prompt for the assistant. A template that writes a turn otherwise when others follow has no such turn,
and the conversation is refused.

A template is a program. Jinja runs it in its sandbox and tells it no date: a corpus is a function of its files.
"""

import importlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtitan_lite.data.tokenizer import CONFIG, Tokenizer, read_json
from torchtitan_lite.tools.corpora.text_files import PreparationError

ASSISTANT = "assistant"
LLAMA_3 = (  # arXiv:2407.21783, and the model card of Llama 3
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MARKS = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")  # of transformers, around the assistant's text


@dataclass(frozen=True)
class ChatFormat:
    """How a conversation is written."""

    write: Callable[..., str]  # messages, add_generation_prompt -> text
    special: frozenset[str]  # a message that spells one of these tokens out could end its own turn

    def render(self, messages: Any) -> tuple[str, list[range]]:
        """Return the text, with special tokens spelled out, and where in it the assistant's turns are.

        Raises ValueError that says why it cannot be a document.
        """
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise ValueError("it is no list of messages")
        for message in messages:
            if not all(isinstance(message.get(key), str) for key in ("role", "content")):
                raise ValueError(f"a message has not both a role and a content, as texts: {message!r:.60}")
            if spelled := [name for name in self.special if name in message["content"]]:
                raise ValueError(f"a message spells out {spelled[0]!r}, which would be that token")
        text = self.write(messages)
        turns = [self.find_turn(text, messages, n) for n, each in enumerate(messages) if each["role"] == ASSISTANT]
        if not turns:
            raise ValueError("it has no turn of an assistant, so nothing is learned from it")
        return text, turns

    def find_turn(self, text: str, messages: list[dict], number: int) -> range:
        """Return where message `number` is written in `text`. Raises ValueError."""
        before = self.write(messages[:number], add_generation_prompt=True)
        after = self.write(messages[: number + 1])
        if not (text.startswith(after) and after.startswith(before)):
            raise ValueError(f"the chat template writes message {number + 1} otherwise when others follow")
        return range(len(before), len(after))


def read_chat_format(tokenizer: Tokenizer) -> ChatFormat:
    """Return the format of the tokenizer's folder, else Llama 3's. Raises PreparationError."""
    config, file = read_json(tokenizer.path.with_name(CONFIG)), tokenizer.path.with_name("chat_template.jinja")
    template = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template", LLAMA_3)
    if isinstance(template, list):  # several with names
        template = {entry["name"]: entry["template"] for entry in template}["default"]
    texts = {id: name for name, id in tokenizer.special.items()}
    names = {"bos_token": texts.get(tokenizer.bos_id, ""), "eos_token": texts.get(tokenizer.eos_id, "")}
    try:
        sandbox = importlib.import_module("jinja2.sandbox")
        environment = sandbox.ImmutableSandboxedEnvironment(  # as in transformers
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = refuse
        compiled = environment.from_string(MARKS.sub("", template))
    except Exception as error:  # jinja2 is missing, or this is no template
        raise PreparationError(f"its chat template cannot be run: {error}") from None

    def write(messages: list[dict], add_generation_prompt: bool = False) -> str:
        try:
            return compiled.render(messages=messages, add_generation_prompt=add_generation_prompt, **names)
        except Exception as error:  # of a program that somebody else wrote
            raise ValueError(f"its chat template says: {error or type(error).__name__}") from None

    return ChatFormat(write, frozenset(tokenizer.special))


def refuse(message: str) -> None:
    raise ValueError(message)
