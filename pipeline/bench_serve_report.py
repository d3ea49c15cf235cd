"""The figures of `omnidraft bench-serve` as Markdown."""

from collections.abc import Iterator, Mapping
from statistics import median

from pipeline.bench_serve import Report
from pipeline.bench_serve_compare import BAR, Comparison, Ratio
from pipeline.bench_serve_figures import ClientFigures, ServerFigures, Spread
from pipeline.bench_serve_verify import Verified

NEAR_TIE = 1e-3  # of logits; float32 sums in another order differ by less
MOST_SHOWN = 10  # differences


def markdown(report: Report) -> str:
    """Tables with a sentence each."""
    lines = [_head(report.machine, report.model), "", *_clients(report.clients), "", *_server(report.server)]
    if report.verified:
        lines += ["", *_verified(report.verified)]
    return "\n".join(lines)


def _head(machine: Mapping[str, object], model: str) -> str:
    return f"{model} on {machine['cores']} cores ({machine['processor']}), load {machine['load']} before."


def _clients(found: ClientFigures) -> Iterator[str]:
    errors = ", ".join(f"{number} {kind}" for kind, number in found.errors.items()) or "none"
    yield (
        f"{found.clients} clients for {found.seconds:g} s: {found.requests:,} requests, {found.left:,} left in the "
        f"middle, errors: {errors}; {found.refused:,} answers 429, obeyed. {found.requests_per_second:.2f} requests "
        f"and {found.tokens_per_second:.1f} tokens per second."
    )
    yield ""
    yield from ("| ms | count | p50 | p90 | p99 |", "|---|---:|---:|---:|---:|")
    yield _spread("to the first token", found.first_token)
    yield _spread("between chunks", found.between_chunks)
    yield _spread("between tokens, as they arrive", found.between_tokens)
    yield _spread("per token, of a completion", found.per_token)
    yield _spread("end to end", found.end_to_end)


def _spread(name: str, found: Spread) -> str:
    if not found.count:
        return f"| {name} | 0 | – | – | – |"
    return f"| {name} | {found.count:,} | {found.p50 * 1e3:,.1f} | {found.p90 * 1e3:,.1f} | {found.p99 * 1e3:,.1f} |"


def _server(found: ServerFigures) -> Iterator[str]:
    yield from ("| the server | first fifth | last fifth |", "|---|---:|---:|")
    rows = (
        ("accepted of proposed", found.acceptance, "{:.3f}"),
        ("acceptance of the drafter model", found.model_acceptance, "{:.3f}"),
        ("tokens per target pass", found.block_efficiency, "{:.2f}"),
        ("tokens per second", found.tokens_per_second, "{:.1f}"),
        ("resident memory, MB", found.memory and (found.memory[0] / 1e6, found.memory[1] / 1e6), "{:,.0f}"),
    )
    for name, pair, form in rows:
        if pair:
            yield f"| {name} | {form.format(pair[0])} | {form.format(pair[1])} |"
    yield ""
    yield " ".join(_remarks(found))


def _remarks(found: ServerFigures) -> Iterator[str]:
    if found.memory_slope is not None:
        yield f"Memory behind the first fifth: {found.memory_slope / 1e6:+.2f} MB per minute."
    if found.waiting:
        yield f"Waiting: {found.waiting[1]:.0f} in the median, {found.waiting[0]:.0f} at most."
    if found.updates is not None:
        yield f"At the end: {found.updates:.0f} updates in service,"
        yield f"{found.learner_lag or 0:.0f} prompts before the learner, {found.learner_dropped or 0:.0f} given up."


def _verified(found: Verified) -> Iterator[str]:
    ties = sum(one.margin is not None and abs(one.margin) < NEAR_TIE for one in found.differing)
    yield (
        f"Greedy answers compared with plain decoding: {found.answers:,} ({found.tokens:,} tokens, {found.prompts:,} "
        f"prompts); {len(found.differing)} differ, {ties} of them at near ties (logits less than {NEAR_TIE:g} apart)."
    )
    for one in found.differing[:MOST_SHOWN]:
        margin = "–" if one.margin is None else f"{one.margin:.2g}"
        yield f"- request {one.number}, token {one.place}: {one.expected!r} expected, got {one.got!r}; margin {margin}"


def comparison_markdown(found: Comparison, machine: Mapping[str, object], model: str) -> str:
    """What learning costs, by arm; medians over rounds with the range in brackets."""
    return "\n".join([_head(machine, model), "", *_arms(found), "", *_ratios(found)])


def _arms(found: Comparison) -> Iterator[str]:
    yield f"The same {found.rate:.2f} requests per second for every arm; those not measured were paused."
    yield ""
    yield (
        "| learn | tokens/s | first token p50, ms | between tokens p99, ms | between chunks p50, ms | p99, ms "
        "| updates | prompts before the learner | errors |"
    )
    yield f"|---|{'---:|' * 8}"
    for name, rounds in found.rounds.items():
        figures = [one.figures for one in rounds]
        cells = [
            f"{median(one.tokens_per_second for one in figures):.1f}",
            *(f"{median(spread) * 1e3:.1f}" for spread in zip(*map(_shown, figures), strict=True)),
            f"{rounds[-1].updates or 0:.0f}",
            f"{rounds[-1].learner_lag or 0:.0f}",
            f"{sum(sum(one.errors.values()) for one in figures)}",
        ]
        yield f"| {name} | {' | '.join(cells)} |"


def _shown(one: ClientFigures) -> tuple[float, ...]:
    return one.first_token.p50, one.between_tokens.p99, one.between_chunks.p50, one.between_chunks.p99


def _ratios(found: Comparison) -> Iterator[str]:
    yield f"| to the server without learning; bar {BAR:g} | {' | '.join(found.ratios)} |"
    yield f"|---|{'---:|' * len(found.ratios)}"
    titles = dict.fromkeys(title for ratios in found.ratios.values() for title in ratios)
    for title in titles:
        yield f"| {title} | {' | '.join(_ratio(ratios[title]) for ratios in found.ratios.values())} |"


def _ratio(found: Ratio) -> str:
    return f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"
