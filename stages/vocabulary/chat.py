"""Chat prompts: encodes a message or a whole conversation as ids of the target and as pieces of the drafter.

The markers of the target's chat template become special tokens; the contents of messages always stay text.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, takewhile
from typing import Any, Protocol

from typing_extensions import override

from stages.vocabulary.pair import How, Pair
from stages.vocabulary.template_process import TEMPLATES, TemplateError
from stages.vocabulary.tokenizer_view import Vocabulary
from store.errors import ConfigError

Segment = int | str  # the id of a special token of the target, or a run of text
Message = Mapping[str, Any]  # texts `role` and `content`; also `tool_calls`, `tool_call_id`
Tool = Mapping[str, Any]  # `type` and `function`, as chat templates expect it

ROLES = ("system", "developer", "user", "assistant", "tool")  # templates write roles as text: no others are accepted
SHOWN_KEYS = ("role", "content", "tool_calls", "tool_call_id")  # of a message, to a template
NO_VALUES: Mapping[str, Any] = {}  # for a template, beside messages and tools
RENDER_SECONDS = 10.0  # a template takes milliseconds, but may hold loops that never end
THOUGHTS = ("<think>", "</think>")  # of a reasoning model, whose template removes them from earlier answers
PLACEHOLDER = "\ue000{}\ue000"  # of a name in a message: private characters that no template contains
_PLACEHOLDERS = re.compile("\ue000([0-9]+)\ue000")
Ids = tuple[list[int], list[int]]  # target ids and drafter pieces of one prompt


@dataclass(frozen=True)
class CallStyle:
    """How a model writes calls of tools: as JSON with a name and arguments, or a list of these, between markers.

    At the beginning of a text, and after a call, no marker is needed: small models leave it out.
    """

    begin: str = ""
    end: str = ""  # the end of the text closes a call, too
    body: str = ""  # with which a call may begin where its marker is left out
    inner: tuple[str, ...] = ()  # further markers, inside a call

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(marker for marker in (self.begin, self.end, *self.inner) if marker)


HERMES = CallStyle("<tool_call>", "</tool_call>")  # also of Qwen 2.5 and 3
XML = CallStyle("<tool_call>", "</tool_call>", "<function=")  # of Qwen3-Coder and later ones
MISTRAL = CallStyle("[TOOL_CALLS]", inner=("[ARGS]", "[CALL_ID]"))
LLAMA = CallStyle("<|python_tag|>")
# Written into the system's message where a template shows no tools. It is that of Hermes and Qwen 2.5.
TOOLS_PROMPT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
PROBE_TOOL = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object", "properties": {}}}}
PROBE_CALL = {"id": "omnidraft", "type": "function", "function": {"name": "probe", "arguments": {"value": 1}}}
LLAMA_CALL = re.compile(r'"name":\s*"probe",\s*"parameters":\s*\{\s*"value"')


class ConversationError(ConfigError):
    """A conversation that a chat template does not take: why, and what whoever runs the program can do."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}, or name another template with source.chat_template=FILE")
        self.reason = reason


