"""The page of versions shows which version is better, and by how much."""

from pathlib import Path
from typing import Any

import pytest
from event_making import make_drifted, make_published
from serving_runs import Serve, read_table
from stream_making import prompt, write

from dashboards.web import registered
from dashboards.web.queries import versions
from dashboards.web.queries.versions import read_versions
from dashboards.web.registered import list_compared, list_numbers
from store.events import Event, VersionPublished
from store.query.log_reader import LogReader
from store.registry.mlflow_comparisons import RecordedComparison
from store.registry.registered_version import from_tags

PARTS = ("first", "second", "change", "low", "high")
TOKENS = (10,) * 8
COMPARED = RecordedComparison(
    "m",
    2,
    6,
    1_700_000_000.0,
    {
        "prompts": 24.0,
        **{f"acceptance_rate/{part}": value for part, value in zip(PARTS, (0.25, 0.5, 0.25, 0.1, 0.4), strict=True)},
        **{f"tokens_per_second/{part}": value for part, value in zip(PARTS[:3], (9.0, 8.0, 0.875), strict=True)},
    },
)


def version(number: int, greedy: int, **others: Any) -> VersionPublished:
    """Publish a version that predicts about `greedy` of the ten tokens of each prompt."""
    predicted = tuple(greedy + place % 2 for place in range(8))
    measured = {"probe_tokens": TOKENS, "probe_greedy": predicted, "probe_sampled": tuple(one / 2 for one in predicted)}
    forwards = tuple(10 - one for one in predicted)
    place: dict[str, Any] = {"version": number, "parent": number - 1 if number else None, "offset": 10 * number}
    return make_published(
        **{**place, **({"reason": "interval"} if number else {}), **measured, **others}, probe_forwards=forwards
    )


def read(tmp_path: Path, *published: VersionPublished) -> dict[str, Any]:
    events: list[Event] = [*(prompt(offset) for offset in range(30)), *published]
    with LogReader([write(tmp_path / "run", events)]) as log:
        return read_versions(log)


def test_a_version_is_compared_with_its_baseline_on_the_probe(tmp_path: Path):
    counters = {"drafter_version": 3, "cache_version": 53, "cache_entries": 53, "memory_tokens": 1728}
    found = read(tmp_path, version(0, 2, drafter_digest="a"), version(1, 5, drafter_digest="b", **counters))
    (baseline, newest) = found["versions"]
    assert baseline["probe"]["greedy"]["value"] == 20 / 80
    assert newest["probe"]["greedy"]["value"] == 44 / 80
    assert newest["probe"]["sampled"]["value"] == 22 / 80
    assert newest["probe"]["forwards"]["value"] == 80 / 36
    assert newest["gain"]["greedy"]["value"] == pytest.approx(0.3, abs=1e-12)
    assert found["verdicts"][0] == {
        "run": "run", "target": "big", "newest": 1, "best": 1, "equal": False,
        "sentences": [
            "Version 1, the newest, is better than the baseline on the probe: +30.0 (+30.0 to +30.0) points of "
            "acceptance (55.0%), +0.89 (+0.75 to +1.03) tokens per target forward (2.22).",
            "Since the baseline: drafter +3 updates; n-grams +53, memory +1,728 tokens.",
        ],
    }  # fmt: skip


def test_equal_drafters_are_one_line(tmp_path: Path):
    same = {"drafter_digest": "a"}
    found = read(tmp_path / "a", version(0, 4, **same), version(1, 4, **same, head_version=4, memory_tokens=1728))
    assert (found["verdicts"][0]["equal"], found["verdicts"][0]["sentences"]) == (True, [
        "Equal drafters: all 2 versions have the same weights. Since version 0: drafter unchanged; head +4 updates, "
        "memory +1,728 tokens."
    ])  # fmt: skip
    restored = read(tmp_path / "b", version(0, 4, **same), version(1, 6, drafter_digest="b"), version(2, 4, **same))
    assert not restored["verdicts"][0]["equal"]
    assert restored["verdicts"][0]["sentences"][0].startswith("Version 2, the newest, is not clearly different from")


def test_the_later_of_two_versions_at_one_prompt_is_in_service(tmp_path: Path):
    last = range(9, 100, 10)  # the last prompts of intervals; at each next prompt a drift is detected
    events = [prompt(offset) for offset in range(110)]
    events += [make_published()]
    for number, offset in enumerate(last):
        events += [
            make_published(offset=offset, version=2 * number + 1, parent=2 * number, reason="interval"),
            make_drifted(offset=offset + 1),
            make_published(offset=offset, version=2 * number + 2, parent=2 * number + 1, reason="drift"),
        ]
    with LogReader([write(tmp_path / "run", events)]) as log:
        found = read_versions(log)
    assert [row["version"] for row in found["versions"]] == list(range(21))
    served = [(row["version"], row["prompts"]) for row in found["versions"] if row["prompts"]]
    assert served == [(even, 10) for even in range(0, 21, 2)]


