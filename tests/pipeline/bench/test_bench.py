"""`omnidraft bench`: the arms on the same prompts, and what the sentence says."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from replaying import Command, config_of
from tiny_pair import TinyPair

from pipeline.bench import comparison
from pipeline.bench.comparison import (
    SETTINGS,
    ArmComparison,
    ArmResult,
    BenchArm,
    Ratio,
    choose_prompts,
    make_arms,
    make_verdict,
    run_rounds,
    summarize,
)
from pipeline.config.settings import Config
from pipeline.loop import UnfitPromptError
from pipeline.run.rounds import Round
from store.errors import SourceError, UsageError
from store.events import PromptReceived, PromptRejected

SAME, FASTER, SLOWER = Ratio(1.0, 0.9, 1.1), Ratio(1.5, 1.4, 1.6), Ratio(0.8, 0.7, 0.9)


def prompt(offset: int) -> PromptReceived:
    return PromptReceived(offset, f"p{offset}", "sums", offset + 1, "text")


def make_comparison(memory: Ratio, every: Ratio, learned: Ratio, learning: Ratio) -> ArmComparison:
    ratios = [Ratio(0.5, 0.5, 0.5), Ratio(1.0, 1.0, 1.0), memory, every, learned]
    arms = {name: ArmResult(10, 1.0, 10.0, 1.0, ratio, 1.0) for name, ratio in zip(BenchArm, ratios, strict=True)}
    return ArmComparison(arms, learning, 8, 4, 0, Config(), {}, ())


@pytest.mark.parametrize(
    ("ratios", "sentence"),
    [
        ((FASTER, SAME, SAME, SAME), "Drafting is worth 1.50 times on these prompts (memory); learning nothing yet."),
        (
            (SAME, FASTER, replace(FASTER, median=1.6), Ratio(1.07, 1.02, 1.1)),
            "Drafting is worth 1.60 times on these prompts (all, learning); learning is worth 1.07 times more.",
        ),
        (
            (SLOWER, SLOWER, SLOWER, SAME),
            "Drafting does not pay on these prompts: 0.80 times plain decoding at best (memory); learning nothing yet.",
        ),
        (
            (SAME, SLOWER, SLOWER, SLOWER),
            "Drafting makes no clear difference on these prompts: 1.00 times plain decoding at best (memory); "
            "learning costs more than it gains so far (0.80 times).",
        ),
    ],
)
def test_the_sentence_follows_from_the_ratios(ratios: tuple[Ratio, Ratio, Ratio, Ratio], sentence: str):
    assert make_verdict(make_comparison(*ratios)) == sentence


@pytest.mark.parametrize(
    ("speeds", "faster", "slower"),
    [((1.5, 1.4, 1.6, 0.9), True, False), ((1.01, 1.01, 1.01), False, False), ((0.9, 0.8, 0.7), False, True)],
)
def test_a_difference_is_clear_in_three_of_four_rounds(speeds: Sequence[float], faster: bool, slower: bool):
    plain = [Round(((1,),), 1.0)] * len(speeds)
    ratio = Ratio.from_rounds([Round(((1,),), 1 / speed) for speed in speeds], plain)
    assert (ratio.is_faster, ratio.is_slower) == (faster, slower)


def test_results_are_medians_over_rounds_and_texts_are_compared_with_plain_decoding():
    plain = [Round(((1, 2), (3, 4)), 2.0), Round(((5,),), 1.0), Round(((6, 7),), 0.5)]
    other = [Round(((1, 2), (3, 9)), 1.0), Round(((5,),), 0.5), Round(((6, 7),), 0.5)]
    found = summarize({BenchArm.PLAIN: plain, "other": other}, greedy=True)["other"]
    assert (found.tokens, found.tokens_per_second, found.equal) == (7, 4.0, 0.75)
    assert (found.ratio.median, found.ratio.lower, found.ratio.upper) == (2.0, 1.5, 2.0)
    assert summarize({BenchArm.PLAIN: plain}, greedy=False)[BenchArm.PLAIN].equal is None


def test_prompts_that_do_not_fit_are_left_out():
    def admit(one: PromptReceived) -> None:
        if one.offset == 1:
            raise UnfitPromptError("too long")

    events = [prompt(0), prompt(1), PromptRejected("sums", 3, "no text"), *map(prompt, range(2, 9))]
    warm_up, timed, rejected = choose_prompts(events, admit, 1, 4)
    assert [[one.offset for one in part] for part in (warm_up, timed)] == [[0], [2, 3, 4, 5]]
    assert rejected == 2
    assert [len(part) for part in choose_prompts(map(prompt, range(9)), admit, 8, 8)[:2]] == [1, 7]
    with pytest.raises(SourceError, match=r"got 1 \(1 do not fit\)"):
        choose_prompts(events[:2], admit, 1, 4)


class CountingArm:
    """Raises Ctrl-C in its second round, if it shall."""

    def __init__(self, calls: list[tuple[str, int]], name: str, interrupted: bool = False) -> None:
        self._calls, self._name, self._interrupted = calls, name, interrupted

    def complete(self, prompts: Sequence[PromptReceived]) -> Round:
        if self._interrupted and prompts[0].offset:
            raise KeyboardInterrupt
        self._calls.append((self._name, prompts[0].offset))
        return Round(((1,),) * len(prompts), 1.0)

    def close(self) -> None:
        """Nothing is open."""


def test_arms_take_turns_and_ctrl_c_keeps_the_finished_rounds():
    calls: list[tuple[str, int]] = []
    chunks = [[prompt(0)], [prompt(1)]]
    run_rounds({name: CountingArm(calls, name) for name in "ab"}, chunks, lambda step: None)
    assert calls == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    arms = {"a": CountingArm([], "a"), "b": CountingArm([], "b", interrupted=True)}
    assert {name: len(own) for name, own in run_rounds(arms, chunks, lambda step: None).items()} == {"a": 1, "b": 1}


def test_all_arms_give_plain_greedy_text(tiny_pair: TinyPair, tmp_path: Path):
    config = config_of(tiny_pair, sampling__temperature=0.0, sampling__max_new_tokens=8)
    arms = make_arms(config, tmp_path, lambda step: None)
    assert list(arms.by_name) == list(BenchArm)
    prompts = [PromptReceived(n, f"p{n}", "sums", n + 1, f"Ann has {n} apples and") for n in range(3)]
    found = {name: arm.complete(prompts).tokens for name, arm in arms.by_name.items()}
    arms.close()
    assert len(set(found.values())) == 1
    assert {(tmp_path / f"{name}-run" / "log").is_dir() for name in SETTINGS} == {True}


def test_a_quantised_target_has_no_arm_of_transformers(tiny_pair: TinyPair, tmp_path: Path):
    compiled = {"targets": ("builtin:target-7m",), "drafter": "builtin:drafter-1.6m"}
    arms = make_arms(config_of(tiny_pair, weights="int8", **compiled), tmp_path, lambda step: None)
    assert BenchArm.TRANSFORMERS not in arms.by_name
    assert arms.left_out == ["transformers was left out: it has no weights in int8"]
    arms.close()


def test_the_command_prints_a_table_and_a_sentence(tiny_pair: TinyPair, omnidraft: Command):
    words = ["bench", tiny_pair.sums, *tiny_pair.options, "--limit", "4", "--rounds", "2", "--max-new-tokens", "6"]
    typed = omnidraft(*words, "--temperature", "0")
    assert typed.status == 0, typed.err
    assert all(name in typed.out for name in (*BenchArm, "tokens/forward", "4 prompts of "))
    assert " on these prompts" in " ".join(typed.out.split())  # lines are wrapped
    values = json.loads(omnidraft(*words, "--json").out)
    assert values["prompts"] == 4
    assert values["arms"]["plain"]["tokens_per_forward"] == 1
    assert values["verdict"].endswith(".")


def test_several_targets_are_refused(tiny_pair: TinyPair):
    config = config_of(tiny_pair).with_overrides({"targets": ("a", "b")})
    with pytest.raises(UsageError, match="must have one target, got a, b"):
        comparison.compare_arms(config, 2, 2, lambda step: None)


@pytest.mark.parametrize(("load", "notes"), [(None, 0), (1.5, 0), (7.0, 1)])
def test_a_busy_machine_is_named(load: float | None, notes: int):
    assert len(comparison._list_disturbances({"load": load, "cores": 2})) == notes
