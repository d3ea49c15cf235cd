"""A finished benchmark, as values and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline.bench_arms import OURS, Round
from pipeline.bench_figures import Figures, Spread, ratio_of, same_law
from pipeline.bench_limit import Costs


@dataclass(frozen=True)
class Memory:
    """Bytes.

    Attributes:
        peak: of the whole process, all arms together; None where the system does not tell.
        caches: of keys and values, by arm of ours; None where the forward passes do not tell.
    """

    peak: int | None
    caches: Mapping[str, int | None]


@dataclass(frozen=True)
class Report:
    """A benchmark at one batch: on what, of what, and the figures of every arm against the reference arm.

    Attributes:
        machine, settings: what the figures depend on.
        labels: of the arms of other engines.
        reference: the arm that others are compared with.
        figures, rounds: by arm.
        costs: of bare forward passes.
        memory: at the end of the run.
        refused: arms of other engines that do not run this pair of models, and what they say.
    """

    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    labels: Mapping[str, str]
    reference: str
    figures: Mapping[str, Figures]
    rounds: Mapping[str, Sequence[Round]]
    costs: Costs
    memory: Memory
    refused: Mapping[str, str] = field(default_factory=dict)

    def off_law(self) -> list[str]:
        """Arms that do not draw from the law that the reference draws from: their speed is that of another task."""
        law = self.figures[self.reference].nats_per_token
        return [name for name, found in self.figures.items() if not same_law(found.nats_per_token, law)]

    def ratios(self) -> dict[str, dict[str, Spread]]:
        """Of every arm of ours to every other arm, paired by round."""
        names = [name for name in self.rounds if name in OURS]
        return {
            name: {other: ratio_of(self.rounds[name], self.rounds[other]) for other in self.rounds if other != name}
            for name in names
        }

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values; of the rounds their numbers of tokens and seconds."""
        samples = {
            name: [{"tokens": list(map(len, one.tokens)), "seconds": one.seconds} for one in rounds]
            for name, rounds in self.rounds.items()
        }
        return {
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "reference": self.reference,
            "off_law": self.off_law(),
            "ratios": {
                name: {other: asdict(ratio) for other, ratio in ratios.items()}
                for name, ratios in self.ratios().items()
            },
            "costs": asdict(self.costs),
            "memory": asdict(self.memory),
            "refused": dict(self.refused),
            "labels": dict(self.labels),
            "arms": {name: asdict(found) | {"rounds": samples[name]} for name, found in self.figures.items()},
        }
