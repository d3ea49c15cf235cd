"""Report of a benchmark as values, as JSON, and as tables for the terminal and for documents."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box

from benchmarks.speed.arms import OURS
from benchmarks.speed.results import ArmResults, Mean, Quartiles, ratio_of, same_distribution
from benchmarks.speed.work import MeasuredRound
from benchmarks.tables import Table
from pipeline.reports.terminal import make_console

PIPE_COLUMNS = 180  # wide enough that a table in a pipe is not folded
NOT_MEASURED = "–"
RECORDS = ("log", "log_beside", "versions", "drift")
PARTS = {
    "learning_beside": "learning, own thread",
    "log_beside": "log, own thread",
    "rest": "other",
}  # titles of rows, by field of `Breakdown`; the others are titled by their field


@dataclass(frozen=True)
class SpeedReport:
    """Results of a benchmark at one batch size."""

    # machine, settings: machine, libraries and settings
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    labels: Mapping[str, str]  # names of the arms of other engines in tables
    reference: str  # name of the arm that the others are compared with
    # results, rounds: results and timed rounds, by arm
    results: Mapping[str, ArmResults]
    rounds: Mapping[str, Sequence[MeasuredRound]]
    planned: int  # number of planned rounds; an interrupted run has fewer
    peak_memory: int  # bytes of the process, all arms together
    # arms of other engines that do not run this pair of models, with their reasons
    refused: Mapping[str, str] = field(default_factory=dict)
    chat: str | None = None  # a line on the chat template; None if there is none

    @property
    def complete(self) -> int:
        """Number of rounds that all arms have finished."""
        return len(self.rounds[self.reference])

    @property
    def partial(self) -> bool:
        """Whether the run was interrupted before its last round."""
        return self.complete < self.planned

    def off_distribution(self) -> list[str]:
        """Names of the arms that sample from another distribution than the reference; their speed is not comparable."""
        distribution = self.results[self.reference].nats_per_token
        return [
            name for name, found in self.results.items() if not same_distribution(found.nats_per_token, distribution)
        ]

    def ratios(self) -> dict[str, dict[str, Quartiles]]:
        """Ratios of each arm of ours to every other arm, paired by round."""
        names = [name for name in self.rounds if name in OURS]
        return {
            name: {other: ratio_of(self.rounds[name], self.rounds[other]) for other in self.rounds if other != name}
            for name in names
        }

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values; rounds are reduced to token counts, seconds and blocks of single rows."""
        samples = {
            name: [
                {
                    "tokens": list(map(len, one.tokens)),
                    "seconds": one.seconds,
                    "blocks": one.work.blocks if one.work else None,
                }
                for one in rounds
            ]
            for name, rounds in self.rounds.items()
        }
        return {
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "partial": self.partial,
            "rounds": {"complete": self.complete, "planned": self.planned},
            "chat": self.chat,
            "reference": self.reference,
            "off_law": self.off_distribution(),
            "ratios": {
                name: {other: asdict(ratio) for other, ratio in ratios.items()}
                for name, ratios in self.ratios().items()
            },
            "peak_memory": self.peak_memory,
            "refused": dict(self.refused),
            "labels": dict(self.labels),
            "arms": {name: asdict(found) | {"rounds": samples[name]} for name, found in self.results.items()},
        }


def show(report: SpeedReport) -> None:
    """Print the report to the terminal."""
    console = make_console(PIPE_COLUMNS)
    for line in header(report):
        console.print(line, highlight=False, markup=False)
    for table in tables(report):
        console.print(table.rich(fold=False, box=box.HEAVY_HEAD, show_edge=True))
    for style, lines in (("dim", notes(report)), ("red", warnings(report))):
        for line in lines:
            console.print(line, style=style, highlight=False, markup=False)


def header(report: SpeedReport) -> list[str]:
    """Lines on machine, models, settings and forward passes."""
    machine, settings = report.machine, report.settings
    sampling = settings["sampling"]
    rounds = f"{report.complete} of {report.planned}" if report.partial else str(report.planned)
    lines = [
        f"{machine['device']}, {machine['cores']} cores, {machine['threads']} threads, load {machine['load']}; "
        f"torch {machine['torch']}, transformers {machine['transformers']}, Python {machine['python']}",
        f"Target {settings['targets'][0]} ({machine['target_parameters'] / 1e6:.1f} M), "
        f"drafter {settings['drafter']} ({machine['drafter_parameters'] / 1e6:.1f} M), {settings['dtype']}",
        f"Batch {settings['batch']}, temperature {sampling['temperature']:g}, up to {sampling['max_new_tokens']} "
        f"tokens each; {rounds} rounds of {settings['round_prompts']} prompts of {', '.join(settings['sources'])} "
        f"after {settings['warm_up']} to warm up",
    ]
    lines.append(
        f"Forward passes of ours: target by {machine['target_forward']}, drafter by {machine['drafter_forward']}"
    )
    if report.chat:
        lines.append(report.chat[0].upper() + report.chat[1:])
    return lines


def tables(report: SpeedReport) -> Iterator[Table]:
    """Tables of speed, of ratios of our arms, and of their time."""
    yield _speed(report)
    if any(found.breakdown for found in report.results.values()):
        yield _ratios(report)
        yield _parts(report)


