"""A run that cannot be resumed is refused in one sentence and is left unchanged."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty_runs import Ended, Life, Stream, World
from replaying import StoppingDisplay, config_of
from tiny_pair import TinyPair, scale_weights

from pipeline.run.replay import Replay
from store.log.manifest import MANIFEST, PREVIOUS, read_manifest


@pytest.fixture
def run(half: Path, tmp_path: Path) -> Path:
    return shutil.copytree(half, tmp_path / "run")


def type_command(folder: Path, *words: object) -> Ended:
    return Life(World(folder / "world"), words).end()


@pytest.mark.slow
def test_a_finished_run(whole: Path, tmp_path: Path):
    run = shutil.copytree(whole, tmp_path / "run")
    type_command(tmp_path, "replay", "--resume", run).assert_clear(
        2, str(run), "is finished", "begin another", "omnidraft versions sync"
    )


@pytest.mark.parametrize("made", [False, True])
def test_a_folder_without_a_run(tmp_path: Path, made: bool):
    folder = tmp_path / "nothing"
    if made:
        folder.mkdir()
    type_command(tmp_path, "replay", "--resume", folder).assert_clear(2, str(folder), "config.json", "--run")
    assert folder.exists() == made
    assert not made or list(folder.iterdir()) == []


def everything_in(run: Path) -> dict[str, bytes | bool]:
    return {str(path.relative_to(run)): path.is_file() and path.read_bytes() for path in run.rglob("*")}


@pytest.mark.representatives(1)
@pytest.mark.parametrize("words", [["replay", "--run"], ["serve", "--port", "0", "--resume"]])
def test_a_run_whose_manifest_is_lost(stream: Stream, run: Path, tmp_path: Path, words: list[str]):
    for name in (MANIFEST, PREVIOUS):
        (run / name).unlink()
    before = everything_in(run)
    more = stream.sources if "--run" in words else ()
    type_command(tmp_path, *words, run, *more).assert_clear(
        1, f"{run / MANIFEST} must be there", "Restore the manifest", "--run"
    )
    assert everything_in(run) == before


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        (["--batch", "2"], "batch"),
        (["--set", "learn.rate=1"], "--set"),
        (["--config", "other.toml"], "--config"),
        (["other.jsonl"], "sources"),
    ],
)
def test_other_settings(run: Path, tmp_path: Path, option: list[str], setting: str):
    before = read_manifest(run)
    type_command(tmp_path, "replay", "--resume", run, *option).assert_clear(2, "settings that it began with", setting)
    assert read_manifest(run) == before


def test_a_new_run_in_the_same_folder(stream: Stream, run: Path, tmp_path: Path):
    run = run.rename(run.with_name("it's $HOME"))
    before = read_manifest(run)
    command = f"omnidraft replay --resume {shlex.quote(str(run))}"
    type_command(tmp_path, *stream.begin(run)).assert_clear(2, f"`{command}`", "--run")
    assert read_manifest(run) == before


def change_settings(run: Path, change: Callable[[dict[str, object]], None]) -> None:
    """Edit the settings with which the run started, for example to name copies of its sources."""
    settings = json.loads((run / "config.json").read_text(encoding="utf-8"))
    change(settings)
    (run / "config.json").write_text(json.dumps(settings), encoding="utf-8")


def test_sources_that_were_changed_since(stream: Stream, run: Path, tmp_path: Path):
    """The file has the same name, but a different second row."""
    changed = Path(shutil.copy(stream.sources[0], tmp_path / "sums.jsonl"))
    change_settings(run, lambda settings: settings.update(sources=[str(changed), str(stream.sources[1])]))
    lines = changed.read_text(encoding="utf-8").splitlines(keepends=True)
    changed.write_text("".join([lines[0], lines[1].replace("has", "had"), *lines[2:]]), encoding="utf-8")
    before = read_manifest(run)
    type_command(tmp_path, "replay", "--resume", run).assert_clear(
        2, "rows that the run has read already", "begin a new run"
    )
    assert read_manifest(run) == before


def test_sources_that_are_gone(run: Path, tmp_path: Path):
    change_settings(run, lambda settings: settings.update(sources=[str(tmp_path / "gone.jsonl")]))
    type_command(tmp_path, "replay", "--resume", run).assert_clear(2, "gone.jsonl", "does not exist")


@pytest.mark.slow
def test_sources_that_have_grown_since(stream: Stream, run: Path, tmp_path: Path):
    """The rows that were read are unchanged, so the run continues to the new end."""
    grown = Path(shutil.copy(stream.sources[1], tmp_path / "strange.jsonl"))
    grown.write_text(grown.read_text(encoding="utf-8") + '{"prompt": "Ann has"}\n', encoding="utf-8")
    change_settings(run, lambda settings: settings.update(sources=[str(stream.sources[0]), str(grown)]))
    type_command(tmp_path, "replay", "--resume", run).assert_clear(0)
    last = max(part.last_offset for part in read_manifest(run).tables["prompts"])
    assert last == 32


@pytest.mark.representatives(1)
@pytest.mark.slow
@pytest.mark.parametrize("which", ["target", "drafter"])
def test_models_whose_weights_were_changed_since(tiny_pair: TinyPair, tmp_path: Path, which: str):
    """Sizes and vocabularies are the same, the weights are different."""
    pair, run = tiny_pair.copy_to(tmp_path), tmp_path / "run"
    with StoppingDisplay(3) as display:
        assert Replay(config_of(pair), run).run(display)["stopped"]
    scale_weights(getattr(pair, which))
    type_command(tmp_path, "replay", "--resume", run).assert_clear(2, "must resume with the models that it began with")
