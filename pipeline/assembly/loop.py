"""From a configuration to a pipeline that runs: the only folder that constructs stages.

`models.py` loads, `admission.py` makes sequences of prompts, `stages.py` makes one target's stages, `training.py` what
learns, `learner.py` what follows a completed prompt; here they become runners of one loop.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

from pipeline.assembly.admission import Admission
from pipeline.assembly.learner import VersionSink, make_learner
from pipeline.assembly.models import Models
from pipeline.assembly.probe import make_probe
from pipeline.assembly.stages import Drafting, make_drafting
from pipeline.assembly.training import make_distillers, piece_cost
from pipeline.config.settings import Config
from pipeline.learner_protocol import Learner
from pipeline.learning.publisher import Numbers
from pipeline.loop import Clock, Loop, Stages, TargetRunner
from pipeline.recorder import Recorder
from stages.contract.blocks import SequenceState, Verdict
from stages.learn.training.probe import ProbeResult
from store.events import PromptReceived

LOG = logging.getLogger("omnidraft.models")


def build_loop(
    config: Config, targets: Sequence[Models], run_folder: Path, *, prompts: int = 0, level: int = logging.DEBUG
) -> Loop:
    """The whole loop over loaded models, one runner per target.

    Args:
        prompts: of the whole stream, as far as is known.
        level: of the lines on chat templates.
    """
    router, admissions = config.router, [Admission(config, models) for models in targets]
    drafting, by_vocabulary = list[Drafting](), dict[str, Drafting]()
    for models, admission in zip(targets, admissions, strict=True):
        if line := admission.describe():
            LOG.log(level, "%s", line, extra={"target": models.name})
        # A target that is swapped in shares the n-grams of one with the same vocabulary.
        shared_with = None if models.name in router.first else by_vocabulary.get(models.pair.digest)
        drafting.append(make_drafting(config, models, shared_with, preamble=admission.find_preamble()))
        by_vocabulary.setdefault(models.pair.digest, drafting[-1])
    heads, cost = [one.head for one in drafting], piece_cost(config.draft.costs, targets)
    distills = make_distillers(config, targets, heads, cost, prompts=prompts)
    numbers, clock, runners = Numbers(), Clock(perf_counter), {}
    for models, admission, stages, distill in zip(targets, admissions, drafting, distills, strict=True):
        probe = make_probe(config, models, stages.seconds) if config.publish.enabled else ProbeResult
        sink = VersionSink(run_folder, numbers, probe)
        learner = make_learner(config, models, stages.head, stages.cache, distill, sink, stages.decode.memory)
        runners[models.name] = make_runner(models, stages, admission.admit, learner, clock, text=config.log.text)
    return Loop(runners, router, config.batch, clock)


def make_runner(
    models: Models,
    stages: Drafting,
    prepare: Callable[[PromptReceived], SequenceState],
    learner: Learner,
    clock: Clock,
    on_verdicts: Callable[[list[Verdict]], None] | None = None,
    *,
    text: bool,
) -> TargetRunner:
    """Make the runner of one target; its events have text or none."""
    vocabulary = models.target_vocabulary
    recorder = Recorder(models.name, vocabulary.bytes_of, vocabulary.decode, text=text)
    of_block = Stages(stages.decode, stages.translate, stages.verify)
    return TargetRunner(models.name, of_block, prepare, recorder, learner, clock, on_verdicts)
