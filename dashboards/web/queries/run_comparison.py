"""Runs compared in sentences, on the prompts that they have in common."""

from collections.abc import Iterator, Sequence
from math import exp, sqrt
from typing import Any

from dashboards.web.queries.tables import rows
from store.query.json_values import quote_text
from store.query.log_reader import LogReader

Z = 1.96  # of an interval of 95%
FEWEST = 12  # prompts: of fewer, the interval would be too narrow

# A prompt counts once, whatever its length: the intervals are over prompts.
_PAIRS = """
    WITH pairs AS (
        SELECT one.emitted AS emitted, one.blocks AS blocks,
            other.emitted AS other_emitted, other.blocks AS other_blocks,
            one.completion_text = other.completion_text AS same,
            ln(one.emitted / (one.finished - one.started))
                - ln(other.emitted / (other.finished - other.started)) AS faster
        FROM prompts AS one JOIN prompts AS other USING (dataset, prompt_id, prompt_text)
        WHERE one.run = {one} AND other.run = {other} AND one.emitted > 0 AND other.emitted > 0
            AND one.finished > one.started AND other.finished > other.started
    )
    SELECT count(*) AS prompts, count(*) FILTER (same) AS same, avg(faster) AS faster, stddev_samp(faster) AS deviation,
        sum(emitted) / sum(blocks) AS efficiency, sum(other_emitted) / sum(other_blocks) AS other_efficiency
    FROM pairs
"""


def compare_runs(log: LogReader, runs: Sequence[str]) -> list[str]:
    """Compare the first run with each of the others. None for a single run."""
    return [sentence for other in runs[1:] for sentence in _compare(log, runs[0], other)]


def _compare(log: LogReader, one: str, other: str) -> Iterator[str]:
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
