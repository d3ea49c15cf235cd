"""The load: clients that each wait for their answer before they ask again, or requests that come at their time."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from pipeline.bench_serve_client import Outcome
from pipeline.bench_serve_mix import Request

Ask = Callable[[Request], Awaitable[Outcome]]


@dataclass(frozen=True)
class Load:
    """What was done. Times are those of `time.perf_counter`.

    Attributes:
        began: of the first request.
        seconds: in which requests were begun.
        outcomes: of all of them, also of those that ended later.
    """

    began: float
    seconds: float
    outcomes: list[Outcome]


async def closed_loop(ask: Ask, requests: Iterator[Request], clients: int, seconds: float) -> Load:
    """So many clients for so many seconds; each asks when its last request has ended. What runs then is waited for."""
    began, outcomes = time.perf_counter(), list[Outcome]()

    async def client() -> None:
        while time.perf_counter() < began + seconds:
            outcomes.append(await ask(next(requests)))

    await asyncio.gather(*(client() for _ in range(clients)))
    return Load(began, seconds, outcomes)


async def open_loop(ask: Ask, requests: Sequence[Request], at: Sequence[float], seconds: float) -> Load:
    """Each request at its time, in seconds from now, whatever became of the others. All are waited for."""
    began = time.perf_counter()

    async def one(request: Request, due: float) -> Outcome:
        await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
        return await ask(request)

    outcomes = await asyncio.gather(*(one(request, due) for request, due in zip(requests, at, strict=True)))
    return Load(began, seconds, list(outcomes))
