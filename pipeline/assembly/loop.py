"""From a configuration to a pipeline that runs: the only folder that constructs stages.

`models.py` loads, `admission.py` makes sequences of prompts, `stages.py` makes one target's stages, `training.py` what
learns, `learner.py` what follows a completed prompt; here they become runners of one loop.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from pipeline.assembly.admission import Admission
from pipeline.assembly.learner import VersionSink, make_learner
from pipeline.assembly.models import Models
from pipeline.assembly.probe import make_probe
from pipeline.assembly.stages import Drafting, make_drafting
from pipeline.assembly.training import make_distillers, piece_cost
from pipeline.config.settings import Config
from pipeline.learning.publisher import Numbers
from pipeline.loop import Clock, Loop, Stages, TargetRunner
from pipeline.recorder import Recorder
from stages.learn.training.probe import ProbeResult

LOG = logging.getLogger("omnidraft.models")


def build_loop(config: Config, targets: Sequence[Models], run_folder: Path, *, level: int = logging.DEBUG) -> Loop:
    """The whole loop over loaded models, one runner per target. `level`: of the lines on chat templates."""
    router, admissions = config.router, [Admission(config, models) for models in targets]
    drafting, by_vocabulary = list[Drafting](), dict[str, Drafting]()
    for models, admission in zip(targets, admissions, strict=True):
        if line := admission.describe():
            LOG.log(level, "%s", line, extra={"target": models.name})
        # A target that is swapped in shares the n-grams of one with the same vocabulary.
        shared_with = None if models.name in router.first else by_vocabulary.get(models.pair.digest)
        drafting.append(make_drafting(config, models, shared_with, preamble=admission.find_preamble()))
        by_vocabulary.setdefault(models.pair.digest, drafting[-1])
    distills = make_distillers(config, targets, [one.head for one in drafting], piece_cost(config.draft.costs, targets))
    numbers, clock, runners = Numbers(), Clock(perf_counter), {}
    for models, admission, stages, distill in zip(targets, admissions, drafting, distills, strict=True):
        probe = make_probe(config, models, stages.seconds) if config.publish.enabled else ProbeResult
        sink = VersionSink(run_folder, numbers, probe)
        runners[models.name] = TargetRunner(
            models.name,
            Stages(stages.decode, stages.translate, stages.verify),
            admission.admit,
            make_recorder(models, text=config.log.text),
            make_learner(config, models, stages.head, stages.cache, distill, sink, stages.decode.memory),
            clock,
        )
    return Loop(runners, router, config.batch, clock)


def make_recorder(models: Models, *, text: bool) -> Recorder:
    """Makes events of one target, with text or without."""
    vocabulary = models.target_vocabulary
    return Recorder(models.name, vocabulary.bytes_of, vocabulary.decode, text=text)
