"""How much better a version's drafter is than the baseline on the probe, in numbers and in a sentence.

The pages and the end of a run have them from here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from store.query.log_reader import LogReader
from store.query.rates import Estimate, estimate_difference, estimate_ratio

# Rates on the probe: each is the ratio of two columns, summed over prompts.
_RATES = {
    "greedy": ("probe_greedy", "probe_tokens"),
    "sampled": ("probe_sampled", "probe_tokens"),
    "forwards": ("probe_tokens", "probe_forwards"),
}
_NEWEST = """
    SELECT * FROM versions
    QUALIFY parent IS NULL OR version = max(version) OVER (PARTITION BY run, target)
    ORDER BY run, target, version
"""


def estimate_rates(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the rates of a version: `greedy` and `sampled` (acceptance at temperature 0 and 1) and `forwards` (tokens
    per target forward), with intervals; None if the probe was not measured.
    """
    if not row["probe_tokens"]:
        return None
    found = {name: estimate_ratio(row[part], row[whole] or ()) for name, (part, whole) in _RATES.items()}
    return {name: asdict(one) if one else None for name, one in found.items()}


def estimate_gain(baseline: Mapping[str, Any] | None, row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how much larger each rate is than that of the baseline; None if they were not measured on the same texts
    of the target.
    """
    if not baseline or not row["probe_tokens"] or baseline["probe_tokens"] != row["probe_tokens"]:
        return None
    found = {
        name: estimate_difference(baseline[part], baseline[whole] or (), row[part], row[whole] or ())
        for name, (part, whole) in _RATES.items()
    }
    return {name: asdict(one) if one else None for name, one in found.items()}


def describe_gain(gain: Mapping[str, Any], rates: Mapping[str, Any]) -> str:
    """Say whether a version is better than the baseline, and by how much, on the probe."""
    greedy = Estimate(**gain["greedy"])
    word = (
        "is better than" if greedy.low > 0 else "is worse than" if greedy.high < 0 else "is not clearly different from"
    )
    parts = [f"{_format_difference(gain['greedy'], 100, 1)} points of acceptance ({rates['greedy']['value']:.1%})"]
    if gain["forwards"]:
        more = _format_difference(gain["forwards"], 1, 2)
        parts += [f"{more} tokens per target forward ({rates['forwards']['value']:.2f})"]
    return f"{word} the baseline on the probe: {', '.join(parts)}."


def describe_newest(log: LogReader) -> Iterator[str]:
    """Say of the newest version for each target whether it is better than the baseline, where the probe tells and the
    drafters differ.
    """
    baselines: dict[tuple[str, str], Mapping[str, Any]] = {}
    for row in log.select(_NEWEST).to_pylist():
        line = row["run"], row["target"]
        if row["parent"] is None:
            baselines[line] = row
        baseline = baselines.get(line)
        if baseline and baseline["drafter_digest"] == row["drafter_digest"] != "":  # the baseline itself, too
            continue
        gain, rates = estimate_gain(baseline, row), estimate_rates(row)
        if row["parent"] is not None and gain and rates and gain["greedy"]:
            yield f"Version {row['version']}, the newest, {describe_gain(gain, rates)}"


def _format_difference(estimate: Mapping[str, float], scale: int, digits: int) -> str:
    """A difference with its interval, such as `+23.8 (+19.1 to +28.5)`."""
    value, low, high = (f"{scale * estimate[name]:+.{digits}f}" for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})"
