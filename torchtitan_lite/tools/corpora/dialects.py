"""Read one conversation from the columns of a row, in the dialects of published data sets.

    messages                     [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    conversations                the same, or ShareGPT's [{"from": "human", "value": "2+2?"}, ...]
    prompt, completion           two lists of messages, or two strings: a user turn and its answer. Only the completion
                                 has targets
    instruction, input, output   Alpaca: the user turn is the instruction, an empty line, and the input, if any

Beside the last three, a column `system` is the system message. All other columns are variables of the chat template,
such as `tools` and `documents`. Keys whose value is null are removed first, at any depth, because a row of a Parquet
file has the keys of all rows. A content that is a list of texts is joined; a picture is refused.
"""

import json
from collections.abc import Callable
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
    "observation": "tool",
}


def read_conversation(
    row: Any, column: str | None = None, normalize: Callable[[str], str] = str
) -> tuple[str, dict]:
    """Return the dialect, and a normalized copy: `messages`, and variables of the template. Raises ValueError.

    `column`: the column with the messages, if it has another name.
    """
    content = json.dumps(row, ensure_ascii=False, default=str)
    row = json.loads(normalize(content), object_hook=drop_nulls)
    dialects = {"conversations": {column}} if column else DIALECTS
    columns = set(row) if isinstance(row, dict) else set()
    dialect = next((name for name, needed in dialects.items() if columns >= needed), None)
    if not dialect:
        raise ValueError(
            f"no messages, conversations, prompt/completion, instruction/output (or set --text-column): {row!r:.60}"
        )
    turns = row.pop(column or dialect, None)
    if dialect == "Alpaca":
        texts = filter(None, [row.pop("instruction"), row.pop("input", "")])
        row["prompt"] = "\n\n".join(texts)
        row["completion"] = row.pop("output")
    if turns is None:
        prompt = list_turns(row.pop("prompt"), "user")
        completion = list_turns(row.pop("completion"), "assistant")
        turns = [{**turn, "weight": 0} for turn in prompt] + completion
    if dialect != "messages" and "system" in row:
        turns = list_turns(row.pop("system"), "system") + turns
    if isinstance(row.get("tools"), str):  # JSON, as in data sets with tools of many forms
        row["tools"] = json.loads(row["tools"])
    row |= row.pop("chat_template_kwargs", {})
    row["messages"] = [read_message(turn, number) for number, turn in enumerate(turns, 1)]
    return dialect, row


def drop_nulls(columns: dict) -> dict:
    return {key: value for key, value in columns.items() if value is not None}


def list_turns(value: Any, role: str) -> list:
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def read_message(turn: Any, number: int) -> dict:
    """Return a turn with `role` and `content`, or with `from` and `value`, as a message. Raises ValueError."""
    message = {**turn} if isinstance(turn, dict) else {}
    if "from" in message:
        role = message.pop("from")
        message["role"] = ROLES.get(role, role)
        message["content"] = message.pop("value", None)
    content = message.get("content", "")
    if isinstance(content, list):
        texts = [part.get("text") for part in content]
        content = None if None in texts else "".join(texts)
        message["content"] = content
    has_role = isinstance(message.get("role"), str)
    if not has_role or not isinstance(content, str) or message.keys() <= {"role", "weight"}:
        raise ValueError(
            f"message {number} needs a role, and a content of text or tool calls: {turn!r:.60}"
        )
    return message
