"""Conversations to documents whose targets are the assistant's turns alone.

    [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]

    <|begin_of_text|><|start_header_id|>user<|end_header_id|>\\n\\n2+2?<|eot_id|>
    <|start_header_id|>assistant<|end_header_id|>\\n\\n4<|eot_id|>
                                                     ^^^^^^^^^^^ targets: what the model has to write

The chat template beside the tokenizer says how a conversation is written: chat_template.jinja, or `chat_template` of
tokenizer_config.json. Without one, a tokenizer that has Llama 3's header tokens writes Llama 3's format, as above.

A template may mark the assistant's text by `{% generation %}`. In one that does not, a turn is what the template adds
to the conversation before it and the prompt for the assistant. A template that writes a turn otherwise when others
follow has no such turn, and the conversation is refused.

A template is a program. Jinja runs it in its sandbox, where it reaches nothing outside, though it may run for long. It
is told no date, so that a corpus is a function of its files.
"""

import hashlib
import importlib
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchtitan_lite.data.tokenizer import MAX_CHARACTERS
from torchtitan_lite.data.tokenizer_files import MAX_BYTES_BESIDE, TOKENIZER_CONFIG, read_neighbour
from torchtitan_lite.data.vocabulary import BYTES, Vocabulary, VocabularyError, read_content

TEMPLATE = "chat_template.jinja"
ASSISTANT = "assistant"
LLAMA_3 = (  # arXiv:2407.21783, and the model card of Llama 3
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content | trim }}<|eot_id|>{% endgeneration %}"
    "{% else %}{{ message.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
)
NEEDED = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
BEGIN, END = "\ufdd0", "\ufdd1"  # around marked text; Unicode keeps these two out of all texts


@dataclass(frozen=True)
class Conversation:
    """A document as text, in which special tokens are spelled out."""

    text: str
    turns: list[tuple[int, int]]  # of the assistant: characters start .. stop-1, in order


@dataclass(frozen=True)
class ChatFormat:
    """How a conversation is written."""

    template: str  # in Jinja
    names: tuple[tuple[str, str], ...]  # bos_token and others -> the token's text, for the template
    special: tuple[str, ...]  # texts of special tokens: a message that spells one out could end its own turn

    @property
    def identity(self) -> str:
        return hashlib.sha256(json.dumps([self.template, self.names]).encode()).hexdigest()

    def render(self, messages: Any) -> Conversation:
        """Write one conversation. Raises ValueError that says why it cannot be a document."""
        self._check(messages)
        conversation = self._write(messages)
        if not GENERATION.search(self.template):
            places = [n for n, message in enumerate(messages) if message["role"] == ASSISTANT]
            turns = [self._find_turn(conversation.text, messages, n) for n in places]
            conversation = Conversation(conversation.text, turns)
        if not conversation.turns:
            raise ValueError("it has no turn of an assistant, so nothing is learned from it")
        if len(conversation.text) > MAX_CHARACTERS:
            raise ValueError(f"it is longer than {MAX_CHARACTERS:,} characters")
        return conversation

    def _check(self, messages: Any) -> None:
        """Raises ValueError for what is no list of messages, or spells out a special token."""
        if not isinstance(messages, list) or not messages:
            raise ValueError("it is no list of messages")
        for number, message in enumerate(messages, 1):
            texts = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError(f"message {number} has not both a role and a content, as texts")
        spelled = json.dumps(messages, ensure_ascii=False, default=str)  # a row of Parquet may hold a date
        spelled.encode()  # a lone surrogate is a UnicodeEncodeError, which is a ValueError
        for text in (*self.special, BEGIN, END):
            if text in spelled:
                raise ValueError(f"a message spells out {text!r}, which would be that token")

    def _write(self, messages: list[dict], *, prompt: bool = False) -> Conversation:
        """Run the template; `prompt` adds what it writes before an assistant's answer. Raises ValueError."""
        try:
            marked = compile_template(self.template).render(
                messages=messages, add_generation_prompt=prompt, **dict(self.names)
            )
        except Exception as error:  # of a program that somebody else wrote
            raise ValueError(f"its chat template says: {error or type(error).__name__}") from None
        text, turns = "", []
        for piece in marked.split(BEGIN):
            inside, end, outside = piece.rpartition(END)
            if end:
                turns.append((len(text), len(text + inside)))
            text += inside + outside
        return Conversation(text, [turn for turn in turns if turn[0] < turn[1]])

    def _find_turn(self, text: str, messages: list[dict], number: int) -> tuple[int, int]:
        """Return where message `number` is written in `text`. Raises ValueError."""
        before = self._write(messages[:number], prompt=True).text
        after = self._write(messages[: number + 1]).text
        if not (text.startswith(after) and after.startswith(before)):
            raise ValueError(
                f"the chat template writes message {number + 1} otherwise when others follow, or not after its prompt: "
                "mark the assistant's text in it with {% generation %}"
            )
        return len(before), len(after)


@lru_cache(maxsize=1)
def compile_template(template: str) -> Any:
    """Return a jinja2.Template, set up as in transformers. Raises jinja2.TemplateSyntaxError."""
    sandbox = importlib.import_module("jinja2.sandbox")
    extensions = ["jinja2.ext.loopcontrols"]
    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters |= {"tojson": dump_json, "mark": lambda text: f"{BEGIN}{text}{END}"}
    environment.globals["raise_exception"] = refuse
    # A block of the same extent, so that spaces and line ends around it are kept or dropped alike
    return environment.from_string(
        GENERATION.sub(lambda tag: f"{{%{tag[1]} {'endfilter' if tag[2] else 'filter mark'} {tag[3]}%}}", template)
    )


def dump_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Write JSON as transformers does in templates: not escaped for HTML."""
    return json.dumps(value, **{"ensure_ascii": False, "indent": indent, **options})


def refuse(message: str) -> None:
    raise ValueError(message)


def read_chat_format(vocabulary: Vocabulary) -> ChatFormat:
    """Return the format of the tokenizer's folder, else Llama 3's. Raises VocabularyError."""
    if vocabulary.path == Path(BYTES):
        raise VocabularyError("it is no file, and has no tokens that begin and end a turn")
    special = {token.text: token.id for token in vocabulary.added if token.special}
    text_of = {id: text for text, id in special.items()}
    names = {"bos_token": text_of.get(vocabulary.bos_id, ""), "eos_token": text_of.get(vocabulary.eos_id, "")}
    config = read_neighbour(vocabulary.path.with_name(TOKENIZER_CONFIG))
    for name, entry in config.items():
        text = entry.get("content") if isinstance(entry, dict) else entry
        if name.endswith("_token") and isinstance(text, str):
            names[name] = text
    template, file = config.get("chat_template"), vocabulary.path.with_name(TEMPLATE)
    if isinstance(template, list):  # several with names
        template = {e.get("name"): e.get("template") for e in template if isinstance(e, dict)}.get("default")
    if file.exists():
        template = read_content(file, MAX_BYTES_BESIDE).decode(errors="replace")
    if not template:
        if missing := [name for name in NEEDED if name not in special]:
            raise VocabularyError(f"it has no {TEMPLATE}, no chat_template in {TOKENIZER_CONFIG}, and no {missing[0]}")
        template = LLAMA_3
    if find_spec("jinja2") is None:
        raise VocabularyError("its chat template needs the package jinja2: it is in the extra `data`")
    try:
        compile_template(template)
    except Exception as error:
        raise VocabularyError(f"its chat template is none: {error}") from None
    return ChatFormat(template, tuple(sorted(names.items())), tuple(special))