class ChatTemplate:
    """The chat template of one tokenizer, prepared once and applied to every conversation. A given Jinja text is used
    instead of the tokenizer's own. Raises `ConfigError` if there is no template, it cannot be rendered, or it does not
    show a user's message once.
    """

    def __init__(self, vocabulary: Vocabulary, template: str | None = None) -> None:
        self._vocabulary, self._template = vocabulary, template
        if template is None and not vocabulary.tokenizer.chat_template:
            raise ConfigError(
                f"The tokenizer of {vocabulary.name} must have a chat template, but has none; "
                "name a Jinja file with source.chat_template=FILE, or complete prompts as text with --no-chat."
            )
        added = vocabulary.tokenizer.backend_tokenizer.get_added_tokens_decoder()
        # The tokenizer reads no other name as a token.
        self._markers = {name: (token, added[token]) for name, token in vocabulary.specials.items() if token in added}
        # Longest first: where one name begins with another, the tokenizer takes the longer.
        names = sorted(self._markers, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._hidden = re.compile("|".join(map(re.escape, [*names, "\ue000"])))
        shown = self._render([{"role": "user", "content": "\ue000"}], ()).count("\ue000")
        if shown != 1:
            raise ConfigError(
                f"The chat template of {vocabulary.name} must show a user's message once, but shows it {shown} times; "
                "name another template with source.chat_template=FILE."
            )

    def segments(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), values: Mapping[str, Any] = NO_VALUES
    ) -> list[Segment]:
        """Render a conversation with a generation prompt and split it at the template's special tokens. `values` are
        further ones for the template, or say that it goes on with the last message.

        The names of special tokens in the conversation are placeholders while the template is rendered. Each message
        has a role of `ROLES`; keys other than `SHOWN_KEYS` are ignored. Raises `ConfigError` if the template rejects
        these messages, or cannot take tools.
        """
        wrong = next((message["role"] for message in messages if message["role"] not in ROLES), None)
        if wrong is not None or not messages:
            got = "none" if wrong is None else f"one of the role {wrong[:30]!r}"
            raise ConfigError(f"A conversation must hold messages of the roles {', '.join(ROLES)}, got {got}.")
        if tools or any(one.get("tool_calls") or one["role"] == "tool" for one in messages):
            messages, tools = self._adapt_tools(messages, tools)
        names: list[str] = []
        hidden = [self._hide_names(message, names, message["role"] == "assistant") for message in messages]
        hidden_tools, hidden_values = self._hide_names(tools, names), self._hide_names(values, names)
        text = self._render(hidden, hidden_tools, hidden_values)
        return [
            part if isinstance(part, int) else _PLACEHOLDERS.sub(lambda found: names[int(found[1])], part)
            for part in self._split_at_markers(text)
        ]

    def _hide_names(self, value: Any, names: list[str], answer: bool = False) -> Any:
        """Replace the names of special tokens in all texts of a value by placeholders, and append them to `names`.

        Thoughts in an answer keep their names, by which a template finds them.
        """
        if isinstance(value, Mapping):
            return {self._hide_names(key, names): self._hide_names(one, names, answer) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._hide_names(one, names, answer) for one in value]
        if not isinstance(value, str):
            return value

        def hide(found: re.Match[str]) -> str:
            if answer and found[0] in THOUGHTS:
                return found[0]
            names.append(found[0])
            return PLACEHOLDER.format(len(names) - 1)

        return self._hidden.sub(hide, value)

    @property
    def call_style(self) -> CallStyle:
        """How calls are written: as the template shows an earlier one, or else in the form that is asked for."""
        return self._own_style or HERMES

    @cached_property
    def _own_style(self) -> CallStyle | None:
        """The style of the template; None if it shows no tools, or calls in a form that is unknown."""
        asked, called = (
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]},
        )
        text = shown = self._render([asked], [PROBE_TOOL])
        with suppress(ConversationError):  # it cannot show calls, but may demand them
            text = self._render([asked, called], [PROBE_TOOL])
        if shown == self._render([asked], ()):
            return None
        if XML.body in text:
            return XML if XML.begin in text else None
        written = next((style for style in (HERMES, MISTRAL) if style.begin in text), None)
        return written or (LLAMA if LLAMA_CALL.search(text) else None)

    def _adapt_tools(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[Sequence[Message], Sequence[Tool]]:
        """Write earlier calls as the templates of a style demand it: one a message, or with ids of nine letters. For a
        template that has no style, write the tools, the calls and their results into the texts of the messages.
        """
        if self._own_style is None:
            return _write_tools(messages, tools, self._takes_system), ()
        if self._own_style is MISTRAL:
            return [_shorten_ids(one) for one in messages], tools
        if self._own_style is not LLAMA:
            return messages, tools
        split: list[Message] = []
        for one in messages:
            split += [{**one, "tool_calls": [call]} for call in one.get("tool_calls") or ()] or [one]
        return split, tools

    @cached_property
    def _takes_system(self) -> bool:
        try:
            return "\ue000" in self._render(
                [{"role": "system", "content": "\ue000"}, {"role": "user", "content": "?"}], ()
            )
        except ConversationError:
            return False

    def _split_at_markers(self, text: str) -> Iterator[Segment]:
        done = 0
        for found in self._names.finditer(text):
            token, marker = self._markers[found[0]]
            span = _find_span(marker, text, *found.span())
            if span is None:
                continue
            if done < span[0]:  # the previous marker may include the white space
                yield text[done : span[0]]
            yield token
            done = span[1]
        if done < len(text):
            yield text[done:]

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool], more: Mapping[str, Any] = NO_VALUES) -> str:
        tokenizer = self._vocabulary.tokenizer
        shown = [{key: one[key] for key in SHOWN_KEYS if one.get(key) is not None} for one in messages]
        values = {**more, **tokenizer.special_tokens_map, "messages": shown, "tools": list(tools) or None}
        try:
            template = tokenizer.get_chat_template(self._template, list(tools) or None)
            return TEMPLATES.render(template, values, RENDER_SECONDS)
        except (TemplateError, ValueError) as error:  # also of a tokenizer that has several templates, none of them
            roles = ", ".join(one["role"] for one in messages[:9]) + (", ..." if len(messages) > 9 else "")
            raise ConversationError(
                f"The chat template of {self._vocabulary.name} must render a conversation of the roles {roles}, "
                f"but: {error}; change the conversation"
            ) from error


