"""`omnidraft serve` from the outside: the official client over a real port, with a scripted engine."""

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import openai
import pytest
from serving_doubles import CONTEXT, MODEL, HttpServer, ScriptedEngine, run_http_server, wait_until

from pipeline.serve.http.limits import Limits
from pipeline.serve.http.openai_requests import ChatRequest, CompletionRequest
from pipeline.serve.http.responses_api import ResponseRequest
from pipeline.serve.messages import Finish
from stages.sampling.params import SamplingParams

HELLO = [{"role": "user", "content": "hello"}]
IMAGE = {"type": "image_url", "image_url": "x"}


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def served(engine: ScriptedEngine) -> Iterator[HttpServer]:
    with run_http_server(engine, defaults=SamplingParams(temperature=0.25, top_k=7, top_p=0.5)) as server:
        yield server


@pytest.fixture(scope="module")
def closed() -> Iterator[HttpServer]:
    """A server with an API key."""
    with run_http_server(ScriptedEngine(), key="sécret") as server:
        yield server


@pytest.fixture(scope="module")
def client(served: HttpServer) -> Iterator[openai.OpenAI]:
    with served.client() as client:
        yield client


def test_the_model_is_listed(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.get("/models/", cast_to=object) == client.get("/models", cast_to=object)
    assert client.models.retrieve(MODEL).id == MODEL  # with a slash in its name
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


def test_a_completion(client: openai.OpenAI):
    answer = client.completions.create(model=MODEL, prompt="one two")
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == ("one two", "stop", 0, None)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 8, 15)
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 4
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    counts = {"drafted": 16, "accepted": 4, "blocks": 4}
    sources = {"target": 4, "memory": 4}
    assert answer.usage.omnidraft == counts | {"accepted_lengths": [0, 4], "tokens_by_source": sources}


def test_parameters_reach_the_engine(client: openai.OpenAI, engine: ScriptedEngine):
    client.completions.create(
        model=MODEL,
        prompt="x",
        temperature=0,
        top_p=0.9,
        max_tokens=3,
        stop=["b", "c"],
        seed=-5,
        extra_body={"top_k": 4, "store": False},
    )
    request = engine.requests[-1]
    assert request.sampling == SamplingParams(0, 4, 0.9, stop=("b", "c"), max_tokens=3, seed=2**63 - 5)
    assert not request.store
    assert 0 < request.timeout_seconds <= Limits().deadline_seconds
    controls = {"min_p": 0.05, "repetition_penalty": 1.1, "ignore_eos": True, "stop_token_ids": [7, 9]}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": -2, "logit_bias": {"5": -100, "11": 0.5}}
    client.chat.completions.create(model=MODEL, messages=HELLO, **penalties, extra_body=controls)
    assert engine.requests[-1].sampling == SamplingParams(
        0.25, 7, 0.5, 0.05, 0.5, -2, 1.1, ((5, -100), (11, 0.5)), True, (7, 9), max_tokens=CONTEXT
    )
    client.completions.create(model=MODEL, prompt="x", extra_body=dict.fromkeys([*controls, *penalties]))
    request = engine.requests[-1]
    assert request.sampling == SamplingParams(0.25, 7, 0.5, max_tokens=16)
    assert request.store


def test_response_formats_are_compiled(client: openai.OpenAI, engine: ScriptedEngine):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    formats = [
        {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}},
        {"type": "json_object"},
        {"type": "grammar", "grammar": 'root ::= "a"'},
    ]
    for wanted in formats:
        client.chat.completions.create(model=MODEL, messages=HELLO, response_format=wanted)
        assert engine.requests[-1].grammar == engine.sources[-1]
    client.completions.create(model=MODEL, prompt="x", n=2, extra_body={"response_format": {"type": "json_object"}})
    assert engine.requests[-1].grammar == engine.requests[-2].grammar == engine.sources[-1]
    client.chat.completions.create(model=MODEL, messages=HELLO, response_format={"type": "text"})
    assert engine.requests[-1].grammar is None
    found = [(source.kind, source.text) for source in engine.sources[-4:]]
    whole = ("json_schema", '{"type": "object"}')
    assert found == [("json_schema", json.dumps(schema)), whole, ("grammar", 'root ::= "a"'), whole]


