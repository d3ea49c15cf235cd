"""Writes some completions token by token to one HTML file: `python -m dashboards.token_view RUN tokens.html`.

The file shows the first prompt, those around each drift, and the last. It needs no script and no other host.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from dashboards.commands import run_command
from dashboards.web.queries.tokens import Completion, read_completion
from store.query.log_reader import LogReader

HERE = Path(__file__).parent / "web"
PROMPTS = 12  # prompts on the page, by default

# Of each drift: the last prompt before the change, the prompt with the alarm, and the one after it.
_CHOSEN = """
    WITH wanted AS (
        SELECT -1 AS seq, 0 AS place, min("offset") AS "offset" FROM prompts
        UNION ALL SELECT -1, 1, max("offset") FROM prompts
        UNION ALL SELECT seq, unnest([0, 1, 2]), unnest([
            (SELECT max("offset") FROM prompts WHERE "offset" < changed_at), "offset",
            (SELECT min("offset") FROM prompts WHERE prompts."offset" > drifts."offset")
        ]) FROM drifts WHERE action IN ('reset', 'recall')
    ),
    chosen AS (
        SELECT "offset" FROM wanted SEMI JOIN prompts USING ("offset")
        GROUP BY "offset" ORDER BY min((seq, place)) LIMIT {prompts}
    )
    SELECT "offset" FROM chosen ORDER BY "offset"
"""


def choose_offsets(log: LogReader, prompts: int = PROMPTS) -> list[int]:
    """Offsets of up to `prompts` completed prompts, in stream order: the first, the last, those around each drift."""
    return [row["offset"] for row in log.select(_CHOSEN.format(prompts=max(0, prompts))).to_pylist()]


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
