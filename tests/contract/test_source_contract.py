"""The contract of `Source`, for every kind of source that `open_source` knows."""

import ast
import gzip
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pyarrow
import pytest
from pyarrow import ipc, parquet

import pipeline
from pipeline.config.sections import SourceSettings
from pipeline.sources.position import SourcePosition
from pipeline.sources.stream import Source, open_source, stream
from store.errors import SourceError
from store.events import PromptReceived, PromptRejected

# Two rows of seven are bad: the third is blank, the sixth holds a NUL.
TEXTS = ["one", "two", " ", "three", "four", "fi\0ve", "six"]
TABLE = [{"task_id": f"task/{number}", "prompt": text, "split": "test"} for number, text in enumerate(TEXTS)]
JSON_LINES = "".join(json.dumps(row) + "\n" for row in TABLE).encode()

Make = Callable[[SourceSettings], Source]


def csv_text(delimiter: str) -> str:
    return "".join(delimiter.join(row) + "\n" for row in [TABLE[0].keys(), *(row.values() for row in TABLE)])


class FakeHub:
    """A stub of the result of `datasets.load_dataset(..., streaming=True)`, with the members that are used."""

    column_names = ("task_id", "prompt", "split")

    def __iter__(self):
        return iter(TABLE)


def spec_of(kind: str, folder: Path, request: pytest.FixtureRequest) -> str:
    """Create the input of a kind. Returns its source specification."""
    path = folder / f"sample.{kind}"
    lines = JSON_LINES.splitlines(keepends=True)
    match kind:
        case "parquet":
            parquet.write_table(pyarrow.Table.from_pylist(TABLE), path)
        case "jsonl" | "ndjson" | "jsonl.gz" | "json":
            content = json.dumps(TABLE).encode() if kind == "json" else JSON_LINES
            path.write_bytes(gzip.compress(content) if kind == "jsonl.gz" else content)
        case "arrow":
            table = pyarrow.Table.from_pylist(TABLE)
            with ipc.new_stream(str(path), table.schema) as written:
                written.write_table(table, max_chunksize=3)
        case "folder" | "ray jsonl":
            for name, some in (("1", lines[:3]), ("2", lines[3:])):
                (folder / f"{name}.jsonl").write_bytes(b"".join(some))
            if kind == "folder":
                return str(folder)
            request.getfixturevalue("ray_cluster")
            return f"ray:{folder}/*.jsonl"
        case "csv" | "tsv":
            path.write_text(csv_text("," if kind == "csv" else "\t"), encoding="utf-8")
        case "ray parquet":
            request.getfixturevalue("ray_cluster")
            for name, rows in (("1", TABLE[:3]), ("2", TABLE[3:])):
                parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")
            return f"ray:{folder}"
        case "kafka":
            return request.getfixturevalue("kafka_broker").send(folder.name, lines)
        case _:
            return kind
    return str(path)


FILES = ["parquet", "arrow", "jsonl", "jsonl.gz", "ndjson", "json", "csv", "tsv", "folder"]
COLUMNS_UNKNOWN = ["-", "kafka"]
TABLE_KINDS = [*FILES, *COLUMNS_UNKNOWN, "hf://owner/sample:test", "ray parquet", "ray jsonl"]
KINDS = [*TABLE_KINDS, "builtin:docs", "builtin:code", "builtin:questions", "builtin:rust"]


def open_with_input(spec: str, options: SourceSettings, given: bytes) -> Source:
    """Open a source of a process with this standard input."""
    with patch.object(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(given))):
        return open_source(spec, options)


@pytest.fixture
def make(request, tmp_path, monkeypatch) -> Make:
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *_, **__: FakeHub()))
    spec = spec_of(request.param, tmp_path, request)
    return lambda options: open_with_input(spec, options, JSON_LINES)


every_kind = pytest.mark.parametrize("make", KINDS, indirect=True)
every_table = pytest.mark.parametrize("make", TABLE_KINDS, indirect=True)
LIMITED = SourceSettings(limit=4)


