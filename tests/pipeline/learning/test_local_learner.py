"""A learner in the loop's process counts the tokens of every completed prompt."""

from event_making import make_completed
from loop_doubles import StubDistill, StubDrift, StubDriftResponse, StubPublisher

from pipeline.learner_protocol import CompletedPrompt
from pipeline.learning.local_learner import LocalLearner
from stages.contract.blocks import TrainingExample


def test_rejected_tokens_of_every_prompt_are_counted():
    distill = StubDistill()
    parts = StubDrift({}), StubDriftResponse(distill), StubPublisher("big")
    learner = LocalLearner(distill, *parts)  # type: ignore[arg-type]
    for offset, (judged, accepted) in enumerate([(20, 15), (8, 8), (0, 0)]):
        example = TrainingExample(offset, "big", (1, 2, 3), (), (), ())  # of whose prompt no soft targets are recorded
        list(
            learner.on_prompt_completed(
                CompletedPrompt(make_completed(offset, judged=judged, accepted=accepted), example)
            )
        )
    list(learner.on_prompt_completed(CompletedPrompt(make_completed(3), None)))
    assert distill.counted == [(5, 25, 3), (0, 18, 3), (0, 10, 3)], "none of a prompt from which nothing may be learned"
