"""Find the assistant's turns in a conversation that a chat template has written.

    <|im_start|>user\\n2+2?<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n4<|im_end|>\\n
                     ^floor          ^^^^^^^^^^^^^^^^^^^^^^header                    ^^end
                                                           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^turn

The conversation is written a second time with a private-use character before and after each text of each message. If
the template writes the same text around them, they show where each message is, even if the template trims it, drops its
thoughts, or writes it as JSON. A turn begins after the header, the text that asks the model for an answer. It ends with
the end token, or with the answer if the template has none. The line end after the end token is not part of it.
"""

import re
from dataclasses import dataclass
from typing import Any

FIRST = 0x100000  # two private-use characters for each message
MARK = re.compile(f"([{chr(FIRST)}-\U0010ffff])")
UNMARKED = {"role", "type", "id", "tool_call_id"}  # a template may compare these values


@dataclass(frozen=True)
class Mark:
    """Place of the first or last character of a text."""

    message: int
    is_end: bool
    position: int


def mark(value: Any, message: int) -> Any:
    """Return a JSON value with marks around each of its texts, inside the white space that a template may trim."""
    if isinstance(value, dict):
        return {key: item if key in UNMARKED else mark(item, message) for key, item in value.items()}
    if isinstance(value, list):
        return [mark(item, message) for item in value]
    if not isinstance(value, str) or not value.strip():
        return value
    content = value.strip()
    before, after = value.split(content, 1)
    opening = chr(FIRST + 2 * message)
    closing = chr(FIRST + 2 * message + 1)
    return before + opening + content + closing + after


def mark_messages(messages: list[dict]) -> list[dict]:
    return [mark(message, number) for number, message in enumerate(messages)]


def read_marks(marked: str) -> tuple[str, list[Mark]]:
    """Return the text without marks, and the marks in the order of the text."""
    marks = []
    position = 0
    for piece in MARK.split(marked):
        if MARK.fullmatch(piece):
            message, is_end = divmod(ord(piece) - FIRST, 2)
            marks.append(Mark(message, bool(is_end), position))
        else:
            position += len(piece)
    return MARK.sub("", marked), marks


@dataclass(frozen=True)
class TurnFinder:
    """Finds turns in one conversation."""

    text: str
    marks: list[Mark]  # empty: the template writes another text if there are marks
    header: str
    end: str  # end token of an answer that nothing follows
    ends: re.Pattern  # matches any end token

    def find(self, message: int) -> range | None:
        """Return the characters of an assistant's message; None if they cannot be found with certainty."""
        own = [n for n, each in enumerate(self.marks) if each.message == message]
        if own and own[-1] - own[0] + 1 > len(own):  # another message stands between its texts
            return None
        earlier = self.marks[: own[0]] if own else [each for each in self.marks if each.message < message]
        later = self.marks[own[-1] + 1 :] if own else [each for each in self.marks if each.message > message]
        floor = max((each.position for each in earlier), default=0)
        ceiling = min((each.position for each in later), default=len(self.text))
        if not own:
            start = self.find_start(floor, ceiling, is_exact=False)
            return None if start is None else range(start, self.find_end(start, ceiling))
        first = self.marks[own[0]]
        answer_end = self.marks[own[-1]].position
        start = self.find_start(floor, first.position, is_exact=not first.is_end)
        if start is None and not first.is_end:
            start = first.position
        return None if start is None else range(start, self.find_end(answer_end, ceiling))

    def find_start(self, floor: int, limit: int, *, is_exact: bool) -> int | None:
        """Return the end of the header between two places. It must be the only one, unless `limit` is exact.

        The template may leave out the last parts of the header, such as the beginning of a thought.
        """
        cuts = [found.start() for found in re.finditer("<", self.header)]
        for cut in [len(self.header), *reversed(cuts)]:
            header = self.header[:cut]
            place = self.text.rfind(header, floor, limit) if header else -1
            if place >= 0:
                is_only = self.text.find(header, floor, limit) == place
                return place + len(header) if is_exact or is_only else None
        return None

    def find_end(self, answer_end: int, ceiling: int) -> int:
        """Return the end of a turn: after the end token that follows the answer."""
        if not self.end:
            return answer_end
        place = self.text.find(self.end, answer_end, ceiling)
        if place >= 0:
            return place + len(self.end)
        found = self.ends.search(self.text, answer_end, ceiling)
        return found.end() if found else answer_end
