"""Damage is named by its file, never read in silence: in parts by their digests, in the manifest by its own."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from synthetic_runs import decision, make_drift, prompt, small_run_events, write_run

from store.errors import CorruptError, QueryError
from store.log.compaction import compact
from store.log.manifest import (
    MANIFEST,
    PREVIOUS,
    manifest_damage,
    part_path,
    read_manifest,
    read_manifest_file,
)
from store.log.parts import completed_prompts, find_damage, read_part
from store.log.run_log import Commit, RunLog
from store.query.log_reader import LogReader

FLIPS = 60


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A log of three commits, with joined parts, their counts, and small parts after them."""
    run = tmp_path / "run"
    log = RunLog(run)
    for number in range(3):
        for event in (*small_run_events(), make_drift()):
            log.append(event)
        log.commit(Commit(lambda: {"state.json": b"{}"}), wait=True)
        if number == 1:
            compact(run, counted=1)
    log.close()
    return run


def parts_of(run: Path) -> list[Path]:
    return [part_path(run, part) for parts in read_manifest(run).tables.values() for part in parts]


def flips(path: Path, content: bytes, draw: random.Random) -> Iterator[str]:
    """Flip one bit of a file. The content is restored afterwards."""
    place, bit = draw.randrange(len(content)), draw.randrange(8)
    path.write_bytes(bytes([*content[:place], content[place] ^ 1 << bit, *content[place + 1 :]]))
    yield f"bit {bit} of byte {place} of {path.name}"
    path.write_bytes(content)


def read_all(run: Path, path: Path) -> Iterator[Callable[[], object]]:
    """All readers of a part."""
    yield lambda: LogReader([run])
    (part,) = (one for ones in read_manifest(run).tables.values() for one in ones if path.match(one.file))
    yield lambda: read_part(run, part)
    if path.parent.name == "prompts":
        yield lambda: list(completed_prompts(run))


def test_every_flipped_bit_of_a_part_is_named_by_every_reader(run: Path):
    draw, paths = random.Random(0), parts_of(run)
    LogReader([run]).close()  # the parts were read before by this process
    for number in range(FLIPS):
        path = paths[number % len(paths)]
        for what in flips(path, path.read_bytes(), draw):
            for read in read_all(run, path):
                with pytest.raises(CorruptError) as caught:
                    read()
                assert str(path) in str(caught.value), what
            with LogReader([run], skip_damaged=True) as log:
                assert log.damaged == [path], what
    LogReader([run]).close()


def test_damage_after_a_reader_was_opened_is_not_blamed_on_the_query(run: Path):
    path = part_path(run, read_manifest(run).tables["decisions"][0])
    with LogReader([run]) as log:
        content = path.read_bytes()
        footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
        path.write_bytes(content[:4] + bytes(byte ^ 255 for byte in content[4:footer]) + content[footer:])
        with pytest.raises(CorruptError, match=path.name):
            log.select("SELECT sum(uniform) FROM decisions")
        for query in ("SELECT nothing FROM decisions", "SELEC 1"):
            with pytest.raises(QueryError):
                log.select(query)
        path.write_bytes(content)
        with pytest.raises(QueryError, match="Conversion Error"):
            log.select("SELECT 'a'::INTEGER")


def test_every_flipped_bit_of_a_manifest_is_found(run: Path):
    draw, newest, previous = random.Random(1), read_manifest(run), read_manifest_file(run / PREVIOUS)
    assert newest != previous
    for _ in range(FLIPS):
        for what in flips(run / MANIFEST, (run / MANIFEST).read_bytes(), draw):
            assert read_manifest(run) == previous, what
            assert str(run / MANIFEST) in str(manifest_damage(run)), what
    assert (read_manifest(run), manifest_damage(run)) == (newest, None)


LOSSES: dict[str, Callable[[Path], object]] = {
    "lost": Path.unlink,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_the_previous_manifest_stands_in_and_the_run_resumes_from_it(
    run: Path, loss: str, caplog: pytest.LogCaptureFixture
):
    previous = read_manifest_file(run / PREVIOUS)
    LOSSES[loss](run / MANIFEST)
    with LogReader([run]) as log:
        assert log.select("SELECT count(*) AS n FROM drifts").to_pylist() == [
            {"n": sum(part.rows for part in previous.tables["drifts"])}
        ]
    assert [str(run / MANIFEST) in one and "manifest.previous.json" in one for one in caplog.messages] == [True]
    with RunLog(run) as log:
        assert read_manifest(run) == previous
        assert {path.name for path in (run / "checkpoint").iterdir()} == {Path(previous.checkpoint.folder).name}
        log.append(decision(offset=99))
    assert manifest_damage(run) is None
    with LogReader([run]) as log:
        assert log.select('SELECT max("offset") AS last FROM decisions').to_pylist() == [{"last": 99}]
        assert log.check().miscounts.num_rows == 0


def test_a_finished_log_needs_no_earlier_commit(tmp_path: Path):
    run = write_run(tmp_path / "run", [decision(), prompt()])
    finished = read_manifest(run)
    (run / MANIFEST).write_bytes(b"{")
    assert read_manifest(run) == finished


def test_without_a_readable_manifest_a_log_is_refused_in_one_sentence(run: Path):
    for name in (MANIFEST, PREVIOUS):
        (run / name).write_bytes(b"{")
    for open_log in (read_manifest, lambda run: LogReader([run]), RunLog):
        with pytest.raises(CorruptError, match=r"manifest\.json must be .* restore it from a copy$") as caught:
            open_log(run)
        assert len(str(caught.value).splitlines()) == 1


def test_a_compaction_keeps_what_the_previous_manifest_names(run: Path):
    for grace in (3600.0, -1.0, -1.0):
        compact(run, grace=grace, counted=1)
        for name in (MANIFEST, PREVIOUS):
            manifest = read_manifest_file(run / name)
            named = [(run, part) for parts in manifest.tables.values() for part in parts]
            assert find_damage(named) == {}, name
    assert set(run.rglob("part-*.parquet")) == set(parts_of(run)), "nothing else is left"
