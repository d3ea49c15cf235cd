"""The content of each page, in headless Chromium; console output or a request to another host fails a test."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from event_making import make_drifted
from serving_runs import Serve, read_table, serve_dashboards
from stream_making import HOSTILE, append, block_of_every_kind, prompt, stream, write
from tree_making import NODES, make_tree

from store.events import PromptCompleted, TokenDecision
from store.log.run_log import RunLog


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that learned, and one that did not."""
    folder = tmp_path_factory.mktemp("two") / "runs"
    baseline = [event for event in stream() if isinstance(event, PromptCompleted | TokenDecision)]
    write(folder / "baseline", baseline)
    write(folder / "learned", stream())
    return folder


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    """The address at which both runs are served."""
    with serve_dashboards(runs) as found:
        yield found


# An element that each page has after it shows its data.
READY = {
    "": "#runs table",
    "stream": "#events table",
    "policies": "#policies table",
    "calibration": "#head .main-svg",
    "text": "#prompts li",
    "memory": "#accepted table",
    "ngrams": "#paying table",
    "vocabulary": "#classes table",
    "versions": "#all table",
    "sql": "#query",
}


def wait_until(page: Any, expression: str) -> None:
    """Wait until an expression is true.

    Playwright's own function evaluates strings, which the content policy of the pages forbids.
    """
    for _ in range(300):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"{expression} never became true; it shows {page.inner_text('body')[:2000]}")


def texts(page: Any, selector: str) -> list[str]:
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


def cards(page: Any) -> dict[str, str]:
    """The values of the cards of the first run, by label."""
    page.wait_for_selector("#totals .card b")
    group = page.locator("#totals .cards").first
    values = group.locator(".card b").all_inner_texts()
    return dict(zip(group.locator(".card > span").all_inner_texts(), values, strict=True))


def test_the_stream_page_has_cards_curves_and_marks(address: str, page: Any):
    page.goto(f"{address}/stream?run=learned")
    values = cards(page)
    assert (values["prompts"], values["tokens"], values["acceptance"]) == ("60", "300", "0.375")
    assert (values["tokens / forward"], values["tokens / second"]) == ("2.50", "5.0")
    assert (values["drift responses"], values["drafter updates"]) == ("1", "6")
    assert values["seconds / answer"] == "1.00"
    page.wait_for_selector("#chart .scatterlayer .trace")
    drawn = page.evaluate("document.getElementById('chart').data.map(trace => [trace.yaxis, trace.x.length])")
    assert [points for axis, points in drawn if axis in ("y", "y2", "y3")] == [12, 12, 12]
    assert [points for axis, points in drawn if axis == "y4"] == [6, 4, 1, 1, 1]
    colors = page.evaluate(
        "document.getElementById('chart').data.filter(trace => trace.yaxis === 'y4').map(trace => trace.marker.color)"
    )
    assert len(set(colors)) == 5, "each kind of event has its own colour"
    words = " ".join(row[2] for row in read_table(page, "#events"))
    assert make_drifted().description in words
    assert "version 0 restored at 33" in words
    assert "acceptance head reset at 33, in response to the drift" in words
    story = page.inner_text("#story")
    assert "drafter 30% of 300 tokens" in story
    assert "version 2 at 32 (drift), parent 1, 11 n-grams" in words
    assert texts(page, "#state") == ["finished"]


@pytest.mark.slow
def test_several_runs_share_one_chart(address: str, page: Any):
    page.goto(f"{address}/stream?run=learned&run=baseline")
    page.wait_for_selector("#chart .scatterlayer .trace")
    looks = page.evaluate(
        "document.getElementById('chart').data.filter(trace => trace.yaxis === 'y')"
        ".map(trace => [trace.name, trace.line.dash, trace.marker.symbol, trace.line.color])"
    )
    assert [look[0] for look in looks] == ["learned", "baseline"]
    assert all(one != other for one, other in zip(looks[0], looks[1], strict=True))
    assert texts(page, "#totals .name") == ["learned", "baseline"]


