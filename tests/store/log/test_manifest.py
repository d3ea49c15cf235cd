"""A manifest is read whole or refused with a reason, and it names no file outside its run."""

from pathlib import Path

import pytest
from synthetic_runs import change_manifest, decision, write_run

from store.errors import CorruptError, RunError
from store.log.manifest import MANIFEST, read_manifest, read_manifest_file


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", [decision()])


OUTSIDE = [
    "/etc/passwd",
    "../../other/log/decisions/part-000001.parquet",
    "decisions/../../../part-000001.parquet",
    "prompts/part-000001.parquet",
    "decisions/part-000001.parquet.",
    "decisions/part-1.parquet",
    "decisions/part-000001.parquet\n",
    "decisions/part-٠٠٠٠٠١.parquet",
    "",
    1,
]


@pytest.mark.parametrize("file", OUTSIDE)
def test_a_part_is_one_of_its_table(run: Path, file: object):
    change_manifest(run, lambda content: content["tables"]["decisions"][0].update(file=file))
    with pytest.raises(CorruptError, match="must be the manifest of a log"):
        read_manifest_file(run / MANIFEST)


@pytest.mark.parametrize("name", ["part-000001.parquet", "part-1234567.parquet", "part-000003-000007.parquet"])
def test_parts_and_joined_parts_are_named_as_they_are_written(run: Path, name: str):
    change_manifest(run, lambda content: content["tables"]["decisions"][0].update(file=f"decisions/{name}"))
    assert read_manifest(run).tables["decisions"][0].file == f"decisions/{name}"


@pytest.mark.parametrize("rows", [-1, 1.0, "1", True, None])
def test_counts_are_integers_from_zero_on(run: Path, rows: object):
    change_manifest(run, lambda content: content["tables"]["decisions"][0].update(rows=rows))
    with pytest.raises(CorruptError, match="must be the manifest of a log"):
        read_manifest_file(run / MANIFEST)


@pytest.mark.parametrize(
    ("folder", "file"),
    [
        ("checkpoint/../../x", "state.json"),
        ("/checkpoint/000001", "state.json"),
        ("checkpoint", "state.json"),
        ("checkpoint/000001", "../state.json"),
        ("checkpoint/000001", "/etc/passwd"),
        ("checkpoint/000001", ".."),
        ("checkpoint/000001", ""),
    ],
)
def test_a_checkpoint_is_inside_its_run(run: Path, folder: str, file: str):
    change_manifest(run, lambda content: content.update(checkpoint={"folder": folder, "files": {file: "0" * 64}}))
    with pytest.raises(CorruptError, match="must be the manifest of a log"):
        read_manifest_file(run / MANIFEST)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"schema_version": 1}', '{"schema_version": 1, "tables": []}', "[" * 100_000, "\ud83d"],
)
def test_other_content_is_reported_as_a_corrupt_manifest(run: Path, content: str):
    (run / MANIFEST).write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(CorruptError, match="must be the manifest of a log"):
        read_manifest_file(run / MANIFEST)


def test_a_manifest_that_cannot_be_opened_is_reported_as_a_wrong_folder(run: Path):
    (run / MANIFEST).unlink()
    (run / MANIFEST).mkdir()
    with pytest.raises(RunError, match=r"manifest\.json must be readable: "):
        read_manifest(run)
    with pytest.raises(RunError, match="must be readable: "):
        read_manifest(run / ("x" * 300))
