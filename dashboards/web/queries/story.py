"""A run in a few sentences: where its tokens came from, what learning cost and gained, and what a drift did.

Several runs are compared on the prompts that they have in common.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from math import exp, sqrt
from pathlib import Path
from typing import Any

from dashboards.web.queries.policies import describe_speedups
from dashboards.web.queries.tables import read_statement, rows
from store.query.log_reader import LogReader
from store.query.rates import Z
from store.query.summary import SUMMARY, describe_predictions
from store.query.views import quote_text

AROUND = 20  # prompts before a drift, and at the end, that are compared
FEWEST = 12  # prompts in common: of fewer, the interval would be too narrow

_TOKENS = """
    SELECT run, sum(emitted)::BIGINT AS emitted, sum(blocks)::BIGINT AS blocks, max("offset") AS last
    FROM prompts GROUP BY run
"""
_SOURCES = read_statement("story/sources")
_LEARNING = read_statement("story/learning")
_DRIFTS = read_statement("story/drifts")
_EFFICIENCY = """
    SELECT sum(emitted) / nullif(sum(blocks), 0) AS efficiency
    FROM prompts WHERE run = {run} AND "offset" BETWEEN {first} AND {last}
"""

_PAIRS = read_statement("story/pairs")


def read_learning(log: LogReader) -> list[dict[str, Any]]:
    """Read what learning did in each run, what it cost in seconds, and what it gained in tokens."""
    return rows(log.select(_LEARNING))


def read_story(
    log: LogReader, learned: Sequence[Mapping[str, Any]], folders: Mapping[str, Path] | None = None
) -> list[dict[str, Any]]:
    """Describe each run of the log with a completed prompt in `sentences`. The summaries in `folders`, by the run's
    name, have the result of the check.
    """
    blocks = {row["run"]: row for row in rows(log.select(_SOURCES))}
    speedups = describe_speedups(log)
    learning = {row["run"]: row for row in learned}
    drifts = rows(log.select(_DRIFTS))
    found = []
    for tokens in rows(log.select(_TOKENS)):
        run = tokens["run"]
        sentences = [
            _describe_tokens(tokens, blocks.get(run)),
            *([speedups[run]] if run in speedups else []),
            *_describe_learning(learning.get(run), blocks.get(run)),
            *_describe_drifts(log, [row for row in drifts if row["run"] == run], tokens),
        ]
        if folders and run in folders and (check := read_check(folders[run])):
            result = f"{check['mismatches']:,} do not follow from it" if check["mismatches"] else "all follow from it"
            judged = f"The {check['judged']:,} judged decisions were each derived again from their row in the log"
            sentences.append(f"{judged}: {result}.")
        found.append({"run": run, "sentences": sentences})
    return found


def _describe_tokens(tokens: Mapping[str, Any], blocks: Mapping[str, Any] | None) -> str:
    emitted = tokens["emitted"]
    if not emitted or blocks is None:
        return "No token was emitted."
    # a tree counts for the source of its first candidate
    parts = {"the drafter model": blocks["model"], "the own text": blocks["lookup"], "the memory": blocks["memory"]}
    accepted = sum(parts.values())
    shares = ", ".join(f"{_format_percent(count, emitted)} {source}" for source, count in parts.items() if count)
    from_drafts = f"{_format_percent(accepted, emitted)} of {emitted:,} tokens came from drafts"
    own = f"{_format_percent(emitted - accepted, emitted)} from the target itself"
    rate = f"{emitted / tokens['blocks']:.2f} tokens per target forward"
    return f"{from_drafts}{f' ({shares})' if shares else ''}, {own}: {rate}."


def _describe_learning(learning: Mapping[str, Any] | None, blocks: Mapping[str, Any] | None) -> list[str]:
    if learning is None:
        return ["Nothing was learned, so learning cost nothing."]
    updates, served = learning["updates"], learning["served"]
    if not updates:
        heads = f"the acceptance head was trained {_count_times(learning['heads'])}"
        what = f"No update of the drafter was computed, so it is still as it was loaded; {heads}."
    elif served:
        what = f"{served:,} of {updates:,} drafter updates passed the gate and served"
        known = learning["predicted"], learning["predicted_loaded"]
        what = f"{what}: {describe_predictions(*known)}." if None not in known else f"{what}."
    else:
        refused = "the only drafter update" if updates == 1 else f"all of the {updates:,} drafter updates"
        what = f"The gate refused {refused}, so the drafter is still as it was loaded."
    return [_describe_cost(learning, blocks), what]


def _describe_cost(learning: Mapping[str, Any], blocks: Mapping[str, Any] | None) -> str:
    parts, idle = [f"{_seconds(learning['waited'])} s of it waited for"], learning["idle_seconds"]
    if idle:
        parts.append(f"{_seconds(idle)} s while no request ran, which cost nothing")
    if learning["recall_seconds"]:
        parts.append(f"{_seconds(learning['recall_seconds'])} s to score earlier versions after drifts")
    cost = f"Learning cost {_seconds(learning['seconds'])} s ({', '.join(parts)})"
    count = f"{learning['tokens_gained']:,.0f}"
    gained = f"{count} accepted token{'' if count in ('1', '-1') else 's'} over the baseline"
    if not blocks or blocks["seconds_per_target_forward"] is None:
        return f"{cost} and gained {gained}."
    saved = learning["tokens_gained"] * blocks["seconds_per_target_forward"]
    net = saved - (learning["seconds"] - idle)
    verdict = f"a gain of {_seconds(net)} s" if net >= 0 else f"a loss of {_seconds(-net)} s"
    return f"{cost} and gained {_seconds(saved)} s ({gained}): {verdict}."


def _seconds(value: float) -> str:
    """A number of seconds, with two places where one would show 0.0."""
    return f"{value:.2f}" if 0 < abs(value) < 0.1 else f"{value:.1f}"


def _describe_drifts(log: LogReader, detected: list[dict[str, Any]], tokens: Mapping[str, Any]) -> Iterator[str]:
    """The drifts that were acted upon, and what the last one did to the tokens per target forward."""
    drifts = [row for row in detected if row["action"] in ("reset", "recall")]
    if not drifts:
        count = "one was detected" if len(detected) == 1 else f"{len(detected)} were detected, the last"
        seen = f", though {count} at prompt {detected[-1]['offset']}" if detected else ""
        yield f"No drift was acted upon{seen}."
        return
    last, restored = drifts[-1], sum(row["version"] is not None for row in drifts)
    times = "once" if len(drifts) == 1 else f"{len(drifts)} times, the last was"
    yield f"Drift was acted upon {times}: {last['description']}."
    if restored:
        yield f"An earlier version was restored {_count_times(restored)}."
    changed, end = last["changed_at"], tokens["last"]
    parts = (changed - AROUND, changed - 1), (changed, last["offset"]), (end - AROUND + 1, end)
    queries = [_EFFICIENCY.format(run=quote_text(tokens["run"]), first=first, last=until) for first, until in parts]
    before, until, now = (log.select(query).to_pylist()[0]["efficiency"] for query in queries)
    if before is not None and until is not None:
        yield (
            f"Tokens per target forward were {before:.2f} in the {min(AROUND, changed)} prompts before the "
            f"{'last ' if len(drifts) > 1 else ''}change, at prompt {changed}, {until:.2f} from there until the drift "
            f"was detected, and {now:.2f} in the last {min(AROUND, end + 1)}."
        )


def read_check(folder: Path) -> dict[str, int] | None:
    """Read the result of `omnidraft check` from the summary of a run: the numbers of `decisions`, of `judged` ones that
    were derived again, and of `mismatches`. None if there is no summary with one.
    """
    try:
        found = json.loads((folder / SUMMARY).read_bytes())["check"]
        return {name: int(found[name]) for name in ("decisions", "judged", "mismatches")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _count_times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _format_percent(part: float, whole: float) -> str:
    share = 100 * part / whole
    return f"{share:.1f}%" if 0 < share < 1 else f"{share:.0f}%"


def compare_runs(log: LogReader, runs: Sequence[str]) -> list[str]:
    """Compare the first run with each of the others. None for a single run."""
    return [sentence for other in runs[1:] for sentence in _compare_pair(log, runs[0], other)]


def _compare_pair(log: LogReader, one: str, other: str) -> Iterator[str]:
    (found,) = rows(log.select(_PAIRS.format(one=quote_text(one), other=quote_text(other))))
    prompts = found["prompts"]
    if prompts < FEWEST:
        count = {0: "no prompt", 1: "one prompt"}.get(prompts, f"{prompts} prompts")
        yield f"{one} and {other} have {count} in common: too few to compare their speeds."
        return
    yield f"On the {prompts:,} prompts in common, {_describe_speed(one, other, found)}."
    yield (
        f"Tokens per target forward there: {found['efficiency']:.2f} and {found['other_efficiency']:.2f}; "
        f"{found['same']:,} of the {prompts:,} completions are the same text."
    )


def _describe_speed(one: str, other: str, found: dict[str, Any]) -> str:
    """The mean ratio of the prompts' speeds with its interval. The load of the machine at other times is not in it."""
    half = Z * found["deviation"] / sqrt(found["prompts"])
    low, value, high = (exp(found["faster"] + sign * half) for sign in (-1, 0, 1))
    ratio = f"{value:.2f} times as fast as {other} ({low:.2f} to {high:.2f}, by prompts)"
    if low <= 1 <= high:
        return f"neither run was clearly faster: {one} was {ratio}"
    return f"{one} was {'faster' if low > 1 else 'slower'}: {ratio}"
