"""The report on a run's vocabularies, as a replay writes it, and its page."""

import json
from pathlib import Path
from typing import Any

from serving_runs import Serve
from stream_making import stream, write

from dashboards.web.queries.vocabulary import read_vocabularies
from store.query.log_reader import LogReader

REPORT: dict[str, Any] = {
    "target": "big", "drafter": "small", "target_size": 1000, "drafter_size": 300, "direct": 692,
    "ngrams": {"2": 200, "3": 50, "4": 20, "5-8": 20, "9+": 10}, "unspelt": 3, "silent": 5, "digest": "d",
    "specials": [
        {"token": 9, "name": "<unused>", "how": "spelt", "pieces": [1, 2], "text": ["<", "unused>"]},
        {"token": 2, "name": "<eos>", "how": "role", "pieces": [0], "text": ["</s>"]},
    ],
}  # fmt: skip


def run_with(folder: Path, content: Any) -> Path:
    write(folder, stream(5))
    (folder / "vocabulary.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def read(folder: Path) -> dict[str, Any]:
    with LogReader([folder]) as log:
        return read_vocabularies(log, {folder.name: folder}, [folder.name])


def test_classes_have_the_tokens_that_the_run_judged(tmp_path: Path):
    found = read(run_with(tmp_path / "run", [REPORT]))
    (pair,) = found["pairs"]
    counts = [(row["name"], row["count"], row["judged"], row["accepted"]) for row in pair["classes"]]
    assert counts[:3] == [("one piece (direct)", 692, 10, 5), ("2 pieces", 200, 5, 5), ("3 pieces", 50, 0, 0)]
    assert [row["share"] for row in pair["classes"]][-2:] == [0.003, 0.005]
    assert [one["name"] for one in pair["specials"]] == ["<eos>", "<unused>"], "tokens with a meaning are first"
    assert found["story"][0]["sentences"] == [
        "Of the 1,000 tokens of big, 69.2% are one piece of small and 30.0% are n-grams of several pieces; 3 cannot be "
        "spelt."
    ]


def test_the_page_has_classes_and_special_tokens(serve: Serve, tmp_path: Path, page: Any):
    run_with(tmp_path / "runs" / "a", [REPORT])
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{serve(tmp_path / 'runs')}/vocabulary")
    page.wait_for_selector("#chart .barlayer .trace")
    cells = "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    first, *_ = page.eval_on_selector_all("#classes tbody tr", cells)
    assert first == ["one piece (direct)", "692", "69.2%", "10", "5"]
    assert page.eval_on_selector_all("#specials tbody tr", cells)[0] == ["<eos>", "2", "role", "</s>"]
    assert page.evaluate("document.documentElement.scrollWidth") == 390