def test_the_text_page_distinguishes_tokens_and_explains_them(address: str, page: Any):
    page.goto(f"{address}/text?run=learned&offset=3")
    page.wait_for_selector(".tokens .t")
    seen = "found => found.filter(token => token.getClientRects().length)"
    shown = page.eval_on_selector_all(".tokens .t", f"{seen}.map(token => [token.textContent, token.className])")
    assert shown == [
        [" the", "t accepted opens"],
        [" check", "t accepted ngram"],
        [" wrong", "t rejected"],
        [" right", "t residual"],
        [" the", "t accepted lookup opens"],
        ["↵\n", "t bonus"],
    ]
    page.check("#show-dropped")
    assert page.locator(".tokens .dropped").is_visible()
    answer = page.locator(".answer .prompt")
    assert not answer.is_visible()
    page.click(".answer summary")
    assert answer.is_visible()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#copy")
    page.wait_for_selector("#where:has-text('Copied')")
    assert page.evaluate("navigator.clipboard.readText()") == answer.inner_text()
    page.hover(".tokens .ngram")
    detail = page.inner_text("#detail")
    assert "drafted as pieces 8, 9 (n-gram, model)" in detail
    assert "level 1: probability 0.5 by the drafter, 0.5 by the target" in detail
    assert "accepted with probability 0.8; the draw was 0.25" in detail
    assert "head's estimate of survival to here 0.75" in detail


def test_prompts_are_found_by_number_dataset_speed_and_acceptance(serve: Serve, tmp_path: Path, page: Any):
    events = [prompt(n, accepted=n % 4, judged=8, dataset="docs" if n < 30 else "code") for n in range(45)]
    events[7] = replace(events[7], finished=500.0)
    write(tmp_path / "runs" / "a", events)
    page.goto(f"{serve(tmp_path / 'runs')}/text")

    def list_prompts() -> list[int]:
        return [int(text.removeprefix("#")) for text in texts(page, "#prompts b")]

    page.wait_for_selector("#completion h2")
    assert list_prompts() == list(range(20))
    page.click("#next")
    wait_until(page, "document.querySelector('#prompts b').textContent === '#20'")
    page.select_option("[name=order]", "slowest")
    wait_until(page, "document.querySelector('#completion h2').textContent.startsWith('Prompt 7 ')")
    page.select_option("[name=order]", "worst")
    wait_until(page, "document.querySelector('#completion h2').textContent.startsWith('Prompt 0 ')")
    assert {offset % 4 for offset in list_prompts()[:11]} == {0}
    page.select_option("[name=dataset]", "code")
    wait_until(page, "document.querySelector('#completion h2').textContent.startsWith('Prompt 32 ')")
    page.fill("[name=offset]", "99")
    page.click("text=Open")
    page.wait_for_selector("#problem:not([hidden])")
    with page.expect_response("**/api/prompts*"):
        pass  # the page repeats its requests, and the message stays
    assert "the offset must be that of a completed prompt, got 99" in page.inner_text("#problem")
    page.console_lines.clear()  # the browser's own line about the refusal
    page.fill("[name=offset]", "41")
    page.click("text=Open")
    wait_until(page, "document.querySelector('#completion h2').textContent.startsWith('Prompt 41 ')")
    assert page.locator("#problem").is_hidden()


@pytest.mark.slow
def test_hostile_text_is_shown_as_text(serve: Serve, tmp_path: Path, page: Any):
    place: dict[str, Any] = {"dataset": HOSTILE, "prompt_id": HOSTILE}
    content = HOSTILE.encode()
    every = block_of_every_kind(0, **place)
    tokens = [replace(token, emitted_bytes=content, proposed_bytes=content) for token in every]
    completion = prompt(0, **place, prompt_text=HOSTILE * 10_000, completion_text=HOSTILE)
    write(tmp_path / "runs" / "a<b>", [*tokens, completion])
    address = serve(tmp_path / "runs")
    for name in READY:
        page.goto(f"{address}/{name}")
        page.wait_for_selector(READY[name])
    page.goto(f"{address}/sql?recipe=rejected-tokens")
    page.wait_for_selector("#rows tbody tr")
    assert "<script>window.hacked" in page.inner_text("#rows")
    page.goto(f"{address}/text")
    page.wait_for_selector(".tokens .t")
    page.hover(".tokens .t >> nth=0")
    shown = page.inner_text(".tokens .t >> nth=0")
    assert "<script>window.hacked = 1</script>" in shown
    assert "⟨U+202E⟩abc⟨U+001B⟩[31m" in shown
    assert len(page.inner_text(".prompt")) < 25_000
    assert page.evaluate("typeof window.hacked") == "undefined"
    assert page.evaluate("document.querySelectorAll('main script, main img').length") == 0


