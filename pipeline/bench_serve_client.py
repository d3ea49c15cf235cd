"""A client of OpenAI's interface that measures: when each chunk came, what went wrong, how often it was sent away."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Self

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector

from pipeline.bench_serve_mix import Request
from store.errors import RunError

PATIENCE = 330.0  # seconds without a byte, longer than a server's usual deadline
DATA = b"data: "
DONE = b"[DONE]"


@dataclass
class Outcome:
    """What became of a request. Times are those of `time.perf_counter`.

    Attributes:
        began: when it was sent, for the last time if it was sent away before.
        arrivals: of chunks with text, of a stream; of a whole answer its own.
        tokens: of the completion, as the server counts them; None when it did not say.
        finish: as the server says; `left` when the client left.
        error: what kind, if it failed.
        refused: how often it was told to come again later, and obeyed.
    """

    request: Request
    began: float = field(default_factory=time.perf_counter)
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    tokens: int | None = None
    prompt_tokens: int | None = None
    finish: str | None = None
    error: str | None = None
    refused: int = 0

    def take(self, answer: dict[str, Any]) -> None:
        """Something of an answer: all of it, or one event of a stream."""
        if "error" in answer:
            self.error = f"in the stream: {answer['error'].get('code')}"
        for choice in answer.get("choices", ()):
            text = _text(choice)
            self.finish = choice.get("finish_reason") or self.finish
            if text:
                self.text += text
                self.arrivals.append(time.perf_counter())
        if usage := answer.get("usage"):
            self.tokens, self.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]


def _text(choice: dict[str, Any]) -> str:
    said = choice.get("delta") or choice.get("message")
    return (said.get("content") if said is not None else choice.get("text")) or ""


class Client:
    """Any number of requests at the same time. An async context manager.

    Args:
        url: of the server, with or without `/v1`.
        key: that is sent as a bearer's; None for none.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.model = ""

    async def __aenter__(self) -> Self:
        timeout = ClientTimeout(total=None, sock_connect=PATIENCE, sock_read=PATIENCE)
        connector = TCPConnector(limit=0)
        self._session = ClientSession(self._url, headers=self._headers, timeout=timeout, connector=connector)
        try:
            self.model = await self._first_model()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def _first_model(self) -> str:
        try:
            async with self._session.get("/v1/models") as answer:
                return str((await answer.json())["data"][0]["id"])
        except (ClientError, OSError, ValueError, KeyError, IndexError) as error:
            message = f"{self._url} must answer GET /v1/models with a model, but: {error!r}; is the server running?"
            raise RunError(message) from error

    async def metrics(self) -> str | None:
        """The text of `/metrics`; None where there is none."""
        try:
            async with self._session.get("/metrics") as answer:
                return await answer.text() if answer.status == HTTPStatus.OK else None
        except (ClientError, OSError):
            return None

    async def ask(self, request: Request) -> Outcome:
        """Send a request until it is taken, and see it to its end. Never raises for what the server does."""
        outcome = Outcome(request)
        try:
            while (wait := await self._send(outcome)) is not None:
                outcome.refused += 1
                await asyncio.sleep(wait)
                outcome.began = time.perf_counter()
        except (ClientError, OSError, ValueError) as error:
            outcome.error = type(error).__name__
        outcome.ended = time.perf_counter()
        return outcome

    async def _send(self, outcome: Outcome) -> float | None:
        """Send it once. Returns the seconds after which to come again if it was sent away."""
        request = outcome.request
        async with self._session.post(request.path, json=request.body(self.model)) as answer:
            if answer.status == HTTPStatus.TOO_MANY_REQUESTS and "Retry-After" in answer.headers:
                return float(answer.headers["Retry-After"])
            if answer.status != HTTPStatus.OK:
                outcome.error = f"{answer.status} {_code(await answer.text())}".strip()
            elif request.stream:
                await _follow(answer, outcome)
            else:
                outcome.take(json.loads(await answer.read()))
        return None


async def _follow(answer: ClientResponse, outcome: Outcome) -> None:
    """Take a stream's events until it ends, or until it is time to leave."""
    async for data in _events(answer):
        if data == DONE:
            return
        outcome.take(json.loads(data))
        if len(outcome.arrivals) == outcome.request.leave_after:
            outcome.finish = "left"
            answer.close()
            return
    outcome.error = outcome.error or "the stream broke off"


async def _events(answer: ClientResponse) -> AsyncIterator[bytes]:
    """The data of each event. Of what the format allows, only events of one line occur in this interface."""
    async for line in answer.content:
        if line.startswith(DATA):
            yield line.removeprefix(DATA).strip()


def _code(body: str) -> str:
    """The code of an error in OpenAI's form; nothing of any other."""
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""
