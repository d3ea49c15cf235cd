"""Prompt sources: every kind, errors when they are opened, and how they join to one stream."""

import io
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from source_reading import GOOD, PLAIN, list_texts, read, write_file

from pipeline.config.sections import SourceSettings
from pipeline.sources.stream import open_source, open_sources, stream
from store.errors import SourceError
from store.events import PromptReceived


def feed(monkeypatch: pytest.MonkeyPatch, given: io.BytesIO) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=given))


def test_standard_input_is_read_line_by_line(monkeypatch):
    class Pipe(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            line = super().readline(size)
            assert line != b"later\n", "read before it was needed"
            return line

    feed(monkeypatch, Pipe(GOOD + b"later\n"))
    events = open_source("-", PLAIN).read(0)
    assert next(events) == PromptReceived(0, "stdin:1", "stdin", 1, "good")
    with pytest.raises(AssertionError, match="before it was needed"):
        next(events)


def test_standard_input_that_breaks_off_is_reported(monkeypatch):
    class Broken(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            raise OSError(5, "Input/output error")

    feed(monkeypatch, Broken())
    with pytest.raises(SourceError, match="'stdin' broke off: Input/output error"):
        list(open_source("-", PLAIN).read(0))


def test_sources_join_to_one_stream(tmp_path, monkeypatch):
    first = write_file(tmp_path / "first.jsonl", GOOD + b"bad\n" + GOOD)
    second = write_file(tmp_path / "second.csv", b"prompt\nx\n")
    feed(monkeypatch, io.BytesIO(b"bad\n" + GOOD))
    events = list(stream(open_sources([str(first), str(second), "-"], PLAIN)))
    shown = [(event.dataset, getattr(event, "offset", "rejected")) for event in events]
    assert shown == [
        ("first", 0),
        ("first", "rejected"),
        ("first", 1),
        ("second", 2),
        ("stdin", "rejected"),
        ("stdin", 3),
    ]


def test_sizes_are_exact_for_small_files_and_close_for_large_ones(tmp_path):
    small = write_file(tmp_path / "small.jsonl", GOOD * 3 + GOOD.strip())
    table = write_file(tmp_path / "table.csv", b"prompt\n" + b"some text\n" * 5)
    large = write_file(tmp_path / "large.jsonl", GOOD * 100_000)
    assert open_source(str(small), PLAIN).size() == 4
    assert open_source(str(table), PLAIN).size() == 5
    assert open_source(str(large), PLAIN).size() == pytest.approx(100_000, rel=0.01)
    assert open_source(str(large), SourceSettings(limit=9, where=("prompt=good",))).size() == 9
    assert open_source(str(large), SourceSettings(where=("prompt=good",))).size() is None


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("gsm8k.json", "got a name that does not exist. Did you mean '.*gsm8k.jsonl'"),
        ("nowhere/x.jsonl", "got a name that does not exist. Other sources are 'builtin:docs'"),
        ("gsm8k.txt", "must end in .parquet, .arrow, .feather, .jsonl, .ndjson, .json, .csv, .tsv, text also with .gz"),
        ("empty", "must hold files of one kind .*, got none"),
        ("mixed", r"got files of .csv and .jsonl; name some in quotes, as '.*mixed/\*.csv'"),
        ("*.gz", r"must be a file, a folder or a pattern such as 'FOLDER/\*.jsonl' in quotes, got a name"),
        ("x" * 5000, "must be a readable file: File name too long"),
    ],
)
def test_a_file_that_cannot_be_a_source_is_refused_with_advice(tmp_path, spec: str, reason: str):
    write_file(tmp_path / "gsm8k.jsonl", GOOD)
    write_file(tmp_path / "gsm8k.txt", GOOD)
    (tmp_path / "empty").mkdir()
    (tmp_path / "mixed").mkdir()
    write_file(tmp_path / "mixed" / "a.jsonl", GOOD)
    write_file(tmp_path / "mixed" / "b.csv", b"prompt\nx\n")
    with pytest.raises(SourceError, match=reason):
        open_source(str(tmp_path / spec), PLAIN)


def test_a_builtin_stream_has_150_prompts_and_its_seed_shuffles_them():
    first, again, other = (
        list_texts(list(open_source("builtin:docs", PLAIN, seed=seed).read(0))) for seed in (0, 0, 1)
    )
    assert first == again
    assert len(first) == 150 == open_source("builtin:docs", PLAIN).size()
    assert first != other


def fake_hub(monkeypatch, rows: list[object], columns: list[str] | None) -> list[tuple[object, ...]]:
    """Install a fake `datasets` whose stream holds `rows` (an exception is raised); returns its calls."""
    calls: list[tuple[object, ...]] = []

    class Stream:
        column_names = columns

        def __iter__(self):
            for row in rows:
                if isinstance(row, Exception):
                    raise row
                yield row

    def load_dataset(path: str, config: str | None, *, split: str, streaming: bool) -> Stream:
        calls.append((path, config, split, streaming))
        return Stream()

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return calls


@pytest.mark.parametrize(
    ("spec", "call"),
    [
        ("hf://openai/gsm8k/main:test", ("openai/gsm8k", "main", "test", True)),
        ("hf://openai/gsm8k:train", ("openai/gsm8k", None, "train", True)),
    ],
)
def test_a_hub_source_is_streamed(monkeypatch, spec: str, call: tuple[object, ...]):
    calls = fake_hub(monkeypatch, [{"question": "2 + 2"}], ["question"])
    assert read(spec) == [PromptReceived(0, "gsm8k:1", "gsm8k", 1, "2 + 2")]
    assert calls == [call]


def test_a_hub_that_breaks_off_is_reported(monkeypatch):
    fake_hub(monkeypatch, [{"text": "x"}, ConnectionError("no route")], ["text"])
    events = open_source("hf://owner/data:test", PLAIN).read(0)
    assert next(events).text == "x"
    with pytest.raises(SourceError, match="'hf://owner/data:test' cannot be read: ConnectionError: no route"):
        next(events)


def test_a_hub_out_of_reach_is_reported(monkeypatch):
    unreachable = Mock(side_effect=ConnectionError("no route"))
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=unreachable))
    with pytest.raises(SourceError, match=r"ConnectionError: no route\. Check the name, the split and the network"):
        open_source("hf://owner/data:test", PLAIN)


def test_a_hub_source_without_the_extra_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SourceError, match=r"pip install 'omnidraft\[hub\]'"):
        open_source("hf://owner/data:test", PLAIN)


@pytest.mark.parametrize("spec", ["hf://", "hf://owner/data", "hf://data:test", "hf://owner/data:", "hf://a//b:test"])
def test_a_hub_source_must_be_spelled_out(spec: str):
    with pytest.raises(SourceError, match="must be 'hf://owner/dataset"):
        open_source(spec, PLAIN)
