"""Files and standard input: all good rows are read, and a bad row is rejected alone."""

import json

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from source_reading import GOOD, list_rejections, list_texts, read, write_file

from pipeline.sources.files import MAX_LINE_BYTES
from store.errors import SourceError
from store.events import PromptReceived, PromptRejected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "x"}', "the row must have the column 'prompt', got 'text'"),
        (b'{"prompt": "x"', "the line must be JSON: Expecting ',' delimiter"),
        (b"nonsense", "the line must be JSON: Expecting value"),
        (b'["prompt"]', "the line must be a JSON object, got a JSON array"),
        (b"null", "the line must be a JSON object, got a JSON null"),
        (b'{"prompt": ""}', "the prompt in 'prompt' must not be empty"),
        (b'{"prompt": " \\n\\t"}', "the prompt in 'prompt' must not be empty"),
        (b'{"prompt": 3}', "the prompt in 'prompt' must be text or messages, got 3"),
        (b'{"prompt": null}', "the prompt in 'prompt' must be text or messages, got None"),
        (b'{"prompt": "caf\xe9"}', "the line must be valid UTF-8: invalid continuation byte at byte 15"),
        (b'{"prompt": "a\\u0000b"}', "the prompt must not contain NUL characters"),
        (b'{"prompt": "\\ud800"}', "the prompt must be valid Unicode, got half of a surrogate pair"),
        (b"[" * 200_000, "the line must be JSON"),
        (b'{"prompt": "x", "n": ' + b"1" * 5000 + b"}", "the line must be JSON"),
        (b"x" * (3 * MAX_LINE_BYTES), "the line must not be longer than 10,000,000 bytes"),
        (b'{"prompt": "' + b"x" * MAX_LINE_BYTES + b'"}', "the line must not be longer than 10,000,000 bytes"),
    ],
)
@pytest.mark.parametrize("kind", ["file", "stdin"])
def test_a_bad_json_line_is_rejected_and_the_stream_continues(tmp_path, kind: str, line: bytes, reason: str):
    content = GOOD + b"\n" + line + b"\n" + GOOD
    spec = write_file(tmp_path / "x.jsonl", content) if kind == "file" else "-"
    events = read(spec, content, prompt_field="prompt")
    assert [type(event) for event in events] == [PromptReceived, PromptRejected, PromptReceived]
    assert events[1].line == 3
    assert events[1].reason.startswith(reason)


def test_byte_order_mark_line_ends_and_a_missing_last_newline_do_not_matter():
    content = b"\xef\xbb\xbf" + b'{"prompt": "one"}\r\n\r\n  \n{"prompt": "two"}'
    events = read("-", content)
    assert list_texts(events) == ["one", "two"]
    assert [event.prompt_id for event in events] == ["stdin:1", "stdin:4"]


@given(st.binary(max_size=300))
def test_whatever_the_bytes_every_line_is_a_prompt_or_a_rejection(content: bytes):
    events = read("-", content)
    assert [event.line for event in events if isinstance(event, PromptRejected)] == [
        number for number, line in enumerate(content.split(b"\n"), start=1) if line.strip()
    ]


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


rows = st.dictionaries(st.sampled_from(["prompt", "text", "id"]), json_values)


lines = st.one_of((rows | json_values).map(lambda value: json.dumps(value).encode()), st.binary(), st.just(GOOD[:-1]))


@given(st.lists(lines, max_size=8))
def test_lines_that_are_nearly_right_are_all_accounted_for(content: list[bytes]):
    whole = b"\n".join(content)
    events = read("-", whole)
    assert len(events) == sum(1 for line in whole.split(b"\n") if line.strip())
    assert len(list_texts(events)) >= content.count(GOOD[:-1])
    for text in list_texts(events):
        assert text.encode("utf-8").strip()


@given(content=st.binary(max_size=200), quoted=st.lists(st.text(max_size=5), max_size=4))
def test_whatever_the_bytes_a_csv_file_is_read_to_its_end(tmp_path_factory, content: bytes, quoted: list[str]):
    row = ",".join(f'"{field}"' for field in quoted).encode("utf-8", "replace")
    path = write_file(tmp_path_factory.getbasetemp() / "any.csv", b"prompt,id\n" + content + b"\n" + row + b"\n")
    found = [line for line, _ in list_rejections(read(path))]
    assert found == sorted(set(found))
    assert all(2 <= line <= 3 + content.count(b"\n") + row.count(b"\n") for line in found)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"1,x,extra", "the row must have 2 fields, as the header, got 3"),
        (b"1", "the row must have 2 fields, as the header, got 1"),
        (b"1,", "the prompt in 'prompt' must not be empty"),
        (b"1,caf\xe9", "the row must be valid UTF-8"),
        (b"1,a\0b", "the prompt must not contain NUL characters"),
        (b'1,"x"y', "the row must be well-formed CSV"),
        (b"1," + b"x" * MAX_LINE_BYTES, "the line must not be longer than 10,000,000 bytes"),
        (b'1,"two\n' + b"x" * (MAX_LINE_BYTES + 1) + b'\n"', "the line must not be longer than 10,000,000 bytes"),
    ],
)
def test_a_bad_csv_row_is_rejected_and_the_stream_continues(tmp_path, line: bytes, reason: str):
    path = write_file(tmp_path / "x.csv", b'id,prompt\n0,"multi\nline, quoted"\n\n' + line + b"\n2,last\n")
    events = read(path)
    assert list_texts(events) == ["multi\nline, quoted", "last"]
    [(number, got)] = list_rejections(events)
    assert (number, got[: len(reason)]) == (5, reason)


def test_a_quote_that_is_never_closed_is_rejected_at_the_line_where_it_opens(tmp_path):
    events = read(write_file(tmp_path / "x.csv", b'prompt\ngood\n"open\nend'))
    assert list_texts(events) == ["good"]
    assert [line for line, _ in list_rejections(events)] == [3]


def test_a_parquet_row_with_invalid_utf8_is_rejected_alone(tmp_path):
    bad = pyarrow.array([b"one", b"\xff", b"three"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"prompt": bad}), tmp_path / "x.parquet")
    events = read(tmp_path / "x.parquet")
    assert list_texts(events) == ["one", "three"]
    [(line, reason)] = list_rejections(events)
    assert line == 2
    assert reason.startswith("the row must be valid UTF-8")


def test_a_parquet_file_damaged_inside_is_reported_with_the_last_row(tmp_path):
    path = tmp_path / "x.parquet"
    words = [f"{number} " * 50 for number in range(2000)]
    parquet.write_table(pyarrow.table({"prompt": words}), path, row_group_size=1000, use_dictionary=False)
    content = bytearray(path.read_bytes())
    second = parquet.read_metadata(path).row_group(1).column(0).data_page_offset
    content[second : second + 200] = b"\xff" * 200
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"is damaged after row (768|1000): .*\. Get the file again"):
        read(path)
