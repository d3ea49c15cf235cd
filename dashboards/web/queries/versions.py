"""Published versions: what the probe measured of each, what it reached in service, and which one is better."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dashboards.web.queries.tables import acceptance_of, read_statement, rows
from store.query.log_reader import LogReader
from store.query.rates import Estimate, estimate_difference, estimate_ratio

MOST_VERSIONS = 1000  # versions of a run, the newest ones
# Rates on the probe: each is the ratio of two columns, summed over prompts.
_RATES = {
    "greedy": ("probe_greedy", "probe_tokens"),
    "sampled": ("probe_sampled", "probe_tokens"),
    "forwards": ("probe_tokens", "probe_forwards"),
    "speed": ("probe_tokens", "probe_seconds"),
}
_COUNTS = ("prompts", "judged", "accepted", "emitted", "blocks")

_LATEST = read_statement("versions/latest")
_VERSIONS = _LATEST + read_statement("versions/versions")
_SERVED = _LATEST + read_statement("versions/served")
_LEARNED = _LATEST + read_statement("versions/learned")
_DRIFTS = read_statement("versions/drifts")
_RECALLS = 'SELECT run, "offset", target, version, acceptance_present, acceptance_best FROM recalls ORDER BY seq'
_BASELINES = "SELECT * FROM versions WHERE parent IS NULL"


def read_versions(log: LogReader) -> dict[str, Any]:
    """Read the versions with their rates on the probe and while each was the latest, and drifts and recalls.

    Each version has `probe`, the rates `greedy` and `sampled` (acceptance at temperature 0 and 1), `forwards` (tokens
    per target forward) and `speed` (tokens per second) with intervals, and `plain`, the tokens per second without
    drafts; and `gain`, how much larger each rate is than that of the baseline of its target. Both are None if the probe
    was not measured, `speed` and `plain` if the costs were not. `verdicts` has a sentence for each run and target.
    """
    served: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in rows(log.select(_SERVED.format(most=MOST_VERSIONS))):
        served[_key_of(row)].append(row)
    learned = {_key_of(row): row for row in rows(log.select(_LEARNED.format(most=MOST_VERSIONS)))}
    published = rows(log.select(_VERSIONS.format(most=MOST_VERSIONS)))
    baselines = {_line_of(row): row for row in rows(log.select(_BASELINES))}
    versions = [
        {
            **{name: value for name, value in row.items() if not name.startswith("probe_")},
            **_summarize_service(served[_key_of(row)]),
            "learned": learned.get(_key_of(row)),
            "probe": _estimate_rates(row),
            "gain": _estimate_gain(baselines.get(_line_of(row)), row),
        }
        for row in published
    ]
    return {
        "total": log.select("SELECT count(*) AS n FROM versions").to_pylist()[0]["n"],
        "versions": versions,
        "verdicts": list(_judge_lines(versions)),
        "drifts": rows(log.select(_DRIFTS.format(most=MOST_VERSIONS))),
        "recalls": rows(log.select(_RECALLS)),
    }


def _key_of(row: Mapping[str, Any]) -> tuple[str, int]:
    return row["run"], row["version"]


def _line_of(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["run"], row["target"]


def _summarize_service(served: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counts = {name: sum(row[name] for row in served) for name in _COUNTS}
    efficiency = counts["emitted"] / counts["blocks"] if counts["blocks"] else None
    datasets = [{"dataset": row["dataset"], "judged": row["judged"], **acceptance_of(row)} for row in served]
    return {**counts, **acceptance_of(counts), "efficiency": efficiency, "datasets": datasets}


def _estimate_rates(row: Mapping[str, Any]) -> dict[str, Any] | None:
    if not row["probe_tokens"]:
        return None
    found = {name: estimate_ratio(row[part], row[whole] or ()) for name, (part, whole) in _RATES.items()}
    plain = row["probe_plain_seconds"]
    return {name: asdict(one) if one else None for name, one in found.items()} | {"plain": plain and 1 / plain}


def _estimate_gain(baseline: Mapping[str, Any] | None, row: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a version gained over the baseline; None if they were not measured on the same texts of the target."""
    if not baseline or not row["probe_tokens"] or baseline["probe_tokens"] != row["probe_tokens"]:
        return None
    found = {
        name: estimate_difference(baseline[part], baseline[whole] or (), row[part], row[whole] or ())
        for name, (part, whole) in _RATES.items()
    }
    return {name: asdict(one) if one else None for name, one in found.items()}


