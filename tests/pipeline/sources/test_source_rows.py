"""The rule that makes prompts of rows: fields, templates, conditions, names."""

import json

import pytest
from source_reading import PLAIN, list_rejections, list_texts, read, write_file

from pipeline.config.sections import SourceSettings
from pipeline.sources.stream import open_source
from store.errors import ConfigError
from store.events import PromptReceived


@pytest.mark.parametrize("field", ["question", "text", "instruction", "content"])
def test_usual_prompt_fields_are_found(tmp_path, field: str):
    path = write_file(tmp_path / "x.jsonl", json.dumps({"answer": "4", field: "2 + 2"}).encode())
    assert list_texts(read(path)) == ["2 + 2"]


def test_a_template_may_use_any_column_and_doubled_braces(tmp_path):
    path = write_file(tmp_path / "x.jsonl", b'{"title": "T", "n": 2, "ok": true}')
    assert list_texts(read(path, template="{{{title}}} {n} {ok}")) == ["{T} 2 true"]


@pytest.mark.parametrize("row", [b'{"prompt": "p"}', b'{"prompt": "p", "hint": null}', b'{"prompt": "p", "hint": []}'])
def test_a_row_that_cannot_fill_the_template_is_rejected(tmp_path, row: bytes):
    path = write_file(tmp_path / "x.jsonl", b'{"prompt": "p", "hint": "h"}\n' + row)
    events = read(path, template="{prompt} {hint}")
    assert list_texts(events) == ["p h"]
    assert [line for line, _ in list_rejections(events)] == [2]


@pytest.mark.parametrize(
    "template", ["{prompt.__class__}", "{prompt[0]}", "{prompt!r}", "{prompt:>9}", "{}", "{", "}", "{prompt:{id}}"]
)
def test_a_template_that_does_more_than_name_columns_is_refused(template: str):
    with pytest.raises(ConfigError, match=r"must be a format text|may only hold plain"):
        open_source("builtin:docs", SourceSettings(template=template))


@pytest.mark.parametrize(
    ("where", "accepted"),
    [
        (("kind=a",), ["1", "3"]),
        (("kind!=a",), ["2", "4"]),
        (("kind=a", "number!=1"), ["3"]),
        (("number=2",), ["2"]),
        (("even=true",), ["2", "4"]),
        (("kind=",), ["4"]),
        (("kind=x=y",), []),
    ],
)
def test_conditions_compare_text_and_must_all_hold(tmp_path, where: tuple[str, ...], accepted: list[str]):
    kinds = ["a", "b", "a", None]
    table = [
        {"prompt": str(number), "number": number, "kind": kind, "even": number % 2 == 0}
        for number, kind in enumerate(kinds, start=1)
    ]
    path = write_file(tmp_path / "x.jsonl", "\n".join(map(json.dumps, table)).encode())
    assert list_texts(read(path, where=where)) == accepted


@pytest.mark.parametrize("where", ["split", "=test", "!=test", ""])
def test_a_condition_that_is_none_is_refused(where: str):
    with pytest.raises(ConfigError, match="must be 'column=value'"):
        open_source("builtin:docs", SourceSettings(where=(where,)))


TARGET_ROWS = b"""{"prompt": "a", "target": "small"}
{"prompt": "b"}
{"prompt": "c", "target": null}
{"prompt": "d", "target": "tiny"}
{"prompt": "e", "target": "big"}
{"prompt": "f", "target": ""}
{"prompt": "g", "target": 7}
"""


def test_a_row_may_name_its_target_and_other_rows_are_routed(tmp_path):
    path = write_file(tmp_path / "x.jsonl", TARGET_ROWS)
    events = open_source(str(path), PLAIN, targets=("big", "small")).read(0)
    found = [event.target for event in events if isinstance(event, PromptReceived)]
    assert found == ["small", None, None, "big", None]


def test_a_row_with_an_unknown_target_is_rejected_with_the_known_ones_and_takes_no_offset(tmp_path):
    path = write_file(tmp_path / "x.jsonl", TARGET_ROWS)
    events = list(open_source(str(path), PLAIN, targets=("big", "small")).read(0))
    reason = "the column 'target' must name one of the targets big, small, got "
    assert list_rejections(events) == [(4, reason + "'tiny'"), (7, reason + "'7'")]
    assert [event.offset for event in events if isinstance(event, PromptReceived)] == [0, 1, 2, 3, 4]
