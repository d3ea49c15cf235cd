"""Two runs are compared in sentences: their speed, with an interval over prompts, and the number of equal texts."""

from pathlib import Path

from event_making import make_completed
from stream_making import write

from dashboards.web.queries.charts import read_stream
from dashboards.web.queries.story import compare_runs
from store.query.log_reader import LogReader


def write_run(folder: Path, seconds: list[float], blocks: int = 5, text: str = "a text", first: int = 0) -> Path:
    """A run whose prompts have ten tokens and take these seconds."""
    events = [
        make_completed(
            number,
            prompt_id=f"p{first + number}",
            emitted=10,
            blocks=blocks,
            started=100.0 * number,
            finished=100.0 * number + took,
            completion_text=text if number else "the first text",
        )
        for number, took in enumerate(seconds)
    ]
    return write(folder, events)


def compare(*folders: Path) -> list[str]:
    with LogReader(folders) as log:
        return compare_runs(log, [folder.name for folder in folders])


def test_a_run_that_is_faster_on_every_prompt_is_reported_as_faster(tmp_path: Path):
    quick = write_run(tmp_path / "quick", [1.0, 2.0] * 6, blocks=4, text="another")
    slow = write_run(tmp_path / "slow", [*[2.0, 4.0] * 5, 2.0, 5.0])
    assert compare(quick, slow) == [
        "On the 12 prompts in common, quick was faster: 2.04 times as fast as slow (1.96 to 2.11, by prompts).",
        "Tokens per target forward there: 2.50 and 2.00; 1 of the 12 completions are the same text.",
    ]
    assert "slow was slower: 0.49 times as fast as quick (0.47 to 0.51" in compare(slow, quick)[0]


def test_a_difference_within_the_noise_is_reported_as_none(tmp_path: Path):
    one = write_run(tmp_path / "one", [1.0, 2.0] * 6)
    other = write_run(tmp_path / "other", [2.0, 1.0] * 6)
    assert compare(one, other)[0].startswith(
        "On the 12 prompts in common, neither run was clearly faster: one was 1.00 times as fast as other (0.66 to 1.5"
    )


def test_the_stream_compares_the_first_run_with_the_others(tmp_path: Path):
    folders = {name: write_run(tmp_path / name, [1.0] * 12) for name in ("b", "a", "c")}
    with LogReader(list(folders.values())) as log:
        found = read_stream(log, folders=folders)["compared"]
        alone = read_stream(log, folders={"a": folders["a"]})["compared"]
    assert [sentence.split("as fast as ")[1][0] for sentence in found[::2]] == ["a", "c"]
    assert alone == []
