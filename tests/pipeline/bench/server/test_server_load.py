"""The load generator against a small server that answers, refuses, fails or breaks off as the prompt requests."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from pipeline.bench.server.benchmark import LoadPlan, load_server, report_of
from pipeline.bench.server.client import Client, LoadRequest, Outcome, Workload, open_loop, requests
from pipeline.bench.server.report import markdown
from store.errors import RunError
from store.hosts import listen

WORDS = ["one ", "two ", "three ", "four"]


class Scripted:
    """Answers with four chunks of two tokens; `bodies` holds the requests, `gone` counts those whose clients left."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.bodies: list[dict[str, Any]] = []
        self.refusals = 1
        self.gone = 0
        self.key: str | None = None
        self.app.get("/v1/models")(self.models)
        self.app.get("/metrics")(self.metrics)
        self.app.post("/v1/completions")(self.complete)
        self.app.post("/v1/chat/completions")(self.complete)

    async def models(self, request: Request) -> Response:
        self.key = request.headers.get("authorization")
        return JSONResponse({"data": [{"id": "scripted"}]})

    async def metrics(self) -> Response:
        return Response(f"vllm:generation_tokens_total {8 * len(self.bodies)}\n")

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        prompt = body.get("prompt") or body["messages"][0]["content"]
        if prompt == "busy" and self.refusals:
            self.refusals -= 1
            return JSONResponse({"error": {"code": "rate_limit_exceeded"}}, 429, {"Retry-After": "0"})
        if prompt == "wrong":
            return JSONResponse({"error": {"code": "invalid_prompt"}}, 400)
        self.bodies.append(body)
        is_chat = "messages" in body
        if body.get("stream"):
            return StreamingResponse(self.events(prompt, is_chat), media_type="text/event-stream")
        output = {"message": {"content": "".join(WORDS)}} if is_chat else {"text": "".join(WORDS)}
        return JSONResponse({"choices": [{**output, "finish_reason": "stop"}], "usage": USAGE})

    async def events(self, prompt: str, is_chat: bool) -> AsyncIterator[str]:
        try:
            for word in WORDS if prompt != "broken" else WORDS[:1]:
                output = {"delta": {"content": word}} if is_chat else {"text": word}
                yield event({"choices": [{**output, "finish_reason": None}]})
                await asyncio.sleep(0.01)
            if prompt == "failing":
                yield event({"error": {"code": "internal_error"}})
            if prompt != "broken":
                yield event({"choices": [{"delta": {}, "text": "", "finish_reason": "stop"}]})
                yield event({"choices": [], "usage": USAGE})
                yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.gone += 1
            raise


USAGE = {"prompt_tokens": 3, "completion_tokens": 8}


def event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


@pytest.fixture
def scripted() -> Iterator[tuple[Scripted, str]]:
    served = Scripted()
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(served.app, log_level="error"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    yield served, f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join()


def request(prompt: str, *, chat: bool = False, stream: bool = True, leave_after: int | None = None) -> LoadRequest:
    return LoadRequest(0, prompt, chat, stream, 0.0, 16, leave_after)


def send(url: str, *wanted: LoadRequest, key: str | None = None) -> list[Outcome]:
    async def all_of_them() -> list[Outcome]:
        async with Client(url, key) as client:
            return [await client.send(one) for one in wanted]

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("chat", [False, True])
def test_an_answer_is_received_whole_and_in_chunks(scripted: tuple[Scripted, str], chat: bool):
    served, url = scripted
    stream, whole = send(f"{url}/v1/", request("x", chat=chat), request("x", chat=chat, stream=False), key="secret")
    for outcome in (stream, whole):
        assert outcome.text == "one two three four"
        assert (outcome.tokens, outcome.prompt_tokens, outcome.finish, outcome.error) == (8, 3, "stop", None)
    assert (len(stream.arrivals), len(whole.arrivals)) == (4, 1)
    assert stream.began <= stream.arrivals[0] < stream.arrivals[-1] <= stream.ended
    assert served.bodies[0]["stream_options"] == {"include_usage": True}
    assert "stream" not in served.bodies[1]
    assert [body["model"] for body in served.bodies] == ["scripted", "scripted"]
    assert served.key == "Bearer secret"


def test_a_refused_client_sends_its_request_again(scripted: tuple[Scripted, str]):
    (outcome,) = send(scripted[1], request("busy"))
    assert (outcome.refused, outcome.error, outcome.finish) == (1, None, "stop")


def test_errors_have_different_names(scripted: tuple[Scripted, str]):
    outcomes = send(scripted[1], *(request(prompt) for prompt in ("wrong", "failing", "broken")))
    kinds = [outcome.error for outcome in outcomes]
    assert kinds == ["400 invalid_prompt", "in the stream: internal_error", "the stream was interrupted"]


def test_a_client_leaves_in_the_middle(scripted: tuple[Scripted, str]):
    served, url = scripted
    (outcome,) = send(url, request("x", leave_after=2))
    assert (outcome.finish, outcome.error, len(outcome.arrivals)) == ("left", None, 2)
    end = time.monotonic() + 30
    while not served.gone:
        assert time.monotonic() < end, "the server must see that the client has left"
        time.sleep(0.01)


def test_a_server_that_is_not_there_is_an_error():
    with pytest.raises(RunError, match="is the server running"):
        send("http://127.0.0.1:9", request("x"))


def test_a_load_is_measured_and_reported(scripted: tuple[Scripted, str]):
    served, url = scripted
    plan = LoadPlan(clients=3, seconds=1.0, warm_up=0.0, workload=Workload(leave=0.0), seed=0)
    loaded = load_server(url, None, None, ["x", "wrong"], plan, lambda _: None)
    report = report_of(loaded, {"cores": 1, "processor": "p", "load": 0.0}, plan.clients, None)
    assert report.model == "scripted"
    assert report.clients.requests == len(served.bodies) + report.clients.errors["400 invalid_prompt"]
    assert report.clients.tokens == 8 * len(served.bodies)
    assert report.samples[-1].figures["generated"] <= 8 * len(served.bodies)
    assert report.server.memory is None
    text = markdown(report)
    assert f"3 clients for 1 s: {report.clients.requests:,} requests, 0 disconnected" in text
    assert "400 invalid_prompt" in text
    assert "resident memory" not in text


def test_an_open_loop_does_not_wait_for_answers(scripted: tuple[Scripted, str]):
    wanted = list(islice(requests(["x"], Workload(stream=1.0, leave=0.0), seed=0), 5))

    async def all_at_once():
        async with Client(scripted[1]) as client:
            return await open_loop(client.send, wanted, [0.0] * 5, 1.0)

    outcomes = asyncio.run(all_at_once()).outcomes
    assert [outcome.request for outcome in outcomes] == wanted
    assert max(outcome.began for outcome in outcomes) < min(outcome.ended for outcome in outcomes)
