"""Answers in OpenAI's form, whole or as a stream of events."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.serve_bridge import News
from pipeline.serve_errors import ApiError, as_json, failed, leaving, too_late
from pipeline.serve_openai import Wanted
from pipeline.serve_openai_logprobs import BytesOf, Offsets, Scored, chat_logprobs, plain_logprobs
from pipeline.serve_requests import Chunk, Finish, Usage

SCORE_BYTES = 80  # of a log probability in an answer
NOT_WHOLE = {Finish.CANCELLED, Finish.DEADLINE, Finish.FAILED}


@dataclass(frozen=True)
class Piece:
    """Something of a choice: all of it, or what is new. `scored` is None where no log probabilities are wanted."""

    index: int
    text: str
    scored: Sequence[Scored] | None
    finish: Finish | None


class Form(Protocol):
    """What tells the two kinds of completions apart."""

    prefix: str  # of ids
    whole_object: str
    part_object: str

    def whole(self, piece: Piece) -> dict[str, Any]:
        """A finished choice."""
        ...

    def opening(self, index: int, echo: str) -> dict[str, Any] | None:
        """What a choice's stream begins with."""
        ...

    def part(self, piece: Piece) -> dict[str, Any]:
        """What is new of a choice."""
        ...


class PlainForm:
    """Of `/v1/completions`."""

    prefix, whole_object, part_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, bytes_of: BytesOf) -> None:
        self._bytes_of = bytes_of

    def whole(self, piece: Piece) -> dict[str, Any]:
        """A finished choice: as a part, for both have one shape here."""
        return self.part(piece)

    def opening(self, index: int, echo: str) -> dict[str, Any] | None:
        """The prompt, if it is to be repeated."""
        return self.part(Piece(index, echo, None, None)) if echo else None

    def part(self, piece: Piece) -> dict[str, Any]:
        """What is new of a choice."""
        logprobs = None if piece.scored is None else plain_logprobs(piece.scored, self._bytes_of)
        return {"index": piece.index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}


class ChatForm:
    """Of `/v1/chat/completions`."""

    prefix, whole_object, part_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, bytes_of: BytesOf) -> None:
        self._bytes_of = bytes_of

    def whole(self, piece: Piece) -> dict[str, Any]:
        """A finished choice."""
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": piece.index, "message": message, **self._rest(piece)}

    def opening(self, index: int, _: str) -> dict[str, Any] | None:
        """Who speaks."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, piece: Piece) -> dict[str, Any]:
        """What is new of a choice."""
        delta = {"content": piece.text} if piece.text or piece.finish is None else {}
        return {"index": piece.index, "delta": delta, **self._rest(piece)}

    def _rest(self, piece: Piece) -> dict[str, Any]:
        logprobs = None if piece.scored is None else chat_logprobs(piece.scored, self._bytes_of)
        return {"logprobs": logprobs, "finish_reason": piece.finish}


@dataclass
class _Choice:
    """A choice as it grows."""

    index: int
    offsets: Offsets | None
    text: list[str] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    finish: Finish | None = None

    def take(self, chunk: Chunk) -> Piece:
        scored = None
        if self.offsets is not None:
            last, cut = chunk.finish is not None, chunk.finish is Finish.STOP
            scored = self.offsets.push(chunk.logprobs, chunk.text, last, cut)
            self.scored += scored
        self.text.append(chunk.text)
        self.finish = chunk.finish
        return Piece(self.index, chunk.text, scored, chunk.finish)

    @property
    def size(self) -> int:
        alternatives = sum(1 + len(scored.token.top) for scored in self.scored)
        return sum(map(len, self.text)) + SCORE_BYTES * alternatives

    def whole(self) -> Piece:
        return Piece(self.index, "".join(self.text), None if self.offsets is None else self.scored, self.finish)


class Answer:
    """One request's answer as it grows.

    Args:
        echoes: for each choice the prompt that is repeated before it, or "".
        seconds: the deadline, for messages.
    """

    def __init__(self, name: str, form: Form, wanted: Wanted, echoes: Sequence[str], bytes_of: BytesOf, seconds: float):
        self._form, self._wanted, self._seconds = form, wanted, seconds
        self._echoes = echoes
        self._usages: dict[int, Usage] = {}
        self._head = {"id": name, "created": int(time.time()), "model": wanted.model}
        offsets = [None if wanted.logprobs is None else Offsets(bytes_of, len(echo)) for echo in echoes]
        self._choices = [_Choice(index, offset) for index, offset in enumerate(offsets)]

    def take(self, news: Iterable[News]) -> list[Piece]:
        """What these chunks add. Raises `ApiError` when a choice ended before it was whole."""
        return [self._take(index, chunk) for index, chunk in news]

    def _take(self, index: int, chunk: Chunk) -> Piece:
        if chunk.finish in NOT_WHOLE:
            raise self._error_of(chunk.finish)
        if chunk.usage is not None:
            self._usages[index] = chunk.usage
        return self._choices[index].take(chunk)

    def _error_of(self, finish: Finish) -> ApiError:
        if finish is Finish.DEADLINE:
            return too_late(self._seconds)
        return leaving() if finish is Finish.CANCELLED else failed()

    def whole(self) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        wholes = [choice.whole() for choice in self._choices]
        pieces = [Piece(p.index, self._echoes[p.index] + p.text, p.scored, p.finish) for p in wholes]
        choices = [self._form.whole(piece) for piece in pieces]
        return {**self._head, "object": self._form.whole_object, "choices": choices, "usage": self.usage()}

    def size(self) -> int:
        """About how many bytes the whole answer has."""
        return sum(choice.size for choice in self._choices)

    def opening_events(self) -> bytes:
        """What a stream begins with."""
        openings = [self._form.opening(index, echo) for index, echo in enumerate(self._echoes)]
        return b"".join(self._event([opening]) for opening in openings if opening is not None)

    def events(self, news: Iterable[News]) -> Iterator[bytes]:
        """These chunks as events. Raises `ApiError` as `take`, after what came before."""
        for index, chunk in news:
            piece = self._take(index, chunk)
            if piece.text or piece.scored or piece.finish is not None:
                yield self._event([self._form.part(piece)])

    def closing_events(self) -> bytes:
        """What a stream ends with."""
        usage = self._event([], self.usage()) if self._wanted.include_usage else b""
        return usage + b"data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        told = {**self._head, "object": self._form.part_object, "choices": choices}
        if self._wanted.include_usage:
            told["usage"] = usage
        return event(told)

    def usage(self) -> dict[str, Any]:
        """Tokens of all choices; a prompt counts once, however many choices it has."""
        usages = [self._usages[index] for index in sorted(self._usages)]
        prompt = sum(usage.prompt for usage in usages[:: self._wanted.n])
        emitted, accepted = sum(usage.emitted for usage in usages), sum(usage.accepted for usage in usages)
        drafting = {
            "drafted": sum(usage.drafted for usage in usages),
            "accepted": accepted,
            "blocks": sum(usage.blocks for usage in usages),
        }
        return {
            "prompt_tokens": prompt,
            "completion_tokens": emitted,
            "total_tokens": prompt + emitted,
            "completion_tokens_details": {"accepted_prediction_tokens": accepted},
            "omnidraft": drafting,
        }


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + as_json(value) + b"\n\n"
