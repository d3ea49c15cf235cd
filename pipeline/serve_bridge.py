"""From the engine's thread to the event loop: the asks of one request, and what comes back of them."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from pipeline.loop import UnfitPromptError
from pipeline.serve_errors import ApiError, busy
from pipeline.serve_metrics import Metrics
from pipeline.serve_openai import Wanted
from pipeline.serve_requests import Ask, BusyError, Chunk, Encoded, Engine, Finish

Result = TypeVar("Result")
News = tuple[int, Chunk]  # with the number of its choice
LONG_BYTES = 16 << 10


class Pools:
    """Threads for what takes long: parsing and tokenising. Long texts wait for each other, not short ones for them."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(1, "omnidraft-short")
        self._long = ThreadPoolExecutor(1, "omnidraft-long")

    async def run(self, size: int, task: Callable[[], Result]) -> Result:
        """Do a task that has to do with `size` bytes. When the caller is cancelled it is not begun any more."""
        pool = self._long if size > LONG_BYTES else self._short
        return await asyncio.get_running_loop().run_in_executor(pool, task)

    async def run_if_long(self, size: int, task: Callable[[], Result]) -> Result:
        """Do a task that is over at once when it has to do with few bytes."""
        return task() if size <= LONG_BYTES else await self.run(size, task)

    def close(self) -> None:
        """Begin nothing any more."""
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)


def encode(engine: Engine, wanted: Wanted) -> list[Encoded]:
    """The prompts of a request, tokenised. Raises `ApiError` for one that the models cannot take."""
    try:
        if wanted.is_chat:
            return [engine.encode_chat(wanted.messages)]
        return [engine.encode(text) for text in wanted.prompts]
    except UnfitPromptError as reason:
        param = "messages" if wanted.is_chat else "prompt"
        raise ApiError(400, str(reason), param=param, code="invalid_prompt") from None


def asks_of(wanted: Wanted, prompts: Sequence[Encoded], name: str, seconds: float) -> list[Ask]:
    """One ask per choice: those of the first prompt, then those of the second."""
    return [
        Ask(
            name=name,
            prompt=prompt,
            max_new_tokens=wanted.max_tokens,
            temperature=wanted.temperature,
            top_k=wanted.top_k,
            top_p=wanted.top_p,
            stop=wanted.stop,
            seed=wanted.seed,
            logprobs=wanted.logprobs,
            store=wanted.store,
            seconds=seconds,
            choice=place * wanted.n + number,
        )
        for place, prompt in enumerate(prompts)
        for number in range(wanted.n)
    ]


class Asked:
    """The asks of one request in the engine's hands.

    Args:
        arrived: `time.perf_counter` when the request came.
    """

    def __init__(self, metrics: Metrics, arrived: float) -> None:
        self._metrics, self._arrived = metrics, arrived
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[News] = asyncio.Queue()  # bounded by the asks' own tokens
        self._open: dict[int, Callable[[], None]] = {}  # what cancels a choice
        self._last: dict[int, float] = {}  # when a choice last had tokens

    def submit(self, engine: Engine, asks: Sequence[Ask]) -> None:
        """Hand over all asks or none. Raises `ApiError` when the engine does not take them."""
        try:
            for ask in asks:
                self._open[ask.choice] = engine.submit(ask, self._listener(ask.choice))
        except Exception as error:
            self.let_go()
            self._open.clear()
            if isinstance(error, BusyError):
                raise busy(str(error), error.retry_after, error.leaving) from None
            raise

    def _listener(self, choice: int) -> Callable[[Chunk], None]:
        def listen(chunk: Chunk) -> None:
            with suppress(RuntimeError):  # the event loop is closed: nobody waits for it
                self._loop.call_soon_threadsafe(self._news.put_nowait, (choice, chunk))

        return listen

    async def news(self) -> AsyncIterator[list[News]]:
        """All that has come since the last time, at least one chunk, until every choice is finished."""
        while self._open:
            waiting = [await self._news.get()]
            while not self._news.empty():
                waiting.append(self._news.get_nowait())
            for choice, chunk in waiting:
                self._measure(choice, chunk)
            yield waiting

    def _measure(self, choice: int, chunk: Chunk) -> None:
        now = time.perf_counter()
        if chunk.tokens:
            self._metrics.generated(len(chunk.tokens))
            if choice in self._last:
                self._metrics.between_tokens.observe(now - self._last[choice])
            else:
                self._metrics.first_token.observe(now - self._arrived)
            self._last[choice] = now
        if chunk.finish is not None:
            self._open.pop(choice, None)
            self._metrics.finished(chunk, now - self._arrived)

    def cancel(self) -> None:
        """Give up what is not finished; the engine frees its place within a block."""
        for cancel in self._open.values():
            cancel()
            self._metrics.finished(Chunk("", finish=Finish.CANCELLED))
        self._open.clear()

    def let_go(self) -> None:
        """Have the engine end what is not finished and say so, so that the client is told."""
        for cancel in self._open.values():
            cancel()


async def while_connected(receive: Receive, work: Awaitable[Result]) -> Result:
    """The result of some work, which is given up when the client leaves.

    Raises:
        ClientDisconnect: it left.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
