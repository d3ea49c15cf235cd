"""A small client of OpenAI's interface: streamed completions, sent at given times or one after another."""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import pairwise
from random import Random
from typing import Any, Self

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

IDLE_TIMEOUT = 330.0  # seconds without a byte, longer than a server's usual deadline
LENGTHS = (16, 32, 64, 128)  # of completions, drawn uniformly
DATA, DONE = b"data: ", b"[DONE]"


@dataclass(frozen=True)
class LoadRequest:
    """A streamed completion. Half of them are chats, and half are greedy."""

    number: int  # from 0; also the seed of the sampling
    prompt: str
    chat: bool
    temperature: float
    max_tokens: int


def make_requests(prompts: Sequence[str], seed: int) -> Iterator[LoadRequest]:
    """Yield endless requests over the prompts, shuffled again on each pass. Equal seeds give equal requests."""
    random, number = Random(seed), 0
    while True:
        for prompt in random.sample(prompts, len(prompts)):
            chat, temperature = random.random() < 0.5, float(random.random() < 0.5)
            yield LoadRequest(number, prompt, chat, temperature, random.choice(LENGTHS))
            number += 1


def draw_arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Return random (Poisson) times in seconds from the start, `rate` per second on average."""
    random, at, found = Random(seed), 0.0, list[float]()
    while (at := at + random.expovariate(rate)) < seconds:
        found.append(at)
    return found


@dataclass
class Outcome:
    """Outcome of a request. Times are those of `time.perf_counter`."""

    began: float = field(default_factory=time.perf_counter)
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of chunks with text
    tokens: int = 0  # as the server counts them
    error: str = ""

    @property
    def gaps(self) -> list[float]:
        """Seconds between two chunks."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]

    def take(self, event: dict[str, Any]) -> None:
        """Add an event of the stream."""
        if "error" in event:
            self.error = "in the stream"
        for choice in event.get("choices", ()):
            if choice.get("text") or choice.get("delta", {}).get("content"):
                self.arrivals.append(time.perf_counter())
        if usage := event.get("usage"):
            self.tokens = usage["completion_tokens"]


class Client:
    """A client for any number of concurrent requests. An async context manager."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def __aenter__(self) -> Self:
        timeout = ClientTimeout(total=None, sock_connect=IDLE_TIMEOUT, sock_read=IDLE_TIMEOUT)
        self._session = ClientSession(self._url, timeout=timeout, connector=TCPConnector(limit=0))
        async with self._session.get("/v1/models") as answer:
            self._model = str((await answer.json())["data"][0]["id"])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def metrics(self) -> str:
        """Return the text of `/metrics`."""
        async with self._session.get("/metrics") as answer:
            return await answer.text()

    async def send(self, request: LoadRequest, due: float = 0.0) -> Outcome:
        """Send a request at a time and read its answer. Errors of the server are recorded, not raised."""
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        outcome = Outcome()
        try:
            await self._read(request, outcome)
        except (ClientError, OSError, ValueError) as error:
            outcome.error = type(error).__name__
        outcome.ended = time.perf_counter()
        return outcome

    async def _read(self, request: LoadRequest, outcome: Outcome) -> None:
        body: dict[str, Any] = {
            "model": self._model,
            "temperature": request.temperature,
            "max_tokens": request.max_tokens,
            "seed": request.number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        path = "/v1/chat/completions" if request.chat else "/v1/completions"
        message = {"role": "user", "content": request.prompt}
        body |= {"messages": [message]} if request.chat else {"prompt": request.prompt}
        async with self._session.post(path, json=body) as answer:
            if answer.status != HTTPStatus.OK:
                outcome.error = str(answer.status)
                return
            async for line in answer.content:
                data = line.removeprefix(DATA).strip()
                if line.startswith(DATA) and data != DONE:
                    outcome.take(json.loads(data))


async def load_fully(client: Client, requests: Iterator[LoadRequest], clients: int, seconds: float) -> list[Outcome]:
    """Let so many clients send their next request after the previous answer, for some seconds."""
    end, outcomes = time.perf_counter() + seconds, list[Outcome]()

    async def work() -> None:
        while time.perf_counter() < end:
            outcomes.append(await client.send(next(requests)))

    await asyncio.gather(*(work() for _ in range(clients)))
    return outcomes


async def load_at(client: Client, requests: Sequence[LoadRequest], at: Sequence[float]) -> list[Outcome]:
    """Send each request at its time, in seconds from now, whether others were answered or not."""
    began = time.perf_counter()
    return list(await asyncio.gather(*(client.send(one, began + due) for one, due in zip(requests, at, strict=True))))
