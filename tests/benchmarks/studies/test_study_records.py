"""The file of a study: what it holds, and which runs it refuses to mix."""

import json
from pathlib import Path

import pytest
from study_making import fall, record

from benchmarks.studies.records import Key, StudyFile, same_prompts
from store.errors import CorruptError, RunError

SETTINGS = {"study": "losses", "batch": 8, "source.where": ("split=test",)}


def test_a_record_survives_the_file(tmp_path: Path):
    one = record([3, 5], alarms=(fall(1),), recalls=(1,), segments=(0, 1, 2))
    empty = record([], seed=1)
    file = StudyFile(tmp_path / "new" / "study.json", SETTINGS)
    file.add(one)
    file.add(empty)
    assert StudyFile(file.path, SETTINGS).records == {one.key: one, empty.key: empty}


def test_the_file_has_a_line_per_run_and_the_metrics(tmp_path: Path):
    file = StudyFile(tmp_path / "study.json", SETTINGS)
    for seed in range(3):
        file.add(record([3, 5], seed=seed))
    file.write({"big": {"hybrid": 1.0}})
    content = json.loads(file.path.read_text())
    assert content["figures"] == {"big": {"hybrid": 1.0}}
    assert content["settings"]["source.where"] == ["split=test"]
    assert len(file.path.read_text().splitlines()) == 3 + 4 + 3


def test_other_settings_are_refused_by_name(tmp_path: Path):
    StudyFile(tmp_path / "study.json", SETTINGS).write({})
    with pytest.raises(RunError, match=r"batch is 8 there, not 4; study is 'losses' there, not 'head'; name another"):
        StudyFile(tmp_path / "study.json", SETTINGS | {"batch": 4, "study": "head"})
    with pytest.raises(RunError, match=r"more is None there, not 1"):
        StudyFile(tmp_path / "study.json", SETTINGS | {"more": 1})
    StudyFile(tmp_path / "study.json", SETTINGS)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1, "settings": {}, "runs": [{}]}'])
def test_a_file_without_a_study_is_refused(tmp_path: Path, content: str):
    (tmp_path / "study.json").write_text(content)
    with pytest.raises(CorruptError, match="must hold the runs of a study"):
        StudyFile(tmp_path / "study.json", SETTINGS)


def test_another_format_is_refused(tmp_path: Path):
    (tmp_path / "study.json").write_text('{"format": 99}')
    with pytest.raises(RunError, match="must be of format 1, got 99"):
        StudyFile(tmp_path / "study.json", SETTINGS)


def test_an_impossible_path_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="see --out"):
        StudyFile(tmp_path / "file" / "study.json", SETTINGS)
    with pytest.raises(RunError, match="must be a readable file"):
        StudyFile(tmp_path, SETTINGS)


def test_runs_with_other_prompts_are_not_compared():
    same_prompts([record([1], seed=0), record([1], seed=1), record([1], seed=0, arm="trie")])
    with pytest.raises(CorruptError, match=r"'hybrid' and 'trie' of seed 0 .* a source has changed"):
        same_prompts([record([1]), record([1], arm="trie", prompts="others")])


def test_runs_are_kept_in_the_order_of_target_seed_and_arm():
    keys = [Key("b", 0, "a"), Key("a", 1, "b"), Key("a", 0, "z")]
    assert sorted(keys) == [Key("a", 0, "z"), Key("a", 1, "b"), Key("b", 0, "a")]
