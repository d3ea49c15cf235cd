"""Prompts by Ray Data: many files in order, more than memory holds, and errors."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pyarrow
import pytest
from pyarrow import fs, parquet
from source_reading import PLAIN, list_rejections, list_texts, read, write_file

from pipeline.sources.stream import open_source
from store.errors import SourceError

pytest.importorskip("ray", reason="needs the extra 'ray'")


def table(path: Path, *rows: Mapping[str, object]) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


def lines(path: Path, *rows: Mapping[str, object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.sweep
def test_more_than_ray_s_store_holds_streams_through_it_in_order(tmp_path, ray_cluster, spill_folder):
    for number in range(20):  # 10 MB each once it is read; the store holds 80
        names = [f"{number}/{row}" for row in range(1000)]
        table(tmp_path / f"{number:02}.parquet", *({"prompt": name.ljust(10_000, "x")} for name in names))
    expected, spilt = (f"{number}/{row}" for number in range(20) for row in range(1000)), 0
    for event in open_source(f"ray:{tmp_path}", PLAIN).read(0):
        assert event.text.rstrip("x") == next(expected)
        if event.offset % 500 == 0:
            spilt = max(spilt, bytes_in(spill_folder))
    assert next(expected, None) is None
    assert spilt == 0, "Ray prefetched more than its store holds"


def test_a_long_file_is_waited_for(tmp_path, ray_cluster):
    lines(tmp_path / "1.jsonl", *({"prompt": f"{row}"} for row in range(100_000)))
    for number in range(2, 10):
        lines(tmp_path / f"{number}.jsonl", {"prompt": f"file {number}"})
    expected = [*map(str, range(100_000)), *(f"file {number}" for number in range(2, 10))]
    assert list_texts(read(f"ray:{tmp_path}")) == expected


@pytest.mark.parametrize(
    ("path", "dataset", "found"),
    [
        ("", "prompts", ["a", "b", "c"]),
        ("/*.jsonl", "prompts", ["a", "b"]),
        ("/1*", "prompts", ["a"]),
        ("/2.jsonl", "2", ["b"]),
        ("/below", "below", ["c"]),
    ],
)
def test_a_source_is_a_file_a_folder_or_a_pattern(tmp_path, ray_cluster, monkeypatch, path, dataset, found):
    below = tmp_path / "prompts" / "below"
    below.mkdir(parents=True)
    lines(tmp_path / "prompts" / "1.jsonl", {"prompt": "a"})
    lines(tmp_path / "prompts" / "2.jsonl", {"prompt": "b"})
    lines(below / "3.ndjson", {"prompt": "c"})
    write_file(tmp_path / "prompts" / "_SUCCESS", b"")
    if path in ("", "/below"):
        (below / "3.ndjson").rename(below / "3.jsonl")
    monkeypatch.chdir(tmp_path / "prompts")
    for spec in (f"ray:{tmp_path / 'prompts'}{path}", f"ray:.{path}"):
        source = open_source(spec, PLAIN)
        assert source.dataset == dataset
        assert list_texts(list(source.read(0))) == found


@pytest.mark.parametrize("path", ["prompts", "prompts/*.jsonl", "prompts/1.jsonl"])
def test_files_may_be_in_an_object_store(ray_cluster, monkeypatch, path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):  # Ray's workers have them already
        monkeypatch.setenv(name, "test")
    moto_server = pytest.importorskip("moto.server", reason="needs a server to talk to: pip install 'moto[server]'")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        query = f"endpoint_override=127.0.0.1:{server.get_host_and_port()[1]}&scheme=http&region=us-east-1"
        files, _ = fs.FileSystem.from_uri(f"s3://bucket?{query}&allow_bucket_creation=true")
        files.create_dir("bucket")
        with files.open_output_stream("bucket/prompts/1.jsonl") as file:
            file.write(b'{"prompt": "a"}\nbad\n{"prompt": "b"}\n')
        events = read(f"ray:s3://bucket/{path}?{query}")
    finally:
        server.stop()
    assert list_texts(events) == ["a", "b"]
    assert [line for line, _ in list_rejections(events)] == [2]


def test_a_damaged_file_ends_the_source_and_is_named(tmp_path, ray_cluster):
    table(tmp_path / "1.parquet", {"prompt": "a"})
    write_file(tmp_path / "2.parquet", b"PAR1 no more than that")
    with pytest.raises(SourceError, match=r"cannot be read: '.*2\.parquet': .*magic bytes.*\. Check its files"):
        read(f"ray:{tmp_path}")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nowhere", "must be files of one kind, .parquet or .jsonl or .ndjson, got no such file"),
        ("*.csv", "got no such file"),
        ("", "got files of .jsonl, .parquet"),
        ("broken.parquet", "cannot be read: .*Parquet"),
        ("no-such-scheme://x/y.parquet", "cannot be read: .*no-such-scheme"),
    ],
)
def test_an_unreadable_source_is_refused_before_ray_starts(tmp_path, monkeypatch, path, reason):
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "one.jsonl", {"prompt": "a"})
    write_file(tmp_path / "one.csv", b"prompt\na\n")
    write_file(tmp_path / "broken.parquet", b"not a table")
    with pytest.raises(SourceError, match=reason):
        open_source(f"ray:{path}", PLAIN)


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SourceError, match=r"needs the optional extra 'ray'\. Try: pip install 'omnidraft\[ray\]'"):
        open_source("ray:x.parquet", PLAIN)
