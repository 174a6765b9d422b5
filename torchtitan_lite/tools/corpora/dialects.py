"""Read one conversation from the columns of a row, in the dialects of published data sets.

    messages                     [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    conversations                the same, or ShareGPT's [{"from": "human", "value": "2+2?"}, ...]
    prompt, completion           two lists of messages, or two strings: a user turn and its answer. Only the completion
                                 has targets
    instruction, input, output   Alpaca: the user turn is the instruction, an empty line, and the input, if any

Beside the last three, a column `system` is the system message. All other columns are variables of the chat template,
such as `tools` and `documents`. Keys whose value is null are removed first, at any depth, because a row of a Parquet
file has the keys of all rows. A content that is a list of texts is joined.
"""

import json
from typing import Any

DIALECTS = {  # name -> columns that its rows have
    "messages": {"messages"},
    "conversations": {"conversations"},
    "prompt/completion": {"prompt", "completion"},
    "Alpaca": {"instruction", "output"},
}
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "observation": "tool",
}


def read_conversation(row: Any, column: str | None = None) -> tuple[str, dict[str, Any]]:
    """Return the name of the dialect, and the row with its conversation as `messages`. Raises ValueError.

    `column`: the column with the messages, if it has another name.
    """
    if not isinstance(row, dict):
        raise ValueError(f"it is not an object with columns: {row!r:.60}")
    row = drop_nulls(row)
    found = [name for name, columns in DIALECTS.items() if row.keys() >= columns]
    if column:
        found = ["conversations"] if column in row else []
        row["conversations"] = row.pop(column, None)
    if not found:
        known = "messages, conversations, prompt/completion, instruction/output"
        raise ValueError(
            f"it has the columns {', '.join(row)}, but conversations have {known} (or set --text-column)"
        )
    messages = [read_message(turn, n) for n, turn in enumerate(take_turns(found[0], row), 1)]
    if isinstance(row.get("tools"), str):  # JSON, as in data sets with tools of many forms
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


def take_turns(dialect: str, row: dict[str, Any]) -> list:
    """Remove the columns of the conversation from a row, and return its turns. Raises ValueError."""
    if dialect == "Alpaca":
        texts = [row.pop("instruction"), row.pop("input", "")]
        row["prompt"] = "\n\n".join(filter(None, texts))
        row["completion"] = row.pop("output")
    if dialect in row:
        turns = row.pop(dialect)
    else:
        prompt = list_turns(row.pop("prompt"), "user")
        completion = list_turns(row.pop("completion"), "assistant")
        turns = [{**turn, "weight": 0} for turn in prompt] + completion
    if not isinstance(turns, list):
        raise ValueError(f"its conversation is not a list of messages: {turns!r:.60}")
    if dialect != "messages" and "system" in row:
        return list_turns(row.pop("system"), "system") + turns
    return turns


def list_turns(value: Any, role: str) -> list:
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def read_message(turn: Any, number: int) -> dict:
    """Return a turn with `role` and `content`, or with `from` and `value`, as a message. Raises ValueError."""
    message = dict(turn) if isinstance(turn, dict) else {}
    if "from" in message:
        role = message.pop("from")
        message["role"] = ROLES.get(role, role)
        message["content"] = message.pop("value", "")
    content = message.get("content", "")
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        texts = [part.get("text") for part in content]
        if None not in texts:
            message["content"] = "".join(texts)
    has_role = isinstance(message.get("role"), str)
    has_text = isinstance(content, str | list)
    if not has_role or not has_text or message.keys() <= {"role", "weight"}:
        raise ValueError(
            f"message {number} needs a role, and a content or tool calls: {turn!r:.60}"
        )
    if not isinstance(message.get("weight", 1), int | float):
        raise ValueError(f"message {number}: weight is not a number: {message['weight']!r:.60}")
    return message
