"""Conversations of rows, as data sets, clients and trainers write them, and the text that a prompt keeps of one.

A prompt of a conversation is JSON: a list of messages, or an object of `messages` and `tools`. So it is in the log as
it was, and whoever reads the log makes the same tokens of it.
"""

import json
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
        role = (one.get("role") or one.get("from")) if isinstance(one, Mapping) else None
        role = OTHER_ROLES.get(role, role) if isinstance(role, str) else None
        if role not in ROLES:
            raise ValueError(f"message {number} must have a 'role' ({', '.join(ROLES)}), or 'from' and 'value'")
        content = _join_parts(one.get("content") if "content" in one else one.get("value"))
        if content is None and not one.get("tool_calls"):
            raise ValueError(f"message {number} must have a 'content' of text, got something else")
        if "\0" in (content or ""):
            raise ValueError(f"message {number} must not contain NUL characters")
        shown = {key: one[key] for key in SHOWN_KEYS if one.get(key) is not None}
        messages.append(shown | {"role": role, "content": content or ""})
    return messages


def _join_parts(content: object) -> str | None:
    """Return a content as text; None if part of it is none, as images are."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return None
    texts = [one.get("text") if isinstance(one, Mapping) else None for one in content]
    return "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None


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
