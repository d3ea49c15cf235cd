"""`omnidraft memory`: what a run remembers of its targets' texts, and how it forgets."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli.runs import newest_run
from pipeline.config.cli_options import PrintJsonOption, RunsOption
from pipeline.reports.terminal import print_table, status
from store.errors import UsageError

if TYPE_CHECKING:
    from pipeline.run.stored_memory import StoredMemory
    from stages.memory.ngram_table import NgramTable
    from stages.vocabulary.tokenizer_view import Vocabulary

memory = typer.Typer(no_args_is_help=True, help="Show what a run remembers, or make it forget a text.")

_LEARNED_HELP = (
    "Take it out of what the drafter learned in closed form (learn.method = least-squares), not out of the memory: "
    "its weights become those of a run that never saw it. Only the newest 256 prompts are found."
)
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="One run's folder.", show_default=False)]


@memory.command()
def show(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="One run's folder. [default: the newest run]", show_default=False),
    ] = None,
    top: Annotated[int, typer.Option(min=0, help="Number of the most used contexts to show.")] = 10,
    tenant: Annotated[
        str, typer.Option(metavar="KEY", help="API key of a server's client, whose contexts are shown.")
    ] = "",
    runs: RunsOption = Path("runs"),
    as_json: PrintJsonOption = False,
) -> None:
    """Show the size of each target's memory, and its most used contexts with their continuations.

    The memory is read from the run's checkpoint; of a finished run, from its newest versions. Contexts are stored as
    hashes, so continuations are shown without them. Those of a server's clients are shown for one API key at a time.
    """
    from pipeline.run.stored_memory import read_memories
    from stages.memory.ngram_table import scope_of

    run = run or newest_run(runs)
    found = read_memories(run)
    with status("loading tokenizers"):
        described = [_describe(one, _vocabulary(run, one.target), top, scope_of(tenant)) for one in found]
    if as_json:
        print(json.dumps(described, indent=2))
        return
    for one in described:
        print(
            f"{one['target']}: {one['contexts']:,} contexts in {one['bytes']:,} bytes, "
            f"of {one['texts']:,} texts ({one['file']})"
        )
        rows = [[f"{line['count']:,}", " | ".join(map(repr, line["continuations"]))] for line in one["commonest"]]
        print_table(("seen", "followed by"), rows)


@memory.command()
def forget(
    run: RunArgument,
    prompt: Annotated[int | None, typer.Option(metavar="OFFSET", help="Stream offset of a completed prompt.")] = None,
    tenant: Annotated[str | None, typer.Option(metavar="KEY", help="API key of a server's client.")] = None,
    learned: Annotated[bool, typer.Option("--learned", help=_LEARNED_HELP)] = False,
    as_json: PrintJsonOption = False,
) -> None:
    """Forget what the target emitted for one prompt, or for all requests of one client, in a run's checkpoint.

    The run must not be running. Its log and its versions are not changed.
    """
    if (prompt is None) == (tenant is None):
        raise UsageError("either --prompt or --tenant must be given; name one of them")
    from stages.memory.ngram_table import scope_of

    scope = None if tenant is None else scope_of(tenant)
    if learned:
        from pipeline.learner_service.stored_learning import unlearn

        with status("loading models"):
            found = unlearn(run, lambda one: one.offset == prompt if scope is None else one.scope == scope)
        print(json.dumps({"prompts": found}) if as_json else f"unlearned {found:,} prompts")
        return
    contexts = _forget(run, prompt, scope)
    print(json.dumps({"contexts": contexts}) if as_json else f"forgot {contexts:,} contexts")


def _forget(run: Path, offset: int | None, scope: int | None) -> int:
    """Forget the text of a prompt or all texts of a scope, whichever is given; return the number of contexts."""
    from pipeline.run.stored_memory import edit_memories, read_logged_text

    text, forgotten = None, 0
    if offset is not None:
        with status("loading models"):
            text = read_logged_text(run, offset)

    def edit(target: str, table: "NgramTable") -> None:
        nonlocal forgotten
        before = len(table)
        if scope is not None:
            table.forget_scope(scope)
        elif text and target == text.target:
            table.forget(text.tokens, text.prompt_length)
        forgotten += before - len(table)

    edit_memories(run, edit)
    return forgotten


def _describe(found: "StoredMemory", vocabulary: "Vocabulary", top: int, scope: int) -> dict[str, Any]:
    table = found.table
    commonest = [
        {"count": known.total, "continuations": [vocabulary.decode([token]) for token in known.tokens]}
        for _, known in table.commonest(top, scope)
    ]
    sizes = {"contexts": len(table), "bytes": table.bytes, "texts": table.sizes[1]}
    return {"target": found.target, **sizes, "file": found.file, "commonest": commonest}


def _vocabulary(run: Path, target: str) -> "Vocabulary":
    from pipeline.assembly.models import load_vocabulary
    from pipeline.config.settings import load

    return load_vocabulary(target, load(run / "config.json").publish, run)