def test_each_run_has_its_last_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(versions, "MOST_VERSIONS", 2)
    events = [prompt(0)] + [
        make_published(offset=number, version=number, parent=number - 1 if number else None) for number in range(3)
    ]
    runs = [write(tmp_path / name, events) for name in ("a", "b")]
    with LogReader(runs) as log:
        found = read_versions(log)
    last = [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert [(row["run"], row["version"]) for row in found["versions"]] == last
    assert found["total"] == 6


def test_numbers_and_aliases_come_from_the_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    requests: list[str] = []

    def list_versions(uri: str) -> list[Any]:
        requests.append(uri)
        tags = {"run": "run", "version": "1"}
        return [from_tags("m", 6, tags, ["candidate"], 0), from_tags("m", 2, {"run": "other"}, [], 0)]

    monkeypatch.setattr(registered, "list_versions", list_versions)
    monkeypatch.setattr(registered, "list_comparisons", lambda uri: [])
    assert list_numbers(tmp_path, ["run"]) == []
    assert requests == [], "there is no registry yet"
    (tmp_path / "mlflow.db").touch()
    for _ in range(2):
        assert list_numbers(tmp_path, ["run"]) == [
            {"name": "m", "run": "run", "version": 1, "number": 6, "aliases": ("candidate",)}
        ]
    assert len(requests) == 1
    (tmp_path / "mlflow.db").write_bytes(b"more")
    list_numbers(tmp_path, ["run"])
    assert len(requests) == 2


def test_comparisons_come_from_the_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tags = {"run": "run", "version": "1"}
    monkeypatch.setattr(registered, "list_versions", lambda uri: [from_tags("m", 6, tags, [], 0)])
    monkeypatch.setattr(registered, "list_comparisons", lambda uri: [COMPARED])
    assert list_compared(tmp_path, ["run"]) == [], "there is no registry yet"
    (tmp_path / "mlflow.db").touch()
    (found,) = list_compared(tmp_path, ["run"])
    assert found["second"] == {"number": 6, "run": "run", "version": 1}
    assert found["first"] == {"number": 2, "run": None, "version": None}, "it was pruned, or is in another registry"
    assert found["acceptance_rate"] == {"first": 0.25, "second": 0.5, "change": 0.25, "low": 0.1, "high": 0.4}
    assert found["tokens_per_second"]["low"] is None
    assert (found["prompts"], found["made_at"]) == (24, 1_700_000_000.0)
    assert list_compared(tmp_path, ["other"]) == []


@pytest.mark.slow
def test_the_page_shows_the_probe_first(serve: Serve, tmp_path: Path, page: Any, monkeypatch: pytest.MonkeyPatch):
    tags = {"run": "a", "version": "1"}
    monkeypatch.setattr(registered, "list_versions", lambda uri: [from_tags("m", 6, tags, ["champion"], 0)])
    monkeypatch.setattr(registered, "list_comparisons", lambda uri: [COMPARED])
    write(tmp_path / "runs" / "a", [prompt(3), *(version(number, 2 + number % 2) for number in range(3))])
    (tmp_path / "runs" / "mlflow.db").touch()
    page.goto(f"{serve(tmp_path / 'runs')}/versions")
    page.wait_for_selector("#all tbody tr:first-child td:nth-child(2):has-text('champion')")
    best, *_ = read_table(page, "#all")
    shown = [text.replace("\N{NO-BREAK SPACE}", " ") for text in best[:4]]
    assert shown == ["1 ★", "#6 champion", "0.350 (0.305 to 0.395)", "+0.100 (+0.100 to +0.100)"]
    forwards, first, *_ = read_table(page, "#compared")
    assert forwards[0] == "probe: tokens per forward"
    assert first == ["probe: acceptance, greedy", "0.250 (0.205 to 0.295)", "0.250 (0.205 to 0.295)", "0.000"]
    assert "In MLflow, champion is version 1 (models:/m/6)." in page.inner_text("#verdict")
    (compared,) = read_table(page, "#comparisons")
    assert compared[:6] == [
        "#2", "#6 (a/1)", "24", "0.250 → 0.500: +0.250 (+0.100 to +0.400)", "–", "9.0 → 8.0: ×0.88",
    ]  # fmt: skip
    drawn = page.evaluate("document.getElementById('probe').data.map(trace => trace.x.length)")
    assert drawn == [3, 3, 3]


@pytest.mark.slow
def test_the_page_of_equal_drafters_shows_one_line(serve: Serve, tmp_path: Path, page: Any):
    same = [version(number, 2, drafter_digest="a") for number in range(3)]
    write(tmp_path / "runs" / "a", [prompt(3), *same])
    page.goto(f"{serve(tmp_path / 'runs')}/versions")
    page.wait_for_selector("#verdict:has-text('Equal drafters: all 3 versions')")
    assert not any(page.is_visible(part) for part in ("#probe", "#pair", "#all"))


def test_the_kinds_of_the_probe_s_prompts_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    metrics = {
        "a": {"upon_docs": 0.4, "upon_rust": 0.25, "acceptance": 0.3},
        "b": {"upon_docs": 0.375, "upon_rust": 0.5},
    }
    monkeypatch.setattr(versions, "read_manifest", lambda folder: {"metrics": metrics[folder.name]})
    published = [version(0, 2, drafter_digest="a", folder="a"), version(1, 5, drafter_digest="b", folder="b")]
    events: list[Event] = [*(prompt(offset) for offset in range(30)), *published]
    with LogReader([write(tmp_path / "run", events)]) as log:
        (told,) = read_versions(log, {"run": tmp_path / "run"})["verdicts"]
        assert told["sentences"][-1] == "In points of acceptance: -2.5 upon docs, +25.0 upon rust."
        monkeypatch.undo()
        (left,) = read_versions(log, {"run": tmp_path / "run"})["verdicts"]
        assert left["sentences"] == told["sentences"][:-1], "the folders are gone"
