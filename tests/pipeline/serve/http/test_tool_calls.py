"""Tools of chats: over HTTP with the official client, and the division of a text into content and calls."""

import json

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_doubles import MODEL, ScriptedEngine

from pipeline.serve.http.tool_calls import BARE, CallReader, ToolCall, ToolUse
from stages.vocabulary.chat import HERMES, LLAMA, MISTRAL, XML, CallStyle

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds two numbers",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
NOW = {"type": "function", "function": {"name": "now", "strict": True}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
OTHER = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
NO_CALLS = [
    "plain text",
    "<tool_call>{broken</tool_call> after",
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 1}',
    '<tool_call>{"name": "add", "arguments": {"a": 1}} then',
    '<tool_call>{"name": "add", "name": "add", "arguments": {}}</tool_call>',
    "ends in a marker <tool_ca",
    "<tool_call>" + "[" * 3500 + "</tool_call>",
]
IN_XML = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
STYLES = [
    (HERMES, [CALL, OTHER]),
    (XML, [IN_XML, "<function=now>\n</function>"]),
    (MISTRAL, ['[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}, "id": "1"}]']),
    (MISTRAL, ['[TOOL_CALLS]add[ARGS]{"a": 1}', "[TOOL_CALLS]now[CALL_ID]x1[ARGS] {}"]),
    (LLAMA, ['<|python_tag|>{"name": "add", "parameters": {"a": 1}};', '{"name": "now", "parameters": {}}']),
]
ADD_NOW = [("add", '{"a": 1}'), ("now", "{}")]


def talk(text: str) -> list[dict[str, str]]:
    """A conversation that the scripted engine completes with "user:" and the text."""
    return [{"role": "user", "content": text}]


def read_parts(parts: list[str], style: CallStyle = HERMES) -> tuple[str, list[tuple[str, str]]]:
    reader, content, calls = CallReader(ToolUse((ADD, NOW), style, names=frozenset({"add", "now"}))), "", []
    for number, part in enumerate(parts, start=1):
        more, found = reader.push(part, last=number == len(parts))
        content += more
        calls += [(call.name, call.arguments) for call in found]
    assert reader.count == len(calls)
    return content, calls


def test_calls_are_parsed_back(client: openai.OpenAI, engine: ScriptedEngine):
    answer = client.chat.completions.create(
        model=MODEL, messages=talk(f"I add.\n{CALL}\n{OTHER}"), tools=[ADD, NOW], parallel_tool_calls=True
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "user:I add."
    assert [
        (call.type, call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls
    ] == [
        ("function", "add", {"a": 1}),
        ("function", "now", {}),
    ]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert engine.tools[0] == ADD
    assert engine.tools[1]["function"] == {"name": "now", "parameters": {"type": "object", "properties": {}}}
    assert engine.requests[-1].markers == ("<tool_call>", "</tool_call>")


@pytest.mark.parametrize("text", [f"I add.\n{CALL}\n{OTHER}\n", f"{CALL} then <b>", *NO_CALLS])
def test_a_stream_has_the_calls_of_the_whole_response(client: openai.OpenAI, text: str):
    settings = {"model": MODEL, "messages": talk(text), "tools": [ADD, NOW]}
    whole = client.chat.completions.create(**settings).choices[0]
    content, calls, ends = "", {}, []
    for event in client.chat.completions.create(**settings, stream=True):
        (choice,) = event.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            known = calls.setdefault(call.index, {"id": call.id, "name": call.function.name, "arguments": ""})
            known["arguments"] += call.function.arguments
        ends += [choice.finish_reason] if choice.finish_reason else []
    assert content == (whole.message.content or "")
    assert ends == [whole.finish_reason]
    expected = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()]
    assert [(call["name"], call["arguments"]) for call in calls.values()] == expected
    assert list(calls) == list(range(len(expected)))


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_no_call_is_content(client: openai.OpenAI, text: str):
    choice = client.chat.completions.create(model=MODEL, messages=talk(text), tools=[ADD, NOW]).choices[0]
    assert (choice.message.content, choice.message.tool_calls) == (f"user:{text}", None)
    assert choice.finish_reason == "stop"


def test_results_are_sent_back(client: openai.OpenAI):
    first = client.chat.completions.create(model=MODEL, messages=talk(CALL), tools=[ADD]).choices[0].message
    call = first.tool_calls[0]
    messages = [*talk("?"), first.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "2"}]
    again = client.chat.completions.create(model=MODEL, messages=messages, tools=[ADD])
    assert again.choices[0].message.content == "user:?|assistant:user:|tool:2"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "now"}}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [ADD], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"tools": [{"type": "function", "function": {"name": "refused"}}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "invalid"}}], "tool_choice": "required"}, "tools"),
        ({"messages": [{"role": "tool", "content": "2"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": "2", "tool_call_id": "a"}]}, "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ],
)
def test_wrong_tools_are_refused(client: openai.OpenAI, wrong: dict[str, object], param: str):
    body = {"model": MODEL, "messages": talk("x"), **wrong}
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body=body, cast_to=object)
    assert caught.value.param == param


@pytest.mark.parametrize(("style", "texts"), STYLES, ids=("hermes", "xml", "mistral", "mistral-named", "llama"))
def test_calls_of_a_style_at_any_split(style: CallStyle, texts: list[str]):
    calls = "\n".join(texts)
    begin = style.begin
    broken = [begin, begin * 2, f"`{begin}` in code", f'{begin}{{"name": "add", "arguments": {{"a": "']
    cases = [(calls, "")] + [(f"See {text}, then {calls}", f"See {text}, then") for text in broken[:3]]
    cases += [(f"See {calls.removesuffix(style.end)}", "See"), (f"{broken[3]}{calls}", broken[3])]
    for text, content in cases:
        if style is LLAMA and not text.startswith(("<", "{")):
            text = text.replace("\n{", f"\n{begin}{{")
        assert read_parts([text], style) == (content, ADD_NOW), text
        for place in range(len(text) + 1):
            assert read_parts([text[:place], text[place:]], style) == (content, ADD_NOW), (text, place)
        assert read_parts(list(text), style) == (content, ADD_NOW), text


def test_bare_calls():
    assert read_parts([' {"name": "add", "parameters": {"a": 1}} ; {"name": "now", "parameters": {}} ;'], LLAMA) == (
        "",
        ADD_NOW,
    )
    assert read_parts(['{"name": "add", "arguments": {"a": 1}}\n'], BARE) == ("", ADD_NOW[:1])
    assert read_parts(list('{"name": "add", "arguments": {"a": 1}}{"name": "now", "arguments": {}}\n')) == ("", ADD_NOW)
    for text in ('{"sum": 1}', 'So {"name": "now", "parameters": {}}', '  {"name": "now"', "[]", "[1]", " ;", '"now"'):
        assert read_parts(list(text), LLAMA) == read_parts([text], HERMES) == (text, [])


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "1", "1"),
        ({}, "1", "1"),
        ({"type": "integer"}, "1", 1),
        ({"type": "integer"}, "one", "one"),
        ({"type": "boolean"}, "True", True),
        ({"type": ["number", "null"]}, "None", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "2", "2"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"type": "object"}, '{"b": [1]}', {"b": [1]}),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "string"}, "  two\nlines\n", "  two\nlines\n"),
        ({"type": "string"}, "a </parameter> in <parameter=x> code", "a </parameter> in <parameter=x> code"),
        (None, "", ""),
    ],
)
def test_a_parameter_in_xml_has_the_type_of_its_schema(schema: object, text: str, value: object):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
    text = f"<function=f>\n<parameter=a>\n{text}\n</parameter>\n<parameter=b>2</parameter></function>"
    reader = CallReader(ToolUse((tool,), XML, names=frozenset({"f"})))
    [call] = [call for character in text for call in reader.push(character)[1]] + reader.push("", last=True)[1]
    assert json.loads(call.arguments) == {"a": value, "b": "2"}


