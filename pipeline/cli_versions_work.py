"""`omnidraft versions compare` and `export`: what needs the models themselves. Torch only when one really starts."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli_options import option, parsed
from pipeline.cli_registry import MODEL, NameOption, Number, RunsOption, UriOption, print_table, store_of
from store.errors import UsageError

if TYPE_CHECKING:
    from pipeline.compare import Comparison

LIMIT = 64  # prompts of a probe that is named


def compare(
    first: Annotated[
        str,
        typer.Argument(metavar="A", help="A number, an alias, a version's folder, or `floor`: that of the other side."),
    ],
    second: Annotated[str, typer.Argument(metavar="B", help="As A.")],
    probe: Annotated[
        str | None,
        typer.Option(help="A prompt source, as of `replay`. [default: the fixed probe]", show_default=False),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help=f"Most prompts. [default: {LIMIT}]", min=1, show_default=False)
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Another target than the versions were made for.", show_default=False)
    ] = None,
    as_served: Annotated[
        bool, typer.Option("--as-served", help="With each version's head and with lookup, as `replay` drafts.")
    ] = False,
    temperature: Annotated[float | None, option("sampling.temperature")] = None,
    max_new_tokens: Annotated[int | None, option("sampling.max_new_tokens")] = None,
    max_draft: Annotated[int | None, option("draft.max_draft")] = None,
    seed: Annotated[int | None, option("seed")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other setting, such as dtype=bfloat16; may be repeated.", metavar="KEY=VALUE"),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures there, prompt by prompt.", show_default=False)
    ] = None,
    no_publish: Annotated[bool, typer.Option("--no-publish", help="Write nothing to MLflow.")] = False,
    mlflow_uri: UriOption = None,
    runs: RunsOption = Path("runs"),
    name: NameOption = MODEL,
) -> None:
    """Replay two versions on the same prompts with the same draws, and print paired differences.

    Nothing learns, and every draft has --max-draft pieces, so that the drafters are compared and nothing else.
    """
    from pipeline.compare import compare as run
    from pipeline.compare import compared, read_prompts, require_free
    from pipeline.compare_build import open_sides
    from pipeline.config import Config

    _require_writable(json_file)
    chosen = {"temperature": temperature, "max_new_tokens": max_new_tokens}
    overrides: dict[str, object] = {f"sampling.{key}": value for key, value in chosen.items()}
    overrides |= {"draft.max_draft": max_draft, "seed": seed, "source.limit": limit}
    given = {key: value for key, value in overrides.items() if value is not None}
    changed = parsed(settings or [])
    require_free(changed, as_served=as_served)
    config, uri = Config().with_overrides({"source.limit": LIMIT} | changed | given), store_of(mlflow_uri, runs)
    prompts = read_prompts(config, probe)
    with tempfile.TemporaryDirectory() as scratch:
        sides = open_sides((first, second), uri, name, Path(scratch) / "versions")
        config = compared(config, target=target, sides=sides, as_served=as_served, probe=probe)
        with _progress(len(prompts)) as (progress, notice):
            done = run(config, sides, prompts, uri, Path(scratch), progress, notice)
        _print(done)
        _keep(done, json_file, None if no_publish else uri, name, Path(scratch))


def _require_writable(json_file: Path | None) -> None:
    if json_file is None:
        return
    if json_file.is_dir() or not json_file.absolute().parent.is_dir():
        raise UsageError(f"--json must name a file in a folder that exists, got '{json_file}'")
    if not os.access(json_file if json_file.exists() else json_file.absolute().parent, os.W_OK):
        raise UsageError(f"--json must name a file that can be written, got '{json_file}'")


@contextmanager
def _progress(prompts: int) -> Iterator[tuple[Callable[[int], None], Callable[[str], None]]]:
    """A bar on standard error while it runs, of which nothing stays, and a way to print lines above it."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("prompts", total=prompts)
        yield (
            lambda done: bar.update(task, completed=done),
            lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True),
        )


def _print(done: "Comparison") -> None:
    from pipeline.compare_report import heads, rows, sentences

    print_table(heads(done), rows(done))
    for sentence in sentences(done):
        print(sentence)


def _keep(done: "Comparison", json_file: Path | None, uri: str | None, name: str, scratch: Path) -> None:
    """The figures as a file, if one is named, and in MLflow, if both versions are there."""
    text = json.dumps(done.to_json(), indent=2, allow_nan=False) + "\n"
    if json_file is not None:
        try:
            json_file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"'{json_file}' could not be written: {error.strerror}; name another with --json"
            ) from error
    first, second = done.numbers
    if uri is not None and first is not None and second is not None:
        from store.version_shelf import record_comparison

        (scratch / "comparison.json").write_text(text, encoding="utf-8")
        run = record_comparison(uri, name, first, second, done.flat(), [scratch / "comparison.json"])
        print(f"MLflow: run {run}")


def export(
    number: Number,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.", show_default=False)],
    mlflow_uri: UriOption = None,
    runs: RunsOption = Path("runs"),
    name: NameOption = MODEL,
) -> None:
    """Write a version as a plain Hugging Face drafter that `transformers`, vLLM and llama.cpp load, with a card."""
    from pipeline.export import export_version

    export_version(store_of(mlflow_uri, runs), name, number, folder)
    print(f"version {number} is in {folder}; {folder / 'README.md'} says how to use it")
