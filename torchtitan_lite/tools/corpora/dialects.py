"""Read one conversation from the columns of a row, in the dialects of published data sets.

    messages                     [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    conversations                the same, or ShareGPT's [{"from": "human", "value": "2+2?"}, ...]
    prompt, completion           two lists of messages, or two strings: a user turn and its answer. Only the completion
                                 has targets
    instruction, input, output   Alpaca: the user turn is the instruction, an empty line, and the input, if any

Beside the last three, a column `system` is the system message. All other columns are variables of the chat template,
such as `tools` and `documents`. Keys whose value is null are removed first, at any depth, because a row of a Parquet
file has the keys of all rows.
"""

import json
from typing import Any

DIALECTS = {  # name -> columns that its rows have
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt/completion": ("prompt", "completion"),
    "Alpaca": ("instruction", "output"),
}
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "observation": "tool"}


def read_conversation(row: Any, column: str | None = None) -> tuple[str, dict[str, Any]]:
    """Return the name of the dialect, and the row with its conversation as `messages`. Raises ValueError.

    `column`: the column with the messages, if it has another name.
    """
    if not isinstance(row, dict):
        raise ValueError(f"it is not an object with columns: {row!r:.60}")
    row = drop_nulls(row)
    if column in row:
        row["conversations"] = row.pop(column)
    known = {"conversations": DIALECTS["conversations"]} if column else DIALECTS
    found = [name for name, columns in known.items() if row.keys() >= set(columns)]
    if not found:
        names = ", ".join("/".join(columns) for columns in DIALECTS.values())
        raise ValueError(f"it has the columns {', '.join(row)}, but conversations have {names} (or set --text-column)")
    messages = CONVERT[found[0]](row)
    check_messages(messages)
    if isinstance(row.get("tools"), str):  # JSON, as in data sets whose tools have different parameters
        row["tools"] = json.loads(row["tools"])
    options = row.pop("chat_template_kwargs", {})
    return found[0], {**row, **options, "messages": messages}


def drop_nulls(value: Any) -> Any:
    """Return a JSON value without the keys whose value is null."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [drop_nulls(item) for item in value]
    return value


def convert_turns(row: dict[str, Any]) -> list[dict]:
    """Return the column `conversations` as messages."""
    turns = row.pop("conversations")
    messages = take_system(row)
    if not isinstance(turns, list):
        raise ValueError(f"its conversation is not a list of messages: {turns!r:.60}")
    for turn in turns:
        if isinstance(turn, dict) and "from" in turn:
            role = turn.pop("from")
            turn = {"role": ROLES.get(role, role), "content": turn.pop("value", ""), **turn}
        messages.append(turn)
    return messages


def convert_completion(row: dict[str, Any]) -> list[dict]:
    prompt = row.pop("prompt")
    answer = row.pop("completion")
    if isinstance(prompt, list) and isinstance(answer, list):
        check_messages(prompt)
        return take_system(row) + [{**message, "weight": 0} for message in prompt] + answer
    return take_system(row) + make_exchange(prompt, answer)


def convert_alpaca(row: dict[str, Any]) -> list[dict]:
    parts = [row.pop("instruction"), row.pop("input", "")]
    prompt = "\n\n".join(str(part) for part in parts if part)
    return take_system(row) + make_exchange(prompt, row.pop("output"))


def make_exchange(prompt: Any, answer: Any) -> list[dict]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def take_system(row: dict[str, Any]) -> list[dict]:
    system = row.pop("system", "")
    return [{"role": "system", "content": system}] if system else []


def check_messages(messages: Any) -> None:
    """Raise ValueError if this is not a list of messages."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"its conversation is not a list of messages: {messages!r:.60}")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} has no role: {message!r:.60}")
        if not isinstance(message.get("content", ""), str | list):
            raise ValueError(f"message {number} has a content that is neither text nor a list: {message!r:.60}")
        if message.keys() <= {"role", "weight"}:
            raise ValueError(f"message {number} has neither a content nor a tool call: {message!r:.60}")
        if message.get("weight", 1) not in (0, 1):
            raise ValueError(f"message {number} has the weight {message['weight']!r}; only 0 and 1 can be trained")


CONVERT = {
    "messages": lambda row: row.pop("messages"),
    "conversations": convert_turns,
    "prompt/completion": convert_completion,
    "Alpaca": convert_alpaca,
}