@pytest.mark.parametrize(
    ("style", "text"),
    [
        (XML, "<function=add>\n<parameter=a>\n1\n</parameter>"),
        (XML, "<function=other>\n</function>"),
        (XML, "<function=now>then</function>"),
        (XML, "<function> of x"),
        (XML, "<function=now>\n<parameter=a>1</parameter><parameter=a>1</parameter></function>"),
        (MISTRAL, '[TOOL_CALLS]other[ARGS]{"a": 1}'),
        (MISTRAL, "[TOOL_CALLS]now[ARGS][]"),
        (MISTRAL, '[TOOL_CALLS]now[ARGS]{"a": NaN}'),
        (MISTRAL, '[TOOL_CALLS]now[ARGS]{"a": 1, "a": 2}'),
        (MISTRAL, "[TOOL_CALLS]now and then"),
        (MISTRAL, "[TOOL_CALLS]now[ARGS]{"),
        (MISTRAL, "[TOOL_CALLS]no"),
    ],
)
def test_what_is_no_call_in_other_forms_is_content(style: CallStyle, text: str):
    assert read_parts([text], style) == read_parts(list(text), style) == (text, [])


@pytest.mark.parametrize(
    "text", ["<tool_call> is a marker", 'a <tool_call>{"sum": 1', '<tool_call>{"name": "n", ', "<tool_call>{]"]
)
def test_what_cannot_become_a_call_is_not_held_back(text: str):
    reader = CallReader(ToolUse(style=HERMES, names=frozenset({"add", "now"})))
    content = "".join(reader.push(character)[0] for character in text)
    assert content == text.rstrip()


MARKS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<tool",
    "_call>",
    "[",
    "]",
    "now[ARGS]",
    "add",
    "<function=now>",
    "<parameter=a>",
    "</parameter>",
    "</function>",
    ";",
    ",",
    "{",
    "}",
]
pieces = st.sampled_from(
    [
        *MARKS,
        " ",
        "\n",
        "a",
        '"',
        '{"name": "now", ',
        '"arguments": {}}',
        *(one for _, texts in STYLES for one in texts),
    ]
)


@given(st.lists(pieces, max_size=12).map("".join), st.sampled_from([HERMES, XML, MISTRAL, LLAMA, BARE]), st.data())
def test_any_division_of_a_text_gives_the_same(text: str, style: CallStyle, data: st.DataObject):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read_parts(parts, style) == read_parts([text], style) == read_parts([*text, ""], style)


def in_order(parts: list[str]) -> list[str]:
    """What a completion that comes in parts consists of: adjacent contents joined, and the names of calls."""
    reader, found = CallReader(ToolUse((ADD, NOW), HERMES, names=frozenset({"add", "now"}))), list[str]()
    for number, part in enumerate(parts, start=1):
        for one in reader.divide(part, last=number == len(parts)):
            if isinstance(one, ToolCall):
                found += [one.name, ""]
            else:
                found = [*found[:-1], (found or [""])[-1] + one]
    return found


def test_contents_and_calls_keep_their_order_however_the_text_is_divided():
    text = f"I add.\n{CALL}\nThen I look.\n{OTHER}\nDone."
    assert in_order([text]) == ["I add.", "add", "\nThen I look.", "now", "\nDone."]
    assert in_order(list(text)) == in_order([text])
    for cut in range(1, len(text)):
        assert in_order([text[:cut], text[cut:]]) == in_order([text])
