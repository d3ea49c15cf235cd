"""What each policy of drafting would give in every block, from the blocks whose action was drawn at random."""

from collections.abc import Mapping, Sequence
from typing import Any

from dashboards.web.queries.tables import tell_runs
from store.query.findings import AS_RUN, PLAIN, compare_speeds
from store.query.findings import read_policies as find_policies
from store.query.log_reader import LogReader
from store.query.rates import FEW

NAMES = {
    PLAIN: "no draft",
    "copies": "copies",
    "model": "drafts of the model",
    AS_RUN: "the run as it was",
}


def read_policies(log: LogReader) -> dict[str, Any]:
    """Read the recipe `policy-values` with intervals of 95%, and describe it. Returns `policies` with one row per run
    and action: its `name`, `blocks`, `is_vague` if few blocks drew it, and the rates `per_second` and `per_forward`,
    each with `value`, `low`, `high` and `half`, the distance to both. `story` has the sentences of each run.
    """
    policies = [
        row | {"name": NAMES.get(row["action"], row["action"]), "is_vague": row["blocks"] < FEW}
        for row in find_policies(log)
    ]
    return {"policies": policies, "story": tell_runs(log, policies, _compare)}


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
    if plain := next((row for row in measured if row["action"] == PLAIN), None):
        ratio = compare_speeds(own, plain)
        times = f"the run is {ratio.value:.2f} times as fast ({ratio.low:.2f} to {ratio.high:.2f})" if ratio else ""
        verdict = times or "too vague to compare"
        sentences.append(f"Without drafts it would be {_format_rate(plain['per_second'])}: {verdict}.")
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


def _format_rate(rate: Mapping[str, float]) -> str:
    return f"{rate['value']:.1f} ± {rate['half']:.1f}"