def test_a_chat(client: openai.OpenAI, engine: ScriptedEngine):
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=100, user="me")
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", "system:be brief|user:hello")
    assert answer.object == "chat.completion"
    assert engine.requests[-1].sampling.max_tokens == 100
    client.chat.completions.create(model=MODEL, messages=HELLO)
    assert engine.requests[-1].sampling.max_tokens == CONTEXT
    # A response can be sent back unchanged.
    more = [*HELLO, message.model_dump(), {"role": "user", "content": "?"}]
    again = client.chat.completions.create(model=MODEL, messages=more)
    assert again.choices[0].message.content == "user:hello|assistant:system:be brief|user:hello|user:?"


def test_values_for_the_chat_template_reach_it(client: openai.OpenAI, engine: ScriptedEngine):
    more = {"chat_template_kwargs": {"enable_thinking": True, "date": "today"}, "enable_thinking": False}
    client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=more)
    assert engine.values == {"enable_thinking": False, "date": "today"}
    begun = [*HELLO, {"role": "assistant", "content": "We"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    client.chat.completions.create(model=MODEL, messages=begun, extra_body=more)
    assert engine.values == more


def test_a_prompt_may_be_tokens_or_have_control_tokens(client: openai.OpenAI, engine: ScriptedEngine):
    whole = client.completions.create(model=MODEL, prompt="ab")
    assert client.completions.create(model=MODEL, prompt=[97, 98]).choices[0].text == whole.choices[0].text
    assert engine.plain == ((97, 98), False, True)
    assert len(client.completions.create(model=MODEL, prompt=[[97], [98, 99]]).choices) == 2
    client.completions.create(model=MODEL, prompt="x", extra_body={"parse_special": True, "add_special_tokens": False})
    assert engine.plain == ("x", True, False)
    assert client.completions.create(model=MODEL, prompt="x", suffix="y", max_tokens=9).choices[0].text == "xy"
    assert engine.requests[-1].sampling.stop_token_ids == (10,), "those of the prompt end it too"


def test_values_that_change_nothing_are_accepted(client: openai.OpenAI, engine: ScriptedEngine):
    nothing = {
        "max_tokens": 5,
        "top_logprobs": 0,
        "best_of": 1,
        "stop": "",
        "seed": 1.0,
        "priority": 0,
        "min_tokens": 0,
        "bad_words": [],
    }
    nothing |= {
        "reasoning_effort": "high",
        "verbosity": "low",
        "stream_options": {},
        "length_penalty": 1.0,
        "echo": False,
    }
    client.completions.create(model=MODEL, prompt="x", extra_body=nothing)
    client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=nothing)
    assert engine.requests[-1].sampling == SamplingParams(0.25, 7, 0.5, max_tokens=5, seed=1)


def test_a_prediction_reaches_the_engine(client: openai.OpenAI, engine: ScriptedEngine):
    prediction = {"type": "content", "content": [{"type": "text", "text": "hé"}]}
    client.chat.completions.create(model=MODEL, messages=HELLO, prediction=prediction)
    assert engine.requests[-1].prediction == tuple("hé".encode())
    assert engine.plain == ("hé", False, False)
    client.chat.completions.create(model=MODEL, messages=HELLO, prediction={"type": "content", "content": ""})
    assert engine.requests[-1].prediction == ()


def test_prompts_are_shown_as_tokens_and_tokens_as_text(served: HttpServer):
    http = served.client()._client
    shown = http.post(f"{served.url}/tokenize", json={"prompt": "hé"}).json()
    assert shown == {"count": 3, "max_model_len": CONTEXT, "tokens": list("hé".encode())}
    assert http.post(f"{served.url}/detokenize", json={"tokens": shown["tokens"]}).json() == {"prompt": "hé"}
    assert http.post(f"{served.url}/tokenize", json={"messages": HELLO}).json()["count"] > 3
    for path, body in (("tokenize", {"prompt": ["a", "b"]}), ("tokenize", {}), ("detokenize", {"tokens": "ab"})):
        assert http.post(f"{served.url}/{path}", json=body).status_code == 400


def test_several_choices_of_several_prompts(client: openai.OpenAI, engine: ScriptedEngine):
    answer = client.completions.create(model=MODEL, prompt=["ab", "cde"], n=2, seed=1)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "ab"), (1, "ab"), (2, "cde"), (3, "cde")]
    assert answer.usage.prompt_tokens == 2 + 3
    assert answer.usage.completion_tokens == 3 + 3 + 4 + 4
    assert answer.usage.prompt_tokens_details.cached_tokens == 2, "once per prompt"
    assert answer.usage.omnidraft["accepted_lengths"] == [0, 8]
    assert answer.usage.omnidraft["tokens_by_source"] == {"target": 8, "memory": 6}
    requests = engine.requests[-4:]
    assert [request.choice for request in requests] == [0, 1, 2, 3]
    assert len({request.request_id for request in requests}) == 1


