"""Published versions: what the probe measured of each, what it reached in service, and which one is better."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dashboards.web.queries.tables import acceptance_of, read_statement, rows
from store.errors import CorruptError
from store.query.log_reader import LogReader
from store.query.probe_gain import describe_gain, estimate_gain, estimate_rates
from store.registry.version_folder import describe_changes, read_manifest

MOST_VERSIONS = 1000  # versions of a run, the newest ones
# Counters of a manifest by the columns of the log.
_COUNTERS = {
    "drafter": "drafter_version",
    "head": "head_version",
    "cache": "cache_version",
    "cache_entries": "cache_entries",
    "memory_tokens": "memory_tokens",
}
_COUNTS = ("prompts", "judged", "accepted", "emitted", "blocks")

_LATEST = read_statement("versions/latest")
_VERSIONS = _LATEST + read_statement("versions/versions")
_SERVED = _LATEST + read_statement("versions/served")
_BASELINES = "SELECT * FROM versions WHERE parent IS NULL"


def read_versions(log: LogReader, folders: Mapping[str, Path] = MappingProxyType({})) -> dict[str, Any]:
    """Read the versions with their rates on the probe and while each was the latest.

    Each version has `probe`, the rates `greedy` and `sampled` (acceptance at temperature 0 and 1), `forwards` (tokens
    per target forward) with intervals; and `gain`, how much larger each rate is than that of the baseline of its
    target. Both are None if the probe was not measured. `verdicts` has sentences for each run and target, one where all
    drafters are `equal`; with the runs' `folders`, by name, they tell the probe's kinds of prompts apart.
    """
    served = {_key_of(row): row for row in rows(log.select(_SERVED.format(most=MOST_VERSIONS)))}
    published = rows(log.select(_VERSIONS.format(most=MOST_VERSIONS)))
    baselines = {_line_of(row): row for row in rows(log.select(_BASELINES))}
    versions = [
        {
            **{name: value for name, value in row.items() if not name.startswith("probe_")},
            **_summarize_service(served.get(_key_of(row))),
            "probe": estimate_rates(row),
            "gain": estimate_gain(baselines.get(_line_of(row)), row),
        }
        for row in published
    ]
    return {
        "total": log.select("SELECT count(*) AS n FROM versions").to_pylist()[0]["n"],
        "versions": versions,
        "verdicts": list(_judge_lines(versions, folders)),
    }


def _key_of(row: Mapping[str, Any]) -> tuple[str, int]:
    return row["run"], row["version"]


def _line_of(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["run"], row["target"]


def _summarize_service(served: Mapping[str, Any] | None) -> dict[str, Any]:
    counts = {name: served[name] if served else 0 for name in _COUNTS}
    efficiency = counts["emitted"] / counts["blocks"] if counts["blocks"] else None
    return {**counts, **acceptance_of(counts), "efficiency": efficiency}


def _judge_lines(versions: Sequence[Mapping[str, Any]], folders: Mapping[str, Path]) -> Iterator[dict[str, Any]]:
    for line in dict.fromkeys(map(_line_of, versions)):
        mine = [version for version in versions if _line_of(version) == line]
        newest, measured = mine[-1], [version for version in mine if version["gain"]]
        best = max(measured, key=lambda version: version["probe"]["greedy"]["value"], default=None)
        digests = {version["drafter_digest"] for version in mine}
        equal = len(mine) > 1 and len(digests) == 1 and "" not in digests
        same = f"Equal drafters: all {len(mine)} versions have the same weights. Since version {mine[0]['version']}: "
        sentences = [f"{same}{_describe_changes(mine[0], newest)}."] if equal else _compare(mine[0], newest, best)
        if not equal and line[0] in folders and newest["gain"] and mine[0]["parent"] is None:
            sentences += _describe_kinds(folders[line[0]], mine[0], newest)
        found = {"run": line[0], "target": line[1], "newest": newest["version"], "best": best and best["version"]}
        yield found | {"equal": equal, "sentences": sentences}


def _describe_kinds(run: Path, first: Mapping[str, Any], newest: Mapping[str, Any]) -> list[str]:
    """Say how the acceptance differs on each kind of the probe's prompts, in points."""
    try:
        old, new = (read_manifest(run / version["folder"])["metrics"] for version in (first, newest))
    except (CorruptError, OSError):  # versions are deleted, and moved
        return []
    parts = [
        f"{100 * (new[name] - old[name]):+.1f} {name.replace('_', ' ')}"
        for name in new
        if name in old and "upon_" in name
    ]
    return [f"In points of acceptance: {', '.join(parts)}."] if parts else []


def _describe_changes(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    before, after = ({name: row[column] or 0 for name, column in _COUNTERS.items()} for row in (one, other))
    changed = one["drafter_digest"] != other["drafter_digest"] or before["drafter"] != after["drafter"]
    return describe_changes(before, after, drafter_changed=changed) or "nothing changed"


def _compare(first: Mapping[str, Any], newest: Mapping[str, Any], best: Mapping[str, Any] | None) -> list[str]:
    if newest["parent"] is None:
        return [f"Version {newest['version']} is the drafter as it was loaded; there is no later one yet."]
    if best is None:
        return ["The probe did not measure these versions, so they cannot be compared on the same prompts."]
    sentences = (
        [f"Version {newest['version']}, the newest, {describe_gain(newest['gain'], newest['probe'])}"]
        if newest["gain"]
        else []
    )
    sentences += [f"Since the baseline: {_describe_changes(first, newest)}."] if first["parent"] is None else []
    if best["version"] == newest["version"]:
        return sentences
    if best["parent"] is None:
        return [*sentences, "No version is better on the probe than the baseline."]
    return [
        *sentences,
        f"The best on the probe is version {best['version']}: it {describe_gain(best['gain'], best['probe'])}",
    ]
