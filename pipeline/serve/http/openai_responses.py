"""Responses in OpenAI's form, whole or as a stream of events, with log probabilities on request."""

import codecs
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from pipeline.serve.http.errors import (
    JsonObject,
    deadline_error,
    encode_json,
    grammar_error,
    internal_error,
    shutdown_error,
)
from pipeline.serve.http.openai_requests import ParsedRequest
from pipeline.serve.http.response_stream import ChoiceChunk
from pipeline.serve.http.tool_calls import CallReader, describe_message
from pipeline.serve.messages import Chunk, Finish, Usage
from stages.sampling.logprobs import TokenLogprobs

SCORE_BYTES = 80  # of a log probability in a response
MIN_LOGPROB = -9999.0  # of a probability of zero in OpenAI's interface
PLAIN = ("text_completion", "text_completion")
BytesOf = Callable[[int], bytes]  # of a token


@dataclass(frozen=True)
class ScoredToken:
    """A token's log probabilities, and the offset of its first character in the choice's text."""

    token: TokenLogprobs
    offset: int


class OffsetTracker:
    """Finds the text offset of each token, and holds tokens back until their text is shown.

    A token that begins inside a character has the offset of that character. The last tokens have no text when they form
    a stop string or the end of the sequence; they are not returned.
    """

    def __init__(self, bytes_of: BytesOf, begin: int) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._next_offset = self._shown = begin
        self._waiting: list[ScoredToken] = []

    def add_chunk(self, tokens: Sequence[TokenLogprobs], text: str, last: bool, stopped: bool) -> list[ScoredToken]:
        """Add the tokens and the text of a chunk, and return the tokens whose text is shown now.

        After the `last` chunk all tokens are returned, unless the completion was `stopped`.
        """
        for token in tokens:
            self._waiting.append(ScoredToken(token, self._next_offset))
            self._next_offset += len(self._decoder.decode(self._bytes_of(token.token)))
        self._shown += len(text)
        if last and not stopped:
            ready = self._waiting
        else:
            ready = [scored for scored in self._waiting if scored.offset < self._shown]
        self._waiting = self._waiting[len(ready) :]
        return ready


@dataclass(frozen=True)
class ChoicePart:
    """A choice, or the new part of one."""

    index: int
    text: str
    scored: Sequence[ScoredToken] | None  # None when no log probabilities were requested
    finish: Finish | None


@dataclass
class _Choice:
    """The text and log probabilities of a choice so far."""

    index: int
    echo: str  # the prompt that is repeated before it, or ""
    offsets: OffsetTracker | None
    calls: CallReader  # of its stream
    text: list[str] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    finish: Finish | None = None
    usage: Usage | None = None

    def add_chunk(self, chunk: Chunk) -> ChoicePart:
        scored = None
        if self.offsets is not None:
            last, stopped = chunk.finish is not None, chunk.finish is Finish.STOP
            scored = self.offsets.add_chunk(chunk.logprobs, chunk.text, last, stopped)
            self.scored += scored
        self.text.append(chunk.text)
        self.finish, self.usage = chunk.finish, chunk.usage
        return ChoicePart(self.index, chunk.text, scored, chunk.finish)

    @property
    def estimated_bytes(self) -> int:
        alternatives = sum(1 + len(scored.token.top) for scored in self.scored)
        return sum(map(len, self.text)) + SCORE_BYTES * alternatives

    def join(self) -> ChoicePart:
        text = self.echo + "".join(self.text)
        return ChoicePart(self.index, text, None if self.offsets is None else self.scored, self.finish)