@pytest.mark.parametrize("prompt", ["one two three", "größer als 3 €", "x", "👩‍👩‍👧"])
@pytest.mark.parametrize("stop", [None, "three", ["r ", "€"]])
@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_equals_the_whole_response(
    client: openai.OpenAI, prompt: str, stop: str | list[str] | None, echo: bool
):
    settings = {"model": MODEL, "prompt": prompt, "stop": stop, "max_tokens": 40, "logprobs": 2, "n": 2, "echo": echo}
    whole = client.completions.create(**settings)
    texts, ends, tokens, offsets = ["", ""], ["", ""], [[], []], [[], []]
    *parts, last = client.completions.create(**settings, stream=True, stream_options={"include_usage": True})
    for part in parts:
        assert (part.id, part.usage) == (last.id, None)
        choice = part.choices[0]
        texts[choice.index] += choice.text
        ends[choice.index] = choice.finish_reason
        tokens[choice.index] += choice.logprobs.tokens
        offsets[choice.index] += choice.logprobs.text_offset
    assert texts == [choice.text for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices]
    assert (last.choices, last.usage) == ([], whole.usage)


def test_a_chat_stream(client: openai.OpenAI):
    parts = list(client.chat.completions.create(model=MODEL, messages=HELLO, stream=True))
    assert parts[0].object == "chat.completion.chunk"
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "user:hello"
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert all(part.usage is None for part in parts)


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/responses"])
def test_a_stream_may_be_even(path: str):
    """Every tenth of a second as many bytes, whether a block brought tokens or not."""
    given = {
        "/chat/completions": {"messages": HELLO},
        "/completions": {"prompt": "hello"},
        "/responses": {"input": "x"},
    }
    body = {"model": MODEL, "stream": True, "stream_options": {"include_obfuscation": True}, **given[path]}
    with run_http_server(ScriptedEngine(pause=0.06)) as served, served.client() as client:
        began, data = time.monotonic(), b""
        with client._client.stream("POST", f"{served.url}/v1{path}", json=body) as response:
            for part in response.iter_raw():  # on a busy machine it has several
                data += part
                assert time.monotonic() - began > 0.1 * data.count(b"  \n\n")
        *filled, last = data.split(b"  \n\n")
        opening = {"/chat/completions": 1, "/completions": 0, "/responses": 2}[path]  # events before the first interval
        filled[0] = filled[0].split(b"\n\n", opening)[-1]
        assert len(filled) > 1
        assert {(len(part) + 4) % 2048 for part in filled} == {0}
        assert last.count(b"data: ") == 1, "the closing event"
        events = [line for line in data.split(b"\n") if line.startswith(b"data: {")]
        plain = client._client.post(f"{served.url}/v1{path}", json={**body, "stream_options": {}}).text
    ids = re.compile(r'"(id|item_id|created|created_at)": ?("[^"]*"|[0-9]+)')
    assert [ids.sub("", one.decode()) for one in events] == [
        ids.sub("", line) for line in plain.split("\n") if line.startswith("data: {")
    ]


def test_log_probabilities_of_a_completion(client: openai.OpenAI):
    logprobs = client.completions.create(model=MODEL, prompt="aé", logprobs=1).choices[0].logprobs
    assert logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9"]  # the end of the sequence is not shown
    assert logprobs.token_logprobs == [0, -1, -2]
    assert logprobs.text_offset == [0, 1, 1]
    assert logprobs.drafted_by == ["memory", None, "memory"]
    assert logprobs.top_logprobs == [{"?": -9, "a": 0}, {"?": -9, "bytes:\\xc3": -1}, {"?": -9, "bytes:\\xa9": -2}]
    alone = client.completions.create(model=MODEL, prompt="a", logprobs=0).choices[0].logprobs
    assert alone.top_logprobs == [{"a": 0}]


