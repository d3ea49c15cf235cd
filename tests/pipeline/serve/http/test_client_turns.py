"""Clients with long texts take turns, so that one who sends many does not hold up another."""

import asyncio
import threading

from pipeline.serve.http.response_stream import LONG_BYTES, ClientTurns, ThreadPools


async def run_in_turns(clients: str) -> str:
    """Let clients, a letter each, request a long task while one is running; return the order in which they had it."""
    pools, go, order = ThreadPools(), threading.Event(), []
    first = asyncio.create_task(pools.run(LONG_BYTES + 1, go.wait, "a"))
    await asyncio.sleep(0)
    tasks = [
        asyncio.create_task(pools.run(LONG_BYTES + 1, lambda client=client: order.append(client), client))
        for client in clients
    ]
    await asyncio.sleep(0)
    short = pools.run(LONG_BYTES, lambda: order.append("short"), "a")
    await short
    go.set()
    await asyncio.gather(first, *tasks)
    pools.close()
    return " ".join(order)


def test_a_client_that_sends_many_delays_another_by_one():
    assert asyncio.run(run_in_turns("aaaabac")) == "short a b c a a a a"


def test_the_lock_is_passed_on_when_one_leaves():
    """Those that are cancelled while they wait, when their turn has just come, and while they hold it."""

    async def play() -> None:
        turns = ClientTurns()

        async def hold(client: str, until: asyncio.Event) -> None:
            async with turns.take_turn(client):
                await until.wait()

        never, go = asyncio.Event(), asyncio.Event()
        holder = asyncio.create_task(hold("a", never))
        await asyncio.sleep(0)
        waiting, next_one, last = (asyncio.create_task(hold(client, go)) for client in "abc")
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        holder.cancel()
        await asyncio.sleep(0)  # the turn of the next one has come
        next_one.cancel()
        go.set()
        await asyncio.wait_for(last, 30)
        await asyncio.gather(holder, waiting, next_one, return_exceptions=True)
        async with asyncio.timeout(30), turns.take_turn("d"):
            pass

    asyncio.run(play())