@pytest.mark.slow
def test_the_ngram_page_has_sizes_hits_and_entries_that_pay(address: str, page: Any):
    page.goto(f"{address}/ngrams?run=learned")
    values = cards(page)
    assert (values["entries at the last version"], values["inserted"], values["evicted"]) == ("12", "15", "3")
    assert (values["hits proposed"], values["hits accepted"], values["acceptance of hits"]) == ("60", "60", "100.0%")
    page.wait_for_selector("#chart .scatterlayer .trace")
    assert read_table(page, "#paying") == [['" check"', "#8#9", "60", "100.0%", "120"]]
    assert [row[:2] for row in read_table(page, "#lengths-table")] == [["1", "120"], ["2", "60"]]
    assert "60 of 120 accepted tokens of the drafter model came from an n-gram (50.0%)" in page.inner_text("#story")


def compared_rows(page: Any) -> dict[str, list[str]]:
    """Rows of two versions by title, including the details."""
    return {row[0]: row[1:] for row in [*read_table(page, "#compared"), *read_table(page, "#compared-details")]}


@pytest.mark.slow
def test_two_versions_are_shown_side_by_side(address: str, page: Any):
    page.goto(f"{address}/versions?run=learned")
    page.click("text=Details of both")
    rows = compared_rows(page)
    assert rows["in service: acceptance"] == ["0.500 (0.412 to 0.588)", "0.250 (0.142 to 0.402)", "-0.250"]
    assert rows["probe: acceptance, greedy"] == ["–", "–", ""]
    page.select_option("[name=a]", '["learned",2]')
    page.select_option("[name=b]", '["learned",3]')
    assert compared_rows(page)["in service: prompts"] == ["17", "10", "-7"]
    page.select_option("[name=a]", '["learned",0]')
    rows = compared_rows(page)
    assert rows["in service: prompts"] == ["30", "10", "-20"]
    assert rows["n-grams in the cache"] == ["0", "12", "+12"]
    assert rows["parent"] == ["–", "2", ""]
    assert [[row[0], row[6]] for row in read_table(page, "#all")] == [["0", "–"], ["1", "0"], ["2", "1"], ["3", "2"]]


def test_a_query_and_a_recipe_are_answered(address: str, page: Any):
    page.goto(f"{address}/sql?run=learned&run=baseline")
    page.focus("#query")
    page.keyboard.press("Control+Enter")
    assert [row[:3] for row in read_table(page, "#rows")][:2] == [
        ["baseline", "docs", "30"],
        ["baseline", "code", "30"],
    ]
    page.select_option("#recipe", "drifts")
    wait_until(page, "document.querySelector('#rows th:nth-child(3)')?.textContent === 'target'")
    assert "changed_at" in texts(page, "#rows th")
    with page.expect_download() as download:
        page.click("#csv")
    assert "learned,33,big,code" in Path(download.value.path()).read_text()


@pytest.mark.slow
def test_a_page_follows_a_run_that_continues(serve: Serve, tmp_path: Path, page: Any):
    with RunLog(tmp_path / "runs" / "a") as log:
        append(log, stream(20), commit=True)
        page.goto(f"{serve(tmp_path / 'runs')}/stream")
        assert cards(page)["prompts"] == "20"
        assert re.fullmatch(r"running, last commit \d+ s ago", page.inner_text("#state"))
        assert page.locator("#state.live").count() == 1
        append(log, stream(60, first=20), commit=True)
        wait_until(page, "document.querySelector('#totals .card b').textContent === '60'")
        assert page.evaluate("document.getElementById('chart').data.find(trace => trace.yaxis === 'y').x.length") == 12
        assert make_drifted().description in page.inner_text("#events")
    wait_until(page, "document.getElementById('state').textContent === 'finished'")
    assert [url for url in page.urls if url.endswith("/stream")] == page.urls[:1], "the page was not loaded again"


