"""Results of the benchmark: per arm the rounds, and a table."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchmarks.tables import Table
from benchmarks.vllm.arms import PLAIN
from benchmarks.vllm.engine import RoundResult

HEADS = (
    "arm",
    "tokens per pass",
    "tokens/s",
    "to plain",
    "drafted",
    "accepted",
    "p99 gap, ms",
    "proposer, ms",
    "of the pass",
    "equal texts",
)
NOT_MEASURED = "–"


@dataclass
class ArmRounds:
    """The timed rounds of an arm."""

    rounds: list[RoundResult] = field(default_factory=list)

    @property
    def tokens_per_pass(self) -> float:
        """Emitted tokens per request and pass."""
        return self._sum("emitted") / self._sum("passes")

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each round."""
        return [one.emitted / one.seconds for one in self.rounds]

    @property
    def slowest_gap(self) -> float:
        """The 99th percentile of the seconds between the tokens of a request."""
        gaps = sorted(gap for one in self.rounds for gap in one.gaps)
        return gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))] if gaps else 0.0

    @property
    def proposer_seconds(self) -> float:
        """Processor seconds of the proposer per pass of the engine."""
        return sum(one.proposing[0] for one in self.rounds) / self._sum("steps")

    @property
    def proposer_share(self) -> float:
        """The same relative to the rest of a pass."""
        rest = sum(one.seconds - one.proposing[1] for one in self.rounds) / self._sum("steps")
        return self.proposer_seconds / rest

    def count_equal(self, other: "ArmRounds") -> int:
        """Count the texts that equal those of another arm."""
        pairs = zip(self.rounds, other.rounds, strict=False)
        return sum(mine == its for one, of_other in pairs for mine, its in zip(one.texts, of_other.texts, strict=True))

    def median_ratio(self, other: "ArmRounds") -> float:
        """Return the median over rounds of the tokens per second relative to another arm's in the same round."""
        return median(mine / its for mine, its in zip(self.rates, other.rates, strict=False))

    def _sum(self, name: str) -> int:
        return sum(getattr(one, name) for one in self.rounds)


def make_row(name: str, arm: ArmRounds, plain: ArmRounds | None) -> list[str]:
    """Return the cells of an arm's row."""
    return [
        name,
        f"{arm.tokens_per_pass:.2f}",
        f"{median(arm.rates):.1f}",
        f"{arm.median_ratio(plain):.2f}" if plain else NOT_MEASURED,
        f"{sum(one.drafted for one in arm.rounds):,}",
        f"{sum(one.accepted for one in arm.rounds):,}",
        f"{1000 * arm.slowest_gap:.0f}",
        f"{1000 * arm.proposer_seconds:.2f}",
        f"{100 * arm.proposer_share:.1f}%",
        f"{arm.count_equal(plain)} of {sum(len(one.texts) for one in arm.rounds)}" if plain else NOT_MEASURED,
    ]


def make_table(batch: int, arms: Mapping[str, ArmRounds]) -> Table:
    """Return the table of a batch size."""
    plain = arms.get(PLAIN)
    rows = [make_row(name, arm, plain) for name, arm in arms.items() if arm.rounds]
    return Table(HEADS, rows, title=f"batch {batch}")


def make_json(batch: int, arms: Mapping[str, ArmRounds]) -> dict[str, Any]:
    """Return everything that was measured."""
    return {"batch": batch, "arms": {name: [asdict(one) for one in arm.rounds] for name, arm in arms.items()}}