def test_an_echoed_prompt_has_the_log_probabilities_of_its_tokens(client: openai.OpenAI):
    settings = {"model": MODEL, "prompt": ["aé", "b"], "echo": True, "logprobs": 1}
    for most, added in ((0, []), (1, ["a"]), (9, ["a", "bytes:\\xc3", "bytes:\\xa9", "<eos>"])):
        choice, _ = client.completions.create(**settings, max_tokens=most).choices
        logprobs = choice.logprobs
        assert choice.text == "aé" + ("a" * (most == 1) or "aé" * (most > 1))
        assert logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", *added], "one entry per token, also of the end"
        assert logprobs.token_logprobs == [None, -1, -1, *range(0, -len(added), -1)]
        assert logprobs.text_offset == [0, 1, 1, 2, 3, 3, 4][: 3 + len(added)]
        assert logprobs.top_logprobs[:2] == [None, {"bytes:\\xc3": -1}]


def test_as_many_tokens_as_are_possible(client: openai.OpenAI, engine: ScriptedEngine):
    for given, most in (
        ({}, 16),
        ({"max_tokens": None}, CONTEXT),
        ({"max_tokens": -1}, CONTEXT),
        ({"max_tokens": 0}, 0),
    ):
        client.completions.create(model=MODEL, prompt=[*"abcdefghijklmnopqrstuvwxyz"], extra_body=given)
        assert [request.sampling.max_tokens for request in engine.requests[-26:]] == [most] * 26
    client.completions.create(model=MODEL, prompt="a", n=64, max_tokens=-1, logprobs=19)
    assert engine.requests[-1].sampling.max_tokens == Limits().scores // (20 * 64)


def test_log_probabilities_of_a_chat(client: openai.OpenAI, engine: ScriptedEngine):
    settings = {"model": MODEL, "messages": [{"role": "user", "content": "é"}], "logprobs": True}
    content = client.chat.completions.create(**settings, top_logprobs=2).choices[0].logprobs.content
    assert [entry.token for entry in content] == [*"user:", "\\xc3", "\\xa9"]
    assert content[-1].bytes == [0xA9]
    assert content[-1].logprob == -6
    assert [entry.drafted_by for entry in content[:2]] == ["memory", None]
    assert [(other.token, other.bytes, other.logprob) for other in content[0].top_logprobs] == [("?", [63], -9)]
    assert engine.requests[-1].sampling.logprobs == 2
    content = client.chat.completions.create(**settings).choices[0].logprobs.content
    assert content[0].top_logprobs == []


@pytest.mark.parametrize(
    ("wrong", "param", "message"),
    [
        ({"temperature": 2.5}, "temperature", "less than or equal to 2, got 2.5"),
        ({"temperature": "1"}, "temperature", "a valid number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"max_tokens": -2}, "max_tokens", "greater than or equal to -1"),
        ({"n": 129}, "n", "at most 128"),
        ({"n": True}, "n", "a valid integer"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"seed": 1.5}, "seed", "a valid integer"),
        ({"priority": 1}, "priority", "set it to 0"),
        ({"logprobs": 20, "max_tokens": 4000, "n": 5}, "logprobs", "20000 tokens are at most 400000, got 20"),
        ({"logprobs": 9, "max_tokens": 0, "echo": True, "n": 99, "prompt": "x" * 999}, "logprobs", "98901 tokens"),
        ({"bad_words": ["x"]}, "bad_words", "set it to []"),
        ({"repeat_penalty": 1}, "repeat_penalty", "did you mean 'repetition_penalty'?"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"prompt": [1, True]}, "prompt", "a text, a list of token ids, or a list of these"),
        ({"prompt": [[]]}, "prompt", "a text, a list of token ids, or a list of these"),
        ({"prompt": []}, "prompt", "a text, a list of token ids, or a list of these"),
        ({"prompt": None}, "prompt", "required"),
        ({"prompt": ""}, "prompt", "must have 1 to"),
        ({"prompt": "x" * 4000}, "prompt", "got 4000"),
        ({"best_of": 3}, "best_of", "not supported"),
        ({"suffix": "x", "echo": True}, "echo", "where there is a 'suffix'"),
        ({"suffix": "x", "prompt": [1]}, "suffix", "a prompt that is a text"),
        ({"min_tokens": 3}, "min_tokens", "set it to 0"),
        ({"min_p": 1.5}, "min_p", "less than or equal to 1, got 1.5"),
        ({"presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "greater than or equal to -2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
        ({"logit_bias": {"five": 1}}, "logit_bias", "token ids as names, got"),
        ({"logit_bias": {"257": 1}}, "logit_bias", "token ids from 0 to 256, got 257"),
        ({"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias", "at most 1024"),
        ({"ignore_eos": 1}, "ignore_eos", "a valid boolean"),
        ({"stop_token_ids": [3, -1]}, "stop_token_ids", "token ids from 0 to 256, got -1"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids", "at most 64"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
        ({"metadata": {"a": 1}}, "metadata.a", "a valid string"),
    ],
)
def test_a_wrong_parameter_is_named(client: openai.OpenAI, wrong: dict, param: str, message: str):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="x", extra_body=wrong)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert message in caught.value.body["message"]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}] * 1025}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "assistant", "content": "nothing to add"}]}, "messages"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "invalid"}}}, "response_format"),
        ({"response_format": {"type": "grammar", "grammar": "invalid"}}, "response_format"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"echo": True}, "echo"),
        ({"prediction": {"type": "content", "content": [IMAGE]}}, "prediction"),
        ({"prediction": {"type": "content", "content": "x" * 4000}}, "prediction"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"not a name": 1}}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "continue_final_message"),
    ],
)
def test_a_wrong_parameter_of_a_chat_is_named(client: openai.OpenAI, wrong: dict, param: str):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=wrong)
    assert caught.value.param.startswith(param)


