"""A benchmark's report as tables: for the terminal, and as Markdown for the project's documents."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from pipeline.bench_figures import Figures, Mean, Spread
from pipeline.bench_report import Report

PIPE_COLUMNS = 180  # wide enough that a table in a pipe is not folded
NOT_MEASURED = "–"
RECORDS = ("log", "log_beside", "versions", "drift")


@dataclass(frozen=True)
class Sheet:
    """One table: a heading per column, texts per row; the first column is to the left."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def show(report: Report) -> None:
    """Print to the terminal."""
    console = Console()
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    for line in header(report):
        console.print(line, highlight=False, markup=False)
    for sheet in sheets(report):
        table = Table()
        for number, head in enumerate(sheet.heads):
            table.add_column(head, justify="right" if number else "left")
        for row in sheet.rows:
            table.add_row(*row)
        console.print(table)
    for line in notes(report):
        console.print(line, style="dim", highlight=False, markup=False)
    for line in warnings(report):
        console.print(line, style="red", highlight=False, markup=False)


def as_markdown(report: Report) -> str:
    """The same as Markdown."""
    parts = [" ".join(line + "." for line in header(report))]
    for sheet in sheets(report):
        rule = ["---", *["---:"] * (len(sheet.heads) - 1)]
        parts.append("\n".join("| " + " | ".join(cells) + " |" for cells in (sheet.heads, rule, *sheet.rows)))
    parts += [" ".join((*notes(report), *warnings(report)))]
    return "\n\n".join(parts) + "\n"


def header(report: Report) -> list[str]:
    """On what and of what."""
    machine, settings = report.machine, report.settings
    sampling = settings["sampling"]
    rounds = settings["prompts"] // settings["round_prompts"]
    lines = [
        f"{machine['device']}, {machine['cores']} cores, {machine['threads']} threads, load {machine['load']}; "
        f"torch {machine['torch']}, transformers {machine['transformers']}, Python {machine['python']}",
        f"Target {settings['targets'][0]} ({machine['target_parameters'] / 1e6:.1f} M), "
        f"drafter {settings['drafter']} ({machine['drafter_parameters'] / 1e6:.1f} M), {settings['dtype']}",
        f"Batch {settings['batch']}, temperature {sampling['temperature']:g}, up to {sampling['max_new_tokens']} "
        f"tokens each; {rounds} rounds of {settings['round_prompts']} prompts of {', '.join(settings['sources'])} "
        f"after {settings['warm_up']} to warm up",
    ]
    lines.append(
        f"Forward passes of ours: target by {machine['target_forward']}, drafter by {machine['drafter_forward']}"
    )
    return lines


def sheets(report: Report) -> Iterator[Sheet]:
    """Speed, every ratio of ours, where our time went, and bare forward passes."""
    yield _speed(report)
    if any(found.breakdown for found in report.figures.values()):
        yield _ratios(report)
        yield _parts(report)
        yield _bare(report)


def _speed(report: Report) -> Sheet:
    greedy = report.settings["sampling"]["temperature"] == 0
    heads = ["arm", "tokens/s", "quartiles", f"ratio to {report.reference}", "quartiles", "overall"]
    heads += ["acceptance", "tokens/block", "differing" if greedy else "nats/token"]
    return Sheet(heads, [[label(name, report), *_cells(found)] for name, found in report.figures.items()])


def _cells(found: Figures) -> list[str]:
    return [
        f"{found.tokens_per_second.median:.1f}",
        _quartiles(found.tokens_per_second, ".1f"),
        f"{found.ratio.median:.2f}",
        _quartiles(found.ratio, ".2f"),
        f"{found.ratio.overall:.2f}",
        _optional(found.acceptance_rate, ".3f"),
        _optional(found.block_efficiency, ".2f"),
        _mean(found.nats_per_token) if found.nats_per_token else _differing(found),
    ]


def _differing(found: Figures) -> str:
    """`2 (0.0004)`: two prompts, and how far apart the target's logits are where the texts part, at most."""
    margin = "" if found.widest_difference is None else f" ({found.widest_difference:.2g})"
    return _optional(found.differing, "d") + margin


def _ratios(report: Report) -> Sheet:
    """One column per arm of ours, one row per other arm."""
    ratios = report.ratios()
    rows = [
        [label(other, report), *(_ratio(found[other]) if other in found else "" for found in ratios.values())]
        for other in report.figures
    ]
    return Sheet(("ratio to", *(label(name, report) for name in ratios)), rows)


def _ratio(ratio: Spread) -> str:
    return f"{ratio.median:.2f} ({_quartiles(ratio, '.2f')}), overall {ratio.overall:.2f}"


