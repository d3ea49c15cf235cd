"""The editor of the SQL page: completion by keyboard, recipes as buttons, and a plot of the rows."""

from collections.abc import Iterator
from typing import Any

import pytest
from serving_runs import serve_dashboards
from stream_making import stream, write


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    runs = tmp_path_factory.mktemp("sql") / "runs"
    write(runs / "a", stream(20))
    with serve_dashboards(runs) as found:
        yield found


def names(page: Any) -> list[str]:
    """Wait for completions. Returns their names."""
    page.wait_for_selector(".cm-tooltip-autocomplete li")
    found: list[str] = page.locator(".cm-tooltip-autocomplete .cm-completionLabel").all_inner_texts()
    return found


def text(page: Any) -> str:
    """The text in the editor."""
    return "\n".join(page.locator("#query .cm-line").all_inner_texts()).strip()


def open_editor(page: Any, address: str, query: str) -> None:
    page.goto(f"{address}/sql")
    page.fill("#query", query)
    page.focus("#query")
    page.keyboard.press("Control+End")


def test_names_are_completed_by_keyboard(address: str, page: Any):
    open_editor(page, address, "SELECT ")
    page.keyboard.type("prom")
    assert names(page)[0] == "prompts"
    assert "prompt_id" in names(page)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    chosen = page.inner_text(".cm-tooltip-autocomplete [aria-selected] .cm-completionLabel")
    assert chosen == names(page)[1]
    page.keyboard.press("Enter")
    assert text(page) == f"SELECT {chosen}"
    assert page.locator(".cm-tooltip-autocomplete").count() == 0


def test_words_numbers_and_brackets_are_distinguished(address: str, page: Any):
    open_editor(page, address, "SELECT count(*)\nFROM prompts -- all")
    assert page.locator(".cm-lineNumbers .cm-gutterElement:visible").all_inner_texts() == ["1", "2"]
    colour = "one => getComputedStyle(one).color"
    colours = {
        word: page.locator(f"#query .cm-line span:text-is('{word}')").evaluate(colour)
        for word in ("SELECT", "count", "-- all")
    }
    assert len(set(colours.values())) == 3
    page.keyboard.press("Control+Home")
    for _ in "SELECT count(":
        page.keyboard.press("ArrowRight")
    assert page.locator("#query .cm-matchingBracket").all_inner_texts() == ["(", ")"]
    page.keyboard.press("Control+End")
    page.keyboard.press("Enter")
    page.keyboard.type("(")
    assert text(page).endswith("()"), "a bracket is closed"
    page.keyboard.press("Control+z")
    assert text(page).endswith("-- all")


@pytest.mark.slow
def test_columns_of_the_query_s_views_come_first_and_reserved_ones_in_quotes(address: str, page: Any):
    open_editor(page, address, "SELECT  FROM drifts d JOIN recalls USING (run)")
    for _ in range(len(" FROM drifts d JOIN recalls USING (run)")):
        page.keyboard.press("ArrowLeft")
    page.keyboard.type("rate_b")
    assert names(page)[0] == "rate_before"
    page.keyboard.press("Tab")
    page.keyboard.type(', d."of')
    assert names(page)[0] == '"offset"'
    page.keyboard.press("Tab")
    assert text(page).startswith('SELECT rate_before, d."offset" FROM')
    page.keyboard.type(", d.off")
    assert names(page)[0] == "offset"
    page.keyboard.press("Tab")
    assert text(page).startswith('SELECT rate_before, d."offset", d."offset" FROM')
    page.keyboard.type(", recalls.cand")
    assert names(page)[0] == "candidates"


@pytest.mark.slow
def test_the_list_closes_and_tab_then_leaves_the_editor(address: str, page: Any):
    open_editor(page, address, "SELECT coun")
    page.keyboard.press("Control+Space")
    assert "COUNT" in names(page)
    page.keyboard.press("Escape")
    assert page.locator(".cm-tooltip-autocomplete").count() == 0
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "go"
    assert text(page) == "SELECT coun"


@pytest.mark.slow
def test_a_name_is_chosen_by_a_click_on_a_phone(address: str, page: Any):
    page.set_viewport_size({"width": 390, "height": 844})
    open_editor(page, address, "SELECT dataset, count(*) AS prompts, sum(accepted) / sum(judged) AS acceptance, sum(")
    page.keyboard.type("emi")
    names(page)
    box = page.locator(".cm-tooltip-autocomplete").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    page.click(".cm-tooltip-autocomplete li >> nth=0")
    assert "sum(emitted" in text(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 390


@pytest.mark.slow
def test_enter_starts_a_line_and_runs_nothing_while_names_are_offered(address: str, page: Any):
    open_editor(page, address, "")
    page.keyboard.type("FROM prom")
    names(page)
    page.keyboard.press("Enter")
    page.keyboard.type("SELECT")
    assert text(page) == "FROM prom\nSELECT"
    page.fill("#query", "FROM prompts SELECT dataset LIMIT 1")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#rows tbody tr")
    assert page.inner_text("#rows tbody").strip() == "docs"


def test_a_recipe_is_a_button_and_its_rows_are_plotted(address: str, page: Any):
    page.goto(f"{address}/sql")
    page.click(".recipes button:text-is('by-position')")
    page.wait_for_selector("#rows tbody tr")
    assert page.input_value("#recipe") == "by-position"
    page.click("#plot-section summary")
    page.wait_for_selector("#plot .scatterlayer .trace")
    page.fill("#query", 'SELECT "offset", dataset, emitted, "offset" % 2 AS half FROM prompts ORDER BY 1')
    page.click("#go")
    page.wait_for_selector("#took:has-text('20 rows')")
    page.select_option("#plot-choices [name=x]", "offset")
    page.select_option("#plot-choices [name=y]", "emitted")
    page.select_option("#plot-choices [name=split]", "half")
    page.select_option("#plot-choices [name=kind]", "bars")
    drawn = "document.getElementById('plot').data.map(trace => [trace.type, trace.name, trace.x.length, trace.y[0]])"
    assert page.evaluate(drawn) == [["bar", "0", 10, 5], ["bar", "1", 10, 5]]
    page.fill("#query", "SELECT dataset FROM prompts")
    page.click("#go")
    page.wait_for_selector("#took:has-text('20 rows')")
    assert page.locator("#plot-section").is_hidden(), "there is no number to plot"