def _speed(report: SpeedReport) -> Table:
    greedy = report.settings["sampling"]["temperature"] == 0
    first = f"arm (partial: {report.complete} of {report.planned} rounds)" if report.partial else "arm"
    heads = [first, "tokens/s", "quartiles", f"ratio to {report.reference}", "quartiles", "overall"]
    heads += ["acceptance", "tokens/block", "differing" if greedy else "nats/token"]
    return Table(heads, [[label(name, report), *_cells(found)] for name, found in report.results.items()])


def _cells(found: ArmResults) -> list[str]:
    return [
        f"{found.tokens_per_second.median:.1f}",
        _quartiles(found.tokens_per_second, ".1f"),
        f"{found.ratio.median:.2f}",
        _quartiles(found.ratio, ".2f"),
        f"{found.ratio.overall:.2f}",
        _optional(found.acceptance_rate, ".3f"),
        _optional(found.block_efficiency, ".2f"),
        _mean(found.nats_per_token) if found.nats_per_token else _differing(found),
    ]


def _differing(found: ArmResults) -> str:
    """Format as `2 (0.0004)`: number of prompts, and largest difference of the target's logits where texts diverge."""
    margin = "" if found.widest_difference is None else f" ({found.widest_difference:.2g})"
    return _optional(found.differing, "d") + margin


def _ratios(report: SpeedReport) -> Table:
    """Ratios with one column per arm of ours and one row per other arm."""
    ratios = report.ratios()
    rows = [
        [label(other, report), *(_ratio(found[other]) if other in found else "" for found in ratios.values())]
        for other in report.results
    ]
    return Table(("ratio to", *(label(name, report) for name in ratios)), rows)


def _ratio(ratio: Quartiles) -> str:
    return f"{ratio.median:.2f} ({_quartiles(ratio, '.2f')}), overall {ratio.overall:.2f}"


def _parts(report: SpeedReport) -> Table:
    """Shares of time with one column per arm of ours."""
    breakdowns = {name: asdict(found.breakdown) for name, found in report.results.items() if found.breakdown}
    parts = next(iter(breakdowns.values()))
    rows = [[PARTS.get(part, part), *(f"{one[part]:.2%}" for one in breakdowns.values())] for part in parts]
    return Table(("share of wall time", *(label(name, report) for name in breakdowns)), rows)


def notes(report: SpeedReport) -> list[str]:
    """Remarks on how to read the tables."""
    lines = ["tokens/s and ratio: medians over rounds; overall: of all tokens over all seconds, learning included."]
    logged = report.results.get("logged")
    if logged and logged.breakdown:
        share = sum(getattr(logged.breakdown, part) for part in RECORDS)
        lines.append(f"Log, versions and drift: {share:.2%} of wall time, the writer thread's processor time included.")
    lines.append(f"Peak memory of the process, all arms together: {report.peak_memory / 1e9:.2f} GB.")
    lines += [f"{label(name, report)} does not run this pair: {reason}" for name, reason in report.refused.items()]
    if report.settings["sampling"]["temperature"] > 0:
        lines.append(
            "nats/token: surprisal under the target's distribution; arms that sample from it agree within errors."
        )
    return lines


def warnings(report: SpeedReport) -> list[str]:
    """Warnings on results that are partial or not comparable."""
    lines = []
    if report.partial:
        lines.append(f"Partial: interrupted after {report.complete} of {report.planned} rounds.")
    if any(found.differing for found in report.results.values()):
        lines.append(
            f"Some greedy completions differ from those of {report.reference}: the column 'differing' has their "
            "number and the largest difference of the target's logits where texts diverge."
        )
    lines += [
        f"{label(name, report)} does not sample from the target's distribution: its speed is not comparable."
        for name in report.off_distribution()
    ]
    if report.machine["load"] and report.machine["load"] > report.machine["cores"]:
        lines.append("Other processes used the cores: results on a quiet machine may differ.")
    return lines


LABELS: dict[str, Callable[[int], str]] = {
    "plain": lambda _: "transformers generate",
    "assisted": lambda length: f"transformers assisted, k={length}",
    "assisted-defaults": lambda _: "transformers assisted, defaults",
    "prompt-lookup": lambda _: "transformers prompt lookup",
    "continuous": lambda _: "transformers continuous batching",
    "own-plain": lambda _: "omnidraft without drafting",
    "memory": lambda _: "omnidraft memory alone",
    "never-learned": lambda _: "omnidraft, never learned",
    "frozen": lambda _: "omnidraft frozen",
    "learning": lambda _: "omnidraft learning",
    "logged": lambda _: "omnidraft learning, logged",
    "memory-logged": lambda _: "omnidraft memory alone, logged",
    "never-learned-logged": lambda _: "omnidraft, never learned, logged",
    "frozen-logged": lambda _: "omnidraft frozen, logged",
}


def label(name: str, report: SpeedReport) -> str:
    """Name of an arm in the tables."""
    return LABELS[name](report.settings["draft"]["max_draft"]) if name in LABELS else report.labels[name]


def _quartiles(spread: Quartiles, form: str) -> str:
    return f"{spread.lower:{form}} to {spread.upper:{form}}"


def _mean(mean: Mean) -> str:
    return f"{mean.value:.2f} ± {_optional(mean.error, '.2f')}"


def _optional(value: float | None, form: str) -> str:
    return NOT_MEASURED if value is None else f"{value:{form}}"
