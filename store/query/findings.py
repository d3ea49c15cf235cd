"""What a run found: how much faster drafts made it, and what learning cost and gained, in numbers and in sentences.

The end of a run, the pages and MLflow have them from here. The speed without drafts is that of blocks that drew at
random to draft nothing (`draft.exploration`).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from store.query.log_reader import LogReader, statement
from store.query.rates import Estimate, Z

AS_RUN = "as run"  # the action of the recipe `policy-values` that stands for the run itself
PLAIN = "nothing"
FEWEST_BLOCKS = 10  # of fewer, the error of their mean is not known
RESTING = 0.5  # share of the passes without drafts from which on the reason is said
MOST_SPREAD = 3.0  # of an interval's ends; a wider ratio is not reported
_RATES = {"per_second": ("tokens_per_second", "second_error"), "per_forward": ("tokens_per_forward", "forward_error")}
_SOURCES = {"own": "own text", "memory": "memory", "model": "drafter"}

NO_LEDGER: Mapping[str, Any] = {
    **dict.fromkeys(("updates", "served", "heads"), 0),
    **dict.fromkeys(("update_seconds", "idle_seconds", "waited_seconds", "recall_seconds", "tokens_gained"), 0.0),
    **dict.fromkeys(("predicted", "predicted_loaded", "seconds_per_target_forward", "seconds_saved", "net_seconds")),
}


@dataclass(frozen=True)
class Findings:
    """The findings of a run with a completed prompt."""

    # As `_drafted.sql`: tokens emitted, and by source; prompts, and those that ended by their length; the share of
    # passes in which nothing was drafted; drafts of the model, what one added, and its time in passes without drafts.
    tokens: Mapping[str, Any]
    ledger: Mapping[str, Any]  # as `_ledger.sql`
    drawn: bool  # whether blocks drew at random to draft nothing
    times: Estimate | None  # as fast as without drafts; None if that is unknown or too vague

    def list_numbers(self) -> dict[str, float | None]:
        """Return the numbers of the summary: shares of all tokens, and the speed in `times_without_drafts`."""
        emitted, times = self.tokens["emitted"], self.times
        value, low, high = (times.value, times.low, times.high) if times else (None, None, None)
        return {
            "times_without_drafts": value,
            "times_without_drafts_low": low,
            "times_without_drafts_high": high,
            **{f"share_{name}": self.tokens[name] / emitted if emitted else None for name in _SOURCES},
            "ended_by_length": self.tokens["ended_by_length"],
        }

    def describe_drafting(self) -> str:
        """Say how much faster drafts made the run, and what share of the tokens each source drafted."""
        emitted = self.tokens["emitted"]
        if not emitted:
            return "no token was emitted"
        shares = sorted(((self.tokens[name], name) for name in _SOURCES), reverse=True)
        drafted = ", ".join(f"{_SOURCES[name]} {_format_percent(count / emitted)}" for count, name in shares if count)
        if self.times:
            speed = f"{self.times.value:.2f} times as fast ({self.times.low:.2f} to {self.times.high:.2f}) as without"
        elif self.drawn:
            speed = "too few prompts to say how much faster than without"
        else:
            speed = "speed without drafts unknown, since draft.exploration is 0"
        sources = f"{drafted} of {emitted:,} tokens" if drafted else "no draft was accepted"
        return "; ".join([speed, sources, *self._describe_rest()])

    def _describe_rest(self) -> Iterator[str]:
        """Say why drafts rested, where they did so in most passes."""
        rested, added, took = (self.tokens[name] for name in ("resting", "added", "draft_passes"))
        if rested and rested >= RESTING and took is not None and self.tokens["drafts"] >= FEWEST_BLOCKS:
            why = f"a draft of the drafter added {added:.2f} tokens and took the time of {took:.2f} passes"
            yield f"nothing was drafted in {rested:.0%} of the passes, since {why}"

    def describe_learning(self) -> str:
        """Say what was learned, what it cost and what it gained."""
        ledger = self.ledger
        updates, served = ledger["updates"], ledger["served"]
        if not updates and not ledger["heads"]:
            return "nothing was learned, so it cost nothing"
        if not updates:
            what = f"only the acceptance head, {ledger['heads']} times; drafter unchanged"
        elif not served:
            what = f"the gate refused all {updates:,} drafter updates; drafter unchanged"
        else:
            what = f"{served:,} of {updates:,} drafter updates served"
            if None not in (ledger["predicted"], ledger["predicted_loaded"]):
                shares = f"{ledger['predicted']:.0%} of held-out tokens, {ledger['predicted_loaded']:.0%} as loaded"
                what = f"{what} (predicts {shares})"
        return f"{what}; {self._describe_cost()}"

    def _describe_cost(self) -> str:
        ledger = self.ledger
        parts = [f"{_format_seconds(ledger['waited_seconds'])} waited for"]
        if ledger["idle_seconds"]:
            parts.append(f"{_format_seconds(ledger['idle_seconds'])} while no request ran")
        if ledger["recall_seconds"]:
            parts.append(f"{_format_seconds(ledger['recall_seconds'])} more to score earlier versions")
        count = f"{ledger['tokens_gained']:,.0f}"
        gained = f"{count} accepted token{'' if count in ('1', '-1') else 's'} more than as loaded"
        cost = f"cost {_format_seconds(ledger['update_seconds'])} ({', '.join(parts)})"
        if ledger["net_seconds"] is None:
            return f"{cost}, gained {gained}"
        net = ledger["net_seconds"]
        verdict = f"a {'gain' if net >= 0 else 'loss'} of {_format_seconds(abs(net))}"
        return f"{cost}, gained {_format_seconds(ledger['seconds_saved'])} ({gained}): {verdict}"


def _format_seconds(seconds: float) -> str:
    """Format seconds, with two places where one would show 0.0.

    >>> [_format_seconds(seconds) for seconds in (0, 0.04, 3.46)]
    ['0.0 s', '0.04 s', '3.5 s']
    """
    return f"{seconds:.2f} s" if 0 < abs(seconds) < 0.1 else f"{seconds:,.1f} s"


def _format_percent(share: float) -> str:
    return f"{share:.1%}" if 0 < share < 0.01 else f"{share:.0%}"


def read_findings(log: LogReader) -> dict[str, Findings]:
    """Read the findings of each run with a completed prompt, by its name."""
    policies = read_policies(log)
    ledgers = {row.pop("run"): row for row in log.select(statement("_ledger")).to_pylist()}
    found = {}
    for tokens in log.select(statement("_drafted")).to_pylist():
        run = tokens.pop("run")
        own = {row["action"]: row for row in policies if row["run"] == run}
        found[run] = Findings(
            tokens, ledgers.get(run, NO_LEDGER), PLAIN in own, compare_speeds(own.get(AS_RUN), own.get(PLAIN))
        )
    return found


def read_policies(log: LogReader) -> list[dict[str, Any]]:
    """Read the recipe `policy-values`: a row per run and action, with its number of `blocks` and the rates `per_second`
    and `per_forward`, each with `value`, `low`, `high` and `half`, the distance to both.
    """
    return [
        {name: row[name] for name in ("run", "action", "blocks")}
        | {name: _estimate(row[value], row[error]) for name, (value, error) in _RATES.items()}
        for row in log.recipe("policy-values").to_pylist()
    ]


def _estimate(value: float | None, error: float | None) -> dict[str, float] | None:
    """A rate with its interval of 95%; None if the blocks took no measurable time."""
    if value is None or error is None or not math.isfinite(value + error):
        return None
    return {"value": value, "low": max(0.0, value - Z * error), "high": value + Z * error, "half": Z * error}


def compare_speeds(own: Mapping[str, Any] | None, plain: Mapping[str, Any] | None) -> Estimate | None:
    """Return how many times as fast one policy is as another, with the interval from the errors of both logarithms;
    None if one rate is unknown, from fewer than `FEWEST_BLOCKS`, or the interval too wide.
    """
    if not own or not plain or min(own["blocks"], plain["blocks"]) < FEWEST_BLOCKS:
        return None
    rates = own["per_second"], plain["per_second"]
    if any(not rate or not rate["value"] for rate in rates):
        return None
    spread = math.exp(math.hypot(*(rate["half"] / rate["value"] for rate in rates)))
    ratio = rates[0]["value"] / rates[1]["value"]
    return Estimate(ratio, ratio / spread, ratio * spread) if spread**2 <= MOST_SPREAD else None