def test_the_interface_is_described(served: HttpServer, closed: HttpServer):
    """Every path, and every parameter of the two bodies; without a key."""
    for server in (served, closed):
        described = server.client()._client.get(f"{server.url}/openapi.json").json()
        page = server.client()._client.get(f"{server.url}/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert all(text in page.text for text in ("/openapi.json", "<code>/v1/chat/completions</code>"))
        assert "://" not in page.text  # nothing is loaded from elsewhere
    paths, schemas = described["paths"], described["components"]["schemas"]
    assert {"/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/metrics"} <= set(paths)
    bodies = {"completions": CompletionRequest, "chat/completions": ChatRequest, "responses": ResponseRequest}
    for path, kind in ((f"/v1/{name}", kind) for name, kind in bodies.items()):
        body = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = schemas[body.rpartition("/")[2]]
        assert list(schema["properties"]) == list(kind.model_fields)
    references = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(described))
    assert set(references) <= set(schemas)
    assert {"TextPart", "ChatMessage"} <= set(references)


def test_the_key(closed: HttpServer):
    http, right = closed.client()._client, {"Authorization": "Bearer sécret".encode()}
    answer = http.get(f"{closed.url}/v1/models")
    assert (answer.json()["error"]["code"], answer.headers["www-authenticate"]) == ("invalid_api_key", "Bearer")
    open_to = {path: http.get(f"{closed.url}{path}").status_code for path in ("/", "/health", "/healthy", "/docs/v1")}
    assert open_to == {"/": 200, "/health": 200, "/healthy": 401, "/docs/v1": 401}
    assert http.get(f"{closed.url}/v1/models", headers=right).status_code == 200
    named = {"Authorization": "bearer sécret".encode(), "Host": "elsewhere.example"}
    assert http.get(f"{closed.url}/metrics", headers=named).status_code == 200
    with run_http_server(engine := ScriptedEngine(), key="secret") as served:
        served.client("secret").completions.create(model=MODEL, prompt="x")
        assert engine.requests[-1].tenant == "secret", "its memory is that of the key"
    with run_http_server(ScriptedEngine(), key="") as served:
        assert served.client()._client.get(f"{served.url}/metrics").status_code == 401, "an empty key opens nothing"


WRONG_KEYS = (
    "", "Bearer", "Bearer ", "Bearer s", "Bearer sécre", "Bearer écret", "Bearer sécrett", "Bearer sécret sécret",
    "Bearer Sécret", "Bearer SÉCRET", "Bearer secret", "Bearer sécret\0", "Bearersécret", "sécret", "Basic sécret",
)  # fmt: skip


@pytest.mark.parametrize("sent", WRONG_KEYS)
def test_only_the_whole_key_is_accepted(closed: HttpServer, sent: str):
    for path in ("/v1/models", "/metrics", "/nowhere"):
        with closed.connect() as connection:
            head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: {sent}\r\n\r\n"
            connection.sendall(head.encode())
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        status = int(answer.split(b" ", 2)[1])
        assert status == (400 if "\0" in sent else 401)  # a zero byte is no HTTP
        assert MODEL.encode() not in answer


