"""Read the conversation in a row of a data set. Supports the formats (dialects) of published data sets.

    messages                     [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    conversations                the same, or ShareGPT's [{"from": "human", "value": "2+2?"}, ...]
    prompt, completion           two lists of messages, or two strings: a user turn and its answer. The prompt has no
                                 targets
    instruction, input, output   Alpaca: the user turn is the instruction, and after an empty line the input, if any

In the last two dialects, a column `history` is a list of earlier [question, answer] pairs, whose answers have targets.
In all dialects, a column `system` is the system message. Columns that are not named above, such as `tools` and
`documents`, are variables of the chat template. A list of messages, tools, tool calls or history can also be a string
that contains JSON; an empty string means an empty list.

First, columns and message keys with the value null are removed. If the content of a message is a list of strings, they
are joined. Images are not supported.
"""

import json
import re
from contextlib import suppress
from functools import partial
from typing import Any

from torchtitan_lite.extensions.foreign_json import make_object

ROLES = {  # role in published data sets -> role in chat templates. Roles not listed stay unchanged
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool_response": "tool",
}
# "observation" means "tool" only in ShareGPT's dialect; GLM's chat templates have a role named "observation"
SHAREGPT_ROLES = ROLES | {"observation": "tool"}
# the content of a message with one of these roles is JSON with one or several calls
CALL_ROLES = {"function_call", "tool_call"}
# a message has no targets if one of these keys is 0 or false
WEIGHTS = ("weight", "loss", "train", "trainable", "loss_mask")
# Some data sets choose targets by keys that are not in WEIGHTS, such as "masked" or "train_detail". The values of these
# keys have a different meaning than in WEIGHTS.
CHOOSES_TARGETS = re.compile("weight|loss|train|mask")


def read_conversation(row: Any, column: str | None = None) -> tuple[str, dict]:
    """Return the name of the dialect, and the row as `messages` and template variables. Raises ValueError.

    `column` is the name of the column with the messages. If `column` is None, the columns of the row determine the
    dialect.
    """
    columns = drop_nulls(row) if isinstance(row, dict) else {}
    dialects = DIALECTS if column is None else [list_messages(column, "conversations")]
    fitting = [each for each in dialects if columns.keys() >= {*each[1]}]
    if not fitting:
        found = f"columns {', '.join(columns)}" if columns else f"{row!r:.60}"
        raise ValueError(
            "it has no messages, conversations, prompt/completion or instruction/output "
            f"(if a different column has the messages, set --text-column): {found}"
        )
    dialect, _, take_turns = fitting[0]
    turns = take_turns(columns) or []
    system = columns.pop("system", "")
    if system != "":
        turns = [{"role": "system", "content": system}, *turns]
    messages = [read_message(turn, number) for number, turn in enumerate(turns, 1)]
    if system != "" and len(messages) > 1 and messages[1]["role"] == "system":
        raise ValueError(
            "the column system and the first message are both system messages; remove one"
        )
    columns["tools"] = take_column(columns, "tools")
    columns |= take_column(columns, "chat_template_kwargs", dict) or {}
    columns["messages"] = messages
    return dialect, drop_nulls(columns)


def drop_nulls(columns: dict) -> dict:
    return {key: value for key, value in columns.items() if value is not None}


def drop_all_nulls(row: Any) -> Any:
    """Return a copy without nulls at any depth. A row of a Parquet file has null for every key that the row does not
    use."""
    return json.loads(json.dumps(row, default=spell_value), object_hook=drop_nulls)


def spell_value(value: Any) -> str:
    """Return a value that JSON does not have, such as a date, as a string. Raises ValueError for bytes."""
    if isinstance(value, bytes):
        raise ValueError(f"it has bytes, not text: {value!r:.60}. Cast this column to strings")
    return str(value)


def parse_json(value: Any) -> Any:
    """Return the value of a string that contains JSON, or None for an empty string. Any other value is returned
    unchanged."""
    if isinstance(value, str):
        with suppress(json.JSONDecodeError):
            return json.loads(value.strip() or "null", object_pairs_hook=make_object)
    return value


def take_column(columns: dict, name: str, kind: type = list) -> Any:
    """Remove a column, and return its value or None. JSON in a string is parsed unless `kind` is str. Raises
    ValueError."""
    value = columns.pop(name, None)
    if kind is not str:
        value = parse_json(value)
    if not isinstance(value, kind | None):
        raise ValueError(f"{name} is not a {kind.__name__}: {value!r:.60}")
    return value


