"""Tables as values: results of the measuring commands, for a terminal or as Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table as RichTable


@dataclass(frozen=True)
class Table:
    """A heading per column and texts per row; the first column is aligned to the left, the others to the right."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    notes: Sequence[str] = ()  # sentences below the table

    def markdown(self) -> str:
        """Format the heads and rows as Markdown.

        >>> print(Table(("arm", "tokens/s"), [("plain", "31.5")]).markdown())
        | arm | tokens/s |
        | --- | ---: |
        | plain | 31.5 |
        """
        rule = ["---", *["---:"] * (len(self.heads) - 1)]
        return "\n".join(map(format_row, (self.heads, rule, *self.rows)))

    def rich(self, *, fold: bool = True, **style: Any) -> "RichTable":
        """Make a table of rich, without the notes. Long cells are folded, or else truncated; `style` goes to rich's
        table.
        """
        from rich import box
        from rich.table import Table as RichTable

        titled = {"title": self.title or None, "title_justify": "left", "title_style": "bold"}
        table = RichTable(**{**titled, "box": box.SIMPLE_HEAD, "show_edge": False, **style})
        for number, head in enumerate(self.heads):
            table.add_column(head, justify="right" if number else "left", overflow="fold" if fold else "ellipsis")
        for row in self.rows:
            table.add_row(*row)
        return table


def format_row(cells: Sequence[str]) -> str:
    """Join cells with pipes to a row of Markdown."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