def _judge_lines(versions: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for line in dict.fromkeys(map(_line_of, versions)):
        mine = [version for version in versions if _line_of(version) == line]
        newest, measured = mine[-1], [version for version in mine if version["gain"]]
        best = max(measured, key=lambda version: version["probe"]["greedy"]["value"], default=None)
        found = {"run": line[0], "target": line[1], "newest": newest["version"], "best": best and best["version"]}
        is_unchanged = bool(measured) and all(map(_is_as_loaded, mine))
        yield found | {"sentences": [_describe_unchanged(newest)] if is_unchanged else _compare(newest, best)}


def _is_as_loaded(version: Mapping[str, Any]) -> bool:
    """Return whether no update of the drafter was in service, and the probe shows no difference either."""
    gain = version["gain"] and version["gain"]["greedy"]
    return not version["drafter_version"] and (version["parent"] is None or (bool(gain) and not any(gain.values())))


def _compare(newest: Mapping[str, Any], best: Mapping[str, Any] | None) -> list[str]:
    if best is None:
        return ["The probe did not measure these versions, so they cannot be compared on the same prompts."]
    if newest["parent"] is None:
        return [
            f"Version {newest['version']} is the baseline, the drafter as it was loaded; there is no later one yet."
        ]
    sentences = [f"Version {newest['version']}, the newest, {_describe_gain(newest)}"] if newest["gain"] else []
    if best["version"] == newest["version"]:
        return [*sentences, "It is the best on the probe."]
    if best["parent"] is None:
        return [*sentences, "No version is better on the probe than the baseline."]
    return [*sentences, f"The best on the probe is version {best['version']}: it {_describe_gain(best)}"]


def _describe_unchanged(version: Mapping[str, Any]) -> str:
    return (
        "All versions have the drafter as it was loaded, since no update of it served: none is better or worse than "
        "the baseline, and they differ in the acceptance head, the n-grams and the memory alone. On the probe it "
        f"{_describe_rates(version['probe'])}."
    )


def _describe_gain(version: Mapping[str, Any]) -> str:
    greedy = Estimate(**version["gain"]["greedy"])
    word = (
        "is better than" if greedy.low > 0 else "is worse than" if greedy.high < 0 else "is not clearly different from"
    )
    return f"{word} the baseline: on the probe it {_describe_rates(version['probe'], version['gain'])}."


def _describe_rates(probe: Mapping[str, Any], gain: Mapping[str, Any] | None = None) -> str:
    """What a version would reach on the probe, each rate with what it gained over the baseline."""

    def differ(name: str, scale: int, digits: int, unit: str = "") -> str:
        return f", {_format_difference(gain[name], scale, digits)}{unit}" if gain and gain[name] else ""

    points = differ("greedy", 100, 1, " percentage points")
    rates = f"predicts {probe['greedy']['value']:.1%} of the target's greedy tokens{points}"
    if probe["forwards"]:
        more = differ("forwards", 1, 2)
        rates += f", and would emit {probe['forwards']['value']:.2f} tokens per target forward{more}"
    if probe["speed"] and probe["plain"]:
        speed, plain = probe["speed"]["value"], probe["plain"]
        rates += (
            f". At the costs of passes that the run measured at its start, its drafts in every block make {speed:.1f} "
            f"tokens per second{differ('speed', 1, 1)}, and no drafts {plain:.1f}: they "
            f"{'gain' if speed > plain else 'lose'} {abs(speed / plain - 1):.0%}"
        )
    return rates


def _format_difference(estimate: Mapping[str, float], scale: int, digits: int) -> str:
    """A difference with its interval, such as `+23.8 (+19.1 to +28.5)`."""
    value, low, high = (f"{scale * estimate[name]:+.{digits}f}" for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})"
