"""`omnidraft vocab` and `omnidraft bench-translate`: two vocabularies, what they share and what translating costs."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from pipeline.bench_translate import TranslationReport
    from pipeline.config import Config
    from pipeline.vocab_report import MappedSpecial, TextCoverage, VocabularyReport

PIPE_COLUMNS = 120  # a table in a pipe is not folded to a terminal that is not there
SPECIALS_SHOWN = 16

TextOption = Annotated[
    list[str] | None,
    typer.Option(
        "--text", help="Source of text, as for `replay`; may be repeated.", metavar="SOURCE", show_default=False
    ),
]
TemplateOption = Annotated[
    str | None, typer.Option(help="Text made from a row's columns, such as '{prompt} {reference}'.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print everything as JSON instead.")]


def vocab(
    target: Annotated[str, typer.Argument(help="Tokenizer of the target: hub name, folder or builtin:NAME.")],
    drafter: Annotated[str, typer.Argument(help="Tokenizer of the drafter.")],
    texts: TextOption = None,
    template: TemplateOption = None,
    special: Annotated[
        str | None,
        typer.Option(help="Special tokens that the drafter lacks: spell or block.", show_default=False),
    ] = None,
    maps: Annotated[
        list[str] | None,
        typer.Option("--map", help="Exception for one special token.", metavar="NAME=ACTION", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show how a target's vocabulary is spelt in a drafter's pieces, and how much of a text that covers.

    Only tokenizers are loaded, no weights.
    """
    given = {"vocabulary.special": special, "vocabulary.special_names": tuple(maps) if maps else None}
    config = _configured(target, drafter, texts, {**given, "source.template": template})
    with _status("reading the tokenizers"):
        from pipeline.vocab_report import load_pair, read_prompts, report

        prompts = read_prompts(config)
        found = report(config, *load_pair(config), prompts)
    _show(found.to_json(), as_json, lambda console: _print_report(console, found))


def bench_translate(
    target: Annotated[str | None, typer.Argument(help="Tokenizer of the target.", show_default=False)] = None,
    drafter: Annotated[str | None, typer.Argument(help="Tokenizer of the drafter.", show_default=False)] = None,
    texts: TextOption = None,
    template: TemplateOption = None,
    blocks: Annotated[int, typer.Option(min=1, help="Most blocks timed per context length.")] = 400,
    as_json: JsonOption = False,
) -> None:
    """Measure what translating one block costs: by the trie, and by re-tokenising the context as in the paper.

    Without arguments: the built-in pair. Only tokenizers are loaded, no weights.
    """
    config = _configured(target, drafter, texts, {"source.template": template})
    with _status("timing blocks"):
        from pipeline.bench_translate import CHARACTERS_OF_CONTEXT, CHARACTERS_PER_BLOCK, long_text, measure
        from pipeline.vocab_report import load_pair, read_prompts

        text = long_text(read_prompts(config), CHARACTERS_PER_BLOCK * blocks + CHARACTERS_OF_CONTEXT)
        found = measure(*load_pair(config), text, blocks)
    _show(found.to_json(), as_json, lambda console: _print_costs(console, found))


def _configured(
    target: str | None, drafter: str | None, texts: list[str] | None, others: Mapping[str, object]
) -> "Config":
    from pipeline.config import Config

    given = {"targets": (target,) if target else None, "drafter": drafter, "sources": tuple(texts or ()) or None}
    return Config().with_overrides({key: value for key, value in {**others, **given}.items() if value is not None})


@contextmanager
def _status(text: str) -> Iterator[None]:
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


def _show(values: Mapping[str, Any], as_json: bool, show: Callable[["Console"], None]) -> None:
    from rich.console import Console

    if as_json:
        print(json.dumps(values, ensure_ascii=False, indent=2))
    else:
        show(Console() if sys.stdout.isatty() else Console(width=PIPE_COLUMNS))


def _table(title: str, *columns: str) -> "Table":
    """A table whose first column is text and whose others are numbers."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", overflow="fold")
    return table


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


def _classes_table(found: "VocabularyReport") -> "Table":
    """How the target's tokens are proposed: those of its vocabulary, and those of the text."""
    text = found.text.whole
    rows: list[tuple[str, int, int | None]] = [("one piece (direct map)", found.direct, text.direct)]
    rows += [(f"{band} pieces", count, text.ngrams[band]) for band, count in found.ngrams.items()]
    rows += [("unspelt", found.unspelt, text.unspelt), ("never proposed", found.silent, None)]
    table = _table("Target tokens by pieces of the drafter", "", "vocabulary", "share", "text", "share")
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


def _specials_table(specials: Sequence["MappedSpecial"]) -> "Table":
    from rich.text import Text

    table = _table("Special tokens of the target", "token", "id", "mapped by", "pieces")
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

    table = _table("Commonest n-grams of the text", "token", "pieces", "times", "share")
    table.columns[1].justify = "left"
    for ngram in text.commonest:
        pieces = Text(" ").join(Text(piece) for piece in ngram.pieces)
        table.add_row(Text(ngram.text), pieces, f"{ngram.count:,}", _share(ngram.count, text.whole.tokens))
    return table


def _print_costs(console: "Console", found: "TranslationReport") -> None:
    from pipeline.bench_translate import DRAFTED, TARGET_STEP

    console.print(f"target  {found.target}, {found.target_size:,} tokens", markup=False, highlight=False)
    console.print(f"drafter {found.drafter}, {found.drafter_size:,} tokens\n", markup=False, highlight=False)
    step = f"share of {TARGET_STEP * 1e3:.0f} ms"
    table = _table(
        f"Translating one block of {DRAFTED} pieces, microseconds", "way", "context", "blocks", "median", "95 %", step
    )
    for cost in found.costs:
        figures = f"{cost.median * 1e6:,.0f}", f"{cost.high * 1e6:,.0f}", f"{cost.share:.2%}"
        table.add_row(cost.way, f"{cost.context:,}", f"{cost.blocks:,}", *figures)
    console.print(table)
    console.print(
        f"\nFor comparison, verification's sums over {found.target_size:,} probabilities: {found.levels * 1e6:,.0f} "
        "microseconds per block.",
        highlight=False,
    )
