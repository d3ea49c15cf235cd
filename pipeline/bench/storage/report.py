"""Writes the results of `omnidraft bench-store` as Markdown."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from pipeline.bench.storage.benchmark import Answers, Joining, Large, Sizes, StorageReport, Writing


def markdown(report: StorageReport) -> str:
    """The report as Markdown tables; values of several repetitions are medians, with the range in brackets."""
    return "\n".join(
        [
            f"On {report.cores} cores, load {report.load:.1f}. Medians, with the range of all repetitions in brackets.",
            "",
            *_writing(report.writing),
            *_sizes(report.sizes),
            *_answers(report.large, report.joining),
            _joining(report.joining),
        ]
    )


def _writing(writing: Mapping[str, Writing]) -> Iterator[str]:
    yield from ("| run | decisions per second | per second of CPU time |", "|---|---:|---:|")
    for name, found in writing.items():
        yield f"| {name} | {_spread(found.per_second)} | {_spread(found.per_cpu_second)} |"
    yield ""


def _sizes(sizes: Mapping[str, Sizes]) -> Iterator[str]:
    """One row per column of the table `decisions`, in descending size of the first run."""
    heads = [f"{name}, written | joined" for name in sizes]
    yield from (f"| bytes per decision | {' | '.join(heads)} |", f"|---|{'---:|---:|' * len(sizes)}")
    columns = dict.fromkeys(column for found in sizes.values() for column in found.written)
    for column in columns:
        cells = [f"{found.written[column]:.2f} | {found.joined[column]:.2f}" for found in sizes.values()]
        yield f"| {column} | {' | '.join(cells)} |"
    totals = [
        f"**{sum(found.written.values()):.2f}** | **{sum(found.joined.values()):.2f}**" for found in sizes.values()
    ]
    yield f"| **together** | {' | '.join(totals)} |"
    yield f"| tables of counts | {' | '.join(f'- | {found.counts:.2f}' for found in sizes.values())} |"
    yield f"| decisions, parts | {' | '.join(f'{found.rows:,} | {found.parts} to 1' for found in sizes.values())} |"
    yield ""


def _answers(large: Large, joining: Joining) -> Iterator[str]:
    logs: list[tuple[str, Answers]] = [
        (f"{large.decisions:,} decisions, joined", large.answers),
        (f"{joining.decisions:,} in {joining.parts_before:,} parts", joining.before),
        (f"{joining.decisions:,}, joined", joining.after),
    ]
    yield from (f"| seconds, of CPU time | {' | '.join(name for name, _ in logs)} |", f"|---|{'---:|' * len(logs)}")
    yield f"| opening the log | {' | '.join(_seconds(found.opening) for _, found in logs)} |"
    for recipe in large.answers.recipes:
        cells = [f"{_seconds(found.recipes[recipe])}, {median(found.cpu[recipe]):.2f}" for _, found in logs]
        yield f"| {recipe} | {' | '.join(cells)} |"
    yield f"| peak memory, MB | {' | '.join(f'{found.peak_bytes / 1e6:,.0f}' for _, found in logs)} |"
    yield ""
    yield (
        f"The large log has {large.prompts:,} prompts and takes {large.bytes / 1e9:.2f} GB with blocks, prompts and "
        f"counts; making it took {large.making:.0f} s."
    )


def _joining(joining: Joining) -> str:
    before, after = joining.bytes_before / 1e6, joining.bytes_after / 1e6
    return (
        f"Joining {joining.parts_before:,} parts into {joining.parts_after:,} took {joining.seconds:.1f} s "
        f"({joining.decisions / joining.seconds:,.0f} decisions per second) and made {before:,.1f} MB into "
        f"{after:,.1f} MB, counts included."
    )


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def _seconds(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