@pytest.mark.slow
def test_a_folder_without_runs_waits_for_one(serve: Serve, tmp_path: Path, page: Any):
    (tmp_path / "runs").mkdir()
    address = serve(tmp_path / "runs")
    page.goto(address)
    assert "No runs yet" in page.inner_text("main")
    page.goto(f"{address}/stream")
    assert "No runs yet" in page.inner_text("main")
    write(tmp_path / "runs" / "a", stream(20))
    page.wait_for_selector("#totals .card b")
    assert cards(page)["prompts"] == "20"


def test_the_candidates_of_a_tree_are_listed_and_can_be_hidden(serve: Serve, tmp_path: Path, page: Any):
    tree = make_tree(NODES, [0.4, 0.6], proposed_bytes=HOSTILE.encode())
    write(tmp_path / "runs" / "a", [*tree, prompt(0)])
    page.goto(f"{serve(tmp_path / 'runs')}/text?offset=0")
    page.wait_for_selector(".tokens .tree")
    shown = page.eval_on_selector_all(".tokens .t", "found => found.map(token => token.className)")
    assert shown == ["t accepted memory opens", "t accepted memory", "t bonus", "t tree"]
    page.hover(".tokens .tree")
    detail = page.inner_text("#detail").splitlines()
    assert detail[0] == "Tree of 4 candidates (memory), 2 accepted"
    assert "<script>window.hacked" in detail[2]
    assert page.evaluate("typeof window.hacked") == "undefined"
    page.uncheck("#show-trees")
    assert page.locator(".tokens .tree").is_hidden()
    assert texts(page, ".legend .accepted") == ["model", "n-gram", "own text", "memory"]


@pytest.mark.slow
def test_a_run_without_rows_and_one_without_drafts(serve: Serve, tmp_path: Path, page: Any):
    write(tmp_path / "runs" / "empty", [])
    plain = [prompt(offset, judged=0, accepted=0, drafted=0, blocks=5) for offset in range(9)]
    write(tmp_path / "runs" / "plain", plain)
    address = serve(tmp_path / "runs")
    for name in READY:
        page.goto(f"{address}/{name}?run=empty&run=plain")
        page.wait_for_selector(READY[name])
        page.wait_for_selector("#state:not(:empty)", state="attached")
        assert page.locator("#problem").is_hidden()
    page.goto(f"{address}/stream?run=plain&run=empty")
    assert cards(page)["acceptance"] == "–"
    assert cards(page)["tokens / forward"] == "1.00"


@pytest.mark.slow
def test_an_unreachable_server_is_reported(runs: Path, page: Any):
    with serve_dashboards(runs) as address:
        page.goto(f"{address}/stream?run=learned")
        page.wait_for_selector("#totals .card b")
    page.wait_for_selector("#problem:not([hidden])")
    assert "The server does not answer" in page.inner_text("#problem")
    page.console_lines.clear()


@pytest.mark.slow
def test_the_same_prompt_of_two_runs_is_shown_side_by_side(serve: Serve, tmp_path: Path, page: Any):
    write(tmp_path / "runs" / "one", [*block_of_every_kind(0), prompt(0)])
    write(tmp_path / "runs" / "two", [*block_of_every_kind(0), prompt(0), prompt(1)])
    other = [replace(event, prompt_id="another") if hasattr(event, "prompt_id") else event for event in stream(1)]
    write(tmp_path / "runs" / "other", other)
    address = serve(tmp_path / "runs")
    page.goto(f"{address}/text?run=one&run=two&offset=0")
    page.wait_for_selector("#completion .rival .tokens .t")
    assert texts(page, "#completion .of") == ["one", "two"]
    own, rival = (page.locator(f"#completion .{part} .tokens").bounding_box() for part in ("own", "rival"))
    assert own["x"] + own["width"] <= rival["x"]
    assert own["y"] == rival["y"]
    page.set_viewport_size({"width": 390, "height": 844})
    own, rival = (page.locator(f"#completion .{part} .tokens").bounding_box() for part in ("own", "rival"))
    assert (own["x"], own["y"] < rival["y"]) == (rival["x"], True)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.goto(f"{address}/text?run=one&run=other&offset=0")
    page.wait_for_selector("#completion .rival .note")
    assert texts(page, "#completion .rival") == ["other\n\nThis run has another prompt here, or none."]
    assert page.locator("#completion .own .tokens .t").count() > 0
