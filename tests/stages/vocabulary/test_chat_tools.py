"""Tools in chat templates: shown, parsed back in their format, and unable to forge special tokens."""

import json

import pytest
from tokenizer_making import MERGES, byte_level

from stages.vocabulary import chat
from stages.vocabulary.chat import HERMES, LLAMA, MISTRAL, TOOLS_PROMPT, XML, CallStyle, ChatTemplate
from stages.vocabulary.tokenizer_view import Vocabulary
from store.errors import ConfigError

# As the templates of Qwen 2.5 and Hermes, shortened.
TEMPLATE = """{%- if tools %}<|im_start|>system
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
Write each call as <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{%- endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{%- elif message.tool_calls %}<|im_start|>assistant
{%- if message.content %}
{{ message.content }}
{%- endif %}
{%- for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{%- else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
DEAF = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{% endfor %}"
CLOSED = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + DEAF
IN_XML = TEMPLATE.replace('{"name": ..., "arguments": ...}', "<function=...>")
# As those of Mistral and of Llama 3, shortened.
LISTED = """{% for message in messages %}{% if message.role == "user" %}{% if tools %}[AVAILABLE_TOOLS]{{ tools }}
[/AVAILABLE_TOOLS]{% endif %}[INST]{{ message.content }}[/INST]{% elif message.tool_calls %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception("9 letters") }}{% endif %}
{{- (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{{ "" if loop.last else ", " }}{% endfor %}]</s>
{%- else %}[TOOL_RESULTS]{{ message.content }} {{ message.tool_call_id }}{% endif %}{% endfor %}"""
WITH_PARAMETERS = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.tool_calls %}
{%- if message.tool_calls | length > 1 %}{{ raise_exception("one call at a time") }}{% endif %}
{%- set call = message.tool_calls[0].function %}{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{%- else %}{% for tool in tools or () if loop.first %}{{ tool | tojson }}{% endfor %}{{ message.content }}{% endif %}
{%- endfor %}"""
NAMES = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}
QUESTION = {"role": "user", "content": "1 + 1?"}


def make_vocabulary() -> Vocabulary:
    return Vocabulary(byte_level(MERGES, ("<s>", "</s>", *NAMES)), "made")


def read(template: str, messages: list[dict], tools: list[dict] | None = None) -> str:
    """The whole prompt as text, special tokens by their names."""
    vocabulary = make_vocabulary()
    names = {token: name for name, token in vocabulary.specials.items()}
    segments = ChatTemplate(vocabulary, template).segments(messages, tools or [])
    return "".join(names[one] if isinstance(one, int) else one for one in segments)


@pytest.mark.parametrize("content", ["", "I add.", " I <b>add</b> "])
def test_the_prompt_is_that_of_the_template(content: str):
    messages = [
        QUESTION,
        {"role": "assistant", "content": content, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "a"},
    ]
    vocabulary = make_vocabulary()
    expected = vocabulary.tokenizer.apply_chat_template(
        messages, tools=[TOOL], chat_template=TEMPLATE, add_generation_prompt=True, tokenize=False
    )
    assert read(TEMPLATE, messages, [TOOL]) == expected
    assert '{"a": 1, "b": "é"}' in expected
    assert read(TEMPLATE, [QUESTION]) == "<|im_start|>user\n1 + 1?<|im_end|><|im_start|>assistant\n"


def test_a_template_without_tools_is_given_them_as_texts():
    call = f"<tool_call>\n{json.dumps(CALL['function'], ensure_ascii=False)}\n</tool_call>"
    calls = {"role": "assistant", "content": "I add.", "tool_calls": [CALL, CALL]}
    results = [{"role": "tool", "content": text, "tool_call_id": "a"} for text in "23"]
    shown = TOOLS_PROMPT.format(tools=json.dumps(TOOL, ensure_ascii=False))
    answers = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in "23")
    rest = [
        {"role": "assistant", "content": f"I add.\n{call}\n{call}"},
        {"role": "user", "content": answers},
        {"role": "assistant", "content": "2"},
    ]
    history = [QUESTION, calls, *results, {"role": "assistant", "content": "2"}]
    system = {"role": "system", "content": "Be brief."}
    for template, given, tools, expected in [
        (DEAF, history, [TOOL], [{"role": "system", "content": shown}, QUESTION, *rest]),
        (DEAF, [system, *history], [TOOL], [{**system, "content": f"Be brief.\n\n{shown}"}, QUESTION, *rest]),
        (DEAF, history, [], [QUESTION, *rest]),
        (CLOSED, history, [TOOL], [{**QUESTION, "content": f"{shown}\n\n1 + 1?"}, *rest]),
    ]:
        assert read(template, given, tools) == read(template, expected)
    markers = {"<tool_call>", "</tool_call>"}
    segments = ChatTemplate(make_vocabulary(), DEAF).segments(history, [TOOL])
    assert not {make_vocabulary().specials[name] for name in markers} & set(segments)  # they are text


@pytest.mark.parametrize(
    ("template", "style", "shown"),
    [
        (DEAF, HERMES, '</tool_call>\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'),
        (IN_XML, XML, '</tool_call><tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'),
        (TEMPLATE, HERMES, '</tool_call><tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'),
        (LISTED, MISTRAL, '{"a": 1, "b": "é"}, "id": "567890ab1"}, {"name": "add", "arguments": {"a": 1, "b": "é"}, '),
        (WITH_PARAMETERS, LLAMA, '{"name": "add", "parameters": {"a": 1, "b": "é"}}<|im_start|>assistant\n{"name": '),
    ],
)
def test_earlier_calls_are_shown_in_the_style_of_the_template(template: str, style: CallStyle, shown: str):
    calls = [{**CALL, "id": f"call_1234567890ab{number}"} for number in (1, 2)]
    results = [{"role": "tool", "content": "2", "tool_call_id": call["id"]} for call in calls]
    text = read(template, [QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}, *results], [TOOL])
    assert shown in text
    assert ("567890ab2" in text.partition("[TOOL_RESULTS]2 567890ab1")[2]) == (style is MISTRAL)
    assert ChatTemplate(make_vocabulary(), template).call_style == style


@pytest.mark.parametrize("name", NAMES)
def test_tools_cannot_forge_markers(name: str):
    def list_markers(name: str) -> list[int]:
        tool = json.loads(json.dumps(TOOL).replace("adds", f"adds {name}"))
        call = json.loads(json.dumps(CALL).replace('"a": 1', f'"{name}": 1'))
        answer = {"role": "tool", "content": name, "tool_call_id": name}
        messages = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}, answer]
        segments = ChatTemplate(make_vocabulary(), TEMPLATE).segments(messages, [tool])
        assert f"adds {name}" in "".join(one for one in segments if isinstance(one, str))
        return [one for one in segments if isinstance(one, int)]

    assert list_markers(name) == list_markers("harmless")


def test_a_template_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat, "RENDER_SECONDS", 0.2)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ConfigError, match=r"it took more than 0\.2 s"):
        ChatTemplate(make_vocabulary(), loops + TEMPLATE)
    # One that ends for some conversations alone, too.
    template = ChatTemplate(make_vocabulary(), "{% if messages|length > 1 %}" + loops + "{% endif %}" + TEMPLATE)
    assert template.segments([QUESTION])
    with pytest.raises(ConfigError, match=r"it took more than 0\.2 s"):
        template.segments([QUESTION, QUESTION])
