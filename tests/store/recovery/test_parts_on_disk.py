"""The manifest is compared with the parts that it names, and a part must be a file in its own folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from synthetic_runs import small_run_events, write_run

from store.errors import CorruptError
from store.log.compaction import compact
from store.log.manifest import MANIFEST, part_path, read_manifest
from store.log.run_log import RunLog
from store.query.log_reader import LogReader
from store.recovery.parts_on_disk import compare_with_manifest, read_found_part


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", small_run_events())


def change_part(run: Path, table: str, **changes: Any) -> Path:
    """Change the manifest's entry of the first part of a table. Returns the part's path."""
    content = json.loads((run / MANIFEST).read_bytes())
    content["tables"][table][0] |= changes
    (run / MANIFEST).write_text(json.dumps(content))
    return run / "log" / content["tables"][table][0]["file"]


def test_a_sound_log_has_no_difference(run: Path):
    assert compare_with_manifest(run) == []


def test_a_log_with_counts_has_no_difference(tmp_path: Path):
    with RunLog(tmp_path, part_rows=30) as log:
        for event in small_run_events():
            log.append(event)
    compact(tmp_path, counted=1)
    assert read_manifest(tmp_path).tables["counts_by_token"]
    assert compare_with_manifest(tmp_path) == []


@pytest.mark.parametrize("changes", [{"rows": 1}, {"first_offset": 3}, {"last_offset": 10**6}])
@pytest.mark.parametrize("table", ["decisions", "prompts", "updates"])
def test_a_number_that_differs_is_named(run: Path, table: str, changes: dict[str, int]):
    path = change_part(run, table, **changes)
    (difference,) = compare_with_manifest(run)
    assert difference.startswith(f"{path} has ")
    assert str(*changes.values()) in difference.partition("but its manifest has")[2]


@pytest.mark.parametrize("name", ["rows", "bytes", "first_offset", "last_offset"])
@pytest.mark.parametrize("value", ["x", "1", 1.5, -1, True, None, []])
def test_an_invalid_number_makes_a_manifest_corrupt(run: Path, name: str, value: Any):
    change_part(run, "prompts", **{name: value})
    with pytest.raises(CorruptError, match=rf"must be integers from 0 on, got \{{'{name}'"):
        read_manifest(run)


def test_a_link_in_the_place_of_a_part_is_refused(run: Path, tmp_path: Path):
    (part,) = read_manifest(run).tables["prompts"]
    path = part_path(run, part)
    path.rename(tmp_path / "elsewhere.parquet")
    path.symlink_to(tmp_path / "elsewhere.parquet")
    with pytest.raises(CorruptError, match="must be a plain file, but is a link"):
        LogReader([run])
    with LogReader([run], skip_damaged=True) as log:
        assert log.damaged == [path]
        assert log.select("FROM prompts").num_rows == 0
    with pytest.raises(CorruptError, match="is a link or something else"):
        read_found_part(path, "prompts", part.sha256)


def test_a_part_is_read_with_its_sequence_range(run: Path):
    for table, parts in read_manifest(run).tables.items():
        end = 0
        for part in parts:
            found = read_found_part(part_path(run, part), table, part.sha256)
            assert (found.part, found.vouched, found.first_seq) == (part, True, end)
            end = found.end_seq
            assert not read_found_part(part_path(run, part), table, None).vouched
    with pytest.raises(CorruptError, match="must be a part of blocks of a known version, got decisions"):
        read_found_part(part_path(run, read_manifest(run).tables["decisions"][0]), "blocks", None)