class CompletionResponse:
    """The response to one request: collects the chunks of its choices and formats them.

    `echoes` holds for each choice the prompt that is repeated before it, or ""; the deadline is for error messages.
    """

    def __init__(
        self, request_id: str, bytes_of: BytesOf, parsed: ParsedRequest, echoes: Sequence[str], deadline_seconds: float
    ) -> None:
        self._bytes_of, self._parsed, self._deadline_seconds = bytes_of, parsed, deadline_seconds
        self._whole, self._part = ("chat.completion", "chat.completion.chunk") if parsed.is_chat else PLAIN
        self._head: JsonObject = {"id": request_id, "created": int(time.time()), "model": parsed.model}
        scores = parsed.sampling.logprobs is not None
        self._choices = [
            _Choice(index, echo, OffsetTracker(bytes_of, len(echo)) if scores else None, CallReader(parsed.tool_use))
            for index, echo in enumerate(echoes)
        ]

    def add_chunk(self, index: int, chunk: Chunk) -> ChoicePart:
        """Add a chunk to a choice and return the new part. Raises `ApiError` if the choice ended incomplete."""
        match chunk.finish:
            case Finish.DEADLINE:
                raise deadline_error(self._deadline_seconds)
            case Finish.GRAMMAR:
                raise grammar_error()
            case Finish.CANCELLED:
                raise shutdown_error()
            case Finish.FAILED:
                raise internal_error()
        return self._choices[index].add_chunk(chunk)

    def format_whole(self) -> JsonObject:
        """Format the response to a request that does not stream."""
        choices = [self._format_choice(choice.join()) for choice in self._choices]
        return {**self._head, "object": self._whole, "choices": choices, "usage": self._sum_usage()}

    def estimate_bytes(self) -> int:
        """Estimate the size of the whole response in bytes."""
        return sum(choice.estimated_bytes for choice in self._choices)

    def encode_opening(self) -> bytes:
        """Encode the first events of a stream."""
        if self._parsed.is_chat:
            delta: JsonObject = {"role": "assistant", "content": "", "refusal": None}
            openings = [self._format(ChoicePart(one.index, "", None, None), {"delta": delta}) for one in self._choices]
        else:
            echoed = [ChoicePart(one.index, one.echo, None, None) for one in self._choices if one.echo]
            openings = [self._format(part, {"text": part.text}) for part in echoed]
        return b"".join(self._encode_event([opening]) for opening in openings)

    def encode_chunks(self, chunks: Iterable[ChoiceChunk]) -> Iterator[bytes]:
        """Encode chunks as events. Raises `ApiError` as `add_chunk`, after the events before."""
        for index, chunk in chunks:
            part = self.add_chunk(index, chunk)
            if part.text or part.scored or part.finish is not None:
                yield self._encode_event([self._format_part(part)])

    def encode_closing(self) -> bytes:
        """Encode the last events of a stream."""
        usage = self._encode_event([], self._sum_usage()) if self._parsed.include_usage else b""
        return usage + b"data: [DONE]\n\n"

    def _encode_event(self, choices: Sequence[JsonObject], usage: JsonObject | None = None) -> bytes:
        body = {**self._head, "object": self._part, "choices": choices}
        if self._parsed.include_usage:
            body["usage"] = usage
        return encode_event(body)

    def _format_choice(self, part: ChoicePart) -> JsonObject:
        """Format a finished choice."""
        if not self._parsed.is_chat:
            return self._format(part, {"text": part.text})
        message, calls = describe_message(part.text, self._parsed.tool_use)
        return self._format(part, {"message": message}, calls)

    def _format_part(self, part: ChoicePart) -> JsonObject:
        """Format the new part of a choice."""
        if not self._parsed.is_chat:
            return self._format(part, {"text": part.text})
        reader = self._choices[part.index].calls
        before = reader.count
        content, calls = reader.push(part.text, last=part.finish is not None)
        delta: JsonObject = {"content": content} if content or (part.finish is None and not calls) else {}
        if calls:
            delta["tool_calls"] = [call.describe(index) for index, call in enumerate(calls, before)]
        return self._format(part, {"delta": delta}, reader.count)

    def _format(self, part: ChoicePart, content: JsonObject, calls: int = 0) -> JsonObject:
        scores = _chat_logprobs if self._parsed.is_chat else _completion_logprobs
        logprobs = None if part.scored is None else scores(part.scored, self._bytes_of)
        finish = "tool_calls" if calls and part.finish is Finish.STOP else part.finish
        return {"index": part.index, **content, "logprobs": logprobs, "finish_reason": finish}

    def _sum_usage(self) -> JsonObject:
        """Sum the tokens of all choices; a prompt counts once, regardless of its number of choices."""
        usages = [choice.usage for choice in self._choices if choice.usage]
        prompt = sum(usage.prompt for usage in usages[:: self._parsed.n])
        emitted, accepted = sum(usage.emitted for usage in usages), sum(usage.accepted for usage in usages)
        drafted, blocks = sum(usage.drafted for usage in usages), sum(usage.blocks for usage in usages)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": emitted,
            "total_tokens": prompt + emitted,
            "completion_tokens_details": {"accepted_prediction_tokens": accepted},
            "omnidraft": {"drafted": drafted, "accepted": accepted, "blocks": blocks},
        }


def encode_event(value: object) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + encode_json(value) + b"\n\n"


def _chat_logprobs(scored: Sequence[ScoredToken], bytes_of: BytesOf) -> JsonObject:
    """Format log probabilities of a chat: each token with its bytes and its alternatives."""

    def format_entry(token: int, logprob: float) -> JsonObject:
        data = bytes_of(token)
        return {"token": _token_name(data, ""), "bytes": list(data), "logprob": max(logprob, MIN_LOGPROB)}

    content = [
        {
            **format_entry(entry.token.token, entry.token.logprob),
            "top_logprobs": [format_entry(*other) for other in entry.token.top],
        }
        for entry in scored
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(scored: Sequence[ScoredToken], bytes_of: BytesOf) -> JsonObject:
    """Format log probabilities of a plain completion: parallel lists; the alternatives include the token itself."""

    def name(token: int) -> str:
        return _token_name(bytes_of(token), "bytes:")

    def top(token: TokenLogprobs) -> dict[str, float]:
        own = {name(token.token): max(token.logprob, MIN_LOGPROB)}
        return {name(other): max(logprob, MIN_LOGPROB) for other, logprob in token.top} | own

    return {
        "tokens": [name(entry.token.token) for entry in scored],
        "token_logprobs": [max(entry.token.logprob, MIN_LOGPROB) for entry in scored],
        "top_logprobs": [top(entry.token) for entry in scored],
        "text_offset": [entry.offset for entry in scored],
    }


def _token_name(data: bytes, mark: str) -> str:
    r"""Return a token as text; one that is not whole characters byte by byte after a mark: `bytes:\xe2\x82`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in data)
