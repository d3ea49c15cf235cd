"""The command `omnidraft study-heads`: would several pieces per drafter pass pay?"""

import json
import logging
import time
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.bench.study import PIPE_COLUMNS, USUAL, typed_command
from pipeline.config.cli_options import (
    MOST_TOKENS,
    MarkdownOption,
    PrintJsonOption,
    argument,
    option,
    overrides_of,
    parse_settings,
    set_option,
)
from pipeline.reports.terminal import make_console, require_file, stderr_console
from store.errors import UsageError

if TYPE_CHECKING:
    from pipeline.reports.tables import Table
    from pipeline.study.parallel_heads.blocks import BlockCosts

LOG = logging.getLogger("omnidraft.study")
# Copies and the memory only make recording faster: at temperature 0 the texts are the same.
RECORDING = {**USUAL, "sampling.max_new_tokens": 64, "draft.sources": ("own", "memory")}
# SmolLM2-135M in four bits and the drafter of 4M parameters (docs/experiments.md). In the last one a head saves the
# bare pass only: what surrounds a drafted piece costs as much for a piece of a head.
COSTS = ("2.4,0.2,0.3,0.05", "2.4,0.7,0.3,0.05", "2.4,0.2,0.47,0.35")
_COSTS_HELP = (
    "Milliseconds of a target pass over one token, of each further token, of a drafter pass, and of a piece from a "
    f"head, with commas between; may be repeated. [default: {' and '.join(COSTS)}]"
)


def study_heads(
    sources: Annotated[list[str] | None, argument("sources", "Prompt sources, as for `replay`.", "[SOURCE]...")] = None,
    target: Annotated[str | None, typer.Option(help="Target model.")] = None,
    drafter: Annotated[str | None, option("drafter")] = None,
    learned: Annotated[int, typer.Option("--learn-from", min=5, help="Prompts that the heads are fitted on.")] = 60,
    held_out: Annotated[int, typer.Option("--measure", min=1, help="Prompts after them that are measured.")] = 30,
    max_new_tokens: Annotated[int | None, option("sampling.max_new_tokens", f"{MOST_TOKENS} [default: 64]")] = None,
    where: Annotated[list[str] | None, option("source.where")] = None,
    costs: Annotated[list[str] | None, typer.Option(metavar="TARGET,TOKEN,DRAFTER,HEAD", help=_COSTS_HELP)] = None,
    settings: Annotated[list[str] | None, set_option("Any other setting; may be repeated.")] = None,
    threads: Annotated[int | None, option("threads", "CPU threads. [default: 1]", min=1)] = None,
    markdown: MarkdownOption = None,
    as_json: PrintJsonOption = False,
) -> None:
    """Compare drafts of one drafter pass per piece with heads that propose several pieces after one pass.

    The target completes the prompts at temperature 0. Heads for the pieces at offsets 1 to 3 are fitted by least
    squares on the first completions, from the drafter's hidden state, the previous piece and the target's state. On the
    others every way of drafting is judged at the same places. Speeds are computed from the counts and the given costs.
    """
    require_file("--markdown", markdown)
    overrides = RECORDING | parse_settings(settings) | overrides_of(study_heads, locals())
    overrides |= {"targets": (target,)} if target else {}
    tables = _compare(overrides, learned, held_out, _read_costs(costs))
    if as_json:
        print(json.dumps([{"title": one.title, "heads": one.heads, "rows": one.rows} for one in tables], indent=2))
    else:
        _print(tables)
    if markdown is not None:
        markdown.write_text(_format(tables), encoding="utf-8")


def _read_costs(entries: list[str] | None) -> tuple["BlockCosts", ...]:
    """Raises `UsageError` if an entry is not four numbers above zero."""
    from pipeline.study.parallel_heads.blocks import BlockCosts

    found = []
    for entry in entries or COSTS:
        try:
            target, token, drafter, head = map(float, entry.split(","))
        except ValueError:
            target = token = drafter = head = 0.0
        if not min(target, token, drafter, head) > 0:
            raise UsageError(f"--costs must be four numbers above 0 with commas between, got '{entry}'")
        found.append(BlockCosts(target, token, drafter, head))
    return tuple(found)


def _compare(
    overrides: dict[str, object], learned: int, held_out: int, costs: tuple["BlockCosts", ...]
) -> list["Table"]:
    """Record the texts, fit and judge. Raises `UsageError` if there are too few prompts."""
    from pipeline.assembly.stages import draftable
    from pipeline.config.settings import Config
    from pipeline.study.parallel_heads.compare import accuracy_table, compare_ways, speed_table
    from pipeline.study.parallel_heads.fitting import DrafterKnowledge
    from pipeline.study.parallel_heads.places import Places
    from pipeline.study.parallel_heads.recording import record_texts

    config = Config().with_overrides({**overrides, "source.limit": learned + held_out})
    with stderr_console().status("the target completes the prompts"):
        models, texts = record_texts(config)
    if len(texts) < learned + held_out:
        raise UsageError(f"the sources must have {learned + held_out} usable prompts, got {len(texts)}")
    drafter = models.drafter
    knowledge = DrafterKnowledge(drafter, drafter.mask_without(draftable(config.draft, models.pair)))
    first, last = (Places.from_texts(drafter, part) for part in (texts[:learned], texts[learned:]))
    with stderr_console().status("heads are fitted"):
        drafts = list(compare_ways(knowledge, first, last))
    LOG.info("%d places to learn from, %d tokens measured", len(first.before_P), int(last.first_P.sum()))
    return [accuracy_table(drafts), speed_table(drafts, last, costs)]


def _print(tables: list["Table"]) -> None:
    from pipeline.study.report import as_rich

    console = make_console(PIPE_COLUMNS)
    for table in tables:
        console.print(as_rich(table))


def _format(tables: list["Table"]) -> str:
    from pipeline.study.report import as_markdown

    parts = [f"# Parallel heads, {time.strftime('%Y-%m-%d')}", f"    {typed_command()}", *map(as_markdown, tables)]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"
