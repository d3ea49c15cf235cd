"""What each policy of drafting would give in every block, from the blocks whose action was drawn at random."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dashboards.web.queries.tables import rows, tell_runs
from store.query.log_reader import LogReader
from store.query.rates import FEW, Z

AS_RUN = "as run"  # the action of the recipe that stands for the run itself
PLAIN = "nothing"
NAMES = {
    PLAIN: "no draft",
    "copies": "copies",
    "model": "drafts of the model",
    AS_RUN: "the run as it was",
}
_RATES = {"per_second": ("tokens_per_second", "second_error"), "per_forward": ("tokens_per_forward", "forward_error")}
MOST_SPREAD = 3.0  # of an interval's ends; a wider ratio is not reported


def read_policies(log: LogReader) -> dict[str, Any]:
    """Read the recipe `policy-values` with intervals of 95%, and describe it. Returns `policies` with one row per run
    and action: its `name`, `blocks`, `is_vague` if few blocks drew it, and the rates `per_second` and `per_forward`,
    each with `value`, `low`, `high` and `half`, the distance to both. `story` has the sentences of each run.
    """
    policies = _list_policies(log)
    return {"policies": policies, "story": tell_runs(log, policies, _compare)}


def describe_speedups(log: LogReader) -> dict[str, str]:
    """Compare the speed of each run with that of the same run without drafts, in a sentence or two. Returns the
    sentences by the run's name; none of a run in which no block without a draft was drawn at random.
    """
    speeds = {(row["run"], row["action"]): row["per_second"] for row in _list_policies(log)}
    found = {}
    for run in dict.fromkeys(run for run, _ in speeds):
        own, plain = speeds.get((run, AS_RUN)), speeds.get((run, PLAIN))
        if own and plain and (ratio := _estimate_ratio(own, plain)):
            found[run] = (
                f"Drafts made decoding {_format_ratio(ratio)}: {_format_rate(own)} tokens/s, and "
                f"{_format_rate(plain)} without any, as blocks drawn at random show."
            )
        elif own and plain:
            found[run] = "Too few blocks without a draft were drawn at random to compare the speed with that of drafts."
    return found


def _list_policies(log: LogReader) -> list[dict[str, Any]]:
    return [
        {
            **{name: row[name] for name in ("run", "action", "blocks")},
            "name": NAMES.get(row["action"], row["action"]),
            "is_vague": row["blocks"] < FEW,
            **{name: _estimate(row[value], row[error]) for name, (value, error) in _RATES.items()},
        }
        for row in rows(log.recipe("policy-values"))
    ]


def _estimate(value: float | None, error: float | None) -> dict[str, float] | None:
    """A rate with its interval; None if the blocks took no measurable time."""
    if value is None or error is None:
        return None
    return {"value": value, "low": max(0.0, value - Z * error), "high": value + Z * error, "half": Z * error}


def _compare(policies: Sequence[Mapping[str, Any]]) -> list[str]:
    measured = [row for row in policies if row["per_second"]]
    own = next((row for row in measured if row["action"] == AS_RUN), None)
    others = [row for row in measured if row["action"] != AS_RUN]
    if own is None or not others:
        return [
            "No block drew its action at random, so the log cannot show what another policy would have given. "
            "Replay with --set draft.exploration=0.03 to find out."
        ]
    sentences = [f"The run itself decoded {_format_rate(own['per_second'])} tokens/s."]
    if plain := next((row["per_second"] for row in measured if row["action"] == PLAIN), None):
        ratio = _estimate_ratio(own["per_second"], plain)
        verdict = f"the run is {_format_ratio(ratio)}" if ratio else "too vague to compare"
        sentences.append(f"Without drafts it would be {_format_rate(plain)}: {verdict}.")
    best = max(others, key=lambda row: row["per_second"]["value"])
    name = best["name"]
    sentences.append(
        f"The fastest single policy is {name}: in every block it would give {_format_rate(best['per_second'])}."
    )
    if best["per_second"]["low"] > own["per_second"]["high"]:
        sentences.append("The intervals do not overlap: that policy alone would have been faster.")
    elif best["per_second"]["high"] < own["per_second"]["low"]:
        sentences.append("The intervals do not overlap: choosing per block was faster than any single policy.")
    else:
        sentences.append("The intervals overlap, so neither is clearly faster.")
    if vague := [row["name"] for row in others if row["is_vague"]]:
        sentences.append(f"Fewer than {FEW} blocks drew {' or '.join(vague)}: a rough estimate.")
    return sentences


def _estimate_ratio(own: Mapping[str, float], plain: Mapping[str, float]) -> tuple[float, float, float] | None:
    """Return the ratio of two rates and its interval, from the errors of both logarithms; None if that is too wide."""
    if not own["value"] or not plain["value"]:
        return None
    spread = math.exp(math.hypot(*(rate["half"] / rate["value"] for rate in (own, plain))))
    ratio = own["value"] / plain["value"]
    return (ratio, ratio / spread, ratio * spread) if spread**2 <= MOST_SPREAD else None


def _format_ratio(ratio: tuple[float, float, float]) -> str:
    value, low, high = ratio
    return f"{value:.2f} times as fast ({low:.2f} to {high:.2f})"


def _format_rate(rate: Mapping[str, float]) -> str:
    return f"{rate['value']:.1f} ± {rate['half']:.1f}"
