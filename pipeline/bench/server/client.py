"""Load generator: requests of several kinds, a measuring client of OpenAI's interface, and closed and open loops.

Equal seeds give equal requests. In a closed loop a client sends its next request after the previous answer; in an open
loop requests are sent at given times.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from random import Random
from typing import Any, Self

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector

from store.errors import RunError

LEAVES_WITHIN = 8  # chunks after which a disconnecting client disconnects, at most
IDLE_TIMEOUT = 330.0  # seconds without a byte, longer than a server's usual deadline
DATA = b"data: "
DONE = b"[DONE]"


@dataclass(frozen=True)
class LoadRequest:
    """One request to a server.

    Attributes:
        number: number of the request from 0, also its sampling seed.
        prompt: text of the prompt; in a chat the only message.
        leave_after: number of chunks of the stream after which the client disconnects; None if it does not.
    """

    number: int
    prompt: str
    chat: bool
    stream: bool
    temperature: float
    max_tokens: int
    leave_after: int | None = None

    @property
    def path(self) -> str:
        """Path of the endpoint."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, model: str) -> dict[str, Any]:
        """Body in OpenAI's interface. Streams request usage, because chunks do not contain their number of tokens."""
        body: dict[str, Any] = {"model": model, "temperature": self.temperature, "max_tokens": self.max_tokens}
        body["seed"] = self.number
        body |= {"messages": [{"role": "user", "content": self.prompt}]} if self.chat else {"prompt": self.prompt}
        return body | ({"stream": True, "stream_options": {"include_usage": True}} if self.stream else {})


@dataclass(frozen=True)
class Workload:
    """Shares of the kinds of requests, drawn independently.

    Attributes:
        stream, chat, greedy: shares of all requests; those that are not greedy have temperature 1.
        leave: share of streams whose clients disconnect midway.
        max_tokens: completion lengths, drawn uniformly.
    """

    stream: float = 0.75
    chat: float = 0.5
    greedy: float = 0.5
    leave: float = 0.05
    max_tokens: tuple[int, ...] = (16, 32, 64, 128)


def requests(prompts: Sequence[str], workload: Workload, seed: int) -> Iterator[LoadRequest]:
    """Endless requests over the prompts, which are shuffled again on each pass."""
    random, number = Random(seed), 0
    while True:
        for prompt in random.sample(prompts, len(prompts)):
            stream, chat, greedy, leaves = (random.random() for _ in range(4))
            max_tokens, after = random.choice(workload.max_tokens), random.randint(1, LEAVES_WITHIN)
            yield LoadRequest(
                number,
                prompt,
                chat=chat < workload.chat,
                stream=stream < workload.stream,
                temperature=0.0 if greedy < workload.greedy else 1.0,
                max_tokens=max_tokens,
                leave_after=after if stream < workload.stream and leaves < workload.leave else None,
            )
            number += 1


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Random (Poisson) arrival times in seconds from the start, `rate` per second on average."""
    random, at, found = Random(seed), 0.0, list[float]()
    while (at := at + random.expovariate(rate)) < seconds:
        found.append(at)
    return found


@dataclass
class Outcome:
    """Outcome of a request. Times are those of `time.perf_counter`.

    Attributes:
        began: time when the request was sent, for the last time if it was refused before.
        ended: time when the answer was complete.
        arrivals: arrival times of chunks with text; one time for an answer that is not streamed.
        text: text of the answer so far.
        tokens, prompt_tokens: token counts given by the server; None if it gave none.
        finish: finish reason given by the server; `left` if the client disconnected.
        error: kind of error; None if there was none.
        refused: number of answers 429, each followed by another attempt.
    """

    request: LoadRequest
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
        """Add an answer that is not streamed, or one event of a stream."""
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
    message = choice.get("delta") or choice.get("message")
    return (message.get("content") if message is not None else choice.get("text")) or ""


class Client:
    """Client of OpenAI's interface for any number of concurrent requests. An async context manager.

    Args:
        url: URL of the server, with or without `/v1`.
        key: API key sent as a bearer token; None for none.

    Attributes:
        model: name of the server's first model.

    Raises:
        RunError: on entering, if the server does not name a model.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.model = ""

    async def __aenter__(self) -> Self:
        timeout = ClientTimeout(total=None, sock_connect=IDLE_TIMEOUT, sock_read=IDLE_TIMEOUT)
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
        """The text of `/metrics`; None if the server has no such endpoint."""
        try:
            async with self._session.get("/metrics") as answer:
                return await answer.text() if answer.status == HTTPStatus.OK else None
        except (ClientError, OSError):
            return None

    async def send(self, request: LoadRequest) -> Outcome:
        """Send a request until it is accepted, and read its answer. Errors of the server are recorded, not raised."""
        outcome = Outcome(request)
        try:
            while (wait := await self._send_once(outcome)) is not None:
                outcome.refused += 1
                await asyncio.sleep(wait)
                outcome.began = time.perf_counter()
        except (ClientError, OSError, ValueError) as error:
            outcome.error = type(error).__name__
        outcome.ended = time.perf_counter()
        return outcome

    async def _send_once(self, outcome: Outcome) -> float | None:
        """Send a request once. Returns the seconds to wait before another attempt if it was refused."""
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
    """Read the events of a stream until it ends, or until the client disconnects."""
    async for data in _events(answer):
        if data == DONE:
            return
        outcome.take(json.loads(data))
        if len(outcome.arrivals) == outcome.request.leave_after:
            outcome.finish = "left"
            answer.close()
            return
    outcome.error = outcome.error or "the stream was interrupted"


async def _events(answer: ClientResponse) -> AsyncIterator[bytes]:
    """Data of each server-sent event. This interface uses events of one line only."""
    async for line in answer.content:
        if line.startswith(DATA):
            yield line.removeprefix(DATA).strip()


def _code(body: str) -> str:
    """The code of an error in OpenAI's form; empty for any other text."""
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""


@dataclass(frozen=True)
class LoadOutcomes:
    """Outcomes of a load. Times are those of `time.perf_counter`.

    Attributes:
        began: time of the first request.
        seconds: length of the interval in which requests were sent.
        outcomes: outcomes of all requests, including those that ended later.
    """

    began: float
    seconds: float
    outcomes: list[Outcome]


Send = Callable[[LoadRequest], Awaitable[Outcome]]


async def closed_loop(send: Send, requests: Iterator[LoadRequest], clients: int, seconds: float) -> LoadOutcomes:
    """Run clients that send their next request after the previous answer, for `seconds`. Waits for the last answers."""
    began, outcomes = time.perf_counter(), list[Outcome]()

    async def client() -> None:
        while time.perf_counter() < began + seconds:
            outcomes.append(await send(next(requests)))

    await asyncio.gather(*(client() for _ in range(clients)))
    return LoadOutcomes(began, seconds, outcomes)


async def open_loop(send: Send, requests: Sequence[LoadRequest], at: Sequence[float], seconds: float) -> LoadOutcomes:
    """Send each request at its time in `at` (seconds from now), independent of answers. Waits for all answers."""
    began = time.perf_counter()

    async def one(request: LoadRequest, due: float) -> Outcome:
        await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
        return await send(request)

    outcomes = await asyncio.gather(*(one(request, due) for request, due in zip(requests, at, strict=True)))
    return LoadOutcomes(began, seconds, list(outcomes))
