"""Some completions token by token, in one file: `python -m dashboards.token_view RUN tokens.html`.

The first prompt, those around each drift, and the last. The file needs nothing else: no script, no other host.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from dashboards.tokens import Completion, read_completion
from store.errors import OmnidraftError
from store.queries import LogReader

HERE = Path(__file__).parent
PROMPTS = 12

_BOUNDS = 'SELECT min("offset") AS first, max("offset") AS last FROM prompts'
_DRIFTS = "SELECT \"offset\", changed_at FROM drifts WHERE action IN ('reset', 'recall') ORDER BY seq"
_NEAR = """
    SELECT wanted, {choice}("offset") AS "offset" FROM prompts, unnest({wanted}::BIGINT[]) AS of(wanted)
    WHERE "offset" {comparison} wanted GROUP BY wanted ORDER BY wanted
"""


def chosen_offsets(log: LogReader, prompts: int = PROMPTS) -> list[int]:
    """Offsets of completed prompts in stream order: first, last, and around each drift, as many as `prompts` allow.

    A drift brings the last prompt before the change, the prompt with which it was noticed, and the one behind that.
    """
    (bounds,) = log.select(_BOUNDS).to_pylist()
    if bounds["first"] is None or prompts < 1:
        return []
    drifts = log.select(_DRIFTS).to_pylist()
    before = _near(log, "max", "<", [drift["changed_at"] for drift in drifts])
    behind = _near(log, "min", ">", [drift["offset"] for drift in drifts])
    places = [(before.get(drift["changed_at"]), drift["offset"], behind.get(drift["offset"])) for drift in drifts]
    wanted = dict.fromkeys([bounds["first"], bounds["last"], *(place for three in places for place in three)])
    known = _near(log, "max", "=", [offset for offset in wanted if offset is not None])
    return sorted([offset for offset in wanted if offset in known][:prompts])


def _near(log: LogReader, choice: str, comparison: str, wanted: Iterable[int]) -> dict[int, int]:
    """The nearest completed prompt on one side of each wanted offset."""
    query = _NEAR.format(choice=choice, comparison=comparison, wanted=list(dict.fromkeys(wanted)))
    return {row["wanted"]: row["offset"] for row in log.select(query).to_pylist()}


def render(completions: Sequence[Completion], title: str) -> str:
    """One HTML page. All text from the log is escaped."""
    environment = Environment(loader=FileSystemLoader(HERE / "templates"), autoescape=True)
    style = (HERE / "static" / "tokens.css").read_text(encoding="utf-8")
    page = environment.get_template("token_view.html")
    return page.render(completions=completions, title=title, style=style, each_focusable=True)


def main() -> None:
    """Read the arguments and write the file."""
    parser = argparse.ArgumentParser(description="Write some completions of a run, token by token, as one HTML file.")
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("file", type=Path, help="HTML file to write")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="at most as many (default %(default)s)")
    arguments = parser.parse_args()
    try:
        with LogReader([arguments.run]) as log:
            completions = [read_completion(log, offset) for offset in chosen_offsets(log, arguments.prompts)]
        arguments.file.write_text(render(completions, arguments.run.resolve().name), encoding="utf-8")
    except (OmnidraftError, OSError) as error:
        sys.exit(f"omnidraft: {error}")


if __name__ == "__main__":
    main()
