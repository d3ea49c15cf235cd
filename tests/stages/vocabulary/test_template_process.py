"""Chat templates are rendered in a process of their own, which ends with a template that takes too much."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.vocabulary.template_process import INHERITED, TemplateError, TemplateProcess

PLAIN = "{% for one in messages %}[{{ one.role }}]{{ one.content }}{% endfor %}{{ eos_token }}"
MESSAGES = [{"role": "user", "content": "a \ud800 b ä"}, {"role": "assistant", "content": ""}]
VALUES = {"messages": MESSAGES, "tools": None, "eos_token": "</s>"}
RENDERED = "[user]a \ud800 b ä[assistant]</s>"
HANG_SECONDS = 60.0  # seconds that no template of these tests reaches

BOMBS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a value": "{{ 'a' * 8000000000 }}",
    "a value that grows": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "a list": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "a number": "{{ 7 ** (10 ** 9) }}",
    "padding": "{{ '%8000000000d' % 1 }}",
    "centre": "{{ 'a'.center(8000000000) }}",
    "replacement": "{{ ('a' * 100000).replace('a', 'a' * 100000) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "joins": "{{ (range(99999) | list * 9999) | join(',') }}",
}


@pytest.fixture(scope="module")
def templates() -> Iterator[TemplateProcess]:
    found = TemplateProcess()
    yield found
    found.calls.close()


def test_a_template_is_rendered_as_transformers_does(templates: TemplateProcess):
    assert templates.render(PLAIN, VALUES, HANG_SECONDS) == RENDERED
    assert templates.render("{{ strftime_now('%Y') }}", VALUES, HANG_SECONDS) == time.strftime("%Y")
    assert templates.render("{{ [{'a': 1}] | tojson }}", VALUES, HANG_SECONDS) == '[{"a": 1}]'


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_and_the_next_template_is_rendered(templates: TemplateProcess, name: str):
    assert templates.render(PLAIN, VALUES, HANG_SECONDS) == RENDERED
    began = time.monotonic()
    with pytest.raises(TemplateError, match=r"memory|more than 1 s|recursion|range"):
        templates.render(BOMBS[name], VALUES, 1.0)
    assert time.monotonic() - began < HANG_SECONDS, "the limit of a second holds, on a busy machine too"
    assert templates.render(PLAIN, VALUES, HANG_SECONDS) == RENDERED


def test_an_error_is_one_line(templates: TemplateProcess):
    with pytest.raises(TemplateError, match=r"^no system message$"):
        templates.render("{{ raise_exception('no system message\\nplease') }}", VALUES, HANG_SECONDS)
    with pytest.raises(TemplateError, match="unknown tag"):
        templates.render("{% nothing %}", VALUES, HANG_SECONDS)


def test_it_has_few_variables_of_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMNIDRAFT_API_KEY", "secret")
    templates = TemplateProcess()
    templates.render(PLAIN, VALUES, HANG_SECONDS)
    assert templates.calls.pid
    names = {
        variable.partition(b"=")[0].decode()
        for variable in Path(f"/proc/{templates.calls.pid}/environ").read_bytes().split(b"\0")
        if variable
    }
    assert names <= {*INHERITED, "PYTHONPATH"}
    templates.calls.close()
