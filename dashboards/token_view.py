"""Writes some completions token by token to one HTML file: `python -m dashboards.token_view RUN tokens.html`.

The file shows the first prompt, those around each drift, and the last. It needs no script and no other host.
"""

from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from dashboards.plots import run_command
from dashboards.web.queries.tokens import Completion, read_completion
from store.query.log_reader import LogReader

HERE = Path(__file__).parent / "web"
PROMPTS = 12  # prompts on the page, by default

_BOUNDS = 'SELECT min("offset") AS first, max("offset") AS last FROM prompts'
_DRIFTS = "SELECT \"offset\", changed_at FROM drifts WHERE action IN ('reset', 'recall') ORDER BY seq"
_NEAR = """
    SELECT wanted, {choice}("offset") AS "offset" FROM prompts, unnest({wanted}::BIGINT[]) AS of(wanted)
    WHERE "offset" {comparison} wanted GROUP BY wanted ORDER BY wanted
"""


def choose_offsets(log: LogReader, prompts: int = PROMPTS) -> list[int]:
    """Offsets of up to `prompts` completed prompts in stream order: the first, the last, and those around each drift.

    For a drift these are the last prompt before the change, the prompt with the alarm, and the one after it.
    """
    (bounds,) = log.select(_BOUNDS).to_pylist()
    if bounds["first"] is None or prompts < 1:
        return []
    drifts = log.select(_DRIFTS).to_pylist()
    before = _find_nearest(log, "max", "<", [drift["changed_at"] for drift in drifts])
    after = _find_nearest(log, "min", ">", [drift["offset"] for drift in drifts])
    places = [(before.get(drift["changed_at"]), drift["offset"], after.get(drift["offset"])) for drift in drifts]
    wanted = dict.fromkeys([bounds["first"], bounds["last"], *(place for three in places for place in three)])
    known = _find_nearest(log, "max", "=", [offset for offset in wanted if offset is not None])
    return sorted([offset for offset in wanted if offset in known][:prompts])


def _find_nearest(log: LogReader, choice: str, comparison: str, wanted: Iterable[int]) -> dict[int, int]:
    """Nearest completed prompt on one side of each wanted offset, by wanted offset."""
    query = _NEAR.format(choice=choice, comparison=comparison, wanted=list(dict.fromkeys(wanted)))
    return {row["wanted"]: row["offset"] for row in log.select(query).to_pylist()}


def render(completions: Sequence[Completion], title: str) -> str:
    """Render one HTML page. All text from the log is escaped."""
    environment = Environment(loader=FileSystemLoader(HERE / "templates"), autoescape=True)
    style = (HERE / "static" / "tokens.css").read_text(encoding="utf-8")
    page = environment.get_template("token_view.html")
    return page.render(completions=completions, title=title, style=style, each_focusable=True)


def write(run_folder: Path, file: Path, prompts: int) -> None:
    """Write the page of a run with up to `prompts` completions."""
    with LogReader([run_folder]) as log:
        completions = [read_completion(log, offset) for offset in choose_offsets(log, prompts)]
    file.write_text(render(completions, run_folder.resolve().name), encoding="utf-8")


PARSER = ArgumentParser(description="Write some completions of a run, token by token, as one HTML file.")
PARSER.add_argument("run", type=Path, help="folder of the run")
PARSER.add_argument("file", type=Path, help="HTML file to write")
PARSER.add_argument("--prompts", type=int, default=PROMPTS, help="maximum number of completions (default %(default)s)")

if __name__ == "__main__":
    run_command(PARSER, lambda args: write(args.run, args.file, args.prompts))
