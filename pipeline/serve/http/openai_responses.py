"""Responses in OpenAI's form, whole or as a stream of events, with log probabilities on request."""

import codecs
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest

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
Scored = tuple[TokenLogprobs, int]  # a token, and the offset of its first character in the choice's text


class OffsetTracker:
    """Finds the text offset of each token, and holds tokens back until their text is shown.

    A token that begins inside a character has the offset of that character. The last tokens have no text when they form
    a stop string or the end of the sequence; they are not returned, but with `every` token. `bytes_of` returns the
    bytes that a token has in the text.
    """

    def __init__(self, bytes_of: BytesOf, *, every: bool) -> None:
        self._bytes_of, self._every = bytes_of, every
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._next_offset = self._shown = 0
        self._waiting: list[Scored] = []

    def add_chunk(self, chunk: Chunk) -> list[Scored]:
        """Return the tokens whose text is shown now; after the last chunk all, unless it ends with a stop."""
        for token in chunk.logprobs:
            self._waiting.append((token, self._next_offset))
            self._next_offset += len(self._decoder.decode(self._bytes_of(token.token)))
        self._shown += len(chunk.text)
        ready = self._waiting
        if chunk.finish is None or (chunk.finish is Finish.STOP and not self._every):
            ready = [(token, offset) for token, offset in self._waiting if offset < self._shown]
        self._waiting = self._waiting[len(ready) :]
        return ready


@dataclass
class _Choice:
    offsets: OffsetTracker | None  # None when no log probabilities were requested
    calls: CallReader  # of its stream
    text: list[str] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    finish: Finish | None = None
    usage: Usage | None = None


class CompletionResponse:
    """The response to one request: collects the chunks of its choices and formats them.

    `decode_token` is that of the engine; the deadline is for error messages.
    """

    def __init__(
        self,
        request_id: str,
        decode_token: Callable[..., bytes],
        parsed: ParsedRequest,
        choices: int,
        deadline_seconds: float,
    ) -> None:
        self._bytes_of: BytesOf = decode_token
        self._parsed, self._deadline_seconds = parsed, deadline_seconds
        self._whole, self._part = ("chat.completion", "chat.completion.chunk") if parsed.is_chat else PLAIN
        self._head: JsonObject = {"id": request_id, "created": int(time.time()), "model": parsed.body.model}
        scores, in_text = parsed.sampling.logprobs is not None, partial(decode_token, name=False)
        self._choices = [
            _Choice(OffsetTracker(in_text, every=parsed.echo) if scores else None, CallReader(parsed.tool_use))
            for _ in range(choices)
        ]

    def add_chunk(self, index: int, chunk: Chunk) -> list[Scored] | None:
        """Add a chunk to a choice and return the tokens whose text is shown now; None if they were not requested.

        Raises `ApiError` if the choice ended incomplete.
        """
        match chunk.finish:
            case Finish.DEADLINE:
                raise deadline_error(self._deadline_seconds)
            case Finish.GRAMMAR:
                raise grammar_error()
            case Finish.CANCELLED:
                raise shutdown_error()
            case Finish.FAILED:
                raise internal_error()
        choice = self._choices[index]
        scored = choice.offsets.add_chunk(chunk) if choice.offsets else None
        choice.scored += scored or []
        choice.text.append(chunk.text)
        choice.finish, choice.usage = chunk.finish, chunk.usage
        return scored

    def format_whole(self) -> JsonObject:
        choices = [self._format_whole(index, choice) for index, choice in enumerate(self._choices)]
        return {**self._head, "object": self._whole, "choices": choices, "usage": self._sum_usage()}

    def estimate_bytes(self) -> int:
        texts = sum(len(text) for choice in self._choices for text in choice.text)
        return texts + SCORE_BYTES * sum(1 + len(token.top) for choice in self._choices for token, _ in choice.scored)

    def encode_opening(self) -> bytes:
        if not self._parsed.is_chat:
            return b""
        delta: JsonObject = {"role": "assistant", "content": "", "refusal": None}
        openings = [self._format(index, {"delta": delta}) for index in range(len(self._choices))]
        return b"".join(self._encode_event([opening]) for opening in openings)

    def encode_chunks(self, chunks: Iterable[ChoiceChunk]) -> Iterator[bytes]:
        """Encode chunks as events. Raises `ApiError` as `add_chunk`, after the events before."""
        for index, chunk in chunks:
            scored = self.add_chunk(index, chunk)
            if chunk.text or scored or chunk.finish is not None:
                yield self._encode_event([self._format_part(index, chunk, scored)])

    def encode_closing(self) -> bytes:
        usage = self._encode_event([], self._sum_usage()) if self._parsed.include_usage else b""
        return usage + b"data: [DONE]\n\n"

    def _encode_event(self, choices: Sequence[JsonObject], usage: JsonObject | None = None) -> bytes:
        body = {**self._head, "object": self._part, "choices": choices}
        if self._parsed.include_usage:
            body["usage"] = usage
        return encode_event(body)

    def _format_whole(self, index: int, choice: _Choice) -> JsonObject:
        text, scored = "".join(choice.text), choice.scored if choice.offsets else None
        if not self._parsed.is_chat:
            return self._format(index, {"text": text}, scored, choice.finish)
        message, calls = describe_message(text, self._parsed.tool_use)
        return self._format(index, {"message": message}, scored, choice.finish, calls)

    def _format_part(self, index: int, chunk: Chunk, scored: Sequence[Scored] | None) -> JsonObject:
        if not self._parsed.is_chat:
            return self._format(index, {"text": chunk.text}, scored, chunk.finish)
        reader = self._choices[index].calls
        before = reader.count
        content, calls = reader.push(chunk.text, last=chunk.finish is not None)
        delta: JsonObject = {"content": content} if content or (chunk.finish is None and not calls) else {}
        if calls:
            delta["tool_calls"] = [call.describe(place) for place, call in enumerate(calls, before)]
        return self._format(index, {"delta": delta}, scored, chunk.finish, reader.count)

    def _format(
        self,
        index: int,
        content: JsonObject,
        scored: Sequence[Scored] | None = None,
        finish: Finish | None = None,
        calls: int = 0,
    ) -> JsonObject:
        scores = format_chat_logprobs if self._parsed.is_chat else _completion_logprobs
        logprobs = None if scored is None else scores(scored, self._bytes_of)
        reason = "tool_calls" if calls and finish is Finish.STOP else finish
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def _sum_usage(self) -> JsonObject:
        """Sum the tokens of all choices; a prompt counts once, regardless of its number of choices."""
        usages = [choice.usage for choice in self._choices if choice.usage]
        prompt = sum(usage.prompt for usage in usages[:: self._parsed.body.n])
        emitted, accepted = sum(usage.emitted for usage in usages), sum(usage.accepted for usage in usages)
        drafted, blocks = sum(usage.drafted for usage in usages), sum(usage.blocks for usage in usages)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": emitted,
            "total_tokens": prompt + emitted,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached for usage in usages[:: self._parsed.body.n])},
            "completion_tokens_details": {"accepted_prediction_tokens": accepted},
            "omnidraft": {
                "drafted": drafted,
                "accepted": accepted,
                "blocks": blocks,
                "accepted_lengths": list(map(sum, zip_longest(*(usage.lengths for usage in usages), fillvalue=0))),
                "tokens_by_source": sum((Counter(usage.sources) for usage in usages), Counter[str]()),
            },
        }


