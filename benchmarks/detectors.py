"""Which detector of `river` sees a fall of acceptance, over which rate: `python -m benchmarks.detectors RUN...`."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Annotated, Any

import typer
from river.drift import ADWIN, KSWIN, PageHinkley

from benchmarks.command import run
from pipeline.config.cli_options import argument
from pipeline.learning.drift import GRACE, Detector, WeightedRates
from store.query.log_reader import LogReader

LENGTH = 5000  # prompts of a stream without a change
BLOCK = 20, 50  # consecutive prompts of a run that it is made of
WARM_UP = 8  # first prompts of a run that are not in it: the memory is empty
RECENT = 10  # newest rates that an alarm of ADWIN or KSWIN is taken to be a fall by
LEVEL, DEVIATION = 0.65, 0.15  # of simulated rates

Prompt = dict[str, Any]  # a row of the log
RATES: dict[str, Callable[[Prompt], tuple[int, int]]] = {  # accepted and judged tokens of a prompt
    "drafter": lambda row: (row["accepted"], row["judged"]),
    "all sources": lambda row: (row["accepted"] + row["lookup_accepted"], row["judged"] + row["lookup_judged"]),
    "tokens per pass": lambda row: (row["emitted"] - row["blocks"], row["emitted"]),
}
PAGE_HINKLEY = (0.05, 1), (0.1, 0.5), (0.1, 0.6), (0.1, 1), (0.15, 0.4), (0.15, 0.5), (0.15, 1.25)
DETECTORS: dict[str, Callable[[], Detector]] = {
    f"PageHinkley({tolerance}, {threshold})": partial(
        PageHinkley, min_instances=GRACE, delta=tolerance, threshold=threshold, mode="down"
    )
    for tolerance, threshold in PAGE_HINKLEY
}
for _delta in (0.002, 0.05, 0.3):
    DETECTORS[f"ADWIN({_delta})"] = partial(ADWIN, delta=_delta, clock=1, grace_period=GRACE)
for _alpha, _window, _newest in ((0.001, 30, 8), (0.0001, 40, 10)):
    DETECTORS[f"KSWIN({_alpha}, {_window}, {_newest})"] = partial(
        KSWIN, alpha=_alpha, window_size=_window, stat_size=_newest, seed=0
    )


def detectors(
    runs: Annotated[list[Path], argument("runs", "Folders of finished runs.", "RUN")],
    change: Annotated[int, typer.Option(min=30, help="First prompt after the change of the stream.")],
    streams: Annotated[int, typer.Option(min=1, help="Streams without a change.")] = 20,
) -> None:
    """Print false alarms on streams without a change, and the prompts from the change to the alarm."""
    rows = []
    for folder in runs:
        with LogReader([folder]) as log:
            rows.append(log.select('SELECT * FROM prompts ORDER BY "offset"').to_pylist())
    for rate in RATES:
        for name in DETECTORS:
            print(f"{rate}, {name}: {describe(name, [pick_rates(one, rate) for one in rows], change, streams)}")


def pick_rates(rows: Sequence[Prompt], rate: str) -> list[float | None]:
    """Return the value of each prompt, as the product weights it; None where nothing was judged."""
    rates = WeightedRates()
    return [rates.add(accepted, judged) if judged else None for accepted, judged in map(RATES[rate], rows)]


def describe(name: str, runs: Sequence[list[float | None]], change: int, streams: int) -> str:
    """Return the false alarms in `LENGTH` prompts, resampled and simulated, and the delays, in words."""
    before = [rates[WARM_UP:change] for rates in runs]
    false = fmean(len(find_alarms(name, resample(before, Random(seed)))) for seed in range(streams))
    simulated = (
        fmean(len(find_alarms(name, simulate(correlation, Random(seed)))) for seed in range(streams))
        for correlation in (0.0, 0.3, 0.6)
    )
    alarms = [find_alarms(name, rates) for rates in runs]
    early = sum(place < change for found in alarms for place in found)
    delays = sorted(min((p - change + 1 for p in found if p >= change), default=len(runs[0])) for found in alarms)
    within = sum(delay <= 12 for delay in delays)
    return (
        f"{false:.2f} false alarms in {LENGTH:,} prompts, {early} before the change; simulated with correlation 0, .3 "
        f"and .6: {', '.join(f'{one:.1f}' for one in simulated)}; alarm within 12 prompts in {within} of {len(runs)}, "
        f"median {median(delays):g}, last {delays[-1]}"
    )


def find_alarms(name: str, rates: Iterable[float | None]) -> list[int]:
    """Return the places of the alarms that are falls; each is followed by a new detector."""
    detector, seen, found = DETECTORS[name](), list[float](), list[int]()
    for place, rate in enumerate(rates):
        if rate is None:
            continue
        seen.append(rate)
        detector.update(rate)
        if not detector.drift_detected:
            continue
        if name.startswith("Page") or fmean(seen[-RECENT:]) < fmean(seen[:-RECENT] or [0.0]):
            found.append(place)
        detector, seen = DETECTORS[name](), []
    return found


def resample(runs: Sequence[list[float | None]], random: Random) -> list[float | None]:
    """Return a stream without a change, of blocks of consecutive prompts of the runs."""
    stream: list[float | None] = []
    while len(stream) < LENGTH:
        rates = random.choice(runs)
        size = min(len(rates), random.randint(*BLOCK))
        begin = random.randint(0, len(rates) - size)
        stream += rates[begin : begin + size]
    return stream[:LENGTH]


def simulate(correlation: float, random: Random) -> Iterable[float]:
    """Yield rates around a level, each correlated with the one before."""
    deviation = 0.0
    for _ in range(LENGTH):
        deviation = correlation * deviation + random.gauss(0, (1 - correlation**2) ** 0.5)
        yield min(1.0, max(0.0, LEVEL + DEVIATION * deviation))


if __name__ == "__main__":
    run(detectors)
