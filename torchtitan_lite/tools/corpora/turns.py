"""Mark the texts of a conversation, and find the assistant's turns in the text that a chat template writes for it.

    whole     ...2+2?*<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n4*<|im_end|>\\n<|im_start|>user...
    prompt    ...2+2?*<|im_end|>\\n<|im_start|>assistant\\n
    answered  ...2+2?*<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n4*<|im_end|>\\n
                                                         ^^^^^^^^^^^^^^^^^^^^^^^^^^ ^^^^^^^^^^turn

A private-use character, the mark (*), follows each text of each message. The prompt is the text that asks the model
for this answer, and `answered` is the text of the conversation up to this answer. A turn begins at the first difference
from the prompt. After its last mark, it continues as in `answered`, up to the last name in angle brackets.
"""

import os
import re
from typing import Any

FIRST = 0x100000  # the mark of message 0
MARK = re.compile(f"[{chr(FIRST)}-\U0010ffff]")
NAME = re.compile(r"<[^<>\s]+>")  # of a special token, which may be plain text to this tokenizer
NAMES = re.compile(f"(?:{NAME.pattern})+")
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


def find_start(whole: str, prompt: str, without: str, number: int) -> int | None:
    """Return the index in `whole` at which the answer in message `number` begins; None if it is not certain.

    `without`: the prompt without the text that asks for an answer. All three have marks. The answer may leave out the
    last names of the prompt, such as <think> if it has no thoughts.
    """
    before = 0
    for found in MARK.finditer(whole):
        if found.group() >= get_mark(number):
            break
        before = found.end()
    expected = MARK.split(prompt)[-1]
    shared = os.path.commonprefix([expected, whole[before:]])
    if shared != expected:
        if expected[len(shared)] != "<":
            shared = shared.rpartition("<")[0]  # whole names
        if len(shared) <= len(MARK.split(without)[-1]):
            return None
    return before + len(shared) if prompt else None


def find_stop(whole: str, start: int, answered: str, number: int, end: str) -> int | None:
    """Return the index in `whole` after the answer that begins at `start` and its end token; None if it is not certain.

    `end`: the usual end token; "" if answers end with the next header.
    """
    own = get_mark(number)
    stop = max(start, whole.rfind(own) + 1)
    if set(MARK.findall(whole[start:stop])) - {own}:
        return None
    after = MARK.split(whole[stop:])[0]
    if not after.strip():
        return stop
    if end and after.lstrip().startswith(end):
        return stop + after.index(end) + len(end)
    # A tool call continues after its last mark, as it does in the text that ends with this answer.
    shared = os.path.commonprefix([after, answered.rpartition(own)[2]])
    length = 0
    for found in NAME.finditer(shared):
        length = found.end()
    following = re.compile(rf"\s*{NAME.pattern}").match(after, length)
    if following and not (length and end):
        length = following.end()
    return stop + length if length else None