def encode_event(value: object) -> bytes:
    """Encode a server-sent event with JSON."""
    return b"data: " + encode_json(value) + b"\n\n"


def format_chat_logprobs(scored: Sequence[Scored], bytes_of: BytesOf) -> JsonObject:
    """Format log probabilities of a chat: one entry a token, with its alternatives."""

    def format_entry(token: int, logprob: float | None) -> JsonObject:
        data = bytes_of(token)
        return {"token": _token_name(data, ""), "bytes": list(data), "logprob": _bound(logprob)}

    content = [
        {
            **format_entry(token.token, token.logprob),
            "top_logprobs": [format_entry(*other) for other in token.top],
            "drafted_by": token.source,
        }
        for token, _ in scored
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(scored: Sequence[Scored], bytes_of: BytesOf) -> JsonObject:
    """Format log probabilities of a plain completion: parallel lists; the alternatives include the token itself. The
    first token of an echoed prompt has none of either.
    """

    def name(token: int) -> str:
        return _token_name(bytes_of(token), "bytes:")

    def top(token: TokenLogprobs) -> dict[str, float | None] | None:
        own = {name(token.token): _bound(token.logprob)}
        return None if token.logprob is None else {name(other): _bound(logprob) for other, logprob in token.top} | own

    return {
        "tokens": [name(token.token) for token, _ in scored],
        "token_logprobs": [_bound(token.logprob) for token, _ in scored],
        "top_logprobs": [top(token) for token, _ in scored],
        "text_offset": [offset for _, offset in scored],
        "drafted_by": [token.source for token, _ in scored],
    }


def _bound(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, MIN_LOGPROB)


def _token_name(data: bytes, mark: str) -> str:
    r"""Return a token as text; one that is not whole characters byte by byte after a mark: `bytes:\xe2\x82`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in data)