# ---------------------------------------------------------------- turns


def list_messages(column: str, dialect: str) -> tuple:
    return dialect, [column], partial(take_column, name=column)


def take_exchange(columns: dict) -> list:
    return list_exchange(columns, columns.pop("prompt"), columns.pop("completion"))


def take_alpaca(columns: dict) -> list:
    texts = [take_column(columns, "instruction", str), take_column(columns, "input", str)]
    prompt = "\n\n".join(filter(None, texts))
    return list_exchange(columns, prompt, take_column(columns, "output", str))


def list_exchange(columns: dict, prompt: Any, completion: Any) -> list:
    """Return the turns of the history, followed by the prompt and its completion. Removes `history` from `columns`."""
    turns = []
    for pair in take_column(columns, "history") or []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"history needs lists of a question and its answer: {pair!r:.60}")
        question, answer = pair
        turns += [*list_turns(question, "user"), *list_turns(answer, "assistant")]
    turns += [{**turn, "weight": 0} for turn in list_turns(prompt, "user")]
    return turns + list_turns(completion, "assistant")


def list_turns(value: Any, role: str) -> list:
    return value if isinstance(value, list) else [{"role": role, "content": value}]


# name, columns that every row has, function that removes the columns with turns and returns the turns
DIALECTS = (
    list_messages("messages", "messages"),
    list_messages("conversations", "conversations"),
    ("prompt/completion", ["prompt", "completion"], take_exchange),
    ("Alpaca", ["instruction", "output"], take_alpaca),
)

# ---------------------------------------------------------------- messages


def read_message(turn: Any, number: int) -> dict:
    """Convert a turn with `role` and `content`, or with `from` and `value`, to a message. Raises ValueError.

    A message that is excluded from the targets gets `weight` 0. No other message has a `weight`.
    """
    message = drop_nulls(turn) if isinstance(turn, dict) else {}
    roles = SHAREGPT_ROLES if "from" in message else ROLES
    for name, key in (("from", "role"), ("value", "content")):
        if name in message and key not in message:
            message[key] = message.pop(name)
    role = message.get("role")
    is_role = isinstance(role, str)
    if is_role:
        message["role"] = roles.get(role, role)
        if role in CALL_ROLES:
            message["tool_calls"] = read_calls(message.pop("content", None), number)
    message["tool_calls"] = take_column(message, "tool_calls")
    if isinstance(message.get("content"), list):
        message["content"] = join_parts(message["content"], number)
    content = message.get("content", "" if message.get("tool_calls") else None)
    if not is_role or not isinstance(content, str):
        raise ValueError(
            f"message {number} needs a role, and a content of text or tool calls: {turn!r:.60}"
        )
    if not take_weight(message, number):
        message["weight"] = 0
    return drop_nulls(message)


def read_calls(content: Any, number: int) -> list[dict]:
    """Return the calls in the text of ShareGPT's `function_call`: JSON of one or several {name, arguments}."""
    calls = parse_json(content)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise ValueError(
            f"message {number} calls a function, so it needs JSON of {{name, arguments}}: {content!r:.60}"
        )
    return [{"type": "function", "function": call} for call in calls]


def join_parts(parts: list, number: int) -> str:
    """Return the text of a content that is a list: ["a", "b"] or [{"type": "text", "text": "a"}]."""
    text = ""
    for part in parts:
        if isinstance(part, dict) and part.get("type", "text") == "text":
            part = part.get("text")
        if not isinstance(part, str):
            raise ValueError(f"message {number} has a part that is not text: {part!r:.60}")
        text += part
    return text


def take_weight(message: dict, number: int) -> bool:
    """Remove keys such as `weight` from a message. Return whether these keys allow the message to have targets.

    Raises ValueError.
    """
    names = filter(CHOOSES_TARGETS.search, [*message])
    weights = {name: message.pop(name) for name in names}
    for name, weight in weights.items():
        if name not in WEIGHTS or weight not in (0, 1):
            raise ValueError(
                f"message {number}'s {name} is {weight!r:.60}, but only 0 and 1 for {', '.join(WEIGHTS)} are supported"
            )
        if weight and message["role"] != "assistant":
            raise ValueError(
                f"message {number}'s {name} is {weight}, but only the assistant's messages can have targets"
            )
    return all(weights.values())
