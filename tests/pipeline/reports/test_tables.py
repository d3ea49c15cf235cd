"""Tables as values: the same cells in a terminal and as Markdown."""

from rich.console import Console

from pipeline.reports.tables import Table

HEADS, ROWS = ("arm", "tokens/s"), (("plain", "31.5"), ("a|b", "2.0"))


def test_markdown_has_a_rule_that_puts_numbers_to_the_right() -> None:
    lines = ["| arm | tokens/s |", "| --- | ---: |", "| plain | 31.5 |", "| a\\|b | 2.0 |"]
    assert Table(HEADS, ROWS).markdown().splitlines() == lines


def test_a_terminal_shows_the_title_and_puts_numbers_to_the_right() -> None:
    console = Console(width=40)
    with console.capture() as print_table:
        console.print(Table(HEADS, ROWS, "speed of arms").rich())
    lines = [line.rstrip() for line in print_table.get().splitlines() if line.strip()]
    assert lines[0] == "speed of arms"
    assert [line.split() for line in lines if line.split()[0] in ("plain", "a|b")] == [list(row) for row in ROWS]
    assert {len(line) for line in lines if line.split()[0] in ("arm", "plain", "a|b")} == {len(lines[1])}


def test_long_cells_are_folded_or_cut() -> None:
    def print_table(*, fold: bool) -> str:
        console = Console(width=24)
        with console.capture() as text:
            console.print(Table(("a", "b"), [("x" * 40, "1")]).rich(fold=fold))
        return text.get()

    assert print_table(fold=True).count("x") == 40
    assert print_table(fold=False).count("x") < 40
