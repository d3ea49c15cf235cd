"""Conversations of rows, as data sets, clients and trainers write them, and the text that a prompt keeps of one.

A prompt of a conversation is JSON: a list of messages, or an object of `messages` and `tools`. So it is in the log as
it was, and whoever reads the log makes the same tokens of it.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from stages.vocabulary.chat import ROLES, SHOWN_KEYS

Messages = list[dict[str, Any]]
# Names of roles in data sets of ShareGPT's form.
OTHER_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"} | {
    "function_call": "assistant",
    "observation": "tool",
    "function": "tool",
}
CALL = "function_call"  # in that form, a role whose text is the JSON of calls
# A conversation as Python writes it, which pandas and other writers of CSV leave in a cell.
PYTHON_NOTATION = re.compile(r"\s*\[\{'(role|content|from|value)': ")
ASKING = ("user", "tool")  # roles whose messages are answered


def read_messages(value: object) -> Messages:
    """Read a conversation: messages with `role` and `content`, or `from` and `value`; a content may be parts of text.
    Raises `ValueError` with what a message must have.

    >>> read_messages([{"from": "human", "value": "Hi"}, {"role": "user", "content": [{"type": "text", "text": "?"}]}])
    [{'role': 'user', 'content': 'Hi'}, {'role': 'user', 'content': '?'}]
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError("a conversation must be a list of messages")
    messages: Messages = []
    for number, one in enumerate(value, start=1):
        name = (one.get("role") or one.get("from")) if isinstance(one, Mapping) else None
        role = OTHER_ROLES.get(name, name) if isinstance(name, str) else None
        if role not in ROLES:
            raise ValueError(f"message {number} must have a 'role' ({', '.join(ROLES)}), or 'from' and 'value'")
        content = _join_parts(one.get("content") if "content" in one else one.get("value"))
        calls = one.get("tool_calls") or (_parse(content) if name == CALL else None)
        if content is None and not calls:
            raise ValueError(f"message {number} must have a 'content' of text, got something else")
        if "\0" in (content or ""):
            raise ValueError(f"message {number} must not contain NUL characters")
        shown = {key: one[key] for key in SHOWN_KEYS if one.get(key) is not None}
        shown |= {"role": role, "content": content or ""}
        if calls:
            calls = [read_function(call) for call in (calls if isinstance(calls, list) else [calls])]
            shown |= {"tool_calls": calls, "content": "" if name == CALL else shown["content"]}
        messages.append(shown)
    return messages


def read_function(value: object) -> dict[str, Any]:
    """Return a function that may be called, or a call of one, in the form of templates, whether or not it stands below
    `function`: with arguments as an object, and without the nulls of tables, whose rows all have the same keys.

    >>> read_function({"name": "add", "arguments": '{"a": 1}', "id": None})
    {'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}
    """
    found: Any = _drop_nulls(value)
    if not isinstance(found, dict):
        raise ValueError("a function must be an object")  # noqa: TRY004 (it is a fault of the data)
    own = found.pop("function") if isinstance(found.get("function"), dict) else None
    outer = {} if own is None else {key: one for key, one in found.items() if key != "type"}
    own = own or {key: one for key, one in found.items() if key != "type"}
    if isinstance(own.get("arguments"), str):
        own["arguments"] = _parse(own["arguments"], own["arguments"])
    return {**outer, "type": "function", "function": own}


def _drop_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _drop_nulls(one) for key, one in value.items() if one is not None}
    return [_drop_nulls(one) for one in value] if isinstance(value, list) else value


def _parse(text: str | None, otherwise: object = None) -> Any:
    try:
        found = json.loads(text or "")
    except (ValueError, RecursionError):
        return otherwise
    return found if isinstance(found, dict | list) else otherwise


def add_item(messages: Messages, item: Mapping[str, Any]) -> None:
    """Add an item of OpenAI's `/v1/responses` to the messages of a chat. A call belongs to the assistant's message
    before it; thoughts are left out. Raises `ValueError` with what an item must be.
    """
    match item:
        case {"type": "function_call", "call_id": str(name), "name": _, "arguments": _}:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {key: item[key] for key in ("name", "arguments")}
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": name, "type": "function", "function": function})
        case {"type": "function_call_output", "call_id": str(name), "output": output}:
            messages.append({"role": "tool", "tool_call_id": name, "content": _join_parts(output)})
        case {"type": "reasoning"}:
            return
        case {"role": str(role), "content": content, **rest} if rest.get("type", "message") == "message":
            messages.append({"role": role, "content": _join_parts(content)})
        case _:
            raise ValueError("be a message, a function_call or a function_call_output")
    if messages[-1]["content"] is None:
        raise ValueError("have as content a text, or a list of text parts")


def _join_parts(content: object) -> str | None:
    """Return a content as text; None if part of it is none, as images are."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return None
    texts = [one.get("text", one.get("refusal")) if isinstance(one, Mapping) else None for one in content]
    return "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None


def from_python(text: str) -> Messages | None:
    """Return the messages of a conversation in Python's notation, also without the commas that NumPy leaves out. None
    for other text. Raises `ValueError` for one that is not whole.

    >>> from_python("[{'role': 'user', 'content': 'Hi'}\\n {'role': 'assistant', 'content': 'a'}]")[0]
    {'role': 'user', 'content': 'Hi'}
    """
    if not PYTHON_NOTATION.match(text):
        return None
    try:  # a line feed inside a text is written as an escape
        found = ast.literal_eval(text.strip().replace("}\n {", "},\n {"))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise ValueError("the conversation must be JSON; write the data as JSON lines or Parquet, not as CSV") from None
    return read_messages(found)


def list_turns(messages: Messages) -> list[Messages]:
    """Return the beginnings of a conversation that end with a message to be answered."""
    return [messages[:end] for end, one in enumerate(messages, start=1) if one["role"] in ASKING]


def to_text(messages: Messages, tools: Sequence[Any] = ()) -> str:
    """Return the text of a prompt."""
    value = {"messages": messages, "tools": tools} if tools else messages
    return json.dumps(value, ensure_ascii=False, default=str)  # a table may have values that JSON has not


def from_text(text: str) -> tuple[Messages, list[Any]] | None:
    """Return the messages and tools of a prompt; None for one that is text.

    >>> from_text(to_text([{"role": "user", "content": "Hi"}]))
    ([{'role': 'user', 'content': 'Hi'}], [])
    >>> from_text("[Hi]")
    """
    if not text.startswith(("[{", '{"messages": [{')):
        return None
    try:
        value = json.loads(text)
        found, tools = (value, []) if isinstance(value, list) else (value["messages"], value.get("tools", []))
        return (read_messages(found), tools) if isinstance(tools, list) else None
    except (ValueError, RecursionError):
        return None
