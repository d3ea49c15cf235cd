"""Writes the results of `omnidraft bench-serve` as Markdown."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from pipeline.bench.server.benchmark import LoadReport
from pipeline.bench.server.learning_cost import BAR, ArmRound, LearningCost, Ratio
from pipeline.bench.server.results import ClientResults, Percentiles, ServerResults
from pipeline.bench.server.verify import Verification
from pipeline.reports.tables import format_tight_table

NEAR_TIE = 1e-3  # of logits; float32 sums in another order differ by less
MOST_SHOWN = 10  # differences listed


def markdown(report: LoadReport) -> str:
    """The report of a load as Markdown tables with a sentence each."""
    lines = [_head(report.machine, report.model), "", *_clients(report.clients), "", *_server(report.server)]
    if report.verified:
        lines += ["", *_verification(report.verified)]
    return "\n".join(lines)


def _head(machine: Mapping[str, object], model: str) -> str:
    return f"{model} on {machine['cores']} cores ({machine['processor']}), load {machine['load']} before."


def _clients(found: ClientResults) -> Iterator[str]:
    errors = ", ".join(f"{number} {kind}" for kind, number in found.errors.items()) or "none"
    yield (
        f"{found.clients} clients for {found.seconds:g} s: {found.requests:,} requests, {found.left:,} disconnected "
        f"midway, errors: {errors}; {found.refused:,} answers 429, retried. {found.requests_per_second:.2f} requests "
        f"and {found.tokens_per_second:.1f} tokens per second."
    )
    yield ""
    times = {
        "to the first token": found.first_token,
        "between chunks": found.between_chunks,
        "between tokens, as they arrive": found.between_tokens,
        "per token, of a completion": found.per_token,
        "end to end": found.end_to_end,
    }
    rows = [(name, f"{one.count:,}", *_milliseconds(one)) for name, one in times.items()]
    yield from format_tight_table(("ms", "count", "p50", "p90", "p99"), rows)


def _milliseconds(found: Percentiles) -> list[str]:
    return [f"{time * 1e3:,.1f}" if found.count else "–" for time in (found.p50, found.p90, found.p99)]


def _server(found: ServerResults) -> Iterator[str]:
    rows = (
        ("accepted of proposed", found.acceptance, "{:.3f}"),
        ("acceptance of the drafter model", found.model_acceptance, "{:.3f}"),
        ("tokens per target pass", found.block_efficiency, "{:.2f}"),
        ("tokens per second", found.tokens_per_second, "{:.1f}"),
        ("resident memory, MB", found.memory and (found.memory[0] / 1e6, found.memory[1] / 1e6), "{:,.0f}"),
    )
    known = [(name, *map(form.format, pair)) for name, pair, form in rows if pair]
    yield from format_tight_table(("the server", "first fifth", "last fifth"), known)
    yield ""
    yield " ".join(_remarks(found))


def _remarks(found: ServerResults) -> Iterator[str]:
    if found.memory_slope is not None:
        yield f"Memory after the first fifth: {found.memory_slope / 1e6:+.2f} MB per minute."
    if found.waiting:
        yield f"Queued requests: {found.waiting[1]:.0f} in the median, {found.waiting[0]:.0f} at most."
    if found.updates is not None:
        yield f"At the end: {found.updates:.0f} updates in service,"
        yield f"{found.learner_lag or 0:.0f} prompts waiting for the learner, {found.learner_dropped or 0:.0f} dropped."


def _verification(found: Verification) -> Iterator[str]:
    ties = sum(one.margin is not None and abs(one.margin) < NEAR_TIE for one in found.differing)
    yield (
        f"Greedy answers compared with plain decoding: {found.answers:,} ({found.tokens:,} tokens, {found.prompts:,} "
        f"prompts); {len(found.differing)} differ, {ties} of them at near ties (logits less than {NEAR_TIE:g} apart)."
    )
    for one in found.differing[:MOST_SHOWN]:
        margin = "–" if one.margin is None else f"{one.margin:.2g}"
        yield f"- request {one.number}, token {one.place}: {one.expected!r} expected, got {one.got!r}; margin {margin}"


def comparison_markdown(found: LearningCost, machine: Mapping[str, object], model: str) -> str:
    """The cost of learning by arm as Markdown: medians over rounds, with the range in brackets."""
    return "\n".join([_head(machine, model), "", *_arms(found), "", *_ratios(found)])


def _arms(found: LearningCost) -> Iterator[str]:
    yield f"The same {found.rate:.2f} requests per second for every arm; the other servers were suspended."
    yield ""
    heads = ("learn", "tokens/s", "first token p50, ms", "between tokens p99, ms", "between chunks p50, ms", "p99, ms")
    more = ("updates", "prompts waiting for the learner", "errors")
    yield from format_tight_table((*heads, *more), [_arm(name, rounds) for name, rounds in found.rounds.items()])


def _arm(name: str, rounds: Sequence[ArmRound]) -> list[str]:
    results, last = [one.figures for one in rounds], rounds[-1]
    return [
        name,
        f"{median(one.tokens_per_second for one in results):.1f}",
        *(f"{median(times) * 1e3:.1f}" for times in zip(*map(_shown_times, results), strict=True)),
        f"{last.updates or 0:.0f}",
        f"{last.learner_lag or 0:.0f}",
        f"{sum(sum(one.errors.values()) for one in results)}",
    ]


def _shown_times(one: ClientResults) -> tuple[float, ...]:
    return one.first_token.p50, one.between_tokens.p99, one.between_chunks.p50, one.between_chunks.p99


def _ratios(found: LearningCost) -> Iterator[str]:
    titles = dict.fromkeys(title for ratios in found.ratios.values() for title in ratios)
    rows = [(title, *(_ratio(ratios[title]) for ratios in found.ratios.values())) for title in titles]
    yield from format_tight_table((f"ratio to the server without learning; required {BAR:g}", *found.ratios), rows)


def _ratio(found: Ratio) -> str:
    return f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"