def _write_tools(messages: Sequence[Message], tools: Sequence[Tool], takes_system: bool) -> list[Message]:
    """Return the messages as texts only, in Hermes' form: the tools in the system's message, or in the first one where
    there is none, calls after the text of the assistant, and their results in a message of the user.
    """
    written: list[Message] = []
    for place, one in enumerate(messages):
        role, text = one["role"], one["content"]
        for call in one.get("tool_calls") or ():
            function = {key: call["function"][key] for key in ("name", "arguments")}
            shown = f"{HERMES.begin}\n{json.dumps(function, ensure_ascii=False, default=str)}\n{HERMES.end}"
            text = f"{text}\n{shown}" if text else shown
        if role == "tool":
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
            if place and messages[place - 1]["role"] == "tool":
                text = f"{written.pop()['content']}\n{text}"
        written.append({"role": role, "content": text})
    if tools:
        shown = TOOLS_PROMPT.format(
            tools="\n".join(json.dumps(tool, ensure_ascii=False, default=str) for tool in tools)
        )
        if written[0]["role"] == "system":
            shown = f"{written.pop(0)['content']}\n\n{shown}"
        if takes_system or not written:
            return [{"role": "system", "content": shown}, *written]
        written[0] = {**written[0], "content": f"{shown}\n\n{written[0]['content']}"}
    return written


def _shorten_ids(message: Message) -> Message:
    if not message.get("tool_calls"):
        given = message.get("tool_call_id")
        return {**message, "tool_call_id": _shorten_id(given)} if given else message
    return {**message, "tool_calls": [{**call, "id": _shorten_id(call["id"])} for call in message["tool_calls"]]}


def _shorten_id(given: str) -> str:
    return re.sub(r"[^a-zA-Z0-9]", "", given)[-9:].rjust(9, "0")


def _find_span(marker: Any, text: str, start: int, stop: int) -> tuple[int, int] | None:
    """Return the span that a special token matches for its name at `start:stop`, with white space around it that it
    includes; None if the name is part of a longer word.
    """
    if marker.single_word and (is_word(text[start - 1 : start]) or is_word(text[stop : stop + 1])):
        return None
    while marker.lstrip and start and text[start - 1].isspace():
        start -= 1
    while marker.rstrip and text[stop : stop + 1].isspace():
        stop += 1
    return start, stop


def is_word(character: str) -> bool:
    """Check whether a string is one word character."""
    return re.fullmatch(r"\w", character) is not None


class Conversation(Protocol):
    """Encodes messages and conversations as prompts. `call_style` is how the target writes calls of tools."""

    @property
    def call_style(self) -> CallStyle: ...

    def encode(self, message: str) -> Ids:
        """Encode a user's message as a conversation of its own; see `encode_conversation`."""
        return self.encode_conversation([{"role": "user", "content": message}])

    def encode_conversation(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), values: Mapping[str, Any] = NO_VALUES
    ) -> Ids:
        """Encode the prompt for the next answer. Further `values` are for the template.

        The contents of messages never become special tokens. Raises `ConfigError` if no prompt can be made of these
        messages.
        """
        ...


