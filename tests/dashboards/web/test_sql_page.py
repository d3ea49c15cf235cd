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


def test_rows_are_counted_by_a_column_and_lead_to_what_they_count(address: str, page: Any):
    page.goto(f"{address}/sql")
    page.fill("#query", """SELECT "offset", 'it''s ' || "offset" % 3 AS "a ""name" FROM prompts; """)
    page.click("#go")
    page.wait_for_selector("#took:has-text('20 rows')")
    first = page.locator("#rows tbody tr").first.locator("a")
    assert first.get_attribute("href") == f"/text?run=a&offset={first.inner_text()}", (
        "numbers of prompts lead to a text"
    )
    page.select_option("#count-by", 'a "name')
    page.wait_for_selector("#took:has-text('3 rows')")
    counts = [row.split("\t") for row in page.locator("#rows tbody tr").all_inner_texts()]
    assert sorted(counts) == [["it's 0", "7"], ["it's 1", "7"], ["it's 2", "6"]]
    page.click('#rows a:text-is("it\'s 2")')
    page.wait_for_selector("#took:has-text('6 rows')")
    assert page.locator("#rows tbody tr").count() == 6
    assert "IS NOT DISTINCT FROM 'it''s 2'" in text(page)