def _parts(report: Report) -> Sheet:
    """One column per arm of ours: where its time went, and what its forward passes alone would have cost."""
    names = [name for name, found in report.figures.items() if found.breakdown]
    columns = [_shares(report.figures[name]) for name in names]
    rows = [[part, *(column[part] for column in columns)] for part in columns[0]]
    return Sheet(("share of wall time", *(label(name, report) for name in names)), rows)


def _shares(found: Figures) -> dict[str, str]:
    breakdown, efficiency = found.breakdown, found.efficiency
    if breakdown is None or efficiency is None:
        return {}
    shares = {name.replace("_", " "): f"{share:.2%}" for name, share in asdict(breakdown).items()}
    limit = {"reading": efficiency.reading, "drafting": efficiency.drafting, "verifying": efficiency.verifying}
    return {
        **shares,
        **{f"limit: {name}": f"{seconds / found.seconds:.1%}" for name, seconds in limit.items()},
        "efficiency": f"{efficiency.value.overall:.3f}",
        "quartiles over rounds": _quartiles(efficiency.value, ".3f"),
        "efficiency without reading": f"{efficiency.blocks:.3f}",
    }


def _bare(report: Report) -> Sheet:
    costs = report.costs
    widths = list(next(iter(costs.target.values())))
    rows = [
        [str(count), *(_milliseconds(of[width]) for width in widths), _milliseconds(costs.drafter[count])]
        for count, of in costs.target.items()
    ]
    heads = [f"target at {width}" for width in widths]
    return Sheet(("rows; ms of a bare pass", *heads, "drafter at 1"), rows)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"


def notes(report: Report) -> list[str]:
    """How to read the tables."""
    costs = report.costs
    lines = ["tokens/s and ratio: medians over rounds; overall: of all tokens over all seconds, learning included."]
    lines.append(
        f"Bare passes: rows of {costs.context} tokens; reading a prompt of {costs.prompt_tokens}: target "
        f"{_milliseconds(costs.reading_target)} ms, drafter {_milliseconds(costs.reading_drafter)} ms."
    )
    logged = report.figures.get("logged")
    if logged and logged.breakdown:
        share = sum(getattr(logged.breakdown, part) for part in RECORDS)
        lines.append(f"Log, versions and drift: {share:.2%} of wall time, the writer thread's processor time included.")
    if report.memory.peak:
        lines.append(f"Peak memory of the process, all arms together: {report.memory.peak / 1e9:.2f} GB.")
    told = [f"{label(name, report)} {size / 1e6:.1f} MB" for name, size in report.memory.caches.items() if size]
    if told:
        lines.append(f"Keys and values, target and drafter: {', '.join(told)}.")
    lines += [f"{label(name, report)} does not run this pair: {reason}" for name, reason in report.refused.items()]
    if report.settings["sampling"]["temperature"] > 0:
        lines.append("nats/token: surprisal under the target's law; arms that keep the law agree within errors.")
    return lines


def warnings(report: Report) -> list[str]:
    """What a reader must not overlook."""
    lines = []
    if any(found.differing for found in report.figures.values()):
        lines.append(
            f"Some greedy completions are not those of {report.reference}: their number, and how far apart the "
            "target's two logits are where texts part, at most, is in the column 'differing'."
        )
    lines += [
        f"{label(name, report)} does not draw from the target's law: its speed is not comparable."
        for name in report.off_law()
    ]
    if report.machine["load"] and report.machine["load"] > report.machine["cores"]:
        lines.append("Other processes were using the cores: figures of a quiet machine may differ.")
    return lines


LABELS: dict[str, Callable[[int], str]] = {
    "plain": lambda _: "transformers generate",
    "assisted": lambda length: f"transformers assisted, k={length}",
    "assisted-defaults": lambda _: "transformers assisted, defaults",
    "prompt-lookup": lambda _: "transformers prompt lookup",
    "continuous": lambda _: "transformers continuous batching",
    "own-plain": lambda _: "omnidraft without drafting",
    "frozen": lambda _: "omnidraft frozen",
    "learning": lambda _: "omnidraft learning",
    "logged": lambda _: "omnidraft learning, logged",
}


def label(name: str, report: Report) -> str:
    """An arm's name in the tables."""
    return LABELS[name](report.settings["draft"]["max_draft"]) if name in LABELS else report.labels[name]


def _quartiles(spread: Spread, form: str) -> str:
    return f"{spread.lower:{form}} to {spread.upper:{form}}"


def _mean(mean: Mean) -> str:
    return f"{mean.value:.2f} ± {_optional(mean.error, '.2f')}"


def _optional(value: float | None, form: str) -> str:
    return NOT_MEASURED if value is None else f"{value:{form}}"
