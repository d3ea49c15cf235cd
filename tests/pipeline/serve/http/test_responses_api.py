"""`/v1/responses` with the official client, over a scripted engine."""

from typing import Any

import openai
import pytest
from openai.types.responses import Response
from serving_doubles import MODEL, ScriptedEngine

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ADD: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": None}


def outline(response: Response) -> list[tuple[str, ...]]:
    """The items of a response without their ids."""
    return [
        (item.type, item.status, item.content[0].text)
        if item.type == "message"
        else (item.type, item.status, item.name, item.arguments)
        for item in response.output
    ]


def test_a_text(client: openai.OpenAI, engine: ScriptedEngine):
    answer = client.responses.create(
        model=MODEL,
        input="hello",
        instructions="be brief",
        max_output_tokens=99,
        temperature=0.5,
        store=False,
        include=["message.output_text.logprobs"],
        reasoning={"effort": "low"},
        truncation="disabled",
        text={"verbosity": "low"},
    )
    assert answer.output_text == "system:be brief|user:hello"
    assert (answer.status, answer.instructions, answer.temperature) == ("completed", "be brief", 0.5)
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (26, 27, 53)
    assert "".join(entry.token for entry in answer.output[0].content[0].logprobs) == answer.output_text
    request = engine.requests[-1]
    assert (request.sampling.max_tokens, request.sampling.temperature, request.store) == (99, 0.5, False)
    assert request.request_id == answer.id
    cut = client.responses.create(model=MODEL, input="hello", max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason, outline(cut)) == (
        "incomplete", "max_output_tokens", [("message", "incomplete", "us")],
    )  # fmt: skip


def test_a_conversation_with_calls(client: openai.OpenAI, engine: ScriptedEngine):
    first = client.responses.create(model=MODEL, input=f"So {CALL}", tools=[ADD], tool_choice="auto")
    assert outline(first) == [("message", "completed", "user:So"), ("function_call", "completed", "add", '{"a": 1}')]
    assert engine.tools == [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = first.output[1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    thought: Any = {"type": "reasoning", "id": "r", "summary": []}
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}, thought, *first.output, result]
    again = client.responses.create(
        model=MODEL, input=items, tools=[ADD], tool_choice={"type": "function", "name": "add"}
    )
    assert again.output_text == "user:hi|assistant:user:So|tool:2"
    assert engine.requests[-1].grammar is not None


@pytest.mark.parametrize("text", ["hello", f"{CALL} then {CALL}", f"So {CALL}", ""])
def test_a_stream_ends_in_the_whole_response(client: openai.OpenAI, text: str):
    settings: Any = {"model": MODEL, "input": text, "tools": [ADD]}
    if not text:
        settings |= {"extra_body": {"stop": "u"}}
    whole = client.responses.create(**settings)
    with client.responses.stream(**settings) as stream:  # which adds the parts together, and fails for wrong events
        events = list(stream)
    final = stream.get_final_response()
    assert outline(final) == outline(whole)
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == ("response.incomplete" if whole.status == "incomplete" else "response.completed")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_a_schema(client: openai.OpenAI, engine: ScriptedEngine):
    schema: Any = {"type": "json_schema", "name": "s", "schema": {"type": "object"}, "strict": True}
    client.responses.create(model=MODEL, input="x", text={"format": schema})
    assert engine.sources[-1].text == '{"type": "object"}'


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [ADD], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"background": True}, "background"),
        ({"n": 2}, "n"),
        ({"max_output_token": 3}, "max_output_token"),
        ({"input": "x" * 4000}, "input"),
    ],
)
def test_a_wrong_parameter_is_named(client: openai.OpenAI, wrong: dict[str, Any], param: str):
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/responses", body={"model": MODEL, "input": "x", **wrong}, cast_to=object)
    assert caught.value.param == param
    assert "messages" not in caught.value.body["message"]