@every_kind
def test_a_limited_source_ends_with_its_last_prompt_and_prompts_are_numbered_without_gaps(make: Make):
    source = make(LIMITED)
    assert source.size() in (None, 4)
    events = list(source.read(7))
    assert {event.dataset for event in events} == {source.dataset}
    prompts = [event for event in events if isinstance(event, PromptReceived)]
    assert [event.offset for event in prompts] == [7, 8, 9, 10]
    assert all(event.text.strip() for event in prompts)
    assert events[-1] is prompts[-1]


@pytest.mark.representatives(*(f"{start}-{kind}" for kind in KINDS for start in ((3,) if "ray" in kind else (0, 3, 5))))
@every_kind
@pytest.mark.parametrize("start", range(6))
def test_a_resumed_stream_is_the_rest_of_the_whole_one(make: Make, start: int):
    """Another source of the same input gives the same events."""
    whole = list(stream([make(LIMITED)]))
    first, again = (SourcePosition(stream([make(LIMITED)])) for _ in range(2))
    for _ in whole[:start]:
        next(first)
    again.skip(first.state)
    assert list(again) == whole[start:]


@every_kind
def test_a_template_applies(make: Make):
    event = next(make(SourceSettings(template="Q: {prompt}\nA:")).read(0))
    plain = next(make(SourceSettings()).read(0))
    assert event.text == f"Q: {plain.text}\nA:"


@every_table
def test_each_bad_row_is_rejected_with_its_line_and_the_other_rows_are_read(make: Make):
    events = list(make(SourceSettings()).read(0))
    rejected = [event for event in events if isinstance(event, PromptRejected)]
    first = events[0].line
    assert first in (1, 2)  # 2 where line 1 is a header
    assert [event.line for event in events] == list(range(first, first + 7))
    assert [event.line - first for event in rejected] == [2, 5]
    assert "empty" in rejected[0].reason
    assert "NUL" in rejected[1].reason
    accepted = [event for event in events if isinstance(event, PromptReceived)]
    assert [event.text for event in accepted] == ["one", "two", "three", "four", "six"]
    assert [event.prompt_id for event in accepted] == ["task/0", "task/1", "task/3", "task/4", "task/6"]


@every_table
def test_rows_that_a_condition_excludes_are_skipped_silently(make: Make):
    events = list(make(SourceSettings(where=("split=test", "task_id!=task/0", "task_id!=task/2"))).read(0))
    assert [type(event).__name__ for event in events] == ["PromptReceived"] * 3 + ["PromptRejected", "PromptReceived"]
    assert not list(make(SourceSettings(where=("split=train",))).read(0))


@pytest.mark.parametrize("make", [kind for kind in KINDS if kind not in COLUMNS_UNKNOWN], indirect=True)
@pytest.mark.parametrize(
    "options",
    [
        SourceSettings(where=("splitt=test",)),
        SourceSettings(prompt_field="promt"),
        SourceSettings(template="{promt}"),
    ],
)
def test_an_unknown_column_fails_before_the_stream_and_the_error_names_the_columns(make: Make, options: SourceSettings):
    with pytest.raises(SourceError, match=r"must have the column '(splitt|promt)', got .*'prompt'"):
        make(options)


@pytest.mark.parametrize("make", COLUMNS_UNKNOWN, indirect=True)
def test_rows_without_the_column_are_rejected_where_only_rows_name_columns(make: Make):
    events = list(make(SourceSettings(where=("splitt=test",))).read(0))
    assert [event.line for event in events if isinstance(event, PromptRejected)] == [1, 2, 3, 4, 5, 6, 7]


def implementations(protocol: str) -> set[str]:
    """Classes anywhere in `pipeline` that implement a protocol."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in Path(pipeline.__path__[0]).rglob("*.py"))
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {node.name for node in classes if protocol in map(ast.unparse, node.bases)}


def test_no_implementation_is_missing_from_this_suite(tmp_path, monkeypatch, request):
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *_, **__: FakeHub()))
    sources = []
    for number, kind in enumerate(KINDS):
        folder = tmp_path / f"kind-{number}"
        folder.mkdir()
        sources.append(open_with_input(spec_of(kind, folder, request), SourceSettings(), b""))
    assert implementations("Rows") == {type(source.rows).__name__ for source in sources}
