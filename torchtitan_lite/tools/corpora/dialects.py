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
    found = [name for name, columns in DIALECTS.items() if row.keys() >= set(columns)]
    if column:
        found = ["conversations"] if "conversations" in row else []
    if not found:
        known = "; ".join(" and ".join(columns) for columns in DIALECTS.values())
        raise ValueError(
            f"it has the columns {', '.join(row)}, which is no known dialect of conversations ({known}; "
            "--text-column names another column of messages)"
        )
    dialect = found[0]
    messages = row.pop("messages") if dialect == "messages" else convert(dialect, row)
    check_messages(messages)
    if isinstance(row.get("tools"), str):  # JSON, as in data sets whose tools have different parameters
        row["tools"] = json.loads(row["tools"])
    options = row.pop("chat_template_kwargs", {})
    return dialect, {**row, **options, "messages": messages}


def drop_nulls(value: Any) -> Any:
    """Return a JSON value without the keys whose value is null."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [drop_nulls(item) for item in value]
    return value


def convert(dialect: str, row: dict[str, Any]) -> list[dict]:
    """Remove the columns of a dialect from the row, and return them as messages. Raises ValueError."""
    system = row.pop("system", "")
    messages = [{"role": "system", "content": system}] if system else []
    if dialect == "conversations":
        return messages + read_turns(row.pop("conversations"))
    if dialect == "Alpaca":
        parts = [row.pop("instruction"), row.pop("input", "")]
        prompt = "\n\n".join(str(part) for part in parts if part)
        answer = row.pop("output")
    else:
        prompt = row.pop("prompt")
        answer = row.pop("completion")
    if isinstance(prompt, list) and isinstance(answer, list):
        check_messages(prompt)
        return messages + [{**message, "weight": 0} for message in prompt] + answer
    return messages + [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def read_turns(turns: Any) -> list[dict]:
    """Return ShareGPT's turns as messages. Other lists are returned unchanged."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) and "from" in turn for turn in turns):
        return turns
    messages = []
    for turn in turns:
        role = turn["from"]
        others = {key: value for key, value in turn.items() if key not in ("from", "value")}
        messages.append({"role": ROLES.get(role, role), "content": turn.get("value", ""), **others})
    return messages


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
