"""Find the assistant's turns in the text that a chat template has written for a conversation.

    whole     ...2+2?*<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n4*<|im_end|>\\n
    prompt    ...2+2?*<|im_end|>\\n<|im_start|>assistant\\n
                                                         ^^^^^^^^^^^^^^^^^^^^^^^^^^ ^^^^^^^^^^turn

A private-use character, the mark (*), follows each text of each message. The prompt is the text that asks the model
for this answer. A turn begins at the first difference from the prompt. It ends with the first end token after the
answer's last mark, without the line end after it.
"""

import os
import re
from typing import Any

FIRST = 0x100000  # the mark of message 0
MARK = re.compile(f"[{chr(FIRST)}-\U0010ffff]")
UNMARKED = {"role", "type", "name", "id", "tool_call_id"}  # a template may compare or repeat these


def get_mark(number: int) -> str:
    return chr(FIRST + number)


def mark(value: Any, sign: str) -> Any:
    """Return a JSON value with a mark after each of its texts, before the white space that a template may trim."""
    if isinstance(value, dict):
        return {key: item if key in UNMARKED else mark(item, sign) for key, item in value.items()}
    if isinstance(value, list):
        return [mark(item, sign) for item in value]
    if not isinstance(value, str) or not value.strip():
        return value
    text = value.rstrip()
    return text + sign + value[len(text) :]


def mark_messages(messages: list[dict]) -> list[dict]:
    return [mark(message, get_mark(number)) for number, message in enumerate(messages)]


def has_text(message: dict) -> bool:
    return mark(message, "x") != message


def find_start(whole: str, prompt: str, without: str, number: int) -> int | None:
    """Return the index in `whole` at which an answer begins; None if it is not certain.

    `without`: the prompt without the text that asks for an answer. All three have marks. The answer may leave out the
    last names of the prompt, such as <think> if it has no thoughts.
    """
    if not prompt:
        return None
    before = 0
    for found in MARK.finditer(whole):
        if found.group() < get_mark(number):
            before = found.end()
    prompt = MARK.split(prompt)[-1]
    without = MARK.split(without)[-1]
    shared = os.path.commonprefix([prompt, whole[before:]])
    rest = prompt[len(shared) :]
    if rest and not rest.startswith("<"):
        shared = "<".join(shared.split("<")[:-1])  # whole names
    if rest and len(shared) <= len(without):
        return None
    return before + len(shared)


def find_turn(whole: str, start: int, number: int, ends: list[str]) -> range | None:
    """Return the characters from `start` to the end token, counted without marks. The last answer may have none."""
    last_mark = whole.rfind(get_mark(number))
    stop = max(start, last_mark + 1)
    after = MARK.split(whole[stop:])[0]
    end = re.search("|".join(map(re.escape, ends)), after)
    length = end.end() if end else 0
    if after.strip() and not length:
        return None
    stop += length
    before = MARK.sub("", whole[:start])
    turn = MARK.sub("", whole[start:stop])
    return range(len(before), len(before) + len(turn))