class DrafterEncoder:
    """Encodes prompts of the target in the drafter's pieces.

    A special token becomes the drafter's token of the same role or name, or its name as text; one that the pair blocks
    is dropped, with a line break between words that it separated. BOS comes first, once, if the drafter's tokenizer
    adds it.
    """

    def __init__(self, target: Vocabulary, drafter: Vocabulary, pair: Pair) -> None:
        self._target, self._drafter = target, drafter
        self._mapped = {mapping.token: mapping for mapping in pair.specials}
        self._begin = drafter.encode("")  # BOS, where the drafter's tokenizer adds it

    def encode(self, segments: Sequence[Segment]) -> list[int]:
        """Return the pieces of a prompt that is divided at the target's special tokens."""
        pieces = _encode_segments(list(self._replace_specials(segments)), self._drafter)
        return pieces if pieces[: len(self._begin)] == self._begin else self._begin + pieces

    def encode_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Return the pieces of a prompt that is given in the target's tokens."""
        segments: list[Segment] = []
        for special, group in groupby(tokens, self._mapped.__contains__):
            run = list(group)
            segments += run if special else [self._target.decode(run)]
        return self.encode(segments)

    def _replace_specials(self, segments: Sequence[Segment]) -> Iterator[Segment]:
        """Replace special tokens by the drafter's; adjacent text becomes one run."""
        run, blocked = "", False
        for segment in segments:
            mapping = self._mapped[segment] if isinstance(segment, int) else None
            if mapping is None or mapping.how is How.SPELT:
                text = str(segment) if mapping is None else mapping.name
                run += "\n" + text if blocked and is_word(run[-1:]) and is_word(text[:1]) else text
            elif mapping.how is not How.BLOCKED:
                yield from ([run] if run else [])
                yield from mapping.pieces
                run = ""
            blocked = mapping is not None and mapping.how is How.BLOCKED
        yield from ([run] if run else [])


class ChatEncoder(Conversation):
    """Encodes conversations by the target's chat template, as `ChatTemplate`, for one target and one drafter."""

    def __init__(self, target: Vocabulary, drafter: Vocabulary, pair: Pair, template: str | None = None) -> None:
        self.template = ChatTemplate(target, template)
        self._target, self._for_drafter = target, DrafterEncoder(target, drafter, pair)

    @property
    @override
    def call_style(self) -> CallStyle:
        return self.template.call_style

    @override
    def encode_conversation(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), values: Mapping[str, Any] = NO_VALUES
    ) -> Ids:
        """Encode the prompt by the template.

        The target's ids are those of `apply_chat_template(..., tokenize=True)` unless a content contains the name of a
        special token. The drafter reads the same text in its own tokens.
        """
        segments = self.template.segments(messages, tools, values)
        tokens = _encode_segments(segments, self._target)
        return tokens, self._for_drafter.encode(segments)

    def find_preamble(self) -> Ids:
        """Return the ids with which prompts of one message begin, whatever its first word is, for both models."""
        (tokens, pieces), (others, other_pieces) = map(self.encode, ("a", "7"))  # messages with no token in common
        return _shared_start(tokens, others), _shared_start(pieces, other_pieces)


class PlainConversation(Conversation):
    """Encodes conversations for a target without a chat template: the contents only, with blank lines between them.

    Such a target was not trained on roles, so none are written. It completes the last message. Values for a template
    change nothing.
    """

    call_style = HERMES

    def __init__(self, target: Vocabulary, drafter: Vocabulary) -> None:
        self._target, self._drafter = target, drafter

    @override
    def encode_conversation(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), values: Mapping[str, Any] = NO_VALUES
    ) -> Ids:
        text = "\n\n".join(message["content"] for message in _write_tools(messages, tools, takes_system=True))
        return self._target.encode(text), self._drafter.encode(text)


def _encode_segments(segments: Sequence[Segment], vocabulary: Vocabulary) -> list[int]:
    ids: list[int] = []
    for place, segment in enumerate(segments):
        ids += [segment] if isinstance(segment, int) else vocabulary.encode_text(segment, first=place == 0)
    return ids


def _shared_start(one: list[int], other: list[int]) -> list[int]:
    return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]
