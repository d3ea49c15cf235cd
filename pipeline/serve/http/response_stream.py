"""Bridge from the engine's thread to the event loop: the generation requests of one HTTP request, and their chunks."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from pipeline.serve.http.errors import busy_error
from pipeline.serve.http.metrics import Metrics
from pipeline.serve.messages import BusyError, Chunk, Engine, Finish, GenerationRequest

Result = TypeVar("Result")
ChoiceChunk = tuple[int, Chunk]  # with the index of its choice
LONG_BYTES = 16 << 10


class ThreadPools:
    """Threads for parsing and tokenising: one for long texts, so that short ones never wait for them, and one for
    these. Clients with long texts take turns, so that one who sends many delays another by one at most.
    """

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(1, "omnidraft-short")
        self._long = ThreadPoolExecutor(1, "omnidraft-long")
        self._turn = asyncio.Lock()  # of a client with a long text; those who wait for it have it in their order
        self._clients = WeakValueDictionary[str, asyncio.Lock]()  # by which each client waits only once at a time

    async def run(self, size: int, task: Callable[[], Result], client: str = "") -> Result:
        """Run a task on `size` bytes of text. A task whose caller is cancelled before it starts does not run."""
        loop = asyncio.get_running_loop()
        if size <= LONG_BYTES:
            return await loop.run_in_executor(self._short, task)
        async with self._clients.setdefault(client, asyncio.Lock()), self._turn:
            return await loop.run_in_executor(self._long, task)

    async def run_if_long(self, size: int, task: Callable[[], Result], client: str = "") -> Result:
        """Run a task directly if it takes few bytes, because it ends at once; otherwise on a thread."""
        return task() if size <= LONG_BYTES else await self.run(size, task, client)

    def close(self) -> None:
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)


class ResponseStream:
    """Merges the chunks of all choices of one HTTP request, which arrived at a time of `time.perf_counter`."""

    def __init__(self, metrics: Metrics, arrived: float) -> None:
        self._metrics, self._arrived = metrics, arrived
        self._loop = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[ChoiceChunk] = asyncio.Queue()  # bounded by the requests' own tokens
        self._cancel_functions: dict[int, Callable[[], None]] = {}  # of unfinished choices
        self._last_tokens: dict[int, float] = {}  # time of a choice's last chunk with tokens

    def submit(self, engine: Engine, requests: Sequence[GenerationRequest]) -> None:
        """Submit all requests or none. Raises `ApiError` when the engine refuses one."""
        try:
            for request in requests:
                listener = partial(self._queue_chunk, request.choice)
                self._cancel_functions[request.choice] = engine.submit(request, listener)
        except Exception as error:
            self.interrupt()
            self._cancel_functions.clear()
            if isinstance(error, BusyError):
                raise busy_error(error) from None
            raise

    def _queue_chunk(self, choice: int, chunk: Chunk) -> None:
        with suppress(RuntimeError):  # the event loop is closed: nobody waits for it
            self._loop.call_soon_threadsafe(self._chunks.put_nowait, (choice, chunk))

    async def read_chunks(self, interval: float = 0.0) -> AsyncIterator[list[ChoiceChunk]]:
        """Yield all chunks that arrived since the last time, at least one, until every choice is finished. With an
        interval in seconds they are yielded that often, also if there is none.
        """
        due = self._loop.time()
        while self._cancel_functions:
            due += interval
            if interval:
                await asyncio.sleep(due - self._loop.time())
            arrived = [] if interval else [await self._chunks.get()]
            while not self._chunks.empty():
                arrived.append(self._chunks.get_nowait())
            for choice, chunk in arrived:
                self._measure(choice, chunk)
            yield arrived

    def _measure(self, choice: int, chunk: Chunk) -> None:
        now = time.perf_counter()
        if chunk.tokens:
            self._metrics.count_tokens(len(chunk.tokens))
            if choice in self._last_tokens:
                self._metrics.between_tokens.observe(now - self._last_tokens[choice])
            else:
                self._metrics.first_token.observe(now - self._arrived)
            self._last_tokens[choice] = now
        if chunk.finish is not None:
            self._cancel_functions.pop(choice, None)
            self._metrics.count_finish(chunk, now - self._arrived)

    def cancel(self) -> None:
        """Cancel unfinished choices and stop reading; the engine frees their places within a block."""
        for cancel in self._cancel_functions.values():
            cancel()
            self._metrics.count_finish(Chunk("", finish=Finish.CANCELLED))
        self._cancel_functions.clear()

    def interrupt(self) -> None:
        """Cancel unfinished choices but keep reading, so that the client receives their last chunks."""
        for cancel in self._cancel_functions.values():
            cancel()


async def run_while_connected(receive: Receive, work: Awaitable[Result]) -> Result:
    """Await some work and return its result. Raises `ClientDisconnect`, and cancels it, when the client disconnects."""

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)
