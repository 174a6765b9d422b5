"""Find the assistant's turns in the text that a chat template has written for a conversation.

    <|im_start|>user\\n2+2?<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n4<|im_end|>\\n
                     ^   ^          ^^^^^^^^^^^^^^^^^^^^^^header                    ^^marks
                                                           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^turn

The conversation is written a second time with a private-use character, a mark, before and after each text of each
message. If the rest of the text is the same, the marks show where each message is, even if the template trims it, drops
its thoughts, or writes it as JSON. A turn begins after the header, the text that asks the model for an answer. It ends
with the end token, without the line end after it. The header and the end tokens come from small conversations.
"""

import os
import re
from typing import Any

FIRST = 0x100000  # the mark of message 0
MARK = re.compile(f"[{chr(FIRST)}-\U0010ffff]")
UNMARKED = {"role", "type", "name", "id", "tool_call_id"}  # a template may compare or repeat these


def mark(value: Any, message: int) -> Any:
    """Return a JSON value with marks around each of its texts, inside the white space that a template may trim."""
    if isinstance(value, dict):
        return {key: item if key in UNMARKED else mark(item, message) for key, item in value.items()}
    if isinstance(value, list):
        return [mark(item, message) for item in value]
    content = value.strip() if isinstance(value, str) else ""
    if not content:
        return value
    sign = chr(FIRST + message)
    return value.replace(content, sign + content + sign, 1)


def mark_messages(messages: list[dict]) -> list[dict]:
    return [mark(message, number) for number, message in enumerate(messages)]


def read_marks(marked: str) -> list[tuple[int, int]]:
    """Return (message, position in the text without marks) of each mark."""
    return [(ord(found[0]) - FIRST, found.start() - n) for n, found in enumerate(MARK.finditer(marked))]


def find_turn(text: str, marks: list[tuple[int, int]], message: int, header: str, ends: list[str]) -> range | None:
    """Return the characters of an assistant's message; None if they cannot be found with certainty."""
    own = [position for number, position in marks if number == message]
    floor = max((position for number, position in marks if number < message), default=0)
    ceiling = min((position for number, position in marks if number > message), default=len(text))
    limit = own[0] if own else ceiling
    start = find_start(text, floor, limit, header)
    if start is None:
        return None
    stop = find_end(text, own[-1] if own else start, ceiling, ends)
    return None if stop is None else range(start, stop)


def find_start(text: str, floor: int, limit: int, header: str) -> int | None:
    """Return the end of the only header in a part of the text.

    The template may leave out the last names in the header, such as <think> if the answer has no thoughts.
    """
    cuts = [found.start() for found in re.finditer("<", header) if header[: found.start()].strip()]
    for cut in [len(header), *reversed(cuts)]:
        place = text.find(header[:cut], floor, limit)
        if header and place >= 0:
            is_only = place == text.rfind(header[:cut], floor, limit)
            return place + cut if is_only else None
    return None


def find_end(text: str, answer_end: int, ceiling: int, ends: list[str]) -> int | None:
    """Return the place after the first end token. The last answer may have none."""
    places = [(text.find(end, answer_end, ceiling), len(end)) for end in ends]
    found = [place + length for place, length in places if place >= 0]
    if found:
        return min(found)
    return None if text[answer_end:ceiling].strip() else answer_end


def find_header(prompt: str, without: str, name: re.Pattern) -> str:
    """Return the text before an answer. `prompt`: what follows a user's text; `without` the generation prompt."""
    shared = os.path.commonprefix([prompt, without])
    if shared != prompt:
        return prompt[len(shared) :]
    end_of_user = name.match(prompt)  # the template ignores add_generation_prompt
    return prompt[end_of_user.end() :] if end_of_user else prompt


def find_end_tokens(last: str, earlier: str, name: re.Pattern) -> list[str]:
    """Return the end tokens. `last`, `earlier`: what follows the last answer of a conversation, and another answer."""
    found = re.search(f"(?:{name.pattern})+", last)
    end = found.group() if found else last.strip()
    between = name.search(earlier)
    if between and (not end or end not in earlier):
        return [end, between.group()] if end else [between.group()]
    return [end] if end else []
