"""Training waits until the drafter is used enough for updates to pay."""

from dataclasses import replace
from random import Random

from stored_states import store

from stages.learn.training.betting import UsageTest
from stages.learn.training.interval import BreakEvenInterval
from stages.learn.training.update import Step

TOKENS, PIECES = 48, 240
STEP = Step(1.0, 10, 1000, 0.4, 0.45, 0.3, True, "")


def interval_of(**changes: float) -> BreakEvenInterval:
    """An update costs 4 x 2 x 240 x 2 x 0.01 = 38 target passes."""
    return BreakEvenInterval(**{"interval": 4, "steps": 2, "piece_cost": 0.01, "batch": 1} | changes)


def feed(interval: BreakEvenInterval, prompts: int, judged: int) -> None:
    for _ in range(prompts):
        interval.observe_prompt(judged, TOKENS, PIECES)


def test_a_drafter_that_is_hardly_used_is_rarely_trained():
    interval = interval_of()
    feed(interval, 24, 1)
    assert interval.interval == 256
    interval.observe_update(STEP, 24, 24)
    assert interval.interval == 256
    for wanted in (512, 1024):
        interval.observe_update(replace(STEP, served=False), 24, 24)
        assert interval.interval == wanted, "what gained nothing is tried half as often"


def test_a_drafter_that_drafts_everything_is_trained_as_before():
    interval, before = interval_of(), interval_of()
    for _ in range(100):
        feed(interval, 4, 30)
        for one in (interval, before):
            one.observe_update(STEP, 120, 4)
        assert interval.interval == before.interval


def test_training_resumes_when_the_share_grows():
    interval = interval_of()
    feed(interval, 100, 1)
    assert interval.interval == 256
    interval.restart()
    assert interval.interval == 256, "a drift is no reason while the drafter is hardly used"
    feed(interval, 12, 30)
    assert interval.interval == 4


def test_where_other_sources_draft_too_training_begins_with_evidence_of_use():
    for judged, intervals in ((2, [256] * 100), (40, [256] * 6 + [4] * 94)):
        interval = BreakEvenInterval(4, 2, piece_cost=0.01, batch=1, others_draft=True)
        found = []
        for _ in range(100):
            feed(interval, 1, judged)
            found.append(interval.interval)
            assert interval.is_exploring is (interval.interval > 64), "then some prompts are enough"
        assert found == intervals


def test_a_used_drafter_is_taken_for_unused_less_often_than_once_in_twenty():
    random, wrong = Random(3), 0
    for _ in range(300):
        test = UsageTest(rare=False)
        for _ in range(200):
            test.observe(round(TOKENS * random.betavariate(0.5, 1.5)), TOKENS, 0.25)  # a mean of .25
            if test.rare:
                wrong += 1
                break
    assert wrong < 15


def test_an_update_that_gains_nothing_must_be_hoped_for_by_more_rejected_tokens():
    """At 5 rejected tokens of 48 training begins after some prompts, and after each such update later."""
    interval = BreakEvenInterval(
        4,
        2,
        piece_cost=0.01,
        batch=1,
        others_draft=True,
    )
    waited = []
    for _ in range(5):
        prompts = 0
        while interval.interval == 256 and prompts < 3000:
            feed(interval, 1, 5)
            prompts += 1
        waited.append(prompts)
        interval.observe_update(replace(STEP, after=STEP.before), 20, 4)
        assert interval.interval == 256
        assert interval.is_exploring
    assert waited[0] < waited[2] < waited[-1] == 3000, waited


def test_an_exploration_takes_a_small_share_of_the_time():
    """An update reads 4 * 2 * 240 pieces twice. At .01 passes a piece that is 38.4 passes, a hundredth of those of 80
    prompts of 48 tokens; at .1 it is 384, of 800 prompts.
    """
    for piece_cost, due in ((0.01, 256), (0.1, 800)):
        interval = BreakEvenInterval(4, 2, piece_cost, batch=1, others_draft=True)
        prompts = 0
        while not interval.is_due(prompts):
            feed(interval, 1, 0)
            prompts += 1
        assert prompts == due
        interval.observe_update(STEP, 10, prompts)
        feed(interval, due - 1, 0)
        assert not interval.is_due(due - 1)


def test_a_restored_interval_continues_with_the_same_evidence():
    interval = interval_of()
    feed(interval, 10, 1)
    state = store(interval.state_dict())
    restored = interval_of()
    restored.load_state_dict(state)
    for one in (interval, restored):
        feed(one, 9, 1)
    assert restored.state_dict() == interval.state_dict()
