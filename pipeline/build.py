"""From a configuration to a pipeline that runs: the only family of files that constructs stages.

`build_models` loads, `build_stages` and `build_cache` make one target's stages, `build_learning` what learns,
`build_coach` what follows a completed prompt; here they become lanes of one loop.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

from pipeline.admission import make_admission
from pipeline.build_coach import Shelving, make_coach
from pipeline.build_learning import make_distills, piece_cost
from pipeline.build_models import Models
from pipeline.build_stages import Drafting, make_drafting
from pipeline.clock import Clock
from pipeline.config import Config
from pipeline.dealing import Dealing
from pipeline.lane_stages import Stages
from pipeline.loop import Lane, Loop
from pipeline.probe import make_probe
from pipeline.publish import Numbers
from pipeline.records import Recorder
from store.registry import Registry


def build_loop(
    config: Config, fleet: Sequence[Models], registry: Registry, run_folder: Path, notice: Callable[[str], None]
) -> Loop:
    """The whole loop over loaded models, one lane per target."""
    dealing = Dealing.of(config)
    drafting = _drafting(config, fleet, dealing, notice)
    distills = make_distills(config, fleet, [one.head for one in drafting], piece_cost(config, fleet))
    numbers, clock, lanes = Numbers(), Clock(perf_counter), {}
    for models, stages, distill in zip(fleet, drafting, distills, strict=True):
        probe = make_probe(config, models) if config.publish.enabled and config.publish.probe else dict
        shelving = Shelving(run_folder, registry, numbers, probe)
        lanes[models.name] = Lane(
            models.name,
            Stages(stages.decode, stages.translate, stages.verify),
            make_admission(config, models),
            make_recorder(config, models),
            make_coach(config, models, stages.head, stages.cache, distill, shelving),
            clock,
        )
    return Loop(lanes, dealing, config.batch, clock)


def make_recorder(config: Config, models: Models) -> Recorder:
    """Makes events of one target, with text or without."""
    words = models.target_words
    return Recorder(models.name, words.bytes_of, words.decode, text=config.log.text)


def _drafting(
    config: Config, fleet: Sequence[Models], dealing: Dealing, notice: Callable[[str], None]
) -> list[Drafting]:
    """Per target its stages. One that is swapped in goes on with the n-grams of a target of the same vocabulary."""
    made: list[Drafting] = []
    by_words: dict[str, Drafting] = {}
    for models in fleet:
        kin = None if models.name in dealing.first else by_words.get(models.pair.digest)
        made.append(make_drafting(config, models, notice, kin))
        by_words.setdefault(models.pair.digest, made[-1])
    return made