@pytest.mark.parametrize(("host", "status"), [("localhost:8000", 200), ("evil.example", 403)])
def test_a_page_of_another_name_is_refused(served: HttpServer, host: str, status: int):
    answer = served.client()._client.get(f"{served.url}/v1/models", headers={"Host": host})
    assert answer.status_code == status


def test_pages_of_a_named_site_may_send_requests(served: HttpServer):
    site, asked = {"Origin": "https://chat.example"}, {"Access-Control-Request-Method": "POST"}
    with run_http_server(ScriptedEngine(), key="secret", origins=["https://chat.example"]) as allowing:
        http, url = allowing.client()._client, f"{allowing.url}/v1/chat/completions"
        allowed = http.options(url, headers=site | asked)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, site["Origin"])
        assert http.get(url, headers=site).headers["access-control-allow-origin"] == site["Origin"], (
            "errors are read too"
        )
        assert http.options(url, headers={"Origin": "https://evil.example"} | asked).status_code == 400
    assert "access-control-allow-origin" not in http.get(f"{served.url}/v1/models", headers=site).headers


def test_a_full_queue():
    with run_http_server(engine := ScriptedEngine(capacity=2, held=True)) as served, served.client() as client:
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model=MODEL, prompt="x", n=3)  # two would fit
        assert caught.value.response.headers["retry-after"] == "7"
        wait_until(lambda: engine.running == 0)
        assert len(engine.cancels) == 2
        engine.go.set()
        assert client.completions.create(model=MODEL, prompt="x", n=2).choices[1].text == "x"


@pytest.mark.slow
def test_every_client_receives_its_own_completion(engine: ScriptedEngine, served: HttpServer):
    def complete(number: int) -> tuple[str, str]:
        prompt = f"{number} " * (number % 7 + 1)
        with served.client() as client:
            parts = client.completions.create(model=MODEL, prompt=prompt, max_tokens=99, n=2, stream=True)
            texts = ["", ""]
            for part in parts:
                texts[part.choices[0].index] += part.choices[0].text
            whole = client.completions.create(model=MODEL, prompt=prompt, max_tokens=99)
        return prompt, "|".join([*texts, whole.choices[0].text])

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(complete, range(64)))
    assert all(text == f"{prompt}|{prompt}|{prompt}" for prompt, text in answers)


@pytest.mark.parametrize(
    ("finish", "status", "code"),
    [
        (Finish.DEADLINE, 504, "deadline_exceeded"),
        (Finish.FAILED, 500, "internal_error"),
        (Finish.GRAMMAR, 400, "grammar_limit_exceeded"),
        (Finish.CANCELLED, 503, "server_leaving"),
    ],
)
def test_an_incomplete_completion_is_an_error(finish: Finish, status: int, code: str):
    with run_http_server(engine := ScriptedEngine(finish=finish)) as served, served.client() as client:
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(model=MODEL, prompt="abcd")
        assert (caught.value.status_code, caught.value.code) == (status, code)
        parts = iter(client.completions.create(model=MODEL, prompt="abcd", stream=True))
        assert [next(parts).choices[0].text, next(parts).choices[0].text] == ["ab", "cd"]
        with pytest.raises(openai.APIError) as ended:
            next(parts)
        assert ended.value.code == code
        wait_until(lambda: engine.running == 0)


def test_an_internal_error_reveals_nothing(served: HttpServer, engine: ScriptedEngine, monkeypatch):
    monkeypatch.setattr(engine, "encode", Mock(side_effect=RuntimeError("a secret of the inside")))
    with pytest.raises(openai.InternalServerError) as caught:
        served.client().completions.create(model=MODEL, prompt="x")
    assert caught.value.code == "internal_error"
    assert "secret" not in caught.value.response.text


def test_a_prompt_that_is_tokenised_too_late_misses_the_deadline():
    with run_http_server(
        engine := ScriptedEngine(held_from=1), Limits(deadline_seconds=0.2, grace_seconds=0.2)
    ) as served:
        http = served.client()._client
        timer = threading.Timer(0.4, engine.encoding.set)
        timer.start()
        answer = http.post(f"{served.url}/v1/completions", json={"model": MODEL, "prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert answer.headers["x-should-retry"] == "false"
        assert engine.requests == []
